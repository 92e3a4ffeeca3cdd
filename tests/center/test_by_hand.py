"""`apply_gradients` of a center rule is the step that one writes by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from benchmarks import by_hand
from optx_sync.audit import hlo
from tests import contexts

RULES = [name for name, case in by_hand.CASES.items() if not case.replicated]
FLOATS = 64 * 64


def counts(make, case, dtype, workers):
    """Arrays of the parameters' size that are written, bytes held, bytes sent."""
    shape = jax.ShapeDtypeStruct((64, 64), dtype)
    params = {"first": shape, "second": shape}
    place = NamedSharding(by_hand.mesh_of(workers), P(by_hand.AXIS))
    batch = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct((workers, *p.shape), p.dtype, sharding=place),
        params,
    )

    def gradient(params, batch):
        return jax.tree.map(lambda p, b: p * b, params, batch)

    # optax.adam needs it for half precision.
    with jax.numpy_dtype_promotion("standard"):
        step = make(case, params, workers, gradient)
        compiled = step.program.lower(step.carry, batch)
        compiled = compiled.compile(contexts.AS_USERS_COMPILE)
    found = {}
    program, memory = hlo.program(compiled), by_hand.memory(compiled)
    for branch, when in enumerate(("quiet", "round")):
        written = [
            instruction.opcode
            for instruction in by_hand.written(program, branch)
            for array in instruction.arrays
            if jnp.prod(jnp.array(array.shape)) >= FLOATS
        ]
        for kind in ("fusion", "copy"):
            found[f"{kind}s of a {when} step"] = written.count(kind)
    rows = oxs.audit.collectives(compiled)
    found["sent always"] = sum(row.bytes for row in rows if not row.conditional)
    found["sent in a round"] = sum(row.bytes for row in rows if row.conditional)
    # In units of an array: the library holds three counters more, of four bytes each.
    found["temporaries"] = memory.temporary // FLOATS
    found["not aliased"] = (memory.arguments - memory.aliased) // FLOATS
    return found


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [*((rule, "float32") for rule in RULES), *((r, "bfloat16") for r in RULES[:2])],
)
def test_a_step_that_returns_parameters_is_the_one_written_by_hand(rule, dtype):
    workers = 2  # Eight give the same programs, and take twice as long to compile.
    case = by_hand.CASES[rule]
    wanted = counts(by_hand.by_hand, case, dtype, workers)
    got = counts(by_hand.direct, case, dtype, workers)
    assert {name: got[name] for name in got if got[name] > wanted[name]} == {}, wanted
    # The test sees what it is about: updates in place of parameters cost more.
    if (rule, dtype) == ("local_sgd", "float32"):
        update = counts(by_hand.with_library, case, dtype, workers)
        assert update["fusions of a quiet step"] > wanted["fusions of a quiet step"]


@pytest.mark.parametrize("meet", [None, True])
def test_sync_replicas_clears_its_sums_where_they_are(meet):
    case, workers = by_hand.CASES["sync_replicas"], 2
    known = {} if meet is None else {"meet": meet}
    apply = functools.partial(oxs.apply_gradients, **known)
    direct = functools.partial(by_hand.with_library, apply=apply)
    wanted = counts(by_hand.by_hand, case, "float32", workers)
    got = counts(direct, case, "float32", workers)
    assert got["temporaries"] <= wanted["temporaries"]
    # Of each of two sums: XLA takes it out of a conditional by a copy, and it is added
    # to and cleared.
    assert got["copys of a round step"] == (2 if meet is None else 0)
    assert got["fusions of a round step"] <= wanted["fusions of a round step"] + 4


@pytest.mark.parametrize("context", ["vmap", "shard_map", "shard_map_unchecked"])
def test_workers_that_initialise_by_themselves_start_equal(context):
    def init(key):
        tree = {
            "w": jax.random.normal(key, (3,)),
            "half": jax.random.normal(key, (2,), jnp.bfloat16),
            "flag": jax.random.bernoulli(key, 0.5, (4,)),
            "key": key,
        }
        found = oxs.by_hand.equal_start(tree, contexts.AXIS)
        return found | {"key": jax.random.key_data(found["key"])}

    keys = jax.random.split(jax.random.key(0), contexts.REPLICAS)
    first = jax.tree.map(lambda x: x[0], jax.vmap(init, axis_name=contexts.AXIS)(keys))
    np.testing.assert_array_equal(first["key"], jax.random.key_data(keys[0]))
    np.testing.assert_array_equal(first["w"], jax.random.normal(keys[0], (3,)))
    if context == "vmap":
        found = jax.vmap(init, axis_name=contexts.AXIS)(keys)
    else:
        found = jax.jit(
            jax.shard_map(
                lambda keys: jax.tree.map(lambda x: x[None], init(keys[0])),
                mesh=contexts.mesh(),
                in_specs=P(contexts.AXIS),
                out_specs=P(contexts.AXIS),
                check_vma=context == "shard_map",
            )
        )(keys)
    for name, x in found.items():
        for own in x:
            np.testing.assert_array_equal(own, first[name])

"""Laws of all that synchronises, each over the whole table `tests/transformations.py`.

What only one wrapper does is tested beside it; the optimizers' own laws are in
`tests/optimizers/test_laws.py`, and what exchanges lose in `tests/exchange/`.
"""

import functools
import inspect
import re
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from tests import scripts
from tests.meshes import mesh_of
from tests.transformations import AXIS, CENTERS, EXCHANGES, GRAPHS, N, made

# An inner optimizer that knows missing gradients, and keeps its dtypes.
ALL = made(oxs.optimizers.momentum(0.1, 0.9))
# Of all exchanges one: what they do with numbers is in tests/exchange/.
FEW = {name: tx for name, tx in ALL.items() if not name[-1].isdigit()}
PARAMS: Any = {
    "matrix": np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2),
    "scalar": np.float32(0.5),
    "half": np.ones(3, jnp.bfloat16),
    "empty": np.zeros((0, 3), np.float32),
    "unused": np.ones(2, np.float32),
}
# What is public and no wrapper: it works on arrays, or is in the table by another name.
OTHERS = {
    *("CenterRule", "IndexedSlices", "Workers", "exchange", "graphs", "value_and_grad"),
    *("audit", "by_hand", "elastic", "optimizers", "outer", "rules", "simulate"),
    "testing",
    "value_fn",  # tests/replicas/test_extra_args.py
    "clip_by_global_norm",  # It stands inside of the wrappers.
    "on_values",  # It takes what has no state.
    "stacked",  # It has no worker axis: it stands inside of plain `jax.jit`.
    *("apply_gradients", "averaged_params", "center_params", "fingerprint", "localize"),
    *("citation", "metrics", "reduce", "take"),
}


def test_nothing_public_is_missing():
    wrappers = {name.partition(",")[0] for name in ALL} - {"nested"}
    assert wrappers | OTHERS == set(oxs.__all__) and not wrappers & OTHERS
    own = inspect.getmembers(oxs.exchange, inspect.isfunction)
    # What else stands there is of `comm`, for an exchange of one's own.
    assert set(EXCHANGES) == {
        name for name, f in own if oxs.exchange.__name__ in f.__module__
    }
    functions = filter(inspect.isfunction, vars(oxs.graphs).values())
    own = {f.__name__ for f in functions if f.__module__ == oxs.graphs.__name__}
    assert set(GRAPHS) == {name for name in own if not name.startswith("_")}


def test_nothing_that_is_constructed_starts_the_backend():
    """So it may stand before `jax.distributed.initialize`."""
    scripts.run(
        """
import jax, optax
import optx_sync as oxs
from tests.cases import OPTIMIZERS
from tests.transformations import made

made()
made(optax.adam(optax.cosine_decay_schedule(0.1, 9)))
for case in OPTIMIZERS:
    case.make(), case.make(optax.cosine_decay_schedule(0.1, 9))
sgd = optax.sgd(0.1)
oxs.rules.agn(sgd), oxs.rules.diloco(), oxs.rules.local_sgd()
oxs.rules.elastic(moving_rate=0.1, rho=0.0)
rule = oxs.optimizers.LeafRule(lambda grad, slots, param, at: (-grad, slots))
oxs.optimizers.from_rule(rule, 0.1)
oxs.by_hand.map_workers(lambda x: x, "workers")
oxs.value_and_grad(lambda params: 0.0, axis_name="workers")
oxs.Workers(8, "workers", mesh=True), oxs.Workers(8, "workers")
oxs.on_values(optax.clip(1.0))
# JAX refuses this once it has looked for its devices.
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
""",
        XLA_FLAGS="",
    )


def types(tree):
    """Leaves by path: shape, dtype, and whether the dtype may still change."""
    return {
        jax.tree_util.keystr(path): (x.shape, x.dtype, x.weak_type)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def traced(tx, params, grads, **extra):
    """Types of the state of all workers before a step; of updates and it after."""
    axes = oxs.by_hand.state_axes(tx, params)
    state = jax.eval_shape(lambda: oxs.by_hand.replicate(tx.init(params), N, axes))

    def step(grads, state, params, extra):
        return tx.update(grads, state, params, **extra)

    mapped = jax.vmap(step, (0, axes, 0, 0), (0, axes), axis_name=AXIS)
    every = jax.eval_shape(lambda: oxs.by_hand.replicate((grads, params, extra), N))
    grads, params, extra = every
    return state, *jax.eval_shape(mapped, grads, state, params, extra)


def test_a_state_keeps_its_types():
    """So a second step does not compile again, and a loop may carry it.

    Whatever gradients are like: of another precision, of no elements, or not there.
    """
    grads = PARAMS | {
        "matrix": np.ones((4, 2), jnp.bfloat16),
        "half": np.ones(3, np.float32),
        "unused": None,
    }
    for name, tx in ALL.items():
        there = {"unused": np.zeros(2, np.float32)} if "power_sgd" in name else {}
        with jax.numpy_dtype_promotion("standard"):
            before, updates, after = traced(tx, PARAMS, grads | there)
        assert jax.tree.structure(after) == jax.tree.structure(before), name
        assert types(after) == types(before), name
        if name == "all_reduce_grads":  # The next link of a chain sees the None.
            updates = updates | {"unused": np.zeros((N, 2))}
        for leaf, param in PARAMS.items():
            assert updates[leaf].shape == (N, *np.shape(param)), (name, leaf)


# What sends in every step, or in one that is not asked to meet what came in the last
# one (`overlap`), and how collectives are called in what JAX has traced.
ALWAYS = ("cross_shard", "all_reduce_grads", "sync_replicas")
ALWAYS += ("diloco, later", "diloco, in_line", "diloco, streaming")
COLLECTIVES = r"\b(psum|pmax|pmin|ppermute|all_gather|all_to_all|reduce_scatter)\w*\["


def test_a_step_that_does_not_meet_sends_nothing():
    """Where JAX can refuse it at trace time (0.12) it does; nothing traced sends."""
    forbid = getattr(jax.sharding, "no_collectives", lambda axes: nullcontext())
    params, mesh = {"matrix": PARAMS["matrix"]}, mesh_of({AXIS: N})

    def sent(tx, meet):
        def step(grads, state, params):
            return oxs.apply_gradients(tx, grads, state, params, meet=meet)

        axes = oxs.by_hand.state_axes(tx, params)
        ways = {"in_axes": (0, axes, 0), "out_axes": (0, axes)}
        mapped = oxs.by_hand.map_workers(step, AXIS, mesh=mesh, **ways)
        every = jax.eval_shape(lambda: oxs.by_hand.replicate(params, N))
        state = jax.eval_shape(lambda: oxs.by_hand.replicate(tx.init(params), N, axes))
        return re.findall(COLLECTIVES, str(jax.make_jaxpr(mapped)(every, state, every)))

    for name, tx in FEW.items():
        if not name.startswith(ALWAYS):
            with forbid({AXIS}):
                assert not sent(tx, meet=False), name
    assert sent(ALL["local_sgd"], meet=True) == ["psum"]
    if hasattr(jax.sharding, "no_collectives"):
        forbidden = pytest.raises(Exception, match="forbidden by `no_collectives`")
        with forbid({AXIS}), forbidden:
            sent(ALL["local_sgd"], meet=True)


def test_a_state_is_made_of_placeholders_too():
    abstract = jax.eval_shape(lambda: PARAMS)
    for name, tx in ALL.items():
        state = jax.eval_shape(tx.init, PARAMS)
        found = tx.init(abstract)
        assert jax.tree.structure(found) == jax.tree.structure(state), name
        for one, other in zip(*map(jax.tree.leaves, (found, state)), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), name


# What a state holds of the parameters, or of their gradients.
HELD = re.compile(r"\.(center|accumulated|taken|sums|averages)\b.*\['")


@pytest.mark.parametrize(
    "dtype, held",
    [("bfloat16", "float32"), ("f8", "f8")],
)
def test_what_is_held_is_at_least_float32(dtype, held):
    """Also where JAX has double precision, and the counters remain."""
    params: Any = {name: np.ones((4, 2), jnp.dtype(dtype)) for name in "abcd"}
    seen = set()
    with jax.enable_x64(dtype == "f8"):
        for name, tx in FEW.items():
            before, updates, after = traced(tx, params, params)
            assert dtype != "f8" or {x.dtype.name for x in updates.values()} == {
                "float64"
            }, name
            assert types(after) == types(before), name
            for path, (_, found, _) in types(after).items():
                if match := HELD.search(path):
                    seen.add(match[1])
                    assert found == np.dtype(held), (name, path)
    assert {"center", "accumulated", "taken", "sums", "averages"} <= seen


def test_extra_arguments_reach_the_inner_one():
    """And one that takes none is not bothered with them."""
    seen: list[Any] = []

    def update(updates, state, params=None, **extra_args):
        del params
        seen.append(set(extra_args))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    params = {"a": np.ones(4, np.float32)}
    for name, tx in made(inner).items():
        if (
            name not in FEW or name == "cross_shard, pieces"
        ):  # It asks of the inner one what it does.
            continue
        seen.clear()
        traced(tx, params, params, value=np.float32(1), batch=np.int32(1))
        assert {"value", "batch"} <= seen[-1], name
    for name in CENTERS | {"cross_shard": 0, "sync_replicas": 0, "gossip": 0}:
        traced(ALL[name], params, params, unknown=np.float32(1))
    # A weight is for the mean gradient, and no other's business.
    for wrap in (
        oxs.cross_shard,
        functools.partial(oxs.sync_replicas, replicas_to_aggregate=3),
    ):
        traced(wrap(inner, AXIS), params, params, weight=np.float32(1))
        assert not seen[-1]


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": (
        {"a": np.ones(4, np.float32)},
        ValueError,
        "'b'.* is missing in the gradients",
    ),
    "unknown": (
        {name: np.ones(4, np.float32) for name in "abc"},
        ValueError,
        "'c'.* is missing in the parameters",
    ),
    "shape": (
        {"a": np.ones(4, np.float32), "b": np.ones(3, np.float32)},
        ValueError,
        r"'b'.* has shape \(3,\)",
    ),
    "integers": (
        {"a": np.ones(4, np.float32), "b": np.ones(4, np.int32)},
        TypeError,
        "'b'.* has dtype int32",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_gradients_that_do_not_fit_are_refused(kind):
    grads, error, message = REFUSED[kind]
    params = {name: np.ones(4, np.float32) for name in "ab"}
    for name, tx in ALL.items():
        if name == "all_reduce_grads":
            continue  # A link of a chain, of which the last one sees the parameters.
        try:
            traced(tx, params, grads)
        except error as refused:
            said = str(refused)
        else:
            said = "nothing"
        assert re.search(message, said), (name, said)


def test_an_axis_that_is_not_mapped_is_named():
    params = {name: np.ones(4, np.float32) for name in "abcd"}
    reduced = (
        oxs.cross_shard(optax.sgd(0.1), AXIS, grads=told)
        for told in ("summed", "averaged")
    )
    match = f"(?s)No mapped axis is named '{AXIS}' here.*`update`, must run inside"
    for tx in (*FEW.values(), *reduced):
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(tx.update, params, tx.init(params), params)

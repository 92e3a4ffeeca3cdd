"""Parts that meet in turn, also a step later: numbers, programs, refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from benchmarks import by_hand
from tests import contexts
from tests.reference import center as reference
from tests.refusals import all_refused

AXIS, STEPS = contexts.AXIS, 26
PARAMS = {
    "matrix": np.linspace(-2, 2, 12, dtype=np.float32).reshape(6, 2),
    "scalar": np.float32(0.5),
    "vector": np.linspace(-1, 1, 5, dtype=np.float32),
}
INNER, NUMPY_INNER = optax.sgd(0.05, momentum=0.9), reference.momentum(0.05, 0.9)
OUTERS = {
    "sgd": (optax.sgd(0.8), reference.momentum(0.8)),
    "nesterov": (
        optax.sgd(0.7, momentum=0.9, nesterov=True),
        reference.momentum(0.7, 0.9, nesterov=True),
    ),
}


def unequal(path, leaf):
    """Three parts: most rows of the matrix, what is in between, the vector and one."""
    name = path[-1].key
    return {"matrix": [0, 0, 1, 0, 0, 2], "scalar": 1, "vector": 2}[name]


# Which part each number belongs to; the leaves stand in alphabetical order.
OWNERS = {
    1: [0] * 18,
    3: [0] * 6 + [1] * 6 + [2] * 6,
    4: [0] * 4 + [1] * 4 + [2] * 5 + [3] * 5,
    unequal: [0] * 4 + [1] * 2 + [0] * 4 + [2] * 2 + [1] + [2] * 5,
    oxs.rules.strided(3): [0, 0, 1, 1, 2, 2] * 2 + [0] + [0, 1, 2, 0, 1],
}
# Worker 2 breaks in the middle of a period, 1 while a part is on its way, all of them
# in one of the next, 0 in the step of a round.
BROKEN = np.zeros((STEPS, contexts.REPLICAS), bool)
BROKEN[4, 2] = BROKEN[8, 1] = BROKEN[13] = BROKEN[17, 0] = True
DROPPED = [2, 2, 2, 1]
RULES = {
    "diloco": oxs.diloco,
    "agn": oxs.agn,
    "local_sgd": oxs.local_sgd,
    "elastic": functools.partial(oxs.elastic_average, moving_rate=0.2, rho=0.0),
}


def case(rule, fragments, period, overlap=False, outer="sgd", drop=False):
    """(transformation, arguments of the recurrence)."""
    both = {"overlap": overlap}
    options = {"communication_period": period, "fragments": fragments, **both}
    options |= {"drop_nonfinite": drop}
    arguments = {"rule": rule, "owner": OWNERS[fragments], "period": period, **both}
    arguments |= {"rate": 0.2, "outer": ()}
    arguments["broken"] = BROKEN if drop else None
    if rule in ("diloco", "agn"):
        options["outer"], arguments["outer"] = OUTERS[outer]
    return RULES[rule](INNER, AXIS, **options), arguments


# A number at the end of a name would be taken for that of a layer, by `strided`.
EVERYWHERE = {
    "general, ": case("diloco", unequal, 6, True, "nesterov", drop=True),
    "at once, ": case("elastic", 4, 8),
    "every step, ": case("agn", oxs.rules.strided(3), 3, True, "nesterov", drop=True),
}
OTHERS = {
    "whole, ": case("diloco", 1, 3, True, "nesterov", drop=True),
    "mixed, ": case("local_sgd", 3, 6),
    "rows, ": case("agn", unequal, 6, True),
    "rows in line, ": case("elastic", unequal, 3, True),
    "rows broken, ": case("elastic", 3, 6, True, drop=True),
    "shortest, ": case("local_sgd", 1, 2, True),
    "rows at once, ": case("diloco", unequal, 6, drop=True),
}


def gradients(workers, steps=STEPS):
    rng = np.random.default_rng(workers)
    return {
        name: rng.normal(size=(steps, workers, *np.shape(p))).astype(np.float32)
        for name, p in PARAMS.items()
    }


def flat(tree, ndim):
    """Trees of arrays [..., *shape] as [..., D]."""
    leaves = [np.asarray(tree[name]) for name in sorted(PARAMS)]
    return np.concatenate([x.reshape(*x.shape[:ndim], -1) for x in leaves], -1)


def breaks(grads):
    """The gradients with a NaN in one leaf of the broken workers."""
    matrix = grads["matrix"].copy()
    matrix[BROKEN, 1, 1] = np.nan
    return {**grads, "matrix": matrix}


def check(context, cases):
    """These cases in one transformation, so that each context compiles once."""
    tx = optax.partition(
        {name: one[0] for name, one in cases.items()}, {name: name for name in cases}
    )
    grads = gradients(contexts.REPLICAS)
    given = {
        name: grads if one[1]["broken"] is None else breaks(grads)
        for name, one in cases.items()
    }
    history, state = contexts.replay(context, tx, dict.fromkeys(cases, PARAMS), given)
    for name, (_, arguments) in cases.items():
        workers, centers = reference.in_fragments(
            x0=flat(PARAMS, 0), grads=flat(grads, 2), inner=NUMPY_INNER, **arguments
        )
        contexts.assert_close({name: flat(history[name], 2)}, {name: workers})
        own = state.inner_states[name].inner_state
        dropped = oxs.metrics(own).dropped
        expected = [0] * 4 if arguments["broken"] is None else DROPPED
        if name != "whole, ":  # It meets half as often.
            np.testing.assert_array_equal(dropped, expected)
        if context not in contexts.AXES_CONTEXTS:
            own = oxs.by_hand.first(own)
        center = flat(own.center[name], 0)[None]
        contexts.assert_close({name: center}, {name: centers[-1:]})


@pytest.mark.parametrize("context", contexts.DISTINCT)
def test_one_answer_everywhere(context):
    check(context, EVERYWHERE)


def test_the_other_rules_in_one_context():
    check("vmap_axes", OTHERS)


MATRICES = {name: jnp.ones((64, 64)) for name in "abcd"}
WHOLE = 4 * 64 * 64 * len(MATRICES)


@functools.cache
def program(**options):
    """(rows of the audit, temporary bytes) of a step on two devices."""
    tx = oxs.diloco(optax.sgd(0.1), AXIS, **options)
    step, params, state = contexts.started(
        tx, MATRICES, 2, mesh=contexts.mesh(2), donate=True
    )
    compiled = step.lower(params, state, params).compile()
    return oxs.audit.collectives(compiled), by_hand.memory(compiled).temporary


@pytest.mark.parametrize(
    ("fragments", "number", "period", "overlap"),
    [
        (4, 4, 8, False),
        (oxs.rules.strided(4), 4, 8, True),
        (4, 4, 4, True),
        (3, 3, 3, True),  # of unequal size
    ],
)
def test_an_exchange_sends_a_part_and_a_quiet_step_nothing(
    fragments, number, period, overlap
):
    rows, temporary = program(
        fragments=fragments, communication_period=period, overlap=overlap
    )
    part = WHOLE / number + 4 * 64  # a row more at most
    assert {row.kind for row in rows} == {"all-reduce"}
    sent = [row.bytes for row in rows if row.bytes > 4]  # that of a weight aside
    assert max(sent) <= part + 4
    assert all(row.conditional for row in rows) and WHOLE <= sum(sent) < WHOLE + 64
    _, at_once = program(communication_period=4)
    # What brings a part, and the part itself where it is some rows of leaves.
    assert temporary <= at_once + 2 * part + 4096


class Stream:
    """Two parts of two workers, each summed in the step after the one that is due."""

    def __init__(self, period, coded, params):
        """Compile the step."""
        parts: Any = {"communication_period": period, "fragments": 2, "overlap": True}
        parts |= {"drop_nonfinite": True, "measure": True}
        fed = oxs.exchange.error_feedback(coded)
        tx = oxs.diloco(oxs.optimizers.adam(0.05), AXIS, exchange=fed, **parts)
        self.params = params
        self.step, *begin = contexts.started(tx, params, 2)
        self.begin: Any = tuple(begin)

    def run(self, carry, steps, broken=()) -> Any:
        """The carry after these steps; (step, worker) whose gradient is NaN."""
        for number in steps:
            rng = np.random.default_rng(number)
            grads = {
                name: rng.normal(size=(2, *p.shape)).astype(np.float32)
                for name, p in self.params.items()
            }
            for at, worker in broken:
                if at == number:
                    grads["second"][worker, 0] = np.nan
            carry = self.step(*carry, grads)
        return carry


@pytest.fixture(scope="module")
def stream():
    params = {"first": jnp.linspace(-1, 1, 6), "second": jnp.ones((3, 2))}
    return Stream(6, oxs.exchange.quantized(bits=4, block=4), params)


def test_an_exchange_remembers_what_it_lost_of_each_part(stream):
    found, carry = [], stream.begin
    for begin, end in ((0, 4), (4, 7), (7, 10)):  # each lands in its last step
        carry = stream.run(carry, range(begin, end))
        found.append([memory.error for memory in carry[1].exchange])
    after, then, last = jax.tree.map(np.asarray, found)
    assert np.any(after[0]["first"]) and not np.any(after[1]["second"])
    np.testing.assert_array_equal(then[0]["first"], after[0]["first"])
    assert np.any(then[1]["second"]) and np.any(last[0]["first"] != then[0]["first"])


def test_a_worker_that_breaks_while_a_part_is_on_its_way_comes_back_whole(stream):
    before = stream.run(stream.begin, range(3))
    carry = stream.run(before, [3], broken=[(3, 1)])
    # What it contributed before it broke has landed.
    center = carry[1].center["first"]
    assert np.any(center != before[1].center["first"]) and np.isfinite(center).all()
    carry = stream.run(carry, [4, 5])
    assert list(carry[1].broken) == [False, True]
    params, state = carry = stream.run(carry, [6])
    metrics = oxs.metrics(state, params)
    assert list(metrics.dropped) == [0, 1]
    # It has the whole center, and the other one has left that of the first part.
    assert metrics.distance[1] == 0 < metrics.distance[0]
    assert list(state.inner.update_count) == [7, 0]
    assert metrics.last_fragment == 1
    np.testing.assert_array_equal(metrics.fragment_ages, [4, 1])
    carry = stream.run(carry, range(7, 12))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(carry))
    assert list(oxs.metrics(carry[1]).dropped) == [0, 1]


def test_fragments_of_one_are_the_rule_itself():
    texts = []
    for more in ({}, {"fragments": 1, "overlap": False}):
        tx = oxs.diloco(INNER, AXIS, communication_period=3, **more)
        step, params, state = contexts.started(tx, MATRICES, 2)
        texts.append(step.lower(params, state, params).as_text())
    assert texts[0] == texts[1]


def test_a_worker_in_half_precision_lands_on_the_center():
    tx = oxs.local_sgd(
        optax.sgd(0.125), AXIS, communication_period=2, fragments=2, overlap=True
    )
    params = {"a": jnp.ones((4, 2), jnp.bfloat16), "b": jnp.ones(8, jnp.bfloat16)}
    rng = np.random.default_rng(0)
    grads = {
        name: rng.normal(size=(4, 3, *x.shape)).astype(jnp.bfloat16)
        for name, x in params.items()
    }
    history, state = contexts.replay("vmap_axes", tx, params, grads)
    center: Any = oxs.center_params(state, oxs.by_hand.replicate(params, 3))
    # The first part landed in step 2 and 4; that of the second is on its way.
    assert center["a"].dtype == jnp.bfloat16
    own, center = history["a"][-1], contexts._numpy(center["a"])
    np.testing.assert_array_equal(own, np.broadcast_to(center, own.shape))
    assert np.any(history["b"][-1] != contexts._numpy(state.center["b"]))


def test_the_caller_may_say_when_a_part_meets():
    """`meet` in place of the counter: as often, and early."""
    grads = jax.tree.map(lambda x: x[0], gradients(2, 1))
    tx, _ = case("diloco", 3, 6, True)
    made = {meet: contexts.started(tx, PARAMS, 2, meet=meet) for meet in (True, False)}

    def run(says):
        carry = made[True][1:]
        for meet in says:
            carry = made[meet][0](*carry, grads)
        return carry

    counted = run([oxs.by_hand.due(tx, number) for number in range(6)])
    assert oxs.by_hand.due(tx, 1) and not oxs.by_hand.due(tx, 2)
    assert counted[1].global_step == 3
    early = run([True] * 3 + [False] * 3)
    assert early[1].global_step == 3
    np.testing.assert_array_equal(early[1].ages, [5, 4, 3])
    # Each landed in the step after.
    moved = jax.tree.map(lambda c, p: np.any(c != p), early[1].center, PARAMS)
    assert all(jax.tree.leaves(moved))


def test_the_periods_of_a_schedule_are_of_two_steps_or_more():
    """One of which is lost."""
    found = {}
    for least in (1, 2):
        tx = made(lambda step, least=least: jnp.where(step < 4, least, 3), overlap=True)
        found[least] = contexts.replay("vmap_axes", tx, PARAMS, gradients(2, 8))
        due = [oxs.by_hand.due(tx, step) for step in range(7)]
        assert due == [False, True, False, True, False, False, True]
    same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    same(*found.values())
    assert found[1][1].global_step == 3


def test_what_of_an_outer_state_belongs_to_a_part_is_placed_as_its_parameter():
    def rows(path, leaf):
        return 0 if leaf.ndim == 1 else [0, 1, 0, 1]

    params = {"table": jnp.zeros((4, 6)), "bias": jnp.zeros(6)}
    specs = {"table": P("row", "column"), "bias": P("column")}
    # Some of a parameter's rows lie as it does but for the rows.
    for fragments in (rows, oxs.rules.strided(2)):
        tx = oxs.diloco(INNER, AXIS, fragments=fragments, overlap=True)
        got = oxs.by_hand.state_specs(tx, params, specs, AXIS)
        assert got.outer[0][0].trace["table"] == P(None, "column")
        assert got.center == specs
        assert got.ages == P() == got.waits and got.weight == P(AXIS)
        axes = oxs.by_hand.state_axes(tx, params)
        assert axes.weight == 0 and axes.ages is None is axes.waits


LAYERS = {
    "list": ({"layers": [0, 0, 0, 0]}, [0, 1, 2, 0]),
    "names": ({"block_3": {"kernel": 0}, "block_4": 0}, [0, 1]),
    "dots": ({"layers.4.mlp.0.weight": 0, "layers.5.weight": 0}, [1, 2]),
    "slashes": ({"model": {"block_4/fc_0/bias": 0, "block_5/bias": 0}}, [1, 2]),
    "tuples": ({("layers", 4, "fc_0"): 0, ("layers", 5, "fc_0"): 0}, [1, 2]),
    "no layers": ({"conv2d.weight": 0, "head/x2a": 0}, None),
}


@pytest.mark.parametrize("names", LAYERS)
def test_strided_reads_the_number_of_a_layer(names):
    tree, parts = LAYERS[names]
    params = jax.tree.map(lambda _: np.zeros(4), tree)
    part_of: Any = oxs.rules.strided(3)
    found = jax.tree.leaves(jax.tree_util.tree_map_with_path(part_of, params))
    if parts is None:
        parts = [[0, 1, 2, 0]] * len(found)
    np.testing.assert_array_equal(found, parts)


@pytest.mark.parametrize(("period", "overlap"), [(6, False), (3, True)])
def test_a_worker_of_weight_0_is_in_no_sum_of_a_part(period, overlap):
    tx, _ = case("diloco", 3, period, overlap, "nesterov", drop=True)
    grads, weights = gradients(4), np.full((STEPS, 4), 512.0, np.float32)
    plain, _ = contexts.replay("vmap_axes", tx, PARAMS, grads)
    same, _ = contexts.replay("vmap_axes", tx, PARAMS, grads, {"weight": weights})
    jax.tree.map(np.testing.assert_array_equal, same, plain)
    others, _ = contexts.replay(
        "vmap_axes", tx, PARAMS, jax.tree.map(lambda g: g[:, :3], grads)
    )
    weights[:, 3] = 0.0
    found, _ = contexts.replay("vmap_axes", tx, PARAMS, grads, {"weight": weights})
    contexts.assert_close(jax.tree.map(lambda x: x[:, :3], found), others)


def made(period=10, params=None, **more):
    tx = oxs.local_sgd(INNER, AXIS, communication_period=period, **more)
    return tx if params is None else tx.init(params)


def parts(fragments):
    return made(40, PARAMS, fragments=fragments)


def step_of(tx, made_by: Any = None, **extra):
    made_by, params = made_by or tx, {"a": jnp.ones(4), "b": jnp.ones(4)}
    params, state, axes = contexts.begun(made_by, params, 2)

    def one(params, state):
        return oxs.apply_gradients(tx, params, state, params, **extra)

    jax.eval_shape(jax.vmap(one, (0, axes), axis_name=AXIS), params, state)


LATER = oxs.agn(INNER, AXIS, communication_period=2, fragments=2, overlap=True)
HALVES, LAYERED = (
    oxs.agn(INNER, AXIS, communication_period=4, fragments=fragments)
    for fragments in (2, oxs.rules.strided(2))
)


test_refused = all_refused(globals())(r"""
made(fragments=0)  # ValueError: 1 or more
oxs.rules.strided(-1)  # ValueError: 1 or more
made(fragments=2.0)  # TypeError: oxs.rules.strided
made(fragments=True)  # TypeError: or a function
made(fragments=3)  # ValueError: not a multiple of the 3
made(1, overlap=True)  # ValueError: would never learn
made(lambda step: 4, fragments=2)  # ValueError: schedule, which fragments cannot
made(overlap=True, inner_state="average")  # ValueError: inner_state
made(fragments=2, inner_state="reset")  # ValueError: inner_state
parts(40)  # ValueError: nothing is in number
parts(lambda path, leaf: 1)  # ValueError: nothing is in number 0
parts(lambda path, leaf: -1)  # ValueError: numbered from 0
parts(lambda path, leaf: [0, 1])  # ValueError: one for each of its rows
parts(lambda path, leaf: 0.5)  # TypeError: must return an int
parts(lambda path, leaf: min(leaf.ndim, 2))  # ValueError: not a multiple
step_of(LATER, value=jnp.float32(0))  # ValueError: an optimizer of its own
step_of(HALVES, LAYERED)  # ValueError: is not one of this transformation
oxs.diloco(oxs.local_sgd(INNER, "data"), "pods", fragments=2)
    # ValueError: around another center rule
oxs.by_hand.due(oxs.local_sgd(INNER, AXIS, fragments=unequal), 3)
    # TypeError: pass the period itself
""")


def test_a_rule_is_told_the_steps_since_its_part_has_met():
    """Two parts of a period of four: the first meets after two, then every four."""
    rule = oxs.CenterRule(
        lambda own, center, at: jnp.full_like(own.params, at.steps),
        mean_over="pushed",
        reads=("params",),
    )
    tx = oxs.center_variable(
        optax.sgd(0.0), rule, AXIS, communication_period=4, fragments=2
    )
    params = {"first": jnp.zeros(2), "second": jnp.zeros(2)}
    workers = oxs.Workers(2, AXIS)

    @workers.step(state=2)
    def step(params, state):
        return oxs.apply_gradients(tx, params, state, params)

    state = workers.start((params, tx.init(params)))
    for _ in range(8):
        state = step(*state)
    center = workers.center(state)
    assert {name: x.tolist() for name, x in center.items()} == {
        "first": [6.0, 6.0],
        "second": [8.0, 8.0],
    }

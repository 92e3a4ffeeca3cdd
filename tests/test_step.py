"""`apply_gradients`, `meet=` and `due`: a step that returns parameters."""

import copy
import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optx_sync as oxs
from benchmarks import by_hand
from optx_sync.audit import hlo
from tests import contexts
from tests.meshes import mesh_of

AXIS, WORKERS, PERIOD, STEPS = "workers", 4, 3, 10
PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32), "b": np.float32(0.3)}
INNER = optax.sgd(0.1, momentum=0.9)
RULES: dict[str, Any] = {
    "elastic": lambda p: oxs.elastic_average(
        INNER, AXIS, learning_rate=0.1, communication_period=p
    ),
    "agn": lambda p: oxs.agn(INNER, AXIS, communication_period=p),
    "local_sgd": lambda p: oxs.local_sgd(INNER, AXIS, communication_period=p),
    "diloco": lambda p: oxs.diloco(INNER, AXIS, communication_period=p),
}


def grads_of(step):
    """Gradients [WORKERS, ...] that differ between workers and steps."""
    key = jax.random.fold_in(jax.random.key(0), step)
    return jax.tree.map(
        lambda p: jax.random.normal(key, (WORKERS, *jnp.shape(p))), PARAMS
    )


def start(tx):
    return contexts.begun(tx, PARAMS, WORKERS, AXIS)


def mapped(tx, axes, meet=None, apply=oxs.apply_gradients):
    def step(params, state, grads):
        return apply(tx, grads, state, params, meet=meet)

    return jax.vmap(step, (0, axes, 0), (0, axes), axis_name=AXIS)


def by_update(tx, grads, state, params, **extra):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("rule", ["elastic", "diloco"])
def test_the_host_may_decide_when_workers_meet(rule):
    """The counter, `due` on the host, a traced bool and `update` give one run."""
    tx = RULES[rule](PERIOD)
    params, state, axes = start(tx)
    by_counter = jax.jit(mapped(tx, axes))
    by_host = {m: jax.jit(mapped(tx, axes, meet=m)) for m in (False, True)}

    def traced(params, state, grads, meet):
        return mapped(tx, axes, meet=meet)(params, state, grads)

    run_traced, run_update = jax.jit(traced), jax.jit(mapped(tx, axes, apply=by_update))
    runs = {
        "counter": lambda carry, step: by_counter(*carry, grads_of(step)),
        "host": lambda carry, step: by_host[oxs.by_hand.due(tx, step)](
            *carry, grads_of(step)
        ),
        "traced": lambda carry, step: run_traced(
            *carry, grads_of(step), jnp.bool_(oxs.by_hand.due(PERIOD, step))
        ),
        "update": lambda carry, step: run_update(*carry, grads_of(step)),
    }
    last = {}
    for name, run in runs.items():
        carry = params, state
        for step in range(STEPS):
            carry = run(carry, step)
        last[name] = carry
    assert int(last["host"][1].global_step) == STEPS // PERIOD
    for name in ("host", "traced", "update"):
        chex.assert_trees_all_close(last[name], last["counter"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["elastic", "diloco"])
def test_two_programs_one_without_a_collective_one_without_a_conditional(rule):
    tx = RULES[rule](PERIOD)
    workers = oxs.Workers(WORKERS, AXIS, mesh=mesh_of({AXIS: WORKERS}))

    @functools.partial(workers.step, state=2, split=False, donate=False)
    def step(params, state, grads, meet):
        return oxs.apply_gradients(tx, grads, state, params, meet=meet)

    *begin, axes = start(tx)
    state, found = workers.start((PARAMS, tx.init(PARAMS))), {}
    for meet in (False, True):
        of_all = jax.make_jaxpr(mapped(tx, axes, meet=meet))
        assert "cond[" not in str(of_all(*begin, grads_of(0)))
        lowered = step.lower(*state, grads_of(0), meet=meet)
        compiled = lowered.compile(contexts.AS_USERS_COMPILE)
        opcodes = {i.opcode for i in by_hand.written(hlo.program(compiled))}
        rows = oxs.audit.collectives(compiled)
        found[meet] = "conditional" in opcodes, [(r.kind, r.conditional) for r in rows]
    assert found == {False: (False, []), True: (False, [("all-reduce", False)])}


@pytest.mark.parametrize("rule", ["agn", "local_sgd", "diloco"])
def test_a_worker_that_takes_the_center_lands_on_it_to_the_bit(rule):
    """In float32 too, over many rounds in one scan."""
    tx = RULES[rule](2)
    params, state, axes = start(tx)
    step = mapped(tx, axes)

    def run(params, state):
        def body(carry, number):
            params, state = step(*carry, grads_of(number))
            pairs = zip(*map(jax.tree.leaves, (params, state.center)), strict=True)
            apart = [jnp.any(p != c[None]) for p, c in pairs]
            return (params, state), jnp.any(jnp.array(apart))

        return jax.lax.scan(body, (params, state), jnp.arange(200))[1]

    apart = jax.jit(run)(params, state)
    assert not np.any(apart[1::2])  # after a round
    assert np.all(apart[0::2])  # between two


def test_apply_gradients_of_any_transformation():
    tx = optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.5))
    state = tx.init(PARAMS)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    got, _ = oxs.apply_gradients(tx, grads, state, PARAMS, value=1.0)
    updates, _ = tx.update(grads, state, PARAMS)
    chex.assert_trees_all_equal(got, optax.apply_updates(PARAMS, updates))


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda tx: jax.tree.map(lambda leaf: leaf, tx)]
)
def test_a_copied_wrapper_is_the_same_as_one_of_optax(copied):
    tx = oxs.local_sgd(optax.sgd(0.1), None, communication_period=2)
    other = copied(tx)
    assert other.update is tx.update and oxs.by_hand.due(other, 1)
    chex.assert_trees_all_equal(other.init(PARAMS), tx.init(PARAMS))


def test_who_wraps_the_update_of_a_wrapper_is_not_passed_over():
    tx = oxs.local_sgd(optax.sgd(1.0), None, communication_period=1)

    @functools.wraps(tx.update)
    def still(*args, **kwargs):
        updates, state = tx.update(*args, **kwargs)
        return jax.tree.map(jnp.zeros_like, updates), state

    mine = optax.GradientTransformationExtraArgs(tx.init, still)
    new, _ = oxs.apply_gradients(mine, PARAMS, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(new, PARAMS)


@pytest.mark.parametrize("tx", [optax.sgd(0.1), oxs.local_sgd(optax.sgd(0.1), None)])
def test_a_step_needs_the_parameters(tx):
    for params in ([], [jnp.ones(2)]):
        with pytest.raises(ValueError, match="got params=None"):
            oxs.apply_gradients(tx, params, tx.init(params), None)


def test_sync_replicas_where_the_host_knows_that_all_contribute():
    tx = oxs.sync_replicas(INNER, AXIS, WORKERS)
    params, state, axes = start(tx)
    known = jax.jit(mapped(tx, axes, meet=True))(params, state, grads_of(0))
    asked = jax.jit(mapped(tx, axes))(params, state, grads_of(0))
    chex.assert_trees_all_close(known, asked, rtol=1e-6)
    waits = jax.jit(mapped(tx, axes, meet=False))(params, state, grads_of(0))
    chex.assert_trees_all_equal(waits[0], params)
    assert int(waits[1].accumulated) == WORKERS


def test_due():
    assert [step for step in range(9) if oxs.by_hand.due(4, step)] == [3, 7]
    # Every step in a warm-up of four, then every third; read where a period begins.
    schedule = optax.join_schedules(
        [optax.constant_schedule(1), optax.constant_schedule(3)], [4]
    )
    met = [step for step in range(14) if oxs.by_hand.due(schedule, step)]
    assert met == [0, 1, 2, 3, 6, 9, 12]
    tx = oxs.local_sgd(INNER, AXIS, communication_period=schedule)
    assert [step for step in range(14) if oxs.by_hand.due(tx, step)] == met
    with pytest.raises(TypeError, match=r"due needs .*inside optax.chain"):
        oxs.by_hand.due(optax.chain(tx, optax.identity()), 3)


@pytest.mark.parametrize(
    ("period", "first"),
    [
        (lambda _: jnp.float32(2.5), [2, 5, 8]),
        (lambda step: 4 * (1 + step / 30), [3, 8, 14]),
        (lambda step: 3 + step / 70 / 0.9, [2, 6, 10]),
    ],
)
def test_due_of_a_fraction(period, first):
    """A period of 2.5 steps ends with the third, on the host as in `update`."""
    tx: Any = oxs.local_sgd(INNER, None, communication_period=period)

    def step(state, _):
        _, state = tx.update(jnp.ones(2), state, jnp.ones(2))
        return state, state.steps_since_round == 0

    _, met = jax.jit(lambda: jax.lax.scan(step, tx.init(jnp.ones(2)), length=700))()
    expected = [step for step in range(700) if oxs.by_hand.due(tx, step)]
    assert np.flatnonzero(met).tolist() == expected and expected[:3] == first


@dataclasses.dataclass  # which takes the hash away
class Growing:
    """A period of as many steps as it is told, and one more after each."""

    first: int

    def __call__(self, step):
        return self.first + (step > 0)


@pytest.mark.parametrize(("first", "met"), [(2, [1, 4, 7]), (3, [2, 6])] * 2)
def test_due_of_a_schedule_without_a_hash(first, met):
    schedule = Growing(first)
    assert [step for step in range(9) if oxs.by_hand.due(schedule, step)] == met


@pytest.mark.parametrize("length", [np.nan, jnp.nan, np.ones(1), None])
def test_due_refuses_a_period_that_is_no_number(length):
    def schedule(step):
        return 2 if step < 2 else length

    assert [oxs.by_hand.due(schedule, step) for step in range(2)] == [False, True]
    with pytest.raises(ValueError, match=r"gave .* begins in step 2"):
        oxs.by_hand.due(schedule, 2)


def test_wide_updates_are_added_before_the_sum_is_rounded():
    """257.003 lies nearer to 258; in bfloat16 1.003 would be 1, and 256 + 1 be 256."""
    params, grads = jnp.bfloat16(256.0), jnp.float32(-1.003)
    for tx in (optax.scale(-1.0), oxs.local_sgd(optax.scale(-1.0), None)):
        moved, _ = oxs.apply_gradients(tx, grads, tx.init(params), params)
        assert moved.dtype == jnp.bfloat16 and float(moved) == 258.0

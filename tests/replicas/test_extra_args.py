"""What the inner optimizer is told besides the gradient is equal on all replicas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests import contexts
from tests.refusals import all_refused

AXIS, N = contexts.AXIS, contexts.REPLICAS
PARAMS = jnp.zeros(2)
VALUES = jnp.array([1.0, 2.0, 3.0, 6.0])


def by_value():
    """An optimizer whose update is its extra argument `value`."""

    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(lambda u: jnp.full_like(u, value), updates), state

    checked: Any = update  # Its type has no required keyword.
    return optax.GradientTransformationExtraArgs(lambda params: (), checked)


def seen(tx, **extra):
    """What each replica's inner optimizer saw."""

    def update(gradient, extra):
        return tx.update(gradient, tx.init(PARAMS), PARAMS, **extra)[0]

    run = jax.jit(jax.vmap(update, axis_name=AXIS))
    return run(jnp.ones((N, 2)), extra)[:, 0].tolist()


BROKEN = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
FIRST_AND_THIRD = jnp.array([1, 0, 1, 0])


PAIRS, BY_VALUE, THREE = [[0, 2], [1, 3]], by_value(), [3.0] * N
SHARD = oxs.cross_shard(BY_VALUE, AXIS)
SUM = oxs.cross_shard(BY_VALUE, AXIS, reduction="sum")
GROUPS = oxs.cross_shard(BY_VALUE, AXIS, group_assignment=PAIRS)
OWN_SHARD = oxs.cross_shard(BY_VALUE, AXIS, reduce_extra_args=())
OWN_SYNC = oxs.sync_replicas(BY_VALUE, AXIS, N, reduce_extra_args=())
FOUR, TWO = (oxs.sync_replicas(BY_VALUE, AXIS, number) for number in (N, 2))
NOBODY: Any = {"weight": jnp.zeros(N)}
WEIGHT = {"weight": jnp.array([3.0, 0.0, 0.0, 2.0])}
TWO_BROKEN: Any = {"weight": FIRST_AND_THIRD, "value": BROKEN}
TWO_COUNT: Any = {"contributes": FIRST_AND_THIRD == 1, "value": BROKEN}


@pytest.mark.parametrize(
    ("tx", "extra", "expected"),
    [
        (SHARD, {}, THREE),
        (SUM, {}, THREE),
        (SHARD, WEIGHT, THREE),
        (SHARD, TWO_BROKEN, [2.0] * N),
        (GROUPS, {}, [2.0, 4.0, 2.0, 4.0]),
        (OWN_SHARD, {}, VALUES.tolist()),
        (FOUR, {}, THREE),
        (TWO, TWO_COUNT, [2.0] * N),
        (TWO, WEIGHT, THREE),
        (OWN_SYNC, {}, VALUES.tolist()),
        (SHARD, NOBODY, [np.nan] * N),
        (GROUPS, {"weight": FIRST_AND_THIRD}, [2.0, np.nan] * 2),
    ],
)
def test_value_is_the_mean_of_what_counts(tx, extra, expected):
    found = seen(tx, **{"value": VALUES, **extra})
    np.testing.assert_array_equal(found, expected)


def test_where_no_gradient_counts_in_the_last_step_its_value_is_none():
    tx = oxs.sync_replicas(BY_VALUE, AXIS, 2 * N)

    def steps(gradient, value):
        first = tx.update(gradient, tx.init(PARAMS), PARAMS, value=value)[1]
        more: Any = {"weight": jnp.zeros(()), "value": value, "meet": True}
        return tx.update(gradient, first, PARAMS, **more)[0]

    found = jax.jit(jax.vmap(steps, axis_name=AXIS))(jnp.ones((N, 2)), VALUES)
    assert np.isnan(found).all()


def test_a_plateau_does_not_begin_where_nobody_counts():
    """A value of 0, once, would stay the best one for ever."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    tx = oxs.cross_shard(optax.chain(optax.sgd(1.0), plateau), AXIS)

    def steps(weights):
        def step(state, now):
            weight, value = now
            more = {"weight": weight, "value": value}
            return tx.update(PARAMS, state, PARAMS, **more)[1], ()

        values = 1.0 / jnp.arange(1.0, 1 + len(weights))
        state = oxs.localize(tx.init(PARAMS), AXIS)
        return jax.lax.scan(step, state, (weights, values))[0]

    weights = jnp.ones((N, 12)).at[:, 3].set(0)
    with jax.numpy_dtype_promotion("standard"):
        state: Any = jax.jit(jax.vmap(steps, axis_name=AXIS))(weights)
    assert state[1].scale.tolist() == [1.0] * N


def on_mesh(*cases):
    """What the first replica sees in a checked shard_map, for (tx, extra) in one.

    The extra arguments are functions of the replica's own value.
    """

    def local(x):
        grads = oxs.localize(jnp.ones(2), AXIS)

        def update(tx, extra):
            made = {name: make(x[0]) for name, make in extra.items()}
            return tx.update(grads, tx.init(PARAMS), PARAMS, **made)[0][0]

        return [update(tx, extra) for tx, extra in cases]

    run = jax.shard_map(local, mesh=contexts.mesh(), in_specs=P(AXIS), out_specs=P())
    return [float(x) for x in jax.jit(run)(VALUES)]


def own(value):
    return value


def mean(value):
    return oxs.reduce(value, AXIS)


def test_what_types_tell():
    """What is known to be equal is left alone, what is known to differ is refused."""
    reduced = [
        {"value": own},
        {"value": mean},
        {"value": lambda value: 3.0},
        {"value": mean, "loss": mean},
    ]
    makers = (oxs.cross_shard(by_value(), AXIS), oxs.sync_replicas(by_value(), AXIS, N))
    cases = [(tx, extra) for tx in makers for extra in reduced]
    # A chain hands its extra arguments to each link by itself.
    link = optax.chain(oxs.all_reduce_grads(AXIS), by_value())
    assert on_mesh(*cases, (link, {"value": mean})) == [3.0] * 9
    for tx in makers:
        with pytest.raises(
            ValueError, match=r"'loss' varies.*oxs.reduce\(loss, 'data'"
        ):
            on_mesh((tx, {"value": mean, "loss": own}))
    with pytest.raises(ValueError, match=r"'value' varies.*oxs.reduce\(value"):
        on_mesh((link, {"value": own}))


test_names_that_are_none = all_refused(globals())(r"""
oxs.cross_shard(BY_VALUE, AXIS, reduce_extra_args="value")
oxs.cross_shard(BY_VALUE, AXIS, reduce_extra_args=("value", 1))
oxs.cross_shard(BY_VALUE, AXIS, reduce_extra_args=None)
oxs.sync_replicas(BY_VALUE, AXIS, 2, reduce_extra_args="value")
    # TypeError: tuple of names.*got
""")


def test_the_center_s_own_step_gets_the_workers_mean():
    """`agn` makes a step of `inner` at the center; each worker's is its own."""
    tx = oxs.agn(by_value(), AXIS, communication_period=2)

    def steps(value):
        updates: Any = PARAMS
        state = tx.init(PARAMS)
        for _ in range(2):
            updates, state = tx.update(jnp.ones(2), state, PARAMS, value=value)
        return updates[0]

    found = jax.jit(jax.vmap(steps, axis_name=AXIS))(VALUES)
    assert found.tolist() == [3.0] * N
    for value in (jnp.ones((N, 2)), jnp.ones(N, jnp.int32)):
        with pytest.raises(ValueError, match=r"'value'.*no floating scalar.*outer="):
            seen(tx, value=value)
    own = oxs.agn(by_value(), AXIS, outer=optax.sgd(1.0), communication_period=1)
    assert seen(own, value=jnp.ones((N, 2))) == [-1.0] * N


def test_a_broken_worker_s_value_does_not_reach_the_center():
    tx: Any = oxs.agn(by_value(), AXIS, communication_period=1, drop_nonfinite=True)
    assert seen(tx, value=BROKEN) == [2.0] * N
    assert np.isnan(BROKEN[1])


def rosenbrock(params, x):
    return jnp.mean((params["a"] - x) ** 2 + (params["b"] - params["a"] ** 2) ** 2)


@pytest.mark.parametrize(
    "context",
    ["vmap", "shard_map", "shard_map_unchecked"],
)
def test_a_line_search_takes_the_steps_of_one_device(context):
    data = jnp.asarray(np.random.default_rng(0).normal(size=(N, 5)), jnp.float32)
    start = {"a": jnp.float32(3.0), "b": jnp.float32(-2.0)}
    lbfgs = optax.lbfgs()

    def alone(params):
        loss: Any = lambda params: rosenbrock(params, data)  # noqa: E731
        state = lbfgs.init(params)
        for _ in range(6):
            value, grad = jax.value_and_grad(loss)(params)
            more = {"value": value, "grad": grad, "value_fn": loss}
            updates, state = lbfgs.update(grad, state, params, **more)
            params = optax.apply_updates(params, updates)
        return params

    tx = oxs.cross_shard(lbfgs, AXIS)

    def each(params, x):
        state = tx.init(params)
        for _ in range(6):
            loss: Any = lambda params: rosenbrock(params, x)  # noqa: E731
            own = oxs.localize(params, AXIS)
            value, grad = jax.value_and_grad(loss)(own)
            more = {"value": value, "grad": grad, "value_fn": oxs.value_fn(loss, AXIS)}
            updates, state = tx.update(grad, state, params, **more)
            params = optax.apply_updates(params, updates)
        return params

    if context == "vmap":
        run = jax.vmap(each, in_axes=(None, 0), axis_name=AXIS)
    else:
        one = lambda params, x: each(params, x[0])  # noqa: E731
        run = jax.shard_map(
            one,
            mesh=contexts.mesh(),
            in_specs=(P(), P(AXIS)),
            out_specs=P(),
            check_vma=context == "shard_map",
        )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found, expected = jax.jit(run)(start, data), jax.jit(alone)(start)
    for name, x in expected.items():
        of_all = np.broadcast_to(x, found[name].shape)
        np.testing.assert_allclose(found[name], of_all, rtol=1e-4)


def with_extra(tx=SHARD, **extra):
    return seen(tx, value=VALUES, **extra)


def told_equal(**extra):
    names = tuple(extra)
    by: Any = oxs.cross_shard(BY_VALUE, AXIS, equal_extra_args=names)

    def update(gradient, value):
        return by.update(gradient, by.init(PARAMS), PARAMS, value=value, **extra)[0]

    return jax.vmap(update, axis_name=AXIS)(jnp.ones((N, 2)), VALUES)


def test_what_is_said_to_be_equal_passes():
    assert told_equal(value_of=rosenbrock, table=jnp.ones(3)).shape == (N, 2)


def bare_function(tx):
    def update(gradient):
        more: Any = {"value": 1.0, "value_fn": rosenbrock}
        return tx.update(gradient, tx.init(PARAMS), PARAMS, **more)

    return jax.vmap(update, axis_name=AXIS)(jnp.ones((N, 2)))


test_functions_and_arrays_of_ones_own_are_refused = all_refused(globals())(r"""
bare_function(SHARD)
bare_function(FOUR)
    # ValueError: 'value_fn' is a function.*oxs.value_fn\(value_fn, 'data'\).*equal_ext
with_extra(table=jnp.ones((N, 3)))
with_extra(tx=FOUR, table=jnp.ones((N, 3)))
    # ValueError: 'table' has an array of shape \(3,\).*equal_extra_args=\('table',\)
oxs.cross_shard(BY_VALUE, AXIS, equal_extra_args="value_fn")  # TypeError: equal_extra
oxs.value_fn(3, AXIS)  # TypeError: loss must be
""")

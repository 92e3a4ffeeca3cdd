"""sync_replicas: which gradients count, what they become, and what it communicates."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand, sync_replicas
from tests import contexts
from tests.reference import sync_replicas as reference
from tests.refusals import all_refused

AXIS, N = contexts.AXIS, contexts.REPLICAS
STEPS, ROWS, RATE, DECAY = 24, 5, 0.1, 0.9
# As many replicas as are required, backup replicas, several batches.
REQUIRED = {"equal": 4, "backup": 3, "several": 6}
PARAMS: Any = {
    "scalar": np.float32(0.5),
    "matrix": np.linspace(-2, 2, 6, dtype=np.float32).reshape(3, 2),
    "fixed": np.array([1, 2], np.float32),  # its gradient is None
}
# Row-sparse gradients and weights in one of the cases, for the compiler's sake.
TABLE = np.linspace(-1, 1, 2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
WITH_ROWS = PARAMS | {"table": TABLE}
PARAMS_OF = {"equal": PARAMS, "backup": PARAMS, "several": WITH_ROWS}
AVERAGED = ("matrix", "table")


def average_decay(step):
    """The original's, with `num_updates=global_step`."""
    return jnp.minimum(0.6, (1 + step) / (10 + step))


@functools.cache
def faults():
    """contributes, lag (in updates; negative: ahead), finite and weights, each [T, N].

    The last ones are all there, so that the tokens run out too.
    """
    rng = np.random.default_rng(0)
    contributes = rng.random((STEPS, N)) < 0.75
    lag = rng.choice([-1, 0, 0, 0, 0, 1, 3], (STEPS, N)).astype(np.int32)
    finite = rng.random((STEPS, N)) < 0.85
    weights = rng.choice([0, 0.5, 1, 30, 1000], (STEPS, N)).astype(np.float32)
    contributes[5], lag[6], finite[7] = False, 2, False
    contributes[-8:], lag[-8:], finite[-8:] = True, 0, True
    weights[-8:] = np.maximum(weights[-8:], 0.5)
    return contributes, lag, finite, weights


@functools.cache
def gradients(name) -> Any:
    """Gradients [T, N, ...] that are spoilt where they must leave no trace."""
    rng = np.random.default_rng(0)
    contributes, lag, finite, weights = faults()
    absent = ~contributes | (weights == 0) if name == "several" else ~contributes
    shapes = {"scalar": (), "matrix": (3, 2), "values": (3, 2)}
    grads = {
        leaf: rng.normal(size=(STEPS, N, *shape)).astype(np.float32)
        for leaf, shape in shapes.items()
    }
    for leaf in grads:
        grads[leaf][absent | ((lag > 0) & (leaf == "matrix"))] = np.nan
    # One leaf alone is not finite: all leaves of that replica are left out.
    grads["matrix"][~finite, 0, 0] = np.inf
    # Duplicates, and rows out of range, which are dropped.
    return grads, rng.integers(-1, ROWS + 1, (STEPS, N, 3)).astype(np.int32)


def by_lag(tx, name):
    """The extra argument `lag`, how old a gradient is, in place of `gradient_step`."""

    def update(updates, state, params=None, *, lag=0, weight=None, contributes=True):
        extra = {"weight": weight} if name == "several" else {}
        extra |= {"gradient_step": state.global_step - lag, "contributes": contributes}
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def averaged(params):
    return jax.tree_util.tree_map_with_path(
        lambda at, _: at[-1].key in AVERAGED, params
    )


@functools.cache
def inputs():
    """All of REQUIRED in one transformation, so that each context compiles once."""
    links, grads = [], {}
    for name, required in REQUIRED.items():
        inner, number = oxs.optimizers.momentum(RATE, DECAY), np.int64(N)
        options: Any = {"total_num_replicas": number, "drop_nonfinite": True}
        ema: Any = {
            "variable_averages": average_decay,
            "variables_to_average": averaged,
        }
        tx = sync_replicas(inner, AXIS, required, **options, **ema)
        links.append(optax.masked(by_lag(tx, name), {x: x == name for x in REQUIRED}))
        drawn, indices = gradients(name)
        grads[name] = {x: drawn[x] for x in ("scalar", "matrix")} | {"fixed": None}
        if name == "several":
            rows = jax.vmap(jax.vmap(oxs.IndexedSlices))(indices, drawn["values"])
            grads[name]["table"] = rows
    contributes, lag, _, weights = faults()
    extra = {"contributes": contributes, "lag": lag, "weight": weights}
    return optax.chain(*links), PARAMS_OF, grads, extra


def process_cases():
    """For `tests/two_processes.py`, between which rows travel as plain arrays."""
    tx, params, grads, extra = inputs()

    def with_table(tree, table):
        return tree | {"several": tree["several"] | {"table": table}}

    def update(updates: Any, state, params=None, **extra):
        rows = oxs.IndexedSlices(**updates["several"]["table"])
        return tx.update(with_table(updates, rows), state, params, **extra)

    rows = grads["several"]["table"]
    plain = with_table(grads, {"indices": rows.indices, "values": rows.values})
    plainly = optax.GradientTransformationExtraArgs(tx.init, update)
    return {"sync_replicas": (plainly, params, plain, extra)}


@functools.cache
def expected(name):
    """Parameters and averages [T, ...], outcome [T, N] and steps [T]."""
    (grads, indices), params = gradients(name), PARAMS_OF[name]
    contributes, lag, finite, weights = faults()
    weights = weights if name == "several" else np.ones_like(weights)
    outcome, complete, steps = reference.decide(
        REQUIRED[name], contributes & (weights > 0), lag, finite
    )
    how = (outcome == 0, weights, complete, RATE, DECAY)
    history = {"fixed": np.broadcast_to(PARAMS["fixed"], (STEPS, 2))}
    for leaf in ("scalar", "matrix"):
        history[leaf] = reference.momentum(params[leaf], grads[leaf], *how)
    if name == "several":
        values = grads["values"]
        history["table"] = reference.momentum_rows(TABLE, indices, values, *how)
    averages = dict(history)
    for leaf in set(params) & set(AVERAGED):
        averages[leaf] = reference.moving_average(
            params[leaf], history[leaf], complete, steps, average_decay
        )
    return history, averages, outcome, steps


def on_all(tree):
    return jax.tree.map(lambda x: np.stack([x] * N, 1), tree)


def replicated(tx, params, grads, extra):
    """Parameters and inner state are equal on all replicas of a mesh, in and out."""
    axes = by_hand.state_axes(tx, params, replicated=True)
    ways = {"in_axes": (None, axes, 0, 0), "out_axes": (None, axes)}
    run = by_hand.map_workers(contexts.steps(tx), AXIS, mesh=contexts.mesh(), **ways)
    state = by_hand.replicate(tx.init(params), N, axes)
    history, state = jax.jit(run)(params, state, *contexts.by_replica((grads, extra)))
    return on_all(history), state


@pytest.mark.parametrize("context", ["vmap", "shard_map_axes", "replicated", "islands"])
def test_one_answer_everywhere(context):
    if context == "replicated":
        every, states = replicated(*inputs())
    else:
        every, states = contexts.replay(context, *inputs())
    for name, history in every.items():
        want, averages, outcome, steps = expected(name)
        assert 0 < steps[-1] < STEPS, "the case has steps with and without an update"
        contexts.assert_close(history, on_all(want))
        for leaf in jax.tree.leaves(history):  # to the bit
            assert np.array_equal(leaf, on_all(leaf[:, 0]))
        state = states[list(REQUIRED).index(name)].inner_state
        assert np.all(state.global_step == steps[-1])
        metrics = oxs.metrics(state)
        for place, which in enumerate(reference.OUTCOMES):
            now = outcome == place
            np.testing.assert_array_equal(getattr(metrics.counts, which), now.sum(0))
            np.testing.assert_array_equal(getattr(metrics, which), now[-1])
        last: Any = dict.fromkeys(REQUIRED, optax.MaskedNode())
        last[name] = jax.tree.map(lambda x: jnp.asarray(x[-1]), history)
        for leaf, x in oxs.averaged_params(state, last)[name].items():
            contexts.assert_close(x, np.broadcast_to(averages[leaf][-1], x.shape))


def test_replicated_state_has_an_axis_where_it_is_a_replicas_own():
    params = {"w": jnp.zeros(3)}
    tx = optax.chain(optax.trace(0.9), sync_replicas(optax.adam(0.1), AXIS, 2))
    trace, own = by_hand.state_axes(tx, params, replicated=True)
    shared = (trace, own.inner, own.averages, own.global_step, own.accumulated)
    assert not jax.tree.leaves(shared)
    assert set(jax.tree.leaves((own.accumulator, own.info.outcome))) == {0}
    plain = oxs.cross_shard(optax.adam(0.1), AXIS)
    assert not jax.tree.leaves(by_hand.state_axes(plain, params, replicated=True))
    specs = by_hand.state_specs(plain, params, P("fsdp"), AXIS, replicated=True)
    assert set(jax.tree.leaves(specs)) == {P(), P("fsdp")}


def test_an_inner_state_that_forgets_where_it_varies():
    """A stacked state varies over the axis; the mean gradient put into it does not."""
    remember = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )
    tx = sync_replicas(remember, AXIS, 2)
    grads = np.arange(2.0 * N, dtype=np.float32).reshape(2, N)
    _, state = contexts.replay("shard_map_axes", tx, jnp.float32(0), grads)
    assert state.inner.tolist() == [grads[1].mean()] * N


def lanes(tx, params, replicas=N) -> Any:
    """Steps of all replicas on one device: (updates of the first, state) of each."""
    axes = by_hand.state_axes(tx, params)
    start = by_hand.replicate(tx.init(params), replicas, axes)

    def one(state, grads, extra):
        return tx.update(grads, state, params, **extra)

    run = jax.jit(jax.vmap(one, (axes, 0, 0), (0, axes), axis_name=AXIS))

    def step(grads, state=start, **extra):
        updates, state = run(state, grads, extra)
        return jax.tree.map(lambda x: x[0], updates), state

    return step


def marking():
    """An inner transformation that no compiler can hide: it permutes its gradients."""
    ring = [(i, (i + 1) % N) for i in range(N)]

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: jax.lax.ppermute(g, AXIS, ring), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_quiet_step_sends_flags_only(sharded):
    """And each device of a worker that is sharded its own shards when it is due."""
    params = {"w": np.zeros((6, 4), np.float32), "b": np.zeros(2, np.float32)}
    tx = sync_replicas(marking(), AXIS, 6, variable_averages=0.9, drop_nonfinite=True)
    over, specs = contexts.mesh(), None
    if sharded:
        over, specs = contexts.island_mesh(), {"w": P(None, "inside"), "b": P()}
    step, params, state = contexts.started(tx, params, mesh=over, specs=specs)
    rows = oxs.audit.collectives(step, params, state, params)
    always = [row for row in rows if not row.conditional]
    assert {row.kind for row in always} == {"all-reduce"}
    assert sum(row.bytes for row in always) == 4 * N
    due = [row for row in rows if row.conditional]
    assert {row.kind for row in due} == {"all-reduce", "collective-permute"}
    reduced = sum(row.bytes for row in due if row.kind == "all-reduce")
    assert reduced == 4 * (6 * 4 // (1 + sharded) + 2)


def test_nothing_changes_where_nobody_is_left():
    params = {"w": jnp.array([-0.0, 1e-30, 3.0]), "s": jnp.float32(-0.0)}
    tx = sync_replicas(
        oxs.optimizers.adam(0.1), AXIS, 1, variable_averages=0.5, drop_nonfinite=True
    )
    before = tx.init(params)
    grads = jax.tree.map(lambda p: jnp.full((N, *p.shape), jnp.nan), params)
    updates, state = lanes(tx, params)(grads)
    found = optax.apply_updates(params, updates), state.inner, state.averages
    wanted = params, before.inner, before.averages
    for new, old in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.all(
            np.asarray(new).view(np.uint32) == np.asarray(old).view(np.uint32)
        )
    assert int(state.global_step) == 0 and np.all(oxs.metrics(state).nonfinite)


def test_without_dropping_a_nan_passes_once_and_is_gone():
    step = lanes(sync_replicas(optax.identity(), AXIS, 2), jnp.float32(0), 2)
    updates, state = step(jnp.array([jnp.nan, 1.0]))
    assert np.isnan(updates)
    assert float(step(jnp.array([1.0, 3.0]), state)[0]) == 2.0


def weighed(tx, grads, weight=None, params: Any = None):
    """The updates [T, N, ...], dense, for gradients and weights [T, N, ...]."""
    params = jnp.zeros(grads.shape[2:], grads.dtype) if params is None else params

    def body(grads, weights):
        def step(state, now):
            updates, state = tx.update(now[0], state, params, weight=now[1])
            return state, optax.apply_updates(params, updates)

        return jax.lax.scan(step, tx.init(params), (grads, weights))[1]

    return jax.jit(jax.vmap(body, 1, 1, axis_name=AXIS))(grads, weight)


@pytest.mark.parametrize("exchange", [None, oxs.exchange.clipped("median")])
def test_equal_weights_are_none(exchange):
    """To the bit, several batches for an update included, and rows."""
    inner = oxs.optimizers.gradient_descent(0.1)
    tx = sync_replicas(inner, AXIS, 2 * N - 1, exchange=exchange)
    params: Any = jnp.zeros((ROWS, 3))
    grads: Any = np.random.default_rng(4).normal(size=(5, N, ROWS, 3)).astype("f4")
    if exchange is None:
        params, dense = {"table": params, "w": params}, grads
        indices = np.broadcast_to(np.int32([0, 2]), (5, N, 2))
        rows = jax.vmap(jax.vmap(oxs.IndexedSlices))(indices, dense[:, :, :2])
        grads = {"table": rows, "w": dense}
    plain = weighed(tx, grads, None, params)
    for weight in (1, 0.1, 3, 1021):
        found = weighed(tx, grads, np.full((5, N), weight, np.float32), params)
        jax.tree.map(np.testing.assert_array_equal, found, plain)


def test_a_weight_may_be_a_bool_and_must_be_finite():
    tx = sync_replicas(optax.sgd(1.0), AXIS, 3, drop_nonfinite=True)
    step, grads = lanes(tx, jnp.zeros(2)), jnp.arange(2.0 * N).reshape(N, 2)
    there = jnp.array([True, False, True, True])
    updates, state = step(grads.at[1].set(jnp.nan), weight=there)
    np.testing.assert_allclose(updates, [-10 / 3, -13 / 3], rtol=1e-6)
    assert np.array_equal(oxs.metrics(state).not_contributed, ~there)
    _, state = step(grads, weight=jnp.array([1, jnp.inf, 2, jnp.nan]))
    assert oxs.metrics(state).nonfinite.tolist() == [False, True, False, True]
    # A sum of weights that overflows gives no mean of 0.
    step = lanes(sync_replicas(optax.sgd(1.0), AXIS, 2 * N), jnp.zeros(2))
    _, state = step(grads, weight=jnp.full(N, 1.0))
    updates, _ = step(1e-3 * grads, state, weight=jnp.full(N, 2e38))
    assert not np.isfinite(updates).any()


@pytest.mark.parametrize(
    ("options", "dtype", "largest", "close"),
    [
        ({"exchange": oxs.exchange.clipped(1e9)}, "f4", 9, 1e-5),
        ({"accumulator_dtype": jnp.float16}, "f4", 60_000, 1e-3),  # would overflow
        ({}, jnp.bfloat16, 9, 2**-8),  # its sums are wider
        ({}, "f8", 9, 1e-13),
    ],
)
def test_the_mean_of_several_batches_is_weighted(options, dtype, largest, close):
    rng = np.random.default_rng(3)
    with jax.enable_x64(dtype == "f8"):
        grads = (256 * rng.random((2, N, 3))).astype(dtype)
        weights = (largest * rng.random((2, N))).astype("f8" if dtype == "f8" else "f4")
        tx = sync_replicas(optax.identity(), AXIS, 2 * N, **options)
        updates = weighed(tx, grads, weights)
    assert updates.dtype == dtype
    every = grads.reshape(-1, 3).astype(float)
    right = np.average(every, 0, weights.reshape(-1).astype(float))
    np.testing.assert_allclose(np.asarray(updates[1], float), [right] * N, close)


@pytest.mark.parametrize("exchange", [None, oxs.exchange.median()])
def test_meeting_with_nothing_accumulated_is_no_update(exchange):
    """The mean of no gradients was NaN, and so were parameters, trace and averages."""
    options: Any = {"variable_averages": 0.9, "exchange": exchange}
    inner = optax.sgd(1.0, momentum=0.9)
    tx: Any = sync_replicas(inner, AXIS, 2, drop_nonfinite=True, **options)
    params = jnp.ones(2)

    def two_steps(traced, grads):
        _, before = tx.update(grads, tx.init(params), params, meet=True)
        nobody = {"contributes": jnp.bool_(False)}
        weightless = {"weight": jnp.bool_(False)}
        return before, [
            tx.update(grads * jnp.nan, before, params, meet=meet, **extra)
            for meet in (True, traced)
            for extra in ({}, nobody, weightless)
        ]

    run = jax.jit(jax.vmap(two_steps, (None, 0), axis_name=AXIS))
    before, cases = run(jnp.bool_(True), jnp.ones((N, 2)))
    for updates, after in cases:
        np.testing.assert_array_equal(updates, 0)
        assert after.global_step.tolist() == [1] * N
        same = after._replace(info=before.info)
        jax.tree.map(np.testing.assert_array_equal, same, before)


def rows_of(indices, values):
    """Row-sparse gradients [N, k] of all replicas."""
    return jax.vmap(oxs.IndexedSlices)(jnp.asarray(indices), jnp.asarray(values))


def test_rows_that_inner_sees():
    seen = []

    def update(updates, state, params=None):
        seen.append({name: grad.values.shape[0] for name, grad in updates.items()})
        return updates, state

    spy: Any = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    params = {"long": jnp.zeros((100, 2)), "short": jnp.zeros((5, 2))}
    indices = np.arange(N * 3).reshape(N, 3) % 5
    # A row behind the end of a table does not count in the next one.
    behind = np.concatenate([indices, np.full((N, 1), 100)], axis=1)
    grads = {
        name: rows_of(rows, np.ones((*rows.shape, 2), np.float32))
        for name, rows in (("long", behind), ("short", indices))
    }
    updates, _ = lanes(sync_replicas(spy, AXIS, 3), params)(grads)
    assert seen[0] == {"long": 4 * N, "short": 5}  # at most (R + N - 1) k
    for name, param in params.items():
        moved = np.asarray(optax.apply_updates(param, updates[name]))
        np.testing.assert_array_equal(moved[:5], 1)  # each row's own mean
        np.testing.assert_array_equal(moved[5:], 0)


def test_rows_without_room_wait_for_the_next_update():
    """A batch with fewer rows completes what one with more rows began."""
    table: Any = jnp.zeros((9, 1))
    step = lanes(sync_replicas(optax.identity(), AXIS, 2), table, 1)
    many = rows_of([[1, 3, 5, 7]], np.ones((1, 4, 1), np.float32))
    few = rows_of([[8]], np.full((1, 1, 1), 2, np.float32))
    updates, state = step(few, step(many)[1])
    table = optax.apply_updates(table, updates)
    assert table[:, 0].tolist() == [0, 1, 0, 1, 0, 0, 0, 0, 0]
    updates, state = step(many, step(few, state)[1])
    table = optax.apply_updates(table, updates)
    # Rows 5 and 7 hold two gradients now, row 8 has one of the first update too.
    assert table[:, 0].tolist() == [0, 2, 0, 2, 0, 1, 0, 1, 2]
    assert not np.any(state.accumulator.row_weights)


def test_state_is_what_optax_expects():
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    tx = sync_replicas(optax.sgd(0.1, momentum=0.9), AXIS, 2, variable_averages=0.9)
    tx = optax.chain(optax.clip(1.0), tx)
    state = tx.init(params)
    same = optax.tree.map_params(tx, lambda x, p: x.shape == p.shape, state, params)
    # Sums, trace and averages of two parameters.
    assert sum(x is True for x in jax.tree.leaves(same)) == 6
    pairs = zip(*map(jax.tree.leaves, (state[1].averages, params)), strict=True)
    for average, param in pairs:
        own = average.unsafe_buffer_pointer() != param.unsafe_buffer_pointer()
        assert own, "both may be donated"


def test_injected_hyperparameters_are_traced():
    tx = optax.inject_hyperparams(
        sync_replicas, static_args=("axis_name", "replicas_to_aggregate", "inner")
    )(optax.sgd(1.0), AXIS, 2, variable_averages=0.5)
    updates, state = lanes(tx, jnp.float32(0))(jnp.full(N, 4.0))
    assert float(updates) == -4.0
    averages: Any = oxs.averaged_params(state, jnp.zeros(N))
    assert averages.tolist() == [-2.0] * N


def test_3_workers_1_backup():
    """TensorFlow's `test3Workers1Backup` and its figures, with a step for each event.

    From `python/training/sync_replicas_optimizer_test.py` of TensorFlow 1.15.
    """
    tx = sync_replicas(oxs.optimizers.gradient_descent(2.0), AXIS, 2)
    table = jnp.array([[3.0], [4.0]])
    start = {"v0": jnp.float32(0), "v1": jnp.float32(1), "v_sparse": table}
    # Who contributes, and the global step of the gradients.
    events = [
        ([True, False, True], 0),  # workers 0 and 2 are first
        ([False, True, False], 0),  # worker 1 comes late, its gradient is stale
        ([True, True, True], 0),  # and so are those that were computed meanwhile
        ([True, False, False], 1),  # one of two
        ([False, True, False], 1),
    ]

    def run(worker, contributes):
        first = 0.1 + 0.2 * worker
        rows = oxs.IndexedSlices(jnp.array([1]), first.reshape(1, 1))
        grads = {"v0": first, "v1": 0.8 + first, "v_sparse": rows}

        def step(carry, event):
            now, at = event
            extra: Any = {"contributes": now, "gradient_step": at}
            carry = oxs.apply_gradients(tx, grads, carry[1], carry[0], **extra)
            return carry, (carry[0], carry[1].global_step)

        steps = jnp.array([step for _, step in events])
        return jax.lax.scan(step, (start, tx.init(start)), (contributes, steps))[1]

    contributes = jnp.array([who for who, _ in events]).T
    params, global_step = jax.jit(jax.vmap(run, axis_name=AXIS))(
        jnp.arange(3.0), contributes
    )
    np.testing.assert_array_equal(global_step, [[1, 1, 1, 1, 2]] * 3)
    for name, before, after in (
        ("v0", 0 - (0.1 + 0.5) / 2 * 2.0, -0.6 - (0.1 + 0.3) / 2 * 2.0),
        ("v1", 1 - (0.9 + 1.3) / 2 * 2.0, -1.2 - (0.9 + 1.1) / 2 * 2.0),
        ("v_sparse", 4 - (0.1 + 0.5) / 2 * 2.0, 3.4 - (0.1 + 0.3) / 2 * 2.0),
    ):
        found = params[name].reshape(3, 5, -1)[..., -1]
        np.testing.assert_allclose(found, [[before] * 4 + [after]] * 3, 1e-6)
    np.testing.assert_array_equal(params["v_sparse"][:, :, 0], 3)


def test_an_average_of_ten_million_steps_has_its_own_rate():
    """1 - float32(0.9999999) is 1.19e-7: nearly a fifth too large."""
    decays = (0.9999999, np.float64(0.9999999), lambda step: 0.9999999)

    def averages_of(grads):
        averages, params = [], jnp.zeros(())
        for decay in decays:
            tx = sync_replicas(optax.sgd(1.0), AXIS, 1, variable_averages=decay)
            _, state = tx.update(grads, tx.init(params), params)
            averages.append(oxs.averaged_params(state, params))
        return averages

    averages = jax.jit(jax.vmap(averages_of, axis_name=AXIS))(-jnp.ones(N))
    np.testing.assert_allclose(averages, np.full((3, N), 1e-7), rtol=1e-6)


def test_averages_are_read_in_the_parameters_dtype():
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(3)}
    only = {"variables_to_average": {"a": True, "b": False}}
    tx = sync_replicas(optax.identity(), AXIS, 1, variable_averages=0.5, **only)
    state = by_hand.replicate(tx.init(params), N)
    read: Any = oxs.averaged_params(state, {"a": params["a"], "b": 7 * params["b"]})
    assert read["a"].dtype == jnp.bfloat16 and read["a"].shape == (N, 2)
    assert read["b"].tolist() == [7, 7, 7]


MEDIAN, KRUM, SGD = oxs.exchange.median(), oxs.exchange.krum(0), optax.sgd(1.0)


def synced(replicas_to_aggregate: Any = 2, **options):
    return sync_replicas(SGD, AXIS, replicas_to_aggregate, **options)


def step_of(tx, **extra):
    return lanes(tx, jnp.float32(0))(jnp.ones(N), **extra)


def on_empty(tree):
    return synced().update(tree, synced().init(jnp.zeros(2)), tree)


def summed(tx, params):
    def local(x):
        grads = jax.grad(lambda p: jnp.sum(p * x[0]))(params)
        return tx.update(grads, tx.init(params), params)[0]

    run = jax.shard_map(local, mesh=contexts.mesh(), in_specs=P(AXIS), out_specs=P())
    return jax.eval_shape(run, jnp.ones((N, 2)))


test_refused = all_refused(globals())(r"""
sync_replicas("data", AXIS, 2)  # TypeError: inner must be
sync_replicas(SGD, 2, 2)  # TypeError: axis_name
synced(0)  # ValueError: aggregate must be 1 or more, .*0
synced(2.0)  # TypeError: must be an integer
synced(total_num_replicas=10**10)  # ValueError: below 2\*\*31; got
synced(variable_averages=1.5)
synced(variable_averages=())  # ValueError: a decay in .0, 1.
synced(variables_to_average=True)  # ValueError: there is no average
synced(accumulator_dtype="int32")  # ValueError: must be a floating dtype
step_of(synced(total_num_replicas=3))  # ValueError: =3, but the axis 'data' has 4
step_of(synced(), contributes=jnp.ones(N))  # TypeError: must be a bool
step_of(synced(), contributes=jnp.ones((N, 2), bool))  # ValueError: be a scalar
step_of(synced(), gradient_step=jnp.ones(N))  # TypeError: must be an integer
step_of(synced(), weight=jnp.ones((N, 2)))  # ValueError: weight must be a scalar
step_of(synced(exchange=MEDIAN), weight=jnp.ones(N))
step_of(synced(exchange=KRUM), weight=jnp.ones(N))  # ValueError: takes no weight
synced().init({})
synced().init(None)
on_empty({})
on_empty(None)  # ValueError: at least one variable
oxs.averaged_params(synced().init(TABLE), TABLE)  # ValueError: no averages
oxs.metrics(SGD.init(TABLE))  # ValueError: no metrics in this state
(lambda tx: tx.update(TABLE, tx.init(TABLE)))(synced(variable_averages=0.9))
    # ValueError: params=None
summed(synced(), jnp.zeros(2))  # ValueError: localize.*stay local
""")

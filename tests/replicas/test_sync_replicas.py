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
from optx_sync import sync_replicas
from tests import contexts
from tests.reference import sync_replicas as reference
from tests.refusals import refused

AXIS = contexts.AXIS
N = contexts.REPLICAS
STEPS = 24
ROWS = 5
RATE, DECAY = 0.1, 0.9
# As many replicas as are required, backup replicas, several batches.
REQUIRED = {"equal": 4, "backup": 3, "several": 6}
PARAMS = {
    "scalar": np.float32(0.5),
    "matrix": np.linspace(-2, 2, 6, dtype=np.float32).reshape(3, 2),
    "table": np.linspace(-1, 1, 2 * ROWS, dtype=np.float32).reshape(ROWS, 2),
    "fixed": np.array([1, 2], np.float32),  # its gradient is None
}
AVERAGED = ("matrix", "table")


def leaves_of(name):
    """Row-sparse gradients in one of the cases, for the compiler's sake."""
    return [leaf for leaf in PARAMS if leaf != "table" or name == "several"]


def average_decay(step):
    """The original's, with `num_updates=global_step`."""
    return jnp.minimum(0.6, (1 + step) / (10 + step))


def faults(seed=0):
    """contributes, lag (in updates; negative: ahead) and finite, each [T, N]."""
    rng = np.random.default_rng(seed)
    contributes = rng.random((STEPS, N)) < 0.75
    contributes[5] = False
    lag = rng.choice([-1, 0, 0, 0, 0, 1, 3], (STEPS, N)).astype(np.int32)
    lag[6] = 2
    finite = rng.random((STEPS, N)) < 0.85
    finite[7] = False
    # The last ones are all there, so that the tokens run out too.
    contributes[-8:], lag[-8:], finite[-8:] = True, 0, True
    return contributes, lag, finite


def weights_of(name):
    """[T, N]: token counts, or none, in one of the cases; 1 elsewhere."""
    if name != "several":
        return np.ones((STEPS, N), np.float32)
    drawn = np.random.default_rng(1).choice([0, 0.5, 1, 30, 1000], (STEPS, N))
    drawn[-8:] = np.maximum(drawn[-8:], 0.5)  # So that the tokens run out.
    return drawn.astype(np.float32)


def gradients(seed=0):
    """Gradients [T, N, ...] that are spoilt where they must leave no trace."""
    rng = np.random.default_rng(seed)
    contributes, lag, finite = faults(seed)
    shapes = {"scalar": (), "matrix": (3, 2), "values": (3, 2)}
    grads = {
        name: rng.normal(size=(STEPS, N, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    # Duplicates, and rows out of range, which are dropped.
    indices = rng.integers(-1, ROWS + 1, (STEPS, N, 3)).astype(np.int32)
    for name, spoilt in (
        ("scalar", ~contributes),
        ("matrix", ~contributes | (lag > 0)),
        ("values", ~contributes),
    ):
        grads[name][spoilt] = np.nan
    # One leaf alone is not finite: all leaves of that replica are left out.
    grads["matrix"][~finite, 0, 0] = np.inf
    return grads, indices


def by_lag(tx, weighted):
    """The extra argument `lag`, how old a gradient is, in place of `gradient_step`."""

    def update(updates, state, params=None, *, lag=0, weight=None, **extra):
        extra = {**extra, "gradient_step": state.global_step - lag}
        if weighted:
            extra["weight"] = weight
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def averaged(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in AVERAGED, params
    )


@functools.cache
def inputs():
    """All of REQUIRED in one transformation, so that each context compiles once."""
    tx = optax.chain(
        *(
            optax.masked(
                by_lag(
                    sync_replicas(
                        oxs.optimizers.momentum(RATE, DECAY),
                        AXIS,
                        required,
                        total_num_replicas=N,
                        variable_averages=average_decay,
                        variables_to_average=averaged,
                        drop_nonfinite=True,
                    ),
                    weighted=name == "several",
                ),
                {other: other == name for other in REQUIRED},
            )
            for name, required in REQUIRED.items()
        )
    )
    contributes, lag, _ = faults()
    grads, indices = gradients()
    slices = jax.vmap(jax.vmap(oxs.IndexedSlices))(indices, grads["values"])
    tree = grads | {"table": slices, "fixed": None}
    return (
        tx,
        {name: {leaf: PARAMS[leaf] for leaf in leaves_of(name)} for name in REQUIRED},
        {name: {leaf: tree[leaf] for leaf in leaves_of(name)} for name in REQUIRED},
        {"contributes": contributes, "lag": lag, "weight": weights_of("several")},
    )


@functools.cache
def expected():
    """For each of REQUIRED: parameters and averages [T, ...], outcome [T, N], steps."""
    grads, indices = gradients()
    result = {}
    contributes, *others = faults()
    for name, required in REQUIRED.items():
        weights = weights_of(name)
        outcome, complete, steps = reference.decide(
            required, contributes & (weights > 0), *others
        )
        used = outcome == reference.OUTCOMES.index("used")
        how = (used, weights, complete, RATE, DECAY)
        history = {"fixed": np.broadcast_to(PARAMS["fixed"], (STEPS, 2))}
        for leaf in ("scalar", "matrix"):
            history[leaf] = reference.momentum(PARAMS[leaf], grads[leaf], *how)
        if name == "several":
            history["table"] = reference.momentum_rows(
                PARAMS["table"], indices, grads["values"], *how
            )
        averages = {
            leaf: reference.moving_average(
                PARAMS[leaf], history[leaf], complete, steps, average_decay
            )
            if leaf in AVERAGED
            else history[leaf]
            for leaf in leaves_of(name)
        }
        result[name] = history, averages, outcome, steps
    return result


def check(history, state):
    """History [T, N, ...] and last state against the reference, for all replicas."""
    for (name, got), own in zip(history.items(), sorted_states(state), strict=True):
        want, averages, outcome, steps = expected()[name]
        assert 0 < steps[-1] < STEPS, "the case has steps with and without an update"
        contexts.assert_close(got, on_all(want))
        assert np.all(np.asarray(optax.tree.get(own, "global_step")) == steps[-1])
        metrics = oxs.metrics(own)
        for place, which in enumerate(reference.OUTCOMES):
            now = outcome == place
            np.testing.assert_array_equal(getattr(metrics.counts, which), now.sum(0))
            np.testing.assert_array_equal(getattr(metrics, which), now[-1])
        params: Any = {other: optax.MaskedNode() for other in REQUIRED}
        params[name] = jax.tree.map(lambda x: jnp.asarray(x[-1]), got)
        every: Any = oxs.averaged_params(own, params)
        for leaf, read in every[name].items():
            replicated = np.ndim(read) == averages[leaf][-1].ndim
            read = np.stack([read] * N) if replicated else np.asarray(read)
            contexts.assert_close(read, on_all(averages[leaf])[-1])


def on_all(tree):
    return jax.tree.map(
        lambda x: np.broadcast_to(x[:, None], (len(x), N, *x.shape[1:])), tree
    )


def sorted_states(state):
    """One state for each of REQUIRED, in the order of a dict that went through jit."""
    return [state[list(REQUIRED).index(name)] for name in sorted(REQUIRED)]


@pytest.mark.parametrize("context", ("vmap", *contexts.DISTINCT))
def test_one_answer_everywhere(context):
    check(*contexts.replay(context, *inputs()))


def process_cases():
    """For `tests/two_processes.py`."""
    tx, params, grads, extra = inputs()
    # Rows travel between processes as plain arrays.
    rows: Any = grads["several"]["table"]
    plain = {"indices": rows.indices, "values": rows.values}
    grads = grads | {"several": grads["several"] | {"table": plain}}

    def update(updates: Any, state, params=None, **extra):
        rows = oxs.IndexedSlices(**updates["several"]["table"])
        updates = updates | {"several": updates["several"] | {"table": rows}}
        return tx.update(updates, state, params, **extra)

    plainly = optax.GradientTransformationExtraArgs(tx.init, update)
    return {"sync_replicas": (plainly, params, grads, extra)}


def test_replicated_parameters_keep_their_type():
    """check_vma=True with `P()` for parameters and inner state, in and out."""
    tx, params, grads, extra = inputs()
    axes = oxs.state_axes(tx, params, replicated=True)
    specs = oxs.state_specs(tx, params, P(), AXIS, replicated=True)

    def local(params, state, grads, extra):
        grads, extra = oxs.first((grads, extra))
        state = oxs.first(state, axes)
        history, state = contexts.steps(tx)(params, state, grads, extra)
        return history, oxs.replicate(state, 1, axes)

    run = jax.shard_map(
        local,
        mesh=contexts.mesh(),
        in_specs=(P(), specs, P(AXIS), P(AXIS)),
        out_specs=(P(), specs),
    )
    grads, extra = contexts.by_replica((grads, extra))
    state = oxs.replicate(tx.init(params), N, axes)
    history, state = jax.jit(run)(params, state, grads, extra)
    check(on_all(jax.tree.map(np.asarray, history)), state)


def test_replicated_state_has_an_axis_where_it_is_a_replicas_own():
    params = {"w": jnp.zeros(3)}
    tx = optax.chain(optax.trace(0.9), sync_replicas(optax.adam(0.1), AXIS, 2))
    trace, own = oxs.state_axes(tx, params, replicated=True)
    shared = (trace, own.inner, own.averages, own.global_step, own.accumulated)
    assert not jax.tree.leaves(shared)
    assert set(jax.tree.leaves((own.accumulator, own.info.outcome))) == {0}
    plain = oxs.cross_shard(optax.adam(0.1), AXIS)
    assert not jax.tree.leaves(oxs.state_axes(plain, params, replicated=True))
    specs = oxs.state_specs(plain, params, P("fsdp"), AXIS, replicated=True)
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
    axes = oxs.state_axes(tx, params)
    start = oxs.replicate(tx.init(params), replicas, axes)

    def one(state, grads, extra):
        return tx.update(grads, state, params, **extra)

    run = jax.jit(jax.vmap(one, (axes, 0, 0), (0, axes), axis_name=AXIS))

    def step(grads, state=start, **extra):
        updates, state = run(state, grads, extra)
        return jax.tree.map(lambda x: x[0], updates), state

    return step


def init(tx, params) -> Any:
    return tx.init(params)


def marking():
    """An inner transformation that no compiler can hide: it permutes its gradients."""
    ring = [(i, (i + 1) % N) for i in range(N)]

    def update(updates, state, params=None):
        moved = jax.tree.map(lambda g: jax.lax.ppermute(g, AXIS, ring), updates)
        return moved, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("context", ["shard_map", "shard_map_axes"])
def test_quiet_step_sends_flags_only(context):
    params = {"w": np.zeros((6, 5), np.float32), "b": np.zeros(3, np.float32)}
    tx = sync_replicas(marking(), AXIS, 6, variable_averages=0.9, drop_nonfinite=True)
    axes = oxs.state_axes(tx, params) if context in contexts.AXES_CONTEXTS else None
    many = oxs.replicate(oxs.replicate(params, 2), N)
    run = contexts.mapped(
        contexts.steps(tx), tx, oxs.replicate(params, N), axes, contexts.mesh(), True
    )
    state = oxs.replicate(tx.init(params), N, axes)
    rows = oxs.audit.collectives(run, oxs.replicate(params, N), state, many, {})
    always = [row for row in rows if not row.conditional]
    assert [(row.kind, row.bytes) for row in always] == [("all-reduce", 4 * N)]
    due = [row for row in rows if row.conditional]
    assert {row.kind for row in due} == {"all-reduce", "collective-permute"}
    reduced = sum(row.bytes for row in due if row.kind == "all-reduce")
    assert reduced == 4 * (6 * 5 + 3)


def test_quiet_step_of_islands_sends_flags_only():
    params = {"w": np.zeros((6, 4), np.float32)}
    tx = sync_replicas(optax.sgd(0.1), AXIS, 6)
    axes = oxs.state_axes(tx, params)
    run = jax.jit(
        jax.vmap(
            contexts.steps(tx),
            in_axes=(0, axes, 0, 0),
            out_axes=(0, axes),
            axis_name=AXIS,
            spmd_axis_name=AXIS,
        )
    )
    stacked, grads = jax.tree.map(
        contexts._on_islands,
        (oxs.replicate(params, N), oxs.replicate(oxs.replicate(params, 2), N)),
    )
    state = oxs.replicate(tx.init(params), N, axes)
    rows = oxs.audit.collectives(run, stacked, state, grads, {})
    assert sum(row.bytes for row in rows if not row.conditional) <= 4 * N
    assert any(row.conditional and row.bytes >= 4 * 6 * 2 for row in rows)


def test_thousand_steps_with_late_and_broken_replicas():
    replicas, steps = 8, 1000
    rng = np.random.default_rng(0)
    fault = np.array([0, 0, 1, 2, 2, 2, 2, 2])  # two late ones, one broken one
    faults = np.stack([rng.permutation(fault) for _ in range(steps)], axis=1)
    targets = rng.normal(size=(replicas, steps, 3)).astype(np.float32)
    curvature = np.array([0.5, 1.0, 3.0], np.float32)
    tx = sync_replicas(optax.sgd(0.05, momentum=0.9), AXIS, 5, drop_nonfinite=True)
    start = jnp.ones(3)
    mesh = contexts.mesh(replicas)

    def local(targets, faults):
        def step(carry, now):
            params, state = carry
            target, fault = now
            grads = jnp.where(fault == 1, jnp.nan, curvature * (params - target))
            updates, state = tx.update(
                grads,
                state,
                params,
                gradient_step=state.global_step - (fault == 0).astype(jnp.int32),
            )
            return (optax.apply_updates(params, updates), state), params

        # They could differ from here on: nothing in the types keeps them equal.
        params: Any = oxs.localize(start, AXIS)
        state = oxs.localize(init(tx, params), AXIS)
        carry: Any = (params, state)
        carry, _ = jax.lax.scan(step, carry, (targets[0], faults[0]))
        params, state = carry
        return params[None], oxs.replicate(oxs.metrics(state), 1)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P(AXIS), P(AXIS)), out_specs=(P(AXIS), P(AXIS))
    )
    got, metrics = jax.jit(run)(targets, faults)
    got = np.asarray(got)
    assert np.all(got.view(np.uint32) == got[:1].view(np.uint32))

    wanted, trace = np.ones(3), np.zeros(3)
    for t in range(steps):
        good = targets[faults[:, t] == 2, t].astype(np.float64)
        trace = 0.9 * trace + np.mean(curvature * (wanted - good), axis=0)
        wanted = wanted - 0.05 * trace
    np.testing.assert_allclose(got[0], wanted, atol=1e-5)
    for name, place in (("stale", 0), ("nonfinite", 1), ("used", 2)):
        counts = getattr(metrics.counts, name)
        np.testing.assert_array_equal(counts, np.sum(faults == place, axis=1))


def test_nothing_changes_where_nobody_is_left():
    params = {"w": jnp.array([-0.0, 1e-30, 3.0]), "s": jnp.float32(-0.0)}
    tx = sync_replicas(
        optax.adam(0.1), AXIS, 1, variable_averages=0.5, drop_nonfinite=True
    )
    before = init(tx, params)
    grads = jax.tree.map(lambda p: jnp.full((N, *p.shape), jnp.nan), params)
    with jax.numpy_dtype_promotion("standard"):  # optax.adam needs it
        updates, state = lanes(tx, params)(grads)
    moved = optax.apply_updates(params, updates)
    for new, old in zip(
        jax.tree.leaves((moved, oxs.first((state.inner, state.averages)))),
        jax.tree.leaves((params, before.inner, before.averages)),
        strict=True,
    ):
        assert np.array_equal(np.asarray(new).view(np.uint32), old.view(jnp.uint32))
    assert int(state.global_step) == 0
    assert np.all(oxs.metrics(state).nonfinite)


def test_without_dropping_a_nan_passes_once_and_is_gone():
    tx = sync_replicas(optax.identity(), AXIS, 2)
    broken, good = jnp.array([jnp.nan, 1.0]), jnp.array([1.0, 3.0])
    step = lanes(tx, jnp.float32(0), 2)
    updates, state = step(broken)
    assert np.isnan(updates)
    updates, state = step(good, state)
    assert float(updates) == 2.0


def test_tokens_are_handed_out_fairly():
    tx = sync_replicas(optax.identity(), AXIS, 6)
    step, arrived = lanes(tx, jnp.float32(0)), []
    _, state = step(jnp.ones(N))
    for _ in range(2 * N - 1):  # N updates of two steps each
        arrived.append(np.asarray(oxs.metrics(state).no_token))
        _, state = step(jnp.ones(N), state)
    arrived.append(np.asarray(oxs.metrics(state).no_token))
    assert int(state.global_step) == N
    assert np.all(state.info.outcome_counts.used == 6)
    assert np.argwhere(arrived[1]).tolist() == [[2], [3]]
    assert np.argwhere(arrived[3]).tolist() == [[0], [3]]


def weighed(tx, grads, weight=None, params=None):
    """The updates [T, N, ...] and last state, for gradients and weights [T, N, ...]."""
    params = jnp.zeros(grads.shape[2:]) if params is None else params

    def body(grads, weights):
        def step(state, now):
            grads, weight = now
            updates, state = tx.update(grads, state, params, weight=weight)
            return state, updates

        return jax.lax.scan(step, tx.init(params), (grads, weights))

    run = jax.jit(jax.vmap(body, 1, (0, 1), axis_name=AXIS))
    state, updates = run(grads, weight)
    return np.asarray(updates), state


def test_equal_weights_are_none():
    """To the bit, several batches for an update and rows included."""
    exchanges: Any = oxs.exchange
    made = [
        sync_replicas(optax.sgd(0.1), AXIS, 2 * N - 1, exchange=exchange)
        for exchange in (
            None,
            exchanges.clipped("median"),
            exchanges.error_feedback(exchanges.quantized()),
        )
    ]
    on_rows = sync_replicas(oxs.optimizers.gradient_descent(0.1), AXIS, 2 * N - 1)
    params = jnp.zeros((ROWS, 3))
    rng = np.random.default_rng(4)
    grads = rng.normal(size=(5, N, 2, 3)).astype(np.float32)

    def body(grads, weight):
        given = {} if weight is None else {"weight": weight}

        def step(states, values):
            slices = oxs.IndexedSlices(jnp.array([0, 2]), values)
            after = [
                oxs.apply_gradients(tx, gradient, state, at, **given)
                for tx, gradient, (at, state) in zip(
                    (*made, on_rows),
                    (*[slices.to_dense(ROWS)] * 3, slices),
                    states,
                    strict=True,
                )
            ]
            return after, [at for at, _ in after]

        start = [(params, init(tx, params)) for tx in (*made, on_rows)]
        return jax.lax.scan(step, start, grads)[1]

    run = jax.jit(jax.vmap(body, (1, 0), axis_name=AXIS))
    plain = run(grads, None)
    for history in plain:
        assert len(np.unique(history[0, :, 0, 0])) == 3, "the case has two updates"
    for weight in (1, 0.1, 3, 1021):
        found = run(grads, np.full(N, weight, np.float32))
        jax.tree.map(np.testing.assert_array_equal, found, plain)


@pytest.mark.parametrize("kind", [np.float32, bool])
def test_a_replica_of_weight_0_leaves_no_trace_and_does_not_count(kind):
    tx = sync_replicas(optax.sgd(1.0), AXIS, 3, variable_averages=0.5)
    step = lanes(tx, jnp.zeros(2))
    grads = jnp.arange(2.0 * N).reshape(N, 2).at[1].set(jnp.nan)
    left_out = step(grads, contributes=jnp.array([True, False, True, True]))
    weightless = step(grads, weight=np.array([1, 0, 1, 1], kind))
    jax.tree.map(np.testing.assert_array_equal, weightless, left_out)
    updates, state = weightless
    np.testing.assert_allclose(updates, [-10 / 3, -13 / 3], rtol=1e-6)
    assert oxs.metrics(state).not_contributed.tolist() == [False, True, False, False]
    _, state = step(grads, weight=np.array([0, 0, 1, 1], kind))
    assert state.global_step == 0 and state.accumulated == 2
    # A weight that is not finite is no number to average with.
    drops = sync_replicas(optax.sgd(1.0), AXIS, 3, drop_nonfinite=True)
    updates, state = lanes(drops, jnp.zeros(2))(
        jnp.ones((N, 2)), weight=jnp.array([1, jnp.inf, 2, jnp.nan])
    )
    assert oxs.metrics(state).nonfinite.tolist() == [False, True, False, True]


def test_clipped_weighs_each_replica_s_mean_by_the_weights_behind_it():
    grads = np.random.default_rng(3).normal(size=(2, N, 3)).astype(np.float32)
    weights = np.array([[1, 4, 0, 2], [9, 0.5, 0, 3]], np.float32)
    exchange = oxs.exchange.clipped(1e9)
    tx = sync_replicas(optax.identity(), AXIS, 6, exchange=exchange)
    updates, _ = weighed(tx, grads, weights)
    right = np.average(grads.reshape(-1, 3), 0, weights.reshape(-1))
    np.testing.assert_allclose(updates[1], [right] * N, rtol=1e-5)


def test_token_counts_do_not_overflow_half_precision_sums():
    tx = sync_replicas(optax.identity(), AXIS, 2 * N, accumulator_dtype=jnp.float16)
    tokens = np.full((2, N), 60_000, np.int32)
    tokens[1] = 30_000
    grads = np.stack([np.full((N, 2), 3.0), np.full((N, 2), 9.0)]).astype(np.float32)
    updates, _ = weighed(tx, grads, tokens)
    np.testing.assert_allclose(updates[1], 5.0, rtol=1e-3)


def test_weights_of_double_precision():
    with jax.enable_x64(True):
        grads = np.random.default_rng(3).normal(size=(2, N, 3))
        weights = 1 + np.random.default_rng(4).random((2, N))
        tx = sync_replicas(optax.identity(), AXIS, 2 * N)
        updates, _ = weighed(tx, grads, weights, jnp.zeros(3, jnp.float64))
        right = np.average(grads.reshape(-1, 3), 0, weights.reshape(-1))
        np.testing.assert_allclose(updates[1], [right] * N, rtol=1e-13)


def test_late_replicas_do_not_starve_an_update():
    """Gradients that are not used leave the tokens to those that are."""
    tx = sync_replicas(optax.identity(), AXIS, 6)
    step = lanes(tx, jnp.float32(0))
    late = {"contributes": jnp.array([True, False, False, False])}
    updates, state = step(jnp.ones(N), **late)
    for _ in range(5):
        assert float(updates) == 0.0
        updates, state = step(jnp.ones(N), state, **late)
    assert int(state.global_step) == 1
    assert float(updates) == 1.0
    assert state.info.outcome_counts.no_token.tolist() == [0] * N


@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("given", [True, "traced"])
def test_meeting_with_nothing_accumulated_is_no_update(given, robust):
    """The mean of no gradients was NaN, and so were parameters, trace and averages."""
    exchange = oxs.exchange.median() if robust else None
    tx: Any = sync_replicas(
        *(optax.sgd(1.0, momentum=0.9), AXIS, 2),
        drop_nonfinite=True,
        variable_averages=0.9,
        exchange=exchange,
    )
    nobody = {"contributes": jnp.zeros(N, bool)}
    params = jnp.ones(2)

    def two_steps(traced, grads, extra):
        state, meet = tx.init(params), True if given is True else traced
        _, before = tx.update(grads, state, params, meet=True)
        updates, after = tx.update(grads * jnp.nan, before, params, meet=meet, **extra)
        return before, updates, after

    run = jax.jit(jax.vmap(two_steps, (None, 0, 0), axis_name=AXIS))
    for extra in ({}, nobody, {"weight": jnp.zeros(N, bool)}):
        before, updates, after = run(jnp.bool_(True), jnp.ones((N, 2)), extra)
        np.testing.assert_array_equal(updates, 0)
        assert after.global_step.tolist() == before.global_step.tolist() == [1] * N
        same = ("inner", "averages", "accumulated", "accumulator", "contributed")
        for field in same:
            old, new = getattr(before, field), getattr(after, field)
            assert jax.tree.all(jax.tree.map(np.array_equal, old, new)), field


def test_one_replica():
    tx = sync_replicas(optax.sgd(1.0), AXIS, 2, total_num_replicas=1)
    step = lanes(tx, jnp.zeros(2), 1)
    updates, state = step(jnp.ones((1, 2)))
    assert updates.tolist() == [0, 0]
    updates, state = step(jnp.full((1, 2), 3.0), state)
    assert updates.tolist() == [-2, -2]


def test_half_precision_is_accumulated_in_float32():
    params = jnp.zeros(2, jnp.bfloat16)
    tx = sync_replicas(optax.identity(), AXIS, 8, variable_averages=0.999)
    grads = jnp.ones((N, 2), jnp.bfloat16).at[0].set(256)  # 256 + 1 = 256 in bfloat16
    step = lanes(tx, params)
    _, state = step(grads)
    updates, _ = step(grads, state)
    assert updates.dtype == jnp.bfloat16
    assert updates.tolist() == [jnp.bfloat16((2 * 256 + 6) / 8)] * 2
    assert jnp.bfloat16((2 * 256 + 6) / 8) != jnp.bfloat16(2 * 256 / 8)
    tx = sync_replicas(optax.identity(), AXIS, 8, accumulator_dtype=jnp.bfloat16)
    assert init(tx, params).accumulator.sums.dtype == jnp.bfloat16


def moved_by(params, updates) -> Any:
    return optax.apply_updates(params, updates)


def rows_of(indices, values):
    """Row-sparse gradients [N, k] of all replicas."""
    return jax.vmap(oxs.IndexedSlices)(jnp.asarray(indices), jnp.asarray(values))


def test_rows_that_inner_sees():
    seen = []

    def update(updates, state, params=None):
        grads: Any = updates
        seen.append({name: g.values.shape[0] for name, g in grads.items()})
        return updates, state

    spy = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
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
    tx = sync_replicas(optax.identity(), AXIS, 2)
    table = jnp.zeros((9, 1))
    many = rows_of([[1, 3, 5, 7]], np.ones((1, 4, 1), np.float32))
    few = rows_of([[8]], np.full((1, 1, 1), 2, np.float32))
    step = lanes(tx, table, 1)
    _, state = step(many)
    updates, state = step(few, state)
    table = moved_by(table, updates)
    assert table[:, 0].tolist() == [0, 1, 0, 1, 0, 0, 0, 0, 0]
    _, state = step(few, state)
    updates, state = step(many, state)
    table = moved_by(table, updates)
    # Rows 5 and 7 hold two gradients now, row 8 has one of the first update too.
    assert table[:, 0].tolist() == [0, 2, 0, 2, 0, 1, 0, 1, 2]
    assert not np.any(state.accumulator.row_weights)


def test_state_is_what_optax_expects():
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    tx = optax.chain(
        optax.clip(1.0),
        sync_replicas(optax.sgd(0.1, momentum=0.9), AXIS, 2, variable_averages=0.9),
    )
    state = init(tx, params)
    assert int(optax.tree.get(state, "global_step")) == 0
    mapped = []
    optax.tree.map_params(
        tx, lambda leaf, param: mapped.append(leaf.shape == param.shape), state, params
    )
    assert mapped == [True] * 6  # sums, trace and averages of two parameters
    for average, param in zip(
        jax.tree.leaves(state[1].averages), jax.tree.leaves(params), strict=True
    ):
        own = average.unsafe_buffer_pointer() != param.unsafe_buffer_pointer()
        assert own, "both may be donated"


def test_injected_hyperparameters_are_traced():
    tx = optax.inject_hyperparams(
        sync_replicas, static_args=("axis_name", "replicas_to_aggregate", "inner")
    )(optax.sgd(1.0), AXIS, 2, variable_averages=0.5)
    params = jnp.float32(0)
    updates, state = lanes(tx, params)(jnp.full(N, 4.0))
    assert float(updates) == -4.0
    averages: Any = oxs.averaged_params(state, jnp.zeros(N))
    assert averages.tolist() == [-2.0] * N


def test_3_workers_1_backup():
    """TensorFlow's `test3Workers1Backup` and its figures, with a step for each event.

    From `python/training/sync_replicas_optimizer_test.py` of TensorFlow 1.15.
    """
    tx = sync_replicas(oxs.optimizers.gradient_descent(2.0), AXIS, 2)
    start = {
        "v0": jnp.float32(0),
        "v1": jnp.float32(1),
        "v_sparse": jnp.array([[3.0], [4.0]]),
    }
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
        grads = {"v0": first, "v1": 0.9 + 0.2 * worker, "v_sparse": rows}

        def step(carry, event):
            params, state = carry
            contributes, computed_at = event
            params, state = oxs.apply_gradients(
                *(tx, grads, state, params),
                contributes=contributes,
                gradient_step=computed_at,
            )
            return (params, state), (params, state.global_step)

        steps = jnp.array([step for _, step in events])
        return jax.lax.scan(step, (start, tx.init(start)), (contributes, steps))[1]

    contributes = jnp.array([who for who, _ in events]).T
    run_all = jax.jit(jax.vmap(run, axis_name=AXIS))
    params, global_step = run_all(jnp.arange(3.0), contributes)
    for worker in range(3):
        np.testing.assert_array_equal(global_step[worker], [1, 1, 1, 1, 2])
        for name, expected in (
            ("v0", [0 - (0.1 + 0.5) / 2 * 2.0, -0.6 - (0.1 + 0.3) / 2 * 2.0]),
            ("v1", [1 - (0.9 + 1.3) / 2 * 2.0, -1.2 - (0.9 + 1.1) / 2 * 2.0]),
            ("v_sparse", [4 - (0.1 + 0.5) / 2 * 2.0, 3.4 - (0.1 + 0.3) / 2 * 2.0]),
        ):
            found = params[name][worker].reshape(5, -1)[:, -1]
            np.testing.assert_allclose(found, [expected[0]] * 4 + expected[1:], 1e-6)
        np.testing.assert_array_equal(params["v_sparse"][worker][:, 0], 3)


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
    mask = {"a": True, "b": False}
    tx = sync_replicas(
        optax.identity(), AXIS, 1, variable_averages=0.5, variables_to_average=mask
    )
    state = oxs.replicate(tx.init(params), N)
    read: Any = oxs.averaged_params(state, {"a": params["a"], "b": 7 * params["b"]})
    assert read["a"].dtype == jnp.bfloat16 and read["a"].shape == (N, 2)
    assert read["b"].tolist() == [7, 7, 7]


def refuse(said, call):
    with refused(said):
        call()


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ("ValueError: replicas_to_aggregate must be 1 or more, .*got 0", (0,)),
        ("TypeError: replicas_to_aggregate must be an integer", (2.0,)),
        ("ValueError: total_num_replicas must be 1", (2, {"total_num_replicas": 0})),
        (r"ValueError: to_aggregate must be 1 or more, and below 2\*\*31", (2**31,)),
        (r"ValueError: below 2\*\*31; got", (2, {"total_num_replicas": 10**10})),
        ("ValueError: a decay in .0, 1.", (2, {"variable_averages": 1.5})),
        ("ValueError: a decay in .0, 1.", (2, {"variable_averages": ()})),
        ("ValueError: a decay in .0, 1.", (2, {"variable_averages": "0.9"})),
        ("ValueError: there is no average", (2, {"variables_to_average": True})),
        ("ValueError: must be a floating dtype", (2, {"accumulator_dtype": "int32"})),
        ("TypeError: must be a floating dtype; got 0", (2, {"accumulator_dtype": 0})),
    ],
)
def test_refused_at_construction(said, arguments):
    required: Any
    required, keywords = (*arguments, {})[:2]
    refuse(said, lambda: sync_replicas(optax.sgd(1.0), AXIS, required, **keywords))


def test_integers_of_numpy_are_integers():
    def two_steps(grads: Any) -> Any:
        moved = []
        for kind in (int, np.int64):
            required: Any = kind(8)
            total: Any = kind(N)
            tx = sync_replicas(optax.sgd(1.0), AXIS, required, total_num_replicas=total)
            params, state = jnp.zeros(()), tx.init(jnp.zeros(()))
            for _ in range(2):
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            moved.append(params)
        return moved

    python, of_numpy = jax.jit(jax.vmap(two_steps, axis_name=AXIS))(jnp.arange(4.0))
    np.testing.assert_array_equal(python, -1.5)
    np.testing.assert_array_equal(of_numpy, python)


def test_refuses_what_is_no_transformation_or_axis():
    refuse("TypeError: inner must be", lambda: sync_replicas("data", AXIS, 2))  # pyright: ignore[reportArgumentType] # the wrong call itself
    refuse("TypeError: axis_name", lambda: sync_replicas(optax.sgd(1.0), 2, 2))  # pyright: ignore[reportArgumentType] # the wrong call itself


@pytest.mark.parametrize("empty", [{}, (), None, {"a": {}}])
def test_refuses_no_variables(empty):
    tx = sync_replicas(optax.sgd(1.0), AXIS, 2)
    refuse("ValueError: at least one variable", lambda: tx.init(empty))
    state = tx.init(jnp.zeros(2))
    refuse("ValueError: at least one variable", lambda: tx.update(empty, state, empty))


@pytest.mark.parametrize(
    ("said", "keywords", "extra"),
    [
        ("ValueError: =3, but the axis 'data' has 4", {"total_num_replicas": 3}, {}),
        ("TypeError: must be a bool", {}, {"contributes": jnp.ones(N)}),
        ("ValueError: be a scalar", {}, {"contributes": jnp.ones((N, 2), bool)}),
        ("TypeError: must be an integer", {}, {"gradient_step": jnp.ones(N)}),
        ("ValueError: weight must be a scalar", {}, {"weight": jnp.ones((N, 2))}),
        *(
            ("ValueError: takes no weight", {"exchange": rule}, {"weight": jnp.ones(N)})
            for rule in (oxs.exchange.median(), oxs.exchange.krum(0))
        ),
    ],
)
def test_refused_at_the_call(said, keywords, extra):
    tx = sync_replicas(optax.sgd(1.0), AXIS, 2, **keywords)
    refuse(said, lambda: lanes(tx, jnp.float32(0))(jnp.ones(N), **extra))


def test_averages_need_the_parameters():
    tx = sync_replicas(optax.sgd(1.0), AXIS, 2, variable_averages=0.9)
    refuse("ValueError: params=None", lambda: tx.update(1.0, tx.init(jnp.float32(0))))


def test_refuses_summed_gradients():
    tx = sync_replicas(optax.sgd(1.0), AXIS, 2)
    params = jnp.zeros(2)

    def summed(x):
        grads = jax.grad(lambda p: jnp.sum(p * x[0]))(params)
        return tx.update(grads, tx.init(params), params)[0]

    run = jax.shard_map(summed, mesh=contexts.mesh(), in_specs=P(AXIS), out_specs=P())
    refuse(
        r"ValueError: localize.*stay local",
        lambda: jax.eval_shape(run, jnp.ones((N, 2))),
    )


def test_reading_a_foreign_state():
    state = optax.adam(0.1).init(jnp.zeros(2))
    refuse("ValueError: no metrics in this state", lambda: oxs.metrics(state))
    own = sync_replicas(optax.sgd(1.0), AXIS, 2).init(jnp.zeros(2))
    refuse("ValueError: no averages", lambda: oxs.averaged_params(own, jnp.zeros(2)))

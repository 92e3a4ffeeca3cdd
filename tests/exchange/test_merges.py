"""Radial and penalized merges against their definitions, and their laws."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from optx_sync.exchange.penalized import PenalizedState
from tests.exchange.meeting import AXIS, mapped
from tests.meshes import mesh_of
from tests.refusals import all_refused

ex = oxs.exchange
N, SHAPES = 8, {"embed": (4, 6), "layer": (30,), "scalar": ()}


def phi(v):
    return v / np.linalg.norm(v) if v.any() else v


def radial(v, w, name=""):
    """Of a leaf [N, numbers]."""
    if name == "embed":  # which the test lets take the plain mean
        return np.average(v, axis=0, weights=w)
    length = np.average(np.linalg.norm(v, axis=1), weights=w)
    return length * phi(np.average([phi(x) for x in v], axis=0, weights=w))


def penalized(v, w, name="", temperature=1.0, clip=10.0):
    """Of a group of leaves as rows [N, numbers]."""
    w = w * np.exp(-np.linalg.norm(v, axis=1) / temperature)
    d = np.average(v, axis=0, weights=w)
    return d * min(1, clip / (np.linalg.norm(d) + 1e-6))


def of_all(definition):
    """A definition of rows of all leaves, as one of the trees' leaves."""

    def of_tree(trees, w):
        rows = np.concatenate([x.reshape(len(x), -1) for x in trees.values()], axis=1)
        ends = np.cumsum([x[0].size for x in trees.values()])[:-1]
        return dict(zip(trees, np.split(definition(rows, w), ends), strict=True))

    return of_tree


def of_each(definition):
    def of_tree(trees, w):
        return {k: definition(x.reshape(len(x), -1), w, k) for k, x in trees.items()}

    return of_tree


warm = functools.partial(penalized, temperature=20.0, clip=2.0)
# name: (the exchange, what it makes of trees and the weights of those that count)
MERGES: dict[str, tuple[oxs.exchange.Exchange, Any]] = {
    "radial": (ex.radial(direct=lambda path: "embed" in path), of_each(radial)),
    "penalized": (ex.penalized(), of_all(penalized)),
    "by leaf": (
        ex.penalized(groups=lambda path: path, temperature=20.0, clip=2.0),
        of_each(warm),
    ),
    # Where all lengths are alike the lengths of a radial merge have no other weights.
    "inside": (ex.penalized(ex.radial(), temperature=1e9, clip=None), of_each(
        lambda v, w, name: radial(v, w)
    )),
}  # fmt: skip


def trees_of(seed, replicas=N):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=(replicas, *shape)) * 3.0**-place).astype(np.float32)
        for place, (name, shape) in enumerate(SHAPES.items())
    }


def meeting(exchanges, weighted=True):
    def one(tree, weight):
        more = {"weight": weight} if weighted else {}
        return {
            name: exchange.meet(tree, exchange.init(tree), AXIS, **more).mean
            for name, exchange in exchanges.items()
        }

    return one


EXCHANGES = {name: exchange for name, (exchange, _) in MERGES.items()}


@functools.cache
def compiled(replicas=N):
    return mapped("vmap", meeting(EXCHANGES), replicas)


def merged(trees, weights):
    """{name: the merge} of trees [N, ...]."""
    found = compiled(len(weights))(trees, jnp.asarray(weights, jnp.float32))
    return jax.tree.map(lambda x: np.asarray(x[0], np.float64), found)


def close(found, expected, relative=3e-6, message=""):
    for leaf, x in expected.items():
        atol = relative * np.abs(x).max(initial=1e-30)
        x = np.reshape(x, np.shape(found[leaf]))
        np.testing.assert_allclose(found[leaf], x, rtol=0, atol=atol, err_msg=message)


WEIGHTS = {
    "alike": np.ones(N),
    "tokens": np.array([3.0, 0.5, 1, 2, 7, 1, 1, 4]),
    "some": np.array([1.0, 0, 2, 0, 0, 5, 1, 0]),
    "one": np.eye(N)[2],
    "none": np.zeros(N),
}


@pytest.mark.parametrize("who", WEIGHTS)
def test_merges_are_what_the_definition_says(who):
    weights, trees = WEIGHTS[who], trees_of(1)
    there = weights > 0
    sent = {k: np.where(there.reshape(N, *[1] * (x.ndim - 1)), x, np.nan)
            for k, x in trees.items()}  # fmt: skip
    for name, found in merged(sent, weights).items():
        of_those = {k: x[there].astype(float) for k, x in trees.items()}
        if there.any():
            expected = MERGES[name][1](of_those, weights[there])
        else:
            expected = {k: np.zeros(x[0].shape) for k, x in trees.items()}
        close(found, expected, message=name)


def test_laws_of_merges():
    trees = trees_of(2)
    ones, order = np.ones(N), np.random.default_rng(0).permutation(N)
    plain = merged(trees, ones)
    moved = merged({k: x[order] for k, x in trees.items()}, ones)
    equal = merged({k: np.stack([x[0]] * N) for k, x in trees.items()}, ones)
    alone = merged({k: x[:1] for k, x in trees.items()}, ones[:1])
    unweighted = mapped("vmap", meeting(EXCHANGES, weighted=False), N)(trees, ones)
    for name in MERGES:
        close(moved[name], plain[name], message=name)
        for found in (equal, alone):
            if name != "by leaf":  # which cuts to a norm of 2
                close(found[name], {k: x[0] for k, x in trees.items()}, message=name)
        same = {k: np.asarray(x[0], float) for k, x in unweighted[name].items()}
        close(same, plain[name], 1e-6, name)
    for scale in (1e-30, 1e30):
        scaled = merged({k: x * np.float32(scale) for k, x in trees.items()}, ones)
        found = {k: x / scale for k, x in scaled["radial"].items()}
        close(found, plain["radial"], message=str(scale))
    # Weights are relative to the shortest, however long all are.
    far = {k: 100 * x for k, x in trees.items()}
    expected = of_all(penalized)({k: x.astype(float) for k, x in far.items()}, ones)
    close(merged(far, ones)["penalized"], expected, 1e-3)
    # Orthogonal vectors keep their length, of which the mean loses all but 1/sqrt(8).
    apart = trees | {"layer": 5 * np.eye(N, 30, dtype=np.float32)}
    found = merged(apart, ones)["radial"]["layer"]
    np.testing.assert_allclose(np.linalg.norm(found), 5, rtol=1e-6)
    # Directions that cancel have none: the length falls, and is not that of rounding.
    apart["layer"] = trees["layer"][:1] * np.array([[3], [-0.7]] * (N // 2), np.float32)
    assert np.abs(merged(apart, ones)["radial"]["layer"]).max() < 1e-3
    apart["layer"][3, 3] = np.nan
    found = merged(apart, ones)
    assert np.isnan(found["radial"]["layer"]).any()
    for name in ("penalized", "by leaf"):
        assert np.isfinite(found[name]["layer"]).all(), name


def test_merges_are_the_same_under_types_and_in_shards_by_hand():
    """Two rounds; norms are of the whole worker, along `inside`."""
    trees = {"layer": trees_of(5, 4)["layer"], "other": trees_of(6, 4)["layer"]}
    weights = WEIGHTS["tokens"][:4].astype(np.float32)

    def twice(axes):
        more: Any = {"shard_axes": axes}
        found = {
            "radial": ex.radial(**more),
            "penalized": ex.penalized(temperature=20.0, warmup=1, **more),
        }

        def one(tree, weight):
            def rounds(exchange):
                def meet(state, _):
                    met = exchange.meet(tree, state, AXIS, weight=weight)
                    return met.state, met.mean

                state = oxs.localize(exchange.init(tree), AXIS)
                return jax.lax.scan(meet, state, length=2)[1]

            return {name: rounds(exchange) for name, exchange in found.items()}

        return one

    expected = jax.jit(jax.vmap(twice(None), axis_name=AXIS))(trees, weights)
    expected = jax.tree.map(lambda x: x[0], expected)
    close_all = functools.partial(jax.tree.map, functools.partial(
        np.testing.assert_allclose, rtol=1e-5, atol=1e-6
    ))  # fmt: skip

    def local(tree, weight):
        return twice("inside")(by_hand.first(tree), weight[0])

    over = mesh_of({AXIS: 4, "inside": 2})
    specs = (P(AXIS, "inside"), P(AXIS)), P(None, "inside")
    run = jax.shard_map(local, mesh=over, in_specs=specs[0], out_specs=specs[1])
    close_all(jax.jit(run)(trees, weights), expected)
    with pytest.raises(ValueError, match="shard_axes"):
        jax.shard_map(
            lambda tree, weight: twice(None)(by_hand.first(tree), weight[0]),
            mesh=over,
            in_specs=specs[0],
            out_specs=specs[1],
        )(trees, weights)


def test_merges_of_float64_arrays_are_float64():
    trees = {"layer": np.random.default_rng(0).normal(size=(4, 9))}
    weights = np.array([1.0, 2.0, 0.0, 5.0])
    there, expected = weights > 0, {}
    for name in ("radial", "by leaf"):
        of_those = {k: x[there] for k, x in trees.items()}
        expected[name] = MERGES[name][1](of_those, weights[there])
    with jax.enable_x64(True):
        chosen = meeting({name: EXCHANGES[name] for name in expected})
        found = jax.jit(jax.vmap(chosen, axis_name=AXIS))(trees, weights)
        for name, merge in found.items():
            assert merge["layer"].dtype == jnp.float64
            one = jax.tree.map(lambda x: x[0], merge)
            close(one, expected[name], 1e-6 if name == "by leaf" else 1e-13, name)


def test_a_radial_merge_is_one_all_reduce_with_a_float_for_each_leaf():
    def sent(exchange):
        def local(tree, weight):
            weight, also = weight[0], {"loss": weight[0]}
            return exchange.meet(tree, (), AXIS, weight=weight, also=also)[0]

        run = jax.shard_map(
            local, mesh=mesh_of({AXIS: N}), in_specs=P(AXIS), out_specs=P()
        )
        made = jax.jit(run).lower(trees_of(0), np.ones(N, np.float32)).compile()
        return [(row.kind, row.bytes) for row in oxs.audit.collectives(made)]

    ((kind, mean),) = sent(ex.all_reduce())
    assert sent(ex.radial()) == [(kind, mean + 4 * len(SHAPES))]


def judged(norms, warmup=5, rate=0.1, limit=3.0):
    """A worker's history by the formulas: which of its norms are outliers."""
    mean, variance, spread, out = 0.0, 0.0, 0.0, []
    for t, norm in enumerate(norms):
        z = 0.0 if t < warmup else (norm - mean) / np.sqrt(variance)
        most = limit * max(1, np.sqrt(spread))
        out.append(bool(z > most))
        norm = mean + most * np.sqrt(variance) if out[-1] else norm
        before = mean if t else norm
        mean = before + rate * (norm - before)
        variance = (1 - rate) * (variance + rate * (norm - before) * (norm - mean))
        spread += rate * (np.clip(z, -most, most) ** 2 - spread)
    return out, (mean, variance, spread)


def test_outliers_leave_no_trace_and_are_counted():
    """Two of four jump: one once and one for good, which counts again some day."""
    rounds, n = 40, 4
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rounds, n, 6)).astype(np.float32)
    norms = 1 + 0.05 * rng.normal(size=(rounds, n))
    norms[20, 1] = 90
    norms[25:, 2] = 1.6
    norms[30] = 50  # all of them
    x *= (norms / np.linalg.norm(x, axis=-1))[..., None]
    x[12, 3], x[13, 3] = np.nan, np.inf
    weights = np.ones((rounds, n), np.float32)
    weights[8, 0] = 0  # nothing happens to its history
    exchange = ex.penalized(warmup=5, rate=0.1)
    options: Any = {"communication_period": 1, "exchange": exchange}
    tx = oxs.local_sgd(optax.sgd(1.0), AXIS, **options)

    def run(x, weights):
        params = jnp.zeros(6)

        def step(carry, now):
            params, state = carry
            updates, state = tx.update(now[0], state, params, weight=now[1])
            return (params + updates, state), updates

        first = oxs.localize((params, tx.init(params)), AXIS)
        (_, last), moved = jax.lax.scan(step, first, (x, weights))
        state: Any = last
        return moved, state.exchange, oxs.metrics(state).outliers

    mapped_run = jax.vmap(run, in_axes=1, out_axes=0, axis_name=AXIS)
    moved, memory, counted = jax.jit(mapped_run)(x, weights)
    out, lengths = np.zeros((rounds, n), bool), np.linalg.norm(x, axis=-1)
    for i in range(n):
        seen = np.flatnonzero((weights[:, i] > 0) & np.isfinite(lengths[:, i]))
        flags, (mean, variance, spread) = judged(lengths[seen, i].astype(float))
        out[seen, i] = flags
        state: Any = memory.histories["all"]
        found = [state.mean[i], state.variance[i], state.spread[i]]
        np.testing.assert_allclose(found, [mean, variance, spread], rtol=1e-3)
        assert state.rounds[i] == len(seen)
    assert out[20].tolist() == [False, True, False, False] and out[30].all()
    assert out[25:28, 2].all() and not out[-9:, 2].any()  # It takes note of it.
    out |= ~np.isfinite(lengths)
    assert counted.tolist() == out.sum(0).tolist()
    for t in range(rounds):
        there = ~out[t] & (weights[t] > 0)
        expected = np.zeros(6)
        if there.any():
            expected = -penalized(x[t, there].astype(float), weights[t, there])
        np.testing.assert_allclose(moved[:, t], [expected] * n, rtol=1e-4, atol=1e-6)


def test_scalars_beside_are_of_those_that_count():
    """One of four jumps far: sums, measures and lengths are those of three."""
    rounds, n = 12, 4
    rng = np.random.default_rng(5)
    x = rng.normal(size=(rounds, n, 6)).astype(np.float32)
    x *= (1 + 0.1 * rng.random((rounds, n, 1))) / np.linalg.norm(x, axis=-1)[..., None]
    x[-1, 2] *= 50
    exchange = ex.penalized(warmup=11, temperature=1e9, clip=None)
    elastic = oxs.rules.elastic(moving_rate=0.2, rho=0.0)
    options: Any = {"communication_period": 1, "exchange": exchange, "measure": True}

    def run(x, rule, weight):
        tx = oxs.center_variable(optax.sgd(1.0), rule, AXIS, **options)

        def step(carry, grads):
            params, state = carry
            more = {} if weight is None else {"weight": jnp.float32(weight)}
            return oxs.apply_gradients(tx, grads, state, params, **more), None

        first = oxs.localize((jnp.zeros(6), tx.init(jnp.zeros(6))), AXIS)
        (params, last), _ = jax.lax.scan(step, first, x)
        state: Any = last
        return params, state.center, oxs.metrics(state)

    for rule in (elastic, oxs.rules.local_sgd()):
        found = [
            jax.jit(jax.vmap(lambda x: run(x, rule, w), in_axes=1, axis_name=AXIS))(x)  # noqa: B023
            for w in (None, 1)
        ]
        (*arrays, one), (*others, other) = found
        for a, b in zip(arrays, others, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
        for name in ("contributors", "contribution_norm"):
            pair = getattr(one, name), getattr(other, name)
            np.testing.assert_allclose(*pair, rtol=1e-5)
        if rule.take is None:  # what is sent is the gradient
            assert one.contributors.tolist() == [3] * n
            sent = np.square(np.linalg.norm(np.delete(x[-1], 2, 0), axis=-1)).mean()
            np.testing.assert_allclose(one.contribution_norm, sent**0.5, rtol=1e-5)

    radial = ex.radial(ex.penalized(clip=None))
    y = x[0].copy()
    y[1] = np.nan
    mean = jax.vmap(
        lambda y: radial.meet(y, radial.init(y), AXIS).mean, axis_name=AXIS
    )(y)
    length = np.linalg.norm(np.delete(y, 1, 0), axis=-1).mean()
    np.testing.assert_allclose(np.linalg.norm(mean, axis=-1), length, rtol=1e-5)


def test_what_it_remembers_can_be_donated_and_loses_nothing_owed():
    fed = ex.penalized(
        ex.error_feedback(ex.quantized(bits=4)), groups=lambda path: path
    )
    params = {"a": jnp.linspace(0, 1, 24), "b": jnp.ones(4)}
    tx = oxs.local_sgd(optax.sgd(0.1), AXIS, communication_period=1, exchange=fed)
    state = tx.init(params)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len({*buffers}) == len(buffers)
    workers = oxs.Workers(4, AXIS)
    now = workers.start((params, state))

    @workers.step(state=2)
    def step(params, state, scale):
        grads = jax.tree.map(lambda p: scale[0] * jnp.sin(7 * p), params)
        return oxs.apply_gradients(tx, grads, state, params)

    now = step(*now, jnp.arange(1.0, 5))
    state: Any = now[1]
    owed = jax.tree.map(lambda x: x.sum(0), state.exchange.exchange.error)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(owed)) > 1e-4
    _, fewer = by_hand.resize(tx, *now, 2)
    less: Any = fewer
    kept = jax.tree.map(lambda x: x.sum(0), less.exchange.exchange.error)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), kept, owed)


def test_what_a_worker_remembers_is_its_own():
    """In parts each has a history; a joiner begins one."""
    tx = oxs.diloco(
        optax.sgd(0.1),
        AXIS,
        communication_period=2,
        fragments=2,
        exchange=ex.penalized(groups=lambda path: path[2:-2]),
    )
    workers, params = oxs.Workers(3, AXIS), {"a": jnp.ones(4), "b": jnp.ones((3, 2))}
    params, state = workers.start((params, tx.init(params)))
    step = workers.step(lambda p, s: oxs.apply_gradients(tx, p, s, p), state=2)
    for _ in range(8):
        params, state = step(params, state)
    parts: Any = state.exchange
    assert all(isinstance(part, PenalizedState) for part in parts)
    assert [sorted(part.histories) for part in parts] == [["a"], ["b"]]
    rounds = [x.rounds.tolist() for part in parts for x in part.histories.values()]
    assert rounds == [[4] * 3] * 2
    _, found = by_hand.resize(tx, params, state, 4)
    new: Any = found
    assert new.exchange[0].histories["a"].rounds.tolist() == [4, 4, 4, 0]


SIGNS = ex.sign_majority()
test_bad_input_is_refused = all_refused(globals())(r"""
ex.radial(0.5)  # TypeError: exchange must be
ex.radial(direct="embed")  # TypeError: direct must be a function
ex.penalized(SIGNS)  # ValueError: takes weights
ex.penalized(ex.radial(), groups=str)  # ValueError: a mean alone
ex.penalized(groups=3)  # TypeError: groups must be a function
ex.penalized(warmup=-1)  # ValueError: warmup must be 0 or more
ex.penalized(rate=0.0)  # ValueError: rate must
ex.penalized(limit=0.0)  # ValueError: limit must
ex.penalized(temperature=-1.0)  # ValueError: temperature must
ex.penalized(clip=0.0)  # ValueError: clip must
ex.error_feedback(ex.radial())  # ValueError: needs a linear exchange
""")

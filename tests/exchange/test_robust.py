"""Robust exchanges against their definitions, for every set of contributors."""

import collections
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
from tests.contexts import started
from tests.exchange.meeting import AXIS, mapped
from tests.meshes import mesh_of
from tests.reference import robust
from tests.refusals import all_refused

SHAPES = {"matrix": (3, 5), "scalar": (), "none": (0,), "vector": (7,)}
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
ENDS = np.cumsum(SIZES)[:-1]
SLICES = [slice(e - s, e) for s, e in zip(SIZES, np.cumsum(SIZES), strict=True) if s]
D = sum(SIZES)


def mean(v):
    return v.mean(axis=0)


def clipped(v, bound=None):
    """The mean of rows no longer than this, or than the median of their lengths."""
    lengths = np.linalg.norm(v, axis=1, keepdims=True)
    bound = np.median(lengths) if bound is None else bound
    return mean(v * np.minimum(1, bound / np.maximum(lengths, 1e-30)))


part = functools.partial
# name: (exchange, definition on those that count)
RULES = {
    "median": (oxs.exchange.median(), robust.median),
    "trimmed_0": (oxs.exchange.trimmed_mean(0), mean),
    "trimmed_1": (oxs.exchange.trimmed_mean(1), part(robust.trimmed_mean, f=1)),
    "trimmed_2": (oxs.exchange.trimmed_mean(2), part(robust.trimmed_mean, f=2)),
    "sign": (oxs.exchange.sign_majority(), robust.sign_majority),
    "krum_0": (oxs.exchange.krum(0), mean),
    "krum_1": (oxs.exchange.krum(1), part(robust.krum, f=1)),
    "krum_1_1": (oxs.exchange.krum(1, 1), part(robust.krum, f=1, m=1)),
    "clipped": (oxs.exchange.clipped(2.0), part(clipped, bound=2.0)),
    "clipped_median": (oxs.exchange.clipped("median"), clipped),
}
# Those that no single replica can move further than the others reach.
STAND_UP = (
    *("median", "trimmed_1", "krum_1", "krum_1_1"),
    *("geometric", "clipped_median"),
)


def as_tree(v):
    """[..., D] as a tree of leaves [..., *shape]."""
    parts = jnp.split(jnp.asarray(v), ENDS, axis=-1)
    return {
        name: part.reshape((*part.shape[:-1], *shape))
        for part, (name, shape) in zip(parts, SHAPES.items(), strict=True)
    }


def as_rows(tree):
    """The opposite: a tree of leaves [..., *shape] as [..., D] in float64."""
    lead = tree["scalar"].shape
    flat = [np.asarray(x, np.float64).reshape((*lead, -1)) for x in tree.values()]
    return np.concatenate([flat[list(tree).index(name)] for name in SHAPES], axis=-1)


def meets(exchanges):
    """One program for one replica: what each of the exchanges makes of its tree."""

    def one(tree, weight):
        return {
            name: exchange.meet(tree, exchange.init(tree), AXIS, weight=weight)[0]
            for name, exchange in exchanges.items()
        }

    return one


def run(exchanges, v, weights):
    """Results [cases, D] by name, of values [cases, N, D] and weights [cases, N]."""
    workers = jax.vmap(meets(exchanges), axis_name=AXIS)
    compiled = jax.jit(jax.vmap(workers))
    found = compiled(as_tree(v), jnp.asarray(weights, jnp.float32))
    rows = {name: as_rows(tree) for name, tree in found.items()}
    for name, all_replicas in rows.items():
        same = np.broadcast_to(all_replicas[:, :1], all_replicas.shape)
        np.testing.assert_array_equal(all_replicas, same, err_msg=name)
    return {name: all_replicas[:, 0] for name, all_replicas in rows.items()}


def values(n, seed=0, ties=False):
    v = np.random.default_rng(seed).normal(size=(n, D)).astype(np.float32)
    return np.round(v) if ties else v


def of_contributors(masks):
    """Values with and without ties, and who counts: what does not is NaN."""
    n = masks.shape[1]
    both = [np.broadcast_to(values(n, n, t), (len(masks), n, D)) for t in (False, True)]
    masks = np.concatenate([masks, masks])
    v = np.concatenate(both)
    return v, np.where(masks[:, :, None], v, np.nan).astype(np.float32), masks


def check_definitions(found, v, masks):
    for name, got in found.items():
        definition = RULES[name][1]
        for rows, mask, result in zip(v, masks, got, strict=True):
            expected = (
                definition(rows[mask].astype(float)) if mask.any() else 0 * result
            )
            np.testing.assert_allclose(
                result, expected, atol=2e-6, rtol=2e-6, err_msg=f"{name} {mask}"
            )


def test_every_set_of_five_contributors_gives_what_the_definition_says():
    v, sent, masks = of_contributors(robust.masks(5))
    exchanges = {name: rule[0] for name, rule in RULES.items()}
    exchanges["geometric_100"] = oxs.exchange.geometric_median(100)
    found = run(exchanges, sent, masks)
    many = found.pop("geometric_100")
    check_definitions(found, v, masks)
    for rows, mask, result in zip(v[:32], masks, many, strict=False):
        check_least(rows[mask].astype(float), result, 1.0003)


def check_least(rows, result, factor):
    """That the sum of distances from the result is the least one, up to a factor."""
    if not len(rows):
        assert not result.any()
        return
    # Between two every point has the least sum.
    best = rows[0] if len(rows) == 2 else robust.geometric_median(rows)
    least = robust.distances(best, rows).sum()
    assert robust.distances(result, rows).sum() <= least * factor + 1e-5, len(rows)


# One program of eight replicas serves the tests below: what each case is, [cases, 8].
HONEST = np.random.default_rng(1).normal(size=(8, D)) + 5
LIES = (1e30, -1e30, 3e38, 100.0, np.nan)
SCALES = (1e-30, 1.0, 1e30)


def cases_of_eight():
    """(values, who counts) by what they are for."""
    rng = np.random.default_rng(8)
    # Sets of 0, 1, ... 8 contributors, two of each size.
    masks = [rng.permutation(8) < size for size in range(9) for _ in range(2)]
    everyone = np.ones(8, bool)
    liars = [np.concatenate([HONEST[1:], np.full((1, D), lie)]) for lie in LIES]
    orders = [HONEST[rng.permutation(8)] for _ in range(4)]
    _, sent, masks = of_contributors(np.array(masks))
    parts = {
        "sets": (sent, masks),
        "orders": ([HONEST, *orders], None),
        "lies": (liars, None),
        "scales": ([values(8, 3) * scale for scale in SCALES], None),
    }
    return {
        name: (
            np.asarray(v, np.float32),
            np.tile(everyone, (len(v), 1)) if counts is None else counts,
        )
        for name, (v, counts) in parts.items()
    }


@functools.cache
def of_eight():
    """{part: {rule: results}}."""
    parts = cases_of_eight()
    v, counts = (np.concatenate(x) for x in zip(*parts.values(), strict=True))
    exchanges = {name: rule[0] for name, rule in RULES.items()}
    exchanges["geometric"] = oxs.exchange.geometric_median()
    found = run(exchanges, v, counts)
    ends = np.cumsum([len(v) for v, _ in parts.values()])[:-1]
    cut = {name: np.split(got, ends) for name, got in found.items()}
    return {
        part: {name: pieces[place] for name, pieces in cut.items()}
        for place, part in enumerate(parts)
    }


def test_every_number_of_eight_contributors_gives_what_the_definition_says():
    sent, masks = cases_of_eight()["sets"]
    found = of_eight()["sets"]
    check_definitions({name: found[name] for name in RULES}, sent, masks)
    for rows, mask, result in zip(sent, masks, found["geometric"], strict=True):
        check_least(rows[mask].astype(float), result, 1.01)


def test_the_order_of_replicas_does_not_matter_and_one_that_lies_has_little_effect():
    spread = np.linalg.norm(HONEST - HONEST.mean(axis=0), axis=1).max()
    largest = np.linalg.norm(HONEST, axis=1).max()
    for name in STAND_UP:
        orders = of_eight()["orders"][name]
        np.testing.assert_allclose(
            orders[1:], orders[:1].repeat(4, 0), rtol=2e-6, err_msg=name
        )
        result = of_eight()["lies"][name]
        moved = np.linalg.norm(result - HONEST[1:].mean(axis=0), axis=1)
        limit = spread
        if name == "clipped_median":  # It bounds what one replica adds, NaN apart.
            moved, limit = moved[:-1], 2 * largest / 8
        assert np.all(moved < limit), (name, moved, limit)


def test_gradients_of_any_size_are_compared():
    for name in ("krum_1", "geometric"):
        found = of_eight()["scales"][name]
        for scale, result in zip(SCALES, found, strict=True):
            np.testing.assert_allclose(
                result / scale, found[1], rtol=2e-3, err_msg=name
            )


def test_norms_of_float64_arrays_are_float64():
    """In float32 they were wrong by 3.4e-8, and values above 3e38 were cut to 0."""
    v = values(4).astype(np.float64) + 1e-9
    for scale in (1.0, 1e100, 1e-100):
        expected = v * scale / np.linalg.norm(v, axis=1, keepdims=True)

        def clip(x, scale=scale):
            exchange: Any = oxs.exchange.clipped(scale / 2)
            tree = {"a": x[:1], "b": x[1:], "c": jnp.zeros(2, jnp.float32)}
            met = exchange.meet(tree, (), AXIS)
            mean, far = met.mean, exchange.outlier(tree, met, AXIS, None)
            return jnp.concatenate([mean["a"], mean["b"]]), far

        with jax.enable_x64(True):
            clip_all = jax.jit(jax.vmap(clip, axis_name=AXIS))
            found, far = clip_all(v * scale)
            assert found.dtype == jnp.float64
        one = expected.mean(0) / 2
        np.testing.assert_allclose(found, [one] * 4, rtol=1e-14, atol=1e-16 * scale)
        assert not far.any()


def weighted(rule, axis=AXIS):
    """One replica's step: its update, and whether it was an outlier."""
    tx = oxs.cross_shard(optax.sgd(-1.0), axis, exchange=rule)

    def step(tree, counts):
        update, state = tx.update(tree, tx.init(tree), weight=counts)
        return update, oxs.metrics(state).outliers

    return step


@pytest.mark.parametrize(
    ("context", "axis"),
    [
        *((c, AXIS) for c in ("pmap", "shard_map", "shard_map_unchecked")),
        *(("sharded_workers", AXIS), ("vmap", ("a", "b"))),
    ],
)
def test_every_context_gives_the_numbers_of_the_definition(context, axis):
    n = 4 if context == "sharded_workers" else 8
    rules = {
        "krum": (oxs.exchange.krum(0, m=1), functools.partial(robust.krum, f=0, m=1)),
        "sign": (oxs.exchange.sign_majority(), robust.sign_majority),
    }
    if context in ("pmap", "sharded_workers"):
        rules.pop("sign")  # These take long to compile.
    v, counts = 0.1 * values(n, 2) + 1, np.arange(n) != 1
    v[3] = -20  # far away, and against all others' signs
    tree = as_tree(v)
    tree["half"] = tree["vector"].astype(jnp.bfloat16)

    def steps(tree, counts):
        return {name: weighted(x, axis)(tree, counts) for name, (x, _) in rules.items()}

    found = mapped(context, steps, n, axis)(tree, jnp.asarray(counts))
    rows = np.concatenate([v, np.asarray(tree["half"], np.float32)], axis=1)
    for name, (got, outliers) in found.items():
        half = got.pop("half")
        assert half.dtype == jnp.bfloat16
        expected = rules[name][1](np.delete(rows, 1, axis=0).astype(float))[:D]
        near = {"rtol": 2e-6, "atol": 2e-6, "err_msg": name}
        np.testing.assert_allclose(as_rows(got), [expected] * n, **near)
        half = np.asarray(half, np.float32)
        np.testing.assert_allclose(half, [expected[-7:]] * n, rtol=1e-2, err_msg=name)
        assert outliers.tolist() == [int(i == 3) for i in range(n)], name


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_of_one_replica_agree(check_vma):
    """A replica along `inside`: distances and outliers are of whole arrays."""
    over, spec = mesh_of({AXIS: 4, "inside": 2}), P(AXIS, "inside")
    v = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    v[0, :3] += 1  # The two halves alone would choose differently.
    v[1, 3:] += 3
    far = np.ones((4, 6), np.float32) + 0.1 * values(4, 6)[:, :6]
    far[2, 5] = 50.0  # One shard alone sees it.
    # name: the exchange of axes, and whether it sees how large a number is.
    rules = {
        "krum": (lambda axes: oxs.exchange.krum(0, m=1, shard_axes=axes), None),
        "clipped": (lambda axes: oxs.exchange.clipped(1.0, shard_axes=axes), True),
        "median": (lambda axes: oxs.exchange.median(), True),
        "sign": (lambda axes: oxs.exchange.sign_majority(), False),
    }

    def of(axes):
        def one(v, far):
            return {
                name: (
                    rule(axes).meet(v, (), AXIS).mean,
                    weighted(rule(axes))(far, jnp.bool_(True))[1],
                )
                for name, (rule, _) in rules.items()
            }

        return one

    def sharded(axes):
        def local(v, far):
            found = of(axes)(v[0], far[0]).items()
            return {name: (x[None], n[None, None]) for name, (x, n) in found}

        # With types: that the shards are known to agree about outliers.
        out = spec, P(AXIS) if check_vma else spec
        ways = {"in_specs": spec, "out_specs": dict.fromkeys(rules, out)}
        run = jax.shard_map(local, mesh=over, check_vma=check_vma, **ways)
        return jax.jit(run)(v, far)

    expected = jax.jit(jax.vmap(of(None), axis_name=AXIS))(v, far)
    for name, (mean, outliers) in sharded("inside").items():
        near = {"rtol": 1e-5, "atol": 1e-6, "err_msg": name}
        np.testing.assert_allclose(mean, expected[name][0], **near)
        sees = rules[name][1]
        if sees is not None:
            for shard in np.asarray(outliers).T:
                assert shard.tolist() == [0, 0, int(sees), 0], name
    with pytest.raises(ValueError, match="shard_axes"):
        sharded(None)


def test_what_travels_is_what_an_all_reduce_sends():
    """An all-to-all there, an all-gather back, and the matrix if needed."""
    over, size = mesh_of({AXIS: 8}), 8 * 100
    # Bytes of a number; the largest value of each replica, for a rule by distances.
    rules = {
        oxs.exchange.median(): (4, 0),
        oxs.exchange.krum(1): (4, 4),
        oxs.exchange.sign_majority(): (1, 0),
    }

    def local(tree):
        return [rule.meet(tree, (), AXIS)[0] for rule in rules]

    tree = {"a": jnp.ones((8, 304)), "b": jnp.ones((8, 31, 16))}
    mapped = jax.shard_map(local, mesh=over, in_specs=P(AXIS), out_specs=P())
    compiled = jax.jit(mapped).lower(tree).compile()
    sent = collections.Counter()
    for row in oxs.audit.collectives(compiled):
        sent[row.kind] += row.bytes
    assert sent == {
        # Median and Krum begin with the same pieces, which travel once.
        "all-to-all": sum({size * item for item, _ in rules.values()}),
        "all-gather": sum(size * item // 8 + own for item, own in rules.values()),
        "all-reduce": 8 * 8 * 4,
    }


def test_a_center_rule_leaves_out_who_is_not_finite_and_counts_outliers():
    n = 6
    gradients = 0.1 * values(n, 9) + 1
    honest = np.delete(gradients, [2, 4], axis=0)
    gradients[2], gradients[4] = np.nan, 30
    params = jnp.zeros(D)
    options: Any = {"communication_period": 1, "drop_nonfinite": True}
    tx = oxs.local_sgd(optax.sgd(1.0), AXIS, exchange=oxs.exchange.krum(1), **options)
    step, start, state = started(tx, params, n, AXIS)
    found, state = step(start, state, jnp.asarray(gradients))
    # Five are left, of which the rule takes the four that are close to each other.
    np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))
    np.testing.assert_allclose(found[0], -honest.mean(axis=0), rtol=1e-5, atol=1e-6)
    measured = oxs.metrics(state)
    assert measured.outliers.tolist() == [0, 0, 0, 0, 1, 0]
    assert measured.dropped.tolist() == [0, 0, 1, 0, 0, 0]
    # Nothing is kept without a robust exchange.
    plain = oxs.local_sgd(optax.sgd(1.0), AXIS)
    assert oxs.metrics(plain.init(params)).outliers is None


def test_sync_replicas_gives_a_rule_what_was_accepted_of_each_replica():
    """One vote each, the mean of its gradients since the last update: n is traced."""
    n, steps = 4, 8
    rng = np.random.default_rng(5)
    grads = rng.normal(size=(steps, n, D)).astype(np.float32) + 4
    grads[:, 2] = 1e6
    grads[4, 0] = np.nan
    contributes = rng.random((steps, n)) < 0.6
    # What each makes of the replicas' means, R below the number of replicas and above
    # it; `clipped` weighs them, and cuts nobody.
    rules = {
        2: (oxs.exchange.median(), lambda own, weights: robust.median(own)),
        7: (oxs.exchange.clipped(1e9), part(np.average, axis=0)),
    }
    made = {
        needed: oxs.sync_replicas(
            optax.sgd(-1.0), AXIS, needed, drop_nonfinite=True, exchange=exchange
        )
        for needed, (exchange, _) in rules.items()
    }

    def body(grads, contributes):
        def steps_of(tx):
            def step(state, now):
                gradient, contributes = now
                update, state = tx.update(gradient, state, contributes=contributes)
                return state, update

            start = tx.init(as_tree(jnp.zeros(D)))
            state, updates = jax.lax.scan(step, start, (grads, contributes))
            return updates, oxs.metrics(state).outliers

        return [steps_of(tx) for tx in made.values()]

    run = jax.jit(jax.vmap(body, axis_name=AXIS, in_axes=1))
    every = run(as_tree(grads), jnp.asarray(contributes))
    numbers = set()
    for needed, (got, outliers) in zip(made, every, strict=True):
        kept, expected, counted = [[] for _ in range(n)], [], np.zeros(n, int)
        updates = 0
        for gradient, asked in zip(grads.astype(float), contributes, strict=True):
            free = max(n, needed) - sum(map(len, kept))
            for i in (np.arange(n) + updates) % n:
                if asked[i] and np.isfinite(gradient[i]).all() and free:
                    kept[i].append(gradient[i])
                    free -= 1
            expected.append(np.zeros(D))
            if sum(map(len, kept)) >= needed:
                own = np.array([np.mean(of, axis=0) for of in kept if of])
                weights = [len(of) for of in kept if of]
                expected[-1] = rules[needed][1](own, weights=weights)
                away = robust.distances(expected[-1], own)
                who = [i for i in range(n) if kept[i]]
                counted[who] += away > 3 * np.median(away)
                numbers.add(len(own))
                kept, updates = [[] for _ in range(n)], updates + 1
        found = as_rows(got)
        np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), 1e-5)
        assert outliers.tolist() == counted.tolist(), needed
        assert updates
    assert len(numbers) >= 3  # of replicas that had a vote


def traced(function, tree):
    """What does not fit is refused in tracing."""
    return jax.eval_shape(
        jax.vmap(function, axis_name=AXIS), by_hand.replicate(tree, 4)
    )


def met(exchange, tree):
    return traced(lambda tree: exchange.meet(tree, (), AXIS).mean, tree)


ex, ONES = oxs.exchange, jnp.ones(3)
ROWS = oxs.IndexedSlices(jnp.array([0, 1]), jnp.ones((2, 3)))


def shard(**options):
    return oxs.cross_shard(optax.sgd(1.0), AXIS, **options)


test_refused = all_refused(globals())(r"""
ex.trimmed_mean(-1)  # ValueError: f must be 0 or more
ex.trimmed_mean(1.0)
ex.krum(True)  # TypeError: f must be an integer
ex.krum(1, m=0)  # ValueError: m must be 1 or more
ex.geometric_median(0)  # ValueError: steps must be 1 or more
ex.clipped(0.0)  # ValueError: a number in \(0, inf\)
ex.clipped("mean")  # TypeError: 'median'
ex.clipped(None)  # TypeError: must be a number
ex.clipped(1.0, "sum")  # TypeError: exchange must be
met(ex.trimmed_mean(2), ONES)
met(ex.krum(1), ONES)  # ValueError: at least 5 replicas; the axis has 4
met(ex.median(), ROWS)
met(ex.clipped(1.0), ROWS)  # ValueError: row-sparse
met(ex.median(), jnp.ones(3, jnp.int32))  # TypeError: dtype int32
shard(exchange=ex.median(), group_assignment=[[0, 1]])  # ValueError: groups
shard(exchange=ex.median(), grads="summed")
    # ValueError: each replica's own gradient
traced(lambda x: weighted(ex.median())(x, x[0]), ONES)  # ValueError: takes no weight
traced(lambda x: weighted(ex.median())({"w": x}, True), ROWS)  # ValueError: row-sparse
""")

"""Robust exchanges against their definitions, for every set of contributors."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from tests.reference import robust

AXIS = "data"
SHAPES = {"matrix": (3, 5), "scalar": (), "none": (0,), "vector": (7,)}
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
ENDS = np.cumsum(SIZES)[:-1]
SLICES = [slice(e - s, e) for s, e in zip(SIZES, np.cumsum(SIZES), strict=True) if s]
D = sum(SIZES)
# name: (exchange, definition on those that count, least number of replicas)
RULES = {
    "median": (oxs.exchange.median(), robust.median, 1),
    "trimmed_0": (oxs.exchange.trimmed_mean(0), lambda v: v.mean(axis=0), 1),
    "trimmed_1": (
        oxs.exchange.trimmed_mean(1),
        functools.partial(robust.trimmed_mean, f=1),
        3,
    ),
    "trimmed_2": (
        oxs.exchange.trimmed_mean(2),
        functools.partial(robust.trimmed_mean, f=2),
        5,
    ),
    "sign": (oxs.exchange.sign_majority(), robust.sign_majority, 1),
    "krum_0": (oxs.exchange.krum(0), lambda v: v.mean(axis=0), 1),
    "krum_1": (oxs.exchange.krum(1), functools.partial(robust.krum, f=1), 5),
    "krum_1_1": (oxs.exchange.krum(1, 1), functools.partial(robust.krum, f=1, m=1), 5),
    "clipped": (
        oxs.exchange.clipped(2.0),
        lambda v: np.mean(
            [x * min(1, 2.0 / max(np.linalg.norm(x), 1e-30)) for x in v], axis=0
        ),
        1,
    ),
    "clipped_median": (
        oxs.exchange.clipped("median"),
        lambda v: np.mean(
            [
                x * min(1, np.median(robust.distances(0, v)) / np.linalg.norm(x))
                if np.any(x)
                else x
                for x in v
            ],
            axis=0,
        ),
        1,
    ),
}
# Those that no single replica can move further than the others reach.
STAND_UP = {
    "median": oxs.exchange.median(),
    "trimmed": oxs.exchange.trimmed_mean(1),
    "krum": oxs.exchange.krum(1),
    "krum_1": oxs.exchange.krum(1, m=1),
    "geometric": oxs.exchange.geometric_median(),
    "clipped_median": oxs.exchange.clipped("median"),
}


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
    found = jax.jit(jax.vmap(workers))(as_tree(v), jnp.asarray(weights, jnp.float32))
    rows = {name: as_rows(tree) for name, tree in found.items()}
    for name, all_replicas in rows.items():
        same = np.broadcast_to(all_replicas[:, :1], all_replicas.shape)
        np.testing.assert_array_equal(all_replicas, same, err_msg=name)
    return {name: all_replicas[:, 0] for name, all_replicas in rows.items()}


def values(n, seed=0, ties=False):
    v = np.random.default_rng(seed).normal(size=(n, D)).astype(np.float32)
    return np.round(v) if ties else v


@pytest.mark.parametrize("n", [3, 8])
def test_every_set_of_contributors_gives_what_the_definition_says(n):
    masks = robust.masks(n)
    exchanges = {name: rule[0] for name, rule in RULES.items() if rule[2] <= n}
    v = np.concatenate(
        [
            np.broadcast_to(values(n, n, ties), (len(masks), n, D))
            for ties in (False, True)
        ]
    )
    masks = np.concatenate([masks, masks])
    # What does not count leaves no trace, NaN or not.
    left_out = np.where(masks[:, :, None], v, np.nan).astype(np.float32)
    found = run(exchanges, left_out, masks)
    for name, got in found.items():
        definition = RULES[name][1]
        for rows, mask, result in zip(v, masks, got, strict=True):
            expected = (
                definition(rows[mask].astype(float)) if mask.any() else 0 * result
            )
            np.testing.assert_allclose(
                result, expected, atol=2e-6, rtol=2e-6, err_msg=f"{name} {mask}"
            )


def test_geometric_median_has_the_least_sum_of_distances():
    n, masks = 7, robust.masks(7)
    v = values(n, 5)
    exchanges = {
        "8": oxs.exchange.geometric_median(),
        "100": oxs.exchange.geometric_median(100),
    }
    found = run(exchanges, np.broadcast_to(v, (len(masks), n, D)), masks)
    for mask, eight, many in zip(masks, *found.values(), strict=True):
        if not mask.any():
            assert not eight.any()
            continue
        rows = v[mask].astype(float)
        least = robust.distances(robust.geometric_median(rows), rows).sum()
        if mask.sum() == 2:  # Every point between the two has the least sum.
            least = robust.distances(rows[0], rows).sum()
        assert robust.distances(eight, rows).sum() <= least * 1.01 + 1e-5, mask
        assert robust.distances(many, rows).sum() <= least * 1.0003 + 1e-5, mask


@pytest.mark.parametrize("n", [1, 8])
def test_adasum_is_horovods_tree_of_pairs(n):
    rng = np.random.default_rng(n)
    v = values(n, n)
    one, other = np.zeros((2, n, D), np.float32)
    one[:] = v[:1]  # parallel: the mean
    other[np.arange(n), np.arange(n)] = 3.0  # orthogonal: the sum
    scales = 10.0 ** rng.integers(-30, 18, size=(n, 1))
    cases = np.stack([v, one, other, v * 1e-25, v * scales, v * 0]).astype(np.float32)
    found = run({"adasum": oxs.exchange.adasum()}, cases, np.ones((len(cases), n)))
    leaves = [slice(0, 15), slice(15, 16), slice(16, 23)]
    for case, got in zip(cases.astype(float), found["adasum"], strict=True):
        expected = robust.adasum(case, leaves)
        for leaf in leaves:
            size = np.abs(expected[leaf]).max()
            np.testing.assert_allclose(
                got[leaf], expected[leaf], rtol=0, atol=1e-5 * size
            )
    np.testing.assert_allclose(found["adasum"][1], v[0], rtol=1e-6)


def test_the_order_of_replicas_does_not_matter_and_one_that_lies_has_little_effect():
    n = 8
    rng = np.random.default_rng(1)
    honest = rng.normal(size=(n, D)) + 5
    cases = [honest, *(honest[rng.permutation(n)] for _ in range(6))]
    for lie in (1e30, -1e30, 3e38, 100.0):
        cases += [np.concatenate([honest[1:], np.full((1, D), lie)])]
    broken = np.concatenate([honest[1:], np.full((1, D), np.nan)])
    cases = np.stack([*cases, broken]).astype(np.float32)
    spread = np.linalg.norm(honest - honest.mean(axis=0), axis=1).max()
    found = run(STAND_UP, cases, np.ones(cases.shape[:2]))
    for name, got in found.items():
        np.testing.assert_allclose(
            got[1:7], got[:1].repeat(6, 0), rtol=2e-6, err_msg=name
        )
        moved = np.linalg.norm(got[7:] - honest[1:].mean(axis=0), axis=1)
        if name == "clipped_median":  # It bounds what one replica adds, NaN apart.
            moved, limit = moved[:-1], 2 * np.linalg.norm(honest, axis=1).max() / n
        else:
            limit = spread
        assert np.all(moved < limit), (name, moved, limit)


def test_gradients_of_any_size_are_compared():
    v = values(8, 3)
    cases = np.stack([v * 1e-30, v, v * 1e30]).astype(np.float32)
    gram = {name: STAND_UP[name] for name in ("krum", "geometric")}
    for name, got in run(gram, cases, np.ones((3, 8))).items():
        for scale, result in zip((1e-30, 1, 1e30), got, strict=True):
            np.testing.assert_allclose(result / scale, got[1], rtol=2e-3, err_msg=name)


def mesh(*sizes_and_names):
    sizes, names = zip(*sizes_and_names, strict=True)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize(
    "context", ["pmap", "checked", "unchecked", "laid_out", "two_axes"]
)
def test_every_context_gives_the_numbers_of_one_device(context):
    n = 4 if context == "laid_out" else 8
    rules = {
        "median": oxs.exchange.median(),
        "krum": oxs.exchange.krum(0, m=1),
    }
    v, weights = values(n, 2), np.ones(n, np.float32)
    weights[1] = 0
    tree, weights = as_tree(v), jnp.asarray(weights)
    tree["half"] = tree["vector"].astype(jnp.bfloat16)
    expected = jax.jit(jax.vmap(meets(rules), axis_name=AXIS))(tree, weights)
    if context == "pmap":
        found = jax.pmap(meets(rules), axis_name=AXIS)(tree, weights)
    elif context == "two_axes":

        def both(tree, weight):
            return {
                name: rule.meet(tree, (), ("a", "b"), weight=weight)[0]
                for name, rule in rules.items()
            }

        nested = jax.vmap(jax.vmap(both, axis_name="b"), axis_name="a")
        tree, weights = jax.tree.map(
            lambda x: x.reshape(2, 4, *x.shape[1:]), (tree, weights)
        )
        found = jax.jit(nested)(tree, weights)
        found = jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), found)
    else:
        over = (
            mesh((4, AXIS), (2, "fsdp")) if context == "laid_out" else mesh((8, AXIS))
        )

        def local(tree, weight):
            results = meets(rules)(*oxs.unstack((tree, weight)))
            return oxs.stack(results, 1)

        shape = jax.shard_map(
            local,
            mesh=over,
            in_specs=P(AXIS),
            out_specs=P(AXIS),
            axis_names={AXIS},
            check_vma=context != "unchecked",
        )
        found = jax.jit(shape)(tree, weights)
    for name, got in found.items():
        assert got["half"].dtype == jnp.bfloat16
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected[name]), strict=True)
        for leaf, other in pairs:
            np.testing.assert_allclose(
                np.asarray(leaf, np.float32),
                np.asarray(other, np.float32),
                rtol=2e-6,
                atol=2e-6,
                err_msg=name,
            )


def test_shards_of_one_replica_agree():
    """A replica along `inside`: distances are of whole arrays, not of shards."""
    over = mesh((4, AXIS), (2, "inside"))
    v = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    v[0, :3] += 1  # The two halves alone would choose differently.
    v[1, 3:] += 3
    rules = {
        "krum": lambda axes: oxs.exchange.krum(0, m=1, shard_axes=axes),
        "clipped": lambda axes: oxs.exchange.clipped(1.0, shard_axes=axes),
    }

    def sharded(axes, check_vma):
        def local(v):
            return {
                name: rule(axes).meet(v[0], (), AXIS)[0][None]
                for name, rule in rules.items()
            }

        spec = P(AXIS, "inside")
        return jax.jit(
            jax.shard_map(
                local, mesh=over, in_specs=spec, out_specs=spec, check_vma=check_vma
            )
        )(v)

    def whole(v):
        return {name: rule(None).meet(v, (), AXIS)[0] for name, rule in rules.items()}

    expected = jax.jit(jax.vmap(whole, axis_name=AXIS))(v)
    for check_vma in (True, False):
        found = sharded("inside", check_vma)
        for name in rules:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-5, atol=1e-6
            )
        with pytest.raises(ValueError, match="shard_axes"):
            sharded(None, check_vma)


def test_what_travels_is_what_an_all_reduce_sends():
    """An all-to-all there, an all-gather back, and the matrix if needed."""
    over, size = mesh((8, AXIS)), 8 * 100
    for rule, extra in (
        (oxs.exchange.median(), 0),
        (oxs.exchange.krum(1), 8 * 8 + 1),
        (oxs.exchange.sign_majority(), 0),
    ):

        def local(tree, rule=rule):
            return rule.meet(tree, (), AXIS)[0]

        tree = {"a": jnp.ones((8, 304)), "b": jnp.ones((8, 31, 16))}
        mapped = jax.shard_map(local, mesh=over, in_specs=P(AXIS), out_specs=P())
        rows = oxs.audit.collectives(mapped, tree)
        item = 1 if rule is not None and rows[0].bytes == size else 4
        kinds = {row.kind: row.bytes for row in rows}
        assert kinds["all-to-all"] == size * item
        gathered = [row.bytes for row in rows if row.kind == "all-gather"]
        assert sum(gathered) in (size * item // 8, size * item // 8 + 4)
        assert kinds.get("all-reduce", 0) == (8 * 8 * 4 if extra else 0)


def test_wrappers_take_them_and_leave_out_who_is_not_finite():
    n = 5
    gradients = jnp.asarray(values(n, 9)).at[2].set(jnp.nan)
    honest = np.delete(np.asarray(gradients), 2, axis=0)
    params = jnp.zeros(D)
    tx = oxs.local_sgd(
        optax.sgd(1.0),
        AXIS,
        communication_period=1,
        drop_nonfinite=True,
        exchange=oxs.exchange.krum(1),
    )
    axes = oxs.state_axes(tx, params)

    def step(gradient, state, params, tx=tx):
        return oxs.apply_gradients(tx, gradient, state, params)

    steps = jax.vmap(step, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
    found, _ = jax.jit(steps)(
        gradients, oxs.stack(tx.init(params), n, axes), oxs.stack(params, n)
    )
    # Four are left, too few for one that lies among them: their mean.
    np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))
    np.testing.assert_allclose(found[0], -honest.mean(axis=0), rtol=1e-5, atol=1e-6)

    tx = oxs.cross_shard(optax.sgd(1.0), AXIS, exchange=oxs.exchange.median())

    def update(gradient, weight):
        return tx.update(gradient, tx.init(gradient), weight=weight)[0]

    finite = jnp.asarray(np.arange(n) != 2)
    found = jax.jit(jax.vmap(update, axis_name=AXIS))(gradients, finite)
    np.testing.assert_allclose(found[0], -np.median(honest, axis=0), rtol=1e-6)
    with pytest.raises(ValueError, match="takes no weight"):
        jax.vmap(update, axis_name=AXIS)(gradients, jnp.arange(5))


def mapped(exchange, tree, n=4, **options):
    def meet(tree):
        return exchange.meet(tree, (), AXIS, **options)[0]

    return jax.vmap(meet, axis_name=AXIS)(oxs.stack(tree, n))


ROWS = oxs.IndexedSlices(jnp.array([0, 1]), jnp.ones((2, 3)))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: oxs.exchange.trimmed_mean(-1), ValueError, "f must be at least 0"),
        (lambda: oxs.exchange.trimmed_mean(1.0), TypeError, "f must be an integer"),  # pyright: ignore[reportArgumentType]
        (lambda: oxs.exchange.krum(True), TypeError, "f must be an integer"),
        (lambda: oxs.exchange.krum(1, m=0), ValueError, "m must be at least 1"),
        (
            lambda: oxs.exchange.geometric_median(0),
            ValueError,
            "steps must be at least 1",
        ),
        (lambda: oxs.exchange.clipped(0.0), ValueError, "finite and positive"),
        (lambda: oxs.exchange.clipped("mean"), ValueError, "'median'"),  # pyright: ignore[reportArgumentType]
        (lambda: oxs.exchange.clipped(None), TypeError, "number or 'median'"),  # pyright: ignore[reportArgumentType]
        (lambda: oxs.exchange.clipped(1.0, "sum"), TypeError, "exchange must be"),  # pyright: ignore[reportArgumentType]
        (
            lambda: mapped(oxs.exchange.trimmed_mean(2), jnp.ones(3)),
            ValueError,
            "at least 5 replicas; the axis has 4",
        ),
        (
            lambda: mapped(oxs.exchange.krum(1), jnp.ones(3)),
            ValueError,
            "at least 5 replicas",
        ),
        (
            lambda: mapped(oxs.exchange.adasum(), jnp.ones(3), n=6),
            ValueError,
            "power of two",
        ),
        (lambda: mapped(oxs.exchange.median(), ROWS), ValueError, "row-sparse"),
        (lambda: mapped(oxs.exchange.clipped(1.0), ROWS), ValueError, "row-sparse"),
        (
            lambda: mapped(oxs.exchange.median(), jnp.ones(3, jnp.int32)),
            TypeError,
            "dtype int32",
        ),
        (
            lambda: mapped(
                oxs.exchange.median(), jnp.ones(3), group_assignment=[[0, 1], [2, 3]]
            ),
            ValueError,
            "group_assignment",
        ),
        (
            lambda: oxs.cross_shard(
                optax.sgd(1.0),
                AXIS,
                exchange=oxs.exchange.median(),
                group_assignment=[[0, 1]],
            ),
            ValueError,
            "groups",
        ),
    ],
)
def test_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_they_are_not_linear():
    made = [*STAND_UP.values(), oxs.exchange.sign_majority(), oxs.exchange.adasum()]
    assert not any(map(operator.attrgetter("linear"), made))

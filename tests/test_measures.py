"""What `measure=True` says: against NumPy, in every context, and what it costs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from optx_sync.exchange.measures import DECAY
from tests import contexts
from tests.meshes import mesh_of

AXIS, WORKERS = contexts.AXIS, contexts.REPLICAS
PARAMS = {"w": np.zeros((3, 2), np.float32), "b": np.ones(2, np.float32)}
SGD = optax.sgd(0.1, momentum=0.9)
WEIGHTS = np.array([1, 3, 2, 0], np.float32)
BATCHES = np.array([4, 1, 2, 8], np.int32)


def cosine(vectors, shares):
    """Of all pairs, each counted by its shares and norms."""
    products = np.einsum("i,j,id,jd->ij", shares, shares, vectors, vectors)
    pairs = ~np.eye(len(vectors), dtype=bool)
    squares = shares[:, None] * shares[None] * np.sum(vectors**2, 1)[:, None]
    return products[pairs].sum() / squares[pairs].sum()


def reference(vectors, shares, batches, before=(0.0, 0.0)):
    """(agreement, norm, averages of S and |G|^2), from vectors [N, D], in float64."""
    mean = shares @ vectors
    big, small = mean @ mean, shares @ np.sum(vectors**2, 1)
    ka, kb = np.sum(shares**2 / batches), np.sum(shares / batches)
    noise = (small - big) / (kb - ka)
    averages = (noise, big - ka * noise)
    averages = [
        DECAY * old + (1 - DECAY) * new
        for old, new in zip(before, averages, strict=True)
    ]
    return cosine(vectors, shares), np.sqrt(small), *averages


def flat(tree):
    return np.concatenate(
        [np.asarray(x, np.float64).reshape(x.shape[0], -1) for x in tree.values()], 1
    )


def draw(steps, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: (0.5 + rng.normal(size=(steps, WORKERS, *p.shape))).astype("f4"),
        PARAMS,
    )


def everything() -> Any:
    """All wrappers that measure, side by side on the same gradients."""
    options: dict[str, Any] = {"communication_period": 1, "measure": True}
    sync: Any = oxs.sync_replicas
    parts = {
        "weighed": oxs.cross_shard(SGD, AXIS, measure=True),
        "equal": oxs.cross_shard(SGD, AXIS, measure=True, reduction="sum"),
        "groups": oxs.cross_shard(
            SGD, AXIS, group_assignment=[[0, 2], [1, 3]], measure=True
        ),
        "sync": sync(SGD, AXIS, 6, measure=True),
        "sync_weighed": sync(SGD, AXIS, 5, measure=True),
        "center": oxs.diloco(
            optax.sgd(1.0),
            AXIS,
            outer=optax.sgd(0.5),
            drop_nonfinite=True,
            **options,
        ),
    }

    def init(params):
        return {name: tx.init(params) for name, tx in parts.items()}

    def update(updates, state, params=None, **given):
        weight, batch_size = given["weight"], given["batch_size"]
        contributes = given["contributes"]
        extra: dict[str, Any] = {
            "weighed": {"weight": weight, "batch_size": batch_size},
            "equal": {"batch_size": 5},
            "sync": {"batch_size": batch_size, "contributes": contributes},
            "sync_weighed": {
                "weight": weight,
                "batch_size": batch_size,
                "contributes": contributes,
            },
        }
        after = {
            name: tx.update(updates, state[name], params, **extra.get(name, {}))[1]
            for name, tx in parts.items()
        }
        return jax.tree.map(jnp.zeros_like, params), after

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize("context", contexts.DISTINCT)
def test_the_same_in_every_context(context):
    """The last of two steps, the gradients that were used in `sync` being 4 + 3."""
    grads = draw(2)
    contributes = np.array([[True] * 4, [True, True, False, True]])
    extra = {
        "weight": np.stack([WEIGHTS] * 2),
        "batch_size": np.stack([BATCHES] * 2),
        "contributes": contributes,
    }
    _, state = contexts.replay(context, everything(), PARAMS, grads, extra)
    vectors = np.stack([flat(jax.tree.map(lambda g, t=t: g[t], grads)) for t in (0, 1)])
    shares = WEIGHTS / WEIGHTS.sum()
    equal = np.full(4, 0.25)

    def twice(vectors, shares, batches):
        first = reference(vectors[0], shares, batches)
        return reference(vectors[1], shares, batches, first[2:])

    # The workers stay where they are, and the center has made half a step before.
    moved = vectors[1] - 0.5 * equal @ vectors[0]
    six = np.concatenate([vectors[0], vectors[1][contributes[1]]])[:6]
    batches = np.concatenate([BATCHES, BATCHES[contributes[1]]])[:6]
    # With weights the last replica is left out of both steps.
    five = [*vectors[0][:3], *vectors[1][:2]]
    weights = np.array([*WEIGHTS[:3], *WEIGHTS[:2]])
    weighed = (weights / weights.sum(), np.array([*BATCHES[:3], *BATCHES[:2]]))
    expected = {
        "weighed": (*twice(vectors, shares, BATCHES), 3),
        "equal": (*twice(vectors, equal, np.full(4, 5)), 4),
        "sync": (*reference(six, np.full(6, 1 / 6), batches), 6),
        "sync_weighed": (*reference(np.array(five), *weighed), 5),
        "center": (*reference(moved, equal, np.ones(4))[:2], 0, 0, 4),
    }
    for name, (agreement, norm, noise, signal, contributors) in expected.items():
        found = oxs.metrics(state[name])
        for value, right in (
            (found.agreement, agreement),
            (found.contribution_norm, norm),
            (found.contributors, contributors),
        ):
            np.testing.assert_allclose(value, np.full_like(value, right), rtol=1e-5)
        if name != "center":
            np.testing.assert_allclose(
                found.noise_scale,
                np.full_like(found.noise_scale, noise / signal),
                rtol=2e-4,
            )
    # The update of the second step, and how far the outer optimizer moved the center.
    first, second = np.mean(vectors, 1)
    for name, right in (
        ("equal", 0.4 * (second + 0.9 * first)),
        ("center", 0.5 * equal @ moved),
    ):
        found = oxs.metrics(state[name]).update_norm
        np.testing.assert_allclose(
            found, np.full_like(found, np.linalg.norm(right)), rtol=1e-5
        )
    groups = oxs.metrics(state["groups"])
    for members in ([0, 2], [1, 3]):
        right = twice(vectors[:, members], np.full(2, 0.5), np.ones(2))
        for member in members:
            np.testing.assert_allclose(
                groups.agreement.reshape(-1)[member], right[0], rtol=1e-5
            )


def test_unbiased_with_unequal_batches_and_weights():
    """Means over draws of g_i = G + e_i / sqrt(b_i), the covariance of e being I."""
    draws, size = 20_000, 7
    truth = np.arange(1.0, 1 + size, dtype=np.float32) / 4
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(WORKERS, draws, size)).astype(np.float32)
    grads = truth + noise / np.sqrt(BATCHES)[:, None, None]
    tx: Any = oxs.cross_shard(optax.identity(), AXIS, measure=True)

    def averages(grads, weight, batch):
        def one(grads):
            state = tx.update(grads, tx.init(grads), weight=weight, batch_size=batch)[1]
            return state.info.measured.noise, state.info.measured.signal

        noise, signal = jax.vmap(one)(grads)
        return jnp.mean(noise) / (1 - DECAY), jnp.mean(signal) / (1 - DECAY)

    for weights in (WEIGHTS, WEIGHTS + 1):
        each = jax.vmap(averages, out_axes=None, axis_name=AXIS)
        found = jax.jit(each)(grads, weights, BATCHES)
        np.testing.assert_allclose(found, (size, float(truth @ truth)), rtol=0.01)


def test_a_replica_without_weight_leaves_no_trace():
    tx: Any = oxs.cross_shard(SGD, AXIS, measure=True)
    grads = jax.tree.map(lambda g: g[0], draw(1))
    broken = jax.tree.map(
        lambda g: np.concatenate([g[:3], np.full_like(g[:1], np.nan)]), grads
    )

    def measured(grads, weight):
        state = tx.update(grads, tx.init(PARAMS), PARAMS, weight=weight)[1]
        return oxs.metrics(state)

    run = jax.jit(jax.vmap(measured, out_axes=None, axis_name=AXIS))
    found = run(broken, np.array([True, True, True, False]))
    expected = run(jax.tree.map(lambda g: g[:3], grads), np.ones(3, bool))
    np.testing.assert_allclose(found[:5], expected[:5], rtol=1e-5)
    nobody = run(broken, np.zeros(4, bool))
    assert np.isfinite(np.stack(nobody[:5])).all() and float(nobody.contributors) == 0


@pytest.mark.parametrize("build", ["cross_shard", "sync_replicas"])
@pytest.mark.parametrize("bad", ["gradient", "batch_size", "every_batch_size"])
def test_a_round_that_cannot_be_measured_stays_out_of_the_averages(build, bad):
    """A guard skips its update, and one NaN would stay in the averages for ever."""
    inner = optax.apply_if_finite(SGD, 9)
    tx: Any = (
        oxs.cross_shard(inner, AXIS, measure=True)
        if build == "cross_shard"
        else oxs.sync_replicas(inner, AXIS, WORKERS, measure=True)
    )
    grads = draw(3)
    spoilt = jax.tree.map(np.copy, grads)
    batches = np.full((3, WORKERS), 2.0, np.float32)
    if bad == "gradient":
        spoilt["w"][1, 2, 0, 0] = np.nan
    else:
        batches[1, 2 if bad == "batch_size" else slice(None)] = 0

    def steps(grads, batches):
        state, told = tx.init(PARAMS), []
        for t in range(3):
            now = jax.tree.map(lambda g, t=t: g[t], grads)
            given = 0 if bad == "every_batch_size" and t == 1 else batches[t]
            state = tx.update(now, state, PARAMS, batch_size=given)[1]
            now = oxs.metrics(state)
            told.append((now.noise_scale, now.contributors))
        return told

    run = jax.jit(jax.vmap(steps, 1, None, axis_name=AXIS))
    (first, _), (second, contributors), (third, _) = run(spoilt, batches)
    assert float(first) == float(second) != 0
    assert float(contributors) == WORKERS
    vectors = [flat(jax.tree.map(lambda g, t=t: g[t], grads)) for t in (0, 2)]
    equal, twos = np.full(WORKERS, 1 / WORKERS), np.full(WORKERS, 2)
    before = reference(vectors[0], equal, twos)[2:]
    noise, signal = reference(vectors[1], equal, twos, before)[2:]
    np.testing.assert_allclose(third, noise / signal, rtol=2e-4)


def test_rows_are_measured_as_the_table_would_be():
    rng = np.random.default_rng(3)
    table = np.zeros((5, 2), np.float32)
    ids = rng.integers(0, 5, (WORKERS, 4), np.int32)  # of which some are equal
    values = rng.normal(size=(WORKERS, 4, 2)).astype(np.float32)
    tx: Any = oxs.cross_shard(oxs.optimizers.gradient_descent(0.1), AXIS, measure=True)

    def measured(rows, dense):
        grads = oxs.IndexedSlices(*rows)
        if dense:
            grads = grads.to_dense(5)
        return oxs.metrics(tx.update(grads, tx.init(table), table)[1])

    def both(*rows):
        return measured(rows, False), measured(rows, True)

    each = jax.jit(jax.vmap(both, out_axes=None, axis_name=AXIS))
    found, expected = each(ids, values)
    np.testing.assert_allclose(found[:5], expected[:5], rtol=1e-5)


def test_a_scalar_for_each_measure_and_no_collective_more():
    params = {"w": jnp.zeros(50), "b": jnp.zeros(3)}
    mesh = contexts.mesh()

    def communicated(build, extra, **options):
        tx = build(**options)

        def local(grads, extra):
            state = tx.init(oxs.localize(params, AXIS))
            grads, extra = by_hand.first((grads, extra))
            return by_hand.replicate(tx.update(grads, state, params, **extra), 1)

        grads = by_hand.replicate(params, WORKERS)
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
        )
        calls = oxs.audit.collectives(mapped, grads, extra)
        assert {call.kind for call in calls} == {"all-reduce"}
        return len(calls), sum(call.bytes for call in calls)

    weights = {"weight": WEIGHTS}
    for build, extra, scalars in (
        (lambda **o: oxs.cross_shard(SGD, AXIS, **o), {}, 1),
        (lambda **o: oxs.cross_shard(SGD, AXIS, **o), weights, 4),
        (
            lambda **o: oxs.cross_shard(SGD, AXIS, **o),
            {**weights, "batch_size": BATCHES},
            5,
        ),
        (lambda **o: oxs.sync_replicas(SGD, AXIS, 4, **o), {}, 4),
        (lambda **o: oxs.diloco(SGD, AXIS, communication_period=1, **o), {}, 1),
    ):
        without = {k: v for k, v in extra.items() if k == "weight"}
        calls, size = communicated(build, without)
        assert communicated(build, extra, measure=True) == (calls, size + 4 * scalars)


def test_a_state_can_be_donated():
    for leaf in (leaves := jax.tree.leaves(everything().init(PARAMS))):
        assert isinstance(leaf, jax.Array)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_what_is_refused():
    eight_bits = oxs.exchange.quantized()
    options: dict[str, Any]
    for options, message in (
        ({"grads": "averaged"}, "own gradient, but grads='averaged' says"),
        ({"grads": "summed"}, "own gradient, but grads='summed' says"),
        ({"exchange": eight_bits}, "this exchange gives another one, coded or cut"),
    ):
        with pytest.raises(ValueError, match=message):
            oxs.cross_shard(SGD, AXIS, measure=True, **options)
    with pytest.raises(ValueError, match="this exchange gives another one"):
        oxs.sync_replicas(SGD, AXIS, 2, measure=True, exchange=eight_bits)

    def update(tx, grads, **extra):
        def one(_):
            return tx.update(grads, tx.init(PARAMS), PARAMS, **extra)[0]

        return jax.eval_shape(jax.vmap(one, axis_name=AXIS), jnp.arange(2))

    tx = oxs.cross_shard(SGD, AXIS, measure=True)
    with pytest.raises(ValueError, match=r"batch_size must be a scalar.*\(2,\)"):
        update(tx, PARAMS, batch_size=np.ones(2))
    with pytest.raises(ValueError, match="batch_size must be a number of examples"):
        update(tx, PARAMS, batch_size=-1)
    rows = oxs.IndexedSlices(jnp.zeros(1, jnp.int32), jnp.ones((1, 2)))
    with pytest.raises(ValueError, match=r"row-sparse, which measure=True does not"):
        update(oxs.sync_replicas(SGD, AXIS, 2, measure=True), {**PARAMS, "w": rows})

    # Where types tell: gradients that autodiff has summed.
    def local(params):
        return tx.update(params, tx.init(params), params)[0]

    summed = jax.shard_map(
        local, mesh=contexts.mesh(), in_specs=P(), out_specs=P(), check_vma=True
    )
    with pytest.raises(ValueError, match="does not vary over the mesh axis"):
        jax.eval_shape(summed, PARAMS)
    # Without measure=True there is nothing to read; a center rule says what it can.
    with pytest.raises(ValueError, match=r"measures nothing\. Pass measure=True"):
        oxs.metrics(
            oxs.cross_shard(
                SGD, AXIS, exchange=oxs.exchange.error_feedback(eight_bits)
            ).init(PARAMS)
        )
    coded = oxs.local_sgd(SGD, AXIS, measure=True, exchange=eight_bits)
    assert oxs.metrics(coded.init(PARAMS)).agreement is None


def test_shards_of_a_replica_are_one():
    """Norms go over all shards where types tell which axes these lie along."""
    grads = {"w": draw(1)["w"][0], "b": draw(1)["b"][0]}
    tx: Any = oxs.cross_shard(SGD, AXIS, measure=True)
    mesh = mesh_of({AXIS: WORKERS, "model": 2})
    specs = {"w": P(None, "model"), "b": P()}

    def local(params, grads):
        grads = by_hand.first(grads)
        return oxs.metrics(tx.update(grads, tx.init(params), params)[1])

    found = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, {"w": P(AXIS, None, "model"), "b": P(AXIS)}),
            out_specs=P(),
        )
    )(PARAMS, grads)
    vectors = flat(grads)
    agreement, norm, noise, signal = reference(vectors, np.full(4, 0.25), np.ones(4))
    expected = (noise / signal, agreement, norm, 0.1 * np.linalg.norm(vectors.mean(0)))
    *measured, outliers = found
    assert outliers is None
    expected = np.array([*expected, 4])
    np.testing.assert_allclose(np.array(measured), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("scale", "options", "expected"),
    [
        (900.0, {}, 900),
        (900.1, {}, 901),
        (900.0, {"multiple": 64}, 960),
        (100.0, {"multiple": 64}, 256),
        (100.0, {"noise": 0.5}, 400),
        (900.0, {"largest": 900, "multiple": 64}, 896),
        (900.0, {"largest": 128}, 256),
        *((unknown, {}, 256) for unknown in (None, 0.0, -3.0, np.nan, np.inf)),
    ],
)
def test_the_batch_that_the_noise_asks_for(scale, options, expected):
    assert oxs.outer.next_batch_size(scale, 256, **options) == expected


@pytest.mark.parametrize(
    ("said", "batch_size", "options"),
    [
        ("batch_size must be a multiple of", 250, {"multiple": 64}),
        ("batch_size must be 1 or more", -32, {}),
        ("largest must be 1 or more", 256, {"largest": -1}),
        ("noise", 256, {"noise": 0.0}),
    ],
)
def test_a_batch_that_cannot_be_is_refused(said, batch_size, options):
    with pytest.raises(ValueError, match=said):
        oxs.outer.next_batch_size(1.0, batch_size, **options)

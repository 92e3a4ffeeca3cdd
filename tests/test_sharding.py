"""Where a state lives: specs, axes and the worker axis itself."""

import functools
import importlib
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from optx_sync.center.round import RoundState
from optx_sync.center.state import CenterState
from optx_sync.exchange.meeting import MeetingState
from optx_sync.outer.delayed_nesterov import DelayedNesterovState
from optx_sync.peers.gossip import OwnCenterState
from optx_sync.replicas.cross_shard import CrossShardState
from optx_sync.state.fields import fields_of
from tests.contexts import assert_close, begun, by_workers
from tests.meshes import mesh_of
from tests.refusals import refused

PACKAGE = pathlib.Path(oxs.__file__).parent
PARAMS = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
SPECS = {"w": P("fsdp", None), "b": P()}
LABELS = {"w": "first", "b": "second"}
# Every leaf of the state of these is one worker's own.
WITH_OPTAX = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "chain": optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(-0.1)),
    "masked": optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "multi_transform": optax.multi_transform(
        {"first": optax.adam(0.1), "second": optax.sgd(0.1, momentum=0.9)}, LABELS
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10), b1=0.8
    ),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "key": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.adam(0.1)),
    "multi_steps": optax.MultiSteps(
        optax.sgd(0.1, momentum=0.9), 2
    ).gradient_transformation(),
    "cross_shard": oxs.cross_shard(optax.adam(0.1), "workers"),
    "catalogue": oxs.optimizers.adam(0.1),
    "stateless": optax.sgd(0.1),
}


def center(inner=None):
    inner = optax.sgd(0.1, momentum=0.9) if inner is None else inner
    return oxs.local_sgd(inner, "workers", communication_period=4)


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None or isinstance(x, P))


@pytest.mark.parametrize("name", WITH_OPTAX)
def test_what_is_optax_s_is_per_worker_and_lies_as_the_parameters(name):
    """And `Workers` lay it as its specs say."""
    tx: Any = WITH_OPTAX[name]
    one, axes = tx.init(PARAMS), by_hand.state_axes(tx, PARAMS)
    assert axes == jax.tree.map(lambda _: 0, one)
    shapes = {(4, 2): SPECS["w"], (2,): SPECS["b"], (): P()}
    specs = by_hand.state_specs(tx, PARAMS, SPECS, None)
    assert specs == jax.tree.map(lambda x: shapes[x.shape], one)
    specs = by_hand.state_specs(tx, PARAMS, SPECS, "workers")
    assert specs == jax.tree.map(lambda x: P("workers", *shapes[x.shape]), one)
    mesh = mesh_of({"workers": 4, "fsdp": 2})
    workers = oxs.Workers(4, "workers", mesh=mesh, specs=SPECS)
    _, state = workers.start((PARAMS, one))
    assert jax.tree.map(lambda x: x.sharding.spec, state) == specs


def test_what_workers_share_has_no_worker_axis():
    tx = center()
    state: Any = tx.init(PARAMS)
    axes: Any = by_hand.state_axes(tx, PARAMS)
    specs: Any = by_hand.state_specs(tx, PARAMS, SPECS, "workers")
    whose = {name: kind.is_shared for name, kind, _ in fields_of(state)}
    own = {"accumulated", "broken", "exchange", "inner", "weight"}
    told = {"dropped", "outliers", "outcome", "outcome_counts", "distance", "gathered"}
    assert {name for name, shared in whose.items() if not shared} == own | told
    assert set(state.info._fields) == told | {"measured"}
    for (name, _, at), (_, _, spec) in zip(
        fields_of(axes), fields_of(specs), strict=True
    ):
        assert all((axis is None) == whose[name] for axis in leaves(at))
        assert all(("workers" in spec) != whose[name] for spec in leaves(spec))
    assert specs.center == SPECS
    assert leaves(specs.inner) == [P("workers"), P("workers", "fsdp", None)]
    assert "workers" not in str(by_hand.state_specs(tx, PARAMS, SPECS, None))


AROUND: dict[str, Any] = {
    "chain": lambda: optax.chain(optax.clip(1.0), center()),
    "masked": lambda: optax.masked(center(), {"w": True, "b": False}),
    "multi_transform": lambda: optax.multi_transform(
        {"first": center(), "second": optax.sgd(0.1, momentum=0.9)}, LABELS
    ),
    "inject": lambda: optax.inject_hyperparams(lambda rate: center(optax.sgd(rate)))(
        rate=0.1
    ),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_workers_share_is_found_inside_of_optax(around):
    tx, get = AROUND[around](), optax.tree_utils.tree_get
    axes = by_hand.state_axes(tx, PARAMS)
    specs = by_hand.state_specs(tx, PARAMS, SPECS, "workers")
    assert (get(axes, "local_step"), get(axes, "center")["w"]) == (None, None)
    assert (get(specs, "local_step"), get(specs, "center")["w"]) == (P(), SPECS["w"])
    _, stacked = oxs.Workers(3, "workers").start((PARAMS, tx.init(PARAMS)))
    assert get(stacked, "center")["w"].shape == (4, 2)


def test_every_state_says_whose_its_fields_are():
    found = set()
    for room in ("replicas", "center", "peers", "exchange"):
        for file in sorted((PACKAGE / room).glob("*.py")):
            module = importlib.import_module(f"optx_sync.{room}.{file.stem}")
            found |= {
                x
                for name, x in vars(module).items()
                if name.endswith("State") and hasattr(x, "_fields")
            }
    # An Optax optimizer's: it is whose the field is that holds it. And what exists
    # within a step alone.
    found -= {DelayedNesterovState, MeetingState, RoundState}
    assert {CrossShardState, CenterState, OwnCenterState} < found
    for state in found:
        assert set(getattr(state, "field_kinds", ())) == set(state._fields), state


@pytest.mark.parametrize("mesh", [None, "Explicit"])
@pytest.mark.parametrize("at_center", ["outer", "inner"])
def test_a_rate_injected_around_a_center_rule(at_center, mesh):
    """All workers share it, since it may act at the center."""
    options: Any = {"axis_name": "workers", "communication_period": 2}

    def make(rate):
        sgd = optax.sgd(rate, 0.5)
        if at_center == "outer":
            return oxs.diloco(optax.sgd(0.1), outer=sgd, **options)
        return oxs.agn(sgd, **options)

    over = mesh and mesh_of({"workers": 4}, mesh)
    workers = oxs.Workers(4, "workers", mesh=over)
    txs = {"given": make(0.3), "injected": optax.inject_hyperparams(make)(rate=0.3)}
    grads = jax.tree.map(lambda x: np.ones((4, 4, *x.shape), np.float32), PARAMS)
    with jax.numpy_dtype_promotion("standard"):
        found, states = by_workers(workers, txs, PARAMS, grads)
    assert_close(found["injected"], found["given"])
    state = states["injected"]
    assert state.hyperparams["rate"].shape == state.count.shape == ()
    last = jax.tree.map(lambda x: x[:, -1], found["injected"])
    _, new = by_hand.resize(txs["injected"], last, state, 3, strict=True)
    assert new.count.shape == () and int(new.count) == 4


def test_factored_slots_keep_the_specs_of_their_axes():
    shapes = {
        "wide": ((128, 256), P("row", "column")),
        "tall": ((256, 128), P("row")),
        "stack": ((2, 128, 256), P(None, ("row", "column"))),
        "square": ((128, 128), P("row", "column")),
        "even": ((128, 128), P("row", "row")),
        "small": ((2, 3), P("row", "column")),
        "bias": ((256,), P("column")),
    }
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, (shape, _) in shapes.items()
    }
    specs = {name: spec for name, (_, spec) in shapes.items()}
    tx = optax.adafactor(0.1, min_dim_size_to_factor=128)
    state: Any = by_hand.state_specs(tx, params, specs, None)[0]
    assert state.v_row == {  # the sums over the larger axis
        "wide": P("row"),
        "tall": P(None),
        "stack": P(None, ("row", "column")),
        # Rows or columns: one cannot see which, unless it does not matter.
        "square": P(),
        "even": P("row"),
        "small": P(),
        "bias": P(),
    }
    assert state.v_col == {
        **state.v_row,
        "wide": P("column"),
        "tall": P("row"),
        "stack": P(None, None),
    }
    whole = {"small": P("row", "column"), "bias": P("column")}
    assert state.v == {name: whole.get(name, P()) for name in shapes}
    placed = by_hand.state_specs(tx, params, specs, "workers")[0]
    assert placed.v_row["wide"] == P("workers", "row")


def test_weights_of_rows_lie_as_their_tables():
    """Of `sync_replicas`, in a step that waits and one that moves; so they are sent."""
    specs = {"first": P("parts"), "second": P("parts"), "b": P()}
    params = {"first": jnp.ones((16, 3)), "second": jnp.ones((8, 5)), "b": jnp.ones(())}
    tx = oxs.sync_replicas(oxs.optimizers.adagrad(0.1), "data", 3)
    rows = {name: (lambda ids: ids) for name in ("first", "second")}

    def loss(params, ids):
        first, second = (oxs.take(params[name], ids) for name in rows)
        return params["b"] * (first.sum() + (second**2).sum())

    def run(mesh):
        options: Any = {"mesh": mesh, "specs": specs} if mesh else {}
        workers = oxs.Workers(2, "data", **options)
        state = workers.start((params, tx.init(params)))

        @workers.step(state=2)
        def step(params, state, ids):
            _, grads = oxs.value_and_grad(loss, rows=rows)(params, ids)
            return oxs.apply_gradients(tx, grads, state, params)

        ids, seen = jnp.array([1, 6, 6, 9]), []
        for _ in range(2):
            state = step(*state, ids)
            kept: Any = state[1].accumulator.row_weights
            places = {getattr(kept[name].sharding, "spec", None) for name in rows}
            assert mesh is None or places == {P("data", "parts")}
            seen.append(jax.tree.map(np.asarray, kept))
        sent = oxs.audit.collectives(step, *state, ids)
        return (jax.tree.map(np.asarray, workers.first(state)[0]), seen), sent

    (found, sent), (wanted, _) = map(run, (mesh_of({"data": 2, "parts": 4}), None))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), found, wanted
    )
    _, (waiting, moved) = wanted
    assert waiting["second"].tolist() == [
        [0, 1, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1, 0],  # 9 is behind its end
    ]
    assert not moved["first"].any()
    lying = jax.device_put(
        jnp.ones((8, 3)), NamedSharding(mesh_of({"parts": 4}), P("parts"))
    )
    state: Any = tx.init(lying)
    assert state.accumulator.row_weights.sharding == lying.sharding
    tables = 4 * (16 * 3 + 8 * 5 + 16 + 8) // 4  # a device's shards, with their weights
    met = [row.bytes for row in sent if row.groups == ((0, 4), (1, 5), (2, 6), (3, 7))]
    assert sum(met) < tables + 64


def test_specs_that_are_a_prefix_of_the_parameters():
    nested = {"layer": PARAMS, "head": jnp.ones(3)}
    specs = by_hand.state_specs(
        optax.sgd(0.1, momentum=0.9), nested, {"layer": P("fsdp"), "head": P()}, None
    )
    assert specs[0].trace == {"layer": {"w": P("fsdp"), "b": P("fsdp")}, "head": P()}
    everywhere = by_hand.state_specs(
        optax.sgd(0.1, momentum=0.9), nested, P(), "workers"
    )
    assert set(leaves(everywhere)) == {P("workers")}


def test_shapes_do_for_parameters():
    shapes = jax.eval_shape(lambda: PARAMS)
    for tx in (*WITH_OPTAX.values(), center()):
        assert by_hand.state_axes(tx, shapes) == by_hand.state_axes(tx, PARAMS)
        specs = by_hand.state_specs(tx, PARAMS, SPECS, "workers")
        assert by_hand.state_specs(tx, shapes, SPECS, "workers") == specs


# The worker axis.


def equal(a, b):
    def same(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        return x.dtype == y.dtype and np.array_equal(x, y)

    return jax.tree.all(jax.tree.map(same, a, b))


@pytest.mark.parametrize("n", [1, 3])
def test_replicate_and_first_are_each_other_s_inverse(n):
    for tx in (*WITH_OPTAX.values(), center()):
        state = tx.init(PARAMS)
        for axes in (jax.tree.map(lambda _: 0, state), by_hand.state_axes(tx, PARAMS)):
            stacked = by_hand.replicate(state, n, axes)
            for leaf, whole, mark in zip(
                *map(jax.tree.leaves, (state, stacked)), leaves(axes), strict=True
            ):
                assert whole.shape == (leaf.shape if mark is None else (n, *leaf.shape))
            assert equal(by_hand.first(stacked, axes), state)


@pytest.mark.parametrize("n", [1, 4])
def test_a_stacked_state_does_not_alias_what_it_came_from(n):
    tx, params = center(), jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    axes = by_hand.state_axes(tx, params)
    stacked = by_hand.replicate(params, n), by_hand.replicate(state, n, axes)
    leaves = jax.tree.leaves((params, state, stacked, by_hand.replicate(state, n)))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_first_of_what_has_no_worker_axis():
    with refused(r"ValueError: worker axis in front.*Pass axes=oxs"):
        by_hand.first({"scalar": jnp.float32(1)})
    with refused(r"ValueError: n must be 1 or more.*number of workers"):
        by_hand.replicate(PARAMS, 0)
    axes = {"scalar": None}
    assert by_hand.first({"scalar": jnp.float32(1)}, axes)["scalar"] == 1


# Random keys.

WORKERS = 4


def folded(key, n=WORKERS):
    return [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(n)]


def words(keys):
    return jax.random.key_data(keys)


NOISY = optax.add_noise(0.1, 0.5, jax.random.key(3))


def noise_key(state):
    return optax.tree_utils.tree_get(state, "rng_key")


# A transformation, and whether its noise may differ between the workers.
HOLD_KEYS = {
    "local_sgd": (oxs.local_sgd(NOISY, "workers"), True),
    "gossip": (oxs.gossip(optax.chain(NOISY, optax.sgd(0.1)), "workers"), True),
    "cross_shard": (oxs.cross_shard(NOISY, "workers", measure=True), False),
    "sync_replicas": (oxs.sync_replicas(NOISY, "workers", 2), False),
    "chain": (optax.chain(oxs.all_reduce_grads("workers"), NOISY), False),
    "masked": (optax.masked(oxs.local_sgd(NOISY, "workers"), True), True),
    "inside": (
        oxs.diloco(oxs.cross_shard(NOISY, "chips", measure=True), "workers"),
        False,
    ),
}


@pytest.mark.parametrize(("tx", "differ"), HOLD_KEYS.values(), ids=HOLD_KEYS)
def test_random_keys_of_a_state_differ_where_workers_may(tx, differ):
    key = jax.random.key(3)
    _, state, axes = begun(tx, jnp.zeros(3), WORKERS)
    found = words(noise_key(state))
    expected = folded(key) if differ else [words(key)] * WORKERS
    np.testing.assert_array_equal(found, expected)
    # There and back is the identity: a step may end with `replicate(state, 1, axes)`.
    back = by_hand.replicate(by_hand.first(state, axes), 1, axes)
    np.testing.assert_array_equal(words(noise_key(back)), found[:1])


def test_random_keys_beside_other_leaves():
    key, raw = jax.random.key(7), np.array([0, 7], np.uint32)
    rows = oxs.IndexedSlices(jnp.array([2, 0]), jnp.ones((2, 2)))
    several = jax.random.split(key, (2, 3))
    tree = {"key": key, "raw": raw, "rows": rows, "several": several, "equal": key}
    tree |= {"number": 2.0, "none": None}
    axes = jax.tree.map(lambda _: 0, tree) | {"equal": None}
    stacked: Any = by_hand.replicate(tree, WORKERS, axes)
    np.testing.assert_array_equal(words(stacked["key"]), folded(key))
    assert stacked["several"].shape == (WORKERS, 2, 3)
    last = words(stacked["several"][:, 1, 2])
    np.testing.assert_array_equal(last, folded(several[1, 2]))
    np.testing.assert_array_equal(stacked["raw"], [raw] * WORKERS)
    np.testing.assert_array_equal(stacked["rows"].indices, [[2, 0]] * WORKERS)
    np.testing.assert_array_equal(words(stacked["equal"]), words(key))
    assert stacked["number"].shape == (WORKERS,) and stacked["none"] is None
    one: Any = by_hand.first(stacked, axes)
    assert np.array_equal(one["rows"].indices, [2, 0])

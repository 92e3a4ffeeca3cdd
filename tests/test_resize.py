"""Another number of workers: what stays to the bit, what joiners get, what is lost."""

import contextlib
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand
from optx_sync.state.fields import fields_of, nodes_of
from tests.contexts import begun, started
from tests.meshes import mesh_of
from tests.refusals import all_refused

AXIS, N = "workers", 8
PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(3, 2), "b": jnp.ones(2, jnp.bfloat16)}
ADAM = optax.adam(0.1)
NOISY = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1, momentum=0.9))
OWES = oxs.exchange.error_feedback(oxs.exchange.power_sgd(1))
CASES: dict[str, Any] = {
    "diloco": oxs.diloco(ADAM, AXIS, measure=True, drop_nonfinite=True),
    "fragments": oxs.agn(optax.sgd(0.1), AXIS, fragments=2, overlap=True),
    "chain": optax.chain(optax.clip(1.0), oxs.diloco(ADAM, AXIS)),
    "masked": optax.masked(oxs.local_sgd(ADAM, AXIS), {"w": True, "b": False}),
    "agn": oxs.agn(optax.adam(0.1), AXIS),
    "elastic": oxs.elastic_average(ADAM, AXIS, moving_rate=0.1, rho=0.3, exchange=OWES),
    "local_sgd": oxs.local_sgd(NOISY, AXIS, exchange=OWES),
    "gossip": oxs.gossip(ADAM, AXIS, outer=optax.sgd(0.7, 0.5)),
    "sync": oxs.sync_replicas(ADAM, AXIS, 3, variable_averages=0.9, measure=True),
    "cross_shard": oxs.cross_shard(ADAM, AXIS, exchange=OWES),
    "plain": ADAM,
}
SHARED = ("center", "outer", "taken", "local_step", "steps_since_round", "global_step")


def trained(tx, stacked=False, workers=N, params=PARAMS):
    """Parameters and state right after a round: numbers of which no other is 0."""
    rng, axes = np.random.default_rng(0), by_hand.state_axes(tx, params)
    at_0 = re.compile(r"\.(steps_since_round|accumulated|total_weight)\b")

    def fill(path, x):
        if at_0.search(jax.tree_util.keystr(path)):
            return jnp.zeros_like(x)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.asarray(rng.uniform(1, 2, x.shape), x.dtype)
        return jnp.ones_like(x) if x.dtype == jnp.int32 else x

    def filled(tree, axes=None):
        tree = by_hand.replicate(tree, workers, axes)
        return jax.tree_util.tree_map_with_path(fill, tree)

    state = filled(tx.init(params), axes)
    if stacked:
        leaves, treedef = jax.tree.flatten(state)
        pairs = zip(leaves, treedef.flatten_up_to(axes), strict=True)
        stack = [jnp.stack([x] * workers) if mark is None else x for x, mark in pairs]
        state = treedef.unflatten(stack)
    return filled(params), state


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        assert x.dtype == y.dtype, path
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y, err_msg=str(path))


def shared_of(state):
    """What workers share: in every wrapper of this package that is in a state."""
    return [
        value
        for node in nodes_of(state)
        for _, kind, value in fields_of(node)
        if kind.is_shared
    ]


def drops(name):
    """What leaves in the middle of a round takes something along."""
    if name == "fragments":
        return pytest.warns(UserWarning, match="leaving workers have learned since")
    return contextlib.nullcontext()


def test_a_joiner_has_the_steps_of_whoever_made_most():
    """Of numbers that have no mean, such as Adam's count."""
    tx = CASES["diloco"]
    params, state = trained(tx)
    counts = optax.tree_utils.tree_get(state, "count") * 0 + jnp.arange(N)
    state = optax.tree_utils.tree_set(state, count=counts)
    _, more = by_hand.resize(tx, params, state, N + 2)
    found = optax.tree_utils.tree_get(more, "count")
    assert found.tolist() == [*range(N), N - 1, N - 1]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_laws(name, stacked):
    """Quick ones, on made up numbers."""
    tx = CASES[name]
    params, state = trained(tx, stacked)
    equal(by_hand.resize(tx, params, state, N), (params, state))
    with drops(name):
        fewer, fewer_state = by_hand.resize(tx, params, state, 3)
    _, more_state = by_hand.resize(tx, fewer, fewer_state, N)
    axes = None if stacked else by_hand.state_axes(tx, PARAMS)
    for of, workers in ((fewer_state, 3), (more_state, N)):
        shapes = jax.eval_shape(
            lambda w=workers: by_hand.replicate(tx.init(PARAMS), w, axes)
        )
        assert jax.tree.map(jnp.shape, of) == jax.tree.map(lambda x: x.shape, shapes)
    there = jax.tree.map(lambda x: x[:3] if stacked else x, shared_of(more_state))
    equal(there, shared_of(fewer_state))
    equal(there, jax.tree.map(lambda x: x[:3] if stacked else x, shared_of(state)))
    # Survivors keep what is theirs, and joiners get moments and counts together.
    for moment in ("mu", "nu", "trace"):
        for path, value in optax.tree_utils.tree_get_all_with_path(state, moment):
            after = dict(optax.tree_utils.tree_get_all_with_path(more_state, moment))
            value, after = (jax.tree.leaves(x)[-1] for x in (value, after[path]))
            # Of synchronous replicas these are equal, not made up as here.
            if name != "sync" and value.shape == after.shape and len(value) == N:
                np.testing.assert_array_equal(after[:3], value[:3])
                assert (np.asarray(after[3:], np.float32) >= 1).all()
    for joiners in ("first", "fresh"):
        _, other = by_hand.resize(tx, fewer, fewer_state, N, joiners=joiners)
        for path, counts in optax.tree_utils.tree_get_all_with_path(other, "count"):
            counts = np.asarray(counts)
            equals = name in ("sync", "cross_shard")  # They stay such.
            if counts.ndim and not equals and "outer" not in str(path):
                right = 0 if joiners == "fresh" else 1
                np.testing.assert_array_equal(counts, [1] * 3 + [right] * (N - 3))


def test_where_parameters_go():
    for name in ("diloco", "chain", "agn", "local_sgd", "masked"):
        tx = CASES[name]
        params, state = trained(tx)
        for n in (3, 11):
            resized, new = by_hand.resize(tx, params, state, n)
            center = oxs.center_params(new, by_hand.first(resized))
            equal(resized["w"], by_hand.replicate(center["w"], n))
            if name == "masked":  # what no center holds stays a worker's own
                kept = min(n, N)
                np.testing.assert_array_equal(resized["b"][:kept], params["b"][:kept])
            else:
                equal(resized["b"], by_hand.replicate(center["b"], n))
    for name in ("elastic", "gossip", "plain", "fragments"):
        tx = CASES[name]
        params, state = trained(tx)
        resized, new = by_hand.resize(tx, params, state, 11)
        equal(jax.tree.map(lambda x: x[:N], resized), params)
        expected = np.asarray(params["w"], np.float64).mean(0)
        if name in ("elastic", "fragments"):
            expected = np.asarray(new.center["w"])
        np.testing.assert_allclose(resized["w"][9], expected, rtol=1e-6)
        with drops(name):
            fewer, _ = by_hand.resize(tx, params, state, 2)
        equal(fewer, jax.tree.map(lambda x: x[:2], params))
    # Equal replicas stay equal, to the bit, whatever they hold.
    tx = CASES["plain"]
    one = {"w": PARAMS["w"] * 0.1, "b": PARAMS["b"] * jnp.inf}
    params, state = by_hand.replicate((one, tx.init(one)), 3)
    equal(
        by_hand.resize(tx, params, state, 7), by_hand.replicate((one, tx.init(one)), 7)
    )


HALF_WAY = oxs.CenterRule(
    contribute=lambda own, center, at: own.params - center,
    take=lambda x, before, after, at: x + 0.5 * (after - x),
    mean_over="workers",
    reads=("params", "center", "after"),
)


def test_what_is_owed_is_shared_out():
    """The sum of what will have arrived: under a mean, and where things are added."""
    sgd = optax.sgd(0.1)
    for tx, mean in (
        (CASES["local_sgd"], True),
        (CASES["elastic"], False),
        (CASES["cross_shard"], True),
        (oxs.cross_shard(sgd, AXIS, reduction="sum", exchange=OWES), False),
        (oxs.agn(sgd, AXIS, reduction="sum", exchange=OWES), False),
        (oxs.agn(sgd, AXIS, exchange=OWES), True),
        (oxs.sync_replicas(sgd, AXIS, 3, exchange=OWES), False),
        (oxs.center_variable(sgd, HALF_WAY, AXIS, exchange=OWES), True),
    ):
        params, state = trained(tx)
        for n in (3, 11):
            _, new = by_hand.resize(tx, params, state, n)
            before, after = (
                np.asarray(s.exchange.error["w"], np.float64).sum(0)
                for s in (state, new)
            )
            if mean:
                before, after = before / N, after / n
            np.testing.assert_allclose(after, before, rtol=1e-6)


MEDIAN = oxs.exchange.median()
OUTLIERS: dict[str, Any] = {
    "cross_shard": oxs.cross_shard(ADAM, AXIS, exchange=MEDIAN),
    "sync_replicas": oxs.sync_replicas(ADAM, AXIS, N, exchange=MEDIAN),
    "local_sgd": oxs.local_sgd(ADAM, AXIS, exchange=MEDIAN),
    "inside": oxs.local_sgd(oxs.cross_shard(ADAM, "data", exchange=MEDIAN), AXIS),
}


@pytest.mark.parametrize("name", OUTLIERS)
def test_a_joiner_was_no_outlier_before(name):
    tx = OUTLIERS[name]
    params, state = trained(tx)
    counts = jnp.zeros(N, jnp.int32).at[5].set(20)
    state = optax.tree_utils.tree_set(
        state, lambda path, x: isinstance(x, jax.Array), outliers=counts
    )
    _, new = by_hand.resize(tx, params, state, 10)
    every = optax.tree_utils.tree_get_all_with_path(new, "outliers")
    found = [x.tolist() for _, x in every if not isinstance(x, tuple)]
    assert found and all(x == [0] * 5 + [20] + [0] * 4 for x in found)


def test_four_go_on_as_four_from_that_center():
    tx = oxs.diloco(optax.sgd(0.3), AXIS, communication_period=2)
    one, target = jnp.linspace(-1, 1, 5), np.linspace(0, 1, N)[:, None]

    def run(number, carry=None):
        step, *begin = started(tx, one, number, AXIS)
        params, state = carry or begin
        for _ in range(4):
            params, state = step(params, state, params - target[:number])
        return params, state

    params, state = run(N)
    four, center = oxs.Workers(4, AXIS), oxs.center_params(state, one)
    resized = four.resize((params, state))
    begun_there, fresh = four.start((center, tx.init(center)))
    equal(begun_there, resized[0])
    fresh = fresh._replace(
        local_step=state.local_step, global_step=state.global_step, outer=state.outer
    )
    equal(run(4, resized), run(4, (begun_there, fresh)))


def test_the_middle_of_a_round():
    for name, what in (
        ("diloco", r"have learned in 3 step\(s\)"),
        ("agn", r"have learned in 3 step\(s\)"),
        ("sync", r"3 gradient\(s\) accumulated for the next update"),
    ):
        tx = CASES[name]
        params, state = trained(tx)
        counter = "accumulated" if name == "sync" else "steps_since_round"
        state = state._replace(**{counter: jnp.int32(3)})
        with pytest.raises(ValueError, match=what):
            by_hand.resize(tx, params, state, 4, strict=True)
        with pytest.warns(UserWarning, match=what):
            _, new = by_hand.resize(tx, params, state, 4)
        summed = new.accumulator if name == "sync" else new.accumulated
        assert not any(jnp.any(x != 0) for x in jax.tree.leaves(summed))
        assert int(getattr(new, counter)) == (0 if name == "sync" else 3)
        equal(by_hand.resize(tx, params, state, N, strict=True), (params, state))


def test_rules_in_each_other_and_replicas_without_an_axis():
    nested = oxs.diloco(oxs.local_sgd(ADAM, "data"), AXIS)
    one = nested.init(PARAMS)
    inside = by_hand.replicate(one, 2, by_hand.state_axes(nested, PARAMS, level=1))
    state = by_hand.replicate(inside, N, by_hand.state_axes(nested, PARAMS))
    params = by_hand.replicate(by_hand.replicate(PARAMS, 2), N)
    resized, new = by_hand.resize(nested, params, state, 3)
    assert resized["w"].shape == (3, 2, 3, 2)
    assert new.inner.center["w"].shape == (3, 3, 2)
    assert new.inner.inner[0].mu["w"].shape == (3, 2, 3, 2)
    with pytest.raises(ValueError, match="right after a round of the outer rule"):
        late = state._replace(steps_since_round=jnp.int32(1))
        by_hand.resize(nested, params, late, 3)

    tx: Any = CASES["sync"]
    axes = by_hand.state_axes(tx, PARAMS, replicated=True)
    state = by_hand.replicate(tx.init(PARAMS), N, axes)
    params, new = by_hand.resize(tx, PARAMS, state, 3, replicated=True)
    equal((params, new.inner), (PARAMS, state.inner))
    assert new.info.outcome.shape == (3,)


def resized(tx, n, **options):
    """With another transformation, parameters or state than those of `diloco`."""
    of_all = trained(CASES["diloco"])
    given = {"params": of_all[0], "state": of_all[1]} | options
    return by_hand.resize(tx, n=n, **given)


test_refused = all_refused(globals())(r"""
resized(CASES["diloco"], 0)  # ValueError: n must be 1 or more
resized(CASES["diloco"], 2.0)  # TypeError: n must be an integer
resized(ADAM, 2)  # ValueError: not a state of tx
resized(CASES["diloco"], 2, params=jnp.float32(1))
    # ValueError: got a scalar.*replicated=True
resized(CASES["diloco"], 2, state=CASES["diloco"].init(PARAMS))
    # ValueError: has no worker axis
resized(CASES["diloco"], 2, params=by_hand.replicate(PARAMS, 2))
    # ValueError: of \[2, 8\] workers
resized(CASES["diloco"], 2, joiners="last")  # ValueError: joiners must be one of
""")


def test_random_keys_are_no_numbers():
    """Typed ones, too: where each worker has its own, so have those who join."""

    def init(params):
        return {"key": jax.random.key(3), "steps": jnp.zeros((), jnp.int32)}

    def update(updates, state, params=None):
        return updates, state

    tx = oxs.local_sgd(optax.GradientTransformation(init, update), AXIS)
    state: Any
    params, state, _ = begun(tx, PARAMS, 2)
    _, new = by_hand.resize(tx, params, state, 5)
    keys = new.inner["key"]
    equal(keys[:2], state.inner["key"])
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == 5
    shared = oxs.cross_shard(optax.GradientTransformation(init, update), AXIS)
    held = jax.tree.map(lambda x: jnp.stack([x, x]), shared.init(PARAMS))
    _, held = by_hand.resize(shared, params, held, 3)
    equal(held["key"], jnp.stack([jax.random.key(3)] * 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_hand.resize(tx, params, state, 1, strict=True)


@pytest.mark.parametrize("name, kept", [("fragments", 3.0), ("agn", 0.0)])
def test_what_parts_under_way_have_accumulated_stays(name, kept):
    """Without parts a resize is right after a round, and all begin anew."""
    params, state = trained(CASES[name])
    threes = jax.tree.map(lambda x: jnp.full_like(x, 3), state.accumulated)
    state = state._replace(accumulated=threes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "resize in the middle")
        _, resized = by_hand.resize(CASES[name], params, state, N + 1)
    for x in jax.tree.leaves(resized.accumulated):
        assert x[:N].tolist() == jnp.full_like(x[:N], kept).tolist()
        assert not x[N:].any()


# Workers, devices inside of each, and how these cut the matrices.
INSIDE = ((2, 4, P("inside")), (8, 1, P()), (4, 2, P(None, "inside")))
MATRICES = {
    "layers": [jnp.sin(jnp.arange(32.0) + k).reshape(4, 8) for k in range(5)],
    "b": jnp.ones(3),
}
ROUNDS: Any = {"communication_period": 2}
MUON: Any = optax.contrib.muon(0.1, ns_steps=2)
STACKED: Any = oxs.stacked(MUON, P("inside"))
# On simulated workers, and on sharded ones.
RESUMED: Any = {
    "cross_shard, restore": [oxs.cross_shard(ADAM, AXIS)] * 2,
    "diloco, resize": [oxs.diloco(ADAM, AXIS, **ROUNDS)] * 2,
    "stacked, restore": [oxs.cross_shard(x, AXIS) for x in (MUON, STACKED)],
    "stacked, resize": [oxs.cross_shard(x, AXIS) for x in (MUON, STACKED)],
}


def two_steps(workers, tx, state, first):
    @workers.step(state=2)
    def step(params, state, x):
        grads = jax.tree.map(lambda w: jnp.sin(3 * w + x.mean()), params)
        return oxs.apply_gradients(tx, grads, state, params)

    for number in range(first, first + 2):
        batch: Any = np.sin(np.arange(4.0 * workers.sizes[0]) + number)
        state = step(state[0], state[1], batch.astype("f4"))
    return state


@pytest.mark.parametrize("case", RESUMED)
def test_other_devices_and_specs_inside_of_workers(case, tmp_path):
    """After rounds, beside simulated workers that are resized in the same steps."""
    simulated, tx = RESUMED[case]
    found: Any = None
    expected: Any = None
    with jax.numpy_dtype_promotion("standard"):
        for stage, (n, inside, spec) in enumerate(INSIDE):
            workers, begin = oxs.Workers(n, AXIS), (MATRICES, simulated.init(MATRICES))
            expected = workers.resize(expected) if stage else workers.start(begin)
            expected = two_steps(workers, simulated, expected, 2 * stage)
            mesh = mesh_of({AXIS: n, "inside": inside})
            specs = {"layers": spec, "b": P()}
            workers = oxs.Workers(n, AXIS, mesh=mesh, specs=specs)
            if stage and case.endswith("resize"):
                found = workers.resize(found)
            with jax.set_mesh(mesh):
                begin = MATRICES, tx.init(MATRICES)
                if not stage:
                    found = workers.start(begin)
                elif case.endswith("restore"):
                    with ocp.CheckpointManager(tmp_path / str(stage)) as manager:
                        manager.save(stage, args=ocp.args.StandardSave(found))
                        manager.wait_until_finished()
                        workers.expect(begin)
                        found = workers.restore(manager)
                assert found[0]["layers"][0].sharding.spec == P(AXIS, *spec)
                places = [x.sharding for x in jax.tree.leaves(found)]
                found = two_steps(workers, tx, found, 2 * stage)
            for place, x in zip(places, jax.tree.leaves(found), strict=True):
                assert place.is_equivalent_to(x.sharding, x.ndim)
            pairs = (
                (found[0], expected[0]) if simulated is not tx else (found, expected)
            )
            for x, y in zip(*map(jax.tree.leaves, pairs), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_stacks_by_hand_and_over_axes_that_the_new_mesh_has_not():
    with jax.set_mesh(mesh := mesh_of({AXIS: 2, "inside": 4})):
        workers = oxs.Workers(2, AXIS, mesh=mesh)
        state = workers.start((MATRICES, STACKED.init(MATRICES)))
    with jax.set_mesh(mesh_of({"inside": 2})):  # where stacks have six rows, not eight
        _, own = by_hand.resize(STACKED, state[0], state[1], 3)
    stacks = [x.shape[:2] for x in jax.tree.leaves(own.stacks) if x.ndim > 1]
    assert set(stacks) == {(3, 6)}
    workers = oxs.Workers(2, AXIS, mesh=mesh_of({AXIS: 2, "rows": 2}))
    with pytest.raises(ValueError, match=r"has not \['inside'\].*workers.expect"):
        workers.resize(state)

"""`Workers` runs the program that `map_workers` does: same numbers, fewer lines."""

import warnings
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import optx_sync as oxs
from optx_sync.flax import SyncOptimizer
from tests import contexts
from tests.meshes import mesh_of
from tests.refusals import all_refused

AXIS = "workers"
rng = np.random.default_rng(0)
INPUTS = rng.normal(size=(64, 3)).astype(np.float32)
TARGETS = INPUTS @ np.array([[1.0], [-2.0], [0.5]], np.float32)
PARAMS = {"w": np.zeros((3, 1), np.float32), "b": np.zeros(1, np.float32)}
RULES = {
    "cross_shard": oxs.cross_shard(optax.adam(0.1), AXIS),
    "sync_replicas": oxs.sync_replicas(optax.sgd(0.1), AXIS, 16),
    "elastic_average": oxs.elastic_average(
        optax.sgd(0.1, 0.9), AXIS, communication_period=4, moving_rate=0.1, rho=0.0
    ),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0),
        oxs.local_sgd(optax.adam(0.1), AXIS, communication_period=4),
    ),
    "multi_steps": oxs.diloco(
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
        AXIS,
        communication_period=4,
    ),
}
# (`sync_replicas` agrees on numbers in every step.)
QUIET = [name for name in RULES if name not in ("cross_shard", "sync_replicas")]
QUANTIZED = oxs.exchange.quantized(bits=8)
MESHES = {"simulated": None, "auto": True, "explicit": jax.make_mesh((8,), (AXIS,))}
where = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)


@pytest.fixture(autouse=True)
def promotion():
    """Flax, Equinox and Optax's Adam need what users have."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def same_bits(tree, other):
    def same(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    jax.tree.map(same, tree, other)


def same_forms(tree, other):
    """Shapes, and where they lie."""
    one, two = (jax.tree.map(lambda x: (x.shape, x.sharding), x) for x in (tree, other))
    assert one == two


def traces(mesh, programs=1):
    """How often the step of so many programs is traced: on a mesh first with types."""
    return programs * (1 if mesh is None else 2)


def loss_of(params, inputs, targets):
    return jnp.mean((inputs @ params["w"] + params["b"] - targets) ** 2)


def step_of(tx, traced=None):
    def step(params, state, inputs, targets):
        if traced is not None:
            traced.append(1)
        loss, grads = jax.value_and_grad(loss_of)(params, inputs, targets)
        params, state = oxs.apply_gradients(tx, grads, state, params)
        return params, state, loss

    return step


def trained(tx, workers, steps, params=PARAMS):
    """The state of all workers after some steps."""
    step = workers.step(step_of(tx), state=2)
    state = workers.start((params, tx.init(params)))
    for _ in range(steps):
        *state, _ = step(*state, INPUTS, TARGETS)
    return tuple(state)


# Each rule on a mesh, and each mesh with a rule that sends always and with a quiet one.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "auto") for name in RULES),
        *(("cross_shard", "explicit"), ("chain", "explicit")),
        *(("sync_replicas", "simulated"), ("elastic_average", "simulated")),
    ],
)
def test_it_is_the_program_of_map_workers(name, kind):
    """To the bit; donated, traced once, and quiet where its optimizer is."""
    tx, traced, mesh = RULES[name], [], MESHES[kind]
    workers = oxs.Workers(8, AXIS, mesh=mesh)
    step = workers.step(step_of(tx, traced), state=2)
    now = workers.start((PARAMS, tx.init(PARAMS)))
    *stacked, axes = contexts.begun(tx, PARAMS, 8, AXIS)
    same_bits(now, tuple(stacked))
    by_hand = jax.tree.map(jnp.copy, now)
    ways = {"in_axes": (0, axes, 0, 0), "out_axes": (0, axes, 0)}
    mapped = oxs.by_hand.map_workers(step_of(tx), AXIS, mesh=workers.mesh, **ways)
    mapped, batch = jax.jit(mapped), (INPUTS, TARGETS)
    for _ in range(6):
        before = now[0]
        *now, loss = step(*now, *batch)
        *by_hand, losses = mapped(*by_hand, *[x.reshape(8, 8, -1) for x in batch])
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert loss.shape == ()
        np.testing.assert_allclose(loss, losses.mean(), rtol=1e-6)
    same_bits(now, by_hand)
    assert len(traced) == traces(mesh, len(step.programs))
    compiled = step.lower(*now, *batch).compile()
    rows = oxs.audit.collectives(compiled)
    if name in QUIET:  # counters are shared, so that it stays a conditional
        assert " conditional(" in compiled.as_text()
    if mesh is None:
        assert not rows
    elif name in QUIET:
        assert rows and all(row.conditional for row in rows)
    own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(now[0]))
    assert compiled.memory_analysis().alias_size_in_bytes >= own


@pytest.mark.parametrize("kind", [*MESHES, "in part"])
def test_the_mean_of_a_loss_is_differentiated_as_each_workers_own(kind):
    """As `jax.vmap` and `jax.pmap` do, for which such programs are written."""
    mesh = mesh_of({AXIS: 4, "inside": 2}) if kind == "in part" else MESHES[kind]
    workers = oxs.Workers(4 if kind == "in part" else 8, AXIS, mesh=mesh)
    inputs, targets = INPUTS[:8], TARGETS[:8]

    def step_with(loss_of):
        def step(params, states, inputs, targets):
            grads = jax.grad(loss_of)(params, inputs, targets)
            updates = {
                name: RULES[name].update(grads, state, params)
                for name, state in states.items()
            }
            return params, states, {name: u for name, (u, _) in updates.items()}

        return workers.step(step, state=2, donate=False)

    def mean_loss(*args):
        return jax.lax.pmean(loss_of(*args), AXIS)

    states = {name: tx.init(PARAMS) for name, tx in RULES.items()}
    started = workers.start((PARAMS, states))
    own, mean = (
        step_with(loss)(*started, inputs, targets) for loss in (loss_of, mean_loss)
    )
    jax.tree.map(np.testing.assert_array_equal, own, mean)


class Noisy(nnx.Module):
    """With tied weights, dropout, statistics and a flag."""

    def __init__(self, rngs):
        self.up = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)
        self.again = self.out
        self.name = "noisy"

    def __call__(self, x):
        x = self.dropout(self.norm(nnx.relu(self.up(x))))
        return self.out(x) + self.again(x)


# Every mesh, and every optimizer and way to return, meet once.
@pytest.mark.parametrize(
    "where, optimizer_of, returns",
    [
        ("simulated", nnx.Optimizer, False),
        ("simulated", SyncOptimizer, True),
        ("auto", nnx.Optimizer, True),
        ("auto", SyncOptimizer, False),
        ("explicit", nnx.Optimizer, False),
        ("explicit", SyncOptimizer, True),
    ],
)
def test_an_nnx_step_works_in_place(where, optimizer_of, returns):
    tx, mesh = RULES["chain"], MESHES[where]
    workers = oxs.Workers(8, AXIS, mesh=mesh)
    model = Noisy(nnx.Rngs(0))
    optimizer = optimizer_of(model, tx, wrt=nnx.Param)
    started = model, optimizer = workers.start((model, optimizer))
    assert model.up.kernel.shape == (8, 3, 8)
    assert model.out.kernel is model.again.kernel
    traced = []

    @workers.step(state=2)
    def step(model, optimizer, inputs, targets):
        def loss_of(model):
            return jnp.mean((model(inputs) - targets) ** 2)

        traced.append(1)
        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return (model, optimizer, loss) if returns else loss

    rows = oxs.audit.collectives(step, model, optimizer, INPUTS, TARGETS)
    assert all(row.conditional for row in rows)
    assert bool(rows) == (mesh is not None)
    losses, before = [], model.up.kernel[...]
    for _ in range(6):
        result = step(model, optimizer, INPUTS, TARGETS)
        if returns:
            assert result[0] is model and result[1] is optimizer
            result = result[2]
        losses.append(float(result))
    assert before.is_deleted() and len(traced) == traces(mesh, len(step.programs) + 1)
    assert losses[-1] < losses[0]
    assert started == (model, optimizer) and model.out.kernel is model.again.kernel
    # Each worker draws its own masks, and has its own statistics.
    keys = jax.random.key_data(model.dropout.rngs.key[...])
    assert len(np.unique(keys, axis=0)) == 8
    assert model.dropout.rngs.count[...].tolist() == [6] * 8
    assert len(np.unique(np.asarray(model.norm.mean[...])[:, 0])) == 8
    metrics = workers.metrics((model, optimizer))
    assert metrics.rounds == 1 and metrics.distance.shape == (8,)
    best: Any = workers.center((model, optimizer))
    assert isinstance(best, Noisy) and best.name == "noisy" and best is not model
    assert best.out.kernel is best.again.kernel
    statistics = np.asarray(model.norm.mean[...])
    np.testing.assert_allclose(best.norm.mean[...], statistics.mean(0), rtol=1e-5)
    same_bits(
        best.up.kernel[...],
        nnx.as_pure(optimizer.opt_state)[1].center["up"]["kernel"],
    )
    first = workers.center((model, optimizer), statistics="first")
    same_bits(first.norm.mean[...], statistics[0])


@where
def test_a_train_state_with_a_key_and_statistics(mesh):
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            return nn.Dense(1)(nn.Dropout(0.3, deterministic=not train)(x))

    class State(TrainState):
        batch_stats: Any
        key: jax.Array

    network = Network()
    variables = network.init(jax.random.key(0), INPUTS)
    one = State.create(
        apply_fn=network.apply, tx=RULES["chain"], key=jax.random.key(1), **variables
    )
    workers = oxs.Workers(8, AXIS, mesh=mesh)
    traced = []

    @workers.step
    def step(state, inputs, targets, together=False):
        def loss_of(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            rngs = {"dropout": jax.random.fold_in(state.key, state.step)}
            options = {"train": True, "mutable": ["batch_stats"], "rngs": rngs}
            outputs, new = state.apply_fn(variables, inputs, **options)
            return jnp.mean((outputs - targets) ** 2), new["batch_stats"]

        traced.append(1)
        grad_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, stats), grads = grad_of(state.params)
        if together:
            stats = oxs.reduce(stats, AXIS)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    state = workers.start(one)
    assert state.opt_state[1].center["Dense_0"]["kernel"].shape == (3, 8)
    for _ in range(6):
        state, _ = step(state, INPUTS, targets=TARGETS)
    assert len(traced) == traces(mesh, len(step.programs))
    mean = np.asarray(state.batch_stats["BatchNorm_0"]["mean"])
    assert len(np.unique(mean[:, 0])) == 8
    best = workers.center(state)
    assert best.step == 6 and best.apply_fn == network.apply
    same_bits(best.params, state.opt_state[1].center)
    best_mean = best.batch_stats["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(best_mean, mean.mean(0), rtol=1e-5, atol=1e-6)
    # Said in the step: averaged in each.
    state, _ = step(state, INPUTS, TARGETS, together=True)
    mean = np.asarray(state.batch_stats["BatchNorm_0"]["mean"])
    assert len(np.unique(mean[:, 0])) == 1
    assert len(traced) == traces(mesh, len(step.programs))


class Net(eqx.Module):
    """With functions, flags, numbers of Python, integers and a key."""

    layers: list
    activation: Any
    dropout: eqx.nn.Dropout
    calls: jax.Array
    scale: float
    key: jax.Array

    def __init__(self):
        one, two, self.key = jax.random.split(jax.random.key(0), 3)
        self.layers = [eqx.nn.Linear(3, 8, key=one), eqx.nn.Linear(8, 1, key=two)]
        self.activation = jax.nn.relu
        self.dropout = eqx.nn.Dropout(0.3)
        self.calls = jnp.zeros((), jnp.int32)
        self.scale = 2.0

    def __call__(self, x, key):
        x = self.dropout(self.activation(self.layers[0](x)), key=key)
        return self.scale * self.layers[1](x)


@where
def test_an_equinox_module_keeps_what_is_no_array(mesh):
    tx, one = RULES["chain"], Net()
    workers = oxs.Workers(8, AXIS, mesh=mesh)

    @workers.step(state=2)
    def step(model, state, key, inputs, targets):
        keys = jax.random.split(key, len(inputs))

        def loss_of(model):
            return jnp.mean((jax.vmap(model)(inputs, keys) - targets) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_of)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        model = eqx.tree_at(lambda x: x.calls, model, model.calls + 1)
        drawn = jax.random.uniform(key)
        return eqx.apply_updates(model, updates), state, loss, drawn

    params = eqx.filter(one, eqx.is_inexact_array)
    model, state = workers.start((one, tx.init(params)))
    assert (model.scale, model.dropout.p) == (2.0, 0.3)
    assert model.activation is jax.nn.relu and model.key.shape == (8,)
    assert state[1].center.layers[0].weight.shape == (8, 3)
    key, drawn = jax.random.key(3), jnp.zeros(())
    for _ in range(4):
        model, state, _, drawn = step(model, state, key, INPUTS, TARGETS)
    assert model.calls.tolist() == [4] * 8 and model.activation is jax.nn.relu
    # The key of the call was folded as `keys` does it.
    numbers = jax.vmap(jax.random.uniform)(workers.keys(key))
    np.testing.assert_allclose(drawn, numbers.mean(), rtol=1e-6)
    best: Any = workers.center((model, state))
    assert best.scale == 2.0 and best.calls == 4
    same_bits(best.layers[0].weight, state[1].center.layers[0].weight)


@pytest.mark.parametrize("mesh", [None, True])
def test_pods_of_chips(mesh):
    coded = oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4))
    stream: Any = {"communication_period": 4, "fragments": 2, "overlap": True}
    inner = oxs.cross_shard(optax.sgd(0.1), "chips")
    tx = oxs.diloco(inner, "pods", exchange=coded, **stream)
    workers = oxs.Workers((2, 4), ("pods", "chips"), mesh=mesh)
    params, state = workers.start((PARAMS, tx.init(PARAMS)))
    assert params["w"].shape == (2, 4, 3, 1)
    assert state.center["w"].shape == (4, 3, 1) and state.local_step.shape == ()
    traced = []
    step = workers.step(step_of(tx, traced), state=2)
    rows = oxs.audit.collectives(step, params, state, INPUTS, TARGETS)
    inside = [row for row in rows if not row.conditional]
    assert {len(row.groups) for row in inside} == ({2} if mesh else set())
    for _ in range(9):
        params, state, _ = step(params, state, INPUTS, TARGETS)
    assert len(traced) == traces(mesh, len(step.programs) + 1)
    same_bits(params["w"][:, 0], params["w"][:, 3])
    assert (params["w"][0] != params["w"][1]).any()
    assert workers.center((params, state))["w"].shape == (3, 1)
    assert workers.first(params)["w"].shape == (3, 1)
    assert workers.keys(jax.random.key(0)).shape == (2, 4)
    with pytest.warns(UserWarning, match="middle of a round"):
        one, _ = workers.resize((params, state), 1)
    assert one["w"].shape == (1, 4, 3, 1)
    with pytest.raises(ValueError, match="first number alone"):
        workers.resize((params, state), (2, 2))
    with pytest.raises(ValueError, match=r"Workers \(2, 4\) changes .* got \(2, 2\)"):
        oxs.Workers((2, 2), ("pods", "chips")).resize((params, state))


def test_pieces_on_the_level_that_they_are_for():
    """A state in pieces in a pod; an outer state in pieces among pods, or farms."""
    inner = oxs.cross_shard(optax.sgd(0.1, 0.9), "chips")
    cut = oxs.cross_shard(optax.adam(0.1), "chips", shard_state=True)
    pods = oxs.local_sgd(inner, "pods", communication_period=2)
    rule = oxs.CenterRule(
        contribute=lambda own, center, at: own.params - own.taken,
        mean_over="workers",
        outer=optax.adam(0.5),  # whose count is a number that is not cut
    )

    def around(inner, axis, **options):
        return oxs.center_variable(inner, rule, axis, communication_period=2, **options)

    def run(tx, sizes, names, mesh=None):
        workers = oxs.Workers(sizes, names, mesh=mesh)
        state = trained(tx, workers, 4)
        fewer = () if mesh else workers.resize(state, 1)[0]
        return workers.center(state), workers.metrics(state).distance, fewer

    two, three = ((2, 4), ("pods", "chips")), ((2, 2, 2), ("farms", "pods", "chips"))
    simulated, on_mesh = (run(around(cut, "pods"), *two, mesh) for mesh in (None, True))
    contexts.assert_close(on_mesh[:2], simulated[:2], 1e-5)
    for inside, levels, meshes in ((inner, two, (None, True)), (pods, three, (None,))):
        expected = run(around(inside, levels[1][0]), *levels)
        for mesh in meshes:
            tx = around(inside, levels[1][0], shard_state=True)
            found = run(tx, *levels, mesh)
            kept = 2 if mesh else 3
            contexts.assert_close(found[:kept], expected[:kept], 1e-5)


class Drawn(NamedTuple):
    """The state of a transformation of one's own."""

    own: jax.Array


@pytest.mark.parametrize("injected", [False, True])
def test_chips_of_a_pod_draw_the_same_noise(injected):
    """Of keys in the optimizer; a user's own is each chip's."""
    drawing = optax.GradientTransformation(
        lambda params: Drawn(jax.random.key(2)),
        lambda updates, state, params=None: (updates, state),
    )
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    inner = oxs.cross_shard(optax.chain(drawing, noise, optax.sgd(0.1)), "chips")
    tx = oxs.diloco(inner, "pods")
    if injected:
        tx = optax.inject_hyperparams(lambda rate: oxs.diloco(inner, "pods"))(rate=1.0)
    workers = oxs.Workers((2, 4), ("pods", "chips"))
    _, state, own = workers.start((PARAMS, tx.init(PARAMS), jax.random.key(1)))
    drawn, noise, _ = (state.inner_state if injected else state).inner
    for keys, different in ((drawn.own, 2), (noise.rng_key, 2), (own, 8)):
        numbers = np.asarray(jax.random.key_data(keys)).reshape(8, -1)
        assert len(np.unique(numbers, axis=0)) == different


@pytest.mark.parametrize("mesh", [None, True])
def test_half_precision_numbers_and_dicts(mesh):
    """A dict with keys, counters of Python and bfloat16; a step of everything."""
    tx = oxs.local_sgd(optax.sgd(0.1), AXIS, communication_period=2)
    params = {"w": jnp.zeros((3, 1), jnp.bfloat16)}
    workers = oxs.Workers(8, AXIS, mesh=mesh)
    one = {"params": params, "opt_state": tx.init(params), "key": jax.random.key(0)}
    state = workers.start(
        {**one, "count": 0, "rate": 0.5, "note": "mine", "flag": True}
    )
    traced = []

    @workers.step(state=1)
    def step(state, batch, rate, *, meet):
        traced.append(meet)
        assert state["note"] == "mine" and isinstance(meet, bool)
        key, drawn = jax.random.split(state["key"])
        x, y = batch["x"].astype(jnp.bfloat16), batch["y"].astype(jnp.bfloat16)
        x = x + rate * jax.random.normal(drawn, x.shape, x.dtype)
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(state["params"])
        params, opt_state = oxs.apply_gradients(
            tx, grads, state["opt_state"], state["params"], meet=meet
        )
        new = {"params": params, "opt_state": opt_state, "key": key}
        # (What JAX calls weakly typed compiles nothing anew.)
        new |= {"count": state["count"] + 1, "rate": jnp.asarray(0.5)}
        return {**new, "note": "mine", "flag": state["flag"] is True}

    batch = {"x": INPUTS, "y": TARGETS}
    for number in range(6):
        meet = oxs.by_hand.due(tx, number)
        state = step(state, batch, np.float32(0.01), meet=meet)
    assert traced == sorted(traced) and len(traced) == traces(mesh, 2)
    assert state["count"].tolist() == [6] * 8
    same_bits(state["params"]["w"][0], state["params"]["w"][7])  # right after a round
    best = workers.center(state)
    assert best["params"]["w"].dtype == jnp.bfloat16 and best["note"] == "mine"
    assert best["count"] == 6 and best["key"].shape == ()


def test_results_and_how_batches_are_split():
    workers = oxs.Workers(4, AXIS)

    def step(total, x, y, table):
        shapes = x.shape, y.shape, table.shape
        return total + x.sum(), (x.mean(), y.sum() > 3, x.shape[0], None), shapes

    x, y = np.arange(8.0, dtype=np.float32), np.arange(8).reshape(4, 2)
    table = np.ones((3, 2))
    ways: Any = (True, False, None)
    split = workers.step(step, split=ways)
    total, (mean, share, number, nothing), shapes = split(
        workers.start(0.0), x, y, table
    )
    assert total.tolist() == [1, 5, 9, 13] and mean == 3.5
    # Flags and integers, too: the mean, as that of numbers.
    assert share == 0.75 and share.dtype == jnp.float32
    assert number == 2 and nothing is None
    assert jax.tree.map(int, shapes) == ((2,), (2,), (3, 2))
    own = workers.step(step, split=ways[:2], average=False, donate=False)
    start = workers.start(1.0)
    _, (mean, *_), shapes = own(start, x, y, table=np.ones((4, 2)))
    assert mean.tolist() == [0.5, 2.5, 4.5, 6.5] and not start.is_deleted()
    assert shapes[2][0].tolist() == [1] * 4  # what has a keyword is split


@pytest.mark.parametrize(
    "style, mesh",
    [
        ("tuple", None),
        ("train_state", None),
        ("nnx", True),
        ("equinox", True),
    ],
)
def test_a_checkpoint_of_another_number(style, mesh, tmp_path):
    """In the middle of a period to the bit; eight on a mesh go on as six."""
    tx = RULES["chain"]

    def begin():
        if style == "nnx":
            model = nnx.Linear(3, 1, rngs=nnx.Rngs(0, dropout=1))
            state = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
        elif style == "equinox":
            model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
            state = model, tx.init(eqx.filter(model, eqx.is_inexact_array))
        elif style == "train_state":
            state = TrainState.create(apply_fn=print, params=PARAMS, tx=tx)
        else:
            state = PARAMS, tx.init(PARAMS), {"key": jax.random.key(5)}
        return state

    def step_for(workers):
        @workers.step
        def step(state, inputs, targets):
            if style == "train_state":
                grads = jax.grad(loss_of)(state.params, inputs, targets)
                return state.apply_gradients(grads=grads)
            model, opt, *rest = state
            if style == "nnx":
                grads = nnx.grad(lambda m: jnp.mean((m(inputs) - targets) ** 2))(model)
                opt.update(model, grads)
                return state
            if style == "equinox":
                grads = eqx.filter_grad(
                    lambda m: jnp.mean((jax.vmap(m)(inputs) - targets) ** 2)
                )(model)
                updates, opt = tx.update(
                    grads, opt, eqx.filter(model, eqx.is_inexact_array)
                )
                return eqx.apply_updates(model, updates), opt
            grads = jax.grad(loss_of)(model, inputs, targets)
            return (*oxs.apply_gradients(tx, grads, opt, model), *rest)

        return step

    def arrays(state):
        return nnx.state(state) if style == "nnx" else eqx.filter(state, eqx.is_array)

    def center(workers, state):
        found = workers.center(state)
        return found.params if style == "train_state" else found

    eight = oxs.Workers(8, AXIS, mesh=True)
    step, state = step_for(eight), eight.start(begin())
    for _ in range(4):
        state = step(state, INPUTS, TARGETS)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(4, args=ocp.args.StandardSave(arrays(state)))
        state = step(state, INPUTS, TARGETS)
        manager.save(5, args=ocp.args.StandardSave(arrays(state)))
        state = step(state, INPUTS, TARGETS)
    with ocp.CheckpointManager(tmp_path) as manager:
        again = oxs.Workers(8, AXIS, mesh=True)
        again.expect(begin)
        restored = step_for(again)(again.restore(manager), INPUTS, TARGETS)
        same_bits(arrays(restored), arrays(state))
        six = oxs.Workers(6, AXIS, mesh=mesh)
        fresh = six.start(begin())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # after a round nothing is lost
            restored = six.restore(manager, 4)
        same_forms(arrays(restored), arrays(fresh))
        whole = eight.restore(manager, 4, like=state)
        best = [center(six, restored), center(eight, whole)]
        same_bits(*map(arrays, best))
        same_bits(arrays(eight.resize(whole, 6)), arrays(restored))
        restored = step_for(six)(restored, INPUTS[:60], TARGETS[:60])
        if style == "tuple":
            keys = restored[2]["key"]
            assert len(np.unique(jax.random.key_data(keys), axis=0)) == 6


def test_orbax_of_either_version_restores_what_either_saved(tmp_path):
    workers, six = oxs.Workers(4, AXIS, mesh=True), oxs.Workers(6, AXIS)
    tx = RULES["chain"]
    six.expect(lambda: (PARAMS, tx.init(PARAMS), jax.random.key(0)))
    state = workers.start((PARAMS, tx.init(PARAMS), jax.random.key(0)))
    versions = (ocp.CheckpointManager, ocp.v1.training.Checkpointer)
    with ocp.CheckpointManager(tmp_path / "0") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
    with ocp.v1.training.Checkpointer(tmp_path / "1") as checkpointer:
        checkpointer.save(3, state)
    with oxs.elastic.Group(tmp_path / "2", workers) as group:
        group.position = 3
        group.save(state)
    for folder in "012":
        for version in versions:
            with version(tmp_path / folder) as manager:
                same_bits(workers.restore(manager), state)
                same_bits(six.restore(manager, 3), six.resize(state))
    with pytest.raises(TypeError, match="Of Orbax v1 pass an"):
        workers.restore(versions)


def test_workers_begin_at_the_center_in_the_middle_of_a_round():
    """Those of a rule that takes it all; under elastic averaging who joins."""
    for name, others in (("chain", 0), ("elastic_average", 8)):
        tx, workers = RULES[name], oxs.Workers(8, AXIS)
        params, state = trained(tx, workers, 6)
        center = workers.center((params, state))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "resize in the middle")
            resized, _ = workers.resize((params, state), 9)
        same_bits(resized["w"][:others], params["w"][:others])
        for worker in range(others, 9):
            same_bits(resized["w"][worker], center["w"])


def test_joiners_draw_keys_of_their_own_and_begin_as_others():
    tx = RULES["sync_replicas"]
    workers = oxs.Workers(3, AXIS)
    state = workers.start((PARAMS, tx.init(PARAMS), jax.random.key(0)))
    _, opt_state, keys = workers.resize(state, 5)
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == 5
    same_bits(keys[:3], state[2])
    fresh = oxs.Workers(5, AXIS).start((PARAMS, tx.init(PARAMS)))[1]
    assert opt_state.info.outcome.tolist() == [-1] * 5
    same_forms(opt_state, fresh)


@pytest.mark.parametrize("more", [{"overlap": True}, {"exchange": QUANTIZED}])
def test_parts_in_pieces_are_restored_by_any_number(more, tmp_path):
    """As `oxs.by_hand.resize` cuts them anew, which has the transformation."""
    cut: Any = {"communication_period": 4, "shard_state": True, "fragments": 2}
    tx = oxs.diloco(optax.adam(0.1), AXIS, **cut, **more)
    params = {"w": np.arange(33.0, dtype=np.float32).reshape(11, 3), "value": INPUTS[0]}
    workers = oxs.Workers(8, AXIS)

    @workers.step(state=2)
    def step(params, state, x):
        grads = jax.tree.map(lambda p: p * x.mean(), params)
        return oxs.apply_gradients(tx, grads, state, params)

    state = workers.start((params, tx.init(params)))
    for _ in range(3):
        state = step(*state, INPUTS)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        same_bits(workers.restore(manager), state)
        three = oxs.Workers(3, AXIS)
        three.expect((params, tx.init(params)))
        with pytest.warns(UserWarning, match="since their parts met"):
            expected = oxs.by_hand.resize(tx, state[0], state[1], 3)
            same_bits(three.restore(manager), expected)


def test_a_center_in_parts_of_nnx_and_in_bytes_of_flax():
    tx = oxs.diloco(
        optax.adam(0.1), AXIS, communication_period=2, shard_state=True, fragments=2
    )
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model))
    workers = oxs.Workers(4, AXIS)
    of_nnx = workers.start((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
    state = workers.start((params, tx.init(params)))

    @workers.step(state=2)
    def in_place(model, optimizer, x):
        grads = nnx.grad(lambda model: model(x).sum())(model)
        optimizer.update(model, grads)

    @workers.step(state=2)
    def step(params, state, x):
        def output(params):
            return (x @ params["kernel"] + params["bias"]).sum()

        return oxs.apply_gradients(tx, jax.grad(output)(params), state, params)

    for _ in range(3):
        in_place(*of_nnx, INPUTS)
        state = step(*state, INPUTS)
    found = nnx.to_pure_dict(nnx.state(workers.center(of_nnx)))
    contexts.assert_close(found, workers.center(state), 1e-6)
    again = serialization.from_bytes(state[1], serialization.to_bytes(state[1]))
    assert jax.tree.structure(again) == jax.tree.structure(state[1])
    same_bits(again, state[1])


LAYERS = [
    (np.ones((3, 4), np.float32), np.zeros(4, np.float32)),
    (np.ones((4, 1), np.float32), np.zeros(1, np.float32)),
]


@pytest.mark.parametrize("kind", [list, tuple])
def test_parameters_may_be_layers_in_a_list_or_a_tuple(kind):
    layers, workers = kind(LAYERS), oxs.Workers(8, AXIS)
    pieces = oxs.cross_shard(optax.adam(0.1), AXIS, shard_state=True)
    for tx in (RULES["chain"], oxs.gossip(optax.sgd(0.1), AXIS), pieces):
        begun = layers, tx.init(layers)
        started, fewer = workers.start(begun), oxs.Workers(3, AXIS)
        same_bits(workers.center(started), layers)
        pairs = workers.resize(started, 3), fewer.start(begun)
        assert jax.tree.map(jnp.shape, pairs[0]) == jax.tree.map(jnp.shape, pairs[1])
    (one, (w, b)), state = workers.start((layers, RULES["cross_shard"].init(layers)))
    wrong = kind([one, (w, b.at[2].add(1))])
    assert workers.fingerprint((wrong, state)) == {2: "[0][1][1]"}
    assert kind is tuple or type(workers.center(workers.start(layers))) is list


def test_a_center_that_no_round_has_made_is_told():
    """A center that workers have trained away from; at the start it is theirs."""
    for parts in (1, 2):
        tx = oxs.diloco(optax.sgd(0.1), AXIS, communication_period=4, fragments=parts)
        workers = oxs.Workers(8, AXIS)
        step = workers.step(step_of(tx), state=2)
        state = workers.start((PARAMS, tx.init(PARAMS)))
        same_bits(workers.center(state), PARAMS)
        for number in range(1, 5):
            *state, _ = step(*state, INPUTS, TARGETS)
            if number in (1, 3):
                with pytest.warns(UserWarning, match="not all of the center has met"):
                    workers.center(tuple(state))
        workers.center(tuple(state))


def compiled(step):
    return sum(program.run._cache_size() for program in step.programs.values())


def test_a_step_is_compiled_once_for_arrays_without_elements_and_after_a_resize():
    tx, params = RULES["chain"], PARAMS | {"empty": np.zeros((0, 3), np.float32)}
    for mesh in (None, True):
        workers = oxs.Workers(8, AXIS, mesh=mesh)
        step = workers.step(step_of(tx), state=2)
        state = workers.start((params, tx.init(params)))
        for _ in range(4):
            *state, _ = step(*state, INPUTS, TARGETS)
        assert {one._cache_size() for one in step.programs.values()} == {1}
        if mesh is None:
            more = oxs.Workers(16, AXIS)
            step = more.step(step_of(tx), state=2)
            step(*more.start((params, tx.init(params))), INPUTS, TARGETS)
            step(*more.resize(tuple(state)), INPUTS, TARGETS)
            assert {one._cache_size() for one in step.programs.values()} == {1}


def weighed(params, x):
    tx = RULES["chain"]
    return tx.update(params, tx.init(params), params, weight=[x.sum()])[0]


FOUR = oxs.Workers(4, AXIS)


test_odd_arguments_are_told = all_refused(globals())(r"""
FOUR.resize(())  # ValueError: workers.resize needs a state
FOUR.resize(FOUR.start(PARAMS), 2.5)  # TypeError: n must be an integer
FOUR.center(())  # ValueError: workers.center needs a state
FOUR.step(print, split="yes")  # TypeError: split is .* got 'yes'
FOUR.step("x")  # TypeError: What workers.step .* got one of type str
oxs.fingerprint({"a": "x"}, None)  # TypeError: .* at \['a'\] is no
FOUR.step(weighed)(FOUR.start(PARAMS), INPUTS)
    # TypeError: weight must be a number in .*; got \[
""")

"""Several networks in one state: which parameters are a center's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optx_sync as oxs
from tests.meshes import mesh_of

AXIS, N = "workers", 2
TX = oxs.diloco(optax.sgd(0.1), AXIS, communication_period=2)
GEN, DISC = {"k": jnp.ones(3)}, {"k": 2 * jnp.ones((2, 2))}


def as_parts():
    return (GEN, TX.init(GEN), DISC, TX.init(DISC)), lambda x: (x[0], x[2])


def as_pairs():
    state = {"gen": (GEN, TX.init(GEN)), "disc": (DISC, TX.init(DISC))}
    return (state,), lambda x: (x[0]["gen"][0], x[0]["disc"][0])


def as_train_states():
    one, two = (TrainState.create(apply_fn=None, params=p, tx=TX) for p in (GEN, DISC))
    return (one, two), lambda x: (x[0].params, x[1].params)


FORMS = {"parts": as_parts, "pairs": as_pairs, "train states": as_train_states}


def moved(state):
    """All parameters after a step of each network on its own."""
    if isinstance(state, TrainState):
        return state.apply_gradients(grads=state.params)
    if isinstance(state, dict):
        return {name: oxs.apply_gradients(TX, *each(*x)) for name, x in state.items()}
    return oxs.apply_gradients(TX, *each(*state))


def each(params, state):
    return params, state, params


def step_of(form):
    def step(*state):
        if form == "parts":
            return *moved(state[:2]), *moved(state[2:])
        new = tuple(map(moved, state))
        return new if len(new) > 1 else new[0]

    return step


@pytest.mark.parametrize("form", FORMS)
def test_center_resize_and_restore_keep_them_apart(form, tmp_path):
    workers, (state, of) = oxs.Workers(N, AXIS), FORMS[form]()
    started = workers.start(state if len(state) > 1 else state[0])
    state = started if isinstance(started, tuple) else (started,)
    run = workers.step(step_of(form), state=len(state))
    for _ in range(3):  # one step behind a round
        new = run(*state)
        state = new if isinstance(new, tuple) else (new,)
    shown = workers.center(state if len(state) > 1 else state[0])
    shown = shown if isinstance(shown, tuple) else (shown,)
    if form == "parts":
        gen, disc = shown
    else:
        gen, disc = of(shown)
    # Both have made the same steps, the second from twice the numbers.
    assert gen["k"].shape == (3,) and disc["k"].shape == (2, 2)
    np.testing.assert_allclose(2 * gen["k"][0], disc["k"][0, 0], rtol=1e-6)
    with pytest.warns(UserWarning, match="resize in the middle of a round"):
        more = workers.resize(state if len(state) > 1 else state[0], 3)
    gen, disc = of(more if isinstance(more, tuple) else (more,))
    assert gen["k"].shape == (3, 3) and disc["k"].shape == (3, 2, 2)
    np.testing.assert_allclose(2 * gen["k"][:, 0], disc["k"][:, 0, 0], rtol=1e-6)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(
            1, args=ocp.args.StandardSave(state if len(state) > 1 else state[0])
        )
        manager.wait_until_finished()
        four = oxs.Workers(4, AXIS)
        first, _ = FORMS[form]()
        four.start(first if len(first) > 1 else first[0])
        with pytest.warns(UserWarning, match="in the middle of a round"):
            found = four.restore(manager)
    gen, disc = of(found if isinstance(found, tuple) else (found,))
    assert gen["k"].shape == (4, 3) and disc["k"].shape == (4, 2, 2)


def test_objects_of_nnx():
    class Net(nnx.Module):
        def __init__(self, size):
            self.k = nnx.Param(jnp.full(size, float(len(size))))

    nets = [Net((3,)), Net((2, 2))]
    opts = [nnx.Optimizer(net, TX, wrt=nnx.Param) for net in nets]
    workers = oxs.Workers(N, AXIS)
    state = workers.start((nets[0], opts[0], nets[1], opts[1]))
    gen, disc = workers.center(state)
    assert gen.k.shape == (3,) and disc.k.shape == (2, 2)
    assert jax.tree.leaves(nnx.state(disc))[0][0, 0] == 2


def test_specs_are_those_of_each_network():
    mesh = mesh_of({AXIS: 2, "parts": 4})
    specs = {"k": jax.P("parts"), "d": jax.P(None, "parts")}
    workers = oxs.Workers(2, AXIS, mesh=mesh, specs=specs)
    tx = oxs.diloco(optax.adam(0.1), AXIS, exchange=oxs.exchange.quantized())
    nets = {"gen": {"k": jnp.ones((8, 3))}, "disc": {"d": jnp.ones((4, 8))}}
    state = workers.start({name: (net, tx.init(net)) for name, net in nets.items()})
    for name, (params, opt_state) in state.items():
        (leaf,) = nets[name]
        placed = params[leaf].sharding.spec, opt_state.center[leaf].sharding.spec
        assert placed == (jax.P(AXIS, *specs[leaf]), specs[leaf]), name


def test_steps_of_one_network_alone():
    """Three steps of one for each of the other: each rule counts its own (a GAN)."""
    workers = oxs.Workers(N, AXIS)
    gen, disc = workers.start(((GEN, TX.init(GEN)), (DISC, TX.init(DISC))))

    @workers.step(state=2)
    def step(own, other):
        params, state = own
        return oxs.apply_gradients(TX, params, state, params), other

    for _ in range(2):
        for _ in range(3):
            disc, gen = step(disc, gen)
        gen, disc = step(gen, disc)
    assert oxs.metrics(gen[1]).rounds == 1
    assert oxs.metrics(disc[1]).rounds == 3
    gen, disc = workers.center(gen), workers.center(disc)
    # The same meetings, of which the second made more, from twice the numbers.
    assert gen["k"].shape == (3,) and disc["k"].shape == (2, 2)
    assert float(disc["k"][0, 0]) < 2 * float(gen["k"][0])

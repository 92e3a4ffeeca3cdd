"""Workers that join, and state that is no optimizer's: a replay buffer, statistics."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import optx_sync as oxs

AXIS = "workers"
TX = oxs.local_sgd(optax.sgd(0.1), AXIS, communication_period=1)
PARAMS = {"w": jnp.zeros(3)}
FOUR, SIX = (oxs.Workers(n, AXIS) for n in (4, 6))


def begun(fill=0.0):
    """One worker's state: learner, replay buffer, environment's key, steps made."""
    buffer = {
        "observations": jnp.full((5, 2), fill),
        "actions": jnp.zeros(5, jnp.int32),
        "next": jnp.zeros((), jnp.int32),
    }
    more = {"buffer": buffer, "key": jax.random.key(0)}
    return PARAMS, TX.init(PARAMS), more, jnp.zeros((), int)


@pytest.fixture(scope="module")
def state():
    """Four workers' after a step in which each has seen another observation."""

    @functools.partial(FOUR.step, state=4)
    def step(params, opt_state, more, steps, x):
        buffer = {
            "observations": more["buffer"]["observations"] + x[0],
            "actions": more["buffer"]["actions"] + x[0].astype(jnp.int32),
            "next": more["buffer"]["next"] + 1,
        }
        learned = oxs.apply_gradients(TX, params, opt_state, params)
        return *learned, {**more, "buffer": buffer}, steps + 1

    return step(*FOUR.start(begun()), jnp.arange(4.0))


def one_each(worker):
    return begun(fill=10.0 * worker)


JOINED = {
    "one state for all": (begun(7.0), [7.0, 7.0], [0, 0], 0),
    "one of each": (one_each, [40.0, 50.0], [0, 0], 0),
    "first": ("first", [0.0, 0.0], [0, 0], 1),
    "mean": ("mean", [1.5, 1.5], [3, 3], 1),
}


@pytest.mark.parametrize("what", JOINED)
def test_who_resizes_says_what_joiners_have_seen(what, state):
    joiners, observed, actions, at = JOINED[what]
    _, _, more, steps = FOUR.resize(state, 6, joiners=joiners)
    buffer = more["buffer"]
    seen = np.asarray(buffer["observations"])
    assert (seen == seen[:, :1, :1]).all()
    assert seen[:, 0, 0].tolist() == [0, 1, 2, 3, *observed]
    assert buffer["actions"][:, 0].tolist() == [0, 1, 2, 3, *actions]
    # Of one part, as the buffer is, nothing is mixed; what all agree on stays.
    assert buffer["next"].tolist() == [1, 1, 1, 1, at, at]
    assert steps.tolist() == [1] * 6
    assert len(np.unique(jax.random.key_data(more["key"]), axis=0)) == 6


def test_nobody_joins_without_a_word(state, tmp_path):
    with pytest.raises(ValueError, match=r"\[2\]\['buffer'\].*no optimizer's"):
        FOUR.resize(state, 6)
    assert FOUR.resize(state, 3)[2]["buffer"]["next"].tolist() == [1, 1, 1]
    SIX.start(begun())
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match=r"\[2\]\['buffer'\].*no optimizer's"):
            SIX.restore(manager)
        more = SIX.restore(manager, joiners=one_each)[2]
    assert more["buffer"]["observations"][:, 0, 0].tolist() == [0, 1, 2, 3, 40, 50]


def test_joiners_of_another_form_or_shape_are_refused(state):
    params, opt_state, more, steps = begun()
    with pytest.raises(ValueError, match=r"of another form .* is missing"):
        FOUR.resize(state, 6, joiners=(params, opt_state))
    buffer = {**more["buffer"], "observations": jnp.zeros((5, 3))}
    other = params, opt_state, {**more, "buffer": buffer}, steps
    with pytest.raises(ValueError, match=r"shape \(5, 3\).*has the shape \(5, 2\)"):
        FOUR.resize(state, 6, joiners=other)
    with pytest.raises(ValueError, match="joiners must be"):
        FOUR.resize(state, 6, joiners="fresh")


def test_statistics_of_nnx_are_known_by_their_class():
    """Those of a `BatchNorm` have a mean; a counter of one's own has none."""

    class Count(nnx.Variable):
        pass

    class Model(nnx.Module):
        def __init__(self, counted):
            self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
            if counted:
                self.count = Count(jnp.zeros(()))

        def __call__(self, x):
            if hasattr(self, "count"):
                self.count[...] = self.count[...] + x.sum()
            return self.norm(self.linear(x))

    def started(counted):
        model = Model(counted)
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

        @functools.partial(FOUR.step, state=2)
        def step(model, optimizer, x):
            grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, grads)

        state = FOUR.start((model, optimizer))
        step(*state, jnp.arange(16.0).reshape(8, 2) ** 2)
        return state

    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        state = started(counted=False)
        means = np.asarray(state[0].norm.mean[...])
        assert len(np.unique(means[:, 0])) == 4
        more = FOUR.resize(state, 6)[0].norm.mean[...]
        np.testing.assert_allclose(more[4:], [means.mean(0)] * 2, rtol=1e-6)
        with pytest.raises(ValueError, match=r"\[0\].count is no optimizer's"):
            FOUR.resize(started(counted=True), 6)


def test_a_group_takes_it_from_the_state_with_which_a_run_begins(state, tmp_path):
    with oxs.elastic.Group(tmp_path, FOUR) as group:
        group.restore_or_start(begun)
        group.rows(8, 1)
        group.save(state)
    with oxs.elastic.Group(tmp_path, SIX) as group:
        _, _, more, steps = group.restore_or_start(lambda: begun(7.0))
    assert more["buffer"]["observations"][:, 0, 0].tolist() == [0, 1, 2, 3, 7, 7]
    assert more["buffer"]["next"].tolist() == [1, 1, 1, 1, 0, 0]
    assert steps.tolist() == [1] * 6

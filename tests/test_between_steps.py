"""What may happen to a state between two steps, which look at little of it again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optx_sync as oxs
from tests.meshes import mesh_of
from tests.refusals import refused

AXIS = "workers"
TX = oxs.local_sgd(optax.sgd(0.1), AXIS, communication_period=3)
PARAMS = {"w": np.arange(3, dtype=np.float32), "b": np.float32(1)}
where = pytest.mark.parametrize("mesh", [None, mesh_of({AXIS: 4})], ids=["one", "mesh"])


def step(params, state, x):
    if x.shape[-1] != 3:
        raise RuntimeError("no such batch")
    grads = jax.tree.map(lambda p: p * x.mean(), params)
    params, state = oxs.apply_gradients(TX, grads, state, params)
    return params, state, params["w"].sum()


X = np.ones((4, 2, 3), np.float32)


def begun(mesh=None, **options):
    workers = oxs.Workers(4, AXIS, mesh=mesh)
    made: Any = workers.step(step, state=2, split=False, **options)
    return workers, made, workers.start((PARAMS, TX.init(PARAMS)))


@where
def test_what_is_refused_is_refused_in_every_step(mesh):
    """Of a state that steps gave out, and nothing is lost by it."""
    _, made, now = begun(mesh)
    for _ in range(4):
        older = now
        now = made(*now, X)[:2]
        with refused("ValueError: an earlier step has used up"):
            made(*older, X)
        with refused("ValueError: an earlier step has used up"):
            made(now[0] | {"b": older[0]["b"]}, now[1], X)
        with refused("ValueError: was given one array as argument 0"):
            made(now[0], now[1]._replace(taken=now[0]), X)
        with refused("ValueError: as argument 2"):
            made(*now, now[0]["w"])
    # One's own, after a step.
    params = jax.tree.map(jnp.zeros_like, now[0])
    assert made(params, now[1], X)[2] == 0
    assert all(x._cache_size() == 1 for x in made.programs.values())


@where
def test_results_are_means_to_the_bit_and_one_without_a_mean_costs_no_state(mesh):
    workers = oxs.Workers(4, AXIS, mesh=mesh)

    def own(total, x):
        mean = jnp.float32(1) / 3 * jnp.mean(jnp.exp(x) + total)
        return total + 1, (mean, mean.astype(jnp.bfloat16), mean > 2)

    start = workers.start(jnp.float32(0))
    x = np.linspace(0, 3, 4 * 64, dtype=np.float32)
    _, each = workers.step(own, average=False, donate=False)(start, x)
    _, means = workers.step(own)(jnp.copy(start), x)
    jax.tree.map(
        lambda m, e: np.testing.assert_array_equal(m, jnp.mean(e, 0)), means, each
    )
    with refused("TypeError: is a random key, which has no mean"):
        workers.step(lambda total, x: (total, jax.random.key(0)))(start, x)
    assert not start.is_deleted()


def test_a_flag_where_an_array_was_is_a_flag():
    workers, seen = oxs.Workers(2, AXIS), []

    @workers.step
    def count(state):
        seen.append(isinstance(state["flag"], bool))
        return {**state, "n": state["n"] + 1}

    state = workers.start({"n": 0, "flag": jnp.bool_(True)})
    for _ in range(3):
        state = count(state)
    state = count({**state, "flag": True})
    assert seen == [False, True] and state["flag"] is True
    assert count(count(state))["n"].tolist() == [6, 6] and len(seen) == 2


class Net(nnx.Module):
    def __init__(self):
        self.one = nnx.Param(jnp.ones(3))
        self.two = nnx.Param(jnp.ones(3))
        self.factor = 2


def test_an_nnx_object_that_is_changed_between_steps():
    """By hand: numbers, a setting, and a variable that then stands in two places."""
    workers, traced = oxs.Workers(2, AXIS), []
    net = workers.start(Net())
    objects = net.one, net.two

    @workers.step
    def double(net):
        traced.append(1)
        net.one[...] = net.one[...] * net.factor
        net.two[...] = net.two[...] + 1

    for _ in range(3):
        assert double(net) is None
    assert len(traced) == 1 and (net.one, net.two) == objects
    assert (net.one[...] == 8).all() and (net.two[...] == 4).all()
    net.one[...] = jnp.zeros((2, 3)).at[1].set(1)
    double(net)
    assert net.one[...][:, 0].tolist() == [0, 2] and len(traced) == 1
    net.factor = 5
    double(net)
    assert net.one[...][:, 0].tolist() == [0, 10] and len(traced) == 2
    net.two = net.one
    double(net)
    assert net.two is net.one and len(traced) == 3
    assert net.one[...][:, 0].tolist() == [1, 51]
    net.two, net.factor = objects[1], 2
    double(net)
    assert len(traced) == 3 and (net.two[...] == 7).all()


def test_a_model_of_nnx_beside_other_state():
    workers = oxs.Workers(2, AXIS)

    @workers.step(state=2)
    def train(state, net):
        net.one[...] = net.one[...] + 1
        return {**state, "n": state["n"] + 1}, net

    net = Net()
    state, net = workers.start(({"n": 0, "name": "mine", "of": net.two}, net))
    variable = state["of"]
    for _ in range(3):
        state, again = train(state, net)
        assert again is net and state["of"] is variable is net.two
    assert state["n"].tolist() == [3, 3] and state["name"] == "mine"
    assert (net.one[...] == 4).all()

"""Each worker draws dropout masks of its own, wherever it runs and after a restart."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optx_sync as oxs
from optx_sync import by_hand
from tests.meshes import mesh_of
from tests.users.data import WORKERS

ROW = np.ones((WORKERS, 16), np.float32)
TX = oxs.cross_shard(optax.sgd(0.1), "data")


class State(TrainState):
    key: Any


def linen():
    dropout: Any = nn.Dropout(0.5, deterministic=False)
    state = State.create(
        apply_fn=dropout.apply,
        params={"w": jnp.ones(16)},
        tx=TX,
        key=jax.random.key(1),
    )

    def step(state, x):
        key = jax.random.fold_in(state.key, state.step)
        mask = state.apply_fn({}, x, rngs={"dropout": key})
        return state.apply_gradients(grads={"w": mask}), mask

    return state, step


def with_nnx():
    graph, state = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(1)))

    def step(state, x):
        model = nnx.merge(graph, state)
        mask = model(x)
        return nnx.state(model), mask

    return state, step


def equinox():
    dropout = eqx.nn.Dropout(0.5)

    def step(key, x):
        key, drawn = jax.random.split(key)
        return key, dropout(x, key=drawn)

    return jax.random.key(1), step


@pytest.mark.parametrize("start", [linen, with_nnx, equinox])
def test_masks_differ_and_are_the_same_on_a_mesh_and_after_a_restart(start, tmp_path):
    one, step = start()
    mesh = mesh_of({"data": WORKERS})
    drawn = []
    for place in (mesh, None):
        mapped = jax.jit(by_hand.map_workers(step, "data", mesh=place))
        held, first = mapped(by_hand.replicate(one, WORKERS), ROW)
        _, second = mapped(held, ROW)
        drawn.append(np.concatenate([first, second]))
    assert len(np.unique(drawn[0], axis=0)) == 2 * WORKERS
    np.testing.assert_array_equal(*drawn)
    leaves, treedef = jax.tree.flatten(held)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", leaves)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", leaves)
    _, mask = mapped(treedef.unflatten(restored), ROW)
    np.testing.assert_array_equal(mask, second)

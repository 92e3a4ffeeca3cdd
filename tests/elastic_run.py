"""A small run whose processes come and go, for tests/test_elastic.py.

    python -m tests.elastic_run FOLDER PROCESSES PROCESS PORT ROUNDS STEPS

is one process of it, with one CPU device. It trains until ROUNDS meetings are saved,
makes STEPS steps of the next round, says so in FOLDER and waits to be killed; without
STEPS it ends, and process 0 leaves the center in FOLDER.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import optx_sync as oxs

AXIS, PERIOD, SIZE, BATCH = "workers", 3, 20, 2
FEATURES = np.linspace(-1, 1, SIZE * 3, dtype=np.float32).reshape(SIZE, 3)
TARGETS = np.sin(7 * FEATURES).sum(1)
ONE = {"w": np.array([0.5, -0.5, 0.25], np.float32)}
DILOCO = oxs.diloco(oxs.optimizers.adam(0.1), AXIS, communication_period=PERIOD)


def start(tx):
    """What one worker begins with: parameters, the optimizer's state, a key."""
    return ONE, tx.init(ONE), jax.random.key(0)


def step_of(workers, tx):
    """A step whose every worker draws noise of its own."""

    @workers.step(state=3)
    def step(params, state, key, features, targets):
        key, own = jax.random.split(key)
        noise = 0.01 * jax.random.normal(own, targets.shape)

        def loss(params):
            return jnp.mean((features @ params["w"] - targets + noise) ** 2)

        grads = jax.grad(loss)(params)
        return *oxs.apply_gradients(tx, grads, state, params), key

    return step


def live(group, tx, rounds, steps=0):
    """One life of a group: so many rounds, each saved, and so many steps more."""
    saved = state = group.restore_or_start(lambda: start(tx))
    step = step_of(group.workers, tx)
    for done in range(1, rounds * PERIOD + steps + 1):
        rows = group.rows(SIZE, BATCH)
        state = step(*state, *group.batch((FEATURES[rows], TARGETS[rows])))
        if done % PERIOD == 0:
            group.save(state, notes={"rounds": done // PERIOD})
        if done == rounds * PERIOD:
            group.manager.wait_until_finished()
            saved = jax.tree.map(jnp.copy, state)  # a step uses the state up
    return saved


def _process(folder, processes, number, port, rounds, steps):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, number)
    group = oxs.elastic.Group(folder / "run", AXIS)
    state = live(group, DILOCO, rounds, steps)
    if steps:
        (folder / f"in_a_round_{number}").touch()
        time.sleep(600)
    group.close()
    center = group.workers.center(state)["w"]
    if number == 0:
        np.save(folder / "center.npy", center)


if __name__ == "__main__":
    numbers = map(int, sys.argv[2:])
    _process(Path(sys.argv[1]), *numbers)

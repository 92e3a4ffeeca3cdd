"""A group of three of which two do not come, for tests/test_elastic.py.

    python -m tests.missing_processes FOLDER PROCESS PORT

is one process. All three save once and restore that. Then process 1 dies, process 2
stays away, and process 0 writes into FOLDER what it is told at each place where it
waits for them.
"""

import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

import optx_sync as oxs
from tests.elastic_run import AXIS, ONE

PROCESSES = 3


def _process(folder, number, port):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, number)
    group = oxs.elastic.Group(folder / "run", AXIS)
    state = group.restore_or_start(ONE)
    group.position = 1
    group.save(state)
    group.manager.wait_until_finished()
    checkpointer = ocp.v1.training.Checkpointer(folder / "run")
    for manager in (group.manager, checkpointer):  # while all are there
        restored = group.workers.restore(manager)
        for x, y in zip(*map(jax.tree.leaves, (restored, state)), strict=True):
            mine, saved = (array.addressable_shards[0].data for array in (x, y))
            np.testing.assert_array_equal(mine, saved)
    if number == 1:
        os._exit(1)
    if number == 2:
        time.sleep(600)
    group.position, group._processes._timeout = 2, 0.5
    waits = (
        lambda: group.save(state),
        lambda: group.restore_or_start(ONE),
        lambda: group.workers.restore(group.manager, timeout=0.5),
        lambda: oxs.elastic.Group(folder / "run", AXIS, timeout=0.5),
    )
    told = []
    for wait in waits:
        try:
            wait()
        except TimeoutError as error:
            told.append(str(error))
    (folder / "part").write_text("\n".join(told))
    (folder / "part").rename(folder / "told")
    os._exit(0)  # JAX itself waits for all at its end


if __name__ == "__main__":
    _process(Path(sys.argv[1]), *map(int, sys.argv[2:]))

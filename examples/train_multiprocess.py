"""DiLoCo over several processes: 2 x 4 CPU devices here, a cluster or TPU pod there.

    python examples/train_multiprocess.py
    python examples/train_multiprocess.py --steps 60

starts two processes of four CPU devices each on this machine, which find each other
over gloo; each forced CPU device is a worker. On a cluster, start the same script once
on every machine, with the address of the first one:

    python train_multiprocess.py --coordinator HOST:PORT --processes N --process I

and on a TPU pod with `--coordinator auto` alone: there JAX knows the rest by itself.
Each process feeds its own workers, from its own part of the data. The last line, from
process 0, is like

    step  200   8 workers in 2 processes   10 rounds   test accuracy 96.4%
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import optx_sync as oxs

HERE, HERE_DEVICES = 2, 4  # processes on this machine, and CPU devices of each
BATCH = 16  # images per worker and step
PERIOD = 20  # steps between rounds
REPORT_EVERY = 100
SEED = 0

network: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
tx = oxs.diloco(optax.adam(1e-2), "workers", communication_period=PERIOD)


def train(steps):
    """What every process runs; all of them run the same program."""
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images / 16, np.float32)
    order = np.random.default_rng(SEED).permutation(len(labels))
    test, rest = order[:360], order[360:]
    mine = rest[jax.process_index() :: jax.process_count()]
    rng = np.random.default_rng((SEED, jax.process_index()))

    # One mesh over the devices of all processes; what a run starts from is computed
    # where it is to live, and no process holds all of it.
    mesh = jax.make_mesh((jax.device_count(),), ("workers",), (AxisType.Auto,))
    workers = oxs.Workers(jax.device_count(), "workers", mesh=mesh)
    own = NamedSharding(mesh, PartitionSpec("workers"))
    initial = network.init(jax.random.key(SEED), images[:1])  # equal everywhere
    params, state = workers.start((initial, tx.init(initial)))

    @workers.step(state=2)
    def step(params, state, images, labels):
        def loss_of(params):
            logits = network.apply(params, images)
            entropy = optax.losses.softmax_cross_entropy_with_integer_labels
            return entropy(logits, labels).mean()

        return oxs.apply_gradients(tx, jax.grad(loss_of)(params), state, params)

    for done in range(1, steps + 1):
        rows = rng.choice(mine, jax.local_device_count() * BATCH)
        # The batches of all processes, one after the other, are the global one.
        batch = (
            jax.make_array_from_process_local_data(own, part)
            for part in (images[rows], labels[rows])
        )
        # One step at a time: forced CPU devices share a few threads. Accelerators run
        # ahead; leave the waiting out there.
        params, state = jax.block_until_ready(step(params, state, *batch))
        if done % REPORT_EVERY == 0 or done == steps:
            # The center is replicated, so each process has all of it.
            center = jax.device_get(workers.center((params, state)))
            logits = network.apply(center, images[test])
            reached = (logits.argmax(-1) == labels[test]).mean()
            number, rounds = workers.sizes[0], int(state.global_step)
            if jax.process_index() == 0:
                print(
                    f"step {done:4}   {number} workers in "
                    f"{jax.process_count()} processes   "
                    f"{rounds} rounds   test accuracy {reached:.1%}",
                    flush=True,
                )


def launch():
    """This script once for each process on this machine; ends when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, *sys.argv, "--cpu", "--coordinator", address]
    children = [
        subprocess.Popen([*command, "--processes", str(HERE), "--process", str(number)])
        for number in range(HERE)
    ]
    try:
        while not any(codes := [child.poll() for child in children]):
            if None not in codes:
                return
            time.sleep(0.1)
        sys.exit(f"Exit codes {codes} (None: still running).")
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train with several processes.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, or auto")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--cpu", action="store_true", help="CPU devices, over gloo")
    options = parser.parse_args()
    if options.coordinator is None:
        launch()
    else:
        if options.cpu:
            # Threads for the devices, and as many to spare.
            os.environ.setdefault("NPROC", str(2 * HERE_DEVICES))
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", HERE_DEVICES)
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = None if options.coordinator == "auto" else options.coordinator
        jax.distributed.initialize(address, options.processes, options.process)
        train(options.steps)

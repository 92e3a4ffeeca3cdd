"""DiLoCo on machines that come and go: Ray Train restarts it, `oxs.elastic` goes on.

    pip install '.[elastic,examples]'  # in the checkout
    python examples/train_elastic.py
    python examples/train_elastic.py --rounds 40
    python examples/train_elastic.py --rounds 40 --undisturbed

Two nodes of Ray on this machine have room for two processes each, and a run of two to
four processes learns the digits. One process is killed (SIGKILL), then a node is lost
with both of its processes, and later a node comes back. It draws the loss against time,
with the deaths in it; the last lines are like

    302 s, 60 rounds of 2 to 4 workers, 1 made again: test accuracy 98.1%
    wrote elastic.png

On a real cluster leave out `Cluster`, and take a folder that all machines share.
"""

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# How often Ray Train asks whether its processes live; 2 s by default.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")

from matplotlib.figure import Figure
from rich.progress import Progress

ROUNDS, PERIOD, BATCH, SEED = 200, 20, 16, 0  # rounds of four workers
MOST, LEAST, A_NODE = 4, 2, 2  # processes
# After which part of the examples what happens.
EVENTS = {"a process killed": 0.2, "a node lost": 0.4, "a node back": 0.65}
SILENT = 10  # seconds without a round
COLOURS = {"a process killed": "#c8323c", "a node lost": "#4a4e69"}


def loop(config):
    """What each process runs, and runs again after a death."""
    import flax.linen as nn
    import jax
    import numpy as np
    import optax
    from sklearn.datasets import load_digits

    import optx_sync as oxs

    def say(**what):
        line = {"time": time.time(), "process": jax.process_index(), **what}
        with open(config["log"], "a") as log:
            log.write(json.dumps(line) + "\n")

    say(pid=os.getpid(), processes=jax.process_count())
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images / 16, np.float32)
    order = np.random.default_rng(SEED).permutation(len(labels))
    test, train = order[:360], order[360:]
    network: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
    tx = oxs.diloco(optax.adam(1e-3), "workers", communication_period=PERIOD)

    def loss_of(params, images, labels):
        logits = network.apply(params, images)
        entropy = optax.losses.softmax_cross_entropy_with_integer_labels
        return entropy(logits, labels).mean()

    def begin():
        params = network.init(jax.random.key(SEED), images[:1])  # equal everywhere
        return params, tx.init(params)

    # On a busy machine Ray may start several groups before one has saved.
    begun = oxs.elastic.Group(config["folder"], "workers", starts_without_save=10)
    with begun as group:
        params, state = group.restore_or_start(begin)
        say(position=group.position)

        @group.workers.step(state=2)
        def step(params, state, images, labels):
            grads = jax.grad(loss_of)(params, images, labels)
            return oxs.apply_gradients(tx, grads, state, params)

        while group.position < config["examples"]:
            for _ in range(PERIOD):
                rows = train[group.rows(len(train), BATCH)]
                batch = group.batch((images[rows], labels[rows]))
                # One step at a time: CPU devices share a few threads.
                params, state = jax.block_until_ready(step(params, state, *batch))
            group.save((params, state))
            center = jax.device_get(group.workers.center((params, state)))
            logits = network.apply(center, images[test])
            if jax.process_index():
                continue  # one says it for all
            say(
                position=group.position,
                rounds=int(state.global_step),
                workers=group.workers.sizes[0],
                loss=float(loss_of(center, images[test], labels[test])),
                accuracy=float((logits.argmax(-1) == labels[test]).mean()),
            )


class Machines:
    """Nodes of Ray on this machine, and what happens to them."""

    def __init__(self):
        import ray
        from ray.cluster_utils import Cluster

        # A lost node is noticed after some seconds, and not after half a minute.
        noticing = {"health_check_period_ms": 1000}
        head = {"num_cpus": 0, "_system_config": noticing}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(num_cpus=A_NODE) for _ in range(2)]
        ray.init(self.cluster.address, log_to_driver=False)

    def do(self, event, lines):
        """One of `EVENTS`; `lines` are what processes said."""
        if event == "a process killed":
            os.kill(
                [line["pid"] for line in lines if "pid" in line][-1], signal.SIGKILL
            )
        elif event == "a node lost":
            self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)
        else:
            self.nodes.append(self.cluster.add_node(num_cpus=A_NODE))


def said(log):
    """What processes said so far; a line that is being written is left out."""
    return [
        json.loads(line) for line in log.read_text().splitlines(True) if "\n" in line
    ]


def now(lines, happened):
    """(who trains, or what the run waits for, numbers that go with it)."""
    group = []  # what the processes said that came since the last round
    for line in lines:
        group = [] if "loss" in line else [*group, line]
    came = [line for line in group if "pid" in line]
    if came:
        everyone, ready = came[-1]["processes"], len(group) - len(came)
        text = f"{min(len(came), everyone)} of {everyone} processes have started"
        return "a new group starts", f"{text}, {min(ready, everyone)} have the state"
    rounds = [line for line in lines if "loss" in line]
    if not rounds:
        return "Ray starts processes", ""
    last = rounds[-1]
    silent = time.time() - last["time"]
    died = happened and happened[-1][1] in COLOURS and happened[-1][0] > last["time"]
    if died:
        return "nobody trains: Ray starts a new group", f"{silent:.0f} s"
    text = f"no round for {silent:.0f} s" if silent > SILENT else ""
    return f"{last['workers']} workers", text or f"loss {last['loss']:.3f}"


def follow(log, examples, machines, undisturbed, done, happened):
    """Until the run is done: a progress bar, and events when it is time for them."""
    todo, before = {} if undisturbed else dict(EVENTS), ""
    with Progress() as progress:
        bar = progress.add_task("", total=examples)
        while not done.wait(0.1):
            lines = said(log)
            rounds = [line for line in lines if "loss" in line]
            what, numbers = now(lines, happened)
            progress.update(bar, description=f"{what}, {numbers}".strip(", "))
            if what != before:
                progress.console.print(what)
                before = what
            if not rounds:
                continue
            last = rounds[-1]
            progress.update(bar, completed=last["position"])
            event = next(iter(todo), None)
            if event and last["position"] >= todo[event] * examples:
                del todo[event]
                machines.do(event, lines)
                happened.append((time.time(), event))
                progress.console.print(f"{event} after {last['rounds']} rounds")


def draw(rounds, happened, began, path):
    """Loss against time, with the workers that there were and the deaths."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    loss, number = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    times = [line["time"] - began for line in rounds]
    loss.plot(times, [line["loss"] for line in rounds], ".-", color="#2a7f62")
    number.step(times, [line["workers"] for line in rounds], where="post")
    for when, event in happened:
        for axes in (loss, number):
            axes.axvline(when - began, color=COLOURS.get(event, "#f2b134"), ls="--")
        above = {"transform": loss.get_xaxis_transform(), "va": "top"}
        loss.text(when - began, 0.98, f" {event}", rotation=90, **above)
    loss.set(yscale="log", ylabel="test loss of the center")
    number.set(xlabel="seconds", ylabel="workers", ylim=(0, MOST + 0.5))
    figure.savefig(path, dpi=150)
    kept = {"seconds": times, "loss": [line["loss"] for line in rounds]}
    kept["workers"] = [
        (at, line["workers"]) for at, line in zip(times, rounds, strict=True)
    ]
    kept["events"] = [(when - began, event) for when, event in happened]
    Path(path).with_suffix(".json").write_text(json.dumps(kept))


def main(options):
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    class Backend(JaxConfig(use_gpu=True).backend_cls):
        def on_shutdown(self, worker_group, backend_config):
            """Who is about to be killed need not agree on the end with the dead."""

    class Config(JaxConfig):
        @property
        def backend_cls(self):
            return Backend

    folder = Path(tempfile.mkdtemp())
    log, machines, done = folder / "log", Machines(), threading.Event()
    log.touch()
    examples, happened, began = options.rounds * PERIOD * BATCH * MOST, [], time.time()
    trainer = JaxTrainer(
        loop,
        train_loop_config={
            "folder": str(folder / "run"),
            "log": str(log),
            "examples": examples,
        },
        jax_config=Config(use_gpu=True),  # it calls jax.distributed.initialize
        scaling_config=ScalingConfig(
            num_workers=(LEAST, MOST),
            resources_per_worker={"CPU": 1},
            elastic_resize_monitor_interval_s=5,
        ),
        run_config=RunConfig(
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=-1),
            worker_runtime_env={
                "env_vars": {
                    "JAX_PLATFORMS": "cpu",
                    "JAX_NUM_CPU_DEVICES": "1",
                    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
                    # The next group reads what this one has compiled.
                    "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                }
            },
        ),
    )
    arguments = (log, examples, machines, options.undisturbed, done, happened)
    # Nodes are started by the main thread alone.
    training = threading.Thread(target=lambda: (trainer.fit(), done.set()), daemon=True)
    training.start()
    try:
        follow(*arguments)
    finally:
        ray.shutdown()
        machines.cluster.shutdown()
    rounds = [line for line in said(log) if "loss" in line]
    workers = sorted({line["workers"] for line in rounds})
    print(
        f"{time.time() - began:.0f} s, {rounds[-1]['rounds']} rounds of "
        f"{workers[0]} to {workers[-1]} workers, "
        f"{len(rounds) - rounds[-1]['rounds']} made again: "
        f"test accuracy {rounds[-1]['accuracy']:.1%}"
    )
    draw(rounds, happened, began, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on machines that come and go.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of four workers")
    parser.add_argument("--undisturbed", action="store_true", help="nobody dies")
    parser.add_argument("--out", default="elastic.png", help="where the picture goes")
    main(parser.parse_args())

"""What a death costs a lockstep run, and what a save at each meeting costs it.

    make deaths                                          # an hour
    python benchmarks/deaths.py --schedules 1 --minutes 1  # ten minutes
    python benchmarks/deaths.py --quick

A DiLoCo run of processes with one CPU device each on Ray Train's `JaxTrainer`. The
first part kills one of three with SIGKILL and takes the seconds until the next round
apart. The second draws schedules of deaths and compares with a run that nobody
disturbs. The third saves at each meeting, 1 MB to 1 GB of parameters.
"""

import contextlib
import glob
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "4")  # XLA's threads: two for each of two devices
# How often Ray Train asks whether its processes live; 2 s by default.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")

import report

PERIOD, BATCH, PROCESSES = 20, 16, 3
PAUSE = 0.4  # seconds after each round, so that runs last as long as deaths need
A_SECOND = PERIOD * BATCH * PROCESSES / PAUSE  # examples, at most
STAGES = {  # what ends each of them
    "noticed": "[FailurePolicy]",
    "old group ended": "Attempting to start",
    "processes started": "Connecting to JAX",
    "JAX connected": "Initialized JAX distributed",
    "state restored": "restored",
    "compiled and met": "round",
}
SIZES = (1, 10, 100, 1000)  # MB of parameters


def loop(config):
    """What each process runs, and runs again after a death."""
    import flax.linen as nn
    import jax
    import numpy as np
    import optax

    import optx_sync as oxs

    def say(what, **more):
        if what == "round" and jax.process_index():
            return
        line = {"time": time.time(), "what": what, "pid": os.getpid(), **more}
        with open(config["log"], "a") as log:
            log.write(json.dumps(line) + "\n")

    digits = np.load(config["digits.npz"])
    images, labels = digits["images"], digits["labels"]
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:360], order[360:]
    network: Any = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
    tx = oxs.diloco(optax.adam(1e-3), "workers", communication_period=PERIOD)

    def loss_of(params, images, labels):
        logits = network.apply(params, images)
        entropy = optax.losses.softmax_cross_entropy_with_integer_labels
        return entropy(logits, labels).mean()

    def begin():
        params = network.init(jax.random.key(0), images[:1])  # equal everywhere
        return params, tx.init(params)

    # Kills are drawn, and may come three times before a save is written.
    begun = oxs.elastic.Group(config["run"], "workers", starts_without_save=None)
    with begun as group:
        params, state = group.restore_or_start(begin)
        say("restored", position=group.position)

        @group.workers.step(state=2)
        def step(params, state, images, labels):
            grads = jax.grad(loss_of)(params, images, labels)
            return oxs.apply_gradients(tx, grads, state, params)

        while group.position < config["examples"]:
            for _ in range(PERIOD):
                rows = train[group.rows(len(train), BATCH)]
                batch = group.batch((images[rows], labels[rows]))
                params, state = jax.block_until_ready(step(params, state, *batch))
            met = time.time()
            group.save((params, state))
            if not jax.process_index():
                center = jax.device_get(state.center)
                loss = float(loss_of(center, images[test], labels[test]))
                n, rounds = group.workers.sizes[0], int(state.global_step)
                where = {"n": n, "rounds": rounds, "position": group.position}
                say("round", **where, loss=loss, time=met)
            time.sleep(PAUSE)


def trainer(folder, examples, processes, quiet_end):
    """A `JaxTrainer` of that loop; `quiet_end` leaves out JAX's own end of a group."""
    import numpy as np
    from digits import IMAGES, LABELS
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    config = JaxConfig(use_gpu=True)
    if quiet_end:

        class Backend(config.backend_cls):
            def on_shutdown(self, worker_group, backend_config):
                """Processes that are about to be killed need not agree on their end."""

        class Config(JaxConfig):
            @property
            def backend_cls(self):
                return Backend

        config = Config(use_gpu=True)
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    where = {name: str(folder / name) for name in ("run", "log", "digits.npz")}
    np.savez(where["digits.npz"], images=IMAGES, labels=LABELS)
    return JaxTrainer(
        loop,
        train_loop_config={**where, "examples": examples},
        jax_config=config,
        scaling_config=ScalingConfig(
            num_workers=processes, resources_per_worker={"CPU": 1}
        ),
        run_config=RunConfig(
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=-1),
            worker_runtime_env={"env_vars": variables},
        ),
    )


def said(folder):
    """What the processes of a run said so far."""
    lines = (folder / "log").read_text().splitlines(True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def train(examples, times, quiet_end=True, processes=PROCESSES):
    """A run that is killed at these times after its first round: lines, deaths, end."""
    folder = Path(tempfile.mkdtemp())
    (folder / "log").touch()
    done, deaths, draw = threading.Event(), [], random.Random(0)
    run = trainer(folder, examples, processes, quiet_end)

    def fit():
        try:
            run.fit()
        finally:
            done.set()

    threading.Thread(target=fit, daemon=True).start()
    began, todo = None, list(times)
    while not done.wait(0.05):
        lines = said(folder)
        began = began or next((x["time"] for x in lines if x["what"] == "round"), None)
        if not todo or began is None or time.time() < began + todo[0]:
            continue
        up = [line for line in lines if line["what"] == "restored"]
        latest = [x["time"] for x in lines if x["what"] == "round"][-1]
        # Only of a group that is up and has met: one that starts has nobody to kill.
        if len(up) % processes == 0 and up[-1]["time"] < latest:
            todo.pop(0)
            with contextlib.suppress(ProcessLookupError):  # the run has just ended
                os.kill(draw.choice(up[-processes:])["pid"], signal.SIGKILL)
                deaths.append(time.time())
    return said(folder), deaths


def logged(session, text, after):
    """When Ray Train's processes logged this after a time."""
    found = []
    for path in glob.glob(f"{session}/logs/train/ray-train-app-*.log"):
        for line in Path(path).read_text(errors="replace").splitlines():
            if text in line and line.startswith("{"):
                stamp = json.loads(line)["asctime"]
                then = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()
                found += [then] if then > after else []
    return sorted(found)


def apart(session, lines, death):
    """Seconds of each stage from a death to the next round."""
    ends = []
    for stage, text in STAGES.items():
        own = stage in ("state restored", "compiled and met")
        if own:
            times = [x["time"] for x in lines if x["what"] == text]
            times = [t for t in times if t > (ends[-1] if ends else death)]
        else:
            times = logged(session, text, death)
        # The last of the processes that do it.
        count = 1 if stage not in list(STAGES)[2:5] else PROCESSES
        ends.append(times[count - 1])
    starts = [death, *ends[:-1]]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def seconds(page, session, deaths, examples):
    """From SIGKILL to the next round, taken apart."""
    rows = []
    for name, quiet in (("as it is", False), ("without JAX's own end", True)):
        lines, died = train(examples, [4.0 + 15.0 * i for i in range(deaths)], quiet)
        each = [apart(session, lines, death) for death in died]
        middle = [statistics.median(x) for x in zip(*each, strict=True)]
        in_all = statistics.median(map(sum, each))
        load = f"{os.getloadavg()[0]:.1f}"
        shown = [f"{x:.1f}" for x in middle]
        rows.append([name, len(each), *shown, f"{in_all:.1f}", load])
        page.data(**{name: each})
        print(*rows[-1], flush=True)  # a run is long, and the page comes at its end
    page.table("seconds", rows)


def schedules(page, number, minutes, examples):
    """Drawn deaths against a run that nobody disturbs."""
    whole, _ = train(examples, [])
    losses = {x["position"]: x["loss"] for x in whole if x["what"] == "round"}
    rows = []
    for seed in range(number):
        draw, times, now = random.Random(seed), [], 0.0
        a_second = (2 + 2 * minutes) / (60 * minutes)  # some also in short schedules
        while (now := now + draw.expovariate(a_second)) < 60 * minutes:
            times.append(now)
        lines, deaths = train(examples, times)
        rounds = [x for x in lines if x["what"] == "round"]
        # What is lost: rounds that were made once more, at most two a death.
        again = len(rounds) - rounds[-1]["rounds"]
        end = rounds[-1]
        off = end["loss"] / losses[end["position"]] - 1
        rows.append([seed, len(deaths), end["rounds"], again, f"{off:+.3%}"])
    page.table("schedules", rows, examples=examples)


def saves(page, sizes):
    """A meeting, and a save at it, of two workers in one process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import optx_sync as oxs

    rows, ratios = [], []
    tx = oxs.diloco(optax.sgd(0.1), "workers", communication_period=1)
    for megabytes in sizes:
        params = {f"{i}": jnp.zeros(megabytes * 250_000 // 8) for i in range(8)}
        for where, place in (("disk", None), ("memory", "/dev/shm")):
            folder = tempfile.TemporaryDirectory(dir=place)
            with folder as path, oxs.elastic.Group(path, "workers", keep=1) as group:
                state = group.restore_or_start((params, tx.init(params)))

                @group.workers.step(state=2)
                def step(params, state):
                    # Some numbers; what a gradient costs is not asked here.
                    grads = jax.tree.map(jnp.ones_like, params)
                    return oxs.apply_gradients(tx, grads, state, params)

                meets, holds, writes = [], [], []
                for _ in range(5):
                    start = time.perf_counter()
                    state = jax.block_until_ready(step(*state))
                    met = time.perf_counter()
                    group.position += 1
                    group.save(state)
                    held = time.perf_counter()
                    group.manager.wait_until_finished()
                    meets.append(met - start)
                    holds.append(held - met)
                    writes.append(time.perf_counter() - met)
                nbytes = sum(x.nbytes for x in jax.tree.leaves(state))
            meet, hold, write = (np.median(x[1:]) for x in (meets, holds, writes))
            ratios.append((hold / meet, f"{megabytes:,} MB, {where}"))
            shown = [f"{1e3 * x:,.0f}" for x in (meet, hold, write)]
            load = f"{os.getloadavg()[0]:.1f}"
            name, mb = f"{megabytes:,} MB, {where}", f"{nbytes / 1e6:,.0f}"
            rows.append([name, mb, *shown, f"{hold / meet:.1f}", load])
            page.data(**{name: [meets, holds, writes]})
    page.table("saves", rows)
    page.text("saves", most="; ".join(f"{what}: {x:.1f}" for x, what in ratios))


def main():
    """Run all parts and write the page."""
    parser = report.arguments(__doc__)
    parser.add_argument("--deaths", type=int, default=3, help="of each way to end")
    parser.add_argument("--schedules", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each schedule")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="in MB")
    parser.add_argument("--only", nargs="*", default=("seconds", "schedules", "saves"))
    options = parser.parse_args()
    deaths, number, minutes = options.deaths, options.schedules, options.minutes
    sizes = options.sizes
    if options.quick:
        deaths, number, minutes, sizes = 1, 1, 0.3, (1,)
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    values = {"processes": PROCESSES, "period": PERIOD, "batch": BATCH}
    page = report.Report("deaths", options, **values)
    if {"seconds", "schedules"} & set(options.only):
        import ray

        settings: Any = {"include_dashboard": False, "log_to_driver": False}
        settings["address"] = "local"  # and not of another run that is here
        # With room for the next group: Ray Train asks again for CPUs only after 0.6 s.
        cpus = 2 * PROCESSES + 1
        context: dict[str, Any] = vars(ray.init(num_cpus=cpus, **settings))
        session = context["address_info"]["session_dir"]
        if "seconds" in options.only:
            seconds(page, session, deaths, int(A_SECOND * (10 + 15 * deaths)))
        if "schedules" in options.only:
            schedules(page, number, minutes, int(A_SECOND * 60 * minutes))
        ray.shutdown()
    if "saves" in options.only:
        saves(page, sizes)
    page.save()


if __name__ == "__main__":
    main()

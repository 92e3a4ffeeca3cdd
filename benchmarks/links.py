"""Seconds of a step on links that are really slow, beside what `audit.time` says.

    make links                            # half an hour; goes on where it was stopped
    python benchmarks/links.py --quick

Each process of a `jax.distributed` run has a network namespace of its own, and `tc tbf`
limits what leaves it. Needs root and iproute2; without them it says so, and ends.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import namespaces
import numpy as np
import optax
from by_hand import AXIS, mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from namespaces import missing, shell

import optx_sync as oxs

NAMES, ADDRESS, PORT = "oxs-links-{}", "10.99.0.{}", 9911
COUNTS = 2, 4  # processes
RATES = 10, 50, 100, 1_000, 10_000  # Mbit/s
WIDTH, BATCH = 640, 640  # of the network's two layers; images
NOLOCO = "noloco, H = 10"  # of two, the one partner is everybody
ALONE = ", alone"  # the same program of one worker, which nobody else is in
SECONDS, PERIODS = 4.0, (3, 40)  # of a point, at least; its periods
BARE = {"one number": [1], "six arrays of a number": [1] * 6, "4 MB": [1_000_000]}


class Method(NamedTuple):
    """A way to agree."""

    tx: optax.GradientTransformation
    period: int  # steps that are timed together: a whole one of the rule


@functools.cache
def methods() -> dict[str, Method]:
    """What is measured, by name."""
    inner = optax.adam(1e-3)
    codes = oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4))

    def diloco(period: int, **options: Any) -> Method:
        tx = oxs.diloco(inner, AXIS, communication_period=period, **options)
        return Method(tx, period)

    parts = {"fragments": oxs.rules.strided(2), "overlap": True}
    return {
        "no exchange": Method(inner, 50),
        "cross_shard": Method(oxs.cross_shard(inner, AXIS), 1),
        "diloco, H = 10": diloco(10),
        "diloco, H = 50": diloco(50),
        "diloco, H = 200": diloco(200),
        "H = 10, 4 bits": diloco(10, exchange=codes),
        "H = 10, two parts, a step later": diloco(10, **parts),
        NOLOCO: Method(oxs.noloco(inner, AXIS, communication_period=10), 10),
    }


def begin() -> Any:
    """A worker's parameters: 1.8 MB of float32."""
    sizes = {"into": (64, WIDTH), "between": (WIDTH, WIDTH), "out": (WIDTH, 10)}
    draw = np.random.default_rng(0)
    return {
        name: {
            "kernel": jnp.asarray(draw.normal(0, rows**-0.5, (rows, columns)), "f4"),
            "bias": jnp.zeros(columns),
        }
        for name, (rows, columns) in sizes.items()
    }


def loss_of(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of a network of two hidden layers."""
    found = images
    for name in ("into", "between", "out"):
        found = found @ params[name]["kernel"] + params[name]["bias"]
        found = found if name == "out" else jax.nn.relu(found)
    entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    return entropy(found, labels).mean()


# What runs in each namespace.
def training(name: str, mesh: jax.sharding.Mesh) -> Callable[[], list[float]]:
    """A function that trains through one period: seconds of each of its steps."""
    from digits import IMAGES, LABELS

    tx, period = methods()[name]
    workers = oxs.Workers(mesh.size, AXIS, mesh=mesh)
    carried = workers.start((first := begin(), tx.init(first)))

    @workers.step(state=2)
    def step(params, state, images, labels):
        grads = jax.grad(loss_of)(params, images, labels)
        return oxs.apply_gradients(tx, grads, state, params)

    rows = np.random.default_rng(jax.process_index()).permutation(len(LABELS))[:BATCH]
    place = NamedSharding(mesh, PartitionSpec(AXIS))
    batch = [
        jax.make_array_from_process_local_data(place, part[rows])
        for part in (IMAGES, LABELS)
    ]

    def run() -> list[float]:
        nonlocal carried
        ends = [time.perf_counter()]
        for _ in range(period):
            carried = jax.block_until_ready(step(*carried, *batch))
            ends.append(time.perf_counter())
        return np.diff(ends).tolist()

    return run


def bare(sizes: Sequence[int], mesh: jax.sharding.Mesh) -> Callable[[], list[float]]:
    """A function that sums arrays over all processes: seconds."""
    place = NamedSharding(mesh, PartitionSpec(AXIS))
    arrays = [
        jax.make_array_from_process_local_data(place, np.ones((1, size), np.float32))
        for size in sizes
    ]
    total = jax.jit(
        jax.shard_map(
            lambda arrays: jax.lax.psum(arrays, AXIS),
            mesh=mesh,
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(),
        )
    )

    def run() -> list[float]:
        start = time.perf_counter()
        jax.block_until_ready(total(arrays))
        return [time.perf_counter() - start]

    return run


def make_way() -> None:
    """Let Gloo's thread run only where a core is idle.

    It spins while something has arrived that nobody has asked for, so while its own
    process still computes; on two cores others then wait for the scheduler's next tick,
    4 ms, at each message. It is the thread with the most time in the kernel.
    """

    def in_kernel(thread: Path) -> int:
        return int((thread / "stat").read_text().rpartition(")")[2].split()[12])

    others = [
        x for x in Path("/proc/self/task").iterdir() if x.name != str(os.getpid())
    ]
    spins = int(max(others, key=in_kernel).name)
    os.sched_setscheduler(spins, os.SCHED_IDLE, os.sched_param(0))


def serve(number: int, count: int) -> None:
    """Answer each line, the name of a run and a number of periods, with seconds."""
    os.environ["NPROC"] = "2"  # threads of XLA
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{ADDRESS.format(1)}:{PORT}", count, number)
    everyone, oneself = mesh_of(count), mesh_of(1, jax.local_devices())
    runs: dict[str, Callable[[], list[float]]] = {}
    run = bare(BARE["4 MB"], everyone)
    for _ in range(20):
        run()
    make_way()
    for line in sys.stdin:
        name, periods = json.loads(line)
        if name not in runs:
            alone = name.endswith(ALONE)
            if name in BARE:
                runs[name] = bare(BARE[name], everyone)
            else:
                method = name.removesuffix(ALONE)
                runs[name] = training(method, oneself if alone else everyone)
        found = [runs[name]() for _ in range(periods)]
        # Gloo writes lines of its own.
        print(f"@{json.dumps(found)}", flush=True)


# What makes the namespaces and asks.
class Hosts:
    """Namespaces that are joined by a bridge, and a process in each.

    Use it as a context: at its end, however it comes, nothing of it is left.
    """

    def __init__(self, count: int) -> None:
        self.count, self.names = count, [NAMES.format(i) for i in range(count)]
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Hosts":
        self.clean()
        try:
            self.join()
            self.start()
        except BaseException:
            self.clean()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.clean()

    def join(self) -> None:
        """Make the namespaces and the bridge."""
        bridge = NAMES.format("bridge")
        shell(f"ip netns add {bridge}")
        shell(f"ip -n {bridge} link add bridge type bridge")
        shell(f"ip -n {bridge} link set bridge up")
        for number, name in enumerate(self.names):
            own = ADDRESS.format(number + 1)
            namespaces.make(name, own)
            shell(
                f"ip -n {name} link add eth type veth peer name port{number} "
                f"netns {bridge}"
            )
            shell(f"ip -n {bridge} link set port{number} master bridge up")
            namespaces.connect(name, own)
            # Whatever this machine's own is; and nothing starts slowly after a pause.
            for setting in ("congestion_control=reno", "slow_start_after_idle=0"):
                shell(f"ip netns exec {name} sysctl -w net.ipv4.tcp_{setting}")

    def start(self) -> None:
        """Start the processes."""
        for number, name in enumerate(self.names):
            command = f"ip netns exec {name} {sys.executable} {__file__} --serve"
            self.processes.append(
                subprocess.Popen(
                    [*command.split(), str(number), str(self.count)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def shape(self, mbits: int) -> None:
        """Limit what leaves each of them. The bucket is of 2 ms, or a few packets."""
        bucket = max(10_000, mbits * 250)
        for name in self.names:
            limit = f"rate {mbits}mbit burst {bucket} limit {max(4 * bucket, 200_000)}"
            shell(f"ip netns exec {name} tc qdisc replace dev eth root tbf {limit}")

    def sent(self) -> list[int]:
        """Bytes that have left each of them, with all headers."""
        found = [
            json.loads(shell(f"ip -n {name} -s -j link show dev eth"))
            for name in self.names
        ]
        return [lines[0]["stats64"]["tx"]["bytes"] for lines in found]

    def ask(self, name: str, periods: int) -> np.ndarray:
        """Seconds of each process, period and step."""
        for process in self.processes:
            assert process.stdin
            process.stdin.write(json.dumps([name, periods]) + "\n")
            process.stdin.flush()
        return np.array([self._answer(process) for process in self.processes])

    def _answer(self, process: subprocess.Popen[str]) -> np.ndarray:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("@"):
                return np.array(json.loads(line[1:]))
        raise RuntimeError("a process has ended; its error stands above.")

    def clean(self) -> None:
        """End the processes; delete namespaces, also those of a run that was killed."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []
        namespaces.remove(NAMES.format(""))


def wanted(quick: bool) -> Iterator[tuple[int, int, str]]:
    """What is measured: how many processes, Mbit/s, and what runs."""
    if quick:
        few = *BARE, "no exchange", "cross_shard", "diloco, H = 10"
        yield from ((2, rate, name) for rate in (100, RATES[-1]) for name in few)
        yield 2, RATES[-1], "diloco, H = 10" + ALONE
        return
    for count in COUNTS:
        left = NOLOCO if count == 2 else "diloco, H = 200"
        names = [*BARE, *(name for name in methods() if name != left)]
        yield from ((count, rate, name) for rate in RATES for name in names)
        if count == 2:  # what needs no link
            yield from (
                (count, RATES[-1], name + ALONE)
                for name, method in methods().items()
                if method.period == 10
            )


def measure(hosts: Hosts, rate: int, name: str, quick: bool) -> dict[str, Any]:
    """One point."""
    hosts.shape(rate)
    first = hosts.ask(name, 1)  # compiles, and fills the bucket and the queues
    least, most = (2, 2) if quick else PERIODS
    periods = int(np.clip(SECONDS / first.sum(-1).mean(), least, most))
    before, load = hosts.sent(), os.getloadavg()[0]
    found = hosts.ask(name, periods)
    sent = np.subtract(hosts.sent(), before)
    steps = found.shape[-1]
    # Processes meet, so the mean over them is the time of each; without an exchange,
    # where more processes than cores take turns, it is the mean of their turns.
    each = found.sum(-1).mean(0) / steps
    quiet = float(np.median(found))
    return {
        "processes": hosts.count,
        "mbits": rate,
        "name": name,
        "seconds": float(np.median(each)),  # of a step, over whole periods
        "spread": [float(x) for x in np.quantile(each, (0.25, 0.75))],
        "quiet": quiet,  # of the step in the middle
        "last": float(np.median(found[..., -1])),  # of the last step of a period
        "periods": periods,
        "steps": steps,
        "bytes": float(sent.mean() / periods),  # that a process sends in a period
        "load": round(load, 2),
        "taken": round(time.time()),
    }


def measured(path: Path, quick: bool) -> list[dict[str, Any]]:
    """Measure what is not in the file, line by line, and return what it then holds."""
    lines = path.read_text().splitlines() if path.exists() else []
    points = [json.loads(line) for line in lines]
    there = {(x["processes"], x["mbits"], x["name"]) for x in points}
    todo = [one for one in wanted(quick) if one not in there]
    for count in sorted({count for count, *_ in todo}):
        with Hosts(count) as hosts:
            for _, rate, name in (one for one in todo if one[0] == count):
                points.append(measure(hosts, rate, name, quick))
                with path.open("a") as file:
                    file.write(json.dumps(points[-1]) + "\n")
                seconds = points[-1]["seconds"]
                print(f"{count} at {rate:6,} Mbit/s, {name}: {1e3 * seconds:.1f} ms")
    return points


def main() -> None:
    """Measure, and write the page."""
    if wants := missing():
        print(f"Links cannot be made slow here: that needs {wants}. Nothing is done.")
        return
    import report

    options = report.arguments(__doc__).parse_args()
    # The programs are compiled here too, for as many CPU devices.
    os.environ["NPROC"] = str(2 * max(COUNTS))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(COUNTS))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the contexts end too
    folder = report.folder_of(options)
    folder.mkdir(parents=True, exist_ok=True)
    points = measured(folder / "links.jsonl", options.quick)
    import links_page

    links_page.write(report.Report("links", options), points)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*map(int, sys.argv[2:]))
    else:
        main()

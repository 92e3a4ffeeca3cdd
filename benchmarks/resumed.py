"""Every wrapper, killed and restored: is the resumed run the one that went through?

    python benchmarks/resumed.py           # two minutes
    python benchmarks/resumed.py --quick   # one wrapper

Three processes run the same program. This one goes through to the end. The second saves
in the middle of a period and at a meeting, and is killed with SIGKILL while it trains
on. The third begins with nothing but these saves.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "16")  # Threads of XLA: two for each device.

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import report

import optx_sync as oxs
from optx_sync.core import trees

jax.config.update("jax_num_cpu_devices", 8)
PERIOD, STEPS, BATCH, WIDTH = 4, 14, 4, 6
# Steps after which a run was killed: three of a period of four, and a period's end.
KILLED = {"mid-period": 7, "at a meeting": 8}
BROKEN = 5
AXIS, EIGHT, FIVE = "workers", 8, 5
INNER = optax.adam(0.05)
FEEDBACK = oxs.exchange.error_feedback(oxs.exchange.quantized(4))
GUARDED: dict[str, Any] = {"drop_nonfinite": True, "measure": True}


class Case(NamedTuple):
    """A wrapper, and who is there before and after the kill."""

    tx: optax.GradientTransformation
    late: bool = False  # whether two replicas, each time others, do not contribute
    broken: bool = False  # whether a worker once finds NaN, before the kills
    sizes: tuple[int, ...] = (EIGHT,)
    fewer: tuple[int, ...] = (FIVE,)
    axes: Any = AXIS
    width: int = WIDTH
    # Of workers that are sharded: by their number, how the devices of each cut "w".
    inside: Mapping[int, jax.P] = {}


Run: TypeAlias = tuple[oxs.Workers, Any, Case]  # workers, and their step


def _diloco(**options: Any) -> Case:
    return Case(oxs.diloco(INNER, AXIS, communication_period=PERIOD, **options))


def _rounds(make: Callable[..., Any], **options: Any) -> Case:
    return Case(make(INNER, AXIS, communication_period=PERIOD, **options))


def _sharded(before: int, after: int) -> Case:
    """On eight devices: each worker is on some of them, and then on others."""
    cuts = {2: jax.P("inside"), 4: jax.P(None, "inside"), 8: jax.P()}
    return _diloco()._replace(sizes=(before,), fewer=(after,), width=8, inside=cuts)


DELAYED = oxs.outer.delayed_nesterov(0.7, 0.9, 2)
CASES: dict[str, Case] = {
    "cross_shard": Case(oxs.cross_shard(INNER, AXIS)),
    "cross_shard, shard_state": Case(oxs.cross_shard(INNER, AXIS, shard_state=True)),
    "cross_shard, 4 bits with feedback": Case(
        oxs.cross_shard(INNER, AXIS, exchange=FEEDBACK)
    ),
    "all_reduce_grads": Case(optax.chain(oxs.all_reduce_grads(AXIS), INNER)),
    "cross_shard, shard_state='leaves'": Case(
        oxs.cross_shard(INNER, AXIS, shard_state="leaves")
    ),
    "sync_replicas, 6 of 8": Case(
        oxs.sync_replicas(INNER, AXIS, 6, total_num_replicas=None), late=True
    ),
    "sync_replicas, 16 gradients, averages": Case(
        oxs.sync_replicas(INNER, AXIS, 16, variable_averages=0.9, **GUARDED)
    ),
    "elastic_average": _rounds(oxs.elastic_average, moving_rate=0.1, rho=0.3),
    "agn": _rounds(oxs.agn),
    "local_sgd": _rounds(oxs.local_sgd),
    "center_variable, a rule of one's own": Case(
        oxs.center_variable(
            INNER,
            oxs.CenterRule(lambda own, center, at: 0.5 * (own.params - own.taken)),
            AXIS,
            communication_period=PERIOD,
        )
    ),
    "diloco": _diloco(),
    "diloco, drop_nonfinite, measure": _diloco(**GUARDED)._replace(broken=True),
    "diloco, shard_state": _diloco(shard_state=True),
    "diloco, 4 bits with feedback": _diloco(exchange=FEEDBACK),
    "diloco, fragments=2": _diloco(fragments=2),
    "diloco, overlap": _diloco(overlap=True),
    "diloco, fragments=2, overlap, 4 bits with feedback": _diloco(
        fragments=2, overlap=True, exchange=FEEDBACK
    ),
    "diloco, fragments=4, overlap (in every step)": _diloco(fragments=4, overlap=True),
    "diloco, delayed_nesterov": _diloco(outer=DELAYED),
    "diloco, sharded, 2 workers of 4 devices, then 4 of 2": _sharded(2, 4),
    "diloco, sharded, 4 workers of 2 devices, then 8 of 1": _sharded(4, 8),
    "diloco around local_sgd": Case(
        oxs.diloco(
            oxs.local_sgd(INNER, "chips", communication_period=2),
            "pods",
            communication_period=PERIOD,
        ),
        sizes=(4, 2),
        fewer=(3, 2),
        axes=("pods", "chips"),
    ),
    "gossip": _rounds(oxs.gossip),
    "gossip, random_pairs, outer": _rounds(
        oxs.gossip, graph=oxs.graphs.random_pairs(), outer=optax.sgd(0.7, 0.5)
    ),
    "noloco": _rounds(oxs.noloco),
}
QUICK = ("diloco",)


def begin(case: Case) -> Any:
    """What a worker has before its first step."""
    width = case.width
    params = {
        "w": jnp.asarray(np.sin(np.arange(width**2.0)).reshape(width, width), "f4"),
        "b": jnp.ones(width, jnp.bfloat16),
    }
    return params, case.tx.init(params), jax.random.key(1)


def workers_of(case: Case, sizes: tuple[int, ...]) -> oxs.Workers:
    """Simulated ones, or sharded over eight devices."""
    if not case.inside:
        return oxs.Workers(sizes, case.axes)
    (n,) = sizes
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((n, 8 // n), (AXIS, "inside"), kinds)
    specs = {"w": case.inside[n], "b": jax.P()}
    return oxs.Workers(n, AXIS, mesh=mesh, specs=specs)


def program(case: Case, sizes: tuple[int, ...]) -> Run:
    """The workers, and their step: its random numbers are each worker's own."""
    workers = workers_of(case, sizes)

    @workers.step(state=3)
    def step(params, state, key, x, y, comes):
        key, own = jax.random.split(key)

        def loss_of(params):
            noisy = x + jax.random.uniform(own, x.shape, minval=-0.1, maxval=0.1)
            return jnp.mean((jnp.tanh(noisy @ params["w"]) * params["b"] - y) ** 2)

        # The product of a bfloat16 with a float32.
        with jax.numpy_dtype_promotion("standard"):
            loss, grads = jax.value_and_grad(loss_of)(params)
        more = {"contributes": comes[0]} if case.late else {}
        params, state = oxs.apply_gradients(case.tx, grads, state, params, **more)
        return params, state, key, loss

    return workers, step, case


def batch(case: Case, number: int, sizes: tuple[int, ...]) -> Any:
    """Of a step: each worker's examples, and who is not late."""
    draw, n = np.random.default_rng(number), int(np.prod(sizes))
    x = draw.normal(size=(n * BATCH, case.width)).astype(np.float32)
    if case.broken and number == BROKEN:
        x[2 * BATCH] = np.nan
    return x, np.sin(2 * x), (np.arange(n) + number) % n >= 2


def numbers(x: Any) -> np.ndarray:
    """An array on the host; a random key's data."""
    keys = jax.dtypes.prng_key
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, keys)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def bits(tree: Any) -> dict[str, str]:
    """A digest of each array, by its name."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        x = numbers(x)
        told = f"{x.dtype}{x.shape}".encode() + x.tobytes()
        found[jax.tree_util.keystr(path)] = hashlib.sha256(told).hexdigest()
    return found


def trained(run: Run, state: Any, after: int, until: int = STEPS) -> Iterator[Any]:
    """(steps so far, the state, digests of what is to be equal) after each step."""
    workers, step, case = run
    state = jax.tree.map(jnp.copy, state)  # A step takes the memory of what it gets.
    for number in range(after, until):
        *state, loss = step(*state, *batch(case, number, workers.sizes))
        equal = {"parameters": state[0], "state": state[1:], "losses": loss}
        if number == STEPS - 1:
            equal["fingerprint"] = workers.fingerprint(tuple(state))
            with contextlib.suppress(ValueError):  # Not all measure something.
                equal["metrics"] = workers.metrics(tuple(state))
        yield number + 1, tuple(state), {name: bits(x) for name, x in equal.items()}


def digests(run: Run, state: Any, after: int) -> dict[str, Any]:
    """Those after each step."""
    return {str(number): equal for number, _, equal in trained(run, state, after)}


def fewer(how: Callable[[], Any]) -> tuple[Any, str]:
    """A state of fewer workers; what a warning says of it, or a refusal."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            state = how()
        except ValueError as error:
            return None, str(error)
    return state, " ".join(str(one.message) for one in caught)


def changed(before: Any, after: Any) -> list[str]:
    """What of the survivors is not what it was; arrays in pieces are joined first."""
    names = []
    rows = jax.tree_util.tree_leaves_with_path(before)
    for (path, x), y in zip(rows, jax.tree.leaves(after), strict=True):
        x, y = numbers(x), numbers(y)
        kept = x if x.shape == y.shape else x[: len(y)]
        if kept.shape != y.shape:
            both = x.ravel(), y.ravel()
            kept, y = (one[: min(x.size, y.size)] for one in both)
        if kept.tobytes() != y.tobytes():
            names.append(".".join(trees.names_of(path)))
    return names


def is_killed(folder: Path, names: Sequence[str]) -> None:
    """The process that saves, and trains on until it is killed."""
    going = []
    for name in names:
        case = CASES[name]
        run = program(case, case.sizes)
        state = run[0].start(begin(case))
        with ocp.CheckpointManager(folder / name) as manager:
            for number, now, _ in trained(run, state, 0, max(KILLED.values())):
                if number in KILLED.values():
                    manager.save(number, args=ocp.args.StandardSave(now))
        going.append((run, state))
    (folder / "saved").touch()
    while True:
        run, state = going[-1]
        digests(run, state, max(KILLED.values()))


def goes_on(folder: Path, names: Sequence[str]) -> None:
    """The process that has nothing but the saves."""
    found = {}
    for name in names:
        case = CASES[name]
        found[name] = {}
        for sizes in (case.sizes, case.fewer):
            workers, step, _ = program(case, sizes)
            workers.expect(lambda case=case: begin(case))
            for when, number in KILLED.items():
                with ocp.CheckpointManager(folder / name) as manager:
                    state, said = fewer(
                        lambda m=manager, w=workers, n=number: w.restore(m, n)
                    )
                after = state and digests((workers, step, case), state, number)
                found[name][f"{when}, {sizes[0]}"] = [said, after]
    (folder / "resumed").write_text(json.dumps(found))


def differ(expected: Any, found: Any) -> tuple[int, list[str]]:
    """How many arrays were compared after all steps, and which differ."""
    pairs = [
        (f"{name} after step {number}{path}", digest, found[number][name].get(path))
        for number in found
        for name, arrays in expected[number].items()
        for path, digest in arrays.items()
    ]
    return len(pairs), [name for name, one, other in pairs if one != other]


def process(part: str, folder: Path, names: Sequence[str]) -> subprocess.Popen[bytes]:
    """This program in a process of its own."""
    command = [sys.executable, __file__, "--part", part, folder, *names]
    return subprocess.Popen([str(word) for word in command])


def killed(folder: Path, child: subprocess.Popen[bytes]) -> None:
    """Kill it once it has saved all, while it trains."""
    while not (folder / "saved").exists():
        if child.poll() is not None:
            raise SystemExit(f"The process that saves ended with {child.returncode}.")
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()


def what_holds(case: Case, state: Any, now: Any) -> list[str]:
    """Of a state of fewer workers: its parameters, its center, and what changed."""
    many, few = (oxs.Workers(n, case.axes) for n in (case.sizes, case.fewer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some of the center has not met yet.
        before, after = many.center(state), few.center(now)
    names = changed(state, now)
    own = [name for name in names if name.startswith("0.")]
    rest = [name.removeprefix("1.") for name in names if name not in own]
    kept = "the same" if bits(before) == bits(after) else "of those left"
    return ["the center" if own else "kept", kept, ", ".join(rest) or "nothing"]


def study(page: report.Report, names: Sequence[str]) -> list[str]:
    """Kill, resume and compare all of these; returns what differs."""
    through, states, less = {}, {}, {}
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        child = process("killed", folder, names)
        try:
            for name in names:
                case = CASES[name]
                run = program(case, case.sizes)
                start, every = run[0].start(begin(case)), {}
                for number, state, equal in trained(run, start, 0):
                    every[str(number)] = equal
                    if number in KILLED.values():
                        states[name, number] = jax.tree.map(jnp.copy, state)
                through[name] = every
            killed(folder, child)
            child = process("resumed", folder, names)
            for name in names:
                run = program(CASES[name], CASES[name].fewer)
                for number in KILLED.values():
                    state = states[name, number]
                    now, said = fewer(lambda w=run[0], s=state: w.resize(s))
                    after = now and digests(run, now, number)
                    less[name, number] = now, said, after
            if child.wait():
                raise SystemExit("The process that goes on has failed.")
        finally:
            child.kill()
        resumed = json.loads((folder / "resumed").read_text())
    return tables(page, names, through, states, less, resumed)


def tables(
    page: report.Report,
    names: Sequence[str],
    through: Any,
    states: Any,
    less: Any,
    resumed: Any,
) -> list[str]:
    """Write down what was found; returns what differs."""
    wrong, total, rows = [], 0, []
    holds = {when: [] for when in KILLED}
    for name in names:
        case, row = CASES[name], []
        for sizes in (case.sizes, case.fewer):
            for when, number in KILLED.items():
                said, after = resumed[name][f"{when}, {sizes[0]}"]
                expected = through[name]
                if sizes == case.fewer:
                    now, expected_said, expected = less[name, number]
                    if said != expected_said:
                        wrong.append(f"{name}, {when}: {said!r}, {expected_said!r}")
                    about = ["refused"] * 3
                    if now:
                        about = what_holds(case, states[name, number], now)
                    holds[when].append([name, *about, dropped(said)])
                if after is None or expected is None:
                    row.append("refused")
                    continue
                count, different = differ(expected, after)
                total += count
                wrong += [f"{name}, killed {when}, {sizes}: {x}" for x in different]
                row.append(f"{len(different)} of {count} differ")
                if not different:
                    row[-1] = "bit-equal"
        rows.append([name, *row])
    page.table("equal", rows)
    for when, found in holds.items():
        page.table(when.replace(" ", "_"), found)
    page.text("compared", total=total, wrong=len(wrong))
    page.data(differ=wrong)
    return wrong


def dropped(said: str) -> str:
    """What a warning says is dropped, or the first sentence of a refusal."""
    said = said.removeprefix("resize in the middle of a round drops ")
    return said.partition(". ")[0] or "nothing"


def main() -> None:
    """Run the parts and write the page."""
    parser = report.arguments(__doc__)
    parser.add_argument("--part", nargs="+", help="a process: which, folder, wrappers")
    options = parser.parse_args()
    if options.part:
        part, folder, *names = options.part
        {"killed": is_killed, "resumed": goes_on}[part](Path(folder), names)
        return
    names = QUICK if options.quick else tuple(CASES)
    if options.quick:  # Most of the time XLA compiles.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    values = {"period": PERIOD, "steps": STEPS, "mid": KILLED["mid-period"]}
    page = report.Report("resumed", options, many=EIGHT, few=FIVE, **values)
    wrong = study(page, names)
    page.save()
    if wrong:
        raise SystemExit("\n".join(["These differ:", *wrong]))


if __name__ == "__main__":
    main()

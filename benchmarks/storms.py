"""Storms: runs on two hosts under every kind of fault, and what is left of them.

    make storms                          # an hour and a half
    python benchmarks/storms.py --quick
    python benchmarks/storms.py --only link driver

Two network namespaces with a Ray node each are joined by a cable. Workers meet by
quorum, parts in turn, answers two steps later; meanwhile faults come from a table, by a
schedule that is drawn. Every push bears a mark of its own, and its worker writes down
how it was answered. *Beyond*: an answered push that the center lacks, though no server
went back to a save from before it, or only to one too old. *Untold*: one that is lost,
and its worker was not told.
*Twice*: a place holds more than one push's mark, or one of a push that was dropped.
*Torn*: the two variables of a part differ. *Made*: the steps of all workers; those that
the center lacks are told apart by why. Needs root and iproute2.
"""

import collections
import contextlib
import itertools
import json
import math
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ["RAY_AUTH_MODE"] = "disabled"

import namespaces
import numpy as np
import on_ray
import optax
import report
from namespaces import missing, shell
from on_ray import ACTORS, PATIENCE_SECONDS

import optx_sync as oxs
from optx_sync import runtime

on_ray.take_one_thread()
# Another number makes hosts of their own, for storms at the same time.
NUMBER = os.environ.get("STORM", "0")
HOSTS = f"oxs-storm{NUMBER}-a", f"oxs-storm{NUMBER}-b"
HERE, THERE = f"10.97.{NUMBER}.1", f"10.97.{NUMBER}.2"
PORT = 6397
EVERY, PARTS, PERIOD, DELAY = 20, 4, 16, 2  # pushes between saves; of the run
STEP_SECONDS = 0.2
WORKER_TIMEOUT, PATIENCE = 30.0, 20.0  # seconds: of the run, and of its meetings
SLOW_KBIT = 20, 100  # a second, of a slow link: 50 to 10 s for a push
FLOATS, MARK = 16_384, 12.0  # of each of a part's two variables; of a push
DISK_MB = 48
# Of Ray's calls between the hosts, per cent: the request lost, the answer lost, the
# answer lost while the call is under way.
LOST_CALLS = {
    "num_failures": -1,
    "req_failure_prob": 1,
    "resp_failure_prob": 1,
    "in_flight_failure_prob": 1,
}


class Party(NamedTuple):
    """Who trains: workers on this host, and on the other one."""

    here: int
    there: int
    servers: int
    quorum: int

    @property
    def workers(self) -> int:
        """All of them."""
        return self.here + self.there


FOUR, TWO = Party(3, 1, 2, 3), Party(1, 1, 1, 1)


# What runs on the hosts.
class Witness:
    """A connection whose pushes bear marks, and which writes down their answers."""

    def __init__(self, connection: Any, folder: pathlib.Path, worker: Any):
        self._inner, self._folder = connection, folder
        self._worker, self._workers = worker, FLOATS // 8
        name = f"{worker.index}_{worker.incarnation}"
        self._log = (folder / f"worker_{name}.jsonl").open("a", buffering=1)
        self._steps = (folder / f"steps_{name}").open("ab", buffering=0)
        self._over: dict[int, int] = {}  # steps that answers have overwritten, by part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def say(self, what: str, **more: Any) -> None:
        """Write a line."""
        self._log.write(json.dumps({"what": what, "time": time.time(), **more}) + "\n")

    def steps(self) -> None:
        """Count a step: a byte, which outlives this process."""
        self._steps.write(b".")

    def _place(self, part: int) -> int:
        """A place that no incarnation of this worker has had: they may overlap."""
        path = self._folder / f"places_{self._worker.index}_{part}"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b".")  # What is appended is not overwritten.
        place = os.lseek(file, 0, os.SEEK_CUR) - 1
        os.close(file)
        return self._worker.index * self._workers + place

    def send(self, push: Any) -> Any:
        """Put a mark in place of what it has to say."""
        worker, part, place = self._worker.index, push.part, self._place(push.part)
        server = self._inner.layout.owners[part]
        of_part = {}
        for path, array in push.arrays["contribution"].items():
            of_part[path] = np.zeros(np.shape(array), np.float32)
            of_part[path][place] = MARK
        push = push._replace(arrays={"contribution": of_part})
        known = {"part": part, "place": place, "server": server, "steps": push.steps}
        known |= {"began": time.time(), "over": self._over.pop(part, 0)}
        self.say("sent", **known)
        pending = self._inner.send(push)

        def answer() -> Any:
            try:
                reply = pending()
            except runtime.PushRefused as error:
                self.say("refused", **known, message=str(error)[:200])
                self._over[part] = self._over.get(part, 0) + known["over"]
                raise
            epoch = self._inner._clients[worker, server].epoch
            # What an answer in time overwrites is part of the next push's steps.
            age = self._worker._own.ages[part]
            self._over[part] = age if age <= DELAY else 0
            known.update(step=reply.global_step, lost=reply.lost, epoch=epoch, age=age)
            self.say("ack" if reply.used else "late", **known)
            return reply

        return pending._replace(wait=answer)


def drive(folder: pathlib.Path) -> None:
    """The driver: a run that goes on from its saves, and its center in a file."""
    party = Party(*json.loads((folder / "party").read_text()))

    def train(worker: Any) -> None:
        worker.connection = witness = Witness(worker.connection, folder, worker)
        (folder / "begin").touch()
        grads = {name: np.zeros(FLOATS, np.float32) for name in start()}
        while time.time() < float((folder / "until").read_text()):
            witness.steps()
            worker.step(grads)
            time.sleep(STEP_SECONDS)
        witness.say("end")
        worker.flush()

    center, _ = runtime.run(
        train, start(), optax.sgd(1.0), oxs.rules.diloco(optax.sgd(1.0)),
        num_workers=party.workers, num_servers=party.servers, delay=DELAY,
        communication_period=PERIOD,
        fragments=lambda path, leaf: int(str(path[0].key)[2:]),
        meet=runtime.quorum(party.quorum, grace=1.0, patience=PATIENCE),
        checkpoint_dir=folder / "saved", checkpoint_every=EVERY,
        address=f"{HERE}:{PORT}", worker_timeout=WORKER_TIMEOUT,
    )  # fmt: skip
    with (folder / "center.npz").open("wb") as file:
        np.savez(file, **center)


def start() -> dict[str, Any]:
    """Two variables of each part."""
    names = [f"{half}_{part}" for half in "ab" for part in range(PARTS)]
    return {name: np.zeros(FLOATS, np.float32) for name in names}


# The machines, and what befalls them.
class Storm:
    """Two hosts with a Ray node each, a driver, and what has been done to them.

    Use it as a context: at its end nothing of it is left.
    """

    def __init__(self, party: Party, seed: int):
        self.party, self.rng = party, random.Random(seed)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="storm"))
        (self.folder / "party").write_text(json.dumps(party))
        (self.folder / "until").write_text("inf")
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.driver: Any = None
        self.faults: list[dict[str, Any]] = []
        self.deaths: list[float] = []  # when a process was killed
        self.slow = 0  # how many faults make the link slow now
        self.starts: collections.Counter[str] = collections.Counter()
        self.errors: list[str] = []  # of drivers, which were started again
        self.over, self.ended = threading.Event(), ""

    def __enter__(self) -> "Storm":
        self.clean()
        try:
            hosts = dict(zip(HOSTS, (HERE, THERE), strict=True))
            for name, own in hosts.items():
                namespaces.make(name, own)
            one, other = HOSTS
            shell(f"ip -n {one} link add eth type veth peer name eth netns {other}")
            for name, own in hosts.items():
                namespaces.connect(name, own)
            saved = self.folder / "saved"
            saved.mkdir()
            shell(f"mount -t tmpfs -o size={DISK_MB}m storm {saved}")
            threading.Thread(target=self._keep_up, daemon=True).start()
        except BaseException:
            self.clean()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.clean()

    def clean(self) -> None:
        """End its processes, and those of one that was killed."""
        namespaces.remove(f"oxs-storm{NUMBER}")
        shell(f"umount -l {self.folder / 'saved'}", check=False)

    def _keep_up(self) -> None:
        """Start nodes and the driver, again where they end, as a manager does."""
        ray = str(pathlib.Path(sys.executable).with_name("ray"))
        # A namespace of processes too: memory is not shared with another host. And the
        # address of this cluster is for nobody else, who would find it in /tmp/ray.
        own = f"mkdir -p /tmp/ray && mount -t tmpfs ray /tmp/ray && exec {ray} $0 $@"
        far = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", own]
        common = "--object-store-memory=200000000 --disable-usage-stats --block"
        commands = {
            "here": f"{ray} start --head --node-ip-address={HERE} --port={PORT} "
            f"--num-cpus={self.party.here} --include-dashboard=false "
            f"--temp-dir={self.folder}/ray {common}".split(),
            "there": far
            + f"start --address={HERE}:{PORT} --node-ip-address={THERE} "
            f"--num-cpus={self.party.there} {common}".split(),
            "driver": [sys.executable, __file__, "drive", str(self.folder)],
        }
        calls = json.dumps({"CoreWorkerService.grpc_client.PushTask": LOST_CALLS})
        env = dict(os.environ)
        env |= {
            "RAY_testing_rpc_failure": calls,
            "RAY_testing_rpc_failure_avoid_intra_node_failures": "1",
        }
        while not self.over.wait(0.5):
            for name, command in commands.items():
                node = self.nodes.get(name)
                if node is not None and node.poll() is None:
                    continue
                if name == "driver" and node is not None:
                    if not node.returncode:
                        self.ended = "yes"
                    elif node.returncode != -signal.SIGKILL:
                        self.errors.append(self._last_words())
                        if len(self.errors) > 5 or not (self.folder / "begin").exists():
                            self.ended = self.errors[-1]
                    if self.ended:
                        self.over.set()
                        break
                if name != "here" and not self._is_up():
                    continue
                host = HOSTS[name == "there"]
                with (self.folder / f"{name}.log").open("ab") as out:
                    self.nodes[name] = subprocess.Popen(
                        ["ip", "netns", "exec", host, *command],
                        stdout=out, stderr=out, env=env, cwd=self.folder,
                    )  # fmt: skip
                self.starts[name] += 1

    def _last_words(self) -> str:
        lines = (self.folder / "driver.log").read_text("utf-8", "replace").splitlines()
        said = [line for line in lines if "Error" in line and line[:1].isalpha()]
        return [*said, "an error"][len(said) - 1 if said else 0][:200]

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError, RuntimeError):
            return f":{PORT}" in shell(f"ip netns exec {HOSTS[0]} ss -Hltn")
        return False

    def pids(self, title: str) -> list[int]:
        """The processes on both hosts whose title begins so."""
        found = []
        for pid in itertools.chain(*map(namespaces.pids, HOSTS)):
            with contextlib.suppress(OSError):
                command = pathlib.Path(f"/proc/{pid}/cmdline")
                if command.read_text("utf-8", "replace").startswith(title):
                    found.append(pid)
        return found

    def one(self, title: str) -> int:
        """One of them, drawn; 0 if there is none."""
        return self.rng.choice(self.pids(title) or [0])

    def weather(self, seconds: float, every: float, kinds: list[str]) -> None:
        """Faults of these kinds until the time is over, then wait for the end."""
        begin = self.folder / "begin"
        while not begin.exists():
            if self.over.wait(0.1):
                return
        until = time.time() + seconds
        (self.folder / "until").write_text(str(until + 1.0))
        threads, order, due = [], [], time.time() + every / 4
        while kinds and due < until and not self.over.wait(max(due - time.time(), 0)):
            if not order:  # All of them once, in an order that is drawn.
                order = self.rng.sample(kinds, len(kinds))
            lasts = min(self.rng.uniform(5, min(60, 3 * every)), until - time.time())
            threads.append(
                threading.Thread(target=self.befall, args=(order.pop(), lasts))
            )
            threads[-1].start()
            # One of ten comes right after the one before.
            soon = self.rng.random() < 0.1
            due += every * (0.03 if soon else self.rng.uniform(0.5, 1.7))
        for thread in threads:
            thread.join()
        while not self.over.wait(0.5):
            if time.time() > until + PATIENCE_SECONDS:
                self.ended = f"not {PATIENCE_SECONDS} s after the last fault"
                return

    def kill(self, pid: int) -> None:
        """SIGKILL, and note when."""
        if on_ray.tell(pid):
            self.deaths.append(time.time())

    def befall(self, kind: str, lasts: float) -> None:
        """A fault that lasts so long, if it is one that lasts."""
        line = {"kind": kind, "begin": time.time()}
        with FAULTS_OF_A_STORM[kind](self) as stays:
            if stays:
                self.over.wait(lasts)
        line["end"] = time.time()
        self.faults.append(line)
        with (self.folder / "faults.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")


Fault = Callable[[Storm], contextlib.AbstractContextManager[bool]]


def killed(title: str) -> Fault:
    """SIGKILL of a process."""

    @contextlib.contextmanager
    def fault(storm: Storm) -> Iterator[bool]:
        storm.kill(storm.one(title))
        yield False

    return fault


def stopped(title: str) -> Fault:
    """SIGSTOP, and SIGCONT later: what it says then is old."""

    @contextlib.contextmanager
    def fault(storm: Storm) -> Iterator[bool]:
        pid = storm.one(title)
        on_ray.tell(pid, signal.SIGSTOP)
        yield bool(pid)
        on_ray.tell(pid, signal.SIGCONT)

    return fault


@contextlib.contextmanager
def cut(storm: Storm) -> Iterator[bool]:
    """The cable is out for a while."""
    shell(f"ip -n {HOSTS[1]} link set eth down")
    yield True
    shell(f"ip -n {HOSTS[1]} link set eth up")


@contextlib.contextmanager
def slow(storm: Storm) -> Iterator[bool]:
    """The cable takes so long, both ways, that a push takes long beside a timeout."""
    rate = round(storm.rng.uniform(*SLOW_KBIT))
    for host in HOSTS:
        limits = f"tbf rate {rate}kbit burst 8kb latency 2s"
        shell(f"tc -n {host} qdisc replace dev eth root {limits}")
    storm.slow += 1
    yield True
    storm.slow -= 1
    for host in HOSTS if not storm.slow else ():  # Others may last longer.
        shell(f"tc -n {host} qdisc del dev eth root", check=False)


@contextlib.contextmanager
def full(storm: Storm) -> Iterator[bool]:
    """The disk of the saves is full for a while."""
    filler = storm.folder / "saved" / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    yield True
    filler.unlink(missing_ok=True)


def damage(folder: pathlib.Path) -> None:
    """Change 64 bytes in the middle of each file."""
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                found = bytearray(path.read_bytes())
                for at in range(len(found))[len(found) // 2 :][:64]:
                    found[at] ^= 255
                path.write_bytes(found)


@contextlib.contextmanager
def damaged(storm: Storm) -> Iterator[bool]:
    """The newest save of a server is changed, and the server killed that read it."""
    server = storm.rng.randrange(storm.party.servers)
    folder = storm.folder / "saved" / f"server_{server}"
    numbers = sorted(int(x.name) for x in folder.glob("*") if x.name.isdecimal())
    # The last one that can be read is left alone: without any a run has to end.
    for number in numbers[1:][-1:]:
        damage(folder / str(number))
    with contextlib.suppress(OSError, IndexError, ValueError):
        pid = int((folder / "lock").read_text().split()[1])  # "process 12 on ..."
        if pid in storm.pids(ACTORS["servers"]):
            storm.kill(pid)
    yield False


@contextlib.contextmanager
def driver_killed(storm: Storm) -> Iterator[bool]:
    """SIGKILL of the driver: the same call is made again."""
    storm.nodes["driver"].kill()
    storm.deaths.append(time.time())
    yield False


FAULTS_OF_A_STORM: dict[str, Fault] = {
    "a worker killed": killed(ACTORS["workers"]),
    "a server killed": killed(ACTORS["servers"]),
    "a worker stopped": stopped(ACTORS["workers"]),
    "a server stopped": stopped(ACTORS["servers"]),
    "the link cut": cut,
    "the link slow": slow,
    "the disk full": full,
    "a save damaged": damaged,
    "the driver killed": driver_killed,
}


# What is left of it.
class Wasted(NamedTuple):
    """Steps of all workers, in the mean of the parts: made, and what became of them."""

    made: float
    center: float  # in the center
    overwritten: float  # by an answer that was taken `delay` steps later
    late: float  # pushed, and dropped
    died: float  # with a worker, or with its push
    server: float  # pushed, answered, and gone with a server's going back


# What a storm of all kinds is to have seen; else it says less than it seems to.
MARKS = {  # what the log of the driver says of it
    "a meeting of too few": "a server waits no longer",
    "a damaged save set aside": "has a damaged checkpoint",
    "a save that failed": "could not save",
    "a push refused": "a push of worker",
    "a silent worker killed": "no server heard of it",
}
SEEN = (
    "a worker again", "a server again", "the driver again", "two deaths in one meeting",
    "a late contribution after a restart", "an answer later than delay",
    "an answer after the timeout", *MARKS,
)  # fmt: skip


class Found(NamedTuple):
    """What a storm has left."""

    faults: int
    pushes: int  # answered
    commits: float  # of these, the share that is in the center
    late: int  # dropped, and told so
    lost: int  # gone with a server's going back
    beyond: int
    untold: int
    twice: int
    torn: int
    participation: float  # workers in a meeting, the mean
    rate: float  # steps a second that the center has
    ended: str
    wasted: list[float] = []  # noqa: RUF012 # only read: as `Wasted`
    seen: list[int] = []  # noqa: RUF012 # only read: how often, of each of `SEEN`


Log = list[dict[str, Any]]


def seen(storm: Storm, logs: list[Log]) -> list[int]:
    """How often a storm has seen each thing of `SEEN`."""
    found: collections.Counter[str] = collections.Counter()
    answers = [[x for x in log if x["what"] in ("ack", "late")] for log in logs]
    epochs = collections.defaultdict(set)
    held: dict[tuple[int, int, int], float] = {}  # when a meeting was heard of
    for log in answers:
        own = collections.defaultdict(set)  # of this worker, by server
        for line in log:
            known, epoch = own[line["server"]], line["epoch"]
            again = bool(known) and epoch not in known
            known.add(epoch)
            epochs[line["server"]].add(epoch)
            late, meeting = line["what"] == "late", (line["part"], epoch, line["step"])
            held[meeting] = min(held.get(meeting, math.inf), line["time"])
            found["a late contribution after a restart"] += again and late
            found["an answer later than delay"] += line.get("age", 0) > DELAY
            slow = line["time"] - line["began"] > WORKER_TIMEOUT
            found["an answer after the timeout"] += slow
    found["a worker again"] = max(len(logs) - storm.party.workers, 0)
    found["a server again"] = sum(len(of) - 1 for of in epochs.values())
    found["the driver again"] = max(storm.starts["driver"] - 1, 0)
    for part in range(PARTS):
        times = sorted(time for (of, *_), time in held.items() if of == part)
        for begin, end in itertools.pairwise(times):
            within = sum(begin < death < end for death in storm.deaths)
            found["two deaths in one meeting"] += within > 1
    path = storm.folder / "driver.log"
    said = path.read_text("utf-8", "replace") if path.exists() else ""
    found |= {mark: said.count(text) for mark, text in MARKS.items()}
    return [found[mark] for mark in SEEN]


def wasted(folder: pathlib.Path, logs: dict[str, Log], there: Callable) -> list[float]:
    """What became of the steps; `there` says whether the center has a push."""
    sums = dict.fromkeys(Wasted._fields, 0.0)
    for name, log in logs.items():
        path, ended = folder / f"steps_{name}", any(x["what"] == "end" for x in log)
        made = PARTS * path.stat().st_size if path.exists() else 0
        sums["made"] += made
        by_push = {}  # The last line of each says how it was answered, if it was.
        for line in log:
            if line["what"] != "end":
                by_push[line["part"], line["place"]] = line
        for line in by_push.values():
            if (what := line["what"]) == "refused":  # These steps are pushed again.
                continue
            gone = {"ack": "server", "late": "late", "sent": "died"}[what]
            over = line.get("over", 0)
            sums["center" if there(line) else gone] += line["steps"] - over
            sums["overwritten"] += over
            made -= line["steps"]
        # At a program's end all is pushed but what an answer overwrites.
        sums["overwritten" if ended else "died"] += max(made, 0)
    return [round(of / PARTS, 2) for of in sums.values()]


def last_starts(folder: pathlib.Path) -> dict[int, float]:
    """When each server came back last, as the driver's log says it."""
    path = folder / "driver.log"
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    said = r"^(\S+ \S+),\d+ a server is back, .*/server_(\d+)/\d+$"
    return {
        int(server): time.mktime(time.strptime(when, "%Y-%m-%d %H:%M:%S"))
        for when, server in re.findall(said, text, re.MULTILINE)
    }


def judge(storm: Storm, seconds: float) -> Found:
    """Compare what workers have written down with the center."""
    files = storm.folder.glob("worker_*.jsonl")
    of_lives = {
        file.stem.removeprefix("worker_"): [
            json.loads(x) for x in file.read_text().splitlines()
        ]
        for file in files
    }
    logs = [*of_lives.values()]
    lines = [line for log in logs for line in log]
    acks = [line for line in lines if line["what"] == "ack"]
    late = [line for line in lines if line["what"] == "late"]
    last = min((x["time"] for x in lines if x["what"] == "end"), default=math.inf)
    if not (storm.folder / "center.npz").exists():
        blank = ["" for _ in range(9)]
        return Found(len(storm.faults), len(acks), *blank, storm.ended)  # type: ignore # no numbers
    with np.load(storm.folder / "center.npz") as file:
        center = dict(file)
    value = [-center[f"a_{part}"].astype(float) for part in range(PARTS)]
    torn = sum(int((center[f"a_{p}"] != center[f"b_{p}"]).sum()) for p in range(PARTS))
    # Of each start of a server, the first meeting of each part that could be made then.
    first: dict[tuple[int, int], dict[int, int]] = collections.defaultdict(dict)
    for line in acks + late:
        of, next_ = first[line["server"], line["epoch"]], line["step"]
        next_ += line["what"] == "late"
        of[line["part"]] = min(of.get(line["part"], next_), next_)

    starts = last_starts(storm.folder)
    answers = {(x["part"], x["place"]) for x in acks}
    unanswered = [
        any((part, place) not in answers for place in np.flatnonzero(places))
        for part, places in enumerate(value)
    ]

    def explained(ack: dict[str, Any]) -> bool:
        """Whether its server went back behind it, and no farther than it may."""
        server, part = ack["server"], ack["part"]
        meeting = ack["step"], ack["epoch"], part
        held = [
            MARK / value[part][x["place"]]
            for x in acks
            if (x["step"], x["epoch"], x["part"]) == meeting and value[part][x["place"]]
        ]
        # It was saved while it waited, and held again by those that had come by then;
        # they may have died before they were answered.
        again = all(round(k) == len(held) for k in held)
        again = again and bool(held or unanswered[part])
        later = sorted(e for s, e in first if s == server and e > ack["epoch"])
        redone = [
            e
            for e in later
            if first[server, e].get(part, math.inf) <= ack["step"] + again
        ]
        # One that came back when the run was about to end has answered nobody.
        heard = max(e for s, e in first if s == server)
        silent = starts.get(server, 0.0)
        if not redone and silent > max(heard / 1e9 + 5, ack["time"]):
            redone = [int(silent * 1e9)]
        if not redone:
            return False
        began = redone[0] / 1e9
        allowed = EVERY + 4 * storm.party.workers
        for fault in storm.faults:
            if fault["kind"] == "a save damaged" and ack["began"] < fault["end"]:
                allowed += EVERY * (fault["begin"] < began + 5)
            near = fault["begin"] < began and fault["end"] > ack["time"] - 60
            if fault["kind"] == "the disk full" and near:
                return True
        between = sum(
            other["server"] == server and ack["time"] < other["time"] < began
            for other in acks
        )
        return between <= allowed

    missing_ = [ack for ack in acks if not value[ack["part"]][ack["place"]]]
    beyond = sum(not explained(ack) for ack in missing_)
    untold = 0
    for log in logs:
        for server in range(storm.party.servers):
            own = [x for x in log if x.get("server") == server and "epoch" in x]
            newest = max((x["epoch"] for x in own), default=0)
            gone = sum(x in missing_ and x["epoch"] < newest for x in own)
            told = sum(x["lost"] for x in own)
            untold += max(gone - told, 0)
    twice = sum(value[x["part"]][x["place"]] != 0 for x in late)
    early = {(x["part"], x["place"]): x["step"] for x in acks if x["time"] < last}
    counts = []
    for part, places in enumerate(value):
        for place in np.flatnonzero(places):
            counts.append((part, early.get((part, place)), MARK / places[place]))
    met = collections.Counter((part, step, round(k)) for part, step, k in counts)
    for part, step, k in counts:
        few = step is not None and round(k) < storm.party.quorum
        # Of a meeting that is saved while it waits some may be there when it is held
        # again: then they are as many as share it.
        twice += abs(k - round(k)) > 1e-3 or (few and met[part, step, round(k)] < k)
    became = wasted(
        storm.folder, of_lives, lambda x: bool(value[x["part"]][x["place"]])
    )
    answered = len(acks) + len(late)
    return Found(
        len(storm.faults), answered, (len(acks) - len(missing_)) / max(answered, 1),
        len(late), len(missing_), beyond, untold, int(twice), torn,
        float(len(counts) / max(sum(1 / k for *_, k in counts), 1e-9)),
        Wasted(*became).center / seconds, storm.ended, became, seen(storm, logs),
    )  # fmt: skip


def weathered(party: Party, seconds: float, every: float, kinds: list[str]) -> Found:
    """A run in such weather: what is left of it."""
    while True:
        with Storm(party, seed=len(kinds)) as storm:
            storm.weather(seconds, every, kinds)
            found = judge(storm, seconds)
        print(f"{found}\n{storm.starts}, {storm.errors}, {storm.folder}", flush=True)
        # Ray gives a node 30 s to start, which on a busy machine may not be enough.
        if (storm.folder / "begin").exists():
            return found


class Weather(NamedTuple):
    """A row of the table."""

    name: str
    party: Party
    seconds: float
    every: float  # seconds between faults
    kinds: list[str]


def row(weather: Weather, found: Found, calm: float) -> list[Any]:
    """What the table shows of it, beside the steps a second of a calm run."""
    hourly = round(3600 * found.faults / weather.seconds)
    if found.ended != "yes":  # There may be no center to compare with.
        blank = ["" for _ in range(9)]
        began = [weather.name, weather.seconds, found.faults, hourly, found.pushes]
        return [*began, *blank, found.ended]
    marks = [found.late, found.lost, found.beyond, found.untold, found.twice]
    part = f"{found.participation:.2f} of {weather.party.workers}"
    return [
        weather.name, weather.seconds, found.faults, hourly, found.pushes,
        f"{found.commits:.1%}", *marks, found.torn, part,
        f"{found.rate / calm:.1%}", found.ended,
    ]  # fmt: skip


def became(weather: Weather, found: Found) -> list[Any]:
    """What the table shows of steps: how many were made, and the shares."""
    made, *rest = found.wasted
    return [weather.name, round(made), *(f"{of / max(made, 1):.1%}" for of in rest)]


def main() -> None:
    """Each kind of fault alone, then all of them."""
    parser = report.arguments(__doc__)
    names = "weather whose name contains one of these"
    parser.add_argument("--only", nargs="*", default=[""], help=names)
    parser.add_argument("--minutes", type=float, default=30.0, help="of the storm")
    parser.add_argument("--resume", action="store_true", help="go on with a table")
    options = parser.parse_args()
    if lacks := missing():
        sys.exit(f"This needs {lacks}.")
    every, alone, long = [*FAULTS_OF_A_STORM], 60.0, 60 * options.minutes
    killed_or_stopped = [kind for kind in every if "worker" in kind]
    weathers = [
        Weather("none", FOUR, 120.0, math.inf, []),
        Weather("all kinds", FOUR, long, 30.0, every),
        Weather("none, two workers", TWO, 120.0, math.inf, []),
        *(
            Weather(
                f"workers and the link, two workers, {hourly} an hour",
                TWO, long / 3, 3600 / hourly, [*killed_or_stopped, "the link cut"],
            )
            for hourly in (69, 85)
        ),
        *(Weather(f"{kind}, alone", FOUR, alone, 20.0, [kind]) for kind in every),
    ]  # fmt: skip
    if options.quick:
        weathers = [weathers[0]._replace(seconds=20.0), weathers[5]]
    weathers = [one for one in weathers if any(x in one.name for x in options.only)]
    page = report.Report(
        "storms", options, floats=FLOATS, period=PERIOD, delay=DELAY, every=EVERY,
        disk=DISK_MB, step=STEP_SECONDS, timeout=WORKER_TIMEOUT, patience=PATIENCE,
        least=SLOW_KBIT[0], most=SLOW_KBIT[1],
    )  # fmt: skip
    known = report.Known(page.folder / "storms.rows", options.resume)
    rows, judged, calm = [], [], {FOUR: math.nan, TWO: math.nan}
    with contextlib.suppress(KeyboardInterrupt):  # Then with what there is.
        for one in weathers:
            (found,) = known.get(
                [*one], lambda one=one: [weathered(one.party, *one[2:])]
            )
            found = Found(*found)
            if not one.kinds:
                calm[one.party] = found.rate
            rows.append(row(one, found, calm[one.party]))
            judged.append((one, found))
            print(rows[-1], flush=True)
    page.table("storms", rows)
    ended = [(one, found) for one, found in judged if found.wasted]
    page.table("wasted", [became(one, found) for one, found in ended])
    page.table("seen", [
        [mark, *(found.seen[at] for _, found in ended)] for at, mark in enumerate(SEEN)
    ], weathers=" | ".join(one.name for one, _ in ended))  # fmt: skip
    for one, found in ended:
        if set(one.kinds) == set(every):
            never = [
                mark for mark, often in zip(SEEN, found.seen, strict=True) if not often
            ]
            page.text("never", name=one.name, marks=", ".join(never) or "nothing")
    page.save()
    if len(rows) == len(weathers):
        known.path.unlink()


if __name__ == "__main__":
    if sys.argv[1:2] == ["drive"]:
        drive(pathlib.Path(sys.argv[2]))
    else:
        main()

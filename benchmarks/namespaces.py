"""Network namespaces of Linux: hosts of their own on one machine, made as root."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ETC = Path("/etc/netns")


def missing() -> str:
    """What keeps this machine from making them; an empty text if nothing does."""
    if not sys.platform.startswith("linux"):
        return "network namespaces, which only Linux has"
    tools = [name for name in ("ip", "tc") if shutil.which(name) is None]
    wants = [*tools, *(["root's rights"] if os.geteuid() else [])]
    return " and ".join(wants)


def shell(command: str, check: bool = True) -> str:
    """Run a command without a shell; what it wrote."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")
    return done.stdout


def make(name: str, address: str) -> None:
    """A host that has no link yet, and whose own name is this address.

    Gloo and Ray bind to what the machine's own name resolves to; `ip netns exec` lays
    these files over those of /etc.
    """
    folder = ETC / name
    folder.mkdir(parents=True)
    hosts = f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n"
    (folder / "hosts").write_text(hosts)
    (folder / "resolv.conf").write_text("")
    shell(f"ip netns add {name}")


def connect(name: str, address: str) -> None:
    """Give a host's link, `eth`, its address, and switch it on."""
    shell(f"ip -n {name} addr add {address}/24 dev eth")
    shell(f"ip -n {name} link set lo up")
    shell(f"ip -n {name} link set eth up")


def pids(name: str) -> list[int]:
    """The processes on a host."""
    return [int(pid) for pid in shell(f"ip netns pids {name}", check=False).split()]


def remove(prefix: str) -> None:
    """End all hosts whose names begin so, and what runs there, after a kill too."""
    there = shell("ip netns list", check=False).split()
    for name in (name for name in there if name.startswith(prefix)):
        for pid in pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shell(f"ip netns del {name}", check=False)
    for folder in ETC.glob(f"{prefix}*"):
        shutil.rmtree(folder)

"""What coding and decoding cost, beside a copy of the same bytes.

    python benchmarks/bench_exchange.py            # a minute on two cores
    python benchmarks/bench_exchange.py --quick    # small arrays, short

One worker's contribution as a message, and back: what a link must save to be worth it.
What the compiled programs write is counted too, in loops over all of the numbers.
"""

from typing import Any

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
from pictures import Line, Panel
from report import in_turns, on_cpu, reproduce

import optx_sync as oxs
from optx_sync.audit import hlo

on_cpu()

FULL = {"sizes": (1 << 20, 1 << 22, 1 << 24), "turns": 30}
SHORT = {"sizes": (1 << 14, 1 << 16), "turns": 3}
WAYS = "coding", "decoding"
CODES = {
    "16 bit": oxs.exchange.quantized(bits=16),
    "8 bit": oxs.exchange.quantized(bits=8),
    "4 bit": oxs.exchange.quantized(bits=4),
    "4 bit, feedback": oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4)),
    "2 bit": oxs.exchange.quantized(bits=2),
    "2 bit, rotated": oxs.exchange.rotated(oxs.exchange.quantized(bits=2)),
    "1 bit": oxs.exchange.quantized(bits=1),
    "top 32 of 4096": oxs.exchange.top_k(),
    "bfloat16": oxs.exchange.all_reduce(jnp.bfloat16),
}


def loops(function: Any, args: Any, numbers: int) -> int:
    """The loops of a compiled program that write about as many numbers, or codes."""
    found, least = 0, numbers // 8  # a byte has 8 codes of a bit
    for instruction in by_hand.written(hlo.program(function, *args)):
        if instruction.opcode in ("fusion", "copy", "concatenate"):
            sizes = [int(np.prod(array.shape)) for array in instruction.arrays]
            found += max(sizes, default=0) >= least
    return found


def one_size(page: Any, numbers: int, turns: int) -> dict[str, list[float]]:
    """Passes over the data of each code: [coding, decoding]."""
    x = jax.random.normal(jax.random.key(0), (numbers,))
    scale = jax.jit(lambda x: x * 1.000001)
    calls, counts, sizes = {"copy": lambda: scale(x)}, {}, {}
    for name, exchange in CODES.items():
        code: Any = exchange.code
        state = exchange.init(x)
        encode = jax.jit(lambda x, state, code=code: code.encode(x, state)[::2])
        decode = jax.jit(lambda message, code=code: code.decode(message, x))
        message = encode(x, state)[0]
        calls[f"{name}, coding"] = lambda e=encode, s=state: e(x, s)
        calls[f"{name}, decoding"] = lambda d=decode, m=message: d(m)
        ways = (encode, (x, state)), (decode, (message,))
        counts[name] = [loops(*way, numbers) for way in ways]
        sizes[name] = message.nbytes / x.nbytes
    times = in_turns(calls, turns)
    # The least of all turns: what else the machine does only adds to them.
    least = {name: min(of) / min(times["copy"]) for name, of in times.items()}
    passes = {n: [least[f"{n}, {way}"] for way in WAYS] for n in CODES}
    rows = [[n, sizes[n], *passes[n], sum(passes[n]), *counts[n]] for n in CODES]
    page.table("passes", rows, numbers=numbers)
    page.data(**{f"{numbers} numbers": times})
    return passes


def panel(passes: Any, sizes: Any) -> Panel:
    """What coding and decoding take, a row a code."""
    rows = range(len(passes))
    lines = [
        Line(f"{size:,} numbers", [of[n] for of in passes.values()], rows, "o")
        for n, size in enumerate(sizes)
    ]
    what = "passes over the data, coding and decoding"
    return Panel(what, "", lines, log="x", names=list(passes))


def study(page: Any, settings: Any) -> None:
    """Measure all sizes."""
    sizes = settings["sizes"]
    found = {n: one_size(page, n, settings["turns"]) for n in sizes}
    passes = {name: [sum(found[n][name]) for n in sizes] for name in CODES}
    page.picture([panel(passes, sizes)])


if __name__ == "__main__":
    reproduce("bench_exchange", __doc__, study, FULL, SHORT)

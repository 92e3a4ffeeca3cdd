"""What coding and decoding cost, beside a copy of the same bytes.

    python benchmarks/bench_exchange.py            # a minute on two cores
    python benchmarks/bench_exchange.py --quick    # small arrays, short

One worker's contribution as a message, and back: what a link must save to be worth it.
What the compiled programs write is counted too, in loops over all of the numbers.
"""

import os
from typing import Any

# Threads to spare for the devices, or a collective may wait for ever: see Makefile.
os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
import report
from report import Line, Panel, Report, in_turns

import optx_sync as oxs
from optx_sync import hlo

jax.config.update("jax_platforms", "cpu")

options = report.arguments(__doc__).parse_args()
SIZES = (1 << 14, 1 << 16) if options.quick else (1 << 20, 1 << 22, 1 << 24)
TURNS, LIMIT = (3, 6) if options.quick else (30, 6)
CODES = {
    "8 bit": oxs.exchange.quantized(bits=8),
    "4 bit": oxs.exchange.quantized(bits=4),
    "4 bit, feedback": oxs.exchange.error_feedback(oxs.exchange.quantized(bits=4)),
    "top 32 of 4096": oxs.exchange.top_k(),
    "bfloat16": oxs.exchange.all_reduce(jnp.bfloat16),
}


def loops(function: Any, args: Any, numbers: int) -> int:
    """The loops of a compiled program that write about as many numbers, or codes."""
    found = 0
    for instruction in hlo.written(hlo.program(function, *args)):
        if instruction.opcode in ("fusion", "copy", "concatenate"):
            sizes = [int(np.prod(array.shape)) for array in instruction.arrays]
            found += max(sizes, default=0) >= numbers // 2
    return found


def one_size(page: Report, numbers: int) -> dict[str, tuple[float, ...]]:
    """Passes over the data of each code: (coding, decoding)."""
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
        counts[name] = (
            loops(encode, (x, state), numbers),
            loops(decode, (message,), numbers),
        )
        sizes[name] = message.nbytes / x.nbytes
    times = in_turns(calls, TURNS)
    # The least of all turns: what else the machine does only adds to them.
    least = {name: min(of) for name, of in times.items()}
    passes = {
        name: tuple(
            least[f"{name}, {way}"] / least["copy"] for way in ("coding", "decoding")
        )
        for name in CODES
    }
    rows = [
        [name, sizes[name], *passes[name], sum(passes[name]), *counts[name]]
        for name in CODES
    ]
    page.table("passes", rows, numbers=numbers)
    page.data(**{f"{numbers} numbers": times})
    for name in CODES:
        total = sum(passes[name])
        page.criterion(
            "passes", total <= LIMIT, f"{total:.1f}", name=name, numbers=numbers
        )
        if numbers == SIZES[-1]:
            said = "{} to code, {} to decode".format(*counts[name])
            page.criterion("loops", counts[name] == (1, 1), said, name=name)
    return passes


def main() -> None:
    """Run everything and write it down."""
    page = Report("bench_exchange", options, limit=LIMIT)
    found = {numbers: one_size(page, numbers) for numbers in SIZES}
    lines = [
        Line(name, [sum(found[n][name]) for n in SIZES], SIZES, "o-") for name in CODES
    ]
    page.picture([Panel("passes over the data", "numbers", lines)])
    page.save()


if __name__ == "__main__":
    main()

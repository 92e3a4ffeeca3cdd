"""How far means in 16 bits are from the exact ones, and what a worker sends.

    python benchmarks/bench_rounding.py            # two minutes on two cores
    python benchmarks/bench_rounding.py --quick    # few workers and numbers, short

Real meetings of forced devices, and NumPy's model of a ring that adds in bfloat16.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from pictures import Line, Panel
from report import on_cpu, reproduce

import optx_sync as oxs

AXIS = "workers"
FULL = {"workers": (2, 4, 8, 16, 32, 64), "numbers": 1 << 16, "size": (8, 1 << 20)}
SHORT = {"workers": (2, 4), "numbers": 1 << 10, "size": (4, 1 << 12)}
on_cpu(devices=max(FULL["workers"]))

ALL_REDUCE = oxs.exchange.all_reduce
EXCHANGES = {
    "`all_reduce(jnp.float32)`": ALL_REDUCE(jnp.float32),
    "`all_reduce(jnp.bfloat16)`": ALL_REDUCE(jnp.bfloat16),
    "`quantized(16)`": oxs.exchange.quantized(16),
}
ROUNDS: dict[str, Any] = {"communication_period": 4}
# By name: a wrapper, the parameters' dtype, and options.
WAYS: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "`cross_shard`, a step": (oxs.cross_shard, jnp.float32, {}),
    "in pieces": (oxs.cross_shard, jnp.float32, {"shard_state": True}),
    "in pieces, bfloat16 parameters": (
        oxs.cross_shard,
        jnp.bfloat16,
        {"shard_state": True},
    ),
    "`diloco`, a round": (oxs.diloco, jnp.float32, ROUNDS),
    "in pieces, a round": (oxs.diloco, jnp.float32, {**ROUNDS, "shard_state": True}),
    "in parts, late, four rounds": (
        oxs.diloco,
        jnp.float32,
        {**ROUNDS, "fragments": 4, "overlap": True},
    ),
}


def half(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, in float32."""
    return x.astype(np.float32).astype(jnp.bfloat16).astype(np.float32)


def ring(x: np.ndarray) -> np.ndarray:
    """The mean as a ring makes it that adds in bfloat16: a rounding at each hop.

    Piece j starts at worker j, and each next worker adds its own to what comes.
    """
    workers = len(x)
    own, whole = half(x / np.float32(workers)), []
    for first, piece in enumerate(np.array_split(own, workers, axis=1)):
        total = piece[first]
        for hop in range(1, workers):
            total = half(total + piece[(first + hop) % workers])
        whole.append(total)
    return np.concatenate(whole)


def met(exchange: Any, x: np.ndarray) -> np.ndarray:
    """The mean by real meetings of as many devices as `x` has rows."""
    mesh = jax.make_mesh((len(x),), (AXIS,), (jax.sharding.AxisType.Auto,))

    def mean(x):
        return exchange.meet(x[0], exchange.init(x[0]), AXIS).mean

    run = jax.shard_map(mean, mesh=mesh, in_specs=P(AXIS), out_specs=P())
    return np.asarray(jax.jit(run)(x))


def errors(x: np.ndarray) -> dict[str, np.ndarray]:
    """(RMS, largest) error of each mean, over the RMS of the exact one."""
    exact = x.astype(np.float64).mean(0)
    found = {name: met(exchange, x) for name, exchange in EXCHANGES.items()}
    found["a ring that adds in bfloat16 (NumPy)"] = ring(x)
    found["the exact mean, rounded to bfloat16"] = half(exact)
    size = np.sqrt(np.mean(exact**2))
    of = {name: mean.astype(np.float64) - exact for name, mean in found.items()}
    return {
        name: np.array([np.sqrt(np.mean(e**2)), np.abs(e).max()]) / size
        for name, e in of.items()
    }


def sent(way: str, exchange: Any, workers: int, leaf: int) -> float:
    """Bytes that a worker sends, of each number of its parameters, where all meet once.

    Those of the program that JAX gives to XLA: for processors XLA widens sums of
    bfloat16.
    """
    make, dtype, more = WAYS[way]
    tx = make(optax.sgd(0.1), AXIS, exchange=exchange, **more)
    params = {"a": jnp.ones(leaf, dtype), "b": jnp.ones(leaf - 5, dtype)}
    mesh = jax.sharding.AbstractMesh((workers,), (AXIS,))
    all_workers = oxs.Workers(workers, AXIS, mesh=mesh)
    carry = all_workers.expect((params, jax.eval_shape(tx.init, params)))
    step = all_workers.step(
        lambda params, state: oxs.apply_gradients(tx, params, state, params), state=2
    )
    rows = oxs.audit.collectives(step, *carry)
    return sum(row.sent for row in rows) / (2 * leaf - 5)


def study(page: Any, settings: Any) -> None:
    """Errors by the number of workers, and bytes."""
    workers, numbers, size = (settings[of] for of in ("workers", "numbers", "size"))
    rng = np.random.default_rng(0)
    common = rng.normal(size=numbers)
    rows: dict[str, list[np.ndarray]] = {}
    for number in workers:
        own = (common + rng.normal(size=(number, numbers))).astype(np.float32)
        for name, error in errors(own).items():
            rows.setdefault(name, []).append(error)
    for place, key in enumerate(("typical", "largest")):
        table = [[name, *(e[place] for e in of)] for name, of in rows.items()]
        page.table(key, table, workers=" | ".join(map(str, workers)))
    page.table(
        "sent",
        [[way, *(sent(way, of, *size) for of in EXCHANGES.values())] for way in WAYS],
        workers=size[0],
    )
    lines = [
        Line(name.replace("`", ""), workers, [e[0] for e in of])
        for name, of in rows.items()
    ]
    page.picture([Panel("workers", "RMS error / RMS of the mean", lines, log="xy")])


if __name__ == "__main__":
    reproduce("bench_rounding", __doc__, study, FULL, SHORT)

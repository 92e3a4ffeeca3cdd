"""THE table of what synchronises: laws run over all of it (`tests/test_laws.py`).

A new wrapper, exchange or graph is a line here. `test_laws.py` holds that nothing
public is missing. `tests/cases.py` is the table of the optimizers.
"""

from collections.abc import Callable
from typing import Any

import optax

import optx_sync as oxs

AXIS, N = "workers", 8
ex = oxs.exchange
SGD = optax.sgd(0.7, momentum=0.5)
SCHEDULED = optax.sgd(optax.linear_schedule(0.1, 0.0, 100), momentum=0.5)

EXCHANGES: dict[str, list[oxs.exchange.Exchange]] = {
    "all_reduce": [ex.all_reduce(), ex.all_reduce("bfloat16")],
    "quantized": [ex.quantized(), ex.quantized(4), ex.quantized(16)],
    "rotated": [ex.error_feedback(ex.rotated(ex.quantized(1, 32), block=32))],
    "top_k": [ex.top_k(), ex.error_feedback(ex.top_k(64, bits=2))],
    "power_sgd": [ex.error_feedback(ex.power_sgd(2))],
    "error_feedback": [ex.error_feedback(ex.quantized(4), 0.9)],
    "median": [ex.median()],
    "trimmed_mean": [ex.trimmed_mean(1)],
    "sign_majority": [ex.sign_majority()],
    "geometric_median": [ex.geometric_median()],
    "krum": [ex.krum(1)],
    "clipped": [ex.clipped("median"), ex.clipped(1.0, ex.quantized())],
    "radial": [
        ex.radial(),
        ex.radial(ex.error_feedback(ex.quantized(4)), lambda path: "matrix" in path),
    ],
    "penalized": [
        ex.penalized(),
        ex.penalized(ex.error_feedback(ex.quantized()), groups=lambda path: path),
    ],
}
GRAPHS: dict[str, Any] = {
    "ring": oxs.graphs.ring(),
    "exponential": oxs.graphs.exponential(),
    "random_pairs": oxs.graphs.random_pairs(),
    "grid": oxs.graphs.grid(2),
    "metropolis": oxs.graphs.metropolis([(i, i + 1) for i in range(N - 1)]),
}
HALF_WAY = oxs.CenterRule(
    lambda own, center, at: 0.5 * (own.params - own.taken), reads=("params", "taken")
)
# name: of an inner transformation, an axis and options.
CENTERS: dict[str, Callable[..., Any]] = {
    "center_variable": lambda tx, axis, **more: oxs.center_variable(
        tx, HALF_WAY, axis, **more
    ),
    "local_sgd": oxs.local_sgd,
    "diloco": oxs.diloco,
    "agn": lambda tx, axis, **more: oxs.agn(tx, axis, outer=SCHEDULED, **more),
    "elastic_average": lambda tx, axis, **more: oxs.elastic_average(
        tx, axis, moving_rate=0.1, rho=0.5, **more
    ),
}
GUARDED: dict[str, Any] = {"drop_nonfinite": True, "measure": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "guarded": {"inner_state": "average", **GUARDED},
    "qsr": {"communication_period": oxs.outer.qsr(0.1, 0.2)},
    "parts": {"communication_period": 8, "fragments": 2},
    "rows": {"communication_period": 8, "fragments": oxs.rules.strided(4)},
    "later": {"communication_period": 8, "overlap": True},
    "in_line": {"communication_period": 2, "fragments": 2, "overlap": True},
    "streaming": {
        "communication_period": 8,
        "fragments": 4,
        "overlap": True,
        "exchange": ex.error_feedback(ex.quantized(4)),
    },
    "pieces": {"shard_state": True},
}


def made(inner: Any = None, axis: str = AXIS) -> dict[str, Any]:
    """Every wrapper, option and exchange around an inner transformation."""
    inner = optax.sgd(0.1, momentum=0.9) if inner is None else inner
    found: dict[str, Any] = {name: make(inner, axis) for name, make in CENTERS.items()}
    for name in ("agn", "local_sgd"):
        found[f"{name}, guarded"] = CENTERS[name](inner, axis, **OPTIONS["guarded"])
    for kind, options in OPTIONS.items():
        found[f"diloco, {kind}"] = oxs.diloco(inner, axis, **options)
    for kind, exchanges in EXCHANGES.items():
        for number, one in enumerate(exchanges):
            which = f"{kind} {number}"
            found[f"cross_shard, {which}"] = oxs.cross_shard(inner, axis, exchange=one)
            found[f"diloco, {which}"] = oxs.diloco(inner, axis, exchange=one)
    for kind, graph in GRAPHS.items():
        found[f"gossip, {kind}"] = oxs.gossip(inner, axis, graph=graph, outer=SGD)
    coded = EXCHANGES["error_feedback"][0]
    outer = oxs.outer.delayed_nesterov(0.7, 0.9, 4)
    halves = [list(range(N // 2)), list(range(N // 2, N))]
    return found | {
        "elastic_average, parts": CENTERS["elastic_average"](
            inner, axis, **OPTIONS["parts"]
        ),
        "cross_shard": oxs.cross_shard(inner, axis),
        "cross_shard, sum": oxs.cross_shard(inner, axis, reduction="sum"),
        "cross_shard, groups": oxs.cross_shard(inner, axis, group_assignment=halves),
        "cross_shard, measure": oxs.cross_shard(inner, axis, measure=True),
        "cross_shard, pieces": oxs.cross_shard(inner, axis, shard_state=True),
        "all_reduce_grads": optax.chain(oxs.all_reduce_grads(axis), inner),
        "sync_replicas": oxs.sync_replicas(inner, axis, 3),
        "sync_replicas, coded": oxs.sync_replicas(inner, axis, 3, exchange=coded),
        "sync_replicas, guarded": oxs.sync_replicas(
            inner, axis, 3, total_num_replicas=N, variable_averages=0.9, **GUARDED
        ),
        "gossip": oxs.gossip(inner, axis, drop_nonfinite=True),
        "noloco": oxs.noloco(inner, axis),
        "noloco, scheduled": oxs.noloco(inner, axis, outer=SCHEDULED),
        "diloco, delayed": oxs.diloco(inner, axis, outer=outer, shard_state=True),
        "nested": oxs.diloco(oxs.local_sgd(inner, None), axis),
    }

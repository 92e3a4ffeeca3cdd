# SPDX-License-Identifier: Apache-2.0
"""Synchronising optimizers for JAX, as Optax gradient transformations.

The spelling in all documentation is `import optx_sync as oxs`.
"""
# ruff: noqa: I001 # grouped by room, in the order in which a gradient walks through

import importlib
from typing import TYPE_CHECKING, Any

# A gradient's form: dense, or the rows of a table.
from optx_sync.core.slices import IndexedSlices as IndexedSlices
from optx_sync.rows.lookup import take as take
from optx_sync.rows.on_values import on_values as on_values

# Each replica's own gradients; means and sums over replicas.
from optx_sync.comm.varying import localize as localize
from optx_sync.comm.reduce import reduce as reduce
from optx_sync.rows.gradients import value_and_grad as value_and_grad
from optx_sync import exchange as exchange

# Replicas with equal parameters: their gradients are reduced.
from optx_sync.replicas.clipping import clip_by_global_norm as clip_by_global_norm
from optx_sync.replicas.cross_shard import all_reduce_grads as all_reduce_grads
from optx_sync.replicas.cross_shard import cross_shard as cross_shard
from optx_sync.replicas.stacked import stacked as stacked
from optx_sync.replicas.line_search import value_fn as value_fn
from optx_sync.replicas.sync_replicas import sync_replicas as sync_replicas

# Workers with parameters of their own: they meet at a center.
from optx_sync.center.contract import CenterRule as CenterRule
from optx_sync.center.lockstep import center_variable as center_variable
from optx_sync.center.rules.elastic_average import elastic_average as elastic_average
from optx_sync.center.rules.agn import agn as agn
from optx_sync.center.rules.local_sgd import local_sgd as local_sgd
from optx_sync.center.rules.diloco import diloco as diloco

# A step, for one worker and for all.
from optx_sync.state.apply import apply_gradients as apply_gradients

# Read a state, and place it.
from optx_sync.state.metrics import averaged_params as averaged_params
from optx_sync.state.metrics import center_params as center_params
from optx_sync.state.metrics import metrics as metrics
from optx_sync.workers.fingerprints import fingerprint as fingerprint

# And `help` shows their arguments so that one can read them.
from optx_sync.core.signatures import readable as _readable

if TYPE_CHECKING:
    from optx_sync import audit as audit
    from optx_sync import by_hand as by_hand
    from optx_sync import elastic as elastic
    from optx_sync import flax as flax
    from optx_sync import optimizers as optimizers
    from optx_sync import outer as outer
    from optx_sync import rules as rules
    from optx_sync import runtime as runtime
    from optx_sync import simulate as simulate
    from optx_sync import testing as testing
    from optx_sync.audit.citation import citation as citation
    from optx_sync.workers.workers import Workers as Workers
    from optx_sync.peers import graphs as graphs
    from optx_sync.peers.gossip import gossip as gossip
    from optx_sync.peers.gossip import noloco as noloco

    __version__: str

# Imported when they are asked for: what a program may not need. `elastic`, `flax` and
# `runtime` need a library that may not be installed.
_ELSEWHERE = {
    "Workers": "optx_sync.workers.workers",
    "citation": "optx_sync.audit.citation",
    "gossip": "optx_sync.peers.gossip",
    "graphs": "optx_sync.peers",
    "noloco": "optx_sync.peers.gossip",
}

__all__ = [
    "CenterRule",
    "IndexedSlices",
    "Workers",
    "agn",
    "all_reduce_grads",
    "apply_gradients",
    "audit",
    "averaged_params",
    "by_hand",
    "center_params",
    "center_variable",
    "citation",
    "clip_by_global_norm",
    "cross_shard",
    "diloco",
    "elastic",
    "elastic_average",
    "exchange",
    "fingerprint",
    "gossip",
    "graphs",
    "local_sgd",
    "localize",
    "metrics",
    "noloco",
    "on_values",
    "optimizers",
    "outer",
    "reduce",
    "rules",
    "simulate",
    "stacked",
    "sync_replicas",
    "take",
    "testing",
    "value_and_grad",
    "value_fn",
]


if not TYPE_CHECKING:  # a type checker then sees a name that is misspelt

    def __getattr__(name: str) -> Any:
        if name in _ELSEWHERE:
            return getattr(importlib.import_module(_ELSEWHERE[name]), name)
        if name in __dir__():
            return importlib.import_module(f"optx_sync.{name}")
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("optx-sync")
        raise AttributeError(
            f"module 'optx_sync' has no attribute {name!r}.{_place_of(name)}"
        )


# Where else a name may be looked for.
_ROOMS = ("exchange", "by_hand", "rules", "outer", "optimizers", "simulate", "audit")


def _place_of(name: str) -> str:
    """Where a name is that is asked for in the wrong place, as a sentence."""
    # A library asks what this is; `from optx_sync import forms` imports it then.
    module = importlib.import_module("importlib.util").find_spec(f"optx_sync.{name}")
    if name.startswith("_") or module is not None:
        return ""
    alike = {one.lower().replace("_", ""): one for one in __all__}
    if found := alike.get(name.lower().replace("_", "")):
        return f" Did you mean oxs.{found}?"
    for room in _ROOMS:
        if hasattr(importlib.import_module(f"optx_sync.{room}"), name):
            return f" It is oxs.{room}.{name}."
    return ""


def __dir__() -> list[str]:
    return sorted([*__all__, "flax", "runtime"])


_readable(globals())

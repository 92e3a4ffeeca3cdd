# SPDX-License-Identifier: Apache-2.0
"""Synchronising optimizers for JAX, as Optax gradient transformations.

The spelling in all documentation is `import optx_sync as oxs`.
"""
# ruff: noqa: I001 # grouped by room, in the order in which a gradient walks through

import importlib
from typing import TYPE_CHECKING, Any

# A gradient's form: dense, or the rows of a table.
from optx_sync.rows.slices import IndexedSlices as IndexedSlices
from optx_sync.rows.lookup import take as take
from optx_sync.rows.on_values import on_values as on_values

# Each replica's own gradients; means and sums over replicas.
from optx_sync.comm.varying import localize as localize
from optx_sync.comm.reduce import reduce as reduce
from optx_sync.gradients import value_and_grad as value_and_grad
from optx_sync import exchange as exchange

# Replicas with equal parameters: their gradients are reduced.
from optx_sync.replicas.cross_shard import all_reduce_grads as all_reduce_grads
from optx_sync.replicas.cross_shard import cross_shard as cross_shard
from optx_sync.replicas.stacked import stacked as stacked
from optx_sync.replicas.sync_replicas import sync_replicas as sync_replicas

# Workers with parameters of their own: they meet at a center.
from optx_sync.center.contract import CenterRule as CenterRule
from optx_sync.center.lockstep import center_variable as center_variable
from optx_sync.center.fragments import strided as strided
from optx_sync.center.rules.elastic_average import elastic_average as elastic_average
from optx_sync.center.rules.elastic_average import elastic_rule as elastic_rule
from optx_sync.center.rules.agn import agn as agn
from optx_sync.center.rules.agn import agn_rule as agn_rule
from optx_sync.center.rules.local_sgd import local_sgd as local_sgd
from optx_sync.center.rules.local_sgd import local_sgd_rule as local_sgd_rule
from optx_sync.center.rules.diloco import diloco as diloco
from optx_sync.center.rules.diloco import diloco_rule as diloco_rule

# A step, for one worker and for all.
from optx_sync.step import apply_gradients as apply_gradients
from optx_sync.step import due as due
from optx_sync.placement.workers import map_workers as map_workers

# Read a state, and place it.
from optx_sync.metrics import averaged_params as averaged_params
from optx_sync.metrics import center_params as center_params
from optx_sync.metrics import metrics as metrics
from optx_sync.fingerprints import fingerprint as fingerprint
from optx_sync.metrics import slot as slot
from optx_sync.metrics import slot_names as slot_names
from optx_sync.by_hand import replicate as replicate
from optx_sync.by_hand import state_axes as state_axes
from optx_sync.by_hand import state_specs as state_specs
from optx_sync.by_hand import first as first
from optx_sync.by_hand import resize as resize

if TYPE_CHECKING:
    from optx_sync import audit as audit
    from optx_sync import elastic as elastic
    from optx_sync import flax as flax
    from optx_sync import optimizers as optimizers
    from optx_sync import runtime as runtime
    from optx_sync import simulate as simulate
    from optx_sync import testing as testing
    from optx_sync.outer.batch_size import next_batch_size as next_batch_size
    from optx_sync.outer.delayed_nesterov import delayed_nesterov as delayed_nesterov
    from optx_sync.outer.qsr import qsr as qsr
    from optx_sync.flax import swap_center as swap_center
    from optx_sync.front.workers import Workers as Workers
    from optx_sync.peers import graphs as graphs
    from optx_sync.peers.gossip import gossip as gossip
    from optx_sync.peers.gossip import mean_params as mean_params
    from optx_sync.peers.gossip import noloco as noloco

# Imported when they are asked for: modules that a program may not need, of which
# `elastic`, `flax` and `runtime` need a library that may not be installed.
_MODULES = (
    "audit",
    "elastic",
    "flax",
    "optimizers",
    "runtime",
    "simulate",
    "testing",
)
_ELSEWHERE = {
    "Workers": "optx_sync.front.workers",
    "delayed_nesterov": "optx_sync.outer.delayed_nesterov",
    "gossip": "optx_sync.peers.gossip",
    "graphs": "optx_sync.peers",
    "mean_params": "optx_sync.peers.gossip",
    "next_batch_size": "optx_sync.outer.batch_size",
    "noloco": "optx_sync.peers.gossip",
    "qsr": "optx_sync.outer.qsr",
    "swap_center": "optx_sync.flax",
}

__all__ = [
    "CenterRule",
    "IndexedSlices",
    "Workers",
    "agn",
    "agn_rule",
    "all_reduce_grads",
    "apply_gradients",
    "audit",
    "averaged_params",
    "center_params",
    "center_variable",
    "cross_shard",
    "delayed_nesterov",
    "diloco",
    "diloco_rule",
    "due",
    "elastic",
    "elastic_average",
    "elastic_rule",
    "exchange",
    "fingerprint",
    "first",
    "gossip",
    "graphs",
    "local_sgd",
    "local_sgd_rule",
    "localize",
    "map_workers",
    "mean_params",
    "metrics",
    "next_batch_size",
    "noloco",
    "on_values",
    "optimizers",
    "qsr",
    "reduce",
    "replicate",
    "resize",
    "simulate",
    "slot",
    "slot_names",
    "stacked",
    "state_axes",
    "state_specs",
    "strided",
    "sync_replicas",
    "take",
    "testing",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"optx_sync.{name}")
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module 'optx_sync' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *_ELSEWHERE})

# SPDX-License-Identifier: Apache-2.0
"""Agreements between server and workers, one file each."""

from typing import Any, TypeAlias

from optx_sync.center.contract import CenterRule
from optx_sync.checks import integer
from optx_sync.replicas.tokens import SyncReplicas
from optx_sync.runtime.agreements.center import Center
from optx_sync.runtime.agreements.contract import Settings, Way
from optx_sync.runtime.agreements.own import OfCenter
from optx_sync.runtime.agreements.sync_replicas import (
    OfUpdates,
    Updates,
    sync_replicas_way,
)
from optx_sync.runtime.agreements.way import center_way
from optx_sync.trees import brief

Agreement: TypeAlias = CenterRule | SyncReplicas
Held: TypeAlias = Center | Updates  # at a server; one thread at a time
Own: TypeAlias = OfCenter | OfUpdates  # at a worker


def way_of(agreement: Any, settings: Settings) -> Way:
    """The server's and worker's side of an agreement; refuse one that does not fit.

    Raises:
        TypeError: No agreement; a number of workers that is no integer.
        ValueError: An agreement for another number of workers or another period.
    """
    num_workers = integer("num_workers", settings.num_workers, "Pass for example 8.")
    if isinstance(agreement, SyncReplicas):
        if settings.exchange is not None:
            raise ValueError(
                "exchange= codes what a worker contributes to a center. SyncReplicas "
                "may drop a gradient as stale, and what its code owes would come in a "
                "later one. Leave exchange out."
            )
        for name in ("fragments", "delay", "pull_exchange", "meet"):
            if getattr(settings, name):
                raise ValueError(
                    f"{name}= is for workers that meet a center. With SyncReplicas "
                    f"every gradient is pushed whole and at once. Leave {name} out."
                )
        return sync_replicas_way(agreement, num_workers)
    if isinstance(agreement, CenterRule):
        return center_way(agreement, settings)
    raise TypeError(
        "agreement must be a center rule such as oxs.rules.local_sgd(), or "
        f"oxs.runtime.SyncReplicas(3); got {brief(agreement)}."
    )

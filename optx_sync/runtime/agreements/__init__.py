# SPDX-License-Identifier: Apache-2.0
"""What server and worker do, one file for each agreement."""

from typing import Any

from optx_sync.center.contract import CenterRule, Period
from optx_sync.exchange.contract import Exchange
from optx_sync.runtime.agreements.center import center_way
from optx_sync.runtime.agreements.contract import Way
from optx_sync.runtime.agreements.sync_replicas import SyncReplicas, sync_replicas_way

Agreement = CenterRule | SyncReplicas


def way_of(
    agreement: Any,
    num_workers: Any,
    communication_period: Period,
    exchange: Exchange | None = None,
) -> Way:
    """What server and worker do under an agreement; refuse one that does not fit.

    Raises:
        TypeError: No agreement; a number of workers that is no integer.
        ValueError: An agreement for another number of workers or another period.
    """
    if isinstance(num_workers, bool) or not isinstance(num_workers, int):
        raise TypeError(f"num_workers must be an integer; got {num_workers!r}.")
    if num_workers < 1:
        raise ValueError(f"num_workers must be 1 or more; got {num_workers}.")
    if isinstance(agreement, SyncReplicas):
        if exchange is not None:
            raise ValueError(
                "exchange= codes what a worker contributes to a center. SyncReplicas "
                "may drop a gradient as stale, and what its code owes would come in a "
                "later one. Leave exchange out."
            )
        return sync_replicas_way(agreement, num_workers)
    if isinstance(agreement, CenterRule):
        return center_way(agreement, num_workers, communication_period, exchange)
    raise TypeError(
        "agreement must be a center rule such as oxs.local_sgd_rule(), or "
        f"oxs.runtime.SyncReplicas(3); got {agreement!r}."
    )

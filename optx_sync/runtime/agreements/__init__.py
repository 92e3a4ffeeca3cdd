# SPDX-License-Identifier: Apache-2.0
"""What server and workers agree on, one idea a file.

Made of `meetings`, `center` and `exchange`, as lockstep is; no file knows Ray.
"""

from typing import Any, TypeAlias

import jax.numpy as jnp

from optx_sync.center.contract import CenterRule, Round, static_period
from optx_sync.center.fragments import check_fragments
from optx_sync.core.checks import integer
from optx_sync.core.trees import brief
from optx_sync.meetings.alone import check_delay, check_suits
from optx_sync.meetings.coded import check_code, check_pull_code
from optx_sync.meetings.quorum import check_meet
from optx_sync.replicas.tokens import SyncReplicas
from optx_sync.runtime.agreements.center import Center
from optx_sync.runtime.agreements.contract import Settings, Way
from optx_sync.runtime.agreements.meeting import Meetings
from optx_sync.runtime.agreements.own import OfCenter, Terms, traffic
from optx_sync.runtime.agreements.sync_replicas import (
    OfUpdates,
    Updates,
    sync_replicas_way,
)

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
    if isinstance(agreement, CenterRule):
        return center_way(agreement, settings)
    if not isinstance(agreement, SyncReplicas):
        raise TypeError(
            "agreement must be a center rule such as oxs.rules.local_sgd(), or "
            f"oxs.runtime.SyncReplicas(3); got {brief(agreement)}."
        )
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
    if settings.num_servers != 1:
        raise ValueError(
            "SyncReplicas accepts or drops a gradient as a whole, and so needs one "
            f"server; got num_servers={settings.num_servers}. Pass num_servers=1."
        )
    return sync_replicas_way(agreement, num_workers)


def center_way(rule: CenterRule, settings: Settings) -> Way:
    """The server's and workers' sides under a rule."""
    period, num_workers = settings.communication_period, settings.num_workers
    exchange = check_code(settings.exchange, rule)
    check_suits(rule, num_workers, period)
    meet = check_meet(settings.meet)
    at = Round(num_workers, static_period(period), jnp.int32(1))
    pulls = check_pull_code(settings.pull_exchange)
    if pulls is not None and len(traffic(rule).replies) != 1:
        raise ValueError(
            "pull_exchange= codes the center as a worker takes it, and this rule takes "
            "from the center before and after a push, or not at all. Leave "
            "pull_exchange out; or declare in reads= which of the two `take` reads."
        )
    delay = check_delay(settings.delay)
    if meet.shared and rule.mean_over is not None:
        # A meeting's mean is of those that have come, so none divides by all.
        rule = rule._replace(mean_over="pushed")
    terms = Terms(rule, at, exchange, pulls, period, delay, meet)

    def serve(part, inner, copy_replies):
        shared = meet.shared
        return Meetings(part, terms) if shared else Center(part, terms, copy_replies)

    def work(shapes, inner, layout):
        return OfCenter(shapes, inner, layout, terms)

    way = Way(serve, work, of_center=True, waits=meet.shared)
    return way._replace(fragments=check_fragments(settings.fragments), delay=delay)

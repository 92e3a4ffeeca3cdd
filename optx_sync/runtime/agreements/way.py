# SPDX-License-Identifier: Apache-2.0
"""Both sides of a center rule, made of the settings of a run."""

import jax.numpy as jnp

from optx_sync.center.contract import CenterRule, Round, static_period
from optx_sync.center.fragments import check_fragments, steps_between
from optx_sync.meetings.alone import check_delay, check_suits
from optx_sync.meetings.coded import check_code, check_pull_code
from optx_sync.meetings.quorum import check_meet
from optx_sync.runtime.agreements.center import Center
from optx_sync.runtime.agreements.contract import Settings, Way
from optx_sync.runtime.agreements.meeting import Meetings
from optx_sync.runtime.agreements.own import OfCenter, Terms, traffic


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
    terms = Terms(rule, at, exchange, pulls)

    def serve(part, inner, copy_replies):
        if meet.shared:
            return Meetings(part, terms, meet, delay)
        return Center(part, terms, copy_replies)

    def work_of(shapes, inner, layout):
        between = steps_between(period, len(layout.turns), delay)
        return OfCenter(shapes, inner, layout, terms, between, delay)

    return Way(
        serve=serve,
        work=work_of,
        fragments=check_fragments(settings.fragments),
        delay=delay,
        meet=meet,
        of_center=True,
        waits=meet.shared,
    )

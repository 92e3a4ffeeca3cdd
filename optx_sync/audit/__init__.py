# SPDX-License-Identifier: Apache-2.0
"""Audit the collectives of a compiled program, and their cost on given links.

`collectives(step, *args)` gives a row, a `Collective`, for each collective of a program
that is compiled for these arguments (or their shapes); `table(rows)` writes them as
text. `time(rows, gbits=...)` says how long a step sends and waits, a `Cost`, and
`plan({name: Strategy(rows)}, gbits=[...], step_seconds=...)` which bandwidth each
method needs, a `Plan`; both also take an optimizer, which `strategy` compiles. `parse`
reads the text of a compiled program.
"""

from optx_sync.audit.links import Cost, Plan, Strategy, plan, strategy, time
from optx_sync.audit.programs import Collective, collectives, parse, table

__all__ = [
    "Collective",
    "Cost",
    "Plan",
    "Strategy",
    "collectives",
    "parse",
    "plan",
    "strategy",
    "table",
    "time",
]

# SPDX-License-Identifier: Apache-2.0
"""Audit the collectives of a compiled program, and their cost on given links."""

from optx_sync.audit.links import Cost as Cost
from optx_sync.audit.links import Plan as Plan
from optx_sync.audit.links import Strategy as Strategy
from optx_sync.audit.links import plan as plan
from optx_sync.audit.links import time as time
from optx_sync.audit.programs import Collective as Collective
from optx_sync.audit.programs import collectives as collectives
from optx_sync.audit.programs import instructions as instructions
from optx_sync.audit.programs import parse as parse
from optx_sync.audit.programs import table as table

# SPDX-License-Identifier: Apache-2.0
"""Center rules for `center_variable`, the simulation and the runtime: `oxs.rules`."""

from optx_sync.center.fragments import strided as strided
from optx_sync.center.rules.agn import agn_rule as agn
from optx_sync.center.rules.diloco import diloco_rule as diloco
from optx_sync.center.rules.elastic_average import elastic_rule as elastic
from optx_sync.center.rules.local_sgd import local_sgd_rule as local_sgd
from optx_sync.core.signatures import readable as _readable

__all__ = ["agn", "diloco", "elastic", "local_sgd", "strided"]

_readable(globals())

# SPDX-License-Identifier: Apache-2.0
"""Exchanges, the value of `exchange=`: how the arrays of all replicas become one.

Exactly, by gradient compression, or robust to Byzantine replicas. Made of `comm`.
"""

from optx_sync.comm.collectives import all_to_all as all_to_all
from optx_sync.comm.collectives import gather as gather
from optx_sync.core.signatures import readable as _readable
from optx_sync.exchange.all_reduce import all_reduce as all_reduce
from optx_sync.exchange.contract import Code as Code
from optx_sync.exchange.contract import Exchange as Exchange
from optx_sync.exchange.contract import Met as Met
from optx_sync.exchange.error_feedback import error_feedback as error_feedback
from optx_sync.exchange.penalized import penalized as penalized
from optx_sync.exchange.power_sgd import power_sgd as power_sgd
from optx_sync.exchange.quantized import quantized as quantized
from optx_sync.exchange.radial import radial as radial
from optx_sync.exchange.robust.clipped import clipped as clipped
from optx_sync.exchange.robust.coordinate import median as median
from optx_sync.exchange.robust.coordinate import sign_majority as sign_majority
from optx_sync.exchange.robust.coordinate import trimmed_mean as trimmed_mean
from optx_sync.exchange.robust.distance import geometric_median as geometric_median
from optx_sync.exchange.robust.distance import krum as krum
from optx_sync.exchange.rotated import rotated as rotated
from optx_sync.exchange.top_k import top_k as top_k

_readable(globals())

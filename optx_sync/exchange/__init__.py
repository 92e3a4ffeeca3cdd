# SPDX-License-Identifier: Apache-2.0
"""How the arrays of all replicas become one: the value of `exchange=`."""

from optx_sync.exchange.all_reduce import all_reduce as all_reduce
from optx_sync.exchange.error_feedback import error_feedback as error_feedback
from optx_sync.exchange.power_sgd import power_sgd as power_sgd
from optx_sync.exchange.quantized import quantized as quantized
from optx_sync.exchange.rule import Exchange as Exchange
from optx_sync.exchange.top_k import top_k as top_k

__all__ = [
    "Exchange",
    "all_reduce",
    "error_feedback",
    "power_sgd",
    "quantized",
    "top_k",
]

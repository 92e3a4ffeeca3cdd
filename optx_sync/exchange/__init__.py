# SPDX-License-Identifier: Apache-2.0
"""How the arrays of all replicas become one: the value of `exchange=`."""

from optx_sync.exchange.all_reduce import all_reduce as all_reduce
from optx_sync.exchange.rule import Exchange as Exchange

__all__ = ["Exchange", "all_reduce"]

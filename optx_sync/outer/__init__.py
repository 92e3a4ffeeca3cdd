# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers and schedules of periods and batch sizes that Optax lacks.

Each file is one formula, made of `core` and `comm`.
"""

from optx_sync.core.signatures import readable as _readable
from optx_sync.outer.batch_size import next_batch_size as next_batch_size
from optx_sync.outer.delayed_nesterov import delayed_nesterov as delayed_nesterov
from optx_sync.outer.heloco import heloco as heloco
from optx_sync.outer.qsr import qsr as qsr

__all__ = ["delayed_nesterov", "heloco", "next_batch_size", "qsr"]

_readable(globals())

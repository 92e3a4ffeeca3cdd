# SPDX-License-Identifier: Apache-2.0
"""What `oxs.Workers` stands on, for `jax.shard_map`, `jax.vmap` and `jax.pmap`."""

from optx_sync.core.signatures import readable as _readable
from optx_sync.peers.gossip import mean_params as mean_params
from optx_sync.state.apply import due as due
from optx_sync.workers.by_hand import equal_start as equal_start
from optx_sync.workers.by_hand import first as first
from optx_sync.workers.by_hand import replicate as replicate
from optx_sync.workers.by_hand import resize as resize
from optx_sync.workers.by_hand import state_axes as state_axes
from optx_sync.workers.by_hand import state_specs as state_specs
from optx_sync.workers.mapped import map_workers as map_workers

_readable(globals())

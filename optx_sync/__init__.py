# SPDX-License-Identifier: Apache-2.0
"""How replicas agree: synchronising optimizers for JAX, as Optax transformations.

The spelling in all documentation is `import optx_sync as oxs`.
"""

# How arrays meet.
# What is communicated.
from optx_sync import audit as audit
from optx_sync.collectives import localize as localize
from optx_sync.collectives import reduce as reduce

# A gradient's form.
from optx_sync.indexed_slices import IndexedSlices as IndexedSlices

# Where gradients of replicas meet.
from optx_sync.replicas.cross_shard import cross_shard as cross_shard

# Where a state lives.
from optx_sync.sharding import stack as stack
from optx_sync.sharding import state_axes as state_axes
from optx_sync.sharding import state_specs as state_specs
from optx_sync.sharding import unstack as unstack

# SPDX-License-Identifier: Apache-2.0
"""Workers that do not march in step, replayed event by event on one device.

At each event one worker steps, at the parameters as they are then. What the wrappers
of this package do in lockstep is done here worker by worker, with the same code, so
that what asynchrony does to training can be tested, studied, and scaled to thousands
of workers without any of them running.
"""

from optx_sync.simulate.asynchronous import AsynchronousRecord as AsynchronousRecord
from optx_sync.simulate.asynchronous import AsynchronousState as AsynchronousState
from optx_sync.simulate.asynchronous import WorkerState as WorkerState
from optx_sync.simulate.asynchronous import asynchronous as asynchronous
from optx_sync.simulate.gossip import GossipRecord as GossipRecord
from optx_sync.simulate.gossip import GossipWorkers as GossipWorkers
from optx_sync.simulate.gossip import gossip as gossip
from optx_sync.simulate.sync_replicas import SyncReplicasMachine as SyncReplicasMachine
from optx_sync.simulate.sync_replicas import SyncReplicasRecord as SyncReplicasRecord
from optx_sync.simulate.sync_replicas import sync_replicas as sync_replicas

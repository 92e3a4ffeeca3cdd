# SPDX-License-Identifier: Apache-2.0
"""Simulate asynchronous training on one device, event by event.

At each event one worker makes a step. The code that the wrappers run in lockstep runs
here worker by worker, to test and study the effects of asynchrony on training, with
thousands of workers if necessary.
"""

from optx_sync.core.signatures import readable as _readable
from optx_sync.simulate.asynchronous import AsynchronousRecord as AsynchronousRecord
from optx_sync.simulate.asynchronous import AsynchronousState as AsynchronousState
from optx_sync.simulate.asynchronous import WorkerState as WorkerState
from optx_sync.simulate.asynchronous import asynchronous as asynchronous
from optx_sync.simulate.clock import Happening as Happening
from optx_sync.simulate.clock import Kind as Kind
from optx_sync.simulate.clock import Timeline as Timeline
from optx_sync.simulate.clock import clock as clock
from optx_sync.simulate.decoupled import DecoupledRecord as DecoupledRecord
from optx_sync.simulate.decoupled import DecoupledState as DecoupledState
from optx_sync.simulate.decoupled import Learner as Learner
from optx_sync.simulate.decoupled import decoupled as decoupled
from optx_sync.simulate.sync_replicas import SyncReplicasMachine as SyncReplicasMachine
from optx_sync.simulate.sync_replicas import SyncReplicasRecord as SyncReplicasRecord
from optx_sync.simulate.sync_replicas import sync_replicas as sync_replicas

_readable(globals())

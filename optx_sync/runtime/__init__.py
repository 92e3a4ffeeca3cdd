# SPDX-License-Identifier: Apache-2.0
"""Asynchronous, fault tolerant training with a parameter server.

`run` does it all on Ray (extra `ray`, imported only when `run` is called). `Server` and
`Worker` are plain Python, for those who have a launcher of their own: a worker needs a
connection, any object with the methods of `Connection`; a `Server` in the same process
is one.
"""

from optx_sync.core.signatures import readable as _readable
from optx_sync.meetings.quorum import Quorum as Quorum
from optx_sync.meetings.quorum import one as one
from optx_sync.meetings.quorum import quorum as quorum
from optx_sync.replicas.tokens import SyncReplicas as SyncReplicas
from optx_sync.runtime.display import History as History
from optx_sync.runtime.group import GroupConnection as GroupConnection
from optx_sync.runtime.messages import Event as Event
from optx_sync.runtime.messages import Joined as Joined
from optx_sync.runtime.messages import JoinedPart as JoinedPart
from optx_sync.runtime.messages import Pending as Pending
from optx_sync.runtime.messages import Push as Push
from optx_sync.runtime.messages import PushRefused as PushRefused
from optx_sync.runtime.messages import Reply as Reply
from optx_sync.runtime.ray import run as run
from optx_sync.runtime.ray_actors import RayConnection as RayConnection
from optx_sync.runtime.ray_actors import start_servers as start_servers
from optx_sync.runtime.samples import Lease as Lease
from optx_sync.runtime.samples import Samples as Samples
from optx_sync.runtime.server import Server as Server
from optx_sync.runtime.worker import Connection as Connection
from optx_sync.runtime.worker import Preempted as Preempted
from optx_sync.runtime.worker import Worker as Worker

_readable(globals())

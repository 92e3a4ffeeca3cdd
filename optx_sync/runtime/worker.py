# SPDX-License-Identifier: Apache-2.0
"""The loop of a worker: steps of its own, and an exchange when one is due."""

import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optx_sync.center.formulas import (
    contributions,
    divide,
    is_due,
    local_step,
    own_of,
    start_accumulated,
    start_center,
    take,
    worker_params,
)
from optx_sync.center.rule import Period, check_period
from optx_sync.checks import check_grads, check_inner
from optx_sync.rows.slices import IndexedSlices
from optx_sync.runtime.protocol import (
    Agreement,
    Arrays,
    Joined,
    Push,
    Reply,
    SyncReplicas,
    check_agreement,
    path_of,
    round_of,
    traffic,
)


class Connection(Protocol):
    """What a worker asks of a server, or of whatever stands between them."""

    def join(self, worker: int) -> Joined:
        """The center, for a worker that starts or starts again."""
        ...

    def everyone_joined(self) -> bool:
        """Whether all workers have joined."""
        ...

    def push(self, push: Push) -> Reply:
        """Send a push, again if need be, and return the answer to it."""
        ...

    def wait(self, worker: int) -> Reply:
        """Wait some time for a token."""
        ...


class Worker:
    """One worker: it has parameters of its own, and meets the others at the center.

    `step` makes one step with `inner`, compiled, and exchanges with the center when
    `communication_period` steps have passed since the last time. With `SyncReplicas`
    each step sends the gradient, waits for a token and takes the parameters.

    Args:
        connection: The way to the server: a `Server`, or anything like `Connection`.
        params: What the parameters look like, arrays or `jax.ShapeDtypeStruct`; their
            values come from the server.
        inner: The worker's own optimizer. With `SyncReplicas` the server applies it.
        agreement: As the server's.
        index: The worker's number.
        num_workers: As the server's.
        communication_period: Steps between rounds, an int or a schedule of the worker's
            step (0-based). `SyncReplicas` has no use for it.
        synchronous: Wait at the start until all workers have joined.

    Attributes:
        index: The worker's number, from 0 on.
        params: The parameters now: what to compute the next gradient at.
        local_step: Steps so far. A worker that replaces one that died goes on from the
            step of the last round.
        rounds: Pushes that were absorbed, those of its predecessors included.
        global_step: The server's step at the last exchange.
        staleness: The other workers' rounds between this worker's last two.
        used: `False` if the last gradient was stale (`SyncReplicas`).
        restarts: How many workers of this number there have been before.
        connection: As given.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> from optx_sync.runtime import Server, Worker
        >>> rule, params = oxs.local_sgd_rule(), {"w": jnp.zeros(2)}
        >>> server = Server(params, rule, num_workers=2, communication_period=1)
        >>> settings = dict(num_workers=2, communication_period=1)
        >>> one = Worker(server, params, optax.sgd(1.0), rule, index=0, **settings)
        >>> two = Worker(server, params, optax.sgd(1.0), rule, index=1, **settings)
        >>> one.step({"w": jnp.array([-2.0, 0.0])})
        >>> two.step({"w": jnp.array([0.0, -4.0])})
        >>> one.params["w"].tolist(), two.params["w"].tolist()
        ([1.0, 0.0], [1.0, 2.0])
    """

    def __init__(
        self,
        connection: Connection,
        params: Any,
        inner: optax.GradientTransformation,
        agreement: Agreement,
        *,
        index: int,
        num_workers: int,
        communication_period: Period = 10,
        synchronous: bool = False,
    ):
        check_agreement(agreement, num_workers, communication_period)
        check_period(communication_period)
        inner = check_inner(inner, "Worker(connection, params, optax.sgd(0.1), rule)")
        self.connection = connection
        self.index = index
        self._like = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(jnp.shape(p), p.dtype), params
        )
        if isinstance(agreement, SyncReplicas):
            self._part = _OfUpdates(self._like)
        else:
            self._part = _OfCenter(
                self._like, inner, agreement, num_workers, communication_period
            )
        self._sharding: Any = None
        self.used: bool = True
        self.staleness: int = 0
        joined = self.pull()
        self.restarts: int = joined.restarts
        while synchronous and not connection.everyone_joined():
            time.sleep(0.02)

    @property
    def params(self) -> Any:
        """The parameters to compute the next gradient at."""
        return self._part.params

    def step(self, grads: Any, **what_to_show: Any) -> None:
        """One step with a gradient at `params`, and an exchange if one is due.

        Args:
            grads: The gradient: like `params`; leaves may be `IndexedSlices` or `None`.
            **what_to_show: Numbers for the display and the history, such as `loss=`.
                They are read at an exchange only.

        Raises:
            PushRefused: The server did not take what was sent, for example a NaN. The
                worker is as it was after its own step, and the next step tries again;
                `pull` starts anew from the center.
            ValueError: Gradients that do not match the parameters.
        """
        check_grads(grads, self._like)
        self.local_step += 1
        due = self._part.step(grads, self.local_step - 1)
        if not due:
            return
        shown = {name: float(value) for name, value in what_to_show.items()}
        reply = self.connection.push(
            Push(
                worker=self.index,
                round=self.rounds + 1,
                arrays=self._part.outgoing(),
                steps=self._part.steps,
                local_step=self.local_step,
                shown=shown,
            )
        )
        self.rounds += 1
        self.used, self.staleness = reply.used, reply.staleness
        while reply.waiting:
            reply = self.connection.wait(self.index)
        self.global_step = reply.global_step
        self._part.land(reply.arrays, self._place)

    def pull(self) -> Joined:
        """Leave what the worker has and start anew from the center, as a new one."""
        joined = self.connection.join(self.index)
        self.rounds: int = joined.round
        self.local_step: int = joined.local_step
        self.global_step: int = joined.global_step
        self._part.start(joined.arrays, self._place)
        return joined

    def shard(self, sharding: Any) -> None:
        """Lay the parameters and the optimizer's state out over devices of the worker.

        Args:
            sharding: A `jax.sharding.Sharding`, or a tree of them like the parameters.
        """
        self._sharding = sharding
        self._part.place(self._place)

    def _place(self, tree: Any) -> Any:
        return tree if self._sharding is None else jax.device_put(tree, self._sharding)


class _OfCenter:
    """A worker's arrays under a rule."""

    def __init__(self, like, inner, rule, num_workers, communication_period):
        self.like, self.inner, self.rule = like, inner, rule
        self.period = communication_period
        self.center_like = jax.eval_shape(start_center, like)
        self.at = round_of(num_workers, communication_period, 1)
        self.traffic = traffic(rule, self.at)
        self._step = jax.jit(self._run_step)
        self._bring = jax.jit(self._run_bring)
        self._take = jax.jit(self._run_take)

    def start(self, arrays: Arrays, place) -> None:
        center = place(_tree(arrays, self.like))
        self.params = jax.tree.map(lambda c, p: c.astype(p.dtype), center, self.like)
        self.taken = center
        self._start_own()

    def _start_own(self) -> None:
        self.accumulated = start_accumulated(self.rule, self.taken)
        self.inner_state = self.inner.init(self.params)
        self.steps = 0

    def place(self, place) -> None:
        self.params, self.taken = place(self.params), place(self.taken)
        self._start_own()

    def step(self, grads: Any, step: int) -> bool:
        self.steps += 1
        self.params, self.inner_state, self.accumulated = self._step(
            self.params, self.inner_state, self.taken, self.accumulated, grads,
            jnp.int32(self.steps),
        )  # fmt: skip
        return bool(is_due(self.period, self.steps, jnp.int32(step)))

    def _run_step(self, params, inner_state, taken, accumulated, grads, steps):
        at = self.at._replace(steps=steps)
        updates, inner_state, accumulated = local_step(
            self.inner, self.rule, at, grads, inner_state, params, taken, accumulated
        )
        moved = worker_params(params, updates, self.center_like)
        params = jax.tree.map(lambda x, p: x.astype(p.dtype), moved, params)
        return params, inner_state, accumulated

    def outgoing(self) -> dict[str, Arrays]:
        sent = self._bring(
            self.params, self.taken, self.accumulated, jnp.int32(self.steps)
        )
        return {name: _arrays(tree) for name, tree in sent.items()}

    def _run_bring(self, params, taken, accumulated, steps):
        x = self._wide(params)
        if self.traffic.sends != ("contribution",):
            fields = {"params": x, "taken": taken, "accumulated": accumulated}
            return {name: fields[name] for name in self.traffic.sends}
        at = self.at._replace(steps=steps)
        own = own_of(self.rule, x, taken, accumulated)
        # The formula does not read the center, so any array of its type will do.
        total = contributions(self.rule, own, x, at)
        if self.rule.mean_over == "workers":
            total = divide(total, at.num_workers)
        return {"contribution": total}

    def land(self, replied: dict[str, Arrays], place) -> None:
        centers = {n: place(_tree(a, self.like)) for n, a in replied.items()}
        self.params = self._take(self.params, centers, jnp.int32(self.steps))
        if self.rule.take is not None:
            self.taken = centers.get("before", self.taken)
        else:
            self.taken = centers.get("after", self.taken)
        self.accumulated = jax.tree.map(jnp.zeros_like, self.accumulated)
        self.steps = 0

    def _run_take(self, params, centers, steps):
        at = self.at._replace(steps=steps)
        x = self._wide(params)
        # One that is not sent is not read.
        before, after = centers.get("before", x), centers.get("after", x)
        new = take(self.rule, x, before, after, at)
        return jax.tree.map(lambda x, p: x.astype(p.dtype), new, params)

    def _wide(self, params):
        return jax.tree.map(lambda p, c: p.astype(c.dtype), params, self.center_like)


class _OfUpdates:
    """A worker's arrays under `SyncReplicas`: parameters, and a gradient to send."""

    def __init__(self, like):
        self.like = like
        self.steps = 1

    def start(self, arrays: Arrays, place) -> None:
        self.params = place(_tree(arrays, self.like))

    def place(self, place) -> None:
        self.params = place(self.params)

    def step(self, grads: Any, step: int) -> bool:
        self.grads = grads
        return True

    def outgoing(self) -> dict[str, Arrays]:
        return {"grads": _arrays(self.grads)}

    def land(self, replied: dict[str, Arrays], place) -> None:
        self.params = place(_tree(replied["params"], self.like))


def _tree(arrays: Arrays, like: Any) -> Any:
    """Arrays of the worker's own: what was received may be a view of the center."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.array(arrays[path_of(path)], copy=True), like
    )


def _arrays(tree: Any) -> Arrays:
    """From a tree to what travels; row-sparse leaves as (indices, values)."""
    return {
        path_of(path): _sent(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_grad)
    }


def _sent(leaf: Any) -> Any:
    if isinstance(leaf, IndexedSlices):
        return np.asarray(leaf.indices), np.asarray(leaf.values)
    return None if leaf is None else np.asarray(leaf)


def _is_grad(x: Any) -> bool:
    return x is None or isinstance(x, IndexedSlices)

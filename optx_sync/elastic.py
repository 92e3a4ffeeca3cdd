# SPDX-License-Identifier: Apache-2.0
"""Fault tolerant, elastic training: a run whose processes come and go.

A lockstep run ends when one of its processes dies, since all others wait for it. So
whatever starts processes (Ray Train, SLURM, a loop in a shell) starts them again, as
many as there are, and each calls the same function again. `Group` is what that function
needs: it continues from the last save, with the workers that there are now.

    def train():  # in each process, after jax.distributed.initialize
        with oxs.elastic.Group("/shared/run", "workers") as group:
            # `begin` returns (params, tx.init(params)), and is called only once.
            state = group.restore_or_start(begin)
            step = group.workers.step(one_step, state=2)
            while group.position < examples:
                rows = group.rows(len(images), batch=16)
                *state, loss = step(*state, *group.batch((images[rows], labels[rows])))
                if meets:  # oxs.due
                    group.save(tuple(state))

Orbax writes the saves, makes all processes agree on which are complete, and discards a
save that was cut short.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from optx_sync import forms
from optx_sync.checks import check_seed, integer
from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.front import held
from optx_sync.front.workers import Workers
from optx_sync.trees import Tree

# The name under which Orbax keeps our own notes, beside the arrays.
_NOTES = "optx_sync"


class Group:
    """The processes that train together now, and the folder of their run.

    Each process makes one after `jax.distributed.initialize`, with equal arguments, and
    calls the same methods in the same order. A single process, with workers on its own
    devices or simulated ones, is a group as well.

    Args:
        folder: Where saves go: a place that every process of every later group can
            read and write, such as a shared disk or `gs://bucket/run`. Made if
            missing.
        workers: The `Workers` of the run; or the name of the axis, for one worker
            on each device of all processes.
        keep: How many saves are kept; older ones are deleted.

    Raises:
        ImportError: Orbax is not installed.
        TypeError, ValueError: As for `Workers`; `keep` below 1.

    Attributes:
        workers: The group's `Workers`, on a mesh of all processes' devices.
        position: How many examples all workers have taken since the run began; it
            names a save. `rows` advances it; with batches of your own, add to it
            yourself.
        notes: The `notes` of the save from which this group continued.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> tx = oxs.local_sgd(optax.sgd(0.5), "workers", communication_period=2)
        >>> folder, examples = tempfile.mkdtemp(), jnp.arange(12.0)
        >>> def train(n, until):  # in a run: what is called again after a death
        ...     first = jnp.zeros(())
        ...     with oxs.elastic.Group(folder, oxs.Workers(n, "workers")) as group:
        ...         w, state = group.restore_or_start((first, tx.init(first)))
        ...         @group.workers.step(state=2)
        ...         def step(w, state, x):
        ...             return oxs.apply_gradients(tx, w - x.mean(), state, w)
        ...         while group.position < until:
        ...             rows = group.rows(len(examples), batch=1)
        ...             w, state = step(w, state, group.batch(examples[rows]))
        ...             if oxs.metrics(state).steps_since_round == 0:
        ...                 group.save((w, state))
        ...         return w.shape, group.position
        >>> train(n=3, until=24), train(n=2, until=40)
        (((3,), 24), ((2,), 40))
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        workers: Workers | AxisName,
        *,
        keep: int = 2,
    ):
        try:
            import orbax.checkpoint as ocp
            from etils import epath  # Orbax depends on it.
        except ImportError as error:
            raise ImportError(
                "oxs.elastic needs Orbax: pip install orbax-checkpoint."
            ) from error
        keep = integer("keep", keep, "Pass how many saves are kept.")
        if not isinstance(workers, Workers):
            workers = Workers(jax.device_count(), workers, mesh=True)
        path = epath.Path(folder)
        self.workers: Workers = workers
        self.position: int = 0
        self.notes: Any = None
        self._saved: int = -1
        self.manager: Any = ocp.CheckpointManager(
            path if "://" in str(folder) else path.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        # If one process has failed, the others may never come to the end of the group.
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"Group({str(self.manager.directory)!r}, {self.workers})"

    def restore_or_start(self, state: Tree | Callable[[], Tree]) -> Tree:
        """The state of the last save, for this group's workers; without one, the first.

        From a save by as many workers, every worker gets its own state back, to the
        bit. From another number, `Workers.resize` makes the state: the first workers
        continue, and joiners begin as it says. Every process reads what all workers
        saved if their number has changed, and only its own workers' part if it has not.

        Args:
            state: One worker's, as for `Workers.start`: how a run begins. Or a function
                without arguments that returns it, and is called only at the start: a
                group that restores initialises no model, which takes seconds of
                compilation in every process but the first.

        Returns:
            The state of all workers, placed. NNX objects are new ones.

        Raises:
            ValueError: The save is of another model or optimizer.
        """
        step = self.manager.latest_step()
        if step is None:
            return self.workers.start(state() if forms.is_function(state) else state)
        self.workers.expect(state)
        restored = self.workers.restore(self.manager, step)
        notes = self.manager.metadata(step).custom_metadata[_NOTES]
        self._saved, self.position, self.notes = step, step, notes
        return restored

    def save(self, state: Tree, *, notes: Any = None) -> None:
        """Save what the next group continues from; training goes on during the writing.

        Every process calls it, right after a meeting: in the middle of a round, what
        workers have learned since the last one can be restored only by as many workers.
        Each process writes its own workers' part, and one of them what workers share.
        Until all is written, the previous save stays the last.

        Args:
            state: The state of all workers; its buffers are free for the next step.
            notes: Anything that JSON can hold, equal in all processes: for example
                the state of an iterator over the data, or a history for the log.

        Raises:
            ValueError: No example was taken since the last save.
        """
        import orbax.checkpoint as ocp

        if self.position <= self._saved:
            raise ValueError(
                f"The run has been saved at position {self._saved} already, and is at "
                f"{self.position}. A save is called by its position: take examples by "
                "group.rows, or count your own, group.position += len(batch)."
            )
        form, arrays = forms.split(state)
        tree: dict[str, Any] = {}
        for path, x in zip(form.paths(), arrays, strict=True):
            *inner, last = held.names_of(path) or ("state",)
            node = tree
            for name in inner:
                node = node.setdefault(name, {})
            node[last] = x
        self.manager.save(
            self.position,
            args=ocp.args.StandardSave(tree),
            custom_metadata={_NOTES: notes},
            force=True,
        )
        self._saved = self.position

    def rows(self, size: int, batch: int, *, seed: int = 0) -> np.ndarray:
        """The examples that this process's workers take next; advances `position`.

        All workers take the next `n * batch` of an endless order in which each epoch is
        shuffled anew. The order depends only on the seed and the position, so another
        number of workers continues where the last save ended: each example comes once
        in an epoch.

        Args:
            size: The number of examples in an epoch.
            batch: How many each worker takes.
            seed: Of the shuffling; the same in every group of a run.

        Returns:
            int64 `[workers of this process * batch]`, each in `[0, size)`.

        Raises:
            TypeError, ValueError: A number that is no integer, or below 1; a seed
                below 0.

        Example:
            >>> import tempfile
            >>> import optx_sync as oxs
            >>> workers = oxs.Workers(3, "workers")
            >>> group = oxs.elastic.Group(tempfile.mkdtemp(), workers)
            >>> sorted([*group.rows(6, 1).tolist(), *group.rows(6, 1).tolist()])
            [0, 1, 2, 3, 4, 5]
        """
        size = integer("size", size, "Pass the number of examples.")
        batch = integer("batch", batch, "Pass how many each worker takes.")
        seed = check_seed(seed, 0)  # NumPy takes no negative one
        number = int(np.prod(self.workers.sizes)) * batch
        epochs, places = np.divmod(np.arange(number) + self.position, size)
        self.position += number
        rows = np.empty(number, np.int64)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            rows[now] = _order(size, seed, int(epoch))[places[now]]
        sharding = self._sharding()
        if sharding is None:
            return rows
        # The same devices lie along the batch, whatever the other axes of its arrays.
        parts = sharding.addressable_devices_indices_map((number,)).values()
        mine = {slices[0].indices(number)[:2] for slices in parts if slices}
        return np.concatenate([rows[slice(*ends)] for ends in sorted(mine)])

    def batch(self, tree: Tree) -> Tree:
        """The batch of all workers, from each process's own part.

        Args:
            tree: Arrays `[workers of this process * batch, ...]`, in the order of
                `rows`.

        Returns:
            Arrays `[n * batch, ...]` on the mesh; unchanged where workers are
            simulated.
        """
        sharding = self._sharding()
        if sharding is None:
            return tree
        make = functools.partial(jax.make_array_from_process_local_data, sharding)
        return jax.tree.map(lambda x: make(np.asarray(x)), tree)

    def close(self) -> None:
        """Wait until the last save is written. The end of a `with` block calls it."""
        self.manager.wait_until_finished()
        self.manager.close()

    def _sharding(self) -> NamedSharding | None:
        mesh = self.workers.mesh
        if mesh is None:
            return None
        names = [name for axis in self.workers.axes for name in check_axis_name(axis)]
        return NamedSharding(mesh, PartitionSpec(tuple(names)))


@functools.lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)

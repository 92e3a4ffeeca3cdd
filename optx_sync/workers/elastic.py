# SPDX-License-Identifier: Apache-2.0
"""`Group`: the processes of an elastic run, which continues from its last save."""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.comm.shards import Names
from optx_sync.core import forms
from optx_sync.core.checks import check_seed, integer
from optx_sync.core.trees import Tree, names_of
from optx_sync.state.leaves import is_key
from optx_sync.workers.checkpoints import Source
from optx_sync.workers.fingerprints import (
    Also,
    Damaged,
    Words,
    by_name,
    compare,
    said_of,
    sealed,
    unread,
    unsealed,
)
from optx_sync.workers.processes import TIMEOUT, Processes
from optx_sync.workers.workers import Workers

log: logging.Logger = logging.getLogger("optx_sync.elastic")

# The name under which Orbax keeps our own notes, beside the arrays.
_NOTES = "optx_sync"
# The last save, and how many groups have started from it; Orbax lists only folders.
_STARTS = "starts.json"


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
        timeout: How many seconds a process waits for the others: where the group
            begins, at the start, at each reading and at each save. A step waits without
            a limit.
        starts_without_save: So many groups may start in a row that are ended before
            they have saved; the next one ends the run, as whatever starts it would go
            on for ever. `None`: no limit. A file in the folder, `starts.json`, counts.
        also: Numbers of the program that are in no state and must be equal in all
            processes, by name, such as `{"rate": 0.1}`: scalars or arrays.

    Raises:
        ImportError: Orbax is not installed.
        TypeError, ValueError: As for `Workers`; `keep` or `starts_without_save` below
            1, `timeout` not above 0; processes that differ in `also`: it says who has
            which number.
        TimeoutError: From every method: not all processes came; it names them.

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
        timeout: float = TIMEOUT,
        starts_without_save: int | None = 3,
        also: Also | None = None,
    ):
        try:
            import orbax.checkpoint as ocp
            from etils import epath  # Orbax depends on it.
        except ImportError as error:
            raise ImportError(
                "oxs.elastic needs Orbax: pip install orbax-checkpoint."
            ) from error
        keep = integer("keep", keep, "Pass how many saves are kept.")
        if starts_without_save is not None:
            integer(
                "starts_without_save", starts_without_save,
                "Pass how many starts, or None.",
            )  # fmt: skip
        if not isinstance(workers, Workers):
            workers = Workers(jax.device_count(), workers, mesh=True)
        said = said_of(also)
        path = epath.Path(folder)
        self._processes: Processes = Processes(timeout)
        self._processes.require_equal(said, f"the begin of the group in {folder}")
        self.workers: Workers = workers
        self.position: int = 0
        self.notes: Any = None
        self._saved: int = -1
        self._starts: int | None = starts_without_save
        self.manager: Any = ocp.CheckpointManager(
            path if "://" in str(folder) else path.absolute(),
            item_handlers=ocp.StandardCheckpointHandler(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        # If one process has failed, the others may never come to the end of the group.
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"Group({str(self.manager.directory)!r}, {self.workers})"

    def restore_or_start(self, state: Tree | Callable[[], Tree]) -> Tree:
        """The state of the last save, for this group's workers; without one, the first.

        From a save by as many workers, every worker gets its own state back, to the
        bit. From another number, `Workers.resize` makes the state: the first workers
        continue, and joiners begin as it says; a part of the state that is no
        optimizer's and each worker's own, as this `state` gives it. Every process
        reads what all workers saved if their number has changed, and only its own
        workers' part if it has not.

        A save that cannot be read, or is not what was saved, is put aside as
        `<position>.damaged` once an earlier one has been restored. A warning says so;
        another one, where there is no save at all, in which folder the run begins.

        Args:
            state: One worker's, as for `Workers.start`: how a run begins. Or a function
                without arguments that returns it. It is run only at the start; a group
                that restores traces it for its shapes, and initialises no model, which
                takes seconds of compilation in every process but the first; unless
                workers join, and need a part of it.

        Returns:
            The state of all workers, placed. NNX objects are new ones.

        Raises:
            RuntimeError: `starts_without_save` groups have started since the last save.
            ValueError: The save is of another model or optimizer; there are saves,
                and all of them are damaged.
        """
        steps = sorted(self.manager.all_steps(), reverse=True)
        self._count_start(steps[0] if steps else None)
        if not steps:
            if not jax.process_index():
                where = self.manager.directory
                log.warning("There is no save in %s: the run begins afresh.", where)
            first = state() if forms.is_function(state) else state
            self._processes.wait("the start of the run")
            return self.workers.start(first)
        self.workers.expect(state)
        begun = functools.cache(state if forms.is_function(state) else lambda: state)
        damaged: dict[int, Damaged] = {}
        for step in steps:
            save = _Save(self.manager, step, self._processes)
            try:
                noted, save.words = save.agreed(save.notes)
                source = Source(self.manager.directory, step, save.read)
                restored = self.workers.restore(source, step, joiners=lambda _: begun())
            except Damaged as error:
                damaged[step] = error
                continue
            self._put_aside(damaged, step)
            self._saved, self.position, self.notes = step, step, noted[_NOTES]
            return restored
        errors = "; ".join(str(error) for error in damaged.values())
        raise ValueError(
            f"No save in {self.manager.directory} can be read: {errors}. Pass another "
            "folder to start afresh."
        )

    def _count_start(self, save: int | None) -> None:
        """Count a start from this save; refuse one too many, in all processes."""
        limit, file, fine = self._starts, self.manager.directory / _STARTS, True
        if limit is None:
            return
        if not jax.process_index():
            try:
                before = _starts_from(save, file)
                fine = before < limit
                if fine:
                    file.write_text(json.dumps([save, before + 1]))
                if fine and before:
                    say = "Start %d of %d without a new save."
                    log.warning(say, before + 1, limit)
            except Exception as error:  # The others wait: what any file system raises.
                log.warning("The run's starts are not counted: %s", error)
        if not self._processes.agree(fine, "the start from the last save"):
            where = "the begin" if save is None else f"the save at position {save}"
            raise RuntimeError(
                f"The run has started {limit} times from {where}, and each time "
                "something ended it before a new save. The processes' logs say what: "
                f"mend that, or save more often. Then delete {file}, or pass a larger "
                "starts_without_save."
            )

    def _put_aside(self, damaged: dict[int, Damaged], taken: int) -> None:
        """Rename damaged saves: their positions will be saved again."""
        if not damaged:
            return
        if not jax.process_index():
            for step, error in damaged.items():
                there = self.manager.directory / f"{step}.damaged"
                if there.exists():
                    there.rmtree()
                (self.manager.directory / str(step)).rename(there)
                say = "%s. It is now %s, and the run goes on from position %d."
                log.warning(say, error, there.name, taken)
        self._processes.wait("where damaged saves have been put aside")
        self.manager.reload()

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
                f"The run has been saved at position {self._saved} already. Take "
                "examples between two saves by group.rows, or count your own, "
                "group.position += len(batch)."
            )
        form, arrays = forms.split(state)
        tree: dict[str, Tree] = {}
        for path, x in zip(form.paths(), arrays, strict=True):
            *inner, last = names_of(path) or ("state",)
            node = tree
            for name in inner:
                node = node.setdefault(name, {})
            node[last] = x
        # Who still writes the last save is missing here, and not in Orbax, which waits
        # for it without a limit.
        self.manager.wait_until_finished()
        self._processes.wait(f"the save at position {self.position}")
        self.manager.save(
            self.position,
            args=ocp.args.StandardSave(tree),
            custom_metadata=sealed({_NOTES: notes}, by_name(tree)),
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
        if self._starts is not None and not jax.process_index():
            # It has ended by itself. What cannot be deleted was not counted either.
            with contextlib.suppress(Exception):
                (self.manager.directory / _STARTS).unlink(missing_ok=True)
        self.manager.close()

    def _sharding(self) -> NamedSharding | None:
        mesh = self.workers.mesh
        if mesh is None:
            return None
        names = [name for axis in self.workers.axes for name in check_axis_name(axis)]
        return NamedSharding(mesh, PartitionSpec(tuple(names)))


class _Save:
    """A save as `Workers.restore` reads it: by all processes, or by none of them.

    (Orbax's manager would leave the others waiting for a process whose part is
    damaged.)
    """

    def __init__(self, manager: Any, step: int, processes: Processes):
        self.path: Any = manager.directory / str(step)
        self.words: dict[Names, Words] = {}
        self._manager, self._step, self._processes = manager, step, processes

    def notes(self) -> tuple[dict[str, Tree], dict[Names, Words]]:
        """The notes and the words of this save, which names the arrays alike."""
        metadata = self._manager.metadata(self._step)
        noted, words = unsealed(self.path, metadata.custom_metadata)
        there = by_name(metadata.item_metadata.tree)
        for name in {**words, **there}:
            shape = words[name][0] if name in words else None
            # Orbax counts the data of random keys among the dimensions.
            if shape is None or [*there[name].shape[: len(shape)]] != shape:
                what = ".".join(name)
                raise Damaged(f"{self.path} holds another {what} than was saved")
        return noted, words

    def read(self, folder: Any, shapes: Tree) -> Tree:
        """The arrays, compared as they were saved, and then in the dtypes asked for."""
        import orbax.checkpoint as ocp

        template = by_name(shapes)
        # What the state asks for; a save may hold more.
        shape = jax.ShapeDtypeStruct
        asked = {name: x for name, x in template.items() if isinstance(x, shape)}
        words = {name: self.words[name] for name in asked}
        for name, x in asked.items():
            dtype = words[name][1]
            if not (is_key(x) or dtype.startswith("key")):
                template[name] = x.update(dtype=dtype)
        tree = jax.tree.structure(shapes).unflatten(template.values())
        as_saved = ocp.args.StandardRestore(tree)
        read = ocp.StandardCheckpointHandler().restore
        found = self.agreed(lambda: by_name(read(folder, args=as_saved)))
        mine = {name: found[name] for name in asked}
        self.agreed(lambda: compare(self.path, words, mine))
        for name, x in asked.items():
            if found[name].dtype != x.dtype:
                found[name] = found[name].astype(x.dtype)
        return [*found.values()]

    def agreed(self, read: Callable[[], Tree]) -> Tree:
        """What `read` returns, if it can be read in all processes."""
        found, error = None, None
        try:
            found = read()
        except Exception as raised:  # Orbax raises various errors for broken files.
            error = raised
        if self._processes.agree(
            error is None, f"the end of the reading of {self.path}"
        ):
            return found
        if isinstance(error, Damaged):
            raise error
        why = error or "another process cannot read its part"
        raise unread(self.path, why) from error


def _starts_from(save: int | None, file: Any) -> int:
    """How many groups have started from this save."""
    if not file.exists():
        return 0
    try:
        last, starts = json.loads(file.read_text())
    except ValueError:  # Whoever wrote it was killed.
        return 0
    return starts if last == save else 0


@functools.lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)

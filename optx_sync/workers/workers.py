# SPDX-License-Identifier: Apache-2.0
"""`Workers`: run a program that is written for one device on many workers."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from optx_sync.comm import shards
from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.core import forms
from optx_sync.core.checks import integer, one_of, shows_call
from optx_sync.core.signatures import readable as _readable
from optx_sync.core.trees import (
    KeyPath,
    Tree,
    brief,
    is_inexact,
    one_or_several,
    path_name,
    users_level,
)
from optx_sync.state import fields, held
from optx_sync.state.leaves import is_key, is_raw_key
from optx_sync.state.metrics import metrics
from optx_sync.workers import checkpoints
from optx_sync.workers import mapped as placing
from optx_sync.workers.comparison import Worker, differing, differing_numbers
from optx_sync.workers.fingerprints import Also, said_of
from optx_sync.workers.joiners import Given
from optx_sync.workers.layout import Layout, Levels, One, check_one_number, of_one
from optx_sync.workers.processes import TIMEOUT, Processes
from optx_sync.workers.resize import Resize
from optx_sync.workers.step import Step


class Workers:
    """The workers of a run: how many, along which axes, simulated or on a mesh.

    You write a step for one worker, and its optimizer says how workers agree. `start`
    makes the state that all of them start from, `step` compiles the step for all, and
    `center` gives the result to evaluate and export. The classes of optimizer states
    declare which fields all workers share: counters and center.

    A state is any tree: `(params, opt_state)`, a `TrainState`, a dict, Equinox modules,
    or the modules and optimizers of Flax NNX, which a step may change in place.
    Parameters may themselves be a list or a tuple of layers: a tuple with an
    optimizer's state in it is one of a state's parts. Parameters that are a tuple, with
    no optimizer's state beside them, stand in one: `(params,)`.

    Args:
        n: The number of workers; for several axes a tuple, the outermost first.
        axis_name: The axis name in the optimizer, or a tuple of names. With one
            number and several names, one worker axis lies along all of them.
        mesh: `None` simulates the workers on one device. On a mesh each worker has
            a position along the axis: a `jax.sharding.Mesh`, or `True` for a mesh
            of the available devices. Of a `jax.sharding.AbstractMesh((1000,),
            ("workers",))`, which has no devices, `oxs.audit` says what a step sends.
        specs: On a mesh with further axes, how one worker's parameters are sharded
            over these: a tree of `PartitionSpec` like the parameters, or like its
            first levels; with Flax, `nnx.get_partition_spec(nnx.state(model,
            nnx.Param))`, or `nn.get_partition_spec(variables)["params"]`, whether the
            parameters are in Linen's boxes or out of them, `nn.unbox`. State that
            belongs to a parameter is sharded like it, from `start` on, and in a meeting
            each device sends its own shards, whatever the exchange. `None`: shards stay
            as `start` finds them, the compiler lays out what a step makes, and
            exchanges with codes code whole arrays on each device.
        own_axes: Of several axes those that no wrapper names and of which the step
            itself takes care. Others that no wrapper names are refused where some other
            one is named: along them parameters would drift apart.

    Raises:
        TypeError: A bad number, name, mesh or spec.
        ValueError: A mesh without such an axis, or with another number of positions
            along it; specs over another axis; in `start`, specs with other names.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> workers = oxs.Workers(4, "workers")
        >>> tx = oxs.local_sgd(optax.sgd(0.5), "workers", communication_period=2)
        >>> params = {"w": jnp.zeros(())}
        >>> params, state = workers.start((params, tx.init(params)))
        >>> @workers.step(state=2)
        ... def step(params, state, batch):
        ...     loss_of = lambda params: jnp.mean((batch - params["w"]) ** 2)
        ...     loss, grads = jax.value_and_grad(loss_of)(params)
        ...     params, state = oxs.apply_gradients(tx, grads, state, params)
        ...     return params, state, loss
        >>> for _ in range(20):
        ...     params, state, loss = step(params, state, jnp.arange(8.0))
        >>> loss, workers.center((params, state))
        (Array(0.25, dtype=float32), {'w': Array(3.5, dtype=float32)})
    """

    def __init__(
        self,
        n: int | Sequence[int],
        axis_name: AxisName,
        *,
        mesh: Mesh | AbstractMesh | bool | None = None,
        specs: Tree = None,
        own_axes: tuple[str, ...] = (),
    ):
        names, several = check_axis_name(axis_name), isinstance(n, Sequence)
        self.sizes: tuple[int, ...] = _sizes(n)
        # An axis is one name, or several names along which one number of workers lies.
        one: AxisName = one_or_several(names)
        self.axes: tuple[AxisName, ...] = names if several else (one,)
        self._mesh, self._specs = mesh or None, specs
        self._own_axes: tuple[str, ...] = own_axes
        self._started: tuple[forms.Form, list[Tree]] | None = None
        if len(self.sizes) != len(self.axes):
            raise ValueError(
                f"Workers has {len(self.sizes)} numbers and {len(self.axes)} axes: "
                f"{self.sizes} and {self.axes}. Give one for each, as in "
                "oxs.Workers((2, 4), ('pods', 'chips'))."
            )
        if not isinstance(mesh, bool | None):
            self._check_mesh(mesh)
            _ = self._layout  # checks specs

    def _check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        for size, axis in zip(self.sizes, self.axes, strict=True):
            positions = placing.size_along(mesh, check_axis_name(axis))
            placing.check_number(f"Workers are {size}", size, positions, axis)
        abstract = isinstance(mesh, AbstractMesh)
        if abstract and mesh.size > math.prod(self.sizes):
            raise ValueError(
                "An abstract mesh has the workers' axes alone: what the compiler sends "
                "along others, only a compiled program says. Got the axes "
                f"{dict(mesh.shape)} for {self.axes}. Leave the others out, or let CPU "
                "devices stand for all, before the first array: "
                f"jax.config.update('jax_num_cpu_devices', {mesh.size})."
            )
        explicit = [shards.are_explicit(mesh, check_axis_name(x)) for x in self.axes]
        if len(self.axes) > 1 and any(explicit):
            raise ValueError(
                "Along several axes of type Explicit JAX gathers each worker's arrays "
                f"in every step. Make the mesh with axis_types=(AxisType.Auto,) * "
                f"{len(mesh.axis_names)}, or pass mesh=True."
            )

    def __repr__(self) -> str:
        n, axis = map(one_or_several, (self.sizes, self.axes))
        return f"Workers({n!r}, {axis!r}, mesh={self._mesh})"

    @functools.cached_property
    def mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh, or `None` if the workers are simulated.

        Example:
            >>> import optx_sync as oxs
            >>> oxs.Workers(8, "workers").mesh is None
            True
        """
        if not isinstance(self._mesh, bool):
            return self._mesh
        devices, needed = jax.devices(), math.prod(self.sizes)
        names = [axis for axis in self.axes if isinstance(axis, str)]
        if len(devices) < needed or len(names) < len(self.axes):
            raise ValueError(
                f"mesh=True makes a mesh of {needed} devices along {self.axes}; there "
                f"are {len(devices)}. Simulate with mesh=None, pass a mesh of your own,"
                " or let CPU devices stand for others, before the first array: "
                f"jax.config.update('jax_num_cpu_devices', {needed})."
            )
        kinds = (AxisType.Auto,) * len(self.sizes)
        return jax.make_mesh(self.sizes, names, kinds, devices=devices[:needed])

    @functools.cached_property
    def _layout(self) -> Layout:
        layout, specs = Layout(self.sizes, self.axes, self.mesh), self._specs
        if specs is None or layout.mesh is None:
            return layout
        named = shards.specs_by_name(specs, layout.mesh.shape, layout.names)
        return layout._replace(specs=named)

    def _all(
        self, state: Tree, where: str
    ) -> tuple[forms.Form, list[jax.Array], Levels]:
        """(the form, the arrays, along what they lie) of a state of all workers."""
        form, arrays = _split(state, where)
        return form, arrays, self._layout.check(held.leaves(form, arrays), where)

    @shows_call("workers.start((params, state))")
    def start(self, state: Tree) -> Tree:
        """The state that all workers start from: copies of one worker's, placed.

        Arrays are stacked, `[n, ...]`, and on a mesh placed along its axis, except for
        what workers share: counters and center. Of a random key, each worker gets its
        own, `jax.random.fold_in(key, i)`. Python numbers become arrays (except those of
        Equinox modules); functions, flags and settings are left alone. Shards over
        other axes of the mesh stay.

        Args:
            state: One worker's: any tree, as described above.

        Returns:
            The same tree, for all workers. The argument stays as it is.

        Raises:
            ValueError: A state that was started before; a center rule's in a dict, as
                `nnx.split` makes it; a center that has made no step and is not at the
                parameters, as where pretrained ones have been put in place after
                `tx.init`; arrays that are sharded over the workers' axis, or over
                another mesh.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> import optx_sync as oxs
            >>> state = {"w": jnp.zeros(3), "key": jax.random.key(0), "name": "mine"}
            >>> state = oxs.Workers(4, "workers").start(state)
            >>> state["w"].shape, state["key"].shape, state["name"]
            ((4, 3), (4,), 'mine')
        """
        form, arrays = self._one(state)
        _refuse_other_parameters(form, arrays)
        placing.check_threads(self.mesh, stacklevel=4)  # one shows a call
        arrays = self._layout.start(form, arrays)
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays
        ]
        self._started = form, shapes
        return form.merge(arrays)

    def expect(self, state: Tree | Callable[[], Tree]) -> Tree:
        """Declare what a checkpoint holds, for `restore`, without starting from it.

        Like `start`, but on shapes alone: nothing is computed, placed or communicated,
        and it needs no memory beside that of the restored state.

        Args:
            state: One worker's, as for `start`, or a function without arguments that
                returns it: `jax.eval_shape` traces it, and nothing is initialised.

        Returns:
            What `start` would return, with a `jax.ShapeDtypeStruct` for each array:
            its `sharding` is where the array belongs.

        Raises:
            ValueError: As `start`.

        Example:
            >>> import tempfile, jax.numpy as jnp, orbax.checkpoint as ocp
            >>> import optx_sync as oxs
            >>> workers, first = oxs.Workers(4, "workers"), {"w": jnp.ones(3)}
            >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
            ...     saved = ocp.args.StandardSave(workers.start(first))
            ...     _ = manager.save(1, args=saved)
            ...     manager.wait_until_finished()
            ...     again = oxs.Workers(4, "workers")
            ...     _ = again.expect(lambda: {"w": jnp.ones(3)})
            ...     again.restore(manager)["w"].shape
            (4, 3)
        """
        if forms.is_function(state):
            state = forms.shapes_of(state)
        form, arrays = self._one(state)
        shapes = self._layout.shapes(form, arrays)
        self._started = form, shapes
        return form.merge(shapes)

    def _one(self, state: Tree) -> tuple[forms.Form, list[Tree]]:
        """(the form, the arrays) of one worker's state that was not started before."""
        form, arrays = forms.split(forms.with_arrays(state))
        _refuse_taken_apart(form)
        self._layout.check_specs(form, arrays)
        _warn_of_raw_keys(form, arrays)
        before, shapes = self._started or (None, [])
        if form == before and [x.shape for x in arrays] == [x.shape for x in shapes]:
            raise ValueError(
                "This state has been started already: it has the workers' axes in "
                "front. Go on with it as it is."
            )
        return form, arrays

    @shows_call("workers.step(train_step, state=2)")
    def step(
        self,
        fun: Callable[..., Any] | None = None,
        *,
        state: int = 1,
        split: Any = True,
        average: bool = True,
        donate: bool = True,
    ) -> Any:
        """Compile one worker's step for all workers; a decorator.

        The first `state` arguments are states from `start`. `fun` returns them first,
        followed by any other results. It may change NNX objects in place and need not
        return them: the caller's objects change. The state's buffers are donated.

        Other arguments are whole batches `[batch, ...]`, split along axis 0 among the
        workers. A scalar is the same for all; from one random key each worker gets its
        own, as by `keys`. Flags and functions are static. Other results are averaged
        over the workers, integers and flags too, in float32. On a mesh a second
        program does that after the step, so the step itself sends nothing where its
        optimizer does not.

        A step with center rules has a program for each kind of step: one in which
        nobody meets, and one for each part that does. They have no conditional, so a
        quiet step sends nothing and XLA may hide what the others send. Which one comes
        next is counted here, or read from the state's counters where the state is not
        the one that the last step returned. A rule whose counters do not come back as
        it made them (two updates in one step, a loop over steps), or with which there
        would be more than nine programs, has conditionals.

        The first call says in the log `optx_sync.workers`, at level INFO, how many
        workers there are, on which devices, and what a step and a round send.

        Args:
            fun: `(*state, *batches, **batches)` of one worker.
            state: How many arguments are state.
            split: `True` splits along axis 0; `False`: the batch is split already,
                `[n, ...]`; `None` gives the whole batch to each worker. A tuple has
                one entry for each batch; keywords are then split. A list of numbers is
                refused: in JAX each of them is a scalar, the same for all.
            average: `False` keeps each worker's own results, `[n, ...]`, and sends
                nothing for them: for example for predictions.
            donate: Whether the new state reuses the old state's buffers.

        Returns:
            The step for all workers. Its `lower`, as that of `jax.jit`, is of all kinds
            of step in one program, with conditionals. `lower_kinds` gives each kind's
            program by what meets in it: of one center rule `(-1,)` where nobody does,
            `(k,)` where part k does.

        Raises:
            ValueError: A batch that cannot be split evenly; a state that comes back
                in another form; for the reasons of `tx`.
            TypeError: Too few arguments; results that have no mean; another `split`.

        Example:
            >>> import jax.numpy as jnp
            >>> import optx_sync as oxs
            >>> workers = oxs.Workers(4, "workers")
            >>> @workers.step
            ... def step(total, x):
            ...     return total + x.sum(), x.mean()
            >>> total, mean = step(workers.start(0.0), jnp.arange(8.0))
            >>> total, mean
            (Array([ 1.,  5.,  9., 13.], dtype=float32), Array(3.5, dtype=float32))
        """
        if fun is None:
            return functools.partial(
                self.step, state=state, split=split, average=average, donate=donate
            )
        mend = "Pass how many of the first arguments are state."
        state = integer("state", state, mend)
        for entry in split if isinstance(split, tuple) else (split,):
            if not (entry is None or isinstance(entry, bool)):
                raise TypeError(
                    f"split is True, False or None, or a tuple of them; got {entry!r}."
                )
        own = self._own_axes
        return Step(lambda: self._layout, fun, state, split, average, donate, own)

    def first(self, state: Tree) -> Tree:
        """The first worker's state, without the workers' axes.

        Example:
            >>> import jax.numpy as jnp
            >>> import optx_sync as oxs
            >>> workers = oxs.Workers(4, "workers")
            >>> workers.first(workers.start(jnp.ones(2)))
            Array([1., 1.], dtype=float32)
        """
        form, arrays, levels = self._all(state, "workers.first")
        return form.merge(of_one(arrays, levels, "first"))

    def center(self, state: Tree, *, statistics: One = "mean") -> Tree:
        """The parameters or model to evaluate and export, in one worker's shape.

        Parameters are those of the center, in their own dtypes. Without a center
        (replicas, `gossip`) they are the workers' mean; the mean of equal parameters
        equals them to the bit. Other arrays of each worker, such as BatchNorm's
        statistics, are averaged as well; integers and keys are the first worker's.

        Warns where workers have made steps and a part of the center has met in none: it
        is then as they began. Right after `start` that is what it should be.

        Args:
            state: A state of all workers.
            statistics: `"mean"`; or `"first"`, the first worker's arrays wherever
                no center holds them.

        Returns:
            From a tuple the part with the parameters or the model, the first one where
                there is no center, and a tuple of them where several have one. From a
                `TrainState`, a dict and the like all of it, with the center as
                `params` or `model`.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> import optx_sync as oxs
            >>> workers = oxs.Workers(4, "workers")
            >>> tx = oxs.diloco(optax.adam(0.1), "workers")
            >>> params = {"w": jnp.ones(2)}
            >>> workers.center(workers.start((params, tx.init(params))))
            {'w': Array([1., 1.], dtype=float32)}
        """
        one_of("statistics", statistics, One)
        form, arrays, levels = self._all(state, "workers.center")
        _warn_of_differences(form, arrays)
        centers = held.centers(form.bare(arrays))
        if any(node.is_older_than_training() for node in centers):
            warnings.warn(
                "The workers have made steps, and not all of the center has met yet: "
                "it is, or a part of it, as the workers began. They meet after "
                "communication_period steps; pass a shorter one, or ask for the center "
                "later.",
                stacklevel=2,
            )
        part, places = forms.split(held.to_show(form))
        places = tuple(map(int, places))
        return part.merge(_center(form, levels, statistics, places, arrays))

    def metrics(self, state: Tree) -> Any:
        """Metrics of a state for a log, as from `oxs.metrics`, distances included.

        Of several networks each has its own: `workers.metrics(state["critic"])`.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> import optx_sync as oxs
            >>> workers = oxs.Workers(4, "workers")
            >>> tx = oxs.diloco(optax.adam(0.1), "workers")
            >>> state = workers.start((jnp.ones(2), tx.init(jnp.ones(2))))
            >>> workers.metrics(state).distance
            Array([0., 0., 0., 0.], dtype=float32)
        """
        form, arrays = forms.split(state)
        params = (found.tree(arrays) for found in held.held(form))
        return metrics(form.bare(arrays), next(params, None))

    def fingerprint(
        self, state: Tree, *, also: Also | None = None
    ) -> dict[Worker, str]:
        """Which workers differ in arrays that should be equal, and in which one first.

        Compares as `oxs.fingerprint` does: the value of more than half of the workers
        is right, the data is read once, and 8 bytes per array and worker are sent.
        Compared are a center with its outer state and counters, which on a mesh lie on
        every device; and, along the axis of `cross_shard` and other replicas, the
        parameters and the state of Optax's and this package's optimizers. Not compared
        is what follows from a replica's own gradient: sums of `optax.MultiSteps`, and
        in a chain the links before `all_reduce_grads`. (Of a link with a state before
        `cross_shard` nothing tells that; use `all_reduce_grads`.) Run it every few
        hundred steps, and after `restore`.

        Args:
            state: A state of all workers.
            also: Numbers of the program that are in no state, by name, such as
                `{"rate": 0.1}`: what each process has is compared for its workers.

        Returns:
            For each worker that differs, the path in `state` of the first array
                that does, or `also['rate']`; empty if all agree. A worker is given by
                its number, or with several axes by its position along each.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> import optx_sync as oxs
            >>> workers = oxs.Workers(4, "data")
            >>> tx = oxs.cross_shard(optax.adam(0.1), "data")
            >>> params, state = workers.start((jnp.ones(3), tx.init(jnp.ones(3))))
            >>> workers.fingerprint((params.at[2, 1].set(1.5), state))
            {2: '[0]'}
        """
        said = said_of(also)
        form, arrays, _ = self._all(state, "workers.fingerprint")
        told = Processes(TIMEOUT).told(said, "workers.fingerprint") if said else []
        numbers = differing_numbers(self._layout, told)
        return {**numbers, **differing(self._layout, form, arrays)}

    def resize(
        self,
        state: Tree,
        n: int | Sequence[int] | None = None,
        *,
        joiners: Given = None,
        strict: bool = False,
    ) -> Tree:
        """Continue with another number of workers: the state for `n` of them.

        `oxs.by_hand.resize` describes what becomes of the optimizer's state; without a
        center, joiners get the mean of the parameters. Survivors keep what is beside
        these. Of it joiners get what is equal on all workers, the mean of statistics
        that are `nnx.BatchStat`, and a random key of their own; what else differs
        between workers, a replay buffer say, only you know: `joiners` says it. Continue
        with `oxs.Workers(n, axis_name, mesh=True)`: on a mesh, the state lies on its
        first positions.

        Args:
            state: A state of all workers, of whatever number.
            n: How many continue; for several axes a tuple, whose first number may
                change. `None`: as many as these workers are.
            joiners: What joiners have that is each worker's own. `"mean"` or
                `"first"`, as for `oxs.by_hand.resize`, of all of it; of integers the
                mean is the largest. Or, of what is beside parameters and optimizer's
                state, one worker's state in the form that `start` takes, or a function
                that returns that of a joiner, from its number.
            strict: Refuse a resize in the middle of a round that would lose
                something.

        Returns:
            The state of `n` workers, placed.

        Raises:
            TypeError: A number that is no integer.
            ValueError: More workers than the mesh has positions; workers join, and
                `joiners` does not say with what; with `strict` a state in the middle of
                a round.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> import optx_sync as oxs
            >>> workers = oxs.Workers(8, "workers")
            >>> tx = oxs.diloco(optax.adam(0.1), "workers")
            >>> params, state = workers.start((jnp.ones(3), tx.init(jnp.ones(3))))
            >>> params, state = workers.resize((params, state), 6)
            >>> params.shape, state.center.shape
            ((6, 3), (3,))
        """
        whose: Any = joiners if isinstance(joiners, str) else "mean"
        one_of("joiners", whose, Literal["mean", "first"])
        to = self if n is None else self._of(n)
        form, arrays = _split(state, "workers.resize")
        places = None
        if to._started and to._started[0] == form:
            places = [x.sharding for x in to._started[1]]
        how = Resize(to.sizes[0], len(to.sizes), whose, strict)
        return form.merge(to._layout.resize(form, arrays, how, places, joiners))

    def _of(self, n: int | Sequence[int]) -> "Workers":
        """Workers of another number along the first axis, on the mesh of these."""
        sizes = _sizes(n if isinstance(n, Sequence) else (n, *self.sizes[1:]))
        check_one_number(self.sizes, sizes)
        names = [axis for axis in self.axes if isinstance(axis, str)]
        mesh = self._mesh
        if isinstance(mesh, Mesh):
            if not names or sizes[0] > self.sizes[0]:
                raise ValueError(
                    f"The mesh has not {sizes[0]} positions along {self.axes[0]!r}. "
                    "Workers of another mesh take this state: their resize(state)."
                )
            place = mesh.axis_names.index(names[0])
            devices = mesh.devices.take(range(sizes[0]), axis=place)
            mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        own = self._own_axes
        return Workers(sizes, tuple(names), mesh=mesh, specs=self._specs, own_axes=own)

    def restore(
        self,
        manager: Any,
        step: int | None = None,
        like: Tree = None,
        *,
        joiners: Given = None,
        timeout: float = TIMEOUT,
    ) -> Tree:
        """Read a state from a checkpoint of any number of workers, resized to these.

        The checkpoint holds the state as its own library saves it, whatever mesh or
        devices it lay on: `ocp.args.StandardSave(state)`, `StandardSave(nnx.state((
        model, optimizer)))`, `StandardSave(eqx.filter(state, eqx.is_array))`; or, with
        Orbax v1, `checkpointer.save(step, state)`. Several processes call it together.

        Args:
            manager: An Orbax `CheckpointManager`; or a `Checkpointer` of its v1,
                `from orbax.checkpoint import v1 as ocp; ocp.training.Checkpointer`.
            step: Which checkpoint; `None` for the latest.
            like: A started state of that form; `None`: the last one of `start`, or
                the one given to `expect`.
            joiners: As for `resize`, where these are more workers.
            timeout: Of several processes, how many seconds one waits until all have
                come, and until all have read their part.

        Returns:
            The state, placed. NNX objects are new ones.

        Raises:
            TypeError: A folder in place of the manager.
            TimeoutError: Processes did not come; it names them.
            ValueError: No checkpoint; nothing was started; the checkpoint of
                another state.

        Example:
            >>> import tempfile, jax.numpy as jnp, orbax.checkpoint as ocp
            >>> import optx_sync as oxs
            >>> eight, six = oxs.Workers(8, "workers"), oxs.Workers(6, "workers")
            >>> state = eight.start({"w": jnp.ones(3)})
            >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
            ...     _ = manager.save(1, args=ocp.args.StandardSave(state))
            ...     manager.wait_until_finished()
            ...     _ = six.start({"w": jnp.zeros(3)})
            ...     six.restore(manager)["w"].shape
            (6, 3)
        """
        self._layout.check_devices("workers.restore")
        source = checkpoints.source(manager, timeout)
        step = source.latest if step is None else step
        started = self._started if like is None else forms.split(like)
        if started is None:
            raise ValueError(
                "restore needs to know what the checkpoint holds. Start first, "
                "state = workers.start(state), or pass a started state as like=."
            )
        form, arrays = started
        folder, saved, treedef = checkpoints.saved(source, step)
        names = checkpoints.saved_names(form, saved)
        checkpoints.check_like(saved, names, arrays, step)
        leaves = held.leaves(form, [saved[name] for name in names])
        n, *_ = self._layout.numbers(leaves)
        template = dict(saved)
        for name, x in zip(names, arrays, strict=True):
            shape = saved[name].shape[: x.ndim]  # without the data of a random key
            # Of other workers, or of another number of devices inside of each.
            fits = n == self.sizes[0] and shape == x.shape
            place = x.sharding if fits else self._layout.whole
            template[name] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=place)
        shapes = treedef.unflatten(template.values())
        leaves = jax.tree.leaves(source.read(folder, shapes))
        restored = dict(zip(saved, leaves, strict=True))
        state = form.merge(restored[name] for name in names)
        state = self.resize(state, joiners=joiners)
        for name, x, like in zip(names, arrays, forms.split(state)[1], strict=True):
            if x.shape != like.shape:
                raise ValueError(
                    f"The checkpoint of step {step} is of another model: its "
                    f"{'.'.join(name)} is {like.shape} of these workers, not {x.shape}."
                )
        return state

    def keys(self, key: jax.Array) -> jax.Array:
        """Random keys, one for each worker: `jax.random.fold_in(key, i)`.

        `start` makes such keys of a key in a state; a step, of a key among its batches.

        Example:
            >>> import jax
            >>> import optx_sync as oxs
            >>> oxs.Workers(4, "workers").keys(jax.random.key(0)).shape
            (4,)
        """
        if not is_key(key):
            raise TypeError(
                f"keys needs a random key, as jax.random.key(0); got {brief(key)}. Make"
                " one of a raw key: jax.random.wrap_key_data(key)."
            )
        form, arrays = forms.split(key)
        return form.merge(self._layout.start(form, arrays))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _center(
    form: forms.Form,
    levels: Levels,
    statistics: One,
    places: tuple[int, ...],
    arrays: list[jax.Array],
) -> list[jax.Array]:
    """Some of one worker's arrays, with the center as its parameters."""
    one = of_one(arrays, levels, statistics)
    # A center in pieces is put together from the pieces of all workers.
    outermost = form.bare(of_one(arrays, levels, "first", outermost=1))
    pairs = zip(held.centers(outermost), held.centers(form.bare(one)), strict=True)
    # That of one worker alone, `axis_name=None`, lies with each worker.
    centers = (node if fields.is_level(node) else own for node, own in pairs)
    for node, params in zip(centers, held.held(form), strict=True):
        params.put(one, node.center_params(params.tree(one)))
    return [one[place] for place in places]


def _sizes(n: int | Sequence[int]) -> tuple[int, ...]:
    mend = "Pass the number of workers; a tuple with one for each of several axes."
    numbers = n if isinstance(n, Sequence) else (n,)
    return tuple(integer("n", number, mend) for number in numbers)


def _split(state: Tree, where: str) -> tuple[forms.Form, list[Tree]]:
    """The form and the arrays of a state that has some."""
    form, arrays = forms.split(state)
    if not arrays:
        raise ValueError(
            f"{where} needs a state of all workers; in this {type(state).__name__} "
            "there is no array. Pass what start or a step has returned."
        )
    return form, arrays


def _refuse_taken_apart(form: forms.Form) -> None:
    """Refuse a dict of what a center rule keeps, as `nnx.split` makes of its state."""
    found: dict[KeyPath, set[str]] = {}
    for path in form.paths():
        for depth, entry in enumerate(path):
            if isinstance(entry, jax.tree_util.DictKey):
                found.setdefault(path[:depth], set()).add(entry.key)
    for path, names in found.items():
        if names >= {"local_step", "steps_since_round", "global_step"}:
            raise ValueError(
                f"The state {path_name(path)} is a center rule's, taken apart into a "
                "dict, as by nnx.split of an nnx.Optimizer: nothing says what workers "
                "share, and each would have a center of its own. Start the objects, "
                "workers.start((model, optimizer)); or split the model alone, graph, "
                "params = nnx.split(model), and start (params, tx.init(params))."
            )


def _refuse_other_parameters(form: forms.Form, arrays: Sequence[Tree]) -> None:
    """Refuse a new center of other parameters, to which the first round would pull."""
    if not all(isinstance(x, jax.Array | np.ndarray) for x in arrays):
        return  # shapes
    copies = fields.nodes_of(form.bare(arrays), fields.has_copy)
    new = [not np.any(jax.device_get(node.global_step)) for node in copies]
    if not any(new) or not all(getattr(x, "is_fully_addressable", 1) for x in arrays):
        return
    try:
        found = held.held(form, fields.has_copy)
    except ValueError:
        return  # Parameters are started by themselves.
    for node, one, is_new in zip(copies, found, new, strict=True):
        steps = getattr(node, "local_step", node.global_step)
        is_new = is_new and not np.any(jax.device_get(steps))
        if is_new and not bool(_are_equal(fields.copy_of(node), one.tree(arrays))):
            raise ValueError(
                f"The copy of the parameters in this {type(node).__name__} has made no "
                "step, and is not at the parameters: these were put in place after "
                "tx.init, such as pretrained ones, and the first round would pull "
                "workers back to the old ones. Make the state of the parameters that "
                "training starts from: opt_state = tx.init(params), TrainState.create("
                "params=params, ...), or nnx.Optimizer(model, tx, ...) behind "
                "nnx.update(model, ...)."
            )


@jax.jit
def _are_equal(tree: Tree, other: Tree) -> jax.Array:
    """Whether all numbers are equal, of a NaN, too."""
    equal = [
        jnp.array_equal(x.astype(y.dtype), y, equal_nan=True)
        for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    ]
    return jnp.all(jnp.asarray(equal))


def _warn_of_raw_keys(form: forms.Form, arrays: Sequence[Tree]) -> None:
    """Warn of a probable raw random key, which all workers would share."""
    for path, x in zip(form.paths(), arrays, strict=True):
        if is_raw_key(x):
            warnings.warn(
                f"The state {path_name(path)} looks like a raw random key, "
                "jax.random.PRNGKey: all workers would draw the same numbers. Take "
                "jax.random.key(0), or jax.random.wrap_key_data(key).",
                stacklevel=users_level(),
            )


@jax.jit
def _differ_and_nan(arrays: list[jax.Array]) -> jax.Array:
    """bool[2], whether each of these arrays differs between workers; is all NaN."""
    nan = jnp.stack([jnp.isnan(x).all() for x in arrays]).all()
    differ = jnp.stack([(x != x[:1]).any() for x in arrays]).all()
    return jnp.stack([differ, nan])


def _warn_of_differences(form: forms.Form, arrays: Sequence[Tree]) -> None:
    """Warn if workers have drifted apart and nothing in the state makes them meet."""
    state, leaves = form.bare(arrays), held.leaves(form, arrays)
    own = (leaf.x for leaf in held.params(state, leaves).values())
    params = [x for x in own if is_inexact(x.dtype)]
    if not params or any(leaf.levels for leaf in leaves):
        return
    differ, nan = jax.device_get(_differ_and_nan(params))
    if nan:
        warnings.warn(
            "All parameters of all workers are NaN: training has diverged. Go back to "
            "a checkpoint, with a smaller learning rate say; a wrapper leaves broken "
            "gradients out where it has drop_nonfinite=True.",
            stacklevel=3,
        )
    elif differ:
        warnings.warn(
            "All parameters differ from worker to worker, and this state holds no "
            "center. Pass the optimizer's state with them, (params, opt_state); if it "
            "is no wrapper's of this package, workers train alone and never meet.",
            stacklevel=3,
        )


_readable(globals())

# SPDX-License-Identifier: Apache-2.0
"""`Workers`: a program written for one device, for many workers."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optx_sync import forms
from optx_sync.checks import integer, one_of
from optx_sync.comm.collectives import AxisName, check_axis_name
from optx_sync.metrics import metrics
from optx_sync.placement import fields
from optx_sync.placement import workers as placing
from optx_sync.placement.axes import in_pieces, is_key, tree_axes
from optx_sync.placement.resize import resize_tree
from optx_sync.trees import (
    Tree,
    at_least_float32,
    check_arrays,
    first_worker,
    is_inexact,
    is_masked,
    path_name,
)

Statistics = Literal["mean", "first"]


class Workers:
    """The workers of a run: how many, along which axes, simulated or on a mesh.

    A step is written for one worker, and its optimizer says how workers agree. `start`
    makes what all of them start from, `step` compiles the step for all, `center` gives
    what is worth keeping. What stays in one piece for all workers, counters and
    center, the classes of optimizer states say themselves.

    A state is any tree: `(params, opt_state)`, a `TrainState`, a dict, Equinox modules,
    the modules and optimizers of Flax NNX, which a step may change in place.

    Args:
        n: The number of workers; along several axes a tuple, the outermost first.
        axis_name: The name by which the optimizer calls the axis; a tuple of them. With
            one number and several names one worker axis lies along all of these.
        mesh: `None` simulates the workers on one device. On a mesh each worker has a
            position along the axis: a `jax.sharding.Mesh`, or `True` for one of the
            devices that there are.

    Raises:
        TypeError: A number that is none, a name that is none, or a mesh that is none.
        ValueError: A mesh that has no such axis, or not as many positions along it.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import optx_sync as oxs
        >>> workers = oxs.Workers(4, "workers")
        >>> tx = oxs.local_sgd(optax.sgd(0.5), "workers", communication_period=2)
        >>> params = {"w": jnp.zeros(3)}
        >>> params, state = workers.start((params, tx.init(params)))
        >>> @workers.step(state=2)
        ... def step(params, state, batch):
        ...     loss = lambda params: jnp.mean((batch - params["w"]) ** 2)
        ...     value, grads = jax.value_and_grad(loss)(params)
        ...     params, state = oxs.apply_gradients(tx, grads, state, params)
        ...     return params, state, value
        >>> for _ in range(20):
        ...     params, state, value = step(params, state, jnp.ones((8, 3)))
        >>> workers.center((params, state))["w"].round(2)
        Array([1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        n: int | Sequence[int],
        axis_name: AxisName,
        *,
        mesh: Mesh | bool | None = None,
    ):
        names, several = check_axis_name(axis_name), not isinstance(n, int)
        mend = "Pass the number of workers; a tuple with one for each of several axes."
        self.sizes = tuple(integer("n", x, mend) for x in (n if several else (n,)))
        # An axis is one name, or several along which one number of workers lies.
        self.axes = names if several else (placing.entry_of(names),)
        if len(self.sizes) != len(self.axes):
            raise ValueError(
                f"Workers has {len(self.sizes)} numbers and {len(self.axes)} axes: "
                f"{self.sizes} and {self.axes}. Give a number for each, as in "
                "oxs.Workers((2, 4), ('pods', 'chips'))."
            )
        if not isinstance(mesh, Mesh | bool) and mesh is not None:
            raise TypeError(
                f"mesh of Workers must be a jax.sharding.Mesh, True or None; got "
                f"{type(mesh).__name__}. True makes one of the devices that there are."
            )
        self._mesh = mesh or None
        self._started: tuple[forms.Form, list[Any]] | None = None
        if isinstance(mesh, Mesh):
            for size, axis in zip(self.sizes, self.axes, strict=True):
                positions = placing.size_along(mesh, check_axis_name(axis))
                if size != positions:
                    what = f"Workers are {size}"
                    raise ValueError(placing.wrong_number(what, axis, positions))
            if several and any(placing.are_explicit(mesh, (x,)) for x in self.axes):
                raise ValueError(
                    "Along several axes of type Explicit JAX would gather each worker's "
                    f"arrays in every step. Make the mesh of {self.axes} with "
                    "axis_types=(AxisType.Auto,) * 2, or pass mesh=True."
                )

    def __repr__(self) -> str:
        n, axis = (x[0] if len(x) == 1 else x for x in (self.sizes, self.axes))
        return f"Workers({n!r}, {axis!r}, mesh={self._mesh})"

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """The mesh, `None` where the workers are simulated.

        Example:
            >>> import optx_sync as oxs
            >>> oxs.Workers(8, "workers").mesh is None
            True
        """
        if not isinstance(self._mesh, bool):
            return self._mesh
        devices, needed = jax.devices(), math.prod(self.sizes)
        if len(devices) < needed or not all(isinstance(x, str) for x in self.axes):
            raise ValueError(
                f"mesh=True makes a mesh of {needed} devices, one for each worker, "
                f"along {self.axes}; there are {len(devices)}. Simulate with mesh=None,"
                " pass a mesh of your own, or let CPU devices stand for others before "
                f"the first array: jax.config.update('jax_num_cpu_devices', {needed})."
            )
        kinds = (AxisType.Auto,) * len(self.sizes)
        return jax.make_mesh(self.sizes, self.axes, kinds, devices=devices[:needed])

    def start(self, state: Tree) -> Tree:
        """What all workers start from: copies of one worker's state, where they live.

        Arrays are stacked, `[n, ...]`, and on a mesh placed along its axis, but for
        what workers share: counters and center. Of a random key each worker gets its
        own, `jax.random.fold_in(key, i)`. Python's numbers become arrays (not those of
        Equinox modules); functions, flags and settings are left alone. Shards over
        other axes of the mesh stay.

        Args:
            state: One worker's: any tree, as the class says.

        Returns:
            The same tree, of all workers. The argument stays as it is.

        Raises:
            ValueError: A state that was started already; arrays that are sharded over
                the workers' axis, or over another mesh.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> import optx_sync as oxs
            >>> state = {"w": jnp.zeros(3), "key": jax.random.key(0), "name": "mine"}
            >>> state = oxs.Workers(4, "workers").start(state)
            >>> state["w"].shape, state["key"].shape, state["name"]
            ((4, 3), (4,), 'mine')
        """
        form, arrays = forms.split(forms.with_arrays(state))
        if self._started and _same(self._started, (form, arrays)):
            raise ValueError(
                "This state has been started already: each array in it has the "
                "workers' axis in front. Go on with it as it is; workers.restore and "
                "workers.resize give a started state, too."
            )
        started = self._stacked(form, arrays)
        self._started = (
            form,
            [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                for x in started
            ],
        )
        return form.merge(started)

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

        The first `state` arguments are what `start` gave. `fun` returns them first, and
        then what else it likes. Of NNX objects it may change its own in place, and need
        not return them: the caller's change. Their buffers are donated.

        Other arguments are whole batches `[batch, ...]`, which are split along axis 0
        among the workers; a scalar is the same for all; of one random key each worker
        gets its own, as `keys` gives it. Flags and functions are static. Other results
        come back averaged over the workers: the mean, of integers and flags too, in
        float32. That is a program of its own after the step, so the step itself sends
        nothing where its optimizer does not.

        Args:
            fun: `(*state, *batches, **batches)` of one worker.
            state: How many arguments are state.
            split: `True` splits along axis 0; `False` says that it has been done,
                `[n, ...]`; `None` gives the whole to each. A tuple has one for each
                batch; keywords are then split.
            average: `False` leaves other results each worker's own, `[n, ...]`, and
                sends nothing for them: for predictions of examples, say.
            donate: Whether the state's buffers are reused for the new state.

        Returns:
            The step for all workers. Its `lower` is that of `jax.jit`.

        Raises:
            ValueError: A batch that cannot be split evenly; a state that does not come
                back as it was; what `tx` refuses.
            TypeError: Too few arguments; results that have no mean.

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
        return Step(self, fun, integer("state", state, mend), split, average, donate)

    def first(self, state: Tree) -> Tree:
        """The first worker's state, without the workers' axes.

        Example:
            >>> import jax.numpy as jnp
            >>> import optx_sync as oxs
            >>> workers = oxs.Workers(4, "workers")
            >>> workers.first(workers.start(jnp.ones(2)))
            Array([1., 1.], dtype=float32)
        """
        form, arrays = forms.split(state)
        return form.merge(_of_one(arrays, self._marks(form, arrays), "first"))

    def center(self, state: Tree, *, statistics: Statistics = "mean") -> Tree:
        """What the workers agree on, of one worker's shape: to evaluate and to export.

        Parameters are the center's, in their dtypes. Without a center, of replicas and
        of `gossip`, they are the workers' mean, which of equal ones is theirs to the
        bit. What else is each worker's own, as BatchNorm's statistics, is averaged as
        well; integers and keys are the first worker's.

        Args:
            state: A state of all workers.
            statistics: `"mean"`; or `"first"`, the first worker's of all that no center
                holds.

        Returns:
            Of a tuple its first part, the parameters or the model. Of a `TrainState`, a
            dict and the like all of it, with the center for `params` or `model`.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> import optx_sync as oxs
            >>> workers = oxs.Workers(4, "workers")
            >>> tx = oxs.diloco(optax.adam(0.1), "workers")
            >>> params = {"w": jnp.ones(2)}
            >>> workers.center(workers.start((params, tx.init(params))))
            {'w': Array([1., 1.], dtype=float32)}
        """
        one_of("statistics", statistics, Statistics)
        form, arrays = forms.split(state)
        marks = self._marks(form, arrays)
        one = _of_one(arrays, marks, statistics)
        # Pieces of a center are put together from those of all workers.
        outermost = form.bare(_of_one(arrays, marks, "first", down_to=1))
        for node, held in zip(_centers(outermost), _held(state, form), strict=True):
            held.put(one, node.center_params(held.tree(one)))
        tree = form.merge(one)
        while type(tree) in (tuple, list):
            tree = tree[0]
        return tree

    def metrics(self, state: Tree) -> Any:
        """Numbers to log from a state, as `oxs.metrics` gives them, distances included.

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
        held = _held(state, form)
        params = held[0].tree(arrays) if held else None
        return metrics(form.bare(arrays), params)

    def resize(
        self,
        state: Tree,
        n: int | Sequence[int] | None = None,
        *,
        joiners: Literal["mean", "first"] = "mean",
        strict: bool = False,
    ) -> Tree:
        """Go on with another number of workers: the state of `n` of them.

        What becomes of what says `oxs.resize`. What stands beside the optimizer's state
        is each worker's own: survivors keep theirs, joiners get the mean, of integers
        the largest, and of random keys one of their own. `oxs.Workers(n, axis_name,
        mesh=True)` goes on with it: on a mesh it lies on the first positions.

        Args:
            state: A state of all workers, of any number of them.
            n: How many go on; along several axes a tuple, of which the first number may
                change. `None`: as many as these workers are.
            joiners: As for `oxs.resize`, whose `"fresh"` needs the transformation.
            strict: Refuse what would have to be dropped in the middle of a round.

        Returns:
            The state of `n` workers, placed.

        Raises:
            ValueError: More workers than the mesh has positions; with `strict` a state
                in the middle of a round.

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
        one_of("joiners", joiners, Literal["mean", "first"])
        to = self if n is None else self._of(n)
        form, arrays = forms.split(state)
        marks = self._marks(form, arrays)
        if _number(arrays, marks) != to.sizes[0]:
            tree, held = form.bare(arrays), _held(state, form)
            params, tree = resize_tree(
                held[0].tree(arrays) if held else (),
                tree,
                form.bare(_shapes_of_one(form, arrays, marks, _prefix(state))),
                tree_axes(tree, 0),
                to.sizes[0],
                levels=len(self.sizes),
                joiners=joiners,
                strict=strict,
            )
            arrays = form.pick(tree)
            if held:
                held[0].put(arrays, params)
        return form.merge(to._placed(form, arrays))

    def restore(self, manager: Any, step: int | None = None, like: Tree = None) -> Tree:
        """Read a state from a checkpoint of any number of workers, as `resize` does it.

        The checkpoint holds the state as its own library saves it, whatever mesh or
        devices it lay on: `ocp.args.StandardSave(state)`, `StandardSave(nnx.state((
        model, optimizer)))`, `StandardSave(eqx.filter(state, eqx.is_array))`.

        Args:
            manager: An Orbax `CheckpointManager`.
            step: Which checkpoint; `None` for the latest.
            like: A started state of that form; `None`: what `start` gave last.

        Returns:
            The state, placed. NNX objects are new ones.

        Raises:
            ValueError: No checkpoint; nothing was started; another state's checkpoint.

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
        import orbax.checkpoint as ocp

        step = manager.latest_step() if step is None else step
        if step is None:
            raise ValueError(
                f"There is no checkpoint in {manager.directory}. Begin with what start "
                "gave where manager.latest_step() is None."
            )
        if like is None and self._started is None:
            raise ValueError(
                "restore needs to know what the checkpoint holds. Start first, "
                "state = workers.start(state), or pass a started state as like=."
            )
        form, arrays = self._started if like is None else forms.split(like)
        marks = self._marks(form, arrays)
        saved, treedef = _saved(manager, step)
        names = [_names(path) for path in form.paths()]
        missing = [name for name in names if name not in saved]
        if missing:
            raise ValueError(
                f"The checkpoint of step {step} holds no {'.'.join(missing[0])}. It is "
                "of another state or optimizer; pass one like it as like=."
            )
        found = {name: saved[name].shape for name in names}
        n = next(found[x][0] for x, mark in zip(names, marks[0]) if mark is not None)
        whole = self._place() or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        template = dict(saved)
        for name, x in zip(names, arrays, strict=True):
            place = whole if n != self.sizes[0] else x.sharding
            shape = found[name][: x.ndim]  # without a key's numbers
            template[name] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=place)
        args = ocp.args.StandardRestore(treedef.unflatten(template.values()))
        restored = dict(zip(saved, jax.tree.leaves(manager.restore(step, args=args))))
        return self.resize(form.merge(restored[name] for name in names))

    def keys(self, key: jax.Array) -> jax.Array:
        """Random keys, one for each worker: `jax.random.fold_in(key, i)`.

        They are what `start` makes of a key in a state, and a step of one that it is
        given.

        Example:
            >>> import jax
            >>> import optx_sync as oxs
            >>> oxs.Workers(4, "workers").keys(jax.random.key(0)).shape
            (4,)
        """
        if not is_key(key):
            raise TypeError(
                f"keys needs a random key, jax.random.key(0); got {type(key).__name__}. Of a "
                "raw one make it: jax.random.wrap_key_data(key)."
            )
        form, arrays = forms.split(key)
        return form.merge(self._stacked(form, arrays))

    def _stacked(self, form: forms.Form, arrays: list[Any]) -> list[jax.Array]:
        """The arrays of all workers from those of one, where they are to live."""

        places = self._places(form, arrays)
        if self.mesh is not None:
            placing.check_threads(self.mesh)
            devices, whole = set(self.mesh.devices.flat), self._place()
            arrays = [
                x
                if isinstance(x, jax.Array) and x.sharding.device_set == devices
                else jax.device_put(x, whole)
                for x in arrays
            ]
        stack = functools.partial(self._of_all, form)
        return jax.jit(stack, out_shardings=places)(arrays)

    def _of_all(self, form: forms.Form, arrays: list[Any]) -> list[jax.Array]:
        """The arrays of all workers, the innermost axis stacked first."""
        tree = form.bare(arrays)
        for level in reversed(range(len(self.sizes))):
            axes = tree_axes(tree, level)
            tree = placing.stack(tree, self.sizes[level], axes, True, level)
        return list(map(_strong, form.pick(tree)))

    def _marks(self, form: forms.Form, arrays: Sequence[Any]) -> list[list[int | None]]:
        """For each axis the mark of each array: 0 along it, `None` equal on it."""
        tree = form.bare(arrays)
        levels = range(len(self.sizes))
        return [form.pick(tree_axes(tree, level)) for level in levels]

    def _place(self, *spec: Any) -> NamedSharding | None:
        return self.mesh and NamedSharding(self.mesh, PartitionSpec(*spec))

    def _places(self, form: forms.Form, arrays: Sequence[Any]) -> Any:
        """Where arrays of one worker belong once they are stacked."""
        if self.mesh is None:
            return None
        used = tuple(name for axis in self.axes for name in check_axis_name(axis))
        in_full = placing.are_explicit(self.mesh, used)
        places = []
        for path, x, *marks in zip(form.paths(), arrays, *self._marks(form, arrays)):
            own = placing.spec_of(path, x, self.mesh, used)
            missing = jnp.ndim(x) - len(own) if in_full else 0
            front = [a for a, mark in zip(self.axes, marks) if mark is not None]
            places.append(self._place(*front, *own, *[None] * missing))
        return places

    def _placed(self, form: forms.Form, arrays: Sequence[Any]) -> Sequence[Any]:
        """Stacked arrays where a step wants them."""
        if self.mesh is None:
            return list(map(jnp.asarray, arrays))
        if self._started and self._started[0] == form:
            places = [x.sharding for x in self._started[1]]
        else:
            one = _shapes_of_one(form, arrays, self._marks(form, arrays))
            places = self._places(form, one)
        return jax.device_put(list(arrays), places)

    def _of(self, n: int | Sequence[int]) -> "Workers":
        """Workers of another number, on the first positions of the mesh."""
        n = (
            n
            if not isinstance(n, int) or len(self.sizes) == 1
            else (n, *self.sizes[1:])
        )
        several = len(self.sizes) > 1 or isinstance(n, Sequence)
        names = self.axes if several else self.axes[0]
        if not isinstance(self._mesh, Mesh):
            return Workers(n, names, mesh=self._mesh)
        first = n if isinstance(n, int) else n[0]
        if not isinstance(self.axes[0], str) or first > self.sizes[0]:
            raise ValueError(
                f"The mesh has no {first} positions along {self.axes[0]!r}. Make "
                f"Workers({first}, ..., mesh=...) on another one; its "
                "resize(state) takes this state."
            )
        place = self._mesh.axis_names.index(self.axes[0])
        devices = self._mesh.devices.take(range(first), axis=place)
        mesh = Mesh(devices, self._mesh.axis_names, axis_types=self._mesh.axis_types)
        return Workers(n, names, mesh=mesh)


class _Call(NamedTuple):
    """What a step is compiled for, besides shapes."""

    state: forms.Form
    batches: tuple[forms.Form, ...]
    names: tuple[str, ...]  # of keywords, the last ones


class Step:
    """A step of all workers: what `Workers.step` returns."""

    def __init__(
        self,
        workers: Workers,
        fun: Callable[..., Any],
        state: int,
        split: Any,
        average: bool,
        donate: bool,
    ):
        functools.update_wrapper(self, fun)
        self.workers, self.fun, self.state = workers, fun, state
        self.split, self.average = split, average
        # Without its methods' `self`, which has no hash that outlives it.
        self.program = jax.jit(
            self._run, static_argnums=0, donate_argnums=(1,) if donate else ()
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, arrays, batches = self._taken_apart(args, kwargs)
        new, results = self.program(call, arrays, batches)
        ((how, others),) = results.items()
        given = args[: self.state]
        state = call.state.update(given, new)
        state = tuple(
            old if forms.is_object(old) else new
            for old, new in zip(given, state, strict=True)
        )
        if self.average:
            others = _averaged(others, len(self.workers.sizes))
        if how == "in place":
            return others
        return state[0] if how == "alone" else (*state, *others)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The step lowered for these arguments, as that of `jax.jit`."""
        return self.program.lower(*self._taken_apart(args, kwargs))

    def _taken_apart(self, args: tuple, kwargs: dict) -> tuple[_Call, list, list]:
        """What the program is compiled for, the state's arrays, and the batches'."""
        if len(args) < self.state:
            raise TypeError(
                f"{self.__name__} has state={self.state}: its first {self.state} "
                f"positional arguments are state; got {len(args)}."
            )
        form, arrays = forms.split(args[: self.state])
        batches = [*args[self.state :], *kwargs.values()]
        parts = [forms.split(batch, numbers=True) for batch in batches]
        call = _Call(form, tuple(form for form, _ in parts), tuple(kwargs))
        return call, arrays, [arrays for _, arrays in parts]

    def _run(self, call: _Call, arrays: list, batches: list) -> tuple[list, dict]:
        """The program of all workers."""
        workers = self.workers
        marks = workers._marks(call.state, arrays)
        split = self.split
        if not isinstance(split, tuple):
            split = (split,) * (len(batches) - len(call.names))
        split += (True if isinstance(self.split, tuple) else self.split,) * len(
            call.names
        )
        laid = [
            [self._lay(x, how, path) for x, path in zip(batch, form.paths())]
            for batch, form, how in zip(batches, call.batches, split, strict=True)
        ]
        along = [[mark for _, mark in batch] for batch in laid]
        fun = functools.partial(self._one_worker, call)
        for level in reversed(range(len(workers.sizes))):
            fun = placing.map_workers(
                fun,
                workers.axes[level],
                mesh=workers.mesh,
                in_axes=(marks[level], along),
                out_axes=(marks[level], 0),
            )
        return fun(arrays, [[x for x, _ in batch] for batch in laid])

    def _lay(self, x: Any, how: bool | None, path: tuple) -> tuple[Any, int | None]:
        """A batch for all workers, `[*sizes, ...]`, and whether it is along them."""
        sizes, shape = self.workers.sizes, jnp.shape(x)
        n, many = math.prod(sizes), len(sizes)
        where = f"The batch {path_name(path, '')} of {self.__name__}".replace("  ", " ")
        if how is None or (not shape and not is_key(x)):
            return x, None
        if not shape:
            form, arrays = forms.split(x)
            return self.workers._of_all(form, arrays)[0], 0
        if how is False:
            if shape[:many] != sizes:
                raise ValueError(
                    f"{where} has shape {shape}, and split=False says that it is split "
                    f"already, {[*sizes, '...']}. Pass a whole batch without split."
                )
            return x, 0
        if shape[0] % n:
            raw = shape == (2,) and x.dtype == jnp.uint32
            mend = (
                "If it is a raw random key, make it one: jax.random.wrap_key_data(key)."
                if raw
                else "Drop the last ones or pad; what is the same for all workers has "
                "split=None, what is split already split=False."
            )
            raise ValueError(
                f"{where} has shape {shape}: {shape[0]} cannot be split evenly among "
                f"{n} workers. {mend}"
            )
        return x.reshape(*sizes, shape[0] // n, *shape[1:]), 0

    def _one_worker(self, call: _Call, arrays: list, batches: list) -> tuple:
        """One worker's step of arrays: the new state's, and other results."""
        given = call.state.merge(arrays)
        rest = [f.merge(x) for f, x in zip(call.batches, batches, strict=True)]
        args = rest[: len(rest) - len(call.names)]
        kwargs = dict(zip(call.names, rest[len(args) :], strict=True))
        results = self.fun(*given, *args, **kwargs)
        how, new, others = self._sorted(call.state, given, results)
        paths = call.state.paths()
        for path, old, x in zip(paths, arrays, new, strict=True):
            if (jnp.shape(x), jnp.result_type(x)) != (old.shape, old.dtype):
                raise ValueError(
                    f"{self.__name__} makes {jnp.result_type(x)}{[*jnp.shape(x)]} of "
                    f"the state {path_name(path)}, which is {old.dtype}{[*old.shape]}. "
                    "Return it in its own shape and dtype, x.astype(old.dtype)."
                )
        check_arrays(others, f"The result of {self.__name__}")
        return list(map(_strong, new)), {how: others}

    def _sorted(self, form: forms.Form, given: tuple, results: Any) -> tuple:
        """How the state comes back, its arrays, and other results."""
        listed = results if type(results) is tuple else (results,)
        for how, state in (("alone", (results,)), ("first", listed[: self.state])):
            found, arrays = forms.split(state)
            if found == form:
                return how, arrays, listed[self.state :] if how == "first" else ()
        if all(map(forms.is_object, given)):
            found, arrays = forms.split(given)
            if found == form:
                return "in place", arrays, results
            listed = given
        found, _ = forms.split(listed[: self.state])
        raise ValueError(
            f"{self.__name__} has state={self.state}: it takes the state first and "
            f"returns it first, as it was, `return *state, loss`. What it "
            f"returns differs: {forms.difference(form, found)}."
        )


class _Held(NamedTuple):
    """Where the parameters stand that a center is for."""

    treedef: Any  # of the center, what is masked being leaves
    places: list[int | None]  # of each the array's number; `None` where there is none

    def tree(self, arrays: Sequence[Any]) -> Tree:
        """The parameters, in the structure in which the optimizer knows them."""
        return self.treedef.unflatten(
            optax.MaskedNode() if place is None else arrays[place]
            for place in self.places
        )

    def put(self, arrays: list[Any], tree: Tree) -> None:
        """Put other parameters in their places."""
        for place, x in zip(self.places, self.treedef.flatten_up_to(tree), strict=True):
            if place is not None:
                arrays[place] = x


def _centers(tree: Tree) -> list[Any]:
    """The states in a tree that hold a center."""
    return [node for node in fields.nodes_of(tree) if fields.center_of(node)]


def _held(state: Tree, form: forms.Form) -> list[_Held]:
    """For each center the parameters that it is for."""
    prefix = _prefix(state)
    names = [_names(path) for path in form.paths()]
    places = {
        name[len(prefix) :]: place
        for place, name in enumerate(names)
        if name[: len(prefix)] == prefix
    }
    found = []
    for node in _centers(form.bare(range(len(names)))):
        _, center = fields.center_of(node)
        center = center.tree if fields.is_in_pieces(center) else center
        leaves, treedef = jax.tree_util.tree_flatten_with_path(
            center, is_leaf=is_masked
        )
        own = [places.get(_names(path)) for path, _ in leaves]
        lost = [
            p for (p, x), own in zip(leaves, own) if own is None and not is_masked(x)
        ]
        if lost:
            raise ValueError(
                f"Of the center's {path_name(lost[0])} there is no parameter in this "
                "state. Pass the parameters or the model first and the optimizer's "
                "state beside them: (params, opt_state), a TrainState, or a dict with "
                "'params' or 'model'."
            )
        found.append(_Held(treedef, own))
    return found


def _prefix(state: Tree) -> tuple[str, ...]:
    """The path to the parameters or the model in what a step trains."""
    names: tuple[str, ...] = ()
    while type(state) in (tuple, list) and state:
        names, state = (*names, "0"), state[0]
    if names and isinstance(state, Mapping):
        return names  # `(params, opt_state)`
    if not isinstance(state, Mapping):
        state = vars(state) if hasattr(state, "opt_state") else {}
    return (*names, *[name for name in ("params", "model") if name in state][:1])


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A path as the names in it, the same for attributes, keys and places."""
    names = (getattr(k, "name", getattr(k, "key", getattr(k, "idx", k))) for k in path)
    return tuple(map(str, names))


def _of_one(
    arrays: Sequence[Any],
    marks: list[list[int | None]],
    how: Statistics,
    down_to: int = 0,
) -> list[Any]:
    """Arrays without the workers' axes from one on: the mean, or the first worker's."""
    for level in reversed(range(down_to, len(marks))):
        outer = zip(*marks[:level]) if level else [()] * len(arrays)
        arrays = [
            x if mark is None else _one(x, sum(m is not None for m in before), how)
            for x, mark, before in zip(arrays, marks[level], outer, strict=True)
        ]
    return list(arrays)


def _one(x: Any, axis: int, how: Statistics) -> Any:
    one = first_worker(x) if axis == 0 else x[:, 0]
    if how == "first" or not is_inexact(x.dtype):
        return one
    # Of equal ones it is theirs, to the bit.
    wide = at_least_float32(x.dtype)
    apart = x.astype(wide) - jnp.expand_dims(one, axis).astype(wide)
    return (one.astype(wide) + jnp.mean(apart, axis)).astype(x.dtype)


def _number(arrays: Sequence[Any], marks: list[list[int | None]]) -> int:
    """How many workers there are along the outermost axis."""
    return next(x.shape[0] for x, mark in zip(arrays, marks[0]) if mark is not None)


def _shapes_of_one(
    form: forms.Form,
    arrays: Sequence[Any],
    marks: list[list[int | None]],
    prefix: tuple[str, ...] = (),
) -> list[jax.ShapeDtypeStruct]:
    """What one worker's arrays look like; pieces whole."""
    shapes = [
        x.shape[sum(mark is not None for mark in of_axes) :]
        for x, *of_axes in zip(arrays, *marks, strict=True)
    ]
    names = [_names(path) for path in form.paths()]
    sizes = {
        name[len(prefix) :]: math.prod(shape)
        for name, shape in zip(names, shapes, strict=True)
        if name[: len(prefix)] == prefix
    }
    cut = form.pick(in_pieces(form.bare(arrays)))
    for place, name in enumerate(names):
        if cut[place] and shapes[place]:
            ends = (name[start:] for start in range(len(name) + 1))
            shapes[place] = (next(sizes[end] for end in ends if end in sizes),)
    return [
        jax.ShapeDtypeStruct(shape, x.dtype)
        for shape, x in zip(shapes, arrays, strict=True)
    ]


def _same(started: tuple[forms.Form, list[Any]], other: tuple) -> bool:
    """Whether these are a form and arrays as `start` gave them."""
    (form, arrays), (other_form, others) = started, other
    return form == other_form and all(
        x.shape == jnp.shape(y) for x, y in zip(arrays, others, strict=True)
    )


def _saved(manager: Any, step: int) -> tuple[dict[tuple[str, ...], Any], Any]:
    """What a checkpoint holds, by its names, and the structure of it."""
    import orbax.checkpoint as ocp

    # A manager that has not saved anything itself knows no metadata.
    folders = [
        path
        for path in manager.directory.iterdir()
        if re.search(r"(\d+)$", path.name) and int(re.findall(r"\d+", path.name)[-1]) == step
    ]
    if not folders:
        raise ValueError(
            f"There is no checkpoint of step {step} in {manager.directory}; there are "
            f"those of {manager.all_steps()}."
        )
    found = ocp.PyTreeCheckpointHandler().metadata(folders[0] / "default")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(found.tree)
    # A variable of Flax NNX is saved as what it holds, by the name `value`.
    names = [_names(path) for path, _ in leaves]
    names = [x[:-1] if x[-1:] == ("value",) else x for x in names]
    return dict(zip(names, (x for _, x in leaves), strict=True)), treedef


def _strong(x: Any) -> jax.Array:
    """Not weakly typed, or the next step would be compiled once more."""
    return x if is_key(x) else jax.lax.convert_element_type(x, jnp.result_type(x))


@functools.partial(jax.jit, static_argnums=1)
def _averaged(tree: Tree, axes: int) -> Tree:
    """The means over the workers' axes."""

    def mean(path, x):
        if is_key(x):
            raise TypeError(
                f"The result {path_name(path)} is a random key, which has no mean. "
                "Keep it in the state, or pass average=False."
            )
        return jnp.mean(x, axis=tuple(range(axes)))

    return jax.tree_util.tree_map_with_path(mean, tree)

# SPDX-License-Identifier: Apache-2.0
"""The result of `Workers.step`: one worker's step, compiled for all of them."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from optx_sync import forms
from optx_sync.checks import check_function
from optx_sync.placement import fields, held, memory
from optx_sync.placement.axes import is_key
from optx_sync.placement.layout import Layout, strong
from optx_sync.placement.workers import map_workers, with_specs
from optx_sync.trees import Tree, check_arrays, path_name

# How a step returned its state: as its only result, before other results, or by
# changing NNX objects.
How = Literal["alone", "first", "in place"]


# Part of JAX's message if a shared part of a state comes back as a worker's own.
_NOT_SHARED = "None in out_axes", "but the center in the state does not"


class _Call(NamedTuple):
    """What a program is compiled for, apart from shapes."""

    state: forms.Form
    batches: tuple[forms.Form, ...]
    keywords: tuple[str, ...]  # of the last batches, those passed by keyword


class Step:
    """The step of all workers."""

    def __init__(
        self,
        layout: Callable[[], Layout],
        fun: Callable[..., Any],
        state: int,
        split: Any,
        average: bool,
        donate: bool,
    ):
        if isinstance(fun, Step):
            raise TypeError(
                f"{fun.name} is a step of all workers already; give workers.step the "
                "function of one worker."
            )
        check_function("What workers.step compiles", fun, "Pass one worker's step.")
        functools.update_wrapper(self, fun)
        self.layout: Callable[[], Layout] = layout
        self.fun: Callable[..., Any] = fun
        self.state: int = state
        self.split: Any = split
        self.average: bool = average
        self.name: str = getattr(fun, "__name__", "The step")
        self.donate: bool = donate
        donated = (1,) if donate else ()
        compiled = functools.partial(jax.jit, static_argnums=0, donate_argnums=donated)
        self.program: Any = compiled(self._run)
        # JAX gives donated buffers to results of the same shape, in order, whatever
        # memory they are in. With all arguments kept, in one order, each result gets
        # its own.
        self.program_of_two_memories: Any = compiled(self._run, keep_unused=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: returns the state first, then the other results."""
        call, arrays, batches = self._take_apart(args, kwargs)
        # XLA itself may crash on either.
        if self.donate:
            self._check_given_once(call, arrays, batches)
        if any(map(_is_used_up, arrays)):
            raise ValueError(
                f"{self.name} was given a state that an earlier step has used up: its "
                "buffers hold the newer one. Go on with what that step returned, "
                "`state, loss = step(state, batch)`, or keep the older one by "
                "workers.step(donate=False)."
            )
        new, results = self._program_for(arrays)(call, arrays, batches)
        ((how, others),) = results.items()
        if self.average:
            others = _means(others, len(self.layout().sizes))
        given = args[: self.state]
        state = [
            old if forms.is_object(old) else new
            for old, new in zip(given, call.state.update(given, new), strict=True)
        ]
        if how == "in place":
            return others
        return state[0] if how == "alone" else (*state, *others)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The step, lowered for these arguments, as by `jax.jit`."""
        call, arrays, batches = self._take_apart(args, kwargs)
        return self._program_for(arrays).lower(call, arrays, batches)

    def _program_for(self, arrays: list) -> Any:
        on_host = memory.is_on_host(arrays)
        return self.program_of_two_memories if on_host else self.program

    def _check_given_once(self, call: _Call, arrays: list, batches: list) -> None:
        """Refuse an array of the state that is passed twice: its memory is reused."""
        donated, others = list(map(id, arrays)), map(id, itertools.chain(*batches))
        if len({*donated}) == len(donated) and {*donated}.isdisjoint(others):
            return
        named = [
            f"argument {path[0].idx}{path_name(path[1:], '')}"
            for path in call.state.paths()
        ]
        for number, form in enumerate(call.batches, self.state):
            named += [f"argument {number}{path_name(p, '')}" for p in form.paths()]
        found: dict[int, str] = {}
        for name, x in zip(named, itertools.chain(arrays, *batches), strict=True):
            first = found.setdefault(id(x), name)
            if first != name and id(x) in donated:
                raise ValueError(
                    f"{self.name} was given one array as {first}, which is state, and "
                    f"as {name}. The state's memory becomes the new state's: pass "
                    "jnp.copy(x), or keep it by workers.step(donate=False)."
                )

    def _take_apart(self, args: tuple, kwargs: dict) -> tuple[_Call, list, list]:
        """(what the program is compiled for, the state's arrays, the batches)."""
        if len(args) < self.state:
            raise TypeError(
                f"{self.name} has state={self.state}, so its first {self.state} "
                f"positional arguments are state; got {len(args)}."
            )
        form, arrays = forms.split(args[: self.state])
        batches = [*args[self.state :], *kwargs.values()]
        for number, batch in enumerate(batches, self.state):
            if held.is_state(batch):
                raise ValueError(
                    f"Argument {number} of {self.name} is no batch to split, but a "
                    f"state: {type(batch).__name__}. With state={self.state} only the "
                    f"first {self.state} are states: pass state={number + 1}."
                )
        parts = [forms.split(batch, numbers=True) for batch in batches]
        call = _Call(form, tuple(form for form, _ in parts), tuple(kwargs))
        return call, arrays, [arrays for _, arrays in parts]

    def _run(self, call: _Call, arrays: list, batches: list) -> tuple[list, dict]:
        """The step of all workers, on arrays."""
        layout = self.layout()
        marks = layout.marks(call.state, arrays)
        layout.check(call.state, arrays, marks, f"{self.name} with state={self.state}")
        self._check_lists(call, batches)
        laid = [
            [
                self._lay(
                    x, split, f"argument {self.state + number}{path_name(path, '')}"
                )
                for path, x in zip(form.paths(), batch, strict=True)
            ]
            for number, (form, batch, split) in enumerate(
                zip(call.batches, batches, self._splits(call), strict=True)
            )
        ]
        batch_marks = [[mark for _, mark in batch] for batch in laid]
        fun = with_specs(functools.partial(self._one_worker, call), layout.specs)
        for level in reversed(range(len(layout.sizes))):
            own = [marked[level] for marked in marks]
            fun = map_workers(
                fun,
                layout.axes[level],
                mesh=layout.mesh,
                in_axes=(own, batch_marks),
                out_axes=(own, 0),
            )
        try:
            new, results = fun(arrays, [[x for x, _ in batch] for batch in laid])
        except ValueError as error:
            if not any(words in str(error) for words in _NOT_SHARED):
                raise
            raise ValueError(
                f"{self.name} makes each worker's own of what workers share, counters "
                "or the center. The axes of Workers stand in the order of the "
                f"optimizer's wrappers, the outermost first; here it is {layout.axes}, "
                "for an optimizer as oxs.diloco(oxs.cross_shard(tx, "
                f"{layout.axes[-1]!r}), {layout.axes[0]!r})."
            ) from error
        form = call.state
        if self.state == 1:  # its one argument, in a tuple
            form = form._replace(treedef=form.treedef.children()[0])
        return layout.pinned(form, new, marks), results

    def _check_lists(self, call: _Call, batches: list) -> None:
        """Refuse to give each worker all of a list of numbers, which is a batch."""

        def is_list(x):
            return type(x) is list and bool(x) and all(map(is_number, x))

        def is_number(x):
            return getattr(x, "ndim", None) == 0 and not is_key(x)

        pairs = zip(call.batches, batches, self._splits(call), strict=True)
        for number, (form, batch, split) in enumerate(pairs, self.state):
            if split is not None and fields.nodes_of(form.bare(batch), is_list):
                raise ValueError(
                    f"Argument {number} of {self.name} holds a list of numbers, each "
                    "of which would be the same for all workers. Pass an array to "
                    "split it, jnp.asarray(batch). For the whole list on each worker "
                    "pass split=None, or a tuple."
                )

    def _splits(self, call: _Call) -> tuple[Any, ...]:
        """`split` for each batch."""
        keywords = len(call.keywords)
        if not isinstance(self.split, tuple):
            return (self.split,) * len(call.batches)
        if len(self.split) != len(call.batches) - keywords:
            raise ValueError(
                f"split of {self.name} is for {len(self.split)} batches; got "
                f"{len(call.batches) - keywords} behind the state. Give one for each "
                "that is not passed by keyword."
            )
        return (*self.split, *(True,) * keywords)

    def _lay(self, x: Any, split: bool | None, where: str) -> tuple[Any, int | None]:
        """(all workers' batch, `[*sizes, ...]`; 0 if it lies along them, or None)."""
        layout, shape = self.layout(), jnp.shape(x)
        if split is None or (not shape and not is_key(x)):
            return x, None
        if not shape:
            return layout.of_all(*forms.split(x))[0], 0
        if split is False:
            if shape[: len(layout.sizes)] != layout.sizes:
                raise ValueError(
                    f"The {where} of {self.name} has shape {shape}, and split=False "
                    f"says that it begins with {layout.sizes}. A whole batch is split "
                    "by split=True; split=None gives the whole to each worker."
                )
            return x, 0
        if not shape[0] or shape[0] % layout.number:
            mend = (
                "Drop or pad the last ones. What is the same for all workers has "
                "split=None, what is split already split=False: "
                "workers.step(split=(True, None)) has one for each batch."
            )
            if shape == (2,) and x.dtype == jnp.uint32:
                mend = (
                    "It looks like a raw random key: pass jax.random.key(0), or "
                    "jax.random.wrap_key_data(key), and each worker gets its own."
                )
            raise ValueError(
                f"The {where} of {self.name} has shape {shape}, and {shape[0]} cannot "
                f"be split evenly among {layout.number} workers. {mend}"
            )
        return x.reshape(*layout.sizes, shape[0] // layout.number, *shape[1:]), 0

    def _one_worker(self, call: _Call, arrays: list, batches: list) -> tuple:
        """One worker's step: (the new state's arrays, the other results)."""
        given = call.state.merge(arrays)
        rest = [f.merge(x) for f, x in zip(call.batches, batches, strict=True)]
        args = rest[: len(rest) - len(call.keywords)]
        kwargs = dict(zip(call.keywords, rest[len(args) :], strict=True))
        how, new, others = self._sort(
            call.state, given, self.fun(*given, *args, **kwargs)
        )
        for path, old, x in zip(call.state.paths(), arrays, new, strict=True):
            if (jnp.shape(x), jnp.result_type(x)) != (old.shape, old.dtype):
                raise ValueError(
                    f"{self.name} makes {jnp.result_type(x)}{[*jnp.shape(x)]} of the "
                    f"state {path_name(path)}, which is {old.dtype}{[*old.shape]}. "
                    "Return it in its own shape and dtype: x.astype(old.dtype)."
                )
        check_arrays(others, f"The result of {self.name}")
        return list(map(strong, new)), {how: others}

    def _sort(self, form: forms.Form, given: Tree, results: Any) -> tuple:
        """(how the state came back, its arrays, the other results)."""
        listed = results if type(results) is tuple else (results,)
        ways: tuple[tuple[How, Any, Any], ...] = (
            ("alone", (results,), ()),
            ("first", listed[: self.state], listed[self.state :]),
            ("in place", given, results),
        )
        objects = all(map(forms.is_object, given))
        pairs = zip(form.paths(), form.variables(), strict=True)
        if objects and (lost := [path for path, kind in pairs if kind is None]):
            raise ValueError(
                f"{self.name} cannot change {path_name(lost[0])} in place: it is an "
                "array of an NNX object, but no nnx.Variable. Make it one: "
                "nnx.Variable(array)."
            )
        for how, state, others in ways if objects else ways[:2]:
            found, arrays = forms.split(state)
            if found == form:
                return how, arrays, others
        got = given if objects else listed[: self.state]
        raise ValueError(
            f"With state={self.state} {self.name} returns its state in front of other "
            "results, as it got it: `return params, state, loss` with state=2. (NNX "
            "objects may change in place instead.) In what it returned "
            f"{forms.difference(form, forms.split(got)[0])}."
        )


def _is_used_up(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_deleted", bool)()


@functools.partial(jax.jit, static_argnums=1)
def _means(tree: Tree, axes: int) -> Tree:
    """The means over the workers' axes."""

    def mean(path, x):
        if is_key(x):
            raise TypeError(
                f"The result {path_name(path)} is a random key, which has no mean. "
                "Keep it in the state, or pass average=False to workers.step."
            )
        return jnp.mean(x, axis=tuple(range(axes)))

    return jax.tree_util.tree_map_with_path(mean, tree)

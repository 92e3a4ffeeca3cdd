# SPDX-License-Identifier: Apache-2.0
"""The result of `Workers.step`: one worker's step, compiled for all of them."""

import contextlib
import dataclasses
import enum
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from optx_sync.center.turns import QUIET, Counters
from optx_sync.comm.collectives import UnequalError, names_of_axes
from optx_sync.core import forms
from optx_sync.core.checks import check_function
from optx_sync.core.trees import KeyPath, Tree, check_arrays, path_name
from optx_sync.state import fields, held
from optx_sync.state.leaves import Mark, is_key, is_raw_key
from optx_sync.workers.announced import log, said
from optx_sync.workers.kinds import Counted, Kinds, KindsAsked, Rule
from optx_sync.workers.layout import Arrays, Layout, marks, new_value, strong
from optx_sync.workers.mapped import map_workers, with_specs


@jax.tree_util.register_static
class Returned(enum.Enum):
    """How a step returned its state; it has no leaf, the structure carries it."""

    ALONE = "as its only result"
    FIRST = "before other results"
    IN_PLACE = "by changing NNX objects"


class _Call(NamedTuple):
    """What a program is compiled for, apart from shapes."""

    state: forms.Form
    batches: forms.Form  # of a tuple of them
    keywords: tuple[str, ...]  # of the last batches, those passed by keyword


class _Parts(NamedTuple):
    """A call, taken apart."""

    call: _Call
    arrays: Arrays  # of the state
    variables: list[Any]  # of NNX, in the state
    batches: Arrays  # of all batches


@dataclasses.dataclass(eq=False, repr=False)
class Step:
    """The step of all workers."""

    layout: Callable[[], Layout]
    fun: Callable[..., Tree]
    state: int
    split: bool | tuple[bool | None, ...] | None
    average: bool
    donate: bool
    own_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.fun, Step):
            raise TypeError(
                f"{self.fun.name} is a step of all workers already; give workers.step "
                "the function of one worker."
            )
        check_function(
            "What workers.step compiles", self.fun, "Pass one worker's step."
        )
        functools.update_wrapper(self, self.fun)
        self.name: str = getattr(self.fun, "__name__", "The step")
        self.programs: dict[tuple[_Call, Kinds], Any] = {}
        # The center rules of a call, and what is known of the state given out last.
        self.rules: dict[_Call, list[Rule]] = {}
        self.counted: list[Counted] = []
        self._forms = forms.Forms()
        self._is_said = False  # in the log, what the step does

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """One step: returns the state first, then the other results."""
        self.layout().check_devices(self.name)
        parts = self._take_apart(args, kwargs)
        # XLA itself may crash on either.
        if self.donate:
            self._check_given_once(parts)
        if not _are_traced(parts.arrays) and _are_used_up(parts.arrays):
            raise ValueError(
                f"{self.name} was given a state that an earlier step has used up: its "
                "buffers hold the newer one. Go on with what that step returned, or "
                "keep the older one by donate=False."
            )
        program, after = self._next(parts)
        new, others, how = program(parts.arrays, parts.batches)
        self.counted = [Counted(rule.counters(new), now) for rule, now in after]
        if self._averages_after and jax.tree.leaves(others):
            others = _means(others, len(self.layout().sizes))
        given = args[: self.state]
        state = parts.call.state.update(given, new, parts.variables)
        if how is Returned.IN_PLACE:
            return others
        return state[0] if how is Returned.ALONE else (*state, *others)

    def lower(self, *args: Tree, **kwargs: Tree) -> Any:
        """The step, lowered for these arguments, as by `jax.jit`."""
        parts = self._take_apart(args, kwargs)
        return self._lowered(self._program(parts.call, KindsAsked()), parts)

    def lower_kinds(self, *args: Tree, **kwargs: Tree) -> dict[Kinds, Any]:
        """The program of each kind of step, lowered for these arguments.

        The keys say for each center rule which part meets, -1 where none does. A step
        without a center rule, or of too many kinds, has one program, of the key ().
        """
        parts = self._take_apart(args, kwargs)
        rules = self._rules(parts)
        kinds = itertools.product(*(range(QUIET, one.turns.parts) for one in rules))
        return {
            kind: self._lowered(self._program_of(parts.call, rules, kind), parts)
            for kind in kinds
        }

    def _lowered(self, program: Any, parts: _Parts) -> Any:
        if not self.layout().is_abstract:
            return program.lower(parts.arrays, parts.batches)
        platforms = (jax.default_backend(),)  # which no device of the mesh says
        traced = program.trace(parts.arrays, parts.batches)
        return traced.lower(lowering_platforms=platforms)

    @property
    def _averages_after(self) -> bool:
        """Whether a second program averages results, so that the step sends nothing."""
        return self.average and self.layout().mesh is not None

    def _check_given_once(self, parts: _Parts) -> None:
        """Refuse an array of the state that is passed twice: its memory is reused."""
        call, arrays, _, batches = parts
        donated = {*map(id, arrays)}
        if len(donated) == len(arrays) and donated.isdisjoint(map(id, batches)):
            return
        named = [_argument(path) for path in call.state.paths()]
        named += [_argument(path, self.state) for path in call.batches.paths()]
        found: dict[int, str] = {}
        for name, x in zip(named, [*arrays, *batches], strict=True):
            first = found.setdefault(id(x), name)
            if first != name and id(x) in donated:
                raise ValueError(
                    f"{self.name} was given one array as {first}, which is state, and "
                    f"as {name}. The state's memory becomes the new state's: pass "
                    "jnp.copy(x), or keep it by workers.step(donate=False)."
                )

    def _take_apart(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> _Parts:
        """The call, split into arrays and what a program is compiled for."""
        if len(args) < self.state:
            raise TypeError(
                f"{self.name} has state={self.state}, so its first {self.state} "
                f"positional arguments are state; got {len(args)}."
            )
        form, arrays, variables = self._forms.split(args[: self.state])
        batches = (*args[self.state :], *kwargs.values())
        others, laid = forms.split(batches, numbers=True)
        return _Parts(_Call(form, others, tuple(kwargs)), arrays, variables, laid)

    def _next(self, parts: _Parts) -> tuple[Any, list[tuple[Rule, Counters]]]:
        """(the program of this kind of step, the counters of its rules after it)."""
        call, arrays = parts.call, parts.arrays
        if _are_traced(arrays):  # a program around this one, of all kinds
            self._check_batches(parts)
            if self._is_to_say():
                asked = KindsAsked()
                traced = self._program(call, asked).trace(arrays, parts.batches)
                self._say(asked, traced, parts)
            return self._program_of(call, [], ()), []
        rules = self._rules(parts)
        known = itertools.zip_longest(rules, self.counted[: len(rules)])
        found = [rule.turns.next(rule.now(x, arrays)) for rule, x in known]
        kind, after = tuple(kind for kind, _ in found), [after for _, after in found]
        return self._program_of(call, rules, kind), list(zip(rules, after, strict=True))

    def _rules(self, parts: _Parts) -> list[Rule]:
        """The center rules of such a call, which its first trace shows.

        It holds all conditionals, so that what is wrong in a round is said now.
        """
        call = parts.call
        if call not in self.rules:
            self._check_batches(parts)
            asked = KindsAsked()
            program = self._program(call, asked)
            traced = program.trace(parts.arrays, parts.batches)
            if self._is_to_say():
                self._say(asked, traced, parts)
            self.rules[call] = asked.rules
            if not asked.rules:
                self.programs[call, ()] = program
        return self.rules[call]

    def _is_to_say(self) -> bool:
        """Whether the log is to say what this step does: once, if anybody reads it."""
        return not self._is_said and log.isEnabledFor(logging.INFO)

    def _say(self, asked: KindsAsked, traced: Any, parts: _Parts) -> None:
        """Say in the log how many workers there are, where, and what they send when."""
        self._is_said = True
        after = self._averages_after
        text = said(
            self.name,
            self.layout(),
            asked.turns,
            traced,
            parts.arrays,
            averages_after=after,
        )
        log.info("%s", text)

    def _check_axes(self, named: set[str]) -> None:
        """Refuse an axis that no wrapper names where there is one that some does."""
        axes = [axis for axis in self.layout().axes if isinstance(axis, str)]
        missing = [axis for axis in axes if axis not in {*named, *self.own_axes}]
        if missing and named & {*axes}:
            raise ValueError(
                f"In {self.name} no wrapper names the axis {missing[0]!r} of Workers, "
                "along which parameters would drift apart. Let a wrapper stand inside "
                f"of the other, oxs.cross_shard(inner, {missing[0]!r}); or say that the"
                f" step takes care of it, Workers(..., own_axes=({missing[0]!r},))."
            )

    def _program_of(self, call: _Call, rules: list[Rule], kind: Kinds) -> Any:
        """The program of one kind of step."""
        program = self.programs.get((call, kind))
        if program is None:
            told = {rule.places: one for rule, one in zip(rules, kind, strict=True)}
            program = self._program(call, KindsAsked(told), _in_words(rules, kind))
            self.programs[call, kind] = program
        return program

    def _program(self, call: _Call, asked: KindsAsked, kind: str = "") -> Any:
        """The step of all workers for calls of this kind, not yet compiled."""

        def run(arrays: Arrays, batches: Arrays) -> tuple[Arrays, Tree, Returned]:
            return self._run(call, asked, arrays, batches)

        run.__name__ = f"{self.name}{kind}"  # which a profile shows
        return jax.jit(run, donate_argnums=(0,) if self.donate else ())

    def _check_batches(self, parts: _Parts) -> None:
        """Refuse a state among the batches, which would be split."""
        batches = parts.call.batches.merge(parts.batches)
        for number, batch in enumerate(batches, self.state):
            if held.is_state(batch):
                raise ValueError(
                    f"Argument {number} of {self.name} is no batch to split, but a "
                    f"state: {type(batch).__name__}. With state={self.state} only the "
                    f"first {self.state} are states: pass state={number + 1}."
                )

    def _run(
        self, call: _Call, asked: KindsAsked, arrays: Arrays, batches: Arrays
    ) -> tuple[Arrays, Tree, Returned]:
        """The step of all workers, on arrays."""
        layout, form = self.layout(), call.state
        whose = f"{self.name} with state={self.state}"
        levels = layout.check(held.leaves(form, arrays), whose)
        laid, lie = self._lay(call, batches)
        fun = with_specs(functools.partial(self._one_worker, call, asked), layout.specs)
        for level in reversed(range(len(layout.sizes))):
            own = marks(levels, level)
            fun = map_workers(
                fun,
                layout.axes[level],
                mesh=layout.mesh,
                in_axes=(own, lie),
                out_axes=(own, 0, 0),
            )
        try:
            new, others, how = fun(arrays, laid)
        except UnequalError as error:
            raise ValueError(
                f"{self.name} makes each worker's own of what workers share, counters "
                "or the center. The axes of Workers stand in the order of the "
                f"optimizer's wrappers, the outermost first; here it is {layout.axes}."
            ) from error
        except NameError as error:
            if error.name is None:  # JAX's, of an axis; Python's says which name
                error.add_note(
                    f"The axes of Workers, in {self.name}, are {layout.axes}."
                )
            raise
        if self.state == 1:  # its one argument, in a tuple
            form = form._replace(treedef=form.treedef.children()[0])
        rows = {x.shape[len(layout.sizes)] for x in self._split_arrays(call, laid, lie)}
        return layout.pinned(form, new), self._averaged(others, rows), how

    def _split_arrays(
        self, call: _Call, laid: Arrays, lie: Sequence[Mark]
    ) -> list[jax.Array]:
        """The arrays `[*sizes, rows, ...]` of batches that are split."""
        splits = self.split if isinstance(self.split, tuple) else ()
        places = [path[0].idx for path in call.batches.paths()]
        return [
            x
            for x, mark, place in zip(laid, lie, places, strict=True)
            if mark == 0
            and x.ndim > len(self.layout().sizes)
            and (splits[place] if place < len(splits) else self.split is not False)
        ]

    def _averaged(self, results: Tree, rows: set[int]) -> Tree:
        """The means of results, where that sends nothing; `rows` of each batch."""
        axes = len(self.layout().sizes)
        for path, x in jax.tree_util.tree_leaves_with_path(results):
            if self.average and x.ndim > axes and x.shape[axes] in rows - {1}:
                raise ValueError(
                    f"The result {path_name(path)} of {self.name} has one row for each "
                    f"of a worker's {x.shape[axes]} examples, and a mean over workers "
                    "would mix examples. Reduce it, jnp.mean(x, axis=0), or pass "
                    "average=False to workers.step, which returns [n, examples, ...]."
                )
        means = functools.partial(_means, axes=len(self.layout().sizes))
        if self._averages_after:
            jax.eval_shape(means, results)  # refuses what has none
        elif self.average:
            # As in a program of its own: bits must not depend on what is compiled.
            results = means(jax.lax.optimization_barrier(results))
        return results

    def _lay(self, call: _Call, batches: Arrays) -> tuple[list[jax.Array], list[Mark]]:
        """All workers' batches `[*sizes, ...]`, and 0 for what lies along them."""
        trees, splits = call.batches.bare(batches), self.split
        if not isinstance(splits, tuple):
            splits = (splits,) * len(trees)
        elif len(splits) != (number := len(trees) - len(call.keywords)):
            raise ValueError(
                f"split of {self.name} is for {len(splits)} batches; got {number} "
                "behind the state, without keywords."
            )
        else:
            splits += (True,) * len(call.keywords)
        for number, batch in enumerate(trees):
            if splits[number] is not None and fields.nodes_of(batch, _is_list):
                raise ValueError(
                    f"Argument {number + self.state} of {self.name} holds a list of "
                    "numbers, each of which would be the same for all workers. Pass an "
                    "array to split it, jnp.asarray(batch); split=None gives each "
                    "worker the whole list."
                )
        self._check_rows(call, batches, splits)
        found = [
            self._along(x, splits[path[0].idx], _argument(path, self.state))
            for path, x in zip(call.batches.paths(), batches, strict=True)
        ]
        return [x for x, _ in found], [mark for _, mark in found]

    def _check_rows(
        self, call: _Call, batches: Arrays, splits: tuple[bool | None, ...]
    ) -> None:
        """Refuse batches of unequal numbers of examples; each worker's own have [n]."""
        found: dict[int, str] = {}
        for path, x in zip(call.batches.paths(), batches, strict=True):
            if splits[path[0].idx] and jnp.ndim(x):
                found.setdefault(jnp.shape(x)[0], _argument(path, self.state))
        found.pop(self.layout().number, None)
        if len(found) > 1:
            (rows, one), (more, other), *_ = found.items()
            raise ValueError(
                f"The {one} of {self.name} has {rows} examples to split among workers, "
                f"and {other} has {more}: no worker could pair them. Pass as many of "
                "each. A table for all workers has split=None, split=(True, None); what"
                " is each worker's own, x.reshape(n, -1, ...), split=(True, False)."
            )

    def _along(
        self, x: jax.Array, split: bool | None, where: str
    ) -> tuple[jax.Array, Mark]:
        """An array of all workers' batch, and whether it lies along them."""
        layout, shape = self.layout(), jnp.shape(x)
        if split is None or not (shape or is_key(x)):
            return x, None
        if not shape:
            return layout.of_all(*forms.split(x))[0], 0
        what = f"The {where} of {self.name} has shape {shape}, and "
        if not split and shape[: len(layout.sizes)] != layout.sizes:
            raise ValueError(
                f"{what}split=False says that it begins with {layout.sizes}. A whole "
                "batch is split by split=True; split=None gives all of it."
            )
        if not split:
            return x, 0
        rows, number = shape[0], layout.number
        if not rows or rows % number:
            mend = (
                "Drop or pad the last ones. What is the same for all workers has "
                "split=None, what is split already split=False, or a tuple of them."
            )
            if is_raw_key(x):
                mend = (
                    "It looks like a raw random key: pass jax.random.key(0), or "
                    "jax.random.wrap_key_data(key)."
                )
            raise ValueError(
                f"{what}{rows} cannot be split evenly among {number} workers. {mend}"
            )
        return x.reshape(*layout.sizes, rows // number, *shape[1:]), 0

    def _one_worker(
        self, call: _Call, asked: KindsAsked, arrays: Arrays, batches: Arrays
    ) -> tuple[Arrays, Tree, Returned]:
        """One worker's step: (the new state's arrays, the other results, how)."""
        given = call.state.merge(arrays)
        rest = call.batches.merge(batches)
        args = rest[: len(rest) - len(call.keywords)]
        kwargs = dict(zip(call.keywords, rest[len(args) :], strict=True))
        with (
            self._tells_objects(given),
            asked.tracing(arrays),
            names_of_axes() as named,
        ):
            returned = self.fun(*given, *args, **kwargs)
        self._check_axes(named)
        new, others, how = self._sort(call.state, given, returned)
        asked.came_back(new)
        for path, old, x in zip(call.state.paths(), arrays, new, strict=True):
            if (jnp.shape(x), jnp.result_type(x)) != (old.shape, old.dtype):
                raise ValueError(
                    f"{self.name} makes {jnp.result_type(x)}{[*jnp.shape(x)]} of the "
                    f"state {path_name(path)}, which is {old.dtype}{[*old.shape]}. "
                    "Return it in its own shape and dtype: x.astype(old.dtype)."
                )
        check_arrays(others, f"The result of {self.name}")
        return list(map(strong, new)), others, how

    @contextlib.contextmanager
    def _tells_objects(self, given: Sequence[Tree]) -> Iterator[None]:
        """Say of an error which NNX objects the step was given, or which not."""
        try:
            yield
        except Exception as error:
            function = inspect.unwrap(self.fun)
            if inspect.isfunction(function):
                found = inspect.getclosurevars(function)
                outside = {**found.globals, **found.nonlocals}
                names = [name for name, x in outside.items() if forms.is_object(x)]
                kinds = ", ".join(type(x).__name__ for x in given)
                if names:
                    error.add_note(
                        f"{self.name} uses the NNX object {names[0]!r} from outside. "
                        "What a step trains or changes is its state: take it as an "
                        "argument, step(model, optimizer, batch), with state=2, and "
                        "start it, workers.start((model, optimizer))."
                    )
                elif all(map(forms.is_object, given)):
                    error.add_note(f"{self.name} was given, in this order: {kinds}.")
            raise

    def _sort(
        self, form: forms.Form, given: Sequence[Tree], results: Tree
    ) -> tuple[Arrays, Tree, Returned]:
        """(the arrays of the state that came back, the other results, how)."""
        listed = results if type(results) is tuple else (results,)
        ways: dict[Returned, tuple[Tree, Tree]] = {
            Returned.ALONE: ((results,), ()),
            Returned.FIRST: (listed[: self.state], listed[self.state :]),
        }
        if all(map(forms.is_object, given)):
            ways[Returned.IN_PLACE] = given, results
            kinds = zip(form.paths(), form.variables(), strict=True)
            if lost := [path for path, kind in kinds if kind is None]:
                raise ValueError(
                    f"{self.name} cannot change {path_name(lost[0])} in place: it is "
                    "an array of an NNX object, but no nnx.Variable. Make it one: "
                    "nnx.Variable(array)."
                )
        found = form
        for how, (state, others) in ways.items():
            found, arrays = forms.split(state)
            if found == form:
                return arrays, others, how
            if number := forms.number_for_array(form, found):
                where, value = path_name(number[0]), number[1]
                raise ValueError(
                    f"The state {where} of {self.name} is {value}, a number of Python, "
                    f"and an array in what it returns. {new_value(value)}"
                )
        raise ValueError(
            f"With state={self.state} {self.name} returns its state in front of other "
            "results, `return params, state, loss` with state=2, or changes NNX objects"
            f" in place. In what it returned {forms.difference(form, found)}."
        )


def _in_words(rules: Sequence[Rule], kind: Kinds) -> str:
    """What a program's name says of its kind: "_quiet", "_meets" or "_part_2"."""
    words = [
        "quiet" if one == QUIET else "meets" if rule.turns.parts == 1 else f"part_{one}"
        for rule, one in zip(rules, kind, strict=True)
    ]
    return "".join(f"_{word}" for word in words)


def _argument(path: KeyPath, before: int = 0) -> str:
    """The name of an array in the arguments of a step, behind so many others."""
    return f"argument {before + path[0].idx}{path_name(path[1:], '')}"


def _is_list(x: Tree) -> bool:
    """Whether this is a list of numbers, of which JAX makes a scalar each."""
    numbers = type(x) is list and x
    return bool(numbers) and all(
        getattr(y, "ndim", None) == 0 and not is_key(y) for y in numbers
    )


def _are_traced(arrays: Arrays) -> bool:
    """Whether a program around the step is being traced."""
    return any(issubclass(kind, jax.core.Tracer) for kind in {*map(type, arrays)})


def _are_used_up(arrays: Arrays) -> bool:
    """Whether a later state has the memory of any of these arrays."""
    kinds = {*map(type, arrays)}
    if len(kinds) == 1 and hasattr(kind := kinds.pop(), "is_deleted"):
        return any(map(kind.is_deleted, arrays))  # no function of Python for each
    return any(x.is_deleted() for x in arrays if hasattr(x, "is_deleted"))


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

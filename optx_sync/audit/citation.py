# SPDX-License-Identifier: Apache-2.0
"""The BibTeX of the papers that a transformation is made of, from our docstrings."""

import functools
import importlib.metadata
import inspect
import re
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from optx_sync.core.signatures import readable as _readable
from optx_sync.core.trees import brief

# Each reference of a docstring: authors, "title", year, arXiv 2311.08105 (a remark).
_FORM = re.compile(
    r'(?P<authors>[^":]+), "(?P<title>[^"]+)", (?P<year>\d{4})(?:, (?P<where>[^()]+?))?'
    r"(?: \([^()]+\))?\.(?: |$)"
)
# What holds no function.
_VALUES = (str, bytes, int, float, complex, type(None), jax.Array, np.ndarray)
_Method = Any  # a function or class whose docstring has references
_Mark = Any  # a code object or a class, by which a method is known


def citation(*parts: Any) -> str:
    """The BibTeX of the methods that a transformation is made of, and of this library.

    Of wrappers, center rules, exchanges, graphs, schedules of periods and optimizers,
    however deep they stand. They are known by their programs: the code of the functions
    in `tx` is part of a method of this library, whose docstring names its papers.
    Optax's own transformations have one entry, that of its authors; its pages name
    their papers.

    Options that are numbers or names leave no code to be known by: streaming is cited
    where `fragments` is `oxs.rules.strided(4)`, and not where it is 4.

    Args:
        *parts: Transformations, or else exchanges, center rules, graphs, agreements of
            a run, and functions of this library, such as `oxs.simulate.decoupled`.

    Returns:
        Entries for a `.bib` file. Functions that are neither of this library nor of
        Optax are named in comments, for you to look up.

    Raises:
        TypeError: There is no function or method in one of them, as in a state.

    Example:
        >>> import optax
        >>> import optx_sync as oxs
        >>> tx = oxs.diloco(optax.sgd(0.1), "pods", exchange=oxs.exchange.quantized())
        >>> found = oxs.citation(tx)
        >>> [line for line in found.splitlines() if "@" in line][1:3]
        ['@misc{douillard2023diloco,', '@misc{charles2025communication,']

    References:
        The optx_sync authors, "optx_sync: how replicas agree, synchronising optimizers
        for JAX and Optax", 2026. DeepMind et al., "The DeepMind JAX Ecosystem", 2020,
        https://github.com/google-deepmind (for Optax).
    """
    marks: dict[_Mark, None] = {}
    functions: list[types.FunctionType] = []
    owners = _owners()
    for part in parts:
        of_part, functions_of_part = _walk(part)
        marks |= of_part
        functions += functions_of_part
        if not (functions_of_part or of_part.keys() & owners.keys()):
            raise TypeError(
                "citation takes transformations, exchanges, center rules, graphs and "
                f"functions, in which it finds programs; got {brief(part)}. Write for "
                "example oxs.citation(tx), with the optimizer that tx.init and "
                "tx.update are of."
            )
    ours, optax = references(inspect.getdoc(citation))
    version = importlib.metadata.version("optx-sync")
    entries = {"optx_sync": ours.bibtex("software", "optx_sync", version=version)}
    for method in (owners[mark] for mark in marks if mark in owners):
        for one in references(inspect.getdoc(method)):
            entries[one.key] = one.bibtex("misc", one.key)
    packages = {f: f.__globals__.get("__name__", "").split(".")[0] for f in functions}
    if "optax" in packages.values():
        entries[optax.key] = optax.bibtex("software", optax.key)
    known = {"optx_sync", "optax", "jax", "numpy", *sys.stdlib_module_names}
    others = {
        f"% Not known here: {f.__qualname__} of {f.__module__}"
        for f, package in packages.items()
        if package not in known
    }
    return "\n\n".join([*entries.values(), *sorted(others)])


class Reference(NamedTuple):
    """A reference of a docstring."""

    authors: str
    title: str
    year: str
    where: str | None  # an arXiv number, an address, or where else it was published

    @property
    def names(self) -> list[str]:
        """The authors, the last of them `others` where there are more."""
        names = self.authors.removesuffix(" et al.").replace(" and ", ", ").split(", ")
        return names + ["others"] * self.authors.endswith(" et al.")

    @property
    def key(self) -> str:
        """The first author, the year and the first word of the title."""
        words = re.findall(r"\w+", self.title)
        word = next(x for x in words if x.lower() not in ("a", "on", "the"))
        return re.sub(r"\W", "", f"{self.names[0]}{self.year}{word}".lower())

    def bibtex(self, kind: str, key: str, **more: str) -> str:
        """The entry."""
        names = (f"{{{x}}}" if " " in x else x for x in self.names)
        found = {"title": f"{{{self.title}}}", "author": " and ".join(names)}
        found |= {"year": self.year, **more}
        if self.where and self.where.startswith("arXiv "):
            found |= {"eprint": self.where[6:], "archivePrefix": "arXiv"}
        elif self.where:
            place = "url" if self.where.startswith("https:") else "howpublished"
            found[place] = self.where
        lines = [
            f"  {name} = {{{value if name == 'url' else _escaped(value)}}},"
            for name, value in found.items()
        ]
        return "\n".join([f"@{kind}{{{key},", *lines, "}"])


def _escaped(text: str) -> str:
    """A text for TeX, to which these are signs of its own."""
    return re.sub(r"([#$%&_])", r"\\\1", text)


def references(doc: str | None) -> list[Reference]:
    """The references of a docstring without its indent, in the one form of all.

    Raises:
        ValueError: One of them has another form.
    """
    section = (doc or "").partition("\nReferences:\n")[2].partition("\n\n")[0]
    text = " ".join(section.split())
    found, at = [], 0
    while at < len(text):
        one = _FORM.match(text, at)
        if one is None:
            raise ValueError(
                'Write a reference as `Authors, "Title", year, arXiv number or place '
                f"(remark).`; got {text[at:]}"
            )
        found.append(Reference(**one.groupdict()))
        at = one.end()
    return found


def methods() -> Iterator[_Method]:
    """All of this package, as far as it is imported, whose docstrings have references.

    What stands in a transformation has been imported before.
    """
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "optx_sync":
            for thing in [*vars(module).values()]:
                own = getattr(thing, "__module__", None) == name
                if own and "\nReferences:\n" in (inspect.getdoc(thing) or ""):
                    yield thing


def _owners() -> dict[_Mark, _Method]:
    """Of each code object or class that only one method is made of, this method."""
    every = {id(inspect.unwrap(x)): x for x in methods()}
    users: dict[_Mark, list[_Method]] = defaultdict(list)
    for thing in every.values():
        for mark in _made_of(thing, every):
            users[mark].append(thing)
    return {mark: found[0] for mark, found in users.items() if len(found) == 1}


def _made_of(method: _Method, every: Iterable[int]) -> dict[_Mark, None]:
    """The code and the classes of a method: its own, and what it names in its file."""
    marks: dict[_Mark, None] = {}
    left = [inspect.unwrap(method)]
    for thing in left:  # grows
        if isinstance(thing, type):
            marks[thing] = None
            names, held = set(), vars(sys.modules[thing.__module__])
            members = [getattr(x, "__func__", x) for x in vars(thing).values()]
            members = [getattr(x, "fget", x) for x in members]
            inside = [inspect.unwrap(x) for x in members if inspect.isfunction(x)]
            codes = [x.__code__ for x in inside if x.__globals__ is held]
        else:
            names, held, codes = set(), thing.__globals__, [thing.__code__]
        for code in codes:  # grows
            marks[code] = None
            names.update(code.co_names)
            codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
        for name in sorted(names):
            other = inspect.unwrap(held[name]) if callable(held.get(name)) else None
            known = isinstance(other, types.FunctionType | type)
            own = known and other.__module__ == held["__name__"]
            if own and other not in left and id(other) not in every:
                left.append(other)
    return marks


def _walk(part: Any) -> tuple[dict[_Mark, None], list[types.FunctionType]]:
    """The code and the classes in an object, and the functions."""
    marks: dict[_Mark, None] = {}
    functions: list[types.FunctionType] = []
    left, seen = [part], {}
    for x in left:  # grows
        # What is seen is held, so that nothing else gets its number.
        if id(x) in seen or isinstance(x, _VALUES):
            continue
        seen[id(x)] = x
        if isinstance(x, types.FunctionType):
            functions.append(x)
            marks[x.__code__] = None
            left += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
            for cell in x.__closure__ or ():
                try:
                    left.append(cell.cell_contents)
                except ValueError:  # nothing has been put into it yet
                    continue
        elif isinstance(x, types.MethodType):
            left += [x.__self__, x.__func__]
        elif isinstance(x, functools.partial):
            left += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, type | types.ModuleType):
            marks[x] = None
        else:
            marks[type(x)] = None
            if isinstance(x, tuple | list | set | frozenset):
                left += x
            elif isinstance(x, dict):
                left += x.values()
            left += getattr(x, "__dict__", {}).values()
    return marks, functions


_readable(globals())

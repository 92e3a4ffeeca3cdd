"""The names that have a page in the API reference: which, where, and who uses them.

A room's page in docs/api/ lists its names in order, a line each, for example
`::: exchange.quantized`, by the path that a program writes after `optx_sync.`. hooks.py
makes a table of each such list, and a page of each name. (What begins with
`::: optx_sync.` is mkdocstrings' own: the docstring of a whole file.)
A class whose page would be too long has its methods listed behind it.
"""

import ast
import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
# A name, and options of its page.
ENTRY = re.compile(r"^::: (?!optx_sync\b)(\S+)\n((?: .*\n)*)", re.M)
ENTRIES = re.compile(rf"(?:{ENTRY.pattern})+", re.M)
USED = 6  # at most so many links


@dataclasses.dataclass(frozen=True)
class Name:
    """One public name."""

    path: str  # as a program writes it after `optx_sync.`
    room: str  # the page that lists it
    options: str  # of mkdocstrings, as YAML
    page: str  # its own

    @property
    def of(self) -> str:
        """The path of what it is in."""
        return self.path.rpartition(".")[0]

    @property
    def last(self) -> str:
        """The name without what it is in."""
        return self.path.rpartition(".")[2]

    def resolve(self) -> Any:
        """The object."""
        found = importlib.import_module("optx_sync")
        for part in self.path.split("."):
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)
        return found


def title_of(text: str) -> str:
    """The title of a page."""
    found = re.search(r"^# (.*)$", text, re.M)
    return found[1] if found else ""


@functools.cache
def all_names() -> tuple[Name, ...]:
    """Every name, in the order of the rooms in the menu and of the lists there."""
    menu = (DOCS.parent / "mkdocs.yml").read_text()
    found, pages = [], set()
    for room in re.findall(r": (api/(?!index)\w+\.md)$", menu, re.M):
        for path, options in ENTRY.findall((DOCS / room).read_text()):
            page = f"api/{path}.md"
            if page.lower() in pages:  # many disks hold Quorum for quorum
                page = f"api/{path}-2.md"
            pages.add(page.lower())
            found.append(Name(path, room, options, page))
    return tuple(found)


@functools.cache
def by_path() -> dict[str, Name]:
    """Every name by its path."""
    return {name.path: name for name in all_names()}


def methods_of(name: Name) -> list[Name]:
    """What is listed behind a class as part of it."""
    return [other for other in all_names() if other.of == name.path]


@functools.cache
def texts() -> dict[str, tuple[str, str, set[str]]]:
    """Of each guide and example: its title, its text and what its code imports."""
    files = [*sorted(DOCS.glob("*.md")), *sorted((DOCS / "reference").glob("*.md"))]
    found = {}
    for path in [*files, *sorted(EXAMPLES.rglob("*.py"))]:
        text = path.read_text()
        title = title_of(text) if path.suffix == ".md" else ""
        place = path.relative_to(DOCS if title else DOCS.parent).as_posix()
        found[place] = title, text, set(_imported(text))
    return found


def _imported(text: str) -> Iterator[str]:
    """Paths of what `from optx_sync... import ...` in a text imports."""
    import_of = r"^[ +]*(from optx_sync[\w.]* import (?:\([^)]*\)|.*))$"
    for line in re.findall(import_of, text, re.M):
        for node in ast.walk(ast.parse(line)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield f"{node.module}.{alias.name}".partition(".")[2]


def used_in(name: Name) -> tuple[list[tuple[str, str]], list[str]]:
    """(place, title) of the pages that name it most, guides first; and of examples."""
    path, last = re.escape(name.path), name.last
    ways = [rf"\b(?:oxs|optx_sync)\.{path}\b"]
    if name.of:
        ways.append(rf"(?<![\w.]){path}\b")
    if name.of in by_path():  # `workers.step`: programs call their objects so
        ways.append(rf"\b{by_path()[name.of].last.lower()}\.{last}\b")
    alone = sum(other.last == last for other in all_names()) == 1
    if alone and name.of not in by_path():
        ways.append(rf"`{last}[`(]")
    said = re.compile("|".join(ways))
    often = re.compile(rf"\b{last}\b") if alone else said
    counts = {}
    for place, (_, text, imported) in texts().items():
        if last in text and (said.search(text) or name.path in imported):
            counts[place] = len(often.findall(text))
    pages = [place for place in counts if place.endswith(".md")]
    pages.sort(key=lambda place: ("/" in place, -counts[place]))
    programs = [place for place in counts if place.endswith(".py")]
    programs.sort(key=lambda place: -counts[place])
    return [(page, texts()[page][0]) for page in pages[:USED]], programs[:2]

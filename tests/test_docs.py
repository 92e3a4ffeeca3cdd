"""Every code block of the pages runs, links lead somewhere, the API pages are whole."""

import ast
import functools
import importlib
import inspect
import pathlib
import pkgutil
import re

import pytest

from docs import names
from tests import scripts

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
API = sorted((DOCS / "api").glob("*.md"))
# What `optx_sync` shows beside its own names.
ROOMS = "audit by_hand elastic exchange flax graphs optimizers outer rules runtime "
ROOMS += "simulate testing"
RUN = """
import pathlib, re, sys

for name in sys.argv[1:]:
    # A line of a page that is no code is blank here, so that lines keep their numbers.
    source, code = [], False
    for line in pathlib.Path(name).read_text().splitlines():
        code = code and not line.startswith("```")
        source.append(line if code else "")
        code = code or line == "```python"
    exec(compile("\\n".join(source), name, "exec"), {"__name__": name})
    print(name)
"""


NAMES = {DOCS / name.page: name.path for name in names.all_names()}


def _names(page):
    return str(page.relative_to(ROOT))


def test_code_blocks_run():
    # The first page has the README's program: tests/test_readme.py.
    some = [page for page in PAGES if page != DOCS / "index.md"]
    with_code = [page for page in some if "```python\n" in page.read_text()]
    # A page that sets the number of devices comes first: JAX reads it once.
    with_code.sort(key=lambda page: "jax_num_cpu_devices" not in page.read_text())
    pages = [str(page) for page in with_code]
    printed = scripts.run(RUN, *pages)
    assert [line for line in printed.splitlines() if line in pages] == pages
    assert len(pages) >= 5


def test_programs_say_how_often_diloco_meets():
    """Every 500 steps by default: a first run that is shorter would never meet."""
    examples = (ROOT / "examples").rglob
    whole = [ROOT / "README.md", DOCS / "index.md"]
    whole += [*examples("*.py"), *examples("*.ipynb")]
    texts = {path: path.read_text() for path in whole}
    for page in PAGES:
        code = re.findall(r"```(?:python|diff)\n.*?```", page.read_text(), re.DOTALL)
        texts.setdefault(page, "".join(code))
    arguments = "[^()]*"
    for _ in range(4):  # parentheses inside of parentheses
        arguments = rf"(?:[^()]|\({arguments}\))*"
    seen = 0
    for path, text in texts.items():
        for call in re.findall(rf"oxs\.diloco\({arguments}\)", text):
            seen += 1
            assert re.search(r"communication_period=|\*\*\w", call), (path, call)
    assert seen > 20


@pytest.mark.parametrize("page", PAGES, ids=_names)
def test_links_lead_somewhere(page):
    # Code has brackets of its own.
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        # Where docs/hooks.py takes these pages from.
        path = re.sub("^measured/", "../benchmarks/results/", path)
        target = (page.parent / path).resolve() if path else page
        if target in NAMES:  # docs/hooks.py makes it
            path = f"optx_sync.{NAMES[target]}"
            assert not anchor or f"{anchor}.".startswith(f"{path}."), link
            continue
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = [
                re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
                for title in titles
            ]
            assert anchor in slugs, link


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r": (\S+\.md)$", menu, re.MULTILINE)
    assert sorted(named) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def test_the_guides_are_read_in_two_hours():
    """Who adds to one takes from another what stands twice. The API is not counted."""
    words = {page.name: len(page.read_text().split()) for page in DOCS.glob("*.md")}
    assert sum(words.values()) <= 27_000, words
    assert len(words) > 20


def public_names():
    """The path of each public name, after `optx_sync.`."""
    for room in ["", *ROOMS.split()]:
        module = importlib.import_module("optx_sync")
        module = getattr(module, room) if room else module
        tree = ast.parse(inspect.getsource(module))
        shown = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name == alias.asname
        }
        shown |= set(getattr(module, "__all__", ()))
        for name, value in vars(module).items():
            own = getattr(value, "__module__", "") == module.__name__
            if own and not hasattr(module, "__all__") and name[0] != "_":
                shown |= {name}
        for name in shown:
            if not inspect.ismodule(getattr(module, name)):
                yield f"{room}.{name}".lstrip(".")


def test_api_pages_name_all_that_is_public():
    listed = [name.path for name in names.all_names()]
    public = set(public_names())
    assert public - set(listed) == set()
    assert len(public) > 130
    assert len(listed) == len(set(listed))
    assert len(NAMES) == len({str(page).lower() for page in NAMES}) == len(listed)


def test_api_pages_name_what_exists():
    for name in names.all_names():
        assert inspect.getdoc(name.resolve()), name.path
    for page in API:  # and whole files, whose docstrings they show
        for path in re.findall(r"^::: (optx_sync\S*)", page.read_text(), re.MULTILINE):
            assert inspect.ismodule(pkgutil.resolve_name(path)), path


def test_a_class_names_all_its_methods_or_none():
    """With methods listed behind it, its own page shows what `members:` says."""
    seen = 0
    for name in names.all_names():
        listed = {method.last for method in names.methods_of(name)}
        if listed:
            shown = re.search(r"members: \[(.*)\]", name.options)
            listed |= set(shown[1].split(", ")) if shown else set()
            own = vars(name.resolve()).items()
            kinds = staticmethod, classmethod, property, functools.cached_property
            public = {
                key
                for key, value in own
                if key[0] != "_"
                and (inspect.isfunction(value) or isinstance(value, kinds))
                and value.__doc__
            }
            assert public == listed, name.path
            seen += 1
    assert seen >= 4


def test_names_are_found_where_they_are_used():
    def used(path):
        pages, programs = names.used_in(names.by_path()[path])
        assert len(pages) <= names.USED
        assert all(title and (DOCS / page).exists() for page, title in pages)
        assert all((ROOT / program).exists() for program in programs)
        return [page for page, _ in pages] + programs

    assert used("exchange.quantized")[0] == "exchange.md"
    assert used("runtime.run")[0] == "runtime.md"
    assert used("Workers.step")[0] == "your-program.md"
    assert "examples/train_elastic.py" in used("elastic.Group")
    assert not set(used("rules.diloco")) >= set(used("diloco"))
    assert used("optimizers.rule.RuleState") == []
    found = [name.path for name in names.all_names() if used(name.path)]
    assert len(found) > 130

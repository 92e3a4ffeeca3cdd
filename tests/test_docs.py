"""Every code block of the pages runs, links lead somewhere, the API pages are whole."""

import ast
import pathlib
import pkgutil
import re

import pytest

from tests import scripts

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
API = sorted((DOCS / "api").glob("*.md"))
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


def _documented():
    """(module or object, its members) of each entry; members None: all of them."""
    for page in API:
        entries = re.findall(
            r"^::: (\S+)\n((?: .*\n)*)", page.read_text(), re.MULTILINE
        )
        for name, options in entries:
            members = re.search(r"members: \[(.*)\]", options)
            yield name, members and members[1].split(", ")


def test_api_pages_name_what_exists():
    for name, members in _documented():
        found = pkgutil.resolve_name(name)
        for member in members or []:
            assert hasattr(found, member), (name, member)


def test_api_pages_name_all_that_is_public():
    documented = set()
    for name, members in _documented():
        documented |= {name, *(f"{name}.{member}" for member in members or [])}
        if members is None:  # what it defines: what it only imports is not shown
            found = vars(pkgutil.resolve_name(name)).items()
            documented |= {
                f"{name}.{member}"
                for member, value in found
                if getattr(value, "__module__", name) == name
            }
    public = set()
    package = ROOT / "optx_sync"
    rooms = ("audit", "exchange", "optimizers", "runtime", "simulate")
    for room in (package, *(package / name for name in rooms)):
        for node in ast.walk(ast.parse((room / "__init__.py").read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module)[:9] == "optx_sync":
                public |= {
                    f"{node.module}.{alias.name}"
                    for alias in node.names
                    if str(alias.asname)[0] != "_"
                }
    assert len(public) > 100
    # Of a room that is public as a whole (oxs.exchange) some entry.
    documented |= {name[: name.find(".", 10)] for name in documented}
    assert public - documented == set()

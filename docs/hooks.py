"""What docstrings have that Markdown has not, pages from elsewhere, searches: hooks.

Formulas (``.. math::``, ``:math:``, and ``$$`` in pages) become MathML, which browsers
draw by themselves. Doctests become code blocks: Markdown would read their prompts, and
a description that begins with ">= 0", as quotations. The pages that benchmarks and
reproductions write stand beside the others, under measured/, in the groups of
benchmarks/groups.toml. Each public name has a page, made of the lists in docs/api/
(names.py). Changelog, licence and what to report are made of files of the repository,
and the foot of every page leads to them. A search finds guides before reference and
measurements, and what readers look for, or a name, finds the page about it.
"""

import functools
import itertools
import re
import tomllib
from pathlib import Path

import griffe
import names
from latex2mathml.converter import convert
from markdown import Extension
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File

# The pages that a search for these words shall find first: their tags in its index.
SEARCHES = {
    "fsdp": ["large-models.md"],
    "out of memory": ["large-models.md"],
    "multi-host": ["runtime.md", "elastic.md"],
    "loss diverges": ["diverges.md"],
    "learning rate": ["learning-rate.md"],
    "schedule": ["learning-rate.md"],
    "gradient compression": ["exchange.md"],
    "gradient accumulation": ["accumulation.md"],
    "microbatch": ["accumulation.md"],
    "MultiSteps": ["accumulation.md"],
    "no_sync": ["accumulation.md"],
    "lax.scan": ["scan.md"],
    "profiler": ["profiling.md"],
    "profiling": ["profiling.md"],
    "straggler": ["decoupled.md"],
    "federated": ["federated.md"],
    "fedbuff": ["federated.md"],
    "lora": ["fine-tuning.md"],
    "pretrained": ["fine-tuning.md"],
    "reinforcement learning": ["reinforcement-learning.md"],
    "replay buffer": ["reinforcement-learning.md"],
    "ema": ["averages.md"],
    "moving average": ["averages.md"],
    "gan": ["gan.md"],
    "discriminator": ["gan.md"],
    "fedavg": ["federated.md"],
    "changelog": ["changelog.md"],
    "license": ["license.md"],
    "faq": ["faq.md"],
}
# At the foot of every page.
ABOUT = {
    "Changelog": "changelog.md",
    "Licence: Apache 2.0": "license.md",
    "Report what is wrong": "reporting.md",
    "Questions": "faq.md",
}
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ISSUES = ROOT / ".github" / "ISSUE_TEMPLATE"

BLOCK = re.compile(r"^\.\. math::\n\n((?:(?: {4}.*)?\n)+)|^\$\$((?:.|\n)+?)\$\$$", re.M)
INLINE = re.compile(r":math:`([^`]+)`")
TITLE = re.compile(r"(<h1[^>]*>)([^<]*)")
LONG_CODE = re.compile(r"<code>[^<\s]{30,}</code>")
# A picture alone, under which no words in italics stand.
PICTURE = re.compile(r'<p>(<img alt="([^"]+)" src="[^"]+" ?/?>)</p>(?!\s*<p><em>)')
FIGURE = r"<figure>\1<figcaption>\2</figcaption></figure>"
DOCTEST = re.compile(r"^>>> (?:.+\n)+", re.M)
# The page of one name.
PAGE = """---
title: {name.path}
---
[All names](index.md) / [{room}]({link})

::: optx_sync.{name.path}
    options:
      heading_level: 1
      heading: {name.path}
      toc_label: {name.path}
{more}
{methods}
{used}
"""


class _Docstrings(Preprocessor):
    def run(self, lines):
        def stash(formula, display):
            formula = formula.strip().replace(r"\_", "_")
            if "&" in formula and r"\begin" not in formula.partition("&")[0]:
                formula = rf"\begin{{split}}{formula}\end{{split}}"
            drawn = convert(formula, display=display)
            if display == "block":
                drawn = f'<div class="formula">{drawn}</div>'
            return self.md.htmlStash.store(drawn)

        def block(match):
            return f"\n{stash(match[1] or match[2], 'block')}\n\n"

        text = "\n".join([*lines, ""])
        text = DOCTEST.sub(lambda m: f"\n```pycon\n{m[0]}```\n", text)
        text = re.sub("^>= ", r"\\>= ", text, flags=re.M)
        text = BLOCK.sub(block, text)
        return INLINE.sub(lambda m: stash(m[1], "inline"), text).split("\n")


class _Extension(Extension):
    def extendMarkdown(self, md):
        # Before fenced code (25) is looked for, after line ends are made equal (30).
        md.preprocessors.register(_Docstrings(md), "docstrings", 29)


def _license():
    """The page of LICENSE, word for word."""
    return f"# Licence\n\n```text\n{(ROOT / 'LICENSE').read_text().rstrip()}\n```\n"


def _reporting(repository):
    """The page of what a report should say: the issue templates, and SECURITY.md."""
    page = ["# Report what is wrong, or missing"]
    if repository:
        page.append(f"[Open an issue]({repository}/issues), with what is asked below.")
    else:
        page.append(
            "The repository has no public address yet: send this to whoever gave you "
            "the library."
        )
    for name in ("wrong", "idea"):
        _, head, body = (ISSUES / f"{name}.md").read_text().split("---\n", 2)
        page += [f"## {head.partition('name: ')[2].splitlines()[0]}", body.strip()]
    page.append((ROOT / "SECURITY.md").read_text().replace("# ", "## ", 1))
    return "\n\n".join(page)


def on_config(config):
    """Called by MkDocs once it has read its configuration: the groups of the menu."""
    config.markdown_extensions.append(_Extension())
    (measured,) = (of for of in config.nav if "Measured" in of)
    groups = tomllib.loads((RESULTS.parent / "groups.toml").read_text())
    measured["Measured"][1:1] = [
        {title: [f"measured/{page}.md" for page in pages]}
        for title, pages in groups.items()
    ]
    return config


def on_files(files, config):
    """Called by MkDocs with the files that it found: adds what stands elsewhere."""
    changes = str(ROOT / "CHANGELOG.md")
    files.append(File.generated(config, "changelog.md", abs_src_path=changes))
    files.append(File.generated(config, "license.md", content=_license()))
    reporting = _reporting(config.repo_url)
    files.append(File.generated(config, "reporting.md", content=reporting))
    for path in sorted([*RESULTS.glob("*.md"), *RESULTS.glob("*.png")]):
        name = "index.md" if path.name == "README.md" else path.name
        place = f"measured/{name}"
        files.append(File.generated(config, place, abs_src_path=str(path)))
    for cached in (names.all_names, names.by_path, names.texts, _first_lines):
        cached.cache_clear()  # `mkdocs serve` builds again
    for name in names.all_names():
        files.append(File.generated(config, name.page, content=_page_of(name)))
    return files


def _page_of(name):
    pages, programs = names.used_in(name)
    links = [f"[{title}](../{page})" for page, title in pages]
    links += [f"`{program}`" for program in programs]
    more, methods = name.options.partition("options:\n")[2], ""
    if some := names.methods_of(name):
        more = more or "      members: false"
        methods = f"## Methods\n\n{_table(some)}"
    return PAGE.format(
        name=name,
        room=names.title_of((names.DOCS / name.room).read_text()),
        link=name.room.removeprefix("api/"),
        more=more,
        methods=methods,
        used="## Used in\n\n- " + "\n- ".join(links) if links else "",
    )


@functools.cache
def _first_lines():
    """Of each name's docstring, as a cell of a table."""
    extensions = griffe.load_extensions(str(names.DOCS / "public_paths.py"))
    package = griffe.load("optx_sync", search_paths=[ROOT], extensions=extensions)
    found = {}
    for name in names.all_names():
        line = package[name.path].docstring.value.partition("\n")[0]
        found[name.path] = line.replace("|", r"\|")
    return found


def _by_page():
    return {name.page: name for name in names.all_names()}


def _link(name):
    return f"[`{name.path}`]({name.page.removeprefix('api/')})"


def _table(some):
    """Names with links to their pages, and what they are."""
    rows = [f"| {_link(name)} | {_first_lines()[name.path]} |" for name in some]
    return "\n".join(["| name | |", "|---|---|", *rows, ""])


def _table_of(run):
    """The table for lines of a room's page. Methods stand on that of their class."""
    some = (names.by_path()[path] for path, _ in names.ENTRY.findall(run[0]))
    return _table(name for name in some if name.of not in names.by_path())


def _rooms():
    """The place of each room's page, and its names."""
    return itertools.groupby(names.all_names(), key=lambda name: name.room)


def _index():
    """A list of the names of each room."""
    for room, some in _rooms():
        title = names.title_of((names.DOCS / room).read_text())
        yield f"\n## [{title}]({room.removeprefix('api/')})\n\n"
        for name in some:
            yield f"- {_link(name)} {_first_lines()[name.path]}\n"


def on_nav(nav, config, files):
    """Called by MkDocs with the menu: pages of names are of its part for the API."""
    pages = {page.file.src_uri: page for page in nav.pages}
    for room, some in _rooms():
        own = [files.get_file_from_path(name.page).page for name in some]
        for page in own:
            page.parent, page.previous_page = pages[room].parent, pages[room]
        for page, after in itertools.pairwise(own):
            page.next_page, after.previous_page = after, page
    return nav


def on_env(env, config, files):
    """Called by MkDocs with what draws pages: the foot's version and links."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    links = [(title, files.src_uris[page].url) for title, page in ABOUT.items()]
    if config.repo_url:
        links.append(("Source", config.repo_url))
    env.globals["about"] = {"version": project["version"], "links": links}
    return env


def on_page_markdown(markdown, page, config, files):
    """Called by MkDocs for each page: how early a search finds it."""
    place = page.file.src_uri
    if place == "api/index.md":
        page.meta["hide"] = ["navigation", "toc"]
        markdown += "".join(_index())
    elif place.startswith("api/"):
        markdown = names.ENTRIES.sub(_table_of, f"{markdown}\n")
    guide = "/" not in place and page.file.generated_by is None
    page.meta["search"] = {"boost": 4 if guide else 1}
    page.meta["search"]["exclude"] = place == "api/index.md"  # it has every word
    page.meta["tags"] = [words for words, of in SEARCHES.items() if place in of]
    if name := _by_page().get(place):
        page.meta["tags"].append(name.path)
        if name.of not in names.by_path():  # methods have names like `center`
            page.meta["tags"].append(name.last)
    return markdown


def on_page_content(html, page, config, files):
    """Called by MkDocs for each page: what a picture shows stands under it.

    Long calls, and names as titles, may break after a "(", "." or "_".
    """
    html = PICTURE.sub(FIGURE, html)
    if page.file.src_uri in _by_page():
        html = TITLE.sub(
            lambda m: m[1] + re.sub(r"(?<=[._])(?=\w)", "<wbr>", m[2]), html
        )
    if page.file.src_uri == "api/index.md":
        html = f'<div class="names">{html}</div>'
    return LONG_CODE.sub(lambda m: re.sub(r"(?<=[(.])(?=\w)", "<wbr>", m[0]), html)

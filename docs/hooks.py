"""What docstrings have that Markdown has not, pages from elsewhere, searches: hooks.

Formulas (``.. math::``, ``:math:``, and ``$$`` in pages) become MathML, which browsers
draw by themselves. Doctests become code blocks: Markdown would read their prompts, and
a description that begins with ">= 0", as quotations. The pages that benchmarks and
reproductions write stand beside the others, under measured/, in the groups of
benchmarks/groups.toml. Changelog, licence and what to report are made of files of the
repository, and the foot of every page leads to them. A search finds guides before
reference and measurements, and what readers look for finds the page about it.
"""

import re
import tomllib
from pathlib import Path

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
LONG_CODE = re.compile(r"<code>[^<\s]{30,}</code>")
DOCTEST = re.compile(r"^>>> (?:.+\n)+", re.M)


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
        {title: [f"measured/{name}.md" for name in names]}
        for title, names in groups.items()
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
    return files


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
    guide = "/" not in place and page.file.generated_by is None
    page.meta["search"] = {"boost": 4 if guide else 1}
    page.meta["tags"] = [words for words, of in SEARCHES.items() if place in of]
    return markdown


def on_page_content(html, page, config, files):
    """Called by MkDocs for each page: long calls may break after a "(" or a "."."""
    return LONG_CODE.sub(lambda m: re.sub(r"(?<=[(.])(?=\w)", "<wbr>", m[0]), html)

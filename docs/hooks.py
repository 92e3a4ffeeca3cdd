"""What docstrings have that Markdown has not, measured pages, searches; MkDocs' hooks.

Formulas (``.. math::``, ``:math:``, and ``$$`` in pages) become MathML, which browsers
draw by themselves. Doctests become code blocks: Markdown would read their prompts, and
a description that begins with ">= 0", as quotations. The pages that benchmarks and
reproductions write stand beside the others, under measured/. A search finds guides
before reference and measurements, and what readers look for finds the page about it.
"""

import re
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
}
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

BLOCK = re.compile(r"^\.\. math::\n\n((?:(?: {4}.*)?\n)+)|^\$\$((?:.|\n)+?)\$\$$", re.M)
INLINE = re.compile(r":math:`([^`]+)`")
LONG_CODE = re.compile(r"<code>[^<\s]{30,}</code>")
# A picture alone, under which no words in italics stand.
PICTURE = re.compile(r'<p>(<img alt="([^"]+)" src="[^"]+" ?/?>)</p>(?!\s*<p><em>)')
FIGURE = r"<figure>\1<figcaption>\2</figcaption></figure>"
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


def on_config(config):
    """Called by MkDocs once it has read its configuration."""
    config.markdown_extensions.append(_Extension())
    return config


def on_files(files, config):
    """Called by MkDocs with the files that it found: adds what stands elsewhere."""
    changes = str(ROOT / "CHANGELOG.md")
    files.append(File.generated(config, "changelog.md", abs_src_path=changes))
    for path in sorted([*RESULTS.glob("*.md"), *RESULTS.glob("*.png")]):
        name = "index.md" if path.name == "README.md" else path.name
        place = f"measured/{name}"
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Called by MkDocs for each page: how early a search finds it."""
    place = page.file.src_uri
    page.meta["search"] = {"boost": 1 if "/" in place else 4}
    page.meta["tags"] = [words for words, of in SEARCHES.items() if place in of]
    return markdown


def on_page_content(html, page, config, files):
    """Called by MkDocs for each page: what a picture shows stands under it.

    Long calls may break after a "(" or a ".".
    """
    html = PICTURE.sub(FIGURE, html)
    return LONG_CODE.sub(lambda m: re.sub(r"(?<=[(.])(?=\w)", "<wbr>", m[0]), html)

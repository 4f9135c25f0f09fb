"""Build the documentation site from the pages of the repository and the docstrings, without network access.

    build.py [--to FOLDER]

The Markdown pages are copied to `build/docs` and Zensical renders them into `site`, both below FOLDER (default: the
repository). `docs/README.md` becomes the landing page, and the pages below `docs` move to the top of the site, so
their links are changed. A warning fails the build.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from reference import MODULES, index_page, module_page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Navigation is part of every page, and a sitemap is empty without `site_url`.
NOT_FOR_READERS = ("navigation.txt", "sitemap.xml")
SOURCES = ["CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "packages/*/*.md", "apps/*/*.md"]

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]+)?")
# Mermaid would be loaded from another host; the table below the diagram has the same content.
DIAGRAM = re.compile(r"^```mermaid\n.*?^```\n", re.DOTALL | re.MULTILINE)


def lay_out(pages: Path) -> None:
    """Write the Markdown of the site to an empty folder."""
    shutil.rmtree(pages, ignore_errors=True)
    for source in sorted(file for pattern in SOURCES for file in ROOT.glob(pattern)):
        text = DIAGRAM.sub("", source.read_text())
        _write(pages / _place(source), _change_links(text, source, pages))
    _write(pages / "reference" / "README.md", index_page())
    for modules in MODULES.values():
        for module in modules:
            _write(pages / "reference" / f"{module}.md", module_page(module))
    for name in ("navigation.txt", "site.css"):
        shutil.copyfile(HERE / name, pages / name)


def _place(source: Path) -> Path:
    """Return where a file of the repository lies in the site."""
    place = source.relative_to(ROOT)
    if place == Path("README.md"):  # written for the code host
        return place
    return place.relative_to("docs") if place.parts[0] == "docs" else place


def _change_links(text: str, source: Path, pages: Path) -> str:
    """Point the links of a page to places in the site, and copy linked files that are not pages."""

    def change(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / found[1]))
        if (target / "README.md").exists():
            target /= "README.md"
        if not target.is_file():
            return found[0]  # a dead link, which Zensical reports
        place = _place(target)
        if target.suffix != ".md":
            (pages / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, pages / place)
        anchor = "" if target == ROOT / "README.md" else found[2] or ""
        return os.path.relpath(place, _place(source).parent) + anchor

    return LINK.sub(change, text)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _settings() -> str:
    """Return the settings of Zensical, with the version in the title of the site."""
    project = tomllib.loads((ROOT / "apps" / "composer-suite" / "pyproject.toml").read_text())["project"]
    return (HERE / "zensical.toml").read_text().replace("{version}", project["version"])


def main() -> int:
    """Build the site and return the exit status of Zensical."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", metavar="FOLDER", type=Path, default=ROOT, help="where to create build/docs and site")
    folder = parser.parse_args().to.resolve()
    lay_out(folder / "build" / "docs")
    _write(folder / "build" / "zensical.toml", _settings())
    zensical = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}  # for the extension `docstring_sections`
    built = subprocess.run(zensical, cwd=folder / "build", env=environment, check=False)
    if built.returncode == 0:
        _finish(folder / "build" / "site", folder / "site")
    return built.returncode


def _finish(built: Path, site: Path) -> None:
    """Remove what readers do not need, and replace the site."""
    for name in NOT_FOR_READERS:
        (built / name).unlink(missing_ok=True)
    shutil.rmtree(site, ignore_errors=True)
    built.rename(site)


if __name__ == "__main__":
    sys.exit(main())

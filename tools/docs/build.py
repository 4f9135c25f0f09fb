"""Build the site of the documentation, without a network: pages of the repository, and a reference from docstrings.

    build.py [--to FOLDER]

The pages are laid out in `build/docs`, at the paths that they have in the repository, so that their links hold in both
places; Zensical renders them into `site`. Both lie below the folder, which is the repository itself unless said
otherwise. A warning fails the build. What Zensical puts there that no reader has a use for is taken out.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from reference import MODULES, module_page, reference

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SETTINGS, NAVIGATION = "zensical.toml", "navigation.txt"
PAGES, SITE = "build/docs", "site"  # `docs_dir` and `site_dir` of the settings
# The order of the pages is in each of them, and a sitemap has nothing to say where no `site_url` is known.
NOT_FOR_READERS = (NAVIGATION, "sitemap.xml")
SOURCES = ["*.md", "docs/**/*.md", "packages/*/*.md", "apps/*/*.md"]

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
# Drawn by a script that a page would fetch from elsewhere; what it shows, the table below it says as well.
DIAGRAM = re.compile(r"^```mermaid\n.*?^```\n", re.DOTALL | re.MULTILINE)


def lay_out(pages: Path) -> None:
    """Write the Markdown of the site below a folder, which is emptied first."""
    shutil.rmtree(pages, ignore_errors=True)
    for source in sorted(file for pattern in SOURCES for file in ROOT.glob(pattern)):
        place = source.relative_to(ROOT)
        text = _mend_links(DIAGRAM.sub("", source.read_text()), place.parent, pages)
        if place.name == "README.md" and place.parent.name in MODULES:
            text = f"{text}\n{reference(place.parent.name)}"
        _write(pages / place, text)
    for distribution, (_, *modules) in MODULES.items():
        folder = next(pages.glob(f"*/{distribution}"))
        for module in modules:
            _write(folder / f"{module}.md", module_page(module))
    shutil.copyfile(HERE / NAVIGATION, pages / NAVIGATION)


def _mend_links(text: str, folder: Path, pages: Path) -> str:
    """Let links to folders lead to their pages, and put files that are no pages beside the pages that link to them."""

    def mend(found: re.Match[str]) -> str:
        link = found[1]
        target = ROOT / folder / link
        if (target / "README.md").exists():
            return f"{link.rstrip('/')}/README.md"
        if target.is_file() and target.suffix != ".md":
            copy = pages / target.resolve().relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copy)
        return link

    return LINK.sub(mend, text)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def main() -> int:
    """Build the site and return the exit status of Zensical."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", metavar="FOLDER", type=Path, default=ROOT, help="where build/docs and site are made")
    folder = parser.parse_args().to.resolve()
    lay_out(folder / PAGES)
    if folder != ROOT:
        shutil.copyfile(ROOT / SETTINGS, folder / SETTINGS)
    zensical = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", SETTINGS]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}  # where the extension is that the settings name
    built = subprocess.run(zensical, cwd=folder, env=environment, check=False)
    for name in NOT_FOR_READERS:
        (folder / SITE / name).unlink(missing_ok=True)
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())

"""Build the wheels of all packages twice, install them, and put them into a folder if all is well.

dist.py [--uv UV] [--output FOLDER]

All is well if both builds gave the same bytes, and if the README's first script runs in a fresh environment where
`pip install composer-suite` found the packages of this workspace in the folder of the wheels.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from environments import Environment, prepare, runnable
from ranges import ROOT, members


class Unfit(Exception):
    """The wheels are not such that somebody should get them."""


def build(uv: str, output: Path) -> list[Path]:
    """Build the wheels of all packages twice, and return those of the first time.

    Raises:
        Unfit: If the second time gave other bytes.
    """
    with tempfile.TemporaryDirectory() as name:
        again = Path(name)
        for folder in (output, again):
            options = ["-q", "--all-packages", "--wheel", "--no-create-gitignore"]
            subprocess.run([uv, "build", *options, "-o", str(folder)], cwd=ROOT, check=True)
        first, second = _contents(output), _contents(again)
    if differing := sorted(name for name in {*first, *second} if first.get(name) != second.get(name)):
        raise Unfit(f"Two builds differ in {', '.join(differing)}.")
    return [output / name for name in first]


def _contents(folder: Path) -> dict[str, bytes]:
    return {wheel.name: wheel.read_bytes() for wheel in sorted(folder.glob("*.whl"))}


def follow_readme(environment: Environment, wheels: Path) -> str:
    """Install composer-suite from a folder of wheels, run the README's first script, and return what was said.

    Raises:
        Unfit: If a package of this workspace came from elsewhere.
        subprocess.CalledProcessError: If it cannot be installed, or the script fails.
    """
    said = environment.install("--find-links", str(wheels), "composer-suite")
    built = {f"{name}=={project['version']}" for name, project in members().items()}
    ours = {line for line in environment.frozen() if line.startswith("composer-")}
    if strange := sorted(ours - built):
        raise Unfit(f"pip install composer-suite found {', '.join(strange)}, which was not built here.")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first.py"
        script.write_text(first_script((ROOT / "README.md").read_text()))
        environment.python(str(script), cwd=folder)
    return f"{said}The README's first script did well.\n"


def first_script(page: str) -> str:
    """Return the first Python block of a Markdown page."""
    found = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def main() -> int:
    """Build, install, and return the exit status."""
    parser = argparse.ArgumentParser(description="Build all wheels reproducibly.")
    parser.add_argument("--uv", type=runnable, default="uv", help="the uv that builds")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="the folder for the wheels")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environments = prepare(asked.uv, folder)
        try:
            wheels = build(environments.uv, folder / "wheels")
            with environments.fresh(folder / "environment") as environment:
                follow_readme(environment, folder / "wheels")
        except (Unfit, subprocess.CalledProcessError) as error:
            print(f"{error}\n{getattr(error, 'stdout', None) or ''}Nothing was written.", file=sys.stderr)
            return 1
        asked.output.mkdir(parents=True, exist_ok=True)
        for wheel in wheels:
            shutil.copy2(wheel, asked.output / wheel.name)
            print(asked.output / wheel.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

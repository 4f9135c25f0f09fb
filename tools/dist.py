"""Build the wheels of all packages twice, and put them into a folder if both builds gave the same bytes.

dist.py [--uv UV] [--output FOLDER]

It needs Python 3.11 or newer and uv, and no environment. `make alone` tests the wheels.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Unfit(Exception):
    """Wheels that must not be published."""


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


def runnable(uv: str) -> str:
    """Return a uv that was named on the command line such that it can be called from any folder.

    Raises:
        argparse.ArgumentTypeError: If there is none.
    """
    found = shutil.which(uv)
    if found is None:
        place = "" if os.sep in uv else " on the PATH"
        raise argparse.ArgumentTypeError(
            f"{uv!r} is no program{place} that can be run. Type `make alone` or `make dist`, which bring their own uv, "
            f"or name yours with --uv PATH."
        )
    return str(Path(found).resolve()) if os.sep in uv else uv


def main() -> int:
    """Build the wheels, and return the exit status."""
    parser = argparse.ArgumentParser(description="Build all wheels reproducibly.")
    parser.add_argument("--uv", type=runnable, default="uv", help="the uv that builds")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="the folder for the wheels")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        try:
            wheels = build(asked.uv, Path(name))
        except (Unfit, subprocess.CalledProcessError) as error:
            print(f"{error}\nNothing was written.", file=sys.stderr)
            return 1
        asked.output.mkdir(parents=True, exist_ok=True)
        for wheel in wheels:
            shutil.copy2(wheel, asked.output / wheel.name)
            print(asked.output / wheel.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

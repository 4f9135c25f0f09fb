"""Build the wheels of all packages twice, and put them into a folder if both times gave the same bytes.

dist.py [--uv UV] [--output FOLDER]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ranges import ROOT


def build(uv: str, output: Path) -> dict[str, bytes]:
    """Build all wheels and return them by name."""
    command = [uv, "build", "-q", "--all-packages", "--wheel", "--no-create-gitignore", "-o", str(output)]
    subprocess.run(command, cwd=ROOT, check=True)
    return {wheel.name: wheel.read_bytes() for wheel in sorted(output.glob("*.whl"))}


def main() -> int:
    """Build, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description="Build all wheels reproducibly.")
    parser.add_argument("--uv", default="uv", help="the uv that builds")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="the folder for the wheels")
    asked = parser.parse_args()
    uv = str(Path(asked.uv).resolve()) if os.sep in asked.uv else asked.uv
    with tempfile.TemporaryDirectory() as name:
        first, second = build(uv, Path(name) / "first"), build(uv, Path(name) / "second")
        differing = sorted(wheel for wheel in {*first, *second} if first.get(wheel) != second.get(wheel))
        if differing:
            print(f"Two builds differ in {', '.join(differing)}. Nothing was written.", file=sys.stderr)
            return 1
        asked.output.mkdir(parents=True, exist_ok=True)
        for wheel in first:
            shutil.copy2(Path(name) / "first" / wheel, asked.output / wheel)
            print(asked.output / wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())

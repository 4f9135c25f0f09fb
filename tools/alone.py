"""Test each package by itself: its built wheel, what that wheel asks for, pytest and hypothesis, nothing else.

    alone.py [--uv UV] [NAME ...]

A package whose tests need one of its extras for a part of them is tested twice, bare and with that extra.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ranges import ROOT, members, siblings

# By the extra: which tests, as pytest's -k has it. Those that do not need the extra have been run without it.
RUNS = {
    "composer-dist": {"": "", "deepspeed": "deepspeed"},
    "composer-events": {"": "", "torch": ""},
    "composer-hf": {"": "", "peft": "peft or lora or adapter"},
    "composer-models": {"": "", "vision,coco": ""},
}
RUNNERS = ["pytest", "pytest-xdist", "hypothesis"]


def closure(name: str, projects: dict[str, dict]) -> list[str]:
    """Return the package and its siblings below it, so that none of them is looked for in a registry."""
    found, todo = [], [name]
    while todo:
        name = todo.pop()
        if name not in found:
            found.append(name)
            todo += [requirement.name for requirement in siblings(projects[name], projects)]
    return found


def test_alone(name: str, extra: str, chosen: str, wheels: Path, uv: str, pins: Path) -> bool:
    """Make an environment for one wheel, run the package's own tests in it, and say whether they passed."""
    projects = members()
    with tempfile.TemporaryDirectory() as environment:
        python = f"{environment}/bin/python"
        files = {
            sibling: next(wheels.glob(f"{sibling.replace('-', '_')}-*.whl")) for sibling in closure(name, projects)
        }
        wanted = [f"{n}{f'[{extra}]' if n == name and extra else ''} @ {f.as_uri()}" for n, f in files.items()]
        install = [uv, "pip", "install", "-q", "--python", python, "--constraint", str(pins), *wanted, *RUNNERS]
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, environment], check=True)
        subprocess.run(install, check=True)
        print(f"== {name}{f'[{extra}]' if extra else ''} alone", flush=True)
        folder = next(ROOT.glob(f"*/{name}"))
        # What is slow has nothing to find out here that `make test` does not.
        options = ["-n", "2", "--dist", "loadfile", "-m", "not slow", "-p", "no:cacheprovider"]
        run = [python, "-m", "pytest", "-q", *options, "-k", chosen, str(folder / "tests")]
        # Only the wheel may answer: a PYTHONPATH would let the checkout's sources in.
        return subprocess.run(run, env={**os.environ, "PYTHONPATH": ""}, check=False).returncode == 0


def main() -> int:
    """Build the wheels, test each package in its own environment, and return the exit status."""
    parser = argparse.ArgumentParser(description="Test each package by itself.")
    parser.add_argument("names", nargs="*", help="distributions to test (default: all)")
    parser.add_argument("--uv", default="uv", help="the uv that builds and installs")
    arguments = parser.parse_args()
    uv = str(Path(arguments.uv).resolve()) if os.sep in arguments.uv else arguments.uv
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        wheels, pins = Path(folder), Path(folder) / "pins.txt"
        subprocess.run([uv, "build", "-q", "--all-packages", "--wheel", "-o", folder], cwd=ROOT, check=True)
        pins.write_text(_pins(uv))
        for name in arguments.names or members():
            for extra, chosen in RUNS.get(name, {"": ""}).items():
                if not test_alone(name, extra, chosen, wheels, uv, pins):
                    failed.append(f"{name}[{extra}]")
    print(f"Failed alone: {', '.join(failed)}" if failed else "Every package passes its tests alone.")
    return 1 if failed else 0


def _pins(uv: str) -> str:
    export = [uv, "export", "-q", "--frozen", "--all-packages", "--all-extras", "--no-emit-workspace", "--no-hashes"]
    return subprocess.run(export, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())

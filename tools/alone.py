"""Test each package by itself: its built wheel and what that wheel asks for, nothing else.

    alone.py [--uv UV] [--record] [NAME ...]

First the program in `tests/alone/<package>/main.py` runs in that environment, and the distributions in it are compared
with `distributions.txt` beside the program, so that none comes in unseen; `--record` writes the file. Then pytest and
hypothesis are added, and the package's own tests run.

A package whose tests need one of its extras for a part of them is tested twice, bare and with that extra. Two are
tested at once, and what one has said is printed when it is done.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from ranges import ROOT, members

# By the extra: which tests, as pytest's -k has it. Those that do not need the extra have been run without it.
RUNS = {
    "composer-dist": {"": "", "deepspeed": "deepspeed"},
    "composer-events": {"": "", "torch": ""},
    "composer-hf": {"": "", "peft": "peft or lora or adapter"},
    "composer-models": {"": "", "vision,coco": ""},
}
RUNNERS = ["pytest", "hypothesis"]
AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Run:
    """One package to be tested, with one of its extras or bare.

    Attributes:
        name: The distribution.
        extra: What to install with it, as it stands in the brackets.
        chosen: Which of its tests, as pytest's `-k` has it.
    """

    name: str
    extra: str
    chosen: str

    def __str__(self) -> str:
        return f"{self.name}[{self.extra}]" if self.extra else self.name

    @property
    def tests(self) -> Path:
        """The folder of the package's own tests."""
        return next(ROOT.glob(f"*/{self.name}")) / "tests"

    @property
    def program(self) -> Path:
        """What uses the package before anything else is installed."""
        return ROOT / "tests" / "alone" / self.name / "main.py"

    @property
    def size(self) -> int:
        """How much there is to do, roughly."""
        return sum(file.stat().st_size for file in self.tests.rglob("*.py"))


class Grown(Exception):
    """A package asks for more than it did."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Makes environments and tests packages in them.

    Attributes:
        folder: Where the environments are made, each in one of a few places that serve again and again.
        wheels: Where the wheels of all packages are.
        pins: A file with the version of everything else.
        uv: The uv that installs.
        records: Whether the lists of distributions are written instead of compared.
    """

    folder: Path
    wheels: Path
    pins: Path
    uv: str
    records: bool

    def test(self, run: Run, places: "queue.SimpleQueue[Path]") -> tuple[bool, str]:
        """Make an environment for one wheel, run the package's own tests in it, and say if they passed and what came.

        Args:
            run: What to test.
            places: Where there may be an environment; one is taken and put back.
        """
        place = places.get()
        try:
            said = self._install(run, place)
            if not run.extra:
                said += self._use(run, place)
            said += _call([*self._pip("install", place), "--constraint", str(self.pins), *RUNNERS]).stdout
            # What is slow has nothing to find out here that `make test` does not.
            options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "-k", run.chosen]
            command = [f"{place}/bin/python", "-m", "pytest", *options, str(run.tests)]
            tested = _call(command, env=self._variables(), check=False)
            return tested.returncode == 0, said + tested.stdout
        except subprocess.CalledProcessError as error:
            return False, f"{error}\n{error.stdout}"
        except Grown as error:
            return False, f"{error}\n"
        finally:
            shutil.rmtree(place, ignore_errors=True)
            places.put(place)

    def _install(self, run: Run, place: Path) -> str:
        projects = members()
        files = {
            sibling: next(self.wheels.glob(f"{sibling.replace('-', '_')}-*.whl"))
            for sibling in closure(run.name, run.extra, projects)
        }
        wanted = [f"{run if sibling == run.name else sibling} @ {file.as_uri()}" for sibling, file in files.items()]
        made = _call([self.uv, "venv", "-q", "--python", sys.executable, str(place)])
        return made.stdout + _call([*self._pip("install", place), "--constraint", str(self.pins), *wanted]).stdout

    def _use(self, run: Run, place: Path) -> str:
        """Run the package's program, and compare or record what was installed for it."""
        with tempfile.TemporaryDirectory() as elsewhere:
            used = _call([f"{place}/bin/python", str(run.program)], cwd=elsewhere, env=self._variables())
        frozen = _call([*self._pip("freeze", place)]).stdout.splitlines()
        found = sorted(line.replace("==", " @ ").partition(" @ ")[0] for line in frozen)
        file = run.program.with_name("distributions.txt")
        if self.records:
            file.write_text("\n".join(found) + "\n")
        elif new := sorted({*found} - {*file.read_text().splitlines()}):
            raise Grown(
                f"{run.name} brings distributions that {file.relative_to(ROOT)} does not list: {', '.join(new)}. "
                "If they have to be, record them with tools/alone.py --record."
            )
        return used.stdout

    def _pip(self, verb: str, place: Path) -> list[str]:
        return [self.uv, "pip", verb, "-q", "--python", f"{place}/bin/python"]

    def _variables(self) -> dict[str, str]:
        """Return the environment variables of the tests."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        # Only the wheel may answer: a PYTHONPATH would let the checkout's sources in. And what was compiled for one
        # environment serves the next one in the same place, since uv installs the same files there: to compile torch
        # and what is around it takes longer than most packages' tests.
        return {**variables, "PYTHONPATH": "", "PYTHONPYCACHEPREFIX": str(self.folder / "compiled")}


def closure(name: str, extra: str, projects: dict[str, dict]) -> list[str]:
    """Return the package and its siblings below it, so that none of them is looked for in a registry.

    Args:
        name: The package.
        extra: What is asked for in its brackets; siblings that only other extras name are left out.
        projects: The `[project]` tables of all packages.
    """
    found: list[str] = []
    todo = [(name, set(extra.split(",")))]
    while todo:
        name, extras = todo.pop()
        found += [] if name in found else [name]
        optional = projects[name].get("optional-dependencies", {})
        lines = [*projects[name]["dependencies"], *(line for extra in extras for line in optional.get(extra, []))]
        asked = [one for one in map(Requirement, lines) if one.name in projects]
        todo += [(one.name, one.extras) for one in asked if one.name not in found or one.extras]
    return found


def runs(names: list[str]) -> list[Run]:
    """Return what is to be tested, what takes longest first, so that at the end nobody waits long for another."""
    found = [Run(name, extra, chosen) for name in names for extra, chosen in RUNS.get(name, {"": ""}).items()]
    return sorted(found, key=lambda run: run.size, reverse=True)


def main() -> int:
    """Build the wheels, test each package in its own environment, and return the exit status."""
    parser = argparse.ArgumentParser(description="Test each package by itself.")
    parser.add_argument("names", nargs="*", help="distributions to test (default: all)")
    parser.add_argument("--record", action="store_true", help="write the lists of distributions")
    parser.add_argument("--uv", default="uv", help="the uv that builds and installs")
    arguments = parser.parse_args()
    uv = str(Path(arguments.uv).resolve()) if os.sep in arguments.uv else arguments.uv
    failed = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name)
        bench = Bench(folder, folder / "wheels", folder / "pins.txt", uv, arguments.record)
        subprocess.run([uv, "build", "-q", "--all-packages", "--wheel", "-o", bench.wheels], cwd=ROOT, check=True)
        bench.pins.write_text(_pins(uv))
        places: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(AT_ONCE):
            places.put(folder / f"environment{number}")
        started = {pool.submit(bench.test, run, places): run for run in runs(arguments.names or list(members()))}
        for future in as_completed(started):
            passed, said = future.result()
            print(f"== {started[future]} alone\n{said}", flush=True)
            failed += [] if passed else [str(started[future])]
    print(f"Failed alone: {', '.join(sorted(failed))}" if failed else "Every package passes its tests alone.")
    return 1 if failed else 0


def _call(command: list[str], **settings) -> subprocess.CompletedProcess:
    """Run a command and keep all that it says, by default in the belief that it will do well."""
    together = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, **{"check": True, **together, **settings})


def _pins(uv: str) -> str:
    export = [uv, "export", "-q", "--frozen", "--all-packages", "--all-extras", "--no-emit-workspace", "--no-hashes"]
    return subprocess.run(export, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())

"""Test each package by itself: its built wheel and what that wheel asks for, nothing else.

    alone.py [--uv UV] [--record] [NAME ...]

First the program in `tests/alone/<package>/main.py` runs in that environment, every module is imported to see that it
does nothing else than define names, and the distributions are compared with `distributions.txt` beside the program, so
that none comes in unseen; `--record` writes the file. Then pytest and hypothesis are added, and the package's own tests
run.

A package whose tests need one of its extras for a part of them is tested twice, bare and with that extra. And the
README's first script runs where composer-suite was installed from the folder of the wheels. Two are tested at once, and
what one has said is printed when it is done.
"""

import argparse
import queue
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import dist
from environments import Environment, Environments, prepare
from packaging.requirements import Requirement
from ranges import ROOT, members

# By the extra: which tests, as pytest's -k has it. Those that do not need the extra have been run without it.
RUNS = {
    "composer-dist": {"": "", "deepspeed": "deepspeed"},
    "composer-events": {"": "", "torch": ""},
    "composer-hf": {"": "", "peft": "peft or lora or adapter"},
    "composer-models": {"": "", "vision,coco,timm": ""},
}
RUNNERS = ["pytest", "hypothesis"]
AT_ONCE = 2
QUIET_IMPORTS = ROOT / "tests" / "alone" / "quiet_imports.py"


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
    def folder(self) -> Path:
        """The folder of the package."""
        return next(ROOT.glob(f"*/{self.name}"))

    @property
    def program(self) -> Path:
        """What uses the package before anything else is installed."""
        return ROOT / "tests" / "alone" / self.name / "main.py"

    @property
    def size(self) -> int:
        """How much there is to do, roughly."""
        return sum(file.stat().st_size for file in (self.folder / "tests").rglob("*.py"))


class Grown(Exception):
    """A package asks for more than it did."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Tests packages in environments of their own.

    Attributes:
        environments: Makes them.
        places: Where there may be one; each is taken, and put back when what was tested there is done.
        wheels: The folder with the wheels of all packages.
        records: Whether the lists of distributions are written instead of compared.
    """

    environments: Environments
    places: "queue.SimpleQueue[Path]"
    wheels: Path
    records: bool

    def test(self, run: Run) -> tuple[bool, str]:
        """Run a package's program and its own tests, and say if they passed and what came."""
        return self._in_an_environment(lambda environment: self._test(run, environment))

    def follow_readme(self) -> tuple[bool, str]:
        """Install composer-suite as a stranger would, run the README's first script, and say if it did well."""
        return self._in_an_environment(lambda environment: (True, follow_readme(environment, self.wheels)))

    def _in_an_environment(self, test: Callable[[Environment], tuple[bool, str]]) -> tuple[bool, str]:
        place = self.places.get()
        try:
            with self.environments.fresh(place) as environment:
                return test(environment)
        except subprocess.CalledProcessError as error:
            return False, f"{error}\n{error.stdout}"
        except (Grown, dist.Unfit) as error:
            return False, f"{error}\n"
        finally:
            self.places.put(place)

    def _test(self, run: Run, environment: Environment) -> tuple[bool, str]:
        said = self._install(run, environment)
        if not run.extra:
            said += self._use(run, environment)
        said += environment.install(*RUNNERS)
        # Slow tests and tests of several ranks find nothing here that `make test` does not: all files are imported, and
        # the other tests run.
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
        tests = str(run.folder / "tests")
        collected = environment.python(*pytest, "--collect-only", tests, check=False)
        if collected.returncode:
            return False, said + collected.stdout
        files = (run.folder / "tests").rglob("test_*.py")
        of_ranks = [file for file in files if file.parent.name == "launch" or "run_ranks(" in file.read_text()]
        options = ["-m", "not slow", "-k", run.chosen, *(f"--ignore={file}" for file in of_ranks)]
        tested = environment.python(*pytest, *options, tests, check=False)
        return tested.returncode == 0, said + tested.stdout

    def _install(self, run: Run, environment: Environment) -> str:
        files = {
            sibling: next(self.wheels.glob(f"{sibling.replace('-', '_')}-*.whl"))
            for sibling in closure(run.name, run.extra, members())
        }
        wanted = [f"{run if sibling == run.name else sibling} @ {file.as_uri()}" for sibling, file in files.items()]
        return environment.install(*wanted)

    def _use(self, run: Run, environment: Environment) -> str:
        """Run the package's program, import its modules, and compare or record what was installed for it."""
        [package] = (run.folder / "src").iterdir()
        with tempfile.TemporaryDirectory() as elsewhere:
            used = environment.python(str(run.program), cwd=elsewhere).stdout
            used += environment.python(str(QUIET_IMPORTS), package.name, cwd=elsewhere).stdout
        found = sorted(line.replace("==", " @ ").partition(" @ ")[0] for line in environment.frozen())
        file = run.program.with_name("distributions.txt")
        if self.records:
            file.write_text("\n".join(found) + "\n")
        elif new := sorted({*found} - {*file.read_text().splitlines()}):
            raise Grown(
                f"{run.name} brings distributions that {file.relative_to(ROOT)} does not list: {', '.join(new)}. "
                "If they have to be, record them with tools/alone.py --record."
            )
        return used


def follow_readme(environment: Environment, wheels: Path) -> str:
    """Install composer-suite from a folder of wheels, run the README's first script, and return what was said.

    Raises:
        dist.Unfit: If a package of this workspace came from elsewhere.
        subprocess.CalledProcessError: If it cannot be installed, or the script fails.
    """
    said = environment.install("--find-links", str(wheels), "composer-suite")
    built = {f"{name}=={project['version']}" for name, project in members().items()}
    ours = {line for line in environment.frozen() if line.startswith("composer-")}
    if strange := sorted(ours - built):
        raise dist.Unfit(f"pip install composer-suite found {', '.join(strange)}, which was not built here.")
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


def package(name: str) -> str:
    """Return the name of a package that was typed.

    Raises:
        argparse.ArgumentTypeError: If this workspace has none of that name.
    """
    if name not in (known := members()):
        raise argparse.ArgumentTypeError(f"{name!r} is no package of this workspace. Name some of {', '.join(known)}.")
    return name


def runs(names: list[str]) -> list[Run]:
    """Return what is to be tested, what takes longest first, so that at the end nobody waits long for another."""
    found = [Run(name, extra, chosen) for name in names for extra, chosen in RUNS.get(name, {"": ""}).items()]
    return sorted(found, key=lambda run: run.size, reverse=True)


def main() -> int:
    """Build the wheels, test each package in its own environment, and return the exit status."""
    parser = argparse.ArgumentParser(description="Test each package by itself.")
    parser.add_argument("names", nargs="*", type=package, metavar="NAME", help="distributions to test (default: all)")
    parser.add_argument("--record", action="store_true", help="write the lists of distributions")
    parser.add_argument("--uv", type=dist.runnable, default="uv", help="the uv that builds and installs")
    arguments = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name)
        environments = prepare(arguments.uv, folder)
        bench = Bench(environments, queue.SimpleQueue(), folder / "wheels", arguments.record)
        dist.build(environments.uv, bench.wheels)
        for number in range(AT_ONCE):
            bench.places.put(folder / f"environment{number}")
        started = {pool.submit(bench.test, run): f"{run} alone" for run in runs(arguments.names or list(members()))}
        if not arguments.names:
            started[pool.submit(bench.follow_readme)] = "composer-suite as the README has it"
        for future in as_completed(started):
            passed, said = future.result()
            print(f"== {started[future]}\n{said}", flush=True)
            failed += [] if passed else [started[future]]
    print(f"Failed: {', '.join(sorted(failed))}" if failed else "Every package passes its tests alone.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

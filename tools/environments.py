"""Fresh environments to install wheels into, in which everything else has the version that the lock has."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ranges import ROOT


@dataclass(frozen=True, slots=True)
class Environments:
    """Makes environments, one at a time in each place.

    Attributes:
        uv: The uv that installs.
        pins: A file with the version of everything that is not ours.
        compiled: The folder for compiled modules.
    """

    uv: str
    pins: Path
    compiled: Path

    @contextmanager
    def fresh(self, place: Path) -> "Iterator[Environment]":
        """Make an empty environment in a folder that is not there, and remove it in the end."""
        try:
            call([self.uv, "venv", "-q", "--python", sys.executable, str(place)])
            yield Environment(place, self)
        finally:
            shutil.rmtree(place, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment.

    Attributes:
        place: Its folder.
        made_by: What it shares with others.
    """

    place: Path
    made_by: Environments

    def install(self, *wanted: str) -> str:
        """Install what is named, or what options name, and return what uv says."""
        return call([*self._pip("install"), "--constraint", str(self.made_by.pins), *wanted]).stdout

    def frozen(self) -> list[str]:
        """Return a line for each distribution that is installed, as in `name==1.2` or `name @ file:///name.whl`."""
        return call(self._pip("freeze")).stdout.splitlines()

    def python(self, *arguments: str, **settings) -> subprocess.CompletedProcess:
        """Run Python, where only what is installed can be imported, and return how that went."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        # Only the wheel may answer: a PYTHONPATH would let the checkout's sources in. And what was compiled for one
        # environment serves the next one in the same place, since uv installs the same files there: to compile torch
        # and what is around it takes longer than most packages' tests.
        own = {"PYTHONPATH": "", "PYTHONPYCACHEPREFIX": str(self.made_by.compiled)}
        # Several environments run at a time, and threads of one would wait for those of another.
        own["OMP_NUM_THREADS"] = "1"
        return call([f"{self.place}/bin/python", *arguments], env={**variables, **own}, **settings)

    def _pip(self, verb: str) -> list[str]:
        return [self.made_by.uv, "pip", verb, "-q", "--python", f"{self.place}/bin/python"]


def prepare(uv: str, folder: Path) -> Environments:
    """Put what environments share into a folder, and return what makes them.

    Args:
        uv: The uv that installs, as `dist.runnable` returns it.
        folder: An empty folder.
    """
    options = ["-q", "--frozen", "--all-packages", "--all-extras", "--no-emit-workspace", "--no-hashes"]
    pins = folder / "pins.txt"
    pins.write_text(call([uv, "export", *options], cwd=ROOT, stderr=None).stdout)
    return Environments(uv, pins, folder / "compiled")


def call(command: list[str], **settings) -> subprocess.CompletedProcess:
    """Run a command and keep all that it says, by default in the belief that it will do well."""
    together = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, **{"check": True, **together, **settings})

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from composer_dist.launch.main import main

PREFIXES = (
    "PET_",
    "PMI_",
    "MPI_",
    "MOSAICML_",
    "COMPOSER_",
    "JOB_COMPLETION_",
    "BASE_RANK",
    "OMP_",
    "RUN_NAME",
    "SKYPILOT_",
)


@pytest.fixture(autouse=True)
def no_cluster(environ):
    """The variables of no cluster."""
    for variable in [name for name in environ if name.startswith(PREFIXES)]:
        del environ[variable]


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path, environ, monkeypatch):
    """Where a launch that fails leaves its logs."""
    environ["TMPDIR"] = str(tmp_path / "temporary")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", environ["TMPDIR"])


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a program for the ranks to run."""

    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text("import os, sys, time\nrank = os.environ['RANK']\n" + textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def launch(capfd):
    """Return a function that launches in this process, and returns the status, stdout and stderr."""

    def run(*arguments):
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        return (status, *capfd.readouterr())

    return run


def _hear_hangups():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def started():
    """Return a function that starts a launcher as a process; nothing of it is left after the test."""
    launchers = []

    def start(*arguments, **settings):
        command = [sys.executable, "-m", "composer_dist.launch", *map(str, arguments)]
        # Tests that run below nohup ignore SIGHUP, and what they start would, too.
        usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": _hear_hangups}
        launcher = subprocess.Popen(command, text=True, start_new_session=True, **(usual | settings))
        launchers.append(launcher)
        return launcher

    yield start
    for launcher in launchers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # ranks that outlive it hold the pipes
            launcher.communicate(timeout=20)
        for stream in filter(None, (launcher.stdout, launcher.stderr)):
            stream.close()


@pytest.fixture
def wait_for():
    """Return a function that waits until a condition holds, and returns what it gave."""

    def wait(condition, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.05)
        return value

    return wait


@pytest.fixture
def running():
    """Return a function that returns the processes whose command line has a text in it."""

    def find(text):
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                if state != "Z" and text in command and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    return find

"""Shared memory of killed runs is deleted, and that of running ones is kept."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from composer_dist.stale_memory import clean_stale_shared_memory, find_stale_shared_memory

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm, which only Linux has")

HOLD = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
held = [SharedMemory(name, create=True, size=64) for name in sys.argv[1:]]
print("held", flush=True)
time.sleep(300)
"""


@contextmanager
def holding(*names):
    """Let another process hold segments, in a group of its own with the helper that would clean up after it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *names], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        kill(process)
        for name in names:
            Path("/dev/shm", name).unlink(missing_ok=True)


def kill(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def wait_until_stale(name):
    """Wait until what is as new as if it were being made would be deleted."""
    deadline = time.monotonic() + 30
    while Path("/dev/shm", name) not in find_stale_shared_memory():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def number():
    """A dataset's number that no run on this machine comes to."""
    return f"{900000 + os.getpid() % 90000:06}"


def test_what_a_killed_run_left_is_deleted_with_its_locks(number, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = tmp_path / f"{number}_barrier_filelock"
    lock.touch()
    with holding(f"{number}_locals", f"{number}_epoch_data") as process:
        kill(process)
        wait_until_stale(f"{number}_locals")
        removed = clean_stale_shared_memory()
    expected = {f"/dev/shm/{number}_locals", f"/dev/shm/{number}_epoch_data", str(lock)}
    assert expected <= set(removed)
    assert not any(os.path.exists(path) for path in expected)


def test_what_a_living_run_uses_stays(number):
    with holding(f"{number}_locals", f"{number}_next_epoch"):
        other = f"{int(number) + 1:06}"
        with holding(f"{other}_locals") as process:
            kill(process)
            wait_until_stale(f"{other}_locals")  # by now the living run's would be old enough
            clean_stale_shared_memory()
        assert Path(f"/dev/shm/{number}_locals").exists()
        assert Path(f"/dev/shm/{number}_next_epoch").exists()


def test_memory_of_other_programs_stays(number):
    with holding(f"{number}_locals", f"{number}_weights", f"psm_{number}") as process:
        kill(process)
        wait_until_stale(f"{number}_locals")
        clean_stale_shared_memory()
        assert Path(f"/dev/shm/{number}_weights").exists()
        assert Path(f"/dev/shm/psm_{number}").exists()

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from composer_checkpoint import lock as lock_module
from composer_checkpoint.errors import StorageError
from composer_checkpoint.lock import LOCK_NAME, FolderInUseError, FolderLock

HOLD = """
import sys
from composer_checkpoint.lock import FolderLock
lock = FolderLock(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read(1)
lock.release()
"""


@pytest.fixture
def other_process(tmp_path):
    """Start a process that holds the lock of the folder until it is told to let go."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(params=["locks", "no-locks"])
def any_file_system(request, monkeypatch):
    """A file system that has locks, and one that has none, in this process."""
    if request.param == "no-locks":

        def no_locks(*_):
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "lockf", no_locks)


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path, other_process):
    process = other_process()
    with pytest.raises(FolderInUseError, match=rf"process {process.pid} on .* is saving checkpoints there") as caught:
        FolderLock(tmp_path).acquire()
    assert isinstance(caught.value, StorageError)


def test_a_second_process_waits_as_long_as_it_is_told_to(tmp_path, other_process):
    process = other_process()
    process.stdin.write("x")
    process.stdin.flush()
    with FolderLock(tmp_path, timeout_s=30) as lock:
        assert lock.held


def test_the_lock_of_a_killed_process_is_taken_over_and_that_is_logged(tmp_path, other_process, caplog):
    process = other_process()
    process.kill()
    process.wait()
    with FolderLock(tmp_path):
        assert f"Took over the lock of {tmp_path} from process {process.pid}" in caplog.text


@pytest.mark.usefixtures("any_file_system")
def test_nothing_stays_in_the_folder_after_the_lock_is_given_back(tmp_path):
    with FolderLock(tmp_path / "made"):
        assert len(list((tmp_path / "made").iterdir())) >= 1
    assert list((tmp_path / "made").iterdir()) == []


def test_two_savers_of_one_process_share_the_lock_and_the_last_gives_it_back(tmp_path):
    first, second = FolderLock(tmp_path).acquire(), FolderLock(tmp_path).acquire()
    first.release()
    assert (tmp_path / LOCK_NAME).exists()
    assert second.held
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_held_is_not_taken_twice_by_the_same_object(tmp_path):
    with FolderLock(tmp_path) as lock, pytest.raises(RuntimeError, match="held already"):
        lock.acquire()


def test_a_forked_child_does_not_hold_the_lock_and_cannot_give_it_back(tmp_path):
    lines = """
import os, sys
from composer_checkpoint.lock import FolderInUseError, FolderLock
lock = FolderLock(sys.argv[1]).acquire()
if os.fork() == 0:
    held = lock.held
    lock.release()
    try:
        FolderLock(sys.argv[1]).acquire()
    except FolderInUseError:
        os._exit(10 + held)
    os._exit(20)
print(os.waitstatus_to_exitcode(os.wait()[1]), lock.held)
"""
    done = subprocess.run(
        [sys.executable, "-c", lines, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "10 True\n"


def test_a_lock_that_was_given_back_between_our_opening_and_our_locking_is_taken_anew(tmp_path, monkeypatch):
    lock_it, taken = fcntl.lockf, []

    def lose_the_name_first(descriptor, how):
        if not taken:
            (tmp_path / LOCK_NAME).unlink()  # what the owner does before it lets go
        taken.append(descriptor)
        return lock_it(descriptor, how)

    monkeypatch.setattr(fcntl, "lockf", lose_the_name_first)
    with FolderLock(tmp_path):
        assert len(taken) == 2
        assert (tmp_path / LOCK_NAME).exists()


def test_without_locks_of_the_system_a_living_owner_is_respected_and_a_dead_one_is_not(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    owner = tmp_path / ".composer-checkpoint.owner"
    with FolderLock(tmp_path):
        living = owner.read_bytes()
    owner.write_bytes(living)
    with pytest.raises(FolderInUseError, match=f"process {os.getpid()}"):
        FolderLock(tmp_path).acquire()
    dead = subprocess.run(
        [sys.executable, "-c", "from composer_checkpoint.names import this_writer; print(this_writer())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    owner.write_text(f'{{"writer": "{dead}", "host": "here", "pid": 17}}')
    with FolderLock(tmp_path):
        assert "Took over the lock" in caplog.text
    assert not owner.exists()


def test_without_locks_of_the_system_an_owner_on_another_machine_must_be_removed_by_hand(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    owner = tmp_path / ".composer-checkpoint.owner"
    owner.write_text('{"writer": "0badcafe-17-1234", "host": "far", "pid": 17}')
    with pytest.raises(FolderInUseError, match=rf"process 17 on far .* delete {owner}"):
        FolderLock(tmp_path).acquire()


@pytest.mark.parametrize("content", [b"", b"not json", b"[]", b'{"writer": 3}', b'{"writer": "x"}'])
def test_a_lock_file_with_any_content_is_taken_when_nobody_holds_it(tmp_path, content):
    (tmp_path / LOCK_NAME).write_bytes(content)
    with FolderLock(tmp_path) as lock:
        assert lock.held


def test_many_processes_that_want_the_lock_have_it_one_after_the_other(tmp_path):
    lines = """
import sys, pathlib
from composer_checkpoint.lock import FolderLock
counter = pathlib.Path(sys.argv[1]) / "counter"
for _ in range(25):
    with FolderLock(sys.argv[1], timeout_s=60):
        counter.write_text(str(int(counter.read_text()) + 1))
"""
    (tmp_path / "counter").write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", lines, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(timeout=180) for process in processes] == [0, 0, 0]
    assert (tmp_path / "counter").read_text() == "75"
    assert lock_module._holds == {}

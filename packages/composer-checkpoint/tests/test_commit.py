import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from composer_checkpoint import commit
from composer_checkpoint.commit import read_pointer, replace_pointer, write_atomically
from composer_checkpoint.errors import CheckpointConflictError, StorageError
from composer_checkpoint.lock import remove_leftovers


def contents(folder):
    """Every file below a folder with its text, and every link with its target."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def write_file(path, text, *, then=lambda: None, **options):
    with write_atomically(path, **options) as unfinished:
        (unfinished / "a" if options.get("folder") else unfinished).write_text(text)
        then()


def raising(error):
    def then():
        raise error

    return then


def write_folder(path, **files):
    with write_atomically(path, folder=True) as unfinished:
        for name, text in files.items():
            (unfinished / name).write_text(text)


@pytest.mark.parametrize("name", ["file/x.pt", "file/below/x.pt", "dangling/x.pt"])
@pytest.mark.parametrize("folder", [False, True])
def test_a_file_where_a_folder_must_be_is_named(tmp_path, name, folder):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError, match=rf"{name.partition('/')[0]} is not a folder") as caught:
        write_file(tmp_path / name, "new", folder=folder)
    assert caught.value.errno == errno.ENOTDIR
    assert contents(tmp_path) == {"file": "mine", "dangling": str(tmp_path / "nothing")}


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that takes no new folders")
def test_a_folder_that_the_file_system_does_not_take_is_a_fault_of_storage():
    with pytest.raises(StorageError, match=r"/proc/runs/here cannot be made: .*Save to another folder") as caught:
        write_file("/proc/runs/here/x.pt", "new")
    assert caught.value.errno == errno.ENOENT


@pytest.fixture
def unprivileged():
    """Run lines in a process that may not do what root may; the folder is one that it can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)

    def run(lines):
        # Python's own files may be root's: what is needed is imported before.
        drop = (
            "import os, sys\n"
            "from composer_checkpoint.commit import write_atomically\n"
            "from composer_checkpoint.errors import StorageError\n"
            "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        )
        return subprocess.run(
            [sys.executable, "-c", drop + lines, str(folder)], capture_output=True, text=True, timeout=60, check=False
        )

    yield folder, run
    folder.chmod(0o777)
    shutil.rmtree(folder)


def test_a_file_appears_whole_under_its_name_and_nothing_else_stays(tmp_path):
    with write_atomically(tmp_path / "deep" / "ep1.pt") as unfinished:
        unfinished.write_text("one")
        assert not (tmp_path / "deep" / "ep1.pt").exists()
        assert unfinished.parent == tmp_path / "deep"
    assert contents(tmp_path) == {"deep/ep1.pt": "one"}


def test_a_folder_appears_whole_under_its_name(tmp_path):
    write_folder(tmp_path / "ep1", a="1", b="2")
    assert contents(tmp_path) == {"ep1/a": "1", "ep1/b": "2"}


@pytest.mark.parametrize("swaps", [True, False], ids=["swap", "no-swap"])
def test_a_folder_that_exists_is_replaced_as_a_whole(tmp_path, monkeypatch, swaps):
    if not swaps:  # a file system that cannot
        monkeypatch.setattr(commit.durability, "exchange", lambda one, other: False)
    write_folder(tmp_path / "ep1", a="old", gone="old")
    write_folder(tmp_path / "ep1", a="new")
    assert contents(tmp_path) == {"ep1/a": "new"}


@pytest.mark.parametrize("swaps", [True, False], ids=["swap", "no-swap"])
def test_a_folder_replaces_a_file(tmp_path, monkeypatch, swaps):
    if not swaps:
        monkeypatch.setattr(commit.durability, "exchange", lambda one, other: False)
    (tmp_path / "x").write_text("file")
    write_folder(tmp_path / "x", a="2")
    assert contents(tmp_path) == {"x/a": "2"}


@pytest.mark.parametrize("name", ["x", ""])
def test_a_file_never_replaces_a_folder(tmp_path, monkeypatch, name):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "precious").write_text("1")
    monkeypatch.chdir(tmp_path / "x" if not name else tmp_path)  # an empty name is the current folder
    with pytest.raises(FileExistsError, match="x is a folder, and a file is to be written"), write_atomically(name):
        pytest.fail("nothing is to be written")
    assert contents(tmp_path) == {"x/precious": "1"}


def test_a_folder_that_came_meanwhile_is_not_replaced_by_a_file(tmp_path):
    def write():
        with write_atomically(tmp_path / "x") as unfinished:
            unfinished.write_text("file")
            write_folder(tmp_path / "x", a="1")

    with pytest.raises(OSError, match="x"):
        write()
    assert contents(tmp_path) == {"x/a": "1"}


def test_a_reader_never_finds_a_folder_missing_while_it_is_replaced(tmp_path):
    write_folder(tmp_path / "ep1", a="0")
    done, missing = threading.Event(), []

    def look():
        while not done.is_set():
            if not (tmp_path / "ep1").exists():
                missing.append(time.time())

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(50):
        write_folder(tmp_path / "ep1", a=str(number))
    done.set()
    reader.join()
    assert missing == []


def test_after_an_exception_the_old_one_is_as_it_was_and_nothing_else_stays(tmp_path):
    (tmp_path / "ep1.pt").write_text("old")
    for name, folder in (("ep1.pt", False), ("ep1", True)):
        with pytest.raises(KeyError):
            write_file(tmp_path / name, "half", folder=folder, then=raising(KeyError("boom")))
    assert contents(tmp_path) == {"ep1.pt": "old"}


def test_an_interrupt_from_the_keyboard_leaves_nothing_either(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "ep1.pt", "half", then=raising(KeyboardInterrupt()))
    assert list(tmp_path.iterdir()) == []


def test_without_overwrite_what_exists_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "ep1.pt").write_text("old")
    ran = []
    with pytest.raises(FileExistsError, match=r"ep1\.pt exists, and overwrite=False") as caught:
        write_file(tmp_path / "ep1.pt", "new", overwrite=False, then=lambda: ran.append(True))
    assert isinstance(caught.value, CheckpointConflictError)
    assert not ran


@pytest.mark.parametrize("folder", [False, True])
def test_without_overwrite_what_appears_meanwhile_is_not_replaced(tmp_path, folder):
    with pytest.raises(CheckpointConflictError):
        write_file(
            tmp_path / "x", "mine", overwrite=False, folder=folder, then=lambda: (tmp_path / "x").write_text("theirs")
        )
    assert contents(tmp_path) == {"x": "theirs"}


def test_writing_nothing_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="Nothing was written"), write_atomically(tmp_path / "x"):
        pass


def test_the_body_may_change_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with write_atomically("ep1.pt") as unfinished:
        monkeypatch.chdir("elsewhere")
        unfinished.write_text("one")
    assert contents(tmp_path) == {"ep1.pt": "one"}


def test_a_name_as_long_as_names_may_be_is_written(tmp_path):
    with write_atomically(tmp_path / ("n" * 255)) as unfinished:
        unfinished.write_text("one")
    assert contents(tmp_path) == {"n" * 255: "one"}


def test_a_full_disk_is_told_with_the_free_space_and_the_need(tmp_path):
    def fill():
        with open("/dev/full", "w") as full:  # a real device that is full
            full.write("x")

    (tmp_path / "ep1.pt").write_text("old")
    with pytest.raises(
        StorageError, match=r"No space left on device.*Free space: \d+ bytes; needed: 12 bytes"
    ) as caught:
        write_file(tmp_path / "ep1.pt", "half", need_bytes=12, then=fill)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value.__cause__, OSError)
    assert contents(tmp_path) == {"ep1.pt": "old"}


def test_what_cannot_fit_is_refused_before_the_body_runs(tmp_path):
    ran = []
    with pytest.raises(StorageError, match=f"needed: {1 << 62} bytes"):
        write_file(tmp_path / "ep1.pt", "new", need_bytes=1 << 62, then=lambda: ran.append(True))
    assert not ran
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at inline_container.cc:664] . PytorchStreamWriter failed writing file data/0"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["torch", "safetensors"],
)
def test_libraries_say_that_a_disk_is_full_in_their_own_ways(tmp_path, error):
    with pytest.raises(StorageError, match="Free space"):
        write_file(tmp_path / "ep1.pt", "half", then=raising(error))
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_is_told_and_leaves_the_old_file(tmp_path):
    (tmp_path / "ep1.pt").write_text("old")
    lines = """
import resource, signal, sys
from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with write_atomically(sys.argv[1]) as unfinished:
        unfinished.write_bytes(bytes(5000))
except StorageError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", lines, str(tmp_path / "ep1.pt")], capture_output=True, text=True, timeout=60, check=True
    )
    assert "File too large" in done.stdout
    assert "ulimit -f" in done.stdout
    assert contents(tmp_path) == {"ep1.pt": "old"}


def test_a_folder_that_may_not_be_written_to_is_told(unprivileged):
    folder, run = unprivileged
    (folder / "ep1.pt").write_text("old")
    folder.chmod(0o555)
    done = run("""
try:
    with write_atomically(sys.argv[1] + "/ep1.pt") as unfinished:
        unfinished.write_text("new")
except StorageError as error:
    print(error)
""")
    assert "Permission denied" in done.stdout, done.stderr
    assert contents(folder) == {"ep1.pt": "old"}


def test_permission_that_is_lost_while_writing_is_told_and_leaves_the_old_one(unprivileged):
    folder, run = unprivileged
    (folder / "saves").mkdir()
    (folder / "saves").chmod(0o777)
    done = run("""
target = sys.argv[1] + "/own/ep1.pt"
os.makedirs(os.path.dirname(target))
with write_atomically(target) as unfinished:
    unfinished.write_text("old")
try:
    with write_atomically(target) as unfinished:
        unfinished.write_text("new")
        os.chmod(os.path.dirname(target), 0o555)
except StorageError as error:
    print(error)
print(open(target).read())
os.chmod(os.path.dirname(target), 0o777)
""")
    assert "Permission denied" in done.stdout, done.stderr
    assert done.stdout.endswith("old\n")


def test_what_a_living_process_is_writing_stays(tmp_path):
    with write_atomically(tmp_path / "ep1", folder=True) as unfinished:
        (unfinished / "a").write_text("half")
        assert remove_leftovers(tmp_path, locked=True) == []
        assert (unfinished / "a").exists()


def test_what_a_killed_process_left_is_removed_also_below(tmp_path):
    lines = """
import os, signal, sys
from composer_checkpoint.commit import write_atomically
with write_atomically(sys.argv[1] + "/sub/ep1", folder=True) as folder:
    (folder / "a").write_text("half")
    with write_atomically(sys.argv[1] + "/ep1.pt") as file:
        file.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", lines, str(tmp_path)], timeout=60, check=False)
    assert len(contents(tmp_path)) == 2
    assert len(remove_leftovers(tmp_path)) == 2
    assert contents(tmp_path) == {}


def test_what_another_machine_is_writing_stays_until_the_folder_is_locked(tmp_path):
    (tmp_path / "ep1.pt.tmp-0badcafe-17-1234-01234567").write_text("half")
    assert remove_leftovers(tmp_path) == []
    assert len(remove_leftovers(tmp_path, locked=True)) == 1


def test_a_folder_whose_writer_died_while_replacing_it_without_swaps_is_put_back(tmp_path):
    aside = tmp_path / "ep1.old-0badcafe-17-1234-01234567"
    aside.mkdir()
    (aside / "a").write_text("whole")
    remove_leftovers(tmp_path, locked=True)
    assert contents(tmp_path) == {"ep1/a": "whole"}


def test_files_with_names_of_other_kinds_are_never_removed(tmp_path):
    names = ["ep1.pt", "ep1.tmp", "ep1.pt.tmp-mine", "x.tmp-0badcafe-17-1234", "notes.old-0badcafe-17-1234-xyz"]
    for name in names:
        (tmp_path / name).write_text("kept")
    assert remove_leftovers(tmp_path, locked=True) == []
    assert sorted(contents(tmp_path)) == sorted(names)


def test_a_pointer_is_relative_and_follows_the_folder_when_it_moves(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ep1.pt").write_text("one")
    replace_pointer(tmp_path / "run" / "latest.pt", tmp_path / "run" / "ep1.pt")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest.pt").read_text() == "one"
    assert read_pointer(tmp_path / "moved" / "latest.pt") == tmp_path / "moved" / "ep1.pt"


def test_a_pointer_is_never_missing_while_it_is_replaced(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("whole")
    replace_pointer(tmp_path / "latest", tmp_path / "a")
    done, problems = threading.Event(), []

    def read():
        while not done.is_set():
            try:
                assert (tmp_path / "latest").read_text() == "whole"
            except Exception as error:
                problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        replace_pointer(tmp_path / "latest", tmp_path / "ab"[number % 2])
    done.set()
    reader.join()
    assert problems == []


def test_a_pointer_is_a_text_file_where_there_are_no_links(tmp_path, monkeypatch):
    def no_links(*_, **__):
        raise PermissionError(1, "Operation not permitted")  # what vfat says

    monkeypatch.setattr(os, "symlink", no_links)
    (tmp_path / "ep1.pt").write_text("one")
    replace_pointer(tmp_path / "latest.pt", tmp_path / "ep1.pt")
    assert contents(tmp_path) == {"ep1.pt": "one", "latest.pt": "ep1.pt"}
    assert read_pointer(tmp_path / "latest.pt") == tmp_path / "ep1.pt"


def test_a_folder_of_the_pointers_name_is_not_replaced(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointConflictError, match="is a folder"):
        replace_pointer(tmp_path / "latest", tmp_path / "ep1")


def test_a_checkpoint_is_not_replaced_by_a_link_to_itself(tmp_path):
    (tmp_path / "ep1").write_bytes(b"weights")
    with pytest.raises(CheckpointConflictError, match="a link to itself"):
        replace_pointer(tmp_path / "ep1", tmp_path / "." / "ep1")
    assert (tmp_path / "ep1").read_bytes() == b"weights"


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95.", b"two\nlines", b"x" * 5000, b"../elsewhere/ep1.pt"])
def test_a_file_that_is_no_pointer_is_not_read_as_one(tmp_path, content):
    (tmp_path / "latest").write_bytes(content)
    assert read_pointer(tmp_path / "latest") is None

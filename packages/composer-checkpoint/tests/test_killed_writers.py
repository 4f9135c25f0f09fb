"""Writers that are killed: at every line of the commit, at random instants, and while torch writes."""

import json
import subprocess
import sys

import pytest

# One process without threads forks the writers, so that a hundred of them cost little, and reads what they leave.
HARNESS = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from composer_checkpoint.commit import replace_pointer, write_atomically
from composer_checkpoint.save_folder import find_newest
from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.lock import FolderLock, remove_leftovers

folder = Path(sys.argv[1])
os.fsync = lambda descriptor: None  # for power cuts: what a killed process has written, the system has


def fork(body):
    '''Start a writer; return its number and the end of a pipe on which it tells what it has committed.'''
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            body(lambda number: os.write(writer, number.to_bytes(4, "big")))
        finally:
            os._exit(7)
    os.close(writer)
    return pid, reader

def time_of_one(write):
    '''Return how long a new writer takes until it has committed.'''
    began = time.monotonic()
    pid, reader = fork(lambda tell: tell(write(1) or 1))
    assert told(reader) == 1
    os.waitpid(pid, 0)
    return time.monotonic() - began

def wait_for(count, reader):
    '''Return the last of the next so many numbers that a writer tells: however slow the machine is, it gets on.'''
    number = None
    for _ in range(count):
        number = int.from_bytes(os.read(reader, 4), "big")
    return number

def told(reader):
    data = b""
    while chunk := os.read(reader, 65536):
        data += chunk
    os.close(reader)
    return int.from_bytes(data[len(data) - len(data) % 4 - 4:][:4], "big") if len(data) >= 4 else None

def leftovers():
    return [path.name for path in folder.rglob("*") if ".tmp-" in path.name or ".old-" in path.name]
"""

COMMITS = (
    HARNESS
    + """
def write(number):
    text = f"{number:06d}" * 200
    with write_atomically(folder / f"ba{number}", folder=True) as unfinished:
        for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
            (unfinished / name).write_text(text)
    with write_atomically(folder / f"ba{number}.data") as unfinished:
        unfinished.write_text(text)
    replace_pointer(folder / "latest", folder / f"ba{number}")
    with write_atomically(folder / "same", folder=True) as unfinished:
        (unfinished / ".metadata").write_text(text)

def check(path):
    files = [path] if path.is_file() else sorted(path.iterdir())
    texts = {file.read_text() for file in files}
    if len(texts) != 1 or len(texts.pop()) != 1200 or (path.is_dir() and path.name != "same" and len(files) != 3):
        raise CorruptCheckpointError(f"{path} is torn")

def examine(before, committed):
    '''Assert the promise: nothing torn has a real name, nothing that was committed is gone.'''
    for path in folder.iterdir():
        if ".tmp-" not in path.name and ".old-" not in path.name and path.name[0] != ".":
            check(path)
    newest = find_newest(folder / "ba*", verify=check)
    number = int(newest.path.name.removeprefix("ba").removesuffix(".data"))
    assert number >= (before if committed is None else committed), (number, before, committed)
    assert not newest.skipped, newest
    assert (folder / "latest").exists() and (folder / "same").exists()
    remove_leftovers(folder)
    assert leftovers() == [], leftovers()
    for path in folder.glob("ba*"):
        its_number = int(path.name.removeprefix("ba").removesuffix(".data"))
        if its_number < number - 1 and path.name != os.readlink(folder / "latest"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return number

took_s = time_of_one(write)
"""
)

EVERY_LINE = (
    COMMITS
    + """
names = {"commit.py", "lock.py", "_durability.py"}

def die_at(step):
    count = 0
    def trace(frame, event, arg):
        if os.path.basename(frame.f_code.co_filename) not in names:
            return None
        nonlocal count
        count += event in ("line", "return")
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    return trace

step, number, killed = 0, 1, 0
while True:
    step += 1
    def body(tell):
        sys.settrace(die_at(step))
        write(number + 1)
        tell(number + 1)
    pid, reader = fork(body)
    committed = told(reader)
    killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    number = examine(number, committed)
    if committed is not None:
        break
print(json.dumps({"steps": step, "killed": killed}))
"""
)

RANDOM_INSTANTS = (
    COMMITS
    + """
chance = random.Random(17)
number = 1
for _ in range(100):
    def body(tell):
        for following in range(number + 1, number + 1000):
            write(following)
            tell(following)
    pid, reader = fork(body)
    committed = wait_for(chance.randrange(3), reader)
    time.sleep(chance.uniform(0, took_s))
    os.kill(pid, signal.SIGKILL)
    committed = told(reader) or committed
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    number = examine(number, committed)
print(json.dumps({"saved": number}))
"""
)

TORCH_FILES = (
    HARNESS
    + """
import torch
from composer_checkpoint import load_file, save_file, verify

torch.set_num_threads(1)

def write(number):
    state = {"state": {"model": {f"layer{index}": torch.full((64, 64), float(number)) for index in range(8)}}}
    with write_atomically(folder / f"ep0-ba{number}-rank0.pt") as unfinished:
        save_file(state, unfinished, info={"timestamp": {"batch": number}})
    replace_pointer(folder / "latest-rank0.pt", folder / f"ep0-ba{number}-rank0.pt")

took_s = time_of_one(write)
chance = random.Random(17)
number = 1
for _ in range(100):
    def body(tell):
        with FolderLock(folder):
            for following in range(number + 1, number + 1000):
                write(following)
                tell(following)
    pid, reader = fork(body)
    committed = wait_for(chance.randrange(3), reader)
    time.sleep(chance.uniform(0, took_s))
    os.kill(pid, signal.SIGKILL)
    committed = told(reader) or committed
    os.waitpid(pid, 0)
    with FolderLock(folder):
        remove_leftovers(folder, locked=True)
    assert leftovers() == [], leftovers()
    newest = find_newest(folder)
    assert not newest.skipped, newest
    found = newest.info["timestamp"]["batch"]
    assert found >= (number if committed is None else committed), (found, number, committed)
    weights = load_file(newest.path)["state"]["model"]
    assert len(weights) == 8 and all(bool((weight == found).all()) for weight in weights.values())
    number = found
    for path in folder.glob("ep0-*"):
        if path not in (newest.path, (folder / "latest-rank0.pt").resolve()):
            path.unlink()
print(json.dumps({"saved": number}))
"""
)


def run(script, folder):
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_writer_killed_at_every_line_of_the_commit_loses_at_most_what_it_was_writing(tmp_path):
    counts = run(EVERY_LINE, tmp_path)
    assert counts["steps"] > 200
    assert counts["killed"] == counts["steps"] - 1


def test_a_writer_killed_at_100_random_instants_loses_at_most_what_it_was_writing(tmp_path):
    assert run(RANDOM_INSTANTS, tmp_path)["saved"] > 50


@pytest.mark.slow
def test_after_100_kills_while_torch_saves_the_newest_committed_file_loads(tmp_path):
    assert run(TORCH_FILES, tmp_path)["saved"] > 20

"""What somebody sees who launches a training in which one rank fails: the cause last, an end soon, nothing left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("faulty_script.py")
COMPOSER = [sys.executable, "-m", "composer"]
BOUND_S = 10  # from the failure to the end of all ranks
START_S = 150  # two interpreters that import torch on a busy machine


def launch(fault, rank=1, **options):
    """Run the script on two ranks and return the finished process."""
    command = [*COMPOSER, "-n", "2", str(SCRIPT), fault, str(rank)]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S + BOUND_S, **options)


def processes_of(marker):
    """Return the command lines of running processes that were started with a marker in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return found


@pytest.fixture
def marked(request):
    """An environment by which all processes of one test are found again."""
    marker = f"COMPOSER_TEST={os.getpid()}-{abs(hash(request.node.nodeid))}"
    name, value = marker.split("=")
    return marker, os.environ | {name: value}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        ("forward", "raised in the forward pass of epoch 0, batch 2 on rank 1"),
        ("backward", "raised in the backward pass of epoch 0, batch 2 on rank 1"),
        ("callback", "raised by callback Faulty on Event.BATCH_END"),
        ("dataloader", "raised in the dataloader of epoch 0, batch 2 on rank 1"),
    ],
)
def test_the_failing_ranks_traceback_is_the_last_thing_said(fault, stage, marked, tmp_path):
    marker, environment = marked
    run = launch(fault, env=environment | {"COMPOSER_RUNS": str(tmp_path)})
    assert run.returncode == 1
    said = (run.stdout + run.stderr).rstrip().splitlines()
    assert any(line.startswith("ArithmeticError: no ") for line in said[-4:]), said[-10:]
    assert stage in said[-1] or stage in said[-2] or stage in said[-3]
    assert "trained to the end" not in run.stdout
    assert processes_of(marker) == []
    recorded = [json.loads(path.read_text())["error"] for path in tmp_path.glob("*/status.json")]
    assert len(recorded) == 1
    own, _, first = recorded[0].partition("Rank 1 failed first:\n")
    assert "Traceback" in own
    assert "ArithmeticError: no " in first
    assert "ArithmeticError" not in own


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(marked):
    marker, environment = marked
    run = launch("killed", env=environment)
    assert run.returncode == 128 + signal.SIGKILL
    assert "lobal rank 1" in run.stdout + run.stderr
    assert "SIGKILL" in run.stdout + run.stderr
    assert processes_of(marker) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "difference"),
    [("shape", "weight"), ("seed", "seed"), ("learning rate", "lr")],
)
def test_ranks_that_disagree_at_the_start_say_where(fault, difference):
    run = launch(fault)
    assert run.returncode == 1
    end = (run.stdout + run.stderr).rstrip()[-1500:]
    assert difference in end
    assert "on rank" in end


@pytest.mark.slow
def test_no_process_is_left_when_the_launcher_itself_is_killed(marked):
    marker, environment = marked
    command = [*COMPOSER, "-n", "2", str(SCRIPT), "stopped"]
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + START_S
    while len(processes_of(marker)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + START_S
    while processes_of(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(marker) == []

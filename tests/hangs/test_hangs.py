"""Runs in which one rank gets stuck, and what the launcher says about it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from composer_dist.launch.stacks import native

# What the report says of the stuck rank, by fault. A loop and a suspended rank are in `test_hangs_of_nodes.py`.
CAUSES = {
    "pipe": "stuck: rank 1 is waiting in a save or a load in get_stuck ({script}:",
    "worker": "stuck: rank 1 waits for a worker of its dataloader",
    "order": "different collectives: rank 0: all_reduce",
}
SCRIPT = Path(__file__).with_name("faulty_script.py")


def _launch(tmp_path, fault, *options, rank=1, num_ranks=2):
    environ = os.environ | {"COMPOSER_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "composer_dist.launch", "-n", str(num_ranks), *options]
    command += [str(SCRIPT), fault, str(rank), "5", str(tmp_path)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("fault", CAUSES)
def test_a_rank_that_gets_stuck_is_named_with_its_cause(tmp_path, fault):
    ended = _launch(tmp_path, fault, "--hang-timeout", "3")
    assert ended.returncode == 124, ended.stderr
    assert CAUSES[fault].format(script=SCRIPT) in ended.stderr
    assert ("stuck: rank 0" in ended.stderr) == (fault == "order")
    (report,) = (tmp_path / "runs").glob("*/hang.txt")
    assert "The stacks of rank 0" in report.read_text()
    assert "faulty_script.py" in report.read_text()


@pytest.mark.slow
def test_a_rank_that_gloo_aborts_for_the_shape_of_another_one_is_told_with_both_collectives(tmp_path):
    ended = _launch(tmp_path, "shape")
    assert ended.returncode == 128 + 6, ended.stderr
    assert "doesn't match expected size" in ended.stderr  # in Gloo's words
    # By a thread of Gloo, wherever the main thread is when the data comes.
    assert re.search("rank 0 was aborted (in .*)?(on|after) .* of batch 5. Gloo (does|may do) so if", ended.stderr)
    assert "The others: rank 1 called all_reduce number" in ended.stderr
    assert "of Float [1000] (" in ended.stderr


@pytest.mark.slow
def test_a_rank_that_leaves_with_exit_code_0_is_named(tmp_path):
    ended = _launch(tmp_path, "leave")
    assert ended.returncode != 0
    assert "stuck: rank 1 ended with exit code 0 on batch_end of batch 5" in ended.stderr


@pytest.mark.slow
def test_the_rank_for_which_another_one_timed_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DIST_TIMEOUT", "6")
    ended = _launch(tmp_path, "sleep")
    assert ended.returncode == 124, ended.stderr
    assert "stuck: rank 1 is waiting in get_stuck" in ended.stderr
    assert "rank 1 (PID" in ended.stderr.partition("failed first")[0].rpartition("composer: error:")[2]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["sleep", "lock"], ids=["in close", "at the end of Python"])
def test_a_rank_that_is_stuck_while_callbacks_are_closed_is_named(tmp_path, monkeypatch, fault):
    monkeypatch.setenv("FAULT_AT", "close")
    ended = _launch(tmp_path, fault, "--hang-timeout", "3")
    assert ended.returncode == 124, ended.stderr
    assert "stuck: rank 1 is waiting in get_stuck" in ended.stderr
    assert " on close of batch 40." in ended.stderr
    assert "stuck: rank 0" not in ended.stderr


@pytest.mark.slow
def test_under_torchrun_each_rank_without_progress_prints_its_stack_and_its_last_collective(tmp_path):
    environ = os.environ | {"COMPOSER_HANG_TIMEOUT": "2", "TORCH_FR_BUFFER_SIZE": "2000", "DIST_TIMEOUT": "10"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(SCRIPT), "sleep", "1", "5", str(tmp_path)]
    said, deadline_s = tmp_path / "said", time.monotonic() + 150
    expected = (
        r"composer: rank 1 has made no progress after the event batch_end \(callbacks\)",
        " in get_stuck",
        "composer: rank 0 has made no progress",
        "its last collective is gloo:all_reduce number .*, not done",
    )
    with said.open("w") as out:
        started = subprocess.Popen(command, env=environ | {"OMP_NUM_THREADS": "1"}, stdout=out, stderr=out)
    try:  # torchrun itself would wait for half a minute until it kills the rank that is stuck
        while not all(re.search(each, said.read_text()) for each in expected):
            assert time.monotonic() < deadline_s, said.read_text()
            assert started.poll() is None, said.read_text()
            time.sleep(0.1)
    finally:
        for process in psutil.Process(started.pid).children(recursive=True):
            process.kill()
        assert started.wait(timeout=60) != 0


def test_native_frames_come_from_py_spy(monkeypatch):
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr("composer_dist.launch.stacks._NATIVE_TIMEOUT_S", 60.0)
    code = "print('ready', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        probe = subprocess.run([folder / "py-spy", "dump", "--pid", str(process.pid)], capture_output=True)
        found = native([process.pid])
        process.communicate("\n")
    if probe.returncode:
        pytest.skip("this system does not let py-spy read other processes")
    assert "<module> (<string>:1)" in found[process.pid]
    assert "libc" in found[process.pid]

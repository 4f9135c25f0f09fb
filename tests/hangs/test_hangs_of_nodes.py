"""Two launchers on this machine, as if on two machines, and what both say about a rank that gets stuck."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_dist import get_free_tcp_port

SCRIPT = Path(__file__).with_name("faulty_script.py")
TIMEOUT_S = 150


@pytest.fixture
def launch(tmp_path):
    """Return a function that starts the launcher of a node; nothing of it is left after the test."""
    launchers = []

    def start(fault, rank, *options):
        environ = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
            "COMPOSER_RUNS": str(tmp_path / "runs"),
        }
        command = [sys.executable, "-m", "composer_dist.launch", "--stopped-timeout", "0", "--hang-timeout", "4"]
        command += [*map(str, options), str(SCRIPT), fault, str(rank), "5", str(tmp_path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        launchers.append(subprocess.Popen(command, env=environ, start_new_session=True, **pipes))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.kill()  # its guardian ends the ranks, which would otherwise have half a minute after a signal
        launcher.communicate(timeout=60)


def places(num_ranks):
    address = ["--world_size", sum(num_ranks), "--master_addr", "localhost", "--master_port", get_free_tcp_port()]
    bases = [sum(num_ranks[:node]) for node in range(len(num_ranks))]
    return [
        ["-n", number, *address, "--node_rank", node, "--base_rank", base]
        for node, (number, base) in enumerate(zip(num_ranks, bases, strict=True))
    ]


def report_of(folder):
    (report,) = (folder / "runs").glob("*/hang.txt")
    return report.read_text()


@pytest.mark.slow
def test_both_launchers_name_the_rank_of_the_second_node(tmp_path, launch):
    launchers = [launch("loop", 2, *place) for place in places([1, 2])]
    first, second = (launcher.communicate(timeout=TIMEOUT_S)[0] for launcher in launchers)
    for said, launcher in zip((first, second), launchers, strict=True):
        assert launcher.returncode == 124, said
        assert f"stuck: rank 2 is running in get_stuck ({SCRIPT}:" in said
        assert said.count("stuck: ") == 1
    assert "waiting for it: " in first
    assert "waited for rank 2, which is running in get_stuck" in first
    assert "(root cause)" not in first
    text = report_of(tmp_path)
    assert all(f"The stacks of rank {rank}" in text for rank in range(3))
    assert "in get_stuck" in text.partition("The stacks of rank 2")[2]


@pytest.mark.slow
def test_nodes_of_a_rendezvous_start_again_after_a_rank_was_suspended(tmp_path, launch):
    place = ["-n", 1, "--nnodes", 2, "--rdzv_endpoint", f"localhost:{get_free_tcp_port()}", "--max-restarts", 1]
    launchers = [launch("stop", 1, *place) for _ in range(2)]
    for launcher in launchers:
        said = launcher.communicate(timeout=TIMEOUT_S)[0]
        assert launcher.returncode == 0, said
        assert "stuck: rank 1 is suspended (SIGSTOP) on batch_end of batch 5" in said
        assert "starting all ranks again" in said


@pytest.mark.slow
def test_a_node_whose_launcher_does_not_answer_is_named(tmp_path, launch):
    first, second = (launch("sleep", 1, *place) for place in places([1, 1]))
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline_s
        assert second.poll() is None
        time.sleep(0.05)
    second.send_signal(signal.SIGSTOP)
    said = first.communicate(timeout=TIMEOUT_S)[0]
    assert first.returncode == 124, said
    assert "stuck: rank 1 is on a node that does not answer, " in said
    assert "stuck: rank 0" not in said

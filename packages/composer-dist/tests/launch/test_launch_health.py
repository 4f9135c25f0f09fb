"""What the server of the health needs, and what it says of ranks without a run."""

import socket
import subprocess
import sys

import pytest

from composer_dist.launch.args import HangTimeouts
from composer_dist.launch.watch import Watch
from composer_dist.progress import Board, Recorder
from composer_time import Timestamp

CALL = "import sys; from composer_dist.launch.main import main; sys.exit(main(sys.argv[1:]))"


def launch(port, script, setup=""):
    command = [sys.executable, "-c", setup + CALL, "--health-port", str(port), str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def script(tmp_path):
    """Return a script that would leave a file."""
    (tmp_path / "script.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    return tmp_path / "script.py"


def test_a_port_that_is_taken_is_named_before_a_rank_starts(script):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = launch(port, script)
    assert ended.returncode == 2
    assert f"cannot listen on --health-host=127.0.0.1 --health-port={port}: " in ended.stderr
    assert not script.with_name("ran").exists()


def test_the_missing_package_is_named_before_a_rank_starts(script):
    ended = launch(1234, script, "import sys; sys.modules['prometheus_client'] = None; ")
    assert ended.returncode == 2
    assert "Run `pip install 'composer-dist[health]'`" in ended.stderr
    assert not script.with_name("ran").exists()


@pytest.mark.parametrize("port", [0, 65536, -1])
def test_a_number_that_is_not_a_port_is_refused(port, script):
    ended = launch(port, script)
    assert ended.returncode == 2
    assert f"--health-port={port} must be a port" in ended.stderr


def test_ranks_that_are_not_ended_for_a_hang_are_still_seen_to_be_stuck(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("composer_dist.launch.watch.time.monotonic", lambda: now)
    board = Board(1)
    recorder = Recorder(board.slot(0), rank=0)
    recorder.enter("before_forward")
    watch = Watch(HangTimeouts.parse("off"), tmp_path)
    watch.begin(board, {0: {"RANK": "0"}}, {0: 1})
    seen = []
    for _ in range(2000):
        now += 1.0
        assert watch.look({}) is None
        seen.append(watch.is_stalled({}))
    assert not any(seen[:1700])  # the first batch may compile
    assert seen[-1]
    board.close()


def test_throughput_does_not_count_what_was_trained_before_a_resume(monkeypatch):
    pytest.importorskip("prometheus_client")
    from composer_dist.launch import health

    now = 100.0
    monkeypatch.setattr("composer_dist.launch.health.time.monotonic", lambda: now)
    board = Board(1)
    server = health.HealthServer("127.0.0.1", 0, lambda: health.Snapshot(board.read_all(), 0, None))
    recorder = Recorder(board.slot(0), rank=0)
    try:
        for samples, event in ((0, "init"), (5000, "after_load"), (5000, "batch_start"), (5300, "batch_end")):
            recorder.enter(event, Timestamp(sample=samples, batch=samples))
            recorder.leave(event)
            server.service_actions()
            now += 2.0
        values = {metric.name: metric.samples[0].value for metric in server.registry.collect()}
        assert values["composer_samples_per_second"] == 150
        assert values["composer_samples"] == 5300
        recorder.enter("batch_start", Timestamp(sample=4000, batch=4000))  # an earlier checkpoint
        server.service_actions()
        assert "composer_samples_per_second" not in {metric.name for metric in server.registry.collect()}
    finally:
        server.stop()
        board.close()

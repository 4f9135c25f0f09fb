"""The health of a run of two ranks, as a probe and Prometheus see it."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from composer_dist import get_free_tcp_port
from composer_dist.launch import health

SCRIPT = Path(__file__).with_name("watched_script.py")
TIMEOUT_S = 150


def get(port, path):
    """Return the status and the text at a path, or `None` if nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return None


def read_metrics(port):
    """Return the values by name and labels, whose names are in order."""
    _, text = get(port, "/metrics")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value for sample in samples}


def wait_for(process, condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "nothing has come"
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    return found


def test_a_client_that_is_lost_prints_nothing(capfd, monkeypatch):
    monkeypatch.setattr(health._Handler, "timeout", 0.1)
    server = health.HealthServer("127.0.0.1", 0, lambda: health.Snapshot([], 0, None))
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=TIMEOUT_S) as client:
            assert client.recv(1) == b""  # closed by the server
    finally:
        server.stop()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_run_is_healthy_then_stuck_then_started_again(tmp_path):
    port = get_free_tcp_port()
    environ = os.environ | {"COMPOSER_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "composer_dist.launch", "-n", "2", "--max-restarts", "1"]
    command += ["--hang-timeout", "3,checkpoint=60"]
    command += ["--shutdown-timeout", "3", "--health-port", str(port), str(SCRIPT), str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ, **pipes) as process:
        try:
            wait_for(process, lambda: get(port, "/healthz") == (200, "ok\n"))
            found = {("composer_checkpoint_batch",), ("composer_loss",)}
            wait_for(process, lambda: found <= read_metrics(port).keys())
            wait_for(process, lambda: read_metrics(port).get(("composer_samples_per_second",), 0) > 0)
            values = read_metrics(port)
            batches = [values["composer_batches_total", rank] for rank in "01"]
            assert min(batches) >= 10
            assert values["composer_checkpoint_batch",] % 10 == 0
            assert abs(values["composer_checkpoint_timestamp_seconds",] - time.time()) < TIMEOUT_S
            assert values["composer_restarts_total",] == 0
            assert 8 * (min(batches) - 1) <= values["composer_samples_total",] <= 8 * (max(batches) + 1)
            assert 0 < values["composer_samples_per_second",] <= 8 / 0.02  # each batch takes 20 ms or more
            assert values["composer_phase_seconds_total", "callbacks", "1"] > 0
            assert values["composer_idle_seconds", "0"] < TIMEOUT_S
            assert 0 < values["composer_loss",] < 10
            assert get(port, "/")[0] == 404

            (tmp_path / "stick").touch()
            status, text = wait_for(
                process, lambda: found if (found := get(port, "/healthz")) and found[0] == 503 else None
            )
            assert status == 503
            assert text in ("No rank makes progress.\n", "A rank has failed.\n")

            wait_for(process, lambda: read_metrics(port).get(("composer_restarts_total",)) == 1)
            wait_for(process, lambda: read_metrics(port).get(("composer_batches_total", "1"), 0) > 0)
            assert get(port, "/healthz") == (200, "ok\n")
            (tmp_path / "end").touch()
            assert process.wait(TIMEOUT_S) == 0, process.communicate()
            assert get(port, "/healthz") is None
        finally:
            process.kill()

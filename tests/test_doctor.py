"""`composer doctor` on set-ups that are healthy, and that are broken in one place."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from composer.cli.doctor import main
from composer_dist import dist, get_free_tcp_port, get_global_rank
from composer_dist.testing import run_ranks

DOCTOR = [sys.executable, "-m", "composer.cli.doctor"]
LAUNCHER = [sys.executable, "-m", "composer_dist.launch"]


def find(told, verdict):
    """Return what has a verdict, by check."""
    return {one["check"]: one["found"] for one in told["checks"] if one["verdict"] == verdict}


def diagnose(*arguments, command=DOCTOR, **environ):
    """Return the exit status and the report of the command."""
    ended = subprocess.run(
        [*command, "--json", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
    )
    assert ended.stdout.startswith("{"), ended.stderr
    told = json.loads(ended.stdout)
    assert ended.returncode == bool(find(told, "failure")) == told["has_failed"]
    assert all(one["advice"] for one in told["checks"] if one["verdict"] in ("failure", "warning"))
    return told


def test_a_healthy_machine_has_no_failure(tmp_path):
    told = diagnose("--save-folder", tmp_path / "{run_name}", "--port", get_free_tcp_port())
    assert not find(told, "failure")
    healthy = find(told, "ok") | find(told, "warning")
    assert {"versions", "devices", "open files", "save folder"} <= healthy.keys()
    assert healthy["save folder"].startswith(f"{tmp_path}: ")
    assert list(find(told, "skipped")) == ["all-reduce"]
    assert not list(tmp_path.iterdir())
    assert told["environment"]["cpu_count"] == os.cpu_count()


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder to which root cannot write")
def test_each_fault_of_a_machine_is_found():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        command = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *DOCTOR]
        told = diagnose("--port", port, "--save-folder", "/sys/kernel/checkpoints", command=command)
    failures = find(told, "failure")
    assert list(failures) == [f"port {port}", "save folder"]
    assert failures["save folder"].startswith("/sys/kernel cannot be written to: ")
    assert find(told, "warning")["open files"] == "limit 256"


@pytest.fixture
def store(gateway, s3_bucket, monkeypatch):
    """Return the address of a folder of a store, whose requests pass the gateway."""
    monkeypatch.setenv("S3_ENDPOINT_URL", gateway.url)
    return f"s3://{s3_bucket}/runs/{{run_name}}"


def test_a_store_with_all_permissions_is_healthy_and_keeps_nothing(store, gateway):
    told = diagnose("--save-folder", store)
    assert not find(told, "failure")
    assert {"store: put", "store: list", "store: get", "store: delete"} <= find(told, "ok").keys()
    put, delete = ([name for method, name in gateway.seen if method == wanted] for wanted in ("PUT", "DELETE"))
    assert put == delete
    assert len(put) == 1


def test_permissions_that_a_store_denies_are_found(store, gateway):
    def denies(method, path):
        return method == "DELETE" or (method == "GET" and ".composer" not in path)  # a list, not the probe itself

    gateway.fault = lambda method, path: 403 if denies(method, path) else None
    assert list(find(diagnose("--save-folder", store), "failure")) == ["store: list", "store: delete"]
    gateway.fault = lambda method, path: 403 if method == "PUT" else None
    assert list(find(diagnose("--save-folder", store), "failure")) == ["store: put"]


def look_with(fault, folder):
    """Return the status and the report of a rank, where rank 1 has a fault."""
    if get_global_rank() == 1 and fault == "version":
        sys.path.insert(0, folder)
    if get_global_rank() == 1 and fault == "clock":
        real = time.time
        time.time = lambda: real() - 30.0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = main(["--json"])
    return status, printed.getvalue()


@pytest.mark.parametrize("fault", [None, "version", "clock"])
def test_ranks_that_differ_are_found(tmp_path, fault):
    import numpy

    (tmp_path / "numpy-0.1.dist-info").mkdir()
    (tmp_path / "numpy-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n")
    ranks = run_ranks(look_with, fault, str(tmp_path), store=tmp_path / "store")
    (status, printed), of_rank_1 = ranks
    assert (status, of_rank_1) == (bool(fault), (0, ""))
    expected = {
        None: {},
        "version": {"versions": f"numpy {numpy.__version__} on rank 0, 0.1 on rank 1"},
        "clock": {"clocks": "-30.0 s from rank 0"},
    }
    assert find(json.loads(printed), "failure") == expected[fault]


@pytest.fixture
def listener():
    """Return a function that listens as a launcher's store, or as a server that sends nothing, and returns the port."""
    made = []

    def listen(kind):
        if kind == "store":
            made.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
            return made[-1].port
        made.append(socket.create_server(("", 0)))
        return made[-1].getsockname()[1]

    yield listen
    for each in made:
        if isinstance(each, socket.socket):
            each.close()


@pytest.mark.parametrize(
    ("kind", "is_launched", "verdict"),
    [("store", True, "ok"), ("store", False, "failure"), ("server", True, "failure")],
)
def test_only_the_store_of_a_launcher_may_listen_on_the_port_of_the_ranks(listener, kind, is_launched, verdict):
    port = listener(kind)
    launched = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if is_launched else {}
    told = diagnose("--port", port, MASTER_ADDR="localhost", MASTER_PORT=str(port), **launched)
    assert find(told, verdict)[f"port {port}"].startswith("in use by")


def lose_a_rank(folder):
    """Write the report of rank 0; rank 1 ends after its first collective."""
    if get_global_rank() == 1:
        dist.all_reduce(torch.zeros(1))
        os._exit(1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["--json"])
    Path(folder, "report").write_text(printed.getvalue())


def test_a_rank_that_is_lost_is_reported_once(tmp_path):
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_ranks(lose_a_rank, str(tmp_path), store=tmp_path / "store")
    assert list(find(json.loads((tmp_path / "report").read_text()), "failure")) == ["all-reduce"]


@pytest.mark.parametrize("option", ["--port=0", "--port=65536", "--timeout=0", "--timeout=nan"])
def test_numbers_out_of_range_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        main([option])
    assert f"error: {option.split('=')[0]}=" in capsys.readouterr().err


def test_a_meeting_point_without_an_answer_is_found():
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_tcp_port())}
    assert list(find(diagnose("--timeout", 2, **place), "failure")) == ["process group"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["composer", "torchrun"])
def test_launched_ranks_compare_what_they_find(launcher, tmp_path):
    port = str(get_free_tcp_port())
    command = [*LAUNCHER, "-n", "2", "--master-port", port, "doctor"]
    if launcher == "torchrun":
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            DOCTOR[-1],
        ]
    told = diagnose("--save-folder", tmp_path, "--port", port, command=command)
    assert told["world_size"] == 2
    assert not find(told, "failure")
    assert ("MASTER_PORT" in find(told, "ok")[f"port {port}"]) == (launcher == "composer")
    assert {"clocks", "all-reduce"} <= (find(told, "ok") | find(told, "warning")).keys()


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [True, False])
def test_two_nodes_are_told_whether_they_have_the_same_folder(is_shared, tmp_path):
    endpoint = f"127.0.0.1:{get_free_tcp_port()}"
    command = [*LAUNCHER, "-N", "2", "-n", "1", "--rdzv-endpoint", endpoint, "--rdzv-id", "1", "doctor"]
    command += ["--json", "--save-folder", "checkpoints"]
    nodes = []
    for name in ("a", "a" if is_shared else "b"):
        (tmp_path / name / "checkpoints").mkdir(parents=True, exist_ok=True)
        environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        nodes.append(subprocess.Popen(command, cwd=tmp_path / name, env=environ, **pipes))
    try:
        printed = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    (text,) = (out for out, _ in printed if out)  # of rank 0
    told = json.loads(text)
    assert not find(told, "failure")
    assert (find(told, "warning").get("save folder") == "not the folder of rank 0") != is_shared
    assert not list(tmp_path.glob("*/checkpoints/*"))

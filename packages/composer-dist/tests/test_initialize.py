import hashlib
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as tdist

from composer_dist import DeviceCPU, dist, initialize, initialize_dist
from composer_dist.initialize import get_timeout
from composer_dist.testing import run_ranks

ALONE = {"NODE_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}

pytestmark = pytest.mark.usefixtures("no_group_left")


class NeedsNCCL(DeviceCPU):
    name = "gpu"
    dist_backend = "nccl"


class NeedsXLA(DeviceCPU):
    name = "tpu"
    dist_backend = "xla"


class NeedsNothing(DeviceCPU):
    name = "mps"
    dist_backend = ""


@pytest.mark.parametrize("device", ["cpu", NeedsNothing()])
def test_a_process_that_nobody_launched_gets_a_group_and_its_variables(device, environ):
    initialize_dist(device, timeout=12.0)
    assert tdist.get_backend() == "gloo"
    assert (tdist.get_rank(), tdist.get_world_size()) == (0, 1)
    assert {variable: environ[variable] for variable in ALONE} == ALONE
    assert get_timeout() == 12.0


def test_a_second_call_keeps_the_group():
    initialize_dist("cpu")
    group = tdist.group.WORLD
    initialize_dist(DeviceCPU())
    assert tdist.group.WORLD is group


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_a_group_that_somebody_else_made_serves_if_it_has_the_backend(backend):
    tdist.init_process_group(backend, store=tdist.HashStore(), rank=0, world_size=1)
    initialize_dist("cpu")


@pytest.mark.parametrize(("backend", "device"), [("gloo", NeedsNCCL()), ("cuda:gloo", DeviceCPU())])
def test_a_group_without_the_backend_asks_for_a_restart(backend, device):
    tdist.init_process_group(backend, store=tdist.HashStore(), rank=0, world_size=1)
    wanted = f"needs the backend '{device.dist_backend}', but .* initialized with '{backend}'.*restart the process"
    with pytest.raises(RuntimeError, match=wanted):
        initialize_dist(device)


def test_an_xla_device_asks_for_its_package_first():
    with pytest.raises(RuntimeError, match="import torch_xla before"):
        initialize_dist(NeedsXLA())


def test_an_incomplete_set_of_variables_is_refused(environ):
    environ["WORLD_SIZE"] = "2"
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        initialize_dist("cpu")


def test_several_processes_need_torchs_distributed_package(environ, monkeypatch):
    monkeypatch.setattr(dist.dist, "is_available", lambda: False)
    initialize_dist("cpu")
    environ["WORLD_SIZE"] = "2"
    with pytest.raises(RuntimeError, match="WORLD_SIZE='2', but torch was built without"):
        initialize_dist("cpu")


def total_after_initialize_dist():
    initialize_dist("cpu", timeout=20)
    total = torch.tensor([dist.get_global_rank() + 1])
    dist.all_reduce(total)
    backend = tdist.get_backend()
    tdist.destroy_process_group()
    return backend, total.item()


def meet_through_the_environment(settings):
    # Rank 0 serves the store on a port of the system's choice; the group in which it says so goes away.
    served = tdist.TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True) if dist.get_local_rank() == 0 else None
    port = [served and served.port]
    dist.broadcast_object_list(port)
    tdist.destroy_process_group()
    os.environ.update(settings, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))
    results = [total_after_initialize_dist()]
    if "TORCHELASTIC_RUN_ID" in settings:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        results.append(total_after_initialize_dist())
    # A group leaves the addresses of its ranks in the store, below a prefix.
    return results, {key.partition("/0//")[0] for key in served.list_keys()} if served else None


@pytest.mark.parametrize(
    ("settings", "prefixes"),
    [({}, {"default_pg"}), ({"TORCHELASTIC_RUN_ID": "a"}, {"composer/a/attempt_0", "composer/a/attempt_1"})],
)
def test_launched_processes_meet_and_again_after_a_restart_out_of_reach_of_stale_keys(settings, prefixes, tmp_path):
    first, second = run_ranks(meet_through_the_environment, settings, store=tmp_path / "store")
    totals = [("gloo", 3)] * len(prefixes)
    assert first == (totals, prefixes)
    assert second == (totals, None)


@pytest.mark.parametrize("variable", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.parametrize(
    ("tasks", "settings", "warned"), [("4", {}, True), ("1", {}, False), ("4", {"RANK": "0", "WORLD_SIZE": "1"}, False)]
)
def test_tasks_that_would_train_separately_are_pointed_out(variable, tasks, settings, warned, environ, caplog):
    environ.update({variable: tasks} | settings)
    with caplog.at_level(logging.WARNING):
        initialize_dist("cpu")
    texts = [record.getMessage() for record in caplog.records if "a model of its own" in record.getMessage()]
    assert len(texts) == warned
    assert all(f"{variable}='{tasks}', but RANK is not set" in text for text in texts)


AT_EXIT = """
import atexit
import torch.distributed as tdist
from composer_dist import initialize_dist

atexit.register(lambda: print(tdist.is_initialized()))  # the first to be registered is the last to run
if {made_before}:
    tdist.init_process_group("gloo", store=tdist.HashStore(), rank=0, world_size=1)
initialize_dist("cpu")
"""


@pytest.mark.parametrize("made_before", [False, True])
def test_a_group_is_destroyed_at_exit_if_it_was_made_here(made_before):
    script = AT_EXIT.format(made_before=made_before)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(made_before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2' and WORLD_SIZE='2' contradict each other: RANK counts from 0"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' and WORLD_SIZE='2' contradict each other"),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, "LOCAL_RANK='3' and LOCAL_WORLD_SIZE='2'"),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE='8' and WORLD_SIZE='4' contradict"),
    ],
)
@pytest.mark.usefixtures("no_group_left")
def test_rank_variables_that_contradict_each_other_are_refused_before_anybody_waits(settings, message, environ):
    environ.update(settings)
    with pytest.raises(RuntimeError, match=message):
        dist.initialize_dist("cpu")


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the state of threads is read in /proc")
def test_a_rank_waits_at_exit_for_a_thread_of_gloo_that_has_no_processor_yet():
    """A rank that had finished died at exit under load: "terminate called without an active exception"."""
    has_ended = threading.Event()

    def release_tensors():
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
            name.write("pt_gloo_runloop")
        hashlib.sha256(bytes(2**28))  # does not hold the GIL, and takes longer than any fixed rest
        has_ended.set()

    thread = threading.Thread(target=release_tensors)
    thread.start()
    initialize._wait_for_gloo_threads()
    assert has_ended.is_set()
    thread.join()

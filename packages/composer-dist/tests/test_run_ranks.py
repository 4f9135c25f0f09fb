from __future__ import annotations  # the way of many a file with dataclasses

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from composer_dist import dist
from composer_dist.testing import run_ranks


def what_this_rank_sees(scale):
    return dist.get_global_rank() * scale, dist.get_world_size(), torch.get_num_threads()


def test_results_come_in_rank_order_from_processes_of_one_thread(tmp_path):
    assert run_ranks(what_this_rank_sees, 10, store=tmp_path / "s", world_size=3) == [
        (0, 3, 1),
        (10, 3, 1),
        (20, 3, 1),
    ]


def tensor_plus_rank(tensor):
    return tensor + dist.get_global_rank()


def test_tensors_are_copied_both_ways(tmp_path):
    sent = torch.zeros(2)
    first, second = run_ranks(tensor_plus_rank, sent, store=tmp_path / "store")
    assert (first.tolist(), second.tolist(), sent.tolist()) == ([0, 0], [1, 1], [0, 0])


def one_raises():
    if dist.get_global_rank() == 1:
        raise KeyError("the one who knows")
    dist.barrier()


def test_the_first_rank_that_raises_comes_first_with_its_traceback(tmp_path):
    with pytest.raises(AssertionError, match=r"^rank 1 raised:\n(.*\n)*.*in one_raises\n(.*\n)*KeyError: 'the one who"):
        run_ranks(one_raises, store=tmp_path / "store")


def one_dies(how):
    if dist.get_global_rank() == 1:
        os.kill(os.getpid(), how) if how else os._exit(3)
    dist.barrier()


@pytest.mark.parametrize(("how", "code"), [(0, 3), (signal.SIGKILL, -9)])
def test_a_rank_that_dies_without_a_word_is_noticed_at_once(how, code, tmp_path):
    with pytest.raises(AssertionError, match=f"^rank 1 died with exit code {code}\n"):
        run_ranks(one_dies, how, store=tmp_path / "store", timeout_s=50)


def one_hangs():
    if dist.get_global_rank() == 1:
        threading.Event().wait()


def test_a_rank_that_hangs_is_named_and_ended(tmp_path):
    # On a busy machine the other one may need longer too.
    with pytest.raises(AssertionError, match=r"ranks \[(0, )?1\] did not finish within 4 s") as caught:
        run_ranks(one_hangs, store=tmp_path / "store", timeout_s=4)
    stacks = str(caught.value).partition("rank 1 was at:\n")[2]
    assert 'testing.py", line' in stacks


class Endless(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        threading.Event().wait()


def one_waits_for_a_worker():
    if dist.get_global_rank() == 1:
        next(iter(DataLoader(Endless(), num_workers=1)))
    dist.barrier()


def test_the_stacks_of_a_rank_that_another_one_waited_for_in_vain_are_told(tmp_path):
    # A rank that hangs raises nothing itself.
    with pytest.raises(AssertionError, match=r"^rank 0 raised:\n") as caught:
        run_ranks(one_waits_for_a_worker, store=tmp_path / "store", timeout_s=12)
    stacks = str(caught.value).partition("rank 1 was at:\n")[2]
    assert "in one_waits_for_a_worker" in stacks
    assert "in __getitem__" in stacks


def test_a_store_of_an_earlier_run_is_refused(tmp_path):
    (tmp_path / "store").touch()
    with pytest.raises(ValueError, match="exists: ranks of an earlier run met there"):
        run_ranks(what_this_rank_sees, 1, store=tmp_path / "store")


def test_a_body_inside_a_function_is_refused(tmp_path):
    def inner():
        pass

    with pytest.raises(ValueError, match="is not at the top level of a file"):
        run_ranks(inner, store=tmp_path / "store")


@dataclass
class Sighting:
    """A class of this very file, with annotations that dataclasses resolves in its module."""

    rank: int
    words: list[str]


def sighting_of(other):
    return Sighting(dist.get_global_rank(), other.words * 2)


def test_classes_of_the_bodys_file_travel_both_ways(tmp_path):
    seen = run_ranks(sighting_of, Sighting(7, ["hello"]), store=tmp_path / "store")
    assert seen == [Sighting(0, ["hello", "hello"]), Sighting(1, ["hello", "hello"])]


def instance_of_a_class_made_by_the_rank():
    global Passing
    Passing = type("Passing", (), {"__module__": __name__})
    return Passing()


def test_a_result_that_cannot_be_loaded_here_says_so(tmp_path):
    with pytest.raises(AssertionError, match=r"^rank 0 returned what this process cannot load: .*Passing"):
        run_ranks(instance_of_a_class_made_by_the_rank, store=tmp_path / "store")


def variable_of(name):
    return os.environ.get(name), os.environ["RANK"]


def test_ranks_have_the_environment_of_the_call_and_not_of_the_first_one(tmp_path, environ):
    environ["SEEN_BY_RANKS"], environ["RANK"] = "first", "17"
    before = run_ranks(variable_of, "SEEN_BY_RANKS", store=tmp_path / "first")
    environ["SEEN_BY_RANKS"] = "second"
    after = run_ranks(variable_of, "SEEN_BY_RANKS", store=tmp_path / "second")
    del environ["SEEN_BY_RANKS"]
    without = run_ranks(variable_of, "SEEN_BY_RANKS", store=tmp_path / "third")
    assert before == [("first", "0"), ("first", "1")]
    assert after == [("second", "0"), ("second", "1")]
    assert without == [(None, "0"), (None, "1")]


def batches_of_a_worker(fails):
    loader = DataLoader(range(4), batch_size=2, num_workers=1)
    batches = iter(loader)
    first = next(batches).tolist()
    if fails and dist.get_global_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [first, next(batches).tolist()]


def test_a_body_may_load_its_data_in_workers(tmp_path):
    assert run_ranks(batches_of_a_worker, False, store=tmp_path / "store") == [[[0, 1], [2, 3]]] * 2


def test_a_rank_that_dies_is_noticed_while_its_workers_hold_its_pipe(tmp_path):
    with pytest.raises(AssertionError, match=r"^rank 1 died with exit code -9"):
        run_ranks(batches_of_a_worker, True, store=tmp_path / "store")


SCRIPT = """
import socket, sys, threading
from composer_dist.testing import run_ranks

def hang(port):
    connection = socket.create_connection(("127.0.0.1", port))
    threading.Event().wait()

if __name__ == "__main__":
    run_ranks(hang, int(sys.argv[1]), store=sys.argv[2])
"""


def test_ranks_end_with_a_process_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(180)
        port = str(listener.getsockname()[1])
        parent = subprocess.Popen([sys.executable, str(script), port, str(tmp_path / "store")])
        try:
            ranks = [listener.accept()[0] for _ in range(2)]
        finally:
            parent.kill()
            parent.wait()
    for rank in ranks:
        with rank:
            rank.settimeout(60)
            # A connection ends with the process that holds it, also where nobody reaps that process.
            assert rank.recv(1) == b""

import os
import random
import time
from pathlib import Path

import pytest

from composer_dist import dist
from composer_dist.testing import run_ranks

PREFIX = "._signal_file_node0_"


def test_a_signal_files_name_is_drawn_from_the_generator_given():
    drawn = [dist.get_node_signal_file_name(random.Random(5)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(PREFIX)
    assert drawn[0][len(PREFIX) :].isalnum()
    assert len(drawn[0]) == len(PREFIX) + 6


def test_a_signal_files_name_leaves_the_generators_of_training_alone():
    random.seed(1)
    expected = random.Random(1).random()
    names = {dist.get_node_signal_file_name() for _ in range(5)}
    assert len(names) == 5
    assert random.random() == expected


def test_a_signal_file_goes_to_the_current_folder_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dist.write_signal_file("a") == str(tmp_path / "a")
    path = dist.write_signal_file("b", str(tmp_path / "new" / "folder"))
    assert Path(path).read_text() == "local rank zero done"


@pytest.mark.parametrize("wait", [dist.busy_wait_for_local_rank_zero, dist.run_local_rank_zero_first])
def test_a_process_that_is_alone_runs_the_body_and_leaves_nothing(wait, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with wait():
        Path("made").touch()
    assert os.listdir() == ["made"]


@pytest.mark.parametrize("wait", [dist.busy_wait_for_local_rank_zero, dist.run_local_rank_zero_first])
def test_several_processes_without_a_group_do_not_reach_the_body(wait, environ):
    environ["WORLD_SIZE"] = "2"
    ran = []
    with pytest.raises(RuntimeError, match="has not been initialized"), wait():
        ran.append(True)
    assert not ran


def test_local_rank_zero_waits_for_no_download(tmp_path):
    with dist.local_rank_zero_download_and_wait(str(tmp_path / "never")):
        pass


def test_a_file_that_never_appears_is_named(environ, tmp_path):
    environ["LOCAL_RANK"] = "1"
    missing = str(tmp_path / "never")
    with (
        pytest.raises(TimeoutError, match=f"{missing} did not appear within 0.02 s"),
        dist.local_rank_zero_download_and_wait(missing, timeout=0.02),
    ):
        pass


def signal_file(folder):
    name = dist.get_node_signal_file_name()
    path = dist.write_signal_file(name, folder)
    dist.barrier()
    return name, path, os.listdir(folder)


def test_ranks_agree_on_a_signal_file_which_one_of_them_writes(tmp_path):
    first, second = run_ranks(signal_file, str(tmp_path / "signals"), store=tmp_path / "store")
    name, path, listing = first
    assert first == second
    assert path == str(tmp_path / "signals" / name)
    assert listing == [name]


def slow_rank_zero(folder):
    with dist.busy_wait_for_local_rank_zero(folder):
        if dist.get_local_rank() == 0:
            time.sleep(0.2)
        finished = time.monotonic()
    return finished, time.monotonic(), os.listdir(folder)


def test_nobody_leaves_before_local_rank_zero_has_finished(tmp_path):
    folder = tmp_path / "signals"
    folder.mkdir()
    (finished, _, listing), (_, left, listing_of_other) = run_ranks(slow_rank_zero, str(folder), store=tmp_path / "s")
    assert finished <= left < finished + 20  # by one clock; two looks are 0.1 s apart, the rest is for busy machines
    assert listing == listing_of_other == []


def failing_body(folder, failing_rank):
    try:
        with dist.busy_wait_for_local_rank_zero(folder):
            if dist.get_local_rank() == failing_rank:
                raise KeyError("the disk is full")
    except Exception as error:
        return type(error).__name__, str(error), os.listdir(folder)
    return None, "", os.listdir(folder)


def test_a_failure_of_local_rank_zero_is_raised_everywhere_and_leaves_no_file(tmp_path):
    folder = tmp_path / "signals"
    first, second = run_ranks(failing_body, str(folder), 0, store=tmp_path / "store")
    assert first == ("KeyError", "'the disk is full'", [])
    assert second[0] == "RuntimeError"
    assert "local rank zero failed: KeyError: 'the disk is full'" in second[1]
    assert second[2] == []


def test_a_failure_of_another_rank_is_its_own(tmp_path):
    folder = tmp_path / "signals"
    first, second = run_ranks(failing_body, str(folder), 1, store=tmp_path / "store")
    assert first == (None, "", [])
    assert second == ("KeyError", "'the disk is full'", [])


def download(path):
    with dist.local_rank_zero_download_and_wait(path):
        if dist.get_local_rank() == 0:
            part = Path(path + ".part")
            part.write_text("data")
            part.replace(path)
        return Path(path).read_text()


def test_the_others_run_once_local_rank_zero_has_the_file(tmp_path):
    assert run_ranks(download, str(tmp_path / "data"), store=tmp_path / "store") == ["data", "data"]


def rank_zero_first(path, fails):
    seen = []
    try:
        with dist.run_local_rank_zero_first():
            seen = os.listdir(path)
            if dist.get_local_rank() == 0:
                Path(path, "made").touch()
                if fails:
                    raise OSError("no space")
    except OSError as error:
        return seen, str(error)
    return seen, None


@pytest.mark.parametrize(("fails", "raised"), [(False, None), (True, "no space")])
def test_local_rank_zero_runs_first_and_lets_the_others_go_on_also_after_an_error(fails, raised, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    results = run_ranks(rank_zero_first, str(folder), fails, store=tmp_path / "store")
    assert results == [([], raised), (["made"], None)]


def pretend_nodes_of(size):
    """Rank numbers as if each node had `size` of the ranks."""
    rank = dist.get_global_rank()
    os.environ.update(NODE_RANK=str(rank // size), LOCAL_RANK=str(rank % size), LOCAL_WORLD_SIZE=str(size))


def write_often(folder):
    pretend_nodes_of(1)
    dist.barrier()
    return {Path(dist.write_signal_file("signal", folder)).read_text() for _ in range(300)}


def test_nodes_may_write_the_same_file_into_a_shared_folder(tmp_path):
    folder = tmp_path / "shared"
    assert run_ranks(write_often, str(folder), store=tmp_path / "store") == [{"local rank zero done"}] * 2
    assert os.listdir(folder) == ["signal"]


def fail_on_nodes(folder, nodes):
    pretend_nodes_of(2)
    name = dist.get_node_signal_file_name()
    try:
        with dist.busy_wait_for_local_rank_zero(folder):
            if dist.get_local_rank() == 0 and dist.get_node_rank() in nodes:
                raise KeyError(f"disk of node {dist.get_node_rank()}")
    except (KeyError, RuntimeError) as error:
        return name, str(error), os.listdir(folder)
    return name, None, os.listdir(folder)


@pytest.mark.parametrize("nodes", [(0, 1), (1,)])
def test_waiting_ranks_believe_the_mark_of_their_own_node_in_a_shared_folder(nodes, tmp_path):
    folder = tmp_path / "shared"
    results = run_ranks(fail_on_nodes, str(folder), nodes, store=tmp_path / "store", world_size=4)
    names, errors, listings = zip(*results, strict=True)
    assert len(set(names)) == 1
    for rank, error in enumerate(errors):
        if rank // 2 in nodes:
            assert f"disk of node {rank // 2}" in error
        else:
            assert error is None
    assert listings == ([],) * 4

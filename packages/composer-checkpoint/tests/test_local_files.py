"""Files of single ranks: exactly one for each, loadable by as many ranks, and rebuilt for others when asked to."""

import errno
import os
import signal

import pytest
import torch
import torch.distributed as tdist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composer_checkpoint.errors import CheckpointError, IncompatibleCheckpointError
from composer_checkpoint.files import load_file
from composer_checkpoint.formats.per_rank import load_local, merge_local, save_local
from composer_checkpoint.lock import remove_leftovers
from composer_dist.testing import run_ranks


def whole(seed):
    """Dims that no number of ranks here divides evenly; the second has fewer rows than there are ranks."""
    torch.manual_seed(seed)
    return {"wide": torch.randn(7, 3), "flat": torch.randn(2), "copied": torch.randn(4)}


def state(seed):
    mesh = init_device_mesh("cpu", (tdist.get_world_size(),))
    tensors = whole(seed)
    placements = {"wide": Shard(0), "flat": Shard(0), "copied": Replicate()}
    model = {name: distribute_tensor(tensor, mesh, [placements[name]]) for name, tensor in tensors.items()}
    return {"state": {"model": model, "epoch": seed}, "rng": [{"torch": torch.full((3,), tdist.get_rank())}]}


def save(path):
    save_local(state(4), path)


def load(path):
    loaded = state(0)
    rng = loaded.pop("rng")
    load_local(loaded, path)
    assert len(rng) == 1
    return {name: tensor.full_tensor() for name, tensor in loaded["state"]["model"].items()}, loaded["state"]["epoch"]


def attempt_load(path):
    try:
        load(path)
    except ValueError as error:
        return str(error)
    return None


def assert_whole(found):
    model, epoch = found
    assert epoch == 4
    for name, tensor in whole(4).items():
        assert torch.equal(model[name], tensor), name


@pytest.fixture(scope="module")
def saved_by_three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    run_ranks(save, f"{folder}/saved/ba2_rank{{rank}}.pt", store=folder / "store", world_size=3)
    return folder / "saved"


def test_there_is_one_file_for_each_rank_with_its_own_shards(saved_by_three):
    assert sorted(path.name for path in saved_by_three.iterdir()) == [f"ba2_rank{rank}.pt" for rank in range(3)]
    content = load_file(saved_by_three / "ba2_rank1.pt")
    assert torch.equal(content["state"]["model"]["wide"], whole(4)["wide"][3:6])
    layout = content["local_layout"]
    assert (layout["world_size"], layout["rank"], layout["mesh_shape"]) == (3, 1, [3])
    assert layout["tensors"]["state/model/wide"]["global_shape"] == [7, 3]
    assert len(content["rng"]) == 1


def test_as_many_ranks_load_their_own_files(saved_by_three, tmp_path):
    path = f"{saved_by_three}/ba2_rank{{rank}}.pt"
    for found in run_ranks(load, path, store=tmp_path / "store", world_size=3):
        assert_whole(found)


def test_another_number_of_ranks_is_refused_with_both_sizes(saved_by_three, tmp_path, monkeypatch):
    monkeypatch.delenv("COMPOSER_LOCAL_ELASTIC", raising=False)
    path = f"{saved_by_three}/ba2_rank{{rank}}.pt"
    first, second = run_ranks(attempt_load, path, store=tmp_path / "store", world_size=2)
    assert first == second
    assert "the files of 3 ranks, and 2 load them" in first


@pytest.mark.parametrize("world_size", [2, 4])
def test_another_number_of_ranks_rebuilds_the_tensors_when_allowed_to(
    saved_by_three, tmp_path, monkeypatch, world_size
):
    monkeypatch.setenv("COMPOSER_LOCAL_ELASTIC", "1")
    path = f"{saved_by_three}/ba2_rank{{rank}}.pt"
    for found in run_ranks(load, path, store=tmp_path / "store", world_size=world_size):
        assert_whole(found)


def test_one_process_merges_the_files(saved_by_three):
    merged = merge_local(f"{saved_by_three}/ba2_rank{{rank}}.pt")
    assert_whole((merged["state"]["model"], merged["state"]["epoch"]))
    assert [state["torch"][0].item() for state in merged["rng"]] == [0, 1, 2]


def attempt_save(path):
    try:
        save(path)
    except ValueError as error:
        return str(error)
    return None


def test_several_ranks_need_the_rank_in_the_name(tmp_path):
    for text in run_ranks(attempt_save, tmp_path / "ba2.pt", store=tmp_path / "store"):
        assert "Put {rank} into the name" in text
    assert not (tmp_path / "ba2.pt").exists()


def test_another_models_file_changes_nothing(tmp_path):
    path = tmp_path / "rank{rank}.pt"
    save_local({"model": {"a": torch.ones(2), "b": torch.ones(3)}}, path)
    target = {"model": {"a": torch.zeros(2), "b": torch.zeros(4), "c": torch.zeros(1)}}
    with pytest.raises(IncompatibleCheckpointError, match=r"1 missing: model/c; 1 different: model/b"):
        load_local(target, path)
    assert target["model"]["a"].tolist() == [0, 0]


def replace_a_save_and_die(path, victim, renames_before):
    """Save twice under one name; a rank is killed right before one of its renames of the second save."""
    save_local({"w": torch.zeros(2)}, path)
    tdist.barrier()
    rename, left = os.replace, [renames_before]

    def rename_or_die(source, target):
        if tdist.get_rank() == victim and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        rename(source, target)

    os.replace = rename_or_die
    save_local({"w": torch.ones(2)}, path)


def values_in(path):
    return set(merge_local(path)["w"].tolist())


# Rank 0 renames the record of both files, and then its own file.
@pytest.mark.parametrize(("victim", "renames_before", "expected"), [(0, 0, 0.0), (0, 1, 1.0), (1, 0, 1.0)])
def test_ranks_killed_between_their_renames_leave_one_whole_set(tmp_path, victim, renames_before, expected):
    path = f"{tmp_path}/saved/ba2_rank{{rank}}.pt"
    with pytest.raises(AssertionError, match=f"rank {victim}"):
        run_ranks(replace_a_save_and_die, path, victim, renames_before, store=tmp_path / "store")
    remove_leftovers(tmp_path / "saved")
    assert values_in(path) == {expected}
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == ["ba2_rank0.pt", "ba2_rank1.pt"]


def fail_to_rename_and_save_again(path):
    """Save three times under one name; in the second, rank 1's disk fails when the file shall get its name."""
    save_local({"w": torch.zeros(2)}, path)
    rename = os.replace

    def fail(source, target):
        raise OSError(errno.EIO, "Input/output error")

    if tdist.get_rank() == 1:
        os.replace = fail
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_local({"w": torch.ones(2)}, path)
    os.replace = rename
    save_local({"w": torch.full((2,), 2.0)}, path)


def test_a_save_is_never_replaced_by_an_earlier_one_that_failed_while_renaming(tmp_path):
    path = f"{tmp_path}/saved/ba2_rank{{rank}}.pt"
    run_ranks(fail_to_rename_and_save_again, path, store=tmp_path / "store")
    assert values_in(path) == {2.0}
    remove_leftovers(tmp_path / "saved", locked=True)
    assert values_in(path) == {2.0}
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == ["ba2_rank0.pt", "ba2_rank1.pt"]


def load_values(path):
    state_dict = {"w": torch.full((2,), 9.0)}
    load_local(state_dict, path)
    return state_dict["w"].tolist()


def test_loading_completes_the_set_of_a_run_that_was_killed_while_renaming(tmp_path):
    path = f"{tmp_path}/saved/ba2_rank{{rank}}.pt"
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(replace_a_save_and_die, path, 1, 0, store=tmp_path / "store")
    assert run_ranks(load_values, path, store=tmp_path / "again") == [[1.0, 1.0], [1.0, 1.0]]


def half_renamed_set(tmp_path, names):
    """Leave a file without its name, and a record that says which names files shall get."""
    save_local({"w": torch.ones(2)}, tmp_path / "ba2_rank0.pt")
    writer = "00000000-1-1-00000000"
    os.rename(tmp_path / "ba2_rank0.pt", tmp_path / f"ba2_rank0.pt.tmp-{writer}")
    (tmp_path / f"ba2_rank0.pt.set-{writer}").write_text(names.replace("WRITER", writer))
    return {f"ba2_rank0.pt.tmp-{writer}", f"ba2_rank0.pt.set-{writer}"}


def test_a_set_of_another_machine_is_left_alone_until_the_folder_is_locked(tmp_path):
    left = half_renamed_set(tmp_path, '{"ba2_rank0.pt": "ba2_rank0.pt.tmp-WRITER"}')
    remove_leftovers(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == left
    remove_leftovers(tmp_path, locked=True)
    assert [file.name for file in tmp_path.iterdir()] == ["ba2_rank0.pt"]


@pytest.mark.parametrize(
    "names",
    [
        "",
        "[1]",
        '{"ba2_rank0.pt": 1}',
        '{"../ba2_rank0.pt": "ba2_rank0.pt.tmp-WRITER"}',
        '{"/ba2_rank0.pt": "ba2_rank0.pt.tmp-WRITER"}',
        '{"other.pt": "ba2_rank0.pt.tmp-WRITER"}',
        '{"ba2_rank0.pt": "other.pt"}',
    ],
)
def test_a_record_that_nobody_here_has_written_renames_nothing(tmp_path, names):
    half_renamed_set(tmp_path, names)
    (tmp_path / "other.pt").write_text("a user's")
    remove_leftovers(tmp_path, locked=True)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("other.pt", "a user's")]

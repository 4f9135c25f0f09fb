"""Saving each part of a run to files of its own."""

import json
import os
import signal

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from composer_checkpoint import find_newest, load_file, read_manifest, save_file, verify
from composer_checkpoint.errors import CheckpointConflictError, CorruptCheckpointError, NoCheckpointError
from composer_checkpoint.modular import (
    CheckpointLoadOptions,
    CheckpointSaveOptions,
    checkpoint_folder,
    get_model_state_dict,
    load_checkpoint,
    save,
    save_checkpoint_to_disk,
    save_composer_metadata_to_disk,
    save_model_to_disk,
    save_optim_to_disk,
    save_resumption_state_to_disk,
    save_state_dict_to_disk,
)
from composer_checkpoint.remote.publish import fetch_checkpoint, publish_checkpoint
from composer_checkpoint.stores import FsspecObjectStore
from composer_dist.testing import run_ranks
from composer_events import State


def run(seed=0, epoch=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = State(model, 7, "blue-fox", optimizers=optimizer)
    for _ in range(epoch):
        state.timestamp = state.timestamp.to_next_batch(2).to_next_epoch()
    return state


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_is_a_folder_with_a_file_for_each_part(tmp_path):
    folder = save_checkpoint_to_disk(tmp_path, run(epoch=3))
    assert folder == str(tmp_path / "ep3-ba3")
    assert files_below(tmp_path / "ep3-ba3") == [
        *["composer_manifest.json", "composer_metadata.json", "model/model.pt", "optim/optim.pt", "resumption.pkl"]
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["ep3-ba3"]


def test_what_is_not_wanted_is_not_saved(tmp_path):
    options = CheckpointSaveOptions(dir_prefix="{run_name}", save_optimizer=False, save_resumption_state=False)
    save_checkpoint_to_disk(tmp_path, run(), options)
    assert files_below(tmp_path / "blue-fox") == ["composer_manifest.json", "composer_metadata.json", "model/model.pt"]


def test_anybodys_script_reads_the_files(tmp_path):
    state = run()
    folder = save_checkpoint_to_disk(tmp_path, state)
    weights = torch.load(f"{folder}/model/model.pt", weights_only=True)
    assert torch.equal(weights["weight"], state.model.weight)
    assert torch.load(f"{folder}/optim/optim.pt", weights_only=True)["param_groups"][0]["params"] == ["weight", "bias"]
    assert torch.load(f"{folder}/resumption.pkl", weights_only=True)["run_name"] == "blue-fox"


def test_every_file_of_tensors_has_its_manifest(tmp_path):
    folder = save_checkpoint_to_disk(tmp_path, run())
    for name in ("model/model.pt", "optim/optim.pt", "resumption.pkl"):
        assert read_manifest(f"{folder}/{name}")


def test_metadata_is_indented_json(tmp_path):
    path = save_composer_metadata_to_disk(tmp_path, nn.Linear(1, 1), False, "bf16", "cpu", 4)
    text = (tmp_path / "composer_metadata.json").read_text()
    assert path == str(tmp_path / "composer_metadata.json")
    assert text.startswith('{\n    "composer_version"')
    assert json.loads(text)["device_train_microbatch_size"] == 4


@pytest.mark.parametrize("name", ["", "state.pkl", "resumption.pkl"])
def test_the_resumption_state_goes_to_a_file_or_into_a_folder(name, tmp_path):
    path = save_resumption_state_to_disk(run(), tmp_path / name)
    assert path == str(tmp_path / (name or "resumption.pkl"))
    assert load_file(path)["rank_zero_seed"] == 7


def test_what_exists_is_not_replaced_unless_one_says_so(tmp_path):
    state = run()
    save_checkpoint_to_disk(tmp_path, state)
    for call in (
        lambda **more: save_checkpoint_to_disk(tmp_path, state, CheckpointSaveOptions(**more)),
        lambda **more: save_model_to_disk(state.model, tmp_path / "ep0-ba0", **more),
        lambda **more: save_optim_to_disk(state.model, state.optimizers[0], tmp_path / "ep0-ba0", **more),
        lambda **more: save_state_dict_to_disk({"w": torch.ones(1)}, tmp_path / "ep0-ba0/model/model.pt", **more),
    ):
        with pytest.raises(ValueError, match=r"already exists. Set overwrite=True") as caught:
            call()
        assert isinstance(caught.value, CheckpointConflictError)
        call(overwrite=True)


def test_weights_are_saved_as_safetensors_on_request(tmp_path):
    state = run()
    save_checkpoint_to_disk(tmp_path, state, CheckpointSaveOptions(save_format="safetensors"))
    path = tmp_path / "ep0-ba0/model/model.safetensors"
    assert torch.equal(load_file(path)["weight"], state.model.weight)
    assert (tmp_path / "ep0-ba0/optim/optim.pt").exists()
    other = run(seed=1)
    load_checkpoint(tmp_path / "ep0-ba0", model=other.model)
    assert torch.equal(other.model.weight, state.model.weight)


def test_formats_that_cannot_be_are_refused(tmp_path):
    model = nn.Linear(1, 1)
    with pytest.raises(NotImplementedError, match=r"save_format='gguf' is not known. Use one of pt, safetensors"):
        save_model_to_disk(model, tmp_path, save_format="gguf")
    with pytest.raises(ValueError, match="is one file, and a sharded checkpoint is a folder"):
        save_model_to_disk(model, tmp_path, sharded_checkpoint=True, save_format="safetensors")
    with pytest.raises(ValueError, match="holds weights only, and no optimizer"):
        save_optim_to_disk(model, torch.optim.SGD(model.parameters()), tmp_path, save_format="safetensors")
    with pytest.raises(ValueError, match=r"model.pt' cannot be combined with save_format='safetensors'"):
        save_state_dict_to_disk({"w": torch.ones(1)}, "model.pt", save_format="safetensors")


def test_an_address_is_no_place_on_this_disk(tmp_path):
    with pytest.raises(ValueError, match=r"'s3://bucket' is an address.*upload_file"):
        save_model_to_disk(nn.Linear(1, 1), "s3://bucket")


def test_a_state_with_several_optimizers_is_refused_before_anything_is_written(tmp_path):
    state = run()
    state.optimizers = [torch.optim.SGD(state.model.parameters()), torch.optim.SGD(state.model.parameters())]
    with pytest.raises(ValueError, match=r"the state has 2.*save_optim_to_disk\(\)"):
        save_checkpoint_to_disk(tmp_path, state)
    assert not list(tmp_path.iterdir())


def test_an_empty_state_dict_makes_no_file(tmp_path):
    assert save_state_dict_to_disk({}, tmp_path / "model.pt") is None
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    state = run()
    state.device_train_microbatch_size = object()  # JSON has no form for it
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_checkpoint_to_disk(tmp_path, state)
    assert not list(tmp_path.iterdir())


def save_and_die(folder, at):
    """Save, and be killed before one of the parts is written."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(save, at, die)
    save_checkpoint_to_disk(folder, run())


@pytest.mark.parametrize("part", ["optim", "resumption_state", "composer_metadata"])
def test_a_process_killed_between_two_parts_leaves_no_checkpoint(part, tmp_path):
    save_checkpoint_to_disk(tmp_path / "run", run(), CheckpointSaveOptions(dir_prefix="ba0"))
    with pytest.raises(AssertionError, match="rank 0"):
        run_ranks(save_and_die, tmp_path / "run", f"save_{part}_to_disk", store=tmp_path / "store", world_size=1)
    assert list((tmp_path / "run").glob("ep0-ba0.tmp-*"))  # it had begun
    assert not (tmp_path / "run/ep0-ba0").exists()
    assert find_newest(tmp_path / "run").path.name == "ba0"


def test_the_newest_whole_checkpoint_is_found_by_its_time(tmp_path):
    for epoch in (1, 3, 2):
        save_checkpoint_to_disk(tmp_path, run(epoch=epoch))
    assert find_newest(tmp_path).path.name == "ep3-ba3"
    (tmp_path / "ep3-ba3/optim/optim.pt").unlink()
    found = find_newest(tmp_path)
    assert found.path.name == "ep2-ba2"
    assert "lacks optim/optim.pt" in found.skipped[0].reason
    assert found.info["run_name"] == "blue-fox"


def test_verifying_names_the_damaged_tensor_or_file(tmp_path):
    folder = tmp_path / "ep0-ba0"
    state = run()
    save_checkpoint_to_disk(tmp_path, state)
    assert set(verify(folder).files) == set(files_below(folder)) - {"composer_manifest.json"}
    metadata = (folder / "composer_metadata.json").read_text()
    (folder / "composer_metadata.json").write_text(metadata.replace("fp32", "fp16"))
    with pytest.raises(CorruptCheckpointError, match=r"composer_metadata.json is not what was written"):
        verify(folder)
    (folder / "composer_metadata.json").write_text(metadata)
    model = folder / "model/model.pt"
    data = bytearray(model.read_bytes())
    data[data.index(state.model.weight.detach().numpy().tobytes())] ^= 1
    model.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"model.pt.*weight"):
        verify(folder)


def test_a_checkpoint_of_parts_without_a_common_manifest_is_verified_by_its_parts(tmp_path):
    state = run()
    save_model_to_disk(state.model, tmp_path)
    save_optim_to_disk(state.model, state.optimizers[0], tmp_path, sharded_checkpoint=True)
    save_composer_metadata_to_disk(tmp_path)
    assert verify(tmp_path) is None
    shard = tmp_path / "optim/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp"):
        verify(tmp_path)


def test_a_checkpoint_goes_to_a_store_and_back(tmp_path):
    state = run()
    folder = save_checkpoint_to_disk(tmp_path, state)
    store = FsspecObjectStore("memory://test-modular-save")
    publish_checkpoint(folder, store, "run/ep0", overwrite=True)
    fetch_checkpoint(store, "run/ep0", tmp_path / "fetched")
    assert verify(tmp_path / "fetched") == verify(folder)


def save_on_this_rank(folder, sharded):
    state = run()
    if sharded:
        fully_shard(state.model)
        state.optimizers = torch.optim.AdamW(state.model.parameters())
    options = CheckpointSaveOptions(sharded_checkpoint=sharded)
    return save_checkpoint_to_disk(folder, state, options)


def test_ranks_write_one_checkpoint_together(tmp_path):
    assert run_ranks(save_on_this_rank, tmp_path, False, store=tmp_path / "store") == [str(tmp_path / "ep0-ba0")] * 2
    assert files_below(tmp_path / "ep0-ba0") == [
        *["composer_manifest.json", "composer_metadata.json", "model/model.pt", "optim/optim.pt", "resumption.pkl"]
    ]
    assert len(load_file(tmp_path / "ep0-ba0/resumption.pkl")["rng"]) == 2


def test_ranks_write_their_shards_into_one_checkpoint(tmp_path):
    run_ranks(save_on_this_rank, tmp_path / "saved", True, store=tmp_path / "store")
    folder = tmp_path / "saved/ep0-ba0"
    assert files_below(folder / "model") == [".metadata", "__0_0.distcp", "__1_0.distcp", "composer_manifest.json"]
    assert "model/__1_0.distcp" in verify(folder).files
    assert json.loads((folder / "composer_metadata.json").read_text())["model_name"] == "Linear"


def save_a_second_time(folder, path):
    state = run()
    try:
        save_model_to_disk(state.model, folder)
    except ValueError as error:
        told = str(error)
    fully_shard(state.model)
    weights = get_model_state_dict(state.model, sharded_state_dict=True)
    with pytest.warns(UserWarning, match="has a suffix, and a sharded checkpoint is a folder"):
        name = save_state_dict_to_disk(weights, path)
    return told, name


def test_all_ranks_hear_that_something_exists_and_a_folder_has_no_suffix(tmp_path):
    save_model_to_disk(run().model, tmp_path)
    results = run_ranks(save_a_second_time, tmp_path, tmp_path / "sharded.pt", store=tmp_path / "store")
    assert results[0] == results[1]
    assert "already exists" in results[0][0]
    assert results[0][1] == str(tmp_path / "sharded/__{rank}_0.distcp")
    assert sorted(os.listdir(tmp_path / "sharded")) == [
        *[".metadata", "__0_0.distcp", "__1_0.distcp", "composer_manifest.json"]
    ]


def save_where_rank_zero_cannot(folder):
    try:
        save_model_to_disk(run().model, folder)
    except OSError as error:
        return type(error).__name__
    return None


def test_all_ranks_hear_of_the_failure_of_the_one_that_writes(tmp_path):
    (tmp_path / "file").write_text("no folder")
    first, second = run_ranks(save_where_rank_zero_cannot, tmp_path / "file", store=tmp_path / "store")
    assert first is not None
    assert first == second


def test_saved_options_give_back_what_they_saved(tmp_path):
    state = run()
    save_checkpoint_to_disk(tmp_path, state, CheckpointSaveOptions(include_keys="bias"))
    assert list(load_file(tmp_path / "ep0-ba0/model/model.pt")) == ["bias"]
    other = run(seed=1)
    load_checkpoint(tmp_path / "ep0-ba0", CheckpointLoadOptions(strict=False), other.model)
    assert torch.equal(other.model.bias, state.model.bias)
    assert not torch.equal(other.model.weight, state.model.weight)


def test_nothing_to_verify_is_said_so(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(NoCheckpointError):
        verify(tmp_path)


def save_parts_by_hand(folder, fails):
    state = run()
    with checkpoint_folder(folder, info={"timestamp": {"epoch": 4}}) as unfinished:
        save_model_to_disk(state.model, unfinished)
        if fails:
            raise ArithmeticError
        save_optim_to_disk(state.model, state.optimizers[0], unfinished, sharded_checkpoint=True)


def fail_to_save(folder):
    try:
        save_parts_by_hand(folder, fails=True)
    except ArithmeticError:
        return True
    return False


def test_a_loop_puts_parts_of_its_choice_into_one_checkpoint(tmp_path):
    run_ranks(save_parts_by_hand, tmp_path / "runs/a", False, store=tmp_path / "store")
    found = find_newest(tmp_path / "runs")
    assert found.path == tmp_path / "runs/a"
    assert found.info == {"timestamp": {"epoch": 4}}
    assert {"model/model.pt", "optim/__1_0.distcp", "composer_metadata.json"} < set(verify(found.path).files)


def test_a_checkpoint_whose_parts_cannot_all_be_saved_is_none(tmp_path):
    assert run_ranks(fail_to_save, tmp_path / "runs/a", store=tmp_path / "store") == [True, True]
    assert not list((tmp_path / "runs").iterdir())

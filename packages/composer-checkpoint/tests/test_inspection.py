import pytest
import torch

from composer_checkpoint import CorruptCheckpointError, NoCheckpointError, inspect_file, save_file, save_sharded


def state():
    return {"state": {"model": {"w": torch.ones(2, 3, dtype=torch.float16)}, "run_name": "blue-fox"}, "rng": []}


@pytest.mark.parametrize("extension", ["pt", "tar", "pt.gz"])
def test_a_description_has_keys_tensors_and_the_manifest(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    manifest = save_file(state(), path, info={"run_name": "blue-fox"})
    found = inspect_file(path)
    assert found.format == "pt"
    assert found.keys == ("state", "rng", "state/model", "state/run_name")
    tensor = found.tensors["state/model/w"]
    assert (tensor.dtype, tensor.shape, tensor.size_bytes) == ("float16", (2, 3), 12)
    assert found.manifest == manifest
    assert found.unsafe_globals == ()
    assert found.size_bytes == path.stat().st_size


def test_other_formats_are_described_as_well(tmp_path):
    save_file(state(), tmp_path / "x.safetensors")
    torch.save(state(), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    assert inspect_file(tmp_path / "x.safetensors").tensors["w"].shape == (2, 3)
    legacy = inspect_file(tmp_path / "legacy.pt")
    assert (legacy.format, legacy.manifest) == ("legacy pt", None)
    assert legacy.tensors["state/model/w"].shape == (2, 3)


def test_a_description_does_not_look_at_the_tensors_bytes(tmp_path):
    save_file({"w": torch.full((1000,), 7.0)}, tmp_path / "x.pt")
    whole = bytearray((tmp_path / "x.pt").read_bytes())
    start = whole.index(torch.full((1000,), 7.0).numpy().tobytes())
    whole[start + 11] ^= 1
    (tmp_path / "x.pt").write_bytes(whole)
    assert inspect_file(tmp_path / "x.pt").tensors["w"].shape == (1000,)
    whole[start - 1] ^= 1  # padding, which is part of the description
    (tmp_path / "x.pt").write_bytes(whole)
    with pytest.raises(CorruptCheckpointError):
        inspect_file(tmp_path / "x.pt")


def test_the_folder_of_a_sharded_checkpoint_is_described_without_its_shards(tmp_path):
    manifest = save_sharded(state(), tmp_path / "ep1", info={"run_name": "blue-fox"})
    shard = next((tmp_path / "ep1").glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    found = inspect_file(tmp_path / "ep1")
    assert found.format == "sharded"
    assert found.keys == ("state", "rng", "state/model", "state/run_name")
    tensor = found.tensors["state.model.w"]
    assert (tensor.dtype, tensor.shape, tensor.size_bytes) == ("float16", (2, 3), 12)
    assert found.manifest == manifest
    assert found.size_bytes == sum(path.stat().st_size for path in (tmp_path / "ep1").iterdir())


def test_a_folder_that_is_no_checkpoint_is_not_described(tmp_path):
    with pytest.raises(NoCheckpointError, match=r"\.metadata"):
        inspect_file(tmp_path)

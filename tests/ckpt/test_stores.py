"""Checkpoints of S3 and of a machine reached over SFTP are read and written: real servers on loopback."""

import os

import pytest
import torch

from composer_checkpoint import replace_pointer, save_file, save_sharded
from composer_checkpoint.remote.publish import publish_checkpoint
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri

# The clients still use what newer Python versions deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=["s3", "sftp"])
def remote(request):
    """Return the address of an empty folder in a store."""
    if request.param == "s3":
        return f"s3://{request.getfixturevalue('s3_bucket')}/run"
    return f"sftp://me@127.0.0.1:{request.getfixturevalue('sftp_server').port}/run"


@pytest.fixture
def names_in():
    """List the objects below an address."""

    def look(address):
        with maybe_create_object_store_from_uri(address) as store:
            return sorted(os.path.basename(name) for name in store.list_objects("run/"))

    return look


def test_a_checkpoint_goes_from_one_store_to_a_folder_in_it_and_back(
    remote, names_in, make_model, checkpoint_of, ckpt, tmp_path
):
    content = checkpoint_of(make_model("llama"))
    save_file(content, tmp_path / "ep1.pt")
    replace_pointer(tmp_path / "latest.pt", tmp_path / "ep1.pt")
    with maybe_create_object_store_from_uri(remote) as store:
        publish_checkpoint(tmp_path / "ep1.pt", store, "run/ep1.pt", pointer="run/latest.pt")
    code, told = ckpt("convert", f"{remote}/latest.pt", f"{remote}/out", "--max-shard-size", "2kB", "--jobs", "2")
    assert code == 0, told
    assert {"config.json", "model.safetensors.index.json"} <= {*names_in(remote)}
    assert ckpt("verify", f"{remote}/out")[0] == 0
    assert ckpt("convert", f"{remote}/out", tmp_path / "back.pt")[0] == 0
    code, difference = ckpt("diff", tmp_path / "ep1.pt", tmp_path / "back.pt")
    assert code == 0, difference
    code, told = ckpt("convert", f"{remote}/latest.pt", f"{remote}/out")
    assert code == 1
    assert "--overwrite" in told["error"]["message"]
    assert ckpt("convert", f"{remote}/latest.pt", f"{remote}/out", "--overwrite")[0] == 0
    assert names_in(remote) == ["config.json", "ep1.pt", "latest.pt.symlink", "model.safetensors"]


def test_a_sharded_checkpoint_of_a_store_is_read_where_its_pointer_leads(remote, ckpt, tmp_path):
    save_sharded({"state": {"model": {"w": torch.arange(12.0).view(4, 3)}}}, tmp_path / "ep1")
    with maybe_create_object_store_from_uri(remote) as store:
        publish_checkpoint(tmp_path / "ep1", store, "run/ep1", pointer="run/latest-rank0.pt")
    for name in ("ep1", "latest-rank0.pt"):
        assert ckpt("diff", tmp_path / "ep1", f"{remote}/{name}")[0] == 0
    assert ckpt("convert", f"{remote}/ep1", f"{remote}/whole.safetensors")[0] == 0
    assert ckpt("diff", tmp_path / "ep1", f"{remote}/whole.safetensors")[0] == 0

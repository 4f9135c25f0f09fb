"""Sharded checkpoints written to, verified in and read from a real S3 server on loopback, by two ranks."""

import http.client

import pytest
import torch
import torch.distributed as tdist
from moto.server import ThreadedMotoServer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composer_checkpoint.errors import CheckpointConflictError, CorruptCheckpointError, NoCheckpointError
from composer_checkpoint.sharded import load_sharded, save_sharded, verify_folder
from composer_dist.testing import run_ranks

pytest.importorskip("s3fs")

# The clients still use what newer Python versions deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

URI = "s3://bucket/run/ep1"
DAMAGED = "s3://bucket/run/ep2"


@pytest.fixture
def options(monkeypatch):
    """How to reach a new server with one bucket."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("PUT", "/bucket")
    assert connection.getresponse().status == 200
    connection.close()
    yield {"endpoint_url": f"http://{host}:{port}", "key": "testing", "secret": "testing"}
    moto.stop()


def save_from_two(options):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)]), "epoch": 1}
    save_sharded(state, URI, storage_options=options)
    try:
        save_sharded(state, URI, storage_options=options)
    except CheckpointConflictError:
        return tdist.get_rank()
    return None


def test_two_ranks_save_to_s3_and_one_loads(options, tmp_path):
    assert run_ranks(save_from_two, options, store=tmp_path / "store") == [0, 1]
    manifest = verify_folder(URI, storage_options=options)
    assert set(manifest.files) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    state = {"w": torch.zeros(5, 3), "epoch": 0}
    load_sharded(state, URI, storage_options=options)
    assert torch.equal(state["w"], torch.arange(15.0).view(5, 3))
    assert state["epoch"] == 1


def test_damage_in_s3_is_refused(options):
    import s3fs

    save_sharded({"w": torch.ones(100)}, DAMAGED, storage_options=options)
    store = s3fs.S3FileSystem(**options)
    content = bytearray(store.cat_file("bucket/run/ep2/__0_0.distcp"))
    content[len(content) // 2] ^= 1
    store.pipe_file("bucket/run/ep2/__0_0.distcp", bytes(content))
    state = {"w": torch.zeros(100)}
    with pytest.raises(CorruptCheckpointError, match=r"s3://bucket/run/ep2/__0_0\.distcp: the bytes of 'w'"):
        load_sharded(state, DAMAGED, storage_options=options)
    assert not state["w"].any()
    store.rm_file("bucket/run/ep2/.metadata")
    with pytest.raises(NoCheckpointError):
        load_sharded(state, DAMAGED, storage_options=options)

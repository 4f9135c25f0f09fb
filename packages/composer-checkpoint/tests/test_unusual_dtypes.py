"""Tensors of dtypes with which torch does not compute are saved and loaded, or refused by name before it is tried."""

import pytest
import torch

from composer_checkpoint import IncompatibleCheckpointError, load_file, save_file, save_sharded
from composer_checkpoint.sharded import load_sharded
from composer_checkpoint.tensors import (
    StoredTensor,
    open_checkpoint,
    refuse_unfit,
    stream_local,
    stream_pt,
    stream_sharded,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
BYTES = torch.arange(24, dtype=torch.uint8).reshape(4, 6)


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "float8_e8m0fnu", "bits8", "bits16"])
def test_a_file_gives_them_back(dtype, tmp_path):
    save_file({"state": {"model": {"w": BYTES.view(getattr(torch, dtype))}}}, tmp_path / "ep1.pt")
    found = load_file(tmp_path / "ep1.pt", require_finite=True)["state"]["model"]["w"]
    assert found.dtype == getattr(torch, dtype)
    assert torch.equal(found.view(torch.uint8), BYTES)


def test_a_sharded_checkpoint_gives_back_four_bits_and_refuses_dtypes_of_bits(tmp_path):
    save_sharded({"w": BYTES.view(torch.float4_e2m1fn_x2)}, tmp_path / "ep1")
    target = {"w": torch.zeros_like(BYTES).view(torch.float4_e2m1fn_x2)}
    load_sharded(target, tmp_path / "ep1")
    assert torch.equal(target["w"].view(torch.uint8), BYTES)
    with pytest.raises(IncompatibleCheckpointError, match=r"^model/w is torch\.bits8, and a sharded checkpoint"):
        save_sharded({"model": {"w": BYTES.view(torch.bits8)}}, tmp_path / "ep2")
    assert not (tmp_path / "ep2").exists()


def write_local(tree, path):
    stream_local(tree, f"{path}_{{rank}}.pt", world_size=2)


@pytest.mark.parametrize("stream", [stream_pt, stream_sharded, write_local])
def test_quantized_ones_are_not_written_one_by_one_without_their_scale(stream, tmp_path):
    torch.save({"m": {"w": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as source:
        assert source.tensors["m/w"].is_quantized
        with pytest.raises(IncompatibleCheckpointError, match=r"^m/w is quantized, as torch\.qint8"):
            stream(source.tree, tmp_path / "out")
        with pytest.raises(IncompatibleCheckpointError, match="a tensor is qint8"):
            source.tensors["m/w"].read_range(0, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_what_would_be_refused_is_known_without_reading_a_tensor():
    def never():
        raise AssertionError("it was read")

    tree = {"w": StoredTensor(torch.complex128, (2,), never), "x": StoredTensor(torch.bits8, (2,), never)}
    refuse_unfit(tree, "pt", "out.pt")
    with pytest.raises(TypeError, match=r"^w is torch\.complex128, which safetensors"):
        refuse_unfit(tree, "safetensors", "out.safetensors")
    with pytest.raises(IncompatibleCheckpointError, match=r"^x is torch\.bits8"):
        refuse_unfit(tree, "dcp", "out")
    with pytest.raises(IncompatibleCheckpointError, match="no text of Unicode"):
        refuse_unfit({}, "safetensors", "out.safetensors", aliases=["\udc00"])

import json
import logging
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file as load_with_safetensors
from safetensors.torch import save_file as save_with_safetensors

from composer_checkpoint import CorruptCheckpointError, hash_tensor, load_file, save_file, verify


def weights():
    return {
        "half": torch.arange(6, dtype=torch.float16).reshape(2, 3),
        "double": torch.arange(3, dtype=torch.float64),
        "bool": torch.tensor([True, False, True]),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "bfloat16": torch.ones(5, dtype=torch.bfloat16),
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert hash_tensor(found[name]) == hash_tensor(tensor)


def test_save_then_load_gives_back_the_weights(tmp_path):
    manifest = save_file(weights(), tmp_path / "x.safetensors")
    assert_equal(load_file(tmp_path / "x.safetensors"), weights())
    assert {name: entry.hash for name, entry in manifest.tensors.items()} == {
        name: hash_tensor(tensor) for name, tensor in weights().items()
    }
    assert verify(tmp_path / "x.safetensors") == manifest


def test_the_safetensors_library_reads_the_file(tmp_path):
    save_file(weights(), tmp_path / "x.safetensors")
    assert_equal(load_with_safetensors(tmp_path / "x.safetensors"), weights())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_a_file_of_the_safetensors_library_loads_unverified(tmp_path, caplog):
    plain = {name: tensor.contiguous() for name, tensor in weights().items()}
    save_with_safetensors(plain, tmp_path / "x.safetensors")
    assert_equal(load_file(tmp_path / "x.safetensors"), plain)
    assert "unverified" in caplog.text
    assert verify(tmp_path / "x.safetensors") is None


def test_a_training_state_gives_its_weights_and_says_what_it_leaves_out(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    state = {"state": {"model": {"w": torch.ones(2)}, "optimizers": {"AdamW": {}}}, "rng": []}
    save_file(state, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["state"]["model"]["w"], torch.ones(2))
    assert "optimizers" in caplog.text
    assert "rng" in caplog.text


def test_tied_weights_are_written_once_and_come_back_under_both_names(tmp_path):
    weight = torch.randn(1000)
    save_file({"embedding": weight, "head": weight}, tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size < 5000
    found = load_file(tmp_path / "x.safetensors")
    assert found["head"] is found["embedding"]
    assert torch.equal(found["head"], weight)


def test_more_than_weights_is_refused_when_saving(tmp_path):
    with pytest.raises(TypeError, match=r"holds weights only"):
        save_file({"epoch": 3}, tmp_path / "x.safetensors")
    with pytest.raises(TypeError, match=r"s is torch\.float32 of layout torch\.sparse_coo"):
        save_file({"s": torch.eye(2).to_sparse()}, tmp_path / "x.safetensors")


def raw(header, payload=bytes(8), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + payload


def slot(begin, end, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


MALFORMED = {
    "a header of 2**40 bytes": raw(b"{}", length=1 << 40),
    "a header longer than the file": raw(b"{}", length=100),
    "fewer bytes than a length": b"\x01\x02",
    "no JSON": raw(b"[}"),
    "a list": raw(b"[]", b""),
    "invalid UTF-8": raw(b'{"\xff\xfe": 1}'),
    "endless nesting": raw(b"[" * 100_000),
    "a doubled name": raw(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    ),
    "overlapping tensors": raw({"a": slot(0, 8, (2,)), "b": slot(4, 8)}),
    "a hole": raw({"a": slot(4, 8)}),
    "trailing bytes": raw({"a": slot(0, 4)}),
    "bytes past the end": raw({"a": slot(0, 400, (100,))}),
    "a shape that does not fit": raw({"a": slot(0, 8, (3,))}),
    "a negative size": raw({"a": slot(0, 8, (-2,))}),
    "a huge shape": raw({"a": slot(0, 8, (1 << 62, 1 << 62))}),
    "a reversed range": raw({"a": slot(8, 0, (2,))}),
    "an unknown dtype": raw({"a": slot(0, 8, (2,), "F33")}),
    "a boolean for a number": raw({"a": slot(0, 8, (True, 2))}),
    "metadata that is no text": raw({"__metadata__": {"a": 1}, "a": slot(0, 8, (2,))}),
    "aliases of nothing": raw({"__metadata__": {"composer_manifest": "{}"}, "a": slot(0, 8, (2,))}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused(tmp_path, name):
    (tmp_path / "x.safetensors").write_bytes(MALFORMED[name])
    with pytest.raises(CorruptCheckpointError, match=r"x\.safetensors: the file"):
        load_file(tmp_path / "x.safetensors")


def test_a_shape_of_endless_dims_is_refused_at_once(tmp_path):
    shape = b",".join([b"9223372036854775807"] * 1_000_000)
    header = b'{"w":{"dtype":"U8","shape":[' + shape + b'],"data_offsets":[0,1]}}'
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(CorruptCheckpointError, match="do not fit") as refusal:
        load_file(tmp_path / "x.safetensors")
    assert len(str(refusal.value)) < 2000

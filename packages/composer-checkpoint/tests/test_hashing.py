import hashlib

import pytest
import torch
from blake3 import blake3
from xxhash import xxh3_128_hexdigest

from composer_checkpoint import hash_bytes, hash_file, hash_tensor, hash_tensors, save_file

# Of BLAKE3 from the reference implementation's published test vectors; of XXH3 what xxhsum prints.
VECTORS = {
    ("xxh3_128", b""): "99aa06d3014798d86001c324468d497f",
    ("blake3", b""): "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    ("blake3", b"\x00"): "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
}
AT_ONCE = {"xxh3_128": xxh3_128_hexdigest, "blake3": lambda data: blake3(data).hexdigest()}


@pytest.mark.parametrize(("hash_name", "data"), VECTORS)
def test_the_hashes_are_the_published_ones(hash_name, data):
    assert hash_bytes(data, hash_name) == VECTORS[hash_name, data]


@pytest.mark.parametrize("hash_name", AT_ONCE)
@pytest.mark.parametrize("size_bytes", [1, 1023, 1 << 20, (3 << 20) + 7])
def test_a_file_its_bytes_and_a_tensor_of_them_have_one_hash(tmp_path, size_bytes, hash_name):
    data = bytes(hashlib.shake_128(b"seed").digest(size_bytes))
    (tmp_path / "x").write_bytes(data)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    expected = AT_ONCE[hash_name](data)
    assert hash_bytes(data, hash_name) == hash_bytes(memoryview(data), hash_name) == expected
    assert hash_file(tmp_path / "x", hash_name) == hash_tensor(tensor, hash_name) == expected


def test_a_hash_that_is_not_known_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"hash_name='md5'.*xxh3_128, blake3"):
        save_file({}, tmp_path / "x.pt", hash_name="md5")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="hash_name='md5'"):
        hash_bytes(b"", "md5")


def test_a_tensors_hash_is_of_its_elements_in_row_major_order():
    square = torch.arange(9.0).reshape(3, 3)
    assert hash_tensor(square.t()) == hash_bytes(square.t().contiguous().numpy().tobytes())
    assert hash_tensor(square.t()) != hash_tensor(square)
    assert hash_tensor(square[1]) == hash_bytes(square[1].numpy().tobytes())


def test_several_tensors_are_hashed_by_name():
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.bfloat16), "c": torch.empty(0)}
    assert hash_tensors(tensors) == {name: hash_tensor(tensor) for name, tensor in tensors.items()}


def test_a_sparse_tensor_has_no_bytes_in_order():
    with pytest.raises(TypeError, match="sparse_coo"):
        hash_tensor(torch.eye(2).to_sparse())

"""Whatever byte of a file is changed, it is refused or loads as what was saved."""

import datetime
import shutil
import struct
import zipfile

import numpy as np
import pytest
import torch

from composer_checkpoint import CheckpointError, CorruptCheckpointError, load_file, save_file

WEIGHTS = {"weight": torch.linspace(-1, 1, 12).reshape(3, 4), "bias": torch.arange(5, dtype=torch.int16)}
STATE = {
    "state": {
        "model": WEIGHTS,
        "timestamp": {"Timestamp": {"epoch": 3, "total_wct": datetime.timedelta(seconds=5.25)}},
        "name": "plum",
        "scale": 0.5,
    },
    "rng": [{"numpy": np.arange(4), "torch": torch.tensor([1, 2, 3], dtype=torch.uint8)}],
}
FORMATS = ["x.pt", "x.safetensors", "x.tar", "x.tar.gz", "x.tar.bz2", "x.tar.lzma", "x.pt.gz", "x.pt.xz", "x.pt.zst"]
# Each byte of short files, and of longer ones so many that the test stays short; coprime to all alignments.
MOST_POSITIONS = 150


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    needed = {".zst": "zstd", ".xz": "xz", ".gz": "gzip"}.get(f".{request.param.rpartition('.')[2]}")
    if needed is not None and "tar" not in request.param and shutil.which(needed) is None:
        pytest.skip(f"{needed} is not installed")
    path = tmp_path / request.param
    save_file({"state": {"model": WEIGHTS}} if request.param.endswith(".safetensors") else STATE, path)
    return path


def is_same(found, expected):
    """Compare bit by bit, types included."""
    if type(found) is not type(expected) and not (isinstance(found, dict) and isinstance(expected, dict)):
        return False
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(is_same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and found.shape == expected.shape and found.equal(expected)
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    return found == expected


def positions(size):
    stride = 1
    while size / stride > MOST_POSITIONS:
        stride += 2
    return range(0, size, stride)


@pytest.mark.filterwarnings("ignore")
def test_a_changed_byte_is_refused_or_changes_nothing(path):
    data = path.read_bytes()
    expected = load_file(path)
    assert is_same(expected, {"state": {"model": WEIGHTS}} if path.suffix == ".safetensors" else STATE)
    for position in positions(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        try:
            found = load_file(path)
        except CheckpointError:
            continue
        assert is_same(found, expected), f"byte {position} of {len(data)}"


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_no_changed_byte_of_an_unpacked_file_goes_unnoticed(tmp_path, name):
    path = tmp_path / name
    save_file({"state": {"model": WEIGHTS}}, path)
    data = path.read_bytes()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            load_file(path)


NAMES = ("state/model/weight", "state/model/bias")


def headers_of(path):
    """Where each tensor's header begins and ends, by its name."""
    with zipfile.ZipFile(path) as archive:
        ends = {info.filename: info.header_offset for info in archive.infolist()}
    data = path.read_bytes()
    for number, name in enumerate(NAMES):
        start = ends[f"archive/data/{number}"]
        name_bytes, extra_bytes = struct.unpack_from("<2H", data, start + 26)
        yield name, start, start + 30 + name_bytes + extra_bytes


@pytest.mark.parametrize("name", NAMES)
def test_each_changed_bit_of_a_tensors_header_is_refused(tmp_path, name):
    path = tmp_path / "x.pt"
    save_file({"state": {"model": WEIGHTS}}, path)
    data = path.read_bytes()
    _, start, end = next(header for header in headers_of(path) if header[0] == name)
    for position in range(start, end):
        for bit in range(8) if position < start + 30 else [position % 8]:
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(CorruptCheckpointError, match=r"headers|header at|overlaps|expected"):
                load_file(path)


def test_a_damaged_header_in_a_file_of_torch_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": WEIGHTS["weight"], "tied": WEIGHTS["weight"]}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"PK\x03\x04", b"PK\x03\x05").replace(b"PK\x03\x05", b"PK\x03\x04", 4))
    with pytest.raises(CorruptCheckpointError, match="damaged header"):
        load_file(path)

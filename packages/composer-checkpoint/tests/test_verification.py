import os
import random
import re
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch

from composer_checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    load_file,
    save_file,
    verify,
)

FORMATS = ["pt", "safetensors", "pt.gz", "pt.xz", "pt.bz2", "tar", "tar.gz", "tar.lzma"]


def saved(path, hash_name="xxh3_128"):
    """A checkpoint of a few small tensors, as bytes, and what it holds."""
    generator = torch.Generator().manual_seed(3)
    state = {f"layer{i}.weight": torch.randn(16, 8, generator=generator) for i in range(6)}
    save_file(state, path, hash_name=hash_name)
    return path.read_bytes(), state


@pytest.mark.parametrize("extension", ["pt", "safetensors"])
def test_each_of_300_flipped_bits_is_refused(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    whole, _ = saved(path)
    positions = random.Random(0).sample(range(8 * len(whole)), 300)
    loaded = []
    for position in positions:
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            load_file(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017  # the point is that nothing else is raised
        else:
            loaded.append(position)
    assert loaded == []


@pytest.mark.parametrize("extension", ["pt", "safetensors"])
def test_every_flipped_bit_of_the_first_and_last_bytes_is_refused(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    whole, _ = saved(path)
    for position in [*range(600), *range(8 * len(whole) - 1200, 8 * len(whole))]:
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            verify(path)


@pytest.mark.parametrize("extension", ["pt.gz", "pt.xz", "pt.bz2", "tar", "tar.gz", "tar.lzma"])
def test_a_packed_file_with_a_flipped_bit_is_refused_or_holds_what_was_saved(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    whole, state = saved(path)
    refused = 0
    for position in random.Random(0).sample(range(8 * len(whole)), 25):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            found = load_file(path)
        except CheckpointError:
            refused += 1
        else:  # the bit was in a date or in padding
            assert all(torch.equal(found[name], state[name]) for name in state)
    assert refused > 10


@pytest.mark.parametrize("extension", ["pt", "safetensors"])
def test_a_file_cut_at_each_of_200_positions_is_refused(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    whole, _ = saved(path)
    for part in range(200):
        path.write_bytes(whole[: part * len(whole) // 200])
        with pytest.raises(CorruptCheckpointError, match=re.escape(str(path))):
            load_file(path)


@pytest.mark.parametrize("extension", ["pt.gz", "pt.xz", "tar", "tar.gz", "tar.lzma"])
def test_a_packed_file_that_is_cut_is_refused(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    whole, _ = saved(path)
    for part in range(8):
        path.write_bytes(whole[: part * len(whole) // 10])
        with pytest.raises(CorruptCheckpointError):
            load_file(path)


@pytest.mark.parametrize("extension", FORMATS)
def test_an_empty_file_is_called_empty(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    path.write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match="is empty"):
        load_file(path)
    with pytest.raises(CorruptCheckpointError, match="is empty"):
        verify(path)


@pytest.mark.parametrize("extension", ["pt", "safetensors"])
def test_two_tensors_whose_bytes_were_swapped_are_both_named(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    whole, state = saved(path)
    first, second = (state[f"layer{i}.weight"].numpy().tobytes() for i in (1, 4))
    one, other = whole.index(first), whole.index(second)
    swapped = bytearray(whole)
    swapped[one : one + len(first)], swapped[other : other + len(second)] = second, first
    path.write_bytes(swapped)
    with pytest.raises(CorruptCheckpointError, match=r"layer1\.weight, layer4\.weight.*2 of 6"):
        load_file(path)


@pytest.mark.parametrize("hash_name", ["xxh3_128", "blake3"])
@pytest.mark.parametrize("extension", ["pt", "safetensors"])
def test_a_flipped_bit_of_a_tensor_is_reported_with_its_name_and_place(tmp_path, extension, hash_name):
    path = tmp_path / f"x.{extension}"
    whole, state = saved(path, hash_name)
    assert verify(path).hash_name == hash_name
    assert all(torch.equal(load_file(path)[name], state[name]) for name in state)
    start = whole.index(state["layer3.weight"].numpy().tobytes())
    damaged = bytearray(whole)
    damaged[start + 100] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match=rf"layer3\.weight.*first is at byte {start}"):
        verify(path)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("position", [0, (1 << 20) - 1, 1 << 20, (3 << 20) + 5])
def test_a_flipped_bit_anywhere_in_a_large_tensor_is_refused(tmp_path, position, mmap):
    path, tensor = tmp_path / "x.pt", torch.arange(900_000.0)
    save_file({"w": tensor}, path)
    with open(path, "rb+") as file:
        start = file.read().index(tensor[:100].numpy().tobytes())
        file.seek(start + position)
        byte = file.read(1)[0]
        file.seek(start + position)
        file.write(bytes([byte ^ 128]))
    with pytest.raises(CorruptCheckpointError, match="the bytes of w are not"):
        load_file(path, mmap=mmap)


@pytest.mark.skipif(sys.platform != "linux", reason="maps files on Linux only")
def test_a_mapped_file_that_is_cut_short_meanwhile_does_not_end_the_process(tmp_path):
    path = tmp_path / "x.pt"
    save_file({"w": torch.ones(1_000_000)}, path)
    script = """
import sys, os
from composer_checkpoint.file_io import FileReader
from composer_checkpoint.file_io import MappedFile
with FileReader(sys.argv[1]) as file:
    mapped = MappedFile(file)
    os.truncate(sys.argv[1], 1 << 20)
    print(bytes(mapped.piece(0, 4)), mapped.piece(2 << 20, 100), mapped.piece((1 << 20) - 10, 20))
"""
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=100)
    assert (done.stdout.strip(), done.returncode) == ("b'PK\\x03\\x04' None None", 0)


def test_loading_without_verifying_is_possible_and_checks_the_structure(tmp_path):
    path = tmp_path / "x.pt"
    whole, state = saved(path)
    start = whole.index(state["layer3.weight"].numpy().tobytes())
    damaged = bytearray(whole)
    damaged[start] ^= 1
    path.write_bytes(damaged)
    assert load_file(path, verify=False).keys() == state.keys()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptCheckpointError):
        load_file(path, verify=False)


@pytest.mark.parametrize("kept", ["manifest", "seal"])
def test_a_file_that_lost_one_of_its_two_marks_is_not_taken_for_a_foreign_one(tmp_path, kept):
    path, changed = tmp_path / "x.pt", tmp_path / "y.pt"
    saved(path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w") as target:
        for info in source.infolist():
            if kept == "manifest" or "manifest" not in info.filename:
                target.writestr(info.filename, source.read(info))
        if kept == "seal":
            target.comment = source.comment
    with pytest.raises(CorruptCheckpointError, match="is missing or damaged"):
        load_file(changed)


def test_a_newer_format_is_refused_with_both_versions(tmp_path):
    path = tmp_path / "x.safetensors"
    saved(path)
    header_bytes = struct.unpack("<Q", path.read_bytes()[:8])[0]
    whole = path.read_bytes()
    header = whole[8 : 8 + header_bytes]
    newer = header.replace(rb"\"format_version\":1", rb"\"format_version\":7")
    newer = re.sub(rb'("composer_seal":")[0-9a-f]{64}', rb"\g<1>" + b"0" * 64, newer)
    from blake3 import blake3

    newer = re.sub(rb'("composer_seal":")0{64}', rb"\g<1>" + blake3(newer).hexdigest().encode(), newer)
    path.write_bytes(whole[:8] + newer + whole[8 + header_bytes :])
    with pytest.raises(IncompatibleCheckpointError, match=r"format version 7, written by .* reads up to version 1"):
        load_file(path)


@pytest.mark.parametrize("extension", ["pt", "safetensors"])
@pytest.mark.parametrize("mmap", [True, False])
def test_what_is_verified_is_what_is_loaded_while_another_save_replaces_it(tmp_path, monkeypatch, extension, mmap):
    path, other = tmp_path / f"x.{extension}", tmp_path / f"other.{extension}"
    save_file({"w": torch.zeros(100_000)}, path)
    save_file({"w": torch.ones(50_000)}, other)
    load, load_weights = torch.load, safetensors.torch.load_file

    def replace_before(load):
        def replaced(*args, **kwargs):
            if other.exists():
                os.replace(other, path)
            return load(*args, **kwargs)

        return replaced

    monkeypatch.setattr(torch, "load", replace_before(load))
    monkeypatch.setattr(safetensors.torch, "load_file", replace_before(load_weights))
    assert torch.equal(load_file(path, mmap=mmap)["w"], torch.zeros(100_000))
    assert torch.equal(load_file(path, mmap=mmap)["w"], torch.ones(50_000))


def test_bytes_after_the_end_are_refused(tmp_path):
    for extension in ("pt", "safetensors"):
        path = tmp_path / f"x.{extension}"
        whole, _ = saved(path)
        path.write_bytes(whole + b"\0")
        with pytest.raises(CorruptCheckpointError):
            load_file(path)


def test_random_bytes_are_refused_by_a_checkpoint_error(tmp_path):
    generator = np.random.default_rng(0)
    starts = [b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", b"PK\x05\x06"]
    for index in range(300):
        path = tmp_path / "x.pt"
        path.write_bytes(starts[index % len(starts)] + generator.bytes(int(generator.integers(1, 300))))
        with pytest.raises(CheckpointError):
            load_file(path)

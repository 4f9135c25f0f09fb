import gzip
import io
import lzma
import os
import shutil
import tarfile

import pytest
import torch

from composer_checkpoint import (
    KNOWN_COMPRESSORS,
    CompressorNotFound,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    check_compressor,
    load_file,
    save_file,
    verify,
)

TARS = ["tar", "tar.gz", "tgz", "tar.bz2", "tar.lzma"]
PACKED = [*TARS, *(f"pt.{extension}" for extension in KNOWN_COMPRESSORS)]


@pytest.mark.parametrize("extension", PACKED)
def test_save_then_load_gives_back_the_state(tmp_path, extension):
    path = tmp_path / f"ep1.{extension}"
    command = KNOWN_COMPRESSORS.get(extension.removeprefix("pt."))
    if command and shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    state = {"state": {"model": {"w": torch.arange(1000.0)}}}
    manifest = save_file(state, path, info={"run_name": "blue-fox"})
    assert torch.equal(load_file(path)["state"]["model"]["w"], torch.arange(1000.0))
    assert torch.equal(load_file(path, mmap=False)["state"]["model"]["w"], torch.arange(1000.0))
    assert verify(path) == manifest


@pytest.mark.parametrize("extension", TARS)
def test_a_tar_archive_holds_what_composer_puts_into_it(tmp_path, extension):
    path = tmp_path / f"ep1.{extension}"
    save_file({"w": torch.ones(2)}, path)
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["composer_states.pt"]
        source = archive.extractfile("composer_states.pt")
        assert torch.equal(torch.load(io.BytesIO(source.read()), weights_only=True)["w"], torch.ones(2))


def test_an_archive_that_composer_wrote_loads(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "composer_states.pt")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "composer_states.pt", "./composer_states.pt")
    (tmp_path / "y.pt.gz").write_bytes(gzip.compress((tmp_path / "composer_states.pt").read_bytes()))
    for name in ("x.tar.gz", "y.pt.gz"):
        assert torch.equal(load_file(tmp_path / name)["w"], torch.ones(2))


def test_a_name_that_asks_for_a_missing_program_is_refused_early(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompressorNotFound, match='Could not find command "zstd" in the PATH'):
        check_compressor("ep{epoch}.pt.zst")
    with pytest.raises(FileNotFoundError, match="gzip"):
        save_file({}, tmp_path / "x.pt.gz")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_asks_for_an_unknown_program_is_refused(tmp_path):
    with pytest.raises(CompressorNotFound, match=r'Could not find compressor for "x\.pt\.rar"\..*bz2, gz'):
        check_compressor(tmp_path / "x.pt.rar")
    with pytest.raises(ValueError, match="does not end with a valid tarfile extension"):
        save_file({}, tmp_path / "x.tar.zst")
    for name in ("x.pt", "x", "ep1.5.pt", "x.pt.gz", "x.tar"):
        check_compressor(name)


class Escapes:
    """A tar archive with one member that does not belong into a checkpoint."""

    def __init__(self, name, kind=tarfile.REGTYPE, link=""):
        self.info = tarfile.TarInfo(name)
        self.info.type, self.info.linkname = kind, link

    def write(self, path, states, first):
        with tarfile.open(path, "w") as archive:
            if first:
                archive.addfile(self.info)
            archive.add(states, "composer_states.pt")
            if not first:
                archive.addfile(self.info)


ESCAPES = {
    "an absolute path": Escapes("/tmp/owned"),
    "a path above": Escapes("../owned"),
    "a path above inside": Escapes("a/../../owned"),
    "a symbolic link": Escapes("link", tarfile.SYMTYPE, "/etc/passwd"),
    "a symbolic link in place of the states": Escapes("composer_states.pt", tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link": Escapes("link", tarfile.LNKTYPE, "/etc/passwd"),
    "a character device": Escapes("device", tarfile.CHRTYPE),
    "a block device": Escapes("device", tarfile.BLKTYPE),
    "a pipe": Escapes("pipe", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ESCAPES)
def test_a_tar_member_that_leads_out_is_refused_and_nothing_is_written(tmp_path, name, first, monkeypatch):
    torch.save({"w": torch.ones(2)}, tmp_path / "states.pt")
    ESCAPES[name].write(tmp_path / "x.tar", tmp_path / "states.pt", first)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(UnsafeCheckpointError, match=r"has a member .* nothing was extracted"):
        load_file(tmp_path / "x.tar")
    assert list(temporary.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"states.pt", "x.tar", "temporary"}
    assert not os.path.exists("/tmp/owned")


def test_an_archive_without_the_states_is_refused(tmp_path):
    (tmp_path / "other").write_bytes(b"1")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "other", "other")
    with pytest.raises(CorruptCheckpointError, match=r"without composer_states\.pt"):
        load_file(tmp_path / "x.tar")


BOMBS = {"x.pt.gz": gzip.compress, "x.pt.xz": lzma.compress, "x.tar.gz": gzip.compress, "x.tar.lzma": lzma.compress}


@pytest.mark.parametrize("name", BOMBS)
def test_a_compression_bomb_is_refused_with_its_budget(tmp_path, name):
    zeros = bytes(64 << 20)
    if "tar" in name:
        info = tarfile.TarInfo("composer_states.pt")
        info.size = len(zeros)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.addfile(info, io.BytesIO(zeros))
        zeros = buffer.getvalue()
    (tmp_path / name).write_bytes(BOMBS[name](zeros))
    with pytest.raises(CorruptCheckpointError, match=r"unpacks to more than the 16777216 bytes .* compression bomb"):
        load_file(tmp_path / name)


def test_the_budget_can_be_set_for_one_call(tmp_path):
    save_file({"w": torch.zeros(8 << 20)}, tmp_path / "x.pt.gz")  # 32 MiB
    with pytest.raises(CorruptCheckpointError, match="max_expanded_bytes"):
        load_file(tmp_path / "x.pt.gz")
    assert load_file(tmp_path / "x.pt.gz", max_expanded_bytes=64 << 20)["w"].numel() == 8 << 20
    with pytest.raises(CorruptCheckpointError, match="more than the 1000 bytes"):
        load_file(tmp_path / "x.pt.gz", max_expanded_bytes=1000)


@pytest.mark.parametrize("extension", ["tar.gz", "tar.bz2", "tar.lzma"])
def test_the_checksum_after_the_end_of_a_tar_archive_is_compared(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "composer_states.pt")  # without a manifest, which would tell
    with tarfile.open(path, {"tar.gz": "w:gz", "tar.bz2": "w:bz2", "tar.lzma": "w:xz"}[extension]) as archive:
        archive.add(tmp_path / "composer_states.pt", "composer_states.pt")
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        load_file(path)


def header(kind, size_bytes):
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size_bytes
    return info.tobuf(tarfile.GNU_FORMAT)


def records(**fields):
    """The records of a PAX header, each of which begins with its own length, of two digits here."""
    lines = [f" {name.replace('_', '.')}={value}\n" for name, value in fields.items()]
    text = "".join(f"{len(line) + 2}{line}" for line in lines)
    return header(tarfile.XHDTYPE, len(text)) + text.encode().ljust(512, b"\0")


HEADERS = {
    "a long one": header(tarfile.XHDTYPE, 1 << 20) + bytes(1 << 20),
    "a long name": header(tarfile.GNUTYPE_LONGNAME, 1 << 20) + b"x" * (1 << 20),
    "one for all that follow": header(tarfile.XGLTYPE, 512) + bytes(512),
    "a file with holes": header(tarfile.GNUTYPE_SPARSE, 512) + bytes(512),
    "a list of holes": records(GNU_sparse_major=1, GNU_sparse_minor=0)
    + header(b"0", 1 << 20)
    + b"9999999\n" * (1 << 17),
    "an older list of holes": records(GNU_sparse_map="0,1", GNU_sparse_size=1) + header(b"0", 512) + bytes(512),
    "the oldest list of holes": records(GNU_sparse_size=1) + header(b"0", 512) + bytes(512),
    "one for one for one": records(a=12345) * 3000,
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_tar_whose_headers_would_fill_memory_or_take_endless_time_is_refused(tmp_path, name):
    with gzip.open(tmp_path / "x.tar.gz", "wb") as file:
        file.write(HEADERS[name] + bytes(1024))
    with pytest.raises(CorruptCheckpointError, match=r"has a header|maximum recursion depth"):
        load_file(tmp_path / "x.tar.gz")


def test_a_tar_of_countless_members_is_refused(tmp_path):
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        for number in range(2000):
            archive.addfile(tarfile.TarInfo(f"empty{number}"))
    with pytest.raises(CorruptCheckpointError, match="more than 1000 members"):
        load_file(tmp_path / "x.tar.gz")

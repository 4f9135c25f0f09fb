"""Writing a `.pt` file whose storages are hashed while they are written."""

import os
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, cast

import torch
from blake3 import blake3

from composer_checkpoint._early_flush import EarlyFlush
from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._payload_hashing import hash_ranges
from composer_checkpoint._pt_seal import EMPTY_SEAL, PAYLOAD_FOLDER, seal
from composer_checkpoint._rehearsal import Rehearsal, TensorSpec, rehearse
from composer_checkpoint._zip_layout import Member, ZipLayout, read_zip_layout
from composer_checkpoint.hashing import PARALLEL_FROM_BYTES, hash_tensor
from composer_checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, TensorEntry

__all__ = ["write_pt"]


def write_pt(obj: Any, path: str, info: Mapping[str, Any]) -> tuple[Manifest, Rehearsal]:
    """Write what `torch.save` writes, and the manifest and seal; flush it to the disk."""
    with _HashingFile(path) as file:
        torch.save(obj, cast("IO[bytes]", file))
        file.raise_failure()
        written = file.hashes
        with FileReader(path) as reader:
            layout = read_zip_layout(reader)
            pickled = layout.members["data.pkl"]
            rehearsal = rehearse(reader.read(pickled.offset, pickled.size_bytes), record_unknown=True)
            manifest = _make_manifest(reader, layout, rehearsal, written, info)
        file.append_member(f"{layout.folder}/{MANIFEST_NAME}", manifest.to_json())
        with FileReader(path) as reader:
            file.replace_end(seal(reader, read_zip_layout(reader)))
        file.sync()
    return manifest, rehearsal


class _HashingFile:
    """A file for `torch.save` that hashes each stretch while it writes it.

    One thread hashes what another one writes, both from the tensor's own memory. Torch writes a storage in one piece;
    where it does not, the piece's hash is not asked for, and the storage is read back.
    """

    def __init__(self, path: str) -> None:
        self._raw = open(path, "w+b", buffering=0)  # noqa: SIM115  # closed by __exit__
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._disk = EarlyFlush(self._raw.fileno())
        self._failure: OSError | None = None
        self._position = 0
        self.hashes: dict[tuple[int, int], str] = {}

    def write(self, data: Any) -> int:
        """Write all of the data."""
        view = memoryview(data).cast("B")
        hashing: Future[str] | None = None
        if len(view) >= PARALLEL_FROM_BYTES:
            hashing = self._pool.submit(_hash, view)
        try:
            self._write_all(view)
        except OSError as error:  # torch replaces what a file raises by an error without its cause
            self._failure = self._failure or error
            raise
        finally:  # the memory is torch's only until this returns
            digest = hashing.result() if hashing else _hash(view)
        self.hashes[self._position, len(view)] = digest
        self._position += len(view)
        self._disk.wrote(len(view))
        return len(view)

    def _write_all(self, view: memoryview) -> None:
        while view:
            view = view[self._raw.write(view) :]

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def raise_failure(self) -> None:
        """Raise what a write ran into, if torch has swallowed it."""
        if self._failure is not None:
            raise self._failure

    def append_member(self, name: str, text: str) -> None:
        """Add a member to the archive, and an empty seal."""
        with zipfile.ZipFile(self._raw, "a") as archive:
            archive.writestr(zipfile.ZipInfo(name), text)  # dated 1980, so that equal states make equal files
            archive.comment = EMPTY_SEAL

    def replace_end(self, end: bytes) -> None:
        """Replace as many bytes at the end as there are."""
        self._raw.seek(-len(end), os.SEEK_END)
        self._write_all(memoryview(end))

    def sync(self) -> None:
        """Wait until all is on the disk."""
        self._disk.finish()

    def __enter__(self) -> "_HashingFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        self._pool.shutdown()
        self._disk.close()
        self._raw.close()
        if kind is not None:
            self.raise_failure()


def _hash(view: memoryview) -> str:
    return blake3(view).hexdigest()


def _make_manifest(
    reader: FileReader,
    layout: ZipLayout,
    rehearsal: Rehearsal,
    written: Mapping[tuple[int, int], str],
    info: Mapping[str, Any],
) -> Manifest:
    storages = {name: member for name, member in layout.members.items() if name.startswith(PAYLOAD_FOLDER)}
    hashes = _Hashes(reader, written)
    hashes.prepare(storages.values())
    tensors = {name: _tensor_entry(spec, storages, hashes) for name, spec in rehearsal.tensors.items()}
    files = {name: FileEntry(member.size_bytes, hashes.of(member)) for name, member in storages.items()}
    return Manifest(tensors=tensors, files=files, info=info)


class _Hashes:
    """Hashes of stretches of the file: those taken while it was written, others when they are asked for."""

    def __init__(self, reader: FileReader, written: Mapping[tuple[int, int], str]) -> None:
        self.reader = reader
        self._known = dict(written)

    def prepare(self, members: Any) -> None:
        """Take all that are missing at once."""
        missing = [(m.offset, m.size_bytes) for m in members if (m.offset, m.size_bytes) not in self._known]
        self._known.update(zip(missing, hash_ranges(self.reader, missing), strict=True))

    def of(self, member: Member, start: int = 0, end: int | None = None) -> str:
        """Return the hash of a member, or of a part of it."""
        stretch = (member.offset + start, (member.size_bytes if end is None else end) - start)
        if stretch not in self._known:
            self._known[stretch] = hash_ranges(self.reader, [stretch])[0]
        return self._known[stretch]


def _tensor_entry(spec: TensorSpec, storages: Mapping[str, Member], hashes: _Hashes) -> TensorEntry:
    member = storages[f"{PAYLOAD_FOLDER}{spec.storage.key}"]
    if spec.byte_range is not None:
        digest = hashes.of(member, *spec.byte_range)
    else:
        buffer = bytearray(hashes.reader.read(member.offset, member.size_bytes))
        whole = torch.frombuffer(buffer, dtype=getattr(torch, spec.dtype.name))
        digest = hash_tensor(whole.as_strided(spec.shape, spec.stride, spec.offset))
    return TensorEntry(spec.dtype.name, spec.shape, spec.size_bytes, digest)

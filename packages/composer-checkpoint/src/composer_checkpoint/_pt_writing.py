"""Writing a `.pt` file whose storages are hashed while they are written."""

import os
import zipfile
from collections.abc import Mapping
from typing import IO, Any, cast

import torch

from composer_checkpoint._early_flush import FlushedFile
from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._payload_hashing import hash_ranges
from composer_checkpoint._pt_seal import EMPTY_SEAL, PAYLOAD_FOLDER, seal
from composer_checkpoint._rehearsal import Rehearsal, TensorSpec, rehearse
from composer_checkpoint._zip_layout import Member, ZipLayout, read_zip_layout
from composer_checkpoint.hashing import hash_tensor, new_hasher
from composer_checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, TensorEntry

__all__ = ["Hashes", "make_manifest", "write_pt"]


def write_pt(obj: Any, path: str, info: Mapping[str, Any], hash_name: str) -> tuple[Manifest, Rehearsal]:
    """Write what `torch.save` writes, and the manifest and seal; flush it to the disk."""
    with _HashingFile(path, hash_name) as file:
        torch.save(obj, cast("IO[bytes]", file))
        file.raise_failure()
        with FileReader(path) as reader:
            layout = read_zip_layout(reader)
            pickled = layout.members["data.pkl"]
            rehearsal = rehearse(reader.read(pickled.offset, pickled.size_bytes), record_unknown=True)
            manifest = make_manifest(layout, rehearsal, Hashes(reader, file.hashes, hash_name), info)
        file.append_member(f"{layout.folder}/{MANIFEST_NAME}", manifest.to_json())
        with FileReader(path) as reader:
            file.replace_end(seal(reader, read_zip_layout(reader)))
        file.sync()
    return manifest, rehearsal


class _HashingFile:
    """A file for `torch.save` that hashes each stretch before it writes it.

    Torch writes a storage in one piece; where it does not, the piece's hash is not asked for, and the storage is read
    back.
    """

    def __init__(self, path: str, hash_name: str) -> None:
        self._raw = open(path, "w+b", buffering=0)  # noqa: SIM115  # closed by __exit__
        self._disk = FlushedFile(self._raw)
        self._hash_name = hash_name
        self._failure: OSError | None = None
        self.hashes: dict[tuple[int, int], str] = {}

    def write(self, data: Any) -> int:
        """Write all of the data."""
        view = memoryview(data).cast("B")
        start, hasher = self._disk.position, new_hasher(self._hash_name)
        try:
            self._disk.write(view, hasher)
        except OSError as error:  # torch replaces what a file raises by an error without its cause
            self._failure = self._failure or error
            raise
        self.hashes[start, len(view)] = hasher.hexdigest()
        return len(view)

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
        size_bytes = self._raw.seek(0, os.SEEK_END)
        self._disk.rewrite(memoryview(end), size_bytes - len(end))

    def sync(self) -> None:
        """Wait until all is on the disk."""
        self._disk.finish()

    def __enter__(self) -> "_HashingFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        self._raw.close()
        if kind is not None:
            self.raise_failure()


class Hashes:
    """Hashes of stretches of the file: those taken while it was written, others when they are asked for."""

    def __init__(self, reader: FileReader, written: Mapping[tuple[int, int], str], hash_name: str) -> None:
        self.reader = reader
        self.hash_name = hash_name
        self._known = dict(written)

    def prepare(self, members: Any) -> None:
        """Take all that are missing at once."""
        missing = [(m.offset, m.size_bytes) for m in members if (m.offset, m.size_bytes) not in self._known]
        self._known.update(zip(missing, hash_ranges(self.reader, missing, self.hash_name), strict=True))

    def of(self, member: Member, start: int = 0, end: int | None = None) -> str:
        """Return the hash of a member, or of a part of it."""
        stretch = (member.offset + start, (member.size_bytes if end is None else end) - start)
        if stretch not in self._known:
            self._known[stretch] = hash_ranges(self.reader, [stretch], self.hash_name)[0]
        return self._known[stretch]


def make_manifest(layout: ZipLayout, rehearsal: Rehearsal, hashes: Hashes, info: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a file with this layout and these tensors."""
    storages = {name: member for name, member in layout.members.items() if name.startswith(PAYLOAD_FOLDER)}
    hashes.prepare(storages.values())
    tensors = {name: _tensor_entry(spec, storages, hashes) for name, spec in rehearsal.tensors.items()}
    files = {name: FileEntry(member.size_bytes, hashes.of(member)) for name, member in storages.items()}
    return Manifest(hash_name=hashes.hash_name, tensors=tensors, files=files, info=info)


def _tensor_entry(spec: TensorSpec, storages: Mapping[str, Member], hashes: Hashes) -> TensorEntry:
    member = storages[f"{PAYLOAD_FOLDER}{spec.storage.key}"]
    if spec.byte_range is not None:
        digest = hashes.of(member, *spec.byte_range)
    else:
        buffer = bytearray(hashes.reader.read(member.offset, member.size_bytes))
        whole = torch.frombuffer(buffer, dtype=getattr(torch, spec.dtype.name))
        digest = hash_tensor(whole.as_strided(spec.shape, spec.stride, spec.offset), hashes.hash_name)
    return TensorEntry(spec.dtype.name, spec.shape, spec.size_bytes, digest)

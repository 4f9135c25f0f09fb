"""The stored parts of a sharded checkpoint: checking them, and reading them."""

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from composer_checkpoint._zip_layout import read_zip_layout
from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError
from composer_checkpoint.hashing import new_hasher
from composer_checkpoint.manifest import Manifest, TensorEntry
from composer_checkpoint.sharded._frames import FileSlice, find_elements
from composer_checkpoint.sharded._metadata import part_name
from composer_checkpoint.sharded._objects import decode_object
from composer_checkpoint.sharded._regions import BLOCK_BYTES, StoredElements, copy_region, read_exactly
from composer_checkpoint.sharded._sources import Source

__all__ = ["OpenShards", "Part", "list_parts"]

_NUM_THREADS = min(4, os.cpu_count() or 1)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Part:
    """One stored item: a box of a tensor, or, with no dtype, the pickle of something else."""

    name: str
    file: str
    offset: int
    length: int
    dtype: torch.dtype | None
    shape: torch.Size


def list_parts(metadata: Metadata) -> dict[MetadataIndex, Part]:
    """Return all parts that a checked `.metadata` lists."""
    parts: dict[MetadataIndex, Part] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            info = metadata.storage_data[MetadataIndex(fqn)]
            parts[MetadataIndex(fqn)] = Part(fqn, info.relative_path, info.offset, info.length, None, torch.Size())
            continue
        for chunk in entry.chunks:
            index = MetadataIndex(fqn, chunk.offsets)
            info = metadata.storage_data[index]
            name = part_name(fqn, chunk, entry.size)
            parts[index] = Part(name, info.relative_path, info.offset, info.length, entry.properties.dtype, chunk.sizes)
    return parts


class OpenShards:
    """The files of a checkpoint, opened at their first use and closed at the end of a `with`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._blocks = threading.local()

    def __enter__(self) -> "OpenShards":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def check(self, part: Part, manifest: Manifest | None, *, checksums: bool = False) -> Any:
        """Check one part, and return the object that it holds, or nothing for a tensor.

        Args:
            part: Which.
            manifest: Its hashes are compared, if there is one.
            checksums: Whether to compare the checksums that the archives have themselves, for want of hashes.

        Raises:
            CorruptCheckpointError: If it is not what was written, or not what `.metadata` says.
            UnsafeCheckpointError: If it is no tensor and asks for anything but plain data.
        """
        if manifest is not None:
            self._check_hash(part, manifest.tensors.get(part.name), manifest.hash_name)
        try:
            if checksums:
                self._check_checksums(self._slice(part))
            if part.dtype is None:
                return decode_object(self._slice(part).read(0, part.length))
            if self._elements(part) is None:
                self._load_unusual(part)
        except CheckpointError as error:
            raise type(error)(f"{self._path(part)}: {part.name!r} at offset {part.offset}: {error}") from error
        return None

    def read(self, part: Part, start: Sequence[int], lengths: Sequence[int], target: torch.Tensor) -> None:
        """Copy a box of a checked tensor part into a tensor of the box's shape."""
        elements = self._elements(part)
        if elements is not None:
            copy_region(elements, start, lengths, target, self._block())
            return
        whole = self._load_unusual(part)
        for dim, (begin, length) in enumerate(zip(start, lengths, strict=True)):
            whole = whole.narrow(dim, begin, length)
        target.copy_(whole)

    def for_each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return the results in order; several items are worked on at a time."""
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="shards") as pool:
            return list(pool.map(work, items))

    def _check_hash(self, part: Part, entry: TensorEntry | None, hash_name: str) -> None:
        if entry is None:
            raise CorruptCheckpointError(
                f"{self._path(part)}: the manifest does not list {part.name!r}, so the manifest is of another save. "
                f"Load another checkpoint."
            )
        hasher, block, done = new_hasher(hash_name), self._block(), 0
        while done < part.length:
            view = memoryview(block)[: min(len(block), part.length - done)]
            read_exactly(self._descriptor(part.file), self._path(part), view, part.offset + done)
            hasher.update(view)
            done += view.nbytes
        if hasher.hexdigest() != entry.hash:
            raise CorruptCheckpointError(
                f"{self._path(part)}: the bytes of {part.name!r} at offset {part.offset} are not those that were "
                f"written: their hash is {hasher.hexdigest()[:16]}... and the manifest has {entry.hash[:16]}.... The "
                f"shard was damaged or is of another save. Load another checkpoint."
            )

    def _check_checksums(self, archive: FileSlice) -> None:
        for member in read_zip_layout(archive).members.values():
            if member.crc32 == 0:  # torch can be told to leave them out
                continue
            block, done, found = self._block(), 0, 0
            while done < member.size_bytes:
                view = memoryview(block)[: min(len(block), member.size_bytes - done)]
                read_exactly(archive.descriptor, archive.path, view, archive.offset + member.offset + done)
                found = zlib.crc32(view, found)
                done += view.nbytes
            if found != member.crc32:
                raise CorruptCheckpointError(
                    f"the bytes of {member.name!r} do not have their checksum: the shard was damaged. Load another "
                    f"checkpoint."
                )

    def _elements(self, part: Part) -> StoredElements | None:
        assert part.dtype is not None
        begin = find_elements(self._slice(part), part.dtype, part.shape)
        if begin is None:
            return None
        descriptor, path = self._descriptor(part.file), self._path(part)
        return StoredElements(descriptor, path, part.offset + begin, part.dtype, part.shape)

    def _load_unusual(self, part: Part) -> torch.Tensor:
        """Load a part that is not simply its elements in a row, such as a transposed tensor."""
        tensor = decode_object(self._slice(part).read(0, part.length))
        if not isinstance(tensor, torch.Tensor) or tensor.shape != part.shape or tensor.dtype != part.dtype:
            found = (
                f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else "no tensor"
            )
            raise CorruptCheckpointError(
                f"the shard has {found} there, and `.metadata` says {part.dtype} of shape {tuple(part.shape)}. The "
                f"shard is of another save. Load another checkpoint."
            )
        return tensor

    def _slice(self, part: Part) -> FileSlice:
        return FileSlice(self._descriptor(part.file), self._path(part), part.offset, part.length)

    def _path(self, part: Part) -> str:
        return os.path.join(self._source.folder, part.file)

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self._source.local_path(file), os.O_RDONLY)
            return self._descriptors[file]

    def _block(self) -> bytearray:
        if not hasattr(self._blocks, "block"):
            self._blocks.block = bytearray(BLOCK_BYTES)
        return self._blocks.block

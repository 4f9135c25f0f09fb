"""DCP `StorageReader` that trusts no file, and checks everything before any tensor is changed."""

import io
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from logging import getLogger
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from composer_checkpoint.file_io import FileReader, hash_bytes, hash_file, hash_ranges
from composer_checkpoint.files import Specs, chosen_validation, validate_file
from composer_checkpoint.formats._zip import check_checksums
from composer_checkpoint.formats.pt import load_checked, open_pt, read_tree
from composer_checkpoint.formats.tensor_source import FileRange, StoredTensor, in_file
from composer_checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, Manifest, is_sealed
from composer_checkpoint.sharded._metadata import parse_metadata, part_name
from composer_checkpoint.sharded._storage import FolderOfCheckpoint, Source, open_source


@dataclass(slots=True)
class FileSlice:
    """Part of an open file, read by position like a separate file."""

    file: FileReader
    offset: int
    size_bytes: int
    path: str = ""

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return exactly `size_bytes` bytes."""
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise CorruptCheckpointError(
                f"bytes {offset} to {offset + size_bytes} were expected, and the item has {self.size_bytes}. Load "
                f"another checkpoint."
            )
        return self.file.read(self.offset + offset, size_bytes)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from an offset."""
        self.file.read_into(buffer, self.offset + offset)


# Large enough to make the cost of a system call negligible, small enough to stay in a core's cache.
BLOCK_BYTES = 1 << 22


_blocks = threading.local()  # one buffer for each thread, since new ones would scatter the memory


def copy_box(
    stored: StoredTensor, shape: Sequence[int], first: int, start: Sequence[int], target: torch.Tensor
) -> None:
    """Copy a box of a tensor, in blocks of limited size.

    `shape` is that of the tensor, or of one of its rows, which begins at its element `first`. The box begins at the
    indices `start` in it, and has the sizes of `target`, which may be on any device.
    """
    if not target.numel():
        return
    if not shape or stored.place is None:  # a scalar, or a tensor that is not stored in row-major order
        target.copy_(stored.read()[_box(start, target.shape)])
        return
    row_shape, item_bytes = shape[1:], stored.dtype.itemsize
    row = math.prod(row_shape)
    first += start[0] * row
    rows_at_once = BLOCK_BYTES // (row * item_bytes)
    if not rows_at_once:  # a row that exceeds a block is copied as a tensor with one dim less
        for i, of_row in enumerate(target):
            copy_box(stored, row_shape, first + i * row, start[1:], of_row)
        return
    if not hasattr(_blocks, "block"):
        _blocks.block = bytearray(BLOCK_BYTES)
    file, offset = stored.place.file, stored.place.offset
    for i in range(0, target.shape[0], rows_at_once):
        rows = min(rows_at_once, target.shape[0] - i)
        block = memoryview(_blocks.block)[: rows * row * item_bytes]
        file.read_into(block, offset + (first + i * row) * item_bytes)
        source = torch.frombuffer(_blocks.block, dtype=stored.dtype, count=rows * row).view(rows, *row_shape)
        # Whole rows are read and then narrowed, which takes fewer system calls than reading each run of elements.
        target[i : i + rows].copy_(source[:, *_box(start[1:], target.shape[1:])])


def _box(start: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(start, sizes, strict=True))


_NUM_THREADS = min(4, os.cpu_count() or 1)
_BATCHES_PER_THREAD = 8  # so that threads end at about the same time

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Part:
    """One stored item: a box of a tensor, or, without a dtype, the pickle of another object."""

    name: str
    file: str
    offset: int
    length: int
    dtype: torch.dtype | None
    shape: torch.Size


def list_parts(metadata: Metadata) -> dict[MetadataIndex, Part]:
    """Return all parts that a validated `.metadata` lists."""
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
    """Files of a checkpoint, opened on first use and closed at the end of a `with` statement."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files: dict[str, FileReader] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "OpenShards":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def check(self, part: Part, manifest: Manifest | None, *, checksums: bool = False) -> Any:
        """Check one part, and return its object, or for a tensor its place, or `None` if it is not in row-major order.

        Hashes are compared if there is a manifest; with `checksums`, for folders without hashes, those of the archives.
        """
        file = self._slice(part)
        if manifest is not None:
            entry = manifest.tensors.get(part.name)
            if entry is None:
                raise CorruptCheckpointError(
                    f"{file.path}: the manifest does not list {part.name!r}, so the manifest is of another save. Load "
                    f"another checkpoint."
                )
            (found,) = hash_ranges(file.file, [(part.offset, part.length)], manifest.hash_name)
            if found != entry.hash:
                raise CorruptCheckpointError(
                    f"{file.path}: the bytes of {part.name!r} at offset {part.offset} are not those that were written: "
                    f"their hash is {found[:16]}... and the manifest has {entry.hash[:16]}.... The shard was damaged "
                    f"or is of another save. Load another checkpoint."
                )
        try:
            if checksums:
                check_checksums(file)
            if part.dtype is None:
                return decode_object(file.read(0, part.length))
            return self._stored(part).place
        except CheckpointError as error:
            raise type(error)(f"{file.path}: {part.name!r} at offset {part.offset}: {error}") from error

    def read(self, part: Part, place: FileRange | None, start: Sequence[int], target: torch.Tensor) -> None:
        """Copy a box of a checked tensor, of which `check` has returned the place, into a tensor of the box's shape."""
        if place is None:
            stored = self._stored(part)
        else:  # the archive around the elements need not be read again
            stored = in_file(self._slice(part), place.offset, place.dtype, place.shape, None)
        copy_box(stored, part.shape, 0, start, target)

    def for_each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call a function for each item in several threads, and return the results in order."""
        every = list(items)
        # In batches, since a task for each of thousands of small tensors would cost more than its work.
        size = max(1, len(every) // (_NUM_THREADS * _BATCHES_PER_THREAD))
        batches = [every[i : i + size] for i in range(0, len(every), size)]
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="shards") as pool:
            done = pool.map(lambda batch: [work(item) for item in batch], batches)
            return [result for results in done for result in results]  # `map` raises errors only here

    def _stored(self, part: Part) -> StoredTensor:
        file = self._slice(part)
        stored = read_tree(file, open_pt(file))
        if not isinstance(stored, StoredTensor) or (stored.dtype, stored.shape) != (part.dtype, tuple(part.shape)):
            is_tensor = isinstance(stored, StoredTensor)
            found = f"{stored.dtype} of shape {tuple(stored.shape)}" if is_tensor else "no tensor"
            raise CorruptCheckpointError(
                f"the shard has {found} there, and `.metadata` says {part.dtype} of shape {tuple(part.shape)}. The "
                f"shard is of another save. Load another checkpoint."
            )
        return stored

    def _slice(self, part: Part) -> FileSlice:
        with self._lock:  # threads share the files
            if part.file not in self._files:
                self._files[part.file] = FileReader(self._source.local_path(part.file))
        path = os.path.join(self._source.folder, part.file)
        return FileSlice(self._files[part.file], part.offset, part.length, path)


log = getLogger(__name__)


def read_folder_metadata(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Metadata:
    """Return the validated metadata of a sharded checkpoint.

    The data is not read; `verify_folder` does that.

    Args:
        folder: A local path, or a URI that fsspec supports, of a folder that DCP wrote.
        storage_options: Options for fsspec.

    Raises:
        NoCheckpointError: If the folder does not exist, or has no `.metadata`.
        UnsafeCheckpointError: If `.metadata` has more than data.
        CorruptCheckpointError: If it is inconsistent, or files are missing, cut short or of another save.
    """
    return VerifyingReader(folder, verify=False, storage_options=storage_options).read_metadata()


class VerifyingReader(FolderOfCheckpoint, StorageReader):
    """Reader of the folders of `VerifiedWriter`, of torch's own writer and of Composer.

    Everything that this rank needs is checked while the ranks plan, so that all of them refuse a bad checkpoint before
    any tensor is changed: `.metadata` creates only its own classes, its shapes fit the files, the hash of each part is
    that of the manifest, and items other than tensors are plain data. Data is read in pieces of a few megabytes.

    A folder without a manifest, from another program, is read with a warning that it was not verified.

    `torch.distributed.checkpoint.load` wraps the errors below into its `CheckpointException`, which is not an
    `Exception`; `load_sharded` raises them unchanged, on all ranks.

    Args:
        folder: A local path, or a URI that fsspec supports. The needed files of a remote folder are downloaded to
            temporary files.
        verify: Whether to compare hashes. Sizes are always compared.
        storage_options: Options for fsspec, such as `endpoint_url`.
        validation_function: As for `composer_checkpoint.files.validate_file`; called before a file is read.

    Example:
        >>> import tempfile
        >>> import warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> folder = tempfile.mkdtemp() + "/ep1"
        >>> state_dict = {"w": torch.zeros(2)}
        >>> with warnings.catch_warnings(action="ignore"):  # torch warns that there is no process group
        ...     _ = dcp.save({"w": torch.ones(2)}, checkpoint_id=folder)
        ...     dcp.load(state_dict, storage_reader=VerifyingReader(folder))
        >>> state_dict["w"]
        tensor([1., 1.])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        verify: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        validation_function: Callable[[str, Specs | None], Any] | None = None,
    ) -> None:
        super().__init__()
        self._validate = validation_function
        self.manifest: Manifest | None = None
        self._verify = verify
        self._storage_options = dict(storage_options or {})
        self.reset(folder)

    def open_source(self) -> Source:
        """Return the source of the files."""
        return open_source(self._folder, self._storage_options)

    @property
    def source(self) -> Source:
        """Return the opened source."""
        if self._source is None:
            raise RuntimeError("read_metadata() comes first: it opens the folder.")
        return self._source

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load."""
        if checkpoint_id is not None:
            self._folder = os.fspath(checkpoint_id)
        self._source: Source | None = None
        self._parts: dict[MetadataIndex, Part] = {}
        self._checked: dict[MetadataIndex, Any] = {}

    def read_metadata(self) -> Metadata:
        """Return the validated `.metadata`.

        Raises:
            NoCheckpointError: If the folder does not exist, or has no `.metadata`.
            UnsafeCheckpointError: If `.metadata` has more than data.
            CorruptCheckpointError: If it is inconsistent, or files are missing, cut short or of another save.
        """
        source = self._source = self.open_source()
        if source.size_bytes(METADATA_NAME) is None:
            raise NoCheckpointError(
                f"{self._folder} has no {METADATA_NAME}, so it is not a sharded checkpoint, or its save is unfinished. "
                f"Load another checkpoint."
            )
        self.manifest = read_manifest(source)
        if self.manifest is None and self._verify:
            log.warning("%s has no %s: it is loaded unverified.", self._folder, MANIFEST_NAME)
        data = source.local_path(METADATA_NAME).read_bytes()
        manifest = self.manifest
        if manifest is not None and hash_bytes(data, manifest.hash_name) != manifest.files[METADATA_NAME].hash:
            raise CorruptCheckpointError(
                f"{os.path.join(self._folder, METADATA_NAME)} is not what was written: its hash differs from the "
                f"manifest's. Load another checkpoint."
            )
        # Parsed only now: the hash has shown that these are the bytes that were written.
        return parse_metadata(data, self._folder, source.size_bytes)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Record the parts that the checkpoint consists of."""
        self._parts = list_parts(metadata)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check all parts that the plan needs.

        Raises:
            CorruptCheckpointError: If a part differs from what was written.
            UnsafeCheckpointError: If an item other than a tensor has more than plain data.
            ValueError: If the validation function refuses a file.
        """
        needed = {item.storage_index for item in plan.items}
        # So that each file is read from front to back.
        in_file_order = sorted(needed, key=lambda index: (self._parts[index].file, self._parts[index].offset))
        parts = {index: self._parts[index] for index in in_file_order}
        if (validate := self._validate or chosen_validation()) is not None:
            specs: dict[str, list[tuple[int, int]]] = defaultdict(list)
            for part in parts.values():
                specs[part.file].append((part.offset, part.length))
            for name, stretches in specs.items():
                validate_file(self.source.local_path(name), stretches, validate)
        manifest = self.manifest if self._verify else None
        with OpenShards(self.source) as shards:
            checksums = self._verify and manifest is None
            checked = shards.for_each(lambda part: shards.check(part, manifest, checksums=checksums), parts.values())
        self._checked = dict(zip(parts, checked, strict=True))  # so that objects are decoded once
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the checked data of the plan into the planner's tensors."""
        reads: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                # Pickled again from the checked object, since torch's planner would run anything in the stored bytes.
                planner.load_bytes(item, encode_object(self._checked[item.storage_index]))
            else:
                reads.append((item, planner.resolve_tensor(item).detach()))
        with OpenShards(self.source) as shards:
            shards.for_each(lambda read: self._read(shards, *read), reads)
        for item, target in reads:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, shards: OpenShards, item: ReadItem, target: torch.Tensor) -> None:
        index = item.storage_index
        # A planner may have added items since `prepare_local_plan`.
        shards.read(self._parts[index], self._checked.get(index), item.storage_offsets, target)


def verify_folder(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Manifest | None:
    """Compare all files of a sharded checkpoint with its manifest. One process suffices; no model is needed.

    Args:
        folder: A local path, or a URI that fsspec supports.
        storage_options: Options for fsspec.

    Returns:
        The manifest; `None` if the folder has none, and only the structure and the shards' own checksums could be
        checked.

    Raises:
        NoCheckpointError: If the checkpoint does not exist.
        UnsafeCheckpointError: If it has more than data.
        CorruptCheckpointError: If a byte differs from what was written, with the shard and the tensor.
    """
    reader = VerifyingReader(folder, verify=False, storage_options=storage_options)  # the hashes are compared below
    parts = list_parts(reader.read_metadata()).values()
    manifest, source = reader.manifest, reader.source
    damaged: set[str] = set()
    if manifest is not None:
        damaged = {
            name
            for name, entry in manifest.files.items()
            if hash_file(source.local_path(name), manifest.hash_name) != entry.hash
        }
        # Tensors in intact files are proven by the hash of the file, so only objects are left to check.
        parts = [part for part in parts if part.file in damaged or part.dtype is None]
    with OpenShards(source) as shards:
        shards.for_each(  # raises an error that names the damaged tensor
            lambda part: shards.check(part, manifest, checksums=manifest is None), parts
        )
    if damaged:
        raise CorruptCheckpointError(
            f"{os.path.join(source.folder, min(damaged))} has bytes that are not those that were written, outside of "
            f"any tensor. Load another checkpoint."
        )
    return manifest


def read_manifest(source: Source) -> Manifest | None:
    """Return the manifest of a folder, if any, after comparing the files' sizes with it.

    Raises:
        CorruptCheckpointError: If a file is missing or has another size.
    """
    if source.size_bytes(MANIFEST_NAME) is None:  # written by another program
        return None
    where = os.path.join(source.folder, MANIFEST_NAME)
    try:
        manifest = Manifest.from_json(source.local_path(MANIFEST_NAME).read_bytes())
    except CheckpointError as error:
        raise type(error)(f"{where}: {error}") from error
    if not is_sealed(manifest):
        raise CorruptCheckpointError(
            f"{where} is not what was written: its hash differs from the one that it contains. Load another checkpoint."
        )
    if METADATA_NAME not in manifest.files:
        raise CorruptCheckpointError(f"{where} does not list {METADATA_NAME}. Load another checkpoint.")
    for name, entry in manifest.files.items():
        # A manifest must not make the reader open files elsewhere.
        if os.path.basename(name) != name:
            raise CorruptCheckpointError(f"{where} lists {name!r:.80}, outside the folder. Load another checkpoint.")
        size = source.size_bytes(name)
        if size is None:
            raise CorruptCheckpointError(
                f"{source.folder} lacks the shard {name}, which the manifest lists. Bring the file back, or load "
                f"another checkpoint."
            )
        if size != entry.size_bytes:
            raise CorruptCheckpointError(
                f"{os.path.join(source.folder, name)} has {size} bytes, and the manifest says {entry.size_bytes}: it "
                f"was cut short or is of another save. Load another checkpoint."
            )
    return manifest


def decode_object(data: bytes) -> Any:
    """Return the object that `torch.save` wrote as these bytes, which must be plain data."""
    open_pt(_InMemory(data))
    return load_checked(cast(str, io.BytesIO(data)), map_location="cpu", mmap=False)  # torch.load takes files too


def encode_object(value: object) -> io.BytesIO:
    """Return the bytes that `torch.save` writes for an object."""
    encoded = io.BytesIO()
    torch.save(value, encoded)
    encoded.seek(0)
    return encoded


class _InMemory:
    def __init__(self, data: bytes) -> None:
        self._data, self.size_bytes = data, len(data)

    def read(self, offset: int, size_bytes: int) -> bytes:
        return self._data[offset : offset + size_bytes]

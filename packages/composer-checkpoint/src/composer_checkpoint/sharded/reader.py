"""A DCP `StorageReader` that trusts nothing it reads, and checks everything before anything is changed."""

import io
import os
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from composer_checkpoint._pickle_inspection import TensorSpec, rehearse
from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from composer_checkpoint.file_io import hash_bytes, new_hasher
from composer_checkpoint.files import Specs, chosen_validation, validate_file
from composer_checkpoint.formats._zip import read_zip_layout
from composer_checkpoint.formats.pt import load_checked, open_pt
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest, TensorEntry, check_sharded_seal
from composer_checkpoint.sharded._boxes import BLOCK_BYTES, StoredElements, copy_region, read_exactly
from composer_checkpoint.sharded._metadata import parse_metadata, part_name
from composer_checkpoint.sharded._storage import METADATA_NAME, Source, open_source

if TYPE_CHECKING:
    from composer_checkpoint.file_io import FileReader

__all__ = ["VerifyingReader", "read_folder_metadata", "read_manifest"]


@dataclass(slots=True)
class FileSlice:
    """A part of an open file, read by position as if it were a file of its own."""

    descriptor: int
    path: str
    offset: int
    size_bytes: int

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return exactly that many bytes.

        Raises:
            CorruptCheckpointError: If the part does not have them.
        """
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise CorruptCheckpointError(
                f"bytes {offset} to {offset + size_bytes} were expected, and the item has {self.size_bytes}. Load "
                f"another checkpoint."
            )
        buffer = bytearray(size_bytes)
        read_exactly(self.descriptor, self.path, memoryview(buffer), self.offset + offset)
        return bytes(buffer)


def find_elements(archive: FileSlice, dtype: torch.dtype, shape: torch.Size) -> int | None:
    """Return where in an archive the elements begin, if they lie in row-major order, one after the other.

    Returns:
        The offset, or `None` if the archive holds anything else, such as a transposed or a sparse tensor, or one of
        another dtype or shape.

    Raises:
        CorruptCheckpointError: If this is no archive of `torch.save`'s.
        UnsafeCheckpointError: If its pickle asks for what checkpoints do not need.
    """
    members = read_zip_layout(archive).members
    if "data.pkl" not in members:
        raise CorruptCheckpointError("it lacks data.pkl. Load another checkpoint.")
    pickled, byteorder = members["data.pkl"], members.get("byteorder")
    spec = rehearse(archive.read(pickled.offset, pickled.size_bytes)).tree
    if not isinstance(spec, TensorSpec) or spec.byte_range is None:
        return None
    if f"torch.{spec.dtype.name}" != str(dtype) or spec.shape != tuple(shape):
        return None
    elements = members.get(f"data/{spec.storage.key}")
    if elements is None or elements.size_bytes != spec.storage.size_bytes:
        return None
    if byteorder and archive.read(byteorder.offset, byteorder.size_bytes) != sys.byteorder.encode():
        return None
    return elements.offset + spec.byte_range[0]


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


log = getLogger(__name__)


def read_folder_metadata(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Metadata:
    """Return what a sharded checkpoint says about itself, after checking that it can be so.

    The data is not read; `verify_folder` does that.

    Args:
        folder: A folder that DCP wrote: a local path, or a URI that fsspec knows.
        storage_options: For fsspec.

    Raises:
        NoCheckpointError: If there is no such folder, or no `.metadata` in it.
        UnsafeCheckpointError: If `.metadata` asks for anything that a checkpoint does not need.
        CorruptCheckpointError: If it describes what cannot be, or files are missing, cut short or of another save.
    """
    return VerifyingReader(folder, verify=False, storage_options=storage_options).read_metadata()


class VerifyingReader(StorageReader):
    """Reads the folders of `VerifiedWriter`, and those of torch's own writer and of Composer.

    All that this rank needs is checked while ranks plan, so that all of them refuse a bad checkpoint before a tensor
    is changed: `.metadata` makes no objects but its own, its shapes fit the files, each part has the hash that the
    manifest has, and items that are no tensors are plain data. Data goes through buffers of a few megabytes.

    A folder without a manifest, which another program wrote, is read with a warning that it was not verified.

    Through `torch.distributed.checkpoint.load` the errors below arrive inside torch's `CheckpointException`, which is
    no `Exception`; `load_sharded` raises them as they are, on all ranks.

    Args:
        folder: A local path, or a URI that fsspec knows. What is needed of a remote folder is fetched to temporary
            files.
        verify: Whether hashes are compared. Sizes always are.
        storage_options: For fsspec, such as `endpoint_url`.
        validation_function: As in `composer_checkpoint.files.validate_file`, which is asked before a file is read.

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

    @property
    def checkpoint_id(self) -> str:
        """The folder."""
        return self._folder

    def open_source(self) -> Source:
        """Return where the files are."""
        return open_source(self._folder, self._storage_options)

    @property
    def source(self) -> Source:
        """The opened folder."""
        if self._source is None:
            raise RuntimeError("read_metadata() comes first: it opens the folder.")
        return self._source

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Get ready for another load."""
        if checkpoint_id is not None:
            self._folder = os.fspath(checkpoint_id)
        self._source: Source | None = None
        self._parts: dict[MetadataIndex, Part] = {}
        self._objects: dict[MetadataIndex, Any] = {}

    def read_metadata(self) -> Metadata:
        """Return the checked `.metadata`.

        Raises:
            NoCheckpointError: If there is no such folder, or no `.metadata` in it.
            UnsafeCheckpointError: If `.metadata` asks for anything that a checkpoint does not need.
            CorruptCheckpointError: If it describes what cannot be, or files are missing, cut short or of another save.
        """
        source = self._source = self.open_source()
        if source.size_bytes(METADATA_NAME) is None:
            raise NoCheckpointError(
                f"{self._folder} has no {METADATA_NAME}, so it is no sharded checkpoint, or its save did not finish. "
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
        return parse_metadata(data, self._folder, source.size_bytes)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Take in what the checkpoint holds."""
        self._parts = list_parts(metadata)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check all parts that the plan needs.

        Raises:
            CorruptCheckpointError: If a part is not what was written.
            UnsafeCheckpointError: If an item that is no tensor asks for anything but plain data.
            ValueError: If the validation function refuses a file.
        """
        parts = {index: self._parts[index] for index in in_file_order(self._parts, plan)}
        self._validate_files(parts.values())
        manifest = self.manifest if self._verify else None
        with OpenShards(self.source) as shards:
            checksums = self._verify and manifest is None
            objects = shards.for_each(lambda part: shards.check(part, manifest, checksums=checksums), parts.values())
        self._objects = dict(zip(parts, objects, strict=True))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for, which has been checked, into the planner's tensors."""
        reads: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                # Written anew from the checked object: torch's planner would run whatever the stored bytes ask for.
                planner.load_bytes(item, encode_object(self._objects[item.storage_index]))
            else:
                reads.append((item, planner.resolve_tensor(item).detach()))
        with OpenShards(self.source) as shards:
            shards.for_each(lambda read: self._read(shards, *read), reads)
        for item, target in reads:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return true: whether a folder can be read is seen when it is."""
        return True

    def _validate_files(self, parts: Iterable[Part]) -> None:
        validate = self._validate or chosen_validation()
        if validate is None:
            return
        specs: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for part in parts:
            specs[part.file].append((part.offset, part.length))
        for name, stretches in specs.items():
            validate_file(self.source.local_path(name), stretches, validate)

    def _read(self, shards: OpenShards, item: ReadItem, target: torch.Tensor) -> None:
        shards.read(self._parts[item.storage_index], item.storage_offsets, item.lengths, target)


def in_file_order(parts: Mapping[MetadataIndex, Part], plan: LoadPlan) -> list[MetadataIndex]:
    """Return what a plan reads, once each, in the order in which it lies on the disk."""
    needed = {item.storage_index for item in plan.items}
    return sorted(needed, key=lambda index: (parts[index].file, parts[index].offset))


def read_manifest(source: Source) -> Manifest | None:
    """Return a folder's manifest, if it has one and all its files have the sizes that it lists.

    Raises:
        CorruptCheckpointError: If a file is missing or has another size.
    """
    if source.size_bytes(MANIFEST_NAME) is None:
        return None
    where = os.path.join(source.folder, MANIFEST_NAME)
    try:
        manifest = Manifest.from_json(source.local_path(MANIFEST_NAME).read_bytes())
    except CheckpointError as error:
        raise type(error)(f"{where}: {error}") from error
    check_sharded_seal(manifest, where)
    if METADATA_NAME not in manifest.files:
        raise CorruptCheckpointError(f"{where} does not list {METADATA_NAME}. Load another checkpoint.")
    for name, entry in manifest.files.items():
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
    """Return what `torch.save` made these bytes of, if that was plain data.

    Raises:
        UnsafeCheckpointError: If the bytes ask for anything else.
        CorruptCheckpointError: If they are not what `torch.save` writes.
    """
    open_pt(cast("FileReader", _InMemory(data)))  # it asks for no more than size and reading
    return load_checked(cast(str, io.BytesIO(data)), map_location="cpu", mmap=False)  # torch.load takes either


def encode_object(value: object) -> io.BytesIO:
    """Return what `torch.save` makes of an object."""
    encoded = io.BytesIO()
    torch.save(value, encoded)
    encoded.seek(0)
    return encoded


@dataclass(frozen=True, slots=True)
class _InMemory:
    """Bytes that are read by position, as if they were a file."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self, offset: int, size_bytes: int) -> bytes:
        return self.data[offset : offset + size_bytes]

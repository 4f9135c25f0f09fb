"""DCP `StorageWriter` whose checkpoints are whole or absent, with a hash of every part."""

import math
import os
import pickle
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import UnsupportedOperation
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from composer_checkpoint.errors import as_storage_error
from composer_checkpoint.file_io import hash_bytes, new_hasher, tensor_bytes
from composer_checkpoint.formats.pt import unknown_globals_of, unsafe_objects
from composer_checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, FileEntry, Manifest, TensorEntry, sealed
from composer_checkpoint.sharded._metadata import part_name
from composer_checkpoint.sharded._storage import FolderOfCheckpoint, open_target

_DCP_VERSION = "1.0.0"  # the version that torch's own writer puts into `.metadata`


class VerifiedWriter(FolderOfCheckpoint, StorageWriter):
    """Writer of folders that torch's own reader can load, and that appear only once they are whole.

    Each rank writes `__{rank}_0.distcp` and hashes what it writes. Rank 0 adds `.metadata` and, last,
    `composer_manifest.json`, flushes everything to the disk and gives the folder its name by one rename. In a remote
    store, which has no rename, the manifest is the last object and marks the checkpoint as whole; the manifest of a
    checkpoint to be replaced is deleted first.

    With `torch.distributed.checkpoint.save`, the temporary folder of a failed save exists until this object is deleted;
    `save_sharded` removes it at once.

    Args:
        folder: A local path, or a URI that fsspec supports, such as `s3://bucket/run/ep1`.
        info: Entries of the manifest about the run, with values that JSON supports.
        overwrite: Whether to replace an existing checkpoint of this name.
        storage_options: Options for fsspec, such as `endpoint_url`.

    Example:
        >>> import tempfile
        >>> import warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> folder = tempfile.mkdtemp() + "/ep1"
        >>> with warnings.catch_warnings(action="ignore"):  # torch warns that there is no process group
        ...     _ = dcp.save({"w": torch.ones(2)}, storage_writer=VerifiedWriter(folder))
        >>> sorted(os.listdir(folder))
        ['.metadata', '__0_0.distcp', 'composer_manifest.json']
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        info: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.manifest: Manifest | None = None
        self._info = dict(info or {})
        self._overwrite = overwrite
        self._storage_options = dict(storage_options or {})
        self.reset(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save."""
        if checkpoint_id is not None:
            self._folder = os.fspath(checkpoint_id)
        self._target = open_target(self._folder, self._overwrite, self._storage_options)
        self._save_id = str(uuid.uuid4())
        self.manifest = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise if DCP is to save without collectives, which would write no common `.metadata`."""
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "use_collectives=False writes one `.metadata` for each rank, which is not a checkpoint of the whole "
                "model. Leave it out."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the temporary folder, and assign a file to each rank. Rank 0 calls this.

        Raises:
            CheckpointConflictError: If a checkpoint of this name exists and `overwrite` is false.
            StorageError: If the disk has too little space.
        """
        # The size of other objects is known only once they are pickled; they are small.
        tensors = [item.tensor_data for plan in plans for item in plan.items if item.tensor_data is not None]
        sizes = [math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize for tensor in tensors if tensor.chunk]
        self._place = self._target.begin(sum(sizes))
        return [replace(plan, storage_data=(self._place, f"__{rank}_0.distcp")) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and hash this rank's file.

        Raises:
            StorageError: If the disk or store fails.
        """
        results: list[WriteResult] = []
        if plan.items:
            folder, name = plan.storage_data
            with self._explaining(), self._target.open(folder, name) as file:
                hashed = _HashedFile(file)
                written = [_write_item(item, planner, hashed, name) for item in plan.items]
                written[-1] = replace(written[-1], file=hashed.entry())  # the whole file is known only now
                _flush(file)
            results = [
                WriteResult(item.index, part.info.length, part) for item, part in zip(plan.items, written, strict=True)
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` and the manifest, and commit. Rank 0 calls this.

        Raises:
            StorageError: If the disk or store fails.
        """
        written: dict[MetadataIndex, _Written] = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        metadata.storage_data = {index: part.info for index, part in written.items()}
        metadata.version, metadata.storage_meta = _DCP_VERSION, self.storage_meta()
        files = {part.info.relative_path: part.file for part in written.values() if part.file is not None}
        with self._explaining():
            files[METADATA_NAME] = self._write_small(METADATA_NAME, pickle.dumps(metadata))
            tensors = {part.name: part.tensor for part in written.values()}
            self.manifest = sealed(Manifest(tensors=tensors, files=files, info=self._info | {"save_id": self._save_id}))
            # Last of all files: in a remote store, its presence marks the checkpoint as whole.
            self._write_small(MANIFEST_NAME, self.manifest.to_json().encode())
            self._target.commit()

    def abort(self, error: BaseException) -> None:
        """Remove the written files after a failure on any rank. Rank 0 calls this."""
        self._target.abort(error)

    def storage_meta(self) -> StorageMeta:
        """Return the entry of `.metadata` about the save itself."""
        return StorageMeta(checkpoint_id=self._folder, save_id=self._save_id)

    def _write_small(self, name: str, content: bytes) -> FileEntry:
        with self._target.open(self._place, name) as file:
            file.write(content)
            _flush(file)
        return FileEntry(len(content), hash_bytes(content))

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn errors of the disk or store into a `StorageError` with an explanation."""
        try:
            yield
        except Exception as error:
            storage_error = as_storage_error(error, Path(self._folder))
            if storage_error is None:
                raise
            raise storage_error from error


@dataclass(frozen=True, slots=True)
class _Written:
    """Report of a rank to rank 0 about one part; that of the last part of a file includes the file."""

    info: _StorageInfo
    name: str
    tensor: TensorEntry
    file: FileEntry | None = None


class _HashedFile:
    """File that hashes everything as it is written, and each item separately."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._whole = new_hasher()
        self._item = new_hasher()
        self._failure: OSError | None = None
        self.position = self._item_start = 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        try:
            self._file.write(view)
        except OSError as error:
            self._failure = error
            raise
        self._whole.update(view)
        self._item.update(view)
        self.position += view.nbytes
        return view.nbytes

    def save(self, tensor: torch.Tensor) -> None:
        try:
            torch.save(tensor, self)  # pyright: ignore[reportArgumentType]  # write() and flush() suffice
        except RuntimeError:
            if self._failure is None:
                raise
            raise self._failure from None  # torch's error is a consequence: it fails to close its archive

    def flush(self) -> None:
        """Do nothing: `torch.save` calls this after each item, but the file is flushed once at its end."""

    def end_item(self) -> tuple[int, int, str]:
        """Return the item's offset, length and hash, and begin the next item."""
        start, digest = self._item_start, self._item.hexdigest()
        self._item_start, self._item = self.position, new_hasher()
        return start, self.position - start, digest

    def entry(self) -> FileEntry:
        return FileEntry(self.position, self._whole.hexdigest())


def _write_item(item: WriteItem, planner: SavePlanner, file: _HashedFile, file_name: str) -> _Written:
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        file.save(_tight(_plain(data, item.index.fqn, file_name)))
    else:
        if unknown := unknown_globals_of(data.getvalue()):
            raise unsafe_objects(file_name, f"{item.index.fqn} ({', '.join(sorted(unknown))})")
        file.write(data.getbuffer())
    offset, length, digest = file.end_item()
    dtype, shape, name = "bytes", (), item.index.fqn
    if described := item.tensor_data:
        dtype, shape = str(described.properties.dtype).removeprefix("torch."), tuple(described.chunk.sizes)
        name = part_name(name, described.chunk, described.size)
    return _Written(_StorageInfo(file_name, offset, length), name, TensorEntry(dtype, shape, length, digest))


def _plain(tensor: torch.Tensor, name: str, file_name: str) -> torch.Tensor:
    """Return a tensor of torch's own class, since restoring another class would have to run code."""
    tensor = tensor.detach()
    if type(tensor) is torch.Tensor:
        return tensor
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper, whose elements are in other tensors
        tensor = tensor.clone()  # clone() waits for an AsyncCollectiveTensor and returns a plain tensor
    if hasattr(tensor, "__tensor_flatten__"):
        raise unsafe_objects(file_name, f"{name} (a tensor of the class {type(tensor).__qualname__})")
    return tensor.as_subclass(torch.Tensor)


def _tight(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU with a storage of its own, since `torch.save` writes whole storages.

    Contiguous elements are not copied, such as those of a shard inside a padded buffer.
    """
    tensor = tensor.cpu()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    if tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    return torch.frombuffer(tensor_bytes(tensor), dtype=tensor.dtype).view(tensor.shape)


def _flush(file: BinaryIO) -> None:
    """Flush a local file to the disk, on the machine that wrote it; a remote one is stored once it is closed."""
    file.flush()
    if hasattr(file, "fileno"):
        with suppress(UnsupportedOperation):
            os.fsync(file.fileno())

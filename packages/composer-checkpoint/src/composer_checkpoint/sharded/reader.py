"""A DCP `StorageReader` that trusts nothing it reads, and checks everything before anything is changed."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from logging import getLogger
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from composer_checkpoint.hashing import hash_bytes
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest
from composer_checkpoint.sharded._metadata import parse_metadata
from composer_checkpoint.sharded._objects import encode_object
from composer_checkpoint.sharded._parts import OpenShards, Part, list_parts
from composer_checkpoint.sharded._seals import check_seal
from composer_checkpoint.sharded._sources import Source, open_source
from composer_checkpoint.sharded._targets import METADATA_NAME
from composer_checkpoint.validation import Specs, chosen_validation, validate_file

__all__ = ["VerifyingReader", "read_folder_metadata", "read_manifest"]

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
        validation_function: As in `composer_checkpoint.validation.validate_file`, which is asked before a file is read.

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
    check_seal(manifest, where)
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

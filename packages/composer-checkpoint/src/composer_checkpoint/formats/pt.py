"""`.pt` files: archives of `torch.save` with a manifest and a seal, checked before `torch.load` reads them.

They are also read and written tensor by tensor. Nothing of their pickles is ever run.
"""

import io
import os
import pickle
import sys
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from logging import getLogger
from typing import IO, Any, cast

import numpy as np
import torch
from torch._utils import (
    _rebuild_sparse_tensor,  # pyright: ignore[reportPrivateUsage]
    _rebuild_tensor_v2,  # pyright: ignore[reportPrivateUsage]
    _rebuild_tensor_v3,  # pyright: ignore[reportPrivateUsage]
)
from torch.serialization import _open_zipfile_writer_buffer  # pyright: ignore[reportPrivateUsage]
from torch.torch_version import TorchVersion

from composer_checkpoint import file_io
from composer_checkpoint._pickle_inspection import (
    STORAGE_DTYPES,
    Dtype,
    PickleInspection,
    SparseSpec,
    TensorSpec,
    inspect_pickle,
    read_legacy_pt,
    safe_unpickle,
)
from composer_checkpoint._tree import Names, decode, encode, map_tree, named_leaves, noted_in, notes_of
from composer_checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsafeCheckpointError,
    first_few,
)
from composer_checkpoint.formats._zip import Readable, ZipLayout, read_zip_layout
from composer_checkpoint.formats.archives import final_name, format_of, plain_file
from composer_checkpoint.formats.tensor_source import (
    Bytes,
    SparseParts,
    StoredTensor,
    TensorSource,
    as_stored,
    in_file,
    refuse_quantized,
    sparse_stored,
)
from composer_checkpoint.manifest import (
    EMPTY_SEAL,
    MANIFEST_NAME,
    PAYLOAD_FOLDER,
    FileEntry,
    Manifest,
    TensorEntry,
    read_sealed,
    seal,
)

log = getLogger(__name__)
_MAX_NAME_CHARS = 500


@dataclass(frozen=True, slots=True)
class PtContents:
    """Contents of a `.pt` file without the tensors' elements."""

    layout: ZipLayout
    manifest: Manifest | None
    rehearsal: PickleInspection


def save_pt(obj: Any, path: str, info: Mapping[str, Any], hash_name: str, *, allow_untrusted: bool = False) -> Manifest:
    """Write a `.pt` file with its manifest. Refuse objects other than data, or log them if `allow_untrusted`."""
    unknown: list[Any] = []
    plain, kinds = encode(obj, unknown)
    if unknown:  # further walks, for errors that name where the objects are
        refuse_what_is_elsewhere(dict(named_leaves(obj, torch.Tensor)))
        if not allow_untrusted:
            refuse_unsafe_objects(plain, path)
    with file_io.HashingFile(path, hash_name) as file:
        torch.save(plain, cast("IO[bytes]", file))
        file.raise_failure()  # torch may return normally after a failed write
        manifest, rehearsal = _append_manifest(file, path, {**info, **notes_of(kinds)}, hash_name)
    if rehearsal.unknown_globals:
        held = f"objects of {first_few(sorted(rehearsal.unknown_globals))}"
        if not allow_untrusted:
            os.unlink(path)  # so that it cannot be mistaken for a checkpoint
            raise unsafe_objects(path, held)
        log.warning("%s holds %s, which are more than data: it can be loaded with trusted=True only.", path, held)
    return manifest


def load_pt(
    reader: file_io.FileReader, *, map_location: Any, mmap: bool, verify: bool, trusted: bool = False
) -> tuple[Any, Manifest | None, Collection[str]]:
    """Check and load a `.pt` file; return its content, its manifest if any, and the weights known to be finite.

    A trusted file is also checked for damage.
    """
    contents = open_pt(reader, record_unknown=trusted)
    finite: Collection[str] = ()
    if verify:
        # Mapped if the tensors will be mapped as well, so that both use the page cache and nothing is copied.
        finite = _verify_payload(reader, contents, file_io.MappedFile(reader) if mmap else None)
    obj = load_checked(reader.own_path, map_location=map_location, mmap=mmap, trusted=trusted)
    return decode(obj, *noted_in(contents.manifest)), contents.manifest, finite


def verify_pt(reader: file_io.FileReader) -> Manifest | None:
    """Compare every byte of a `.pt` file with its hashes; return the manifest, or `None` if it has none."""
    contents = open_pt(reader)
    _verify_payload(reader, contents)
    return contents.manifest


def open_pt(reader: Readable, *, record_unknown: bool = False, drop_attributes: bool = False) -> PtContents:
    """Read and check everything but the tensors' elements."""
    layout = read_zip_layout(reader)
    manifest = read_sealed(reader, layout)
    if "constants.pkl" in layout.members:
        raise UnsafeCheckpointError(
            "the file is a TorchScript program, whose code would run. Load it with torch.jit.load if you trust it."
        )
    pickled = layout.members.get("data.pkl")
    if pickled is None:
        raise CorruptCheckpointError(
            f"the file is a zip, but not one of torch.save's: it lacks data.pkl and has "
            f"{sorted(layout.members)[:_MAX_NAMES]}. Load another checkpoint."
        )
    data = reader.read(pickled.offset, pickled.size_bytes)
    rehearsal = inspect_pickle(data, record_unknown=record_unknown, drop_attributes=drop_attributes)
    for key, storage in rehearsal.storages.items():
        member = layout.members.get(f"{PAYLOAD_FOLDER}{key}")
        found = "none" if member is None else member.size_bytes
        if found != storage.size_bytes:
            raise CorruptCheckpointError(
                f"{_tensors_of(rehearsal, key)} needs {storage.size_bytes} bytes of {storage.dtype.name}, and the file "
                f"has {found} for it. Load another checkpoint."
            )
    return PtContents(layout, manifest, rehearsal)


def _verify_payload(
    reader: file_io.FileReader, contents: PtContents, mapped: file_io.MappedFile | None = None
) -> Collection[str]:
    """Compare all storages with their hashes; return the names of the weights that were seen to be finite."""
    manifest, layout = contents.manifest, contents.layout
    if manifest is None:
        return ()
    storages = {name: member for name, member in layout.members.items() if name.startswith(PAYLOAD_FOLDER)}
    if storages.keys() != manifest.files.keys():
        raise CorruptCheckpointError("the manifest lists other storages than the file has. Load another checkpoint.")
    specs = contents.rehearsal.tensors
    return file_io.verify_ranges(
        reader,
        {name: (member.offset, member.size_bytes) for name, member in storages.items()},
        {name: entry.hash for name, entry in manifest.files.items()},
        manifest.hash_name,
        {
            name: (f"{PAYLOAD_FOLDER}{specs[name].storage.key}", specs[name].dtype.name)
            for name in file_io.weight_names(specs)
        },
        mapped,
        lambda name: _tensors_of(contents.rehearsal, name.removeprefix(PAYLOAD_FOLDER)),
    )


def _tensors_of(rehearsal: PickleInspection, key: str) -> str:
    names = (f"{name:.{_MAX_NAME_CHARS}}" for name, tensor in rehearsal.tensors.items() if tensor.storage.key == key)
    return " and ".join(islice(names, _MAX_NAMES)) or f"storage {key}"


def load_checked(path: str, *, map_location: Any, mmap: bool, trusted: bool = False) -> Any:
    """Load a file that was checked before; unless it is trusted, with torch's weights-only loader as a second check."""
    if trusted:
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=False)
    try:
        with _safe_globals():
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"torch refuses the file: {str(error).partition(chr(10))[0]:.300}. If you trust who wrote it, load it with "
            f"trusted=True and save it again."
        ) from error
    # These are not faults of the file: the disk, the memory, or a warning that the user made an error.
    except (OSError, MemoryError, torch.OutOfMemoryError, Warning):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and str(map_location) != "cpu":
            raise  # an error of the device, such as CUDA's
        raise CorruptCheckpointError(
            f"torch cannot load the file: {type(error).__name__}: {error!s:.300}. Load another checkpoint."
        ) from error


_globals_lock = threading.Lock()


@contextmanager
def _safe_globals() -> Iterator[None]:
    """Extend torch's allowlist during one load, without removing the user's entries.

    The allowlist is global to the process, so loads of several threads run one after another.
    """
    with _globals_lock:
        known = set(torch.serialization.get_safe_globals())
        missing = [item for item in _data_globals() if item not in known]
        with torch.serialization.safe_globals(missing):
            yield


def _data_globals() -> list[Any]:
    """Return the types in files of Composer 0.10 to 0.32 that torch's own allowlist lacks; all of them are data."""
    reconstruct: Any = np.empty(0).__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    dtypes = [value for value in vars(np.dtypes).values() if isinstance(value, type)]
    # NumPy 2 moved `numpy.core` to `numpy._core`; files of both versions must load.
    aliases = [
        (function, f"numpy.{module}.multiarray.{function.__name__}")
        for function in (reconstruct, scalar)
        for module in ("core", "_core")
    ]
    plain = [timedelta, frozenset, slice, bytes]
    return [*plain, np.ndarray, np.dtype, *dtypes, *aliases, TorchVersion]


_MAX_NAMES = 10
_PLAIN = frozenset([type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter])


def refuse_unsafe_objects(obj: Any, path: str) -> None:
    """Raise if a checkpoint has anything other than data, and name where it is."""
    found = [
        f"{name or 'the object'} ({told})"
        for name, leaf in named_leaves(obj)
        if type(leaf) not in _PLAIN and not isinstance(leaf, torch.Tensor) and (told := _fault_of(leaf)) is not None
    ]
    if found:
        raise unsafe_objects(path, first_few(found))


def refuse_what_is_elsewhere(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if a tensor has its elements, or some of them, outside the memory of this process."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # slow to import, and loaded if there is any DTensor
    parts = [name for name, leaf in tensors.items() if module is not None and isinstance(leaf, module.DTensor)]
    if parts:
        raise TypeError(
            f"{len(parts)} tensors are DTensors ({first_few(parts)}), of which this rank has a part, and "
            f"one file holds whole tensors. Save them with save_sharded(), or gather them on all ranks before, as "
            f"get_model_state_dict() and state_dict_type='full' do."
        )
    if empty := [name for name, leaf in tensors.items() if leaf.is_meta]:
        raise TypeError(
            f"{len(empty)} tensors are on the meta device ({first_few(empty)}), where they have no "
            f"elements to save. Give the model memory and weights first, as to_empty() and load_state_dict() do."
        )


def unsafe_objects(path: str, held: str) -> UnsafeCheckpointError:
    """Return the error for a file that would hold more than data."""
    return UnsafeCheckpointError(
        f"{final_name(path)} was not saved, since it could not be loaded again: it would hold {held}, which is more "
        f"than data. Have state_dict() return numbers, strings, tensors, lists and dicts, leave the part out "
        f"(save_ignore_keys), or save it with save_file(..., allow_untrusted=True), for loading with trust."
    )


def unknown_globals_of(saved: bytes) -> set[str]:
    """Return the names of globals, beyond data, that the bytes written by `torch.save` refer to."""
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return inspect_pickle(archive.read(pickled), record_unknown=True).unknown_globals


def _fault_of(leaf: Any) -> str | None:
    buffer = io.BytesIO()
    try:
        torch.save(leaf, buffer)
        unknown = unknown_globals_of(buffer.getvalue())
    except CheckpointError as error:
        return f"a {type(leaf).__qualname__}: {error}"
    except Exception as error:  # a user's __reduce__ or __getstate__ may raise anything
        return f"a {type(leaf).__qualname__}, which cannot be pickled: {error!s:.100}"
    return ", ".join(sorted(unknown)) or None


def _append_manifest(
    file: file_io.HashingFile, path: str, info: Mapping[str, Any], hash_name: str
) -> tuple[Manifest, PickleInspection]:
    """Append manifest and seal to a finished archive, and flush it to the disk."""
    with file_io.FileReader(path) as reader:
        # Offsets, and thus hashes of members, are known only from the finished archive.
        layout = read_zip_layout(reader)
        pickled = layout.members["data.pkl"]
        inspection = inspect_pickle(reader.read(pickled.offset, pickled.size_bytes), record_unknown=True)
        manifest = _make_manifest(layout, inspection, reader, file.hashes, hash_name, info)
    with zipfile.ZipFile(file.raw, "a") as archive:
        # Dated 1980, so that equal states make equal files.
        archive.writestr(zipfile.ZipInfo(f"{layout.folder}/{MANIFEST_NAME}"), manifest.to_json())
        archive.comment = EMPTY_SEAL
    # The seal covers the directory, which the manifest's member has just changed, so it is written last.
    with file_io.FileReader(path) as reader:
        file.finish(seal(reader, replace(layout, comment=EMPTY_SEAL)))
    return manifest, inspection


def _make_manifest(
    layout: ZipLayout,
    inspection: PickleInspection,
    reader: file_io.FileReader,
    written: Mapping[tuple[int, int], str],
    hash_name: str,
    info: Mapping[str, Any],
) -> Manifest:
    """Return the manifest of a file, with the hashes of ranges that were taken while it was written."""
    storages = {name: member for name, member in layout.members.items() if name.startswith(PAYLOAD_FOLDER)}
    files = {name: (member.offset, member.size_bytes) for name, member in storages.items()}
    # A tensor in one contiguous range has the hash of its bytes; others are gathered into row-major order first.
    whole: dict[str, tuple[int, int]] = {}
    hashes: dict[str, str] = {}
    for name, spec in inspection.tensors.items():
        member = storages[f"{PAYLOAD_FOLDER}{spec.storage.key}"]
        if spec.byte_range is not None:
            start, end = spec.byte_range
            whole[name] = member.offset + start, end - start
        else:
            buffer = bytearray(reader.read(member.offset, member.size_bytes))
            elements = torch.frombuffer(buffer, dtype=getattr(torch, spec.dtype.name))
            hashes[name] = file_io.hash_tensor(elements.as_strided(spec.shape, spec.stride, spec.offset), hash_name)
    missing = [part for part in {*files.values(), *whole.values()} if part not in written]
    known = {**written, **dict(zip(missing, file_io.hash_ranges(reader, missing, hash_name), strict=True))}
    hashes |= {name: known[part] for name, part in whole.items()}
    tensors = {
        name: TensorEntry(spec.dtype.name, spec.shape, spec.size_bytes, hashes[name])
        for name, spec in inspection.tensors.items()
    }
    entries = {name: FileEntry(part[1], known[part]) for name, part in files.items()}
    return Manifest(hash_name=hash_name, tensors=tensors, files=entries, info=info)


def open_pt_source(path: str, *, record_unknown: bool = False, drop_attributes: bool = False) -> TensorSource:
    """Open a file of any version of `torch.save`, or a plain pickle of arrays. It may be a tar archive or compressed.

    With `record_unknown`, a file with more than data is opened too, with inert objects in place of the unknown ones,
    which `unsafe_globals` lists. With `drop_attributes`, tensors with Python attributes are read, without these.
    """
    with ExitStack() as opened:  # an archive is unpacked once, and its content deleted when the source is closed
        reader = opened.enter_context(file_io.FileReader(opened.enter_context(plain_file(path))))
        manifest: Manifest | None = None
        match kind := format_of(reader):
            case "pt":
                contents = open_pt(reader, record_unknown=record_unknown, drop_attributes=drop_attributes)
                tree, manifest, inspection = read_tree(reader, contents), contents.manifest, contents.rehearsal
            case "legacy pt":
                inspection = read_legacy_pt(reader, record_unknown=record_unknown)
                offsets = inspection.offsets
                tree = _plain(inspection.tree, lambda _, spec: _stored(reader, offsets[spec.storage.key], spec))
            case _:
                data = reader.read(0, reader.size_bytes)  # all of it, since its arrays are inside the pickle
                inspection = inspect_pickle(data, record_unknown=True) if record_unknown else PickleInspection()
                tree = None if inspection.unknown_globals else safe_unpickle(data)
                tree = map_tree(tree, lambda _, leaf: as_stored(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        unknown = tuple(sorted(inspection.unknown_globals))
        return TensorSource(kind, tree, os.path.getsize(path), manifest, unknown).on_close(opened.pop_all())


def read_tree(file: Bytes, contents: PtContents) -> Any:
    """Return the content of an archive, with a `StoredTensor` in place of each tensor."""
    members, order = contents.layout.members, contents.layout.members.get("byteorder")
    written = sys.byteorder.encode() if order is None else file.read(order.offset, order.size_bytes)
    if written != sys.byteorder.encode():
        raise IncompatibleCheckpointError(
            f"the file was written on a machine with {written.decode(errors='replace')!r:.20}-endian numbers, and this "
            f"one has {sys.byteorder}. Load it with torch.load and save it again."
        )
    kinds, names = noted_in(contents.manifest)

    def stored(name: str, spec: TensorSpec) -> Any:
        tensor = _stored(file, members[f"{PAYLOAD_FOLDER}{spec.storage.key}"].offset, spec)
        return tensor.read() if kinds.get(name) == "ndarray" else tensor  # arrays are small, and converted back below

    return decode(_plain(contents.rehearsal.tree, stored, names()), kinds, names)


def _stored(file: Bytes, offset: int, spec: TensorSpec) -> StoredTensor:
    dtype = getattr(torch, spec.dtype.name)
    # With the path, since storages are numbered from 0 in every file, and per-rank files are merged.
    key = (file.path, spec.storage.key, spec.offset, spec.stride, spec.is_conj, spec.is_neg)
    if spec.dtype.name.startswith("q"):

        def cannot_read(*_: int) -> torch.Tensor:
            raise IncompatibleCheckpointError(
                f"a tensor is {spec.dtype.name}, and quantized tensors cannot be read singly. Load the file with "
                f"load_file() and dequantize it."
            )

        return StoredTensor(dtype, spec.shape, cannot_read, key, cannot_read)
    if (contiguous := spec.byte_range) is not None:
        stored = in_file(file, offset + contiguous[0], dtype, spec.shape, key)
    else:
        # Not contiguous: read the range that the strides span, and gather from it.
        last = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
        around = in_file(file, offset + spec.offset * spec.dtype.item_bytes, dtype, (last + 1,), key)
        stored = StoredTensor(
            dtype, spec.shape, lambda: around.read().as_strided(spec.shape, spec.stride).contiguous(), key
        )

    def resolved(elements: torch.Tensor) -> torch.Tensor:
        conjugated = elements.conj_physical() if spec.is_conj else elements
        return -conjugated if spec.is_neg else conjugated

    if spec.is_conj or spec.is_neg:  # lazily, when it was saved
        plain = stored
        return StoredTensor(
            dtype, spec.shape, lambda: resolved(plain.read()), key, lambda *place: resolved(plain.read_range(*place))
        )
    return stored


def _plain(tree: Any, stored: Callable[[str, TensorSpec], Any], names: Names | None = None) -> Any:
    """Return the tree with real objects in place of the descriptions that the inspection made."""

    def change(name: str, value: Any) -> Any:
        match value:
            case TensorSpec():
                return stored(name, value)
            case SparseSpec():
                parts = {part: stored("", spec) for part, spec in value.parts.items()}
                layout = getattr(torch, value.layout)
                return sparse_stored(value.shape, SparseParts(layout, parts, value.is_coalesced))
            case Dtype():
                return getattr(torch, value.name)
            case _:
                return value

    return map_tree(tree, change, shared=True, names=names)


def tensors_to_write(tree: Any, path: str | os.PathLike[str], called: str = "a .pt file") -> dict[str, StoredTensor]:
    """Return the tensors of a tree by name, and raise if it has quantized ones, or anything other than data."""
    tensors: dict[str, StoredTensor] = {}
    for name, leaf in named_leaves(tree):
        if isinstance(leaf, StoredTensor | torch.Tensor):
            tensors[name] = as_stored(leaf) if isinstance(leaf, torch.Tensor) else leaf
    refuse_quantized(tensors, called)
    # Tensors are known to be data, so they are left out of the search for other objects.
    plain, _ = encode(map_tree(tree, lambda _, value: None if isinstance(value, StoredTensor) else value))
    refuse_unsafe_objects(plain, os.fspath(path))
    return tensors


# Classes that name a storage's dtype in a pickle. Newer dtypes have none, and are named next to untyped bytes.
_STORAGES: Mapping[torch.dtype, type] = {
    dtype: getattr(torch, kind) for kind, dtype in STORAGE_DTYPES.items() if not kind.startswith("Q")
}


def stream_pt(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    info: Mapping[str, Any] | None = None,
    hash_name: str = file_io.HASH_NAME,
    progress: Callable[[int], object] | None = None,
) -> Manifest:
    """Write a tree to one file for `torch.load` and `load_file`, reading each tensor only when it is written.

    The file has a manifest and a seal, like those of `save_file`. Tensors that are one storage are written once, and
    stay one. The file is written in place, as by `save_file`.

    Args:
        tree: Dicts, lists and tuples of `StoredTensor`s, tensors, numbers, strings and `None`.
        path: Path of the file.
        info: Further entries of the manifest.
        hash_name: As for `save_file`.
        progress: Called with the number of bytes after each tensor.

    Returns:
        The manifest.

    Raises:
        IncompatibleCheckpointError: If a tensor is quantized.
        UnsafeCheckpointError: If the tree has anything other than data.

    Example:
        >>> import tempfile
        >>> from composer_checkpoint.tensors import as_stored
        >>> path = tempfile.mkdtemp() + "/ep1.pt"
        >>> manifest = stream_pt({"state": {"model": {"w": as_stored(torch.ones(2))}}}, path)
        >>> torch.load(path, weights_only=True)["state"]["model"]["w"]
        tensor([1., 1.])
    """
    tensors_to_write(tree, path)
    plain, kinds = encode(tree)
    notes = {"torch_version": str(torch.__version__), **(info or {}), **notes_of(kinds)}
    pickler = _Pickler(buffer := io.BytesIO())
    try:
        pickler.dump(plain)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise unsafe_objects("the file", f"what cannot be saved ({error!s:.200})") from error
    pickled = buffer.getvalue()
    rehearsal = inspect_pickle(pickled, record_unknown=True)
    if rehearsal.unknown_globals:
        raise unsafe_objects(os.fspath(path), f"objects of {first_few(sorted(rehearsal.unknown_globals))}")
    with file_io.HashingFile(os.fspath(path), hash_name) as file:
        # The writer behind `torch.save`, which itself would need all tensors in memory.
        with _open_zipfile_writer_buffer(cast("IO[bytes]", file)) as archive:
            writer = cast("Any", archive)
            writer.write_record("data.pkl", pickled, len(pickled))
            writer.write_record("byteorder", sys.byteorder, len(sys.byteorder))
            for key, tensor in pickler.storages.items():
                data = file_io.tensor_bytes(tensor.read())
                # frombuffer() refuses empty buffers.
                elements = torch.frombuffer(data, dtype=torch.uint8) if data.nbytes else torch.empty(0)
                writer.write_record(f"{PAYLOAD_FOLDER}{key}", elements.untyped_storage(), tensor.size_bytes)
                if progress is not None:
                    progress(tensor.size_bytes)
        file.raise_failure()
        return _append_manifest(file, os.fspath(path), notes, hash_name)[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """Placeholder in a pickle for the bytes of a tensor."""

    key: str
    kind: type
    numel: int


class _Pickler(pickle.Pickler):
    """Pickler that writes descriptions of tensors as `torch.save` writes tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)  # as torch.save
        self.storages: dict[str, StoredTensor] = {}
        self._known: dict[Hashable, _Storage] = {}

    def persistent_id(self, obj: Any, /) -> Any:
        return ("storage", obj.kind, obj.key, "cpu", obj.numel) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any, /) -> Any:
        if isinstance(obj, torch.Tensor):
            obj = as_stored(obj)
        if not isinstance(obj, StoredTensor):
            return NotImplemented
        if obj.sparse is not None:
            coalesced = (obj.sparse.is_coalesced,) if obj.sparse.layout == torch.sparse_coo else ()
            data = (*obj.sparse.parts.values(), torch.Size(obj.shape), *coalesced)
            return _rebuild_sparse_tensor, (obj.sparse.layout, data)
        # Contiguous strides, without allocating memory.
        stride = tuple(torch.empty(obj.shape, device="meta").stride())
        place = (self._storage(obj), 0, obj.shape, stride, False, OrderedDict())
        if obj.dtype in _STORAGES:
            return _rebuild_tensor_v2, place
        return _rebuild_tensor_v3, (*place, obj.dtype)

    def _storage(self, tensor: StoredTensor) -> _Storage:
        # Names of one tensor share a storage. Empty tensors may have equal keys without being one tensor.
        own = tensor if tensor.storage is None or not tensor.numel else (tensor.storage, tensor.dtype, tensor.shape)
        if own not in self._known:
            key = str(len(self.storages))
            kind = _STORAGES.get(tensor.dtype)
            numel = tensor.numel if kind is not None else tensor.size_bytes  # an untyped storage counts bytes
            self._known[own] = _Storage(key, cast("type", kind or torch.UntypedStorage), numel)
            self.storages[key] = tensor
        return self._known[own]

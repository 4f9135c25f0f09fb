"""`.pt` files: archives of `torch.save` with a manifest and a seal, checked before `torch.load` reads them."""

import io
import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from logging import getLogger
from typing import IO, Any, cast

import numpy as np
import torch
from torch.torch_version import TorchVersion

from composer_checkpoint._finite import PassingWeights, weight_names
from composer_checkpoint._pickle_inspection import PickleInspection, inspect_pickle
from composer_checkpoint._tree import decode, encode, named_leaves, noted_in, notes_of
from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from composer_checkpoint.file_io import FileReader, HashingFile, MappedFile, hash_ranges, hash_tensor
from composer_checkpoint.formats._zip import ZipLayout, read_zip_layout
from composer_checkpoint.formats.archives import final_name
from composer_checkpoint.manifest import (
    EMPTY_SEAL,
    MANIFEST_NAME,
    PAYLOAD_FOLDER,
    FileEntry,
    Manifest,
    TensorEntry,
    check_seal,
    seal,
)

__all__ = ["PtContents", "load_checked", "load_pt", "open_pt", "save_pt", "verify_pt"]

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
    manifest, rehearsal = write_pt(plain, path, {**info, **notes_of(kinds)}, hash_name)
    if rehearsal.unknown_globals:
        held = f"objects of {', '.join(sorted(rehearsal.unknown_globals)[:_MAX_NAMES])}"
        if not allow_untrusted:
            os.unlink(path)  # so that it cannot be mistaken for a checkpoint
            raise unsafe_objects(path, held)
        log.warning("%s holds %s, which are more than data: it can be loaded with trusted=True only.", path, held)
    return manifest


def load_pt(
    reader: FileReader, *, map_location: Any, mmap: bool, verify: bool, trusted: bool = False
) -> tuple[Any, Manifest | None, Collection[str]]:
    """Check and load a `.pt` file; return its content, its manifest if any, and the weights known to be finite.

    A trusted file is also checked for damage.
    """
    contents = open_pt(reader, record_unknown=trusted)
    finite: Collection[str] = ()
    if verify:
        # Mapped if the tensors will be mapped as well, so that both use the page cache and nothing is copied.
        finite = _verify_payload(reader, contents, MappedFile(reader) if mmap else None)
    obj = load_checked(reader.own_path, map_location=map_location, mmap=mmap, trusted=trusted)
    return decode(obj, *noted_in(contents.manifest)), contents.manifest, finite


def verify_pt(reader: FileReader) -> Manifest | None:
    """Compare every byte of a `.pt` file with its hashes; return the manifest, or `None` if it has none."""
    contents = open_pt(reader)
    _verify_payload(reader, contents)
    return contents.manifest


def open_pt(reader: FileReader, *, record_unknown: bool = False) -> PtContents:
    """Read and check everything but the tensors' elements."""
    layout = read_zip_layout(reader)
    manifest = check_seal(reader, layout)
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
    rehearsal = inspect_pickle(reader.read(pickled.offset, pickled.size_bytes), record_unknown=record_unknown)
    for key, storage in rehearsal.storages.items():
        member = layout.members.get(f"{PAYLOAD_FOLDER}{key}")
        found = "none" if member is None else member.size_bytes
        if found != storage.size_bytes:
            raise CorruptCheckpointError(
                f"{_tensors_of(rehearsal, key)} needs {storage.size_bytes} bytes of {storage.dtype.name}, and the file "
                f"has {found} for it. Load another checkpoint."
            )
    return PtContents(layout, manifest, rehearsal)


def _verify_payload(reader: FileReader, contents: PtContents, mapped: MappedFile | None = None) -> Collection[str]:
    """Compare all storages with their hashes; return the names of the weights that were seen to be finite."""
    manifest, layout = contents.manifest, contents.layout
    if manifest is None:
        return ()
    storages = {name: member for name, member in layout.members.items() if name.startswith(PAYLOAD_FOLDER)}
    if storages.keys() != manifest.files.keys():
        raise CorruptCheckpointError("the manifest lists other storages than the file has. Load another checkpoint.")
    ranges = [(member.offset, member.size_bytes) for member in storages.values()]
    passing = _passing_weights(contents.rehearsal, list(storages))
    hashes = hash_ranges(reader, ranges, manifest.hash_name, mapped=mapped, look=passing.look)
    wrong = [name for name, found in zip(storages, hashes, strict=True) if found != manifest.files[name].hash]
    if wrong:
        names = ", ".join(
            _tensors_of(contents.rehearsal, name.removeprefix(PAYLOAD_FOLDER)) for name in wrong[:_MAX_NAMES]
        )
        raise CorruptCheckpointError(
            f"the bytes of {names} are not those that were written ({len(wrong)} of {len(storages)} hashes differ; the "
            f"first is at byte {storages[wrong[0]].offset}). Load another checkpoint."
        )
    return passing.finite()


def _passing_weights(rehearsal: PickleInspection, storages: Sequence[str]) -> PassingWeights:
    indices = {name: index for index, name in enumerate(storages)}
    weights = {name: rehearsal.tensors[name] for name in weight_names(rehearsal.tensors)}
    return PassingWeights(
        {name: (indices[f"{PAYLOAD_FOLDER}{spec.storage.key}"], spec.dtype.name) for name, spec in weights.items()}
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
        raise unsafe_objects(path, ", ".join(found[:_MAX_NAMES]))


def refuse_what_is_elsewhere(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if a tensor has its elements, or some of them, outside the memory of this process."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # slow to import, and loaded if there is any DTensor
    parts = [name for name, leaf in tensors.items() if module is not None and isinstance(leaf, module.DTensor)]
    if parts:
        raise TypeError(
            f"{len(parts)} tensors are DTensors ({', '.join(parts[:_MAX_NAMES])}), of which this rank has a part, and "
            f"one file holds whole tensors. Save them with save_sharded(), or gather them on all ranks before, as "
            f"get_model_state_dict() and state_dict_type='full' do."
        )
    if empty := [name for name, leaf in tensors.items() if leaf.is_meta]:
        raise TypeError(
            f"{len(empty)} tensors are on the meta device ({', '.join(empty[:_MAX_NAMES])}), where they have no "
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


def write_pt(obj: Any, path: str, info: Mapping[str, Any], hash_name: str) -> tuple[Manifest, PickleInspection]:
    """Write the archive of `torch.save` with manifest and seal, and flush it to the disk."""
    with HashingFile(path, hash_name) as file:
        torch.save(obj, cast("IO[bytes]", file))
        file.raise_failure()  # torch may return normally after a failed write
        return append_manifest(file, path, info, hash_name)


def append_manifest(
    file: HashingFile, path: str, info: Mapping[str, Any], hash_name: str
) -> tuple[Manifest, PickleInspection]:
    """Append manifest and seal to a finished archive, and flush it to the disk."""
    with FileReader(path) as reader:
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
    with FileReader(path) as reader:
        file.finish(seal(reader, replace(layout, comment=EMPTY_SEAL)))
    return manifest, inspection


def _make_manifest(
    layout: ZipLayout,
    inspection: PickleInspection,
    reader: FileReader,
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
            hashes[name] = hash_tensor(elements.as_strided(spec.shape, spec.stride, spec.offset), hash_name)
    missing = [part for part in {*files.values(), *whole.values()} if part not in written]
    known = {**written, **dict(zip(missing, hash_ranges(reader, missing, hash_name), strict=True))}
    hashes |= {name: known[part] for name, part in whole.items()}
    tensors = {
        name: TensorEntry(spec.dtype.name, spec.shape, spec.size_bytes, hashes[name])
        for name, spec in inspection.tensors.items()
    }
    entries = {name: FileEntry(part[1], known[part]) for name, part in files.items()}
    return Manifest(hash_name=hash_name, tensors=tensors, files=entries, info=info)

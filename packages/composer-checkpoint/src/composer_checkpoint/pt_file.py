"""The `.pt` file: `torch.save`'s archive with a manifest and a seal, read by `torch.load` after it was checked."""

import os
import pickle
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from logging import getLogger
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from composer_checkpoint._damaged_headers import naming_tensors
from composer_checkpoint._encoding import decode, encode, noted_in, notes_of
from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._finite import PassingWeights, weight_names
from composer_checkpoint._mapped_file import MappedFile
from composer_checkpoint._more_than_data import more_than_data, refuse_more_than_data
from composer_checkpoint._payload_hashing import hash_ranges
from composer_checkpoint._pt_seal import PAYLOAD_FOLDER, check_seal
from composer_checkpoint._pt_writing import write_pt
from composer_checkpoint._rehearsal import Rehearsal, rehearse
from composer_checkpoint._zip_layout import ZipLayout, read_zip_layout
from composer_checkpoint.errors import CorruptCheckpointError, UnsafeCheckpointError
from composer_checkpoint.manifest import Manifest

__all__ = ["PtContents", "load_checked", "load_pt", "open_pt", "save_pt", "verify_pt"]

log = getLogger(__name__)

_MAX_NAMES = 10
_MAX_NAME_CHARS = 500


@dataclass(frozen=True, slots=True)
class PtContents:
    """What a `.pt` file holds, without its tensors' elements."""

    layout: ZipLayout
    manifest: Manifest | None
    rehearsal: Rehearsal


def save_pt(obj: Any, path: str, info: Mapping[str, Any], hash_name: str, *, allow_untrusted: bool = False) -> Manifest:
    """Write a `.pt` file with its manifest. What could not be loaded without trust is refused, or else logged."""
    plain, kinds = encode(obj)
    if not allow_untrusted:
        refuse_more_than_data(plain, path)
    manifest, rehearsal = write_pt(plain, path, {**info, **notes_of(kinds)}, hash_name)
    if rehearsal.unknown_globals:
        held = f"objects of {', '.join(sorted(rehearsal.unknown_globals)[:_MAX_NAMES])}"
        if not allow_untrusted:
            os.unlink(path)  # nobody shall take it for a checkpoint
            raise more_than_data(path, held)
        log.warning("%s holds %s, which are more than data: it can be loaded with trusted=True only.", path, held)
    return manifest


def load_pt(
    reader: FileReader, *, map_location: Any, mmap: bool, verify: bool, trusted: bool = False
) -> tuple[Any, Manifest | None, Collection[str]]:
    """Check and load a `.pt` file; return what it holds, its manifest if it has one, and weights seen to be finite.

    One that is trusted must be whole all the same.
    """
    contents = open_pt(reader, record_unknown=trusted)
    finite: Collection[str] = ()
    if verify:
        finite = _verify_payload(reader, contents, MappedFile(reader) if mmap else None)  # as the tensors will be
    obj = load_checked(reader.own_path, map_location=map_location, mmap=mmap, trusted=trusted)
    return decode(obj, *noted_in(contents.manifest)), contents.manifest, finite


def verify_pt(reader: FileReader) -> Manifest | None:
    """Compare every byte of a `.pt` file with its hashes; return the manifest, or `None` if it has none."""
    contents = open_pt(reader)
    _verify_payload(reader, contents)
    return contents.manifest


def open_pt(reader: FileReader, *, record_unknown: bool = False) -> PtContents:
    """Read and check everything except the tensors' elements.

    Raises:
        CorruptCheckpointError: If the file is not whole, or declares tensors that it has no bytes for.
        UnsafeCheckpointError: If its pickle asks for what checkpoints do not need.
    """
    with naming_tensors(reader):
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
    rehearsal = rehearse(reader.read(pickled.offset, pickled.size_bytes), record_unknown=record_unknown)
    _check_storages(layout, rehearsal)
    return PtContents(layout, manifest, rehearsal)


def _check_storages(layout: ZipLayout, rehearsal: Rehearsal) -> None:
    for key, storage in rehearsal.storages.items():
        member = layout.members.get(f"{PAYLOAD_FOLDER}{key}")
        found = None if member is None else member.size_bytes
        if found != storage.size_bytes:
            names = _tensors_of(rehearsal, key)
            raise CorruptCheckpointError(
                f"{names} needs {storage.size_bytes} bytes of {storage.dtype.name}, and the file has "
                f"{'none' if found is None else found} for it. Load another checkpoint."
            )


def _verify_payload(reader: FileReader, contents: PtContents, mapped: MappedFile | None = None) -> Collection[str]:
    """Compare all storages with their hashes; return the names of the weights that are finite, as far as was seen."""
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


def _passing_weights(rehearsal: Rehearsal, storages: Sequence[str]) -> PassingWeights:
    indices = {name: index for index, name in enumerate(storages)}
    weights = {name: rehearsal.tensors[name] for name in weight_names(rehearsal.tensors)}
    return PassingWeights(
        {name: (indices[f"{PAYLOAD_FOLDER}{spec.storage.key}"], spec.dtype.name) for name, spec in weights.items()}
    )


def _tensors_of(rehearsal: Rehearsal, key: str) -> str:
    names = (f"{name:.{_MAX_NAME_CHARS}}" for name, tensor in rehearsal.tensors.items() if tensor.storage.key == key)
    return " and ".join(islice(names, _MAX_NAMES)) or f"storage {key}"


def load_checked(path: str, *, map_location: Any, mmap: bool, trusted: bool = False) -> Any:
    """Load what was checked before, with torch's own weights-only loader as the second lock unless it is trusted."""
    if trusted:
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=False)
    return _load_with(lambda: torch.load(path, map_location=map_location, mmap=mmap, weights_only=True), map_location)


def _load_with(load: Callable[[], Any], map_location: Any) -> Any:
    try:
        with _safe_globals():
            return load()
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"torch refuses the file: {str(error).partition(chr(10))[0]:.300}. If you trust who wrote it, load it with "
            f"trusted=True and save it again."
        ) from error
    except (OSError, MemoryError, torch.OutOfMemoryError, Warning):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and str(map_location) != "cpu":
            raise  # of the device
        raise CorruptCheckpointError(
            f"torch cannot load the file: {type(error).__name__}: {error!s:.300}. Load another checkpoint."
        ) from error


_globals_lock = threading.Lock()


@contextmanager
def _safe_globals() -> Iterator[None]:
    """Extend torch's list for the time of one load, and leave alone what the user has put on it.

    The list is one for the process, so that loads of several threads go one after the other.
    """
    with _globals_lock:
        known = set(torch.serialization.get_safe_globals())
        missing = [item for item in _data_globals() if item not in known]
        with torch.serialization.safe_globals(missing):
            yield


def _data_globals() -> list[Any]:
    """Return what files of Composer 0.10 to 0.32 hold beyond torch's own list: data, and no more."""
    reconstruct: Any = np.empty(0).__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    dtypes = [value for value in vars(np.dtypes).values() if isinstance(value, type)]
    aliases = [
        (function, f"numpy.{module}.multiarray.{function.__name__}")
        for function in (reconstruct, scalar)
        for module in ("core", "_core")
    ]
    plain = [timedelta, frozenset, slice, bytes]
    return [*plain, np.ndarray, np.dtype, *dtypes, *aliases, TorchVersion]

"""Saving and loading one file, in the format that its name says."""

import os
import pickle
import sys
import tempfile
from collections.abc import Collection, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from composer_checkpoint._file_reader import FileReader
from composer_checkpoint._finite import non_finite_weights
from composer_checkpoint._formats import INDEX_SUFFIX, Format, final_name, format_of, is_packed, plain_file
from composer_checkpoint._legacy_pt import read_legacy_pt
from composer_checkpoint._pickled_arrays import safe_unpickle
from composer_checkpoint._tree import named_leaves
from composer_checkpoint.archives import STATES_NAME, check_compressor, compress, compressor_of, pack_tar
from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError, StorageError
from composer_checkpoint.hashing import HASH_NAME, check_hash_name, hash_file
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.names import is_tar
from composer_checkpoint.pt_file import load_checked, load_pt, open_pt, save_pt, verify_pt
from composer_checkpoint.safetensors_file import (
    load_safetensors,
    read_safetensors,
    save_safetensors,
    verify_safetensors,
)
from composer_checkpoint.validation import validate_file

__all__ = ["load_file", "read_manifest", "safe_torch_load", "save_file", "verify_file"]

log = getLogger(__name__)

_PathLike = str | os.PathLike[str]

_MAX_NAMES = 10


def save_file(
    obj: Any,
    path: _PathLike,
    *,
    info: Mapping[str, Any] | None = None,
    hash_name: str = HASH_NAME,
    allow_untrusted: bool = False,
) -> Manifest:
    """Write a checkpoint to one file, with a manifest inside it, and flush it to the disk.

    The end of the name says the format: `.safetensors` (weights only), `.tar`, `.tar.gz`, `.tgz`, `.tar.bz2`,
    `.tar.lzma`, `.pt.bz2`, `.pt.gz`, `.pt.lz4`, `.pt.lzma`, `.pt.lzo`, `.pt.xz`, `.pt.zst`, and for all other names
    what `torch.save` writes, which `torch.load(path, weights_only=True)` reads. Lengths of time and NumPy arrays are
    numbers and tensors to other readers, and come back as they were from `load_file`.

    The file is written in place: whoever must never see half of one writes it beside and renames it, as
    `composer_checkpoint.write_atomically` does.

    Args:
        obj: What to save; dicts, lists and tuples of tensors, arrays, numbers, strings and `None`.
        path: Where to.
        info: What else the manifest should say, as JSON has it: versions, the run's name, the time in training.
        hash_name: `'xxh3_128'`, which shows damage, or `'blake3'`, about six times slower, which shows forgery too
            where the manifest is kept elsewhere.
        allow_untrusted: Save, with a warning, also what is more than data, and can be loaded with trust only.

    Returns:
        The manifest.

    Raises:
        StorageError: If the disk is full or fails; an `OSError`, too.
        CompressorNotFound: If the program that the name asks for is not installed.
        TypeError: If `.safetensors` is asked for more than weights, `info` has no form in JSON, or a tensor is a
            DTensor, of which other ranks have the rest, or on the meta device, where it has no elements.
        IncompatibleCheckpointError: If two weights for `.safetensors` have keys that become one name.
        ValueError: If there is no such hash.
        UnsafeCheckpointError: If anything is more than data, such as an object of a class of one's own; the message
            says where it is.

    Example:
        >>> path = Path(tempfile.mkdtemp()) / "ep1.pt"
        >>> manifest = save_file({"state": {"model": {"weight": torch.ones(2, 3)}}}, path)
        >>> manifest.tensors["state/model/weight"].shape
        (2, 3)
        >>> load_file(path)["state"]["model"]["weight"].sum()
        tensor(6.)
    """
    refuse_what_is_elsewhere(obj)
    target = os.fspath(path)
    name = final_name(target)
    check_compressor(name)
    check_hash_name(hash_name)
    notes = {"torch_version": str(torch.__version__), **(info or {})}
    try:
        if name.endswith(".safetensors"):
            return save_safetensors(obj, target, notes, hash_name)
        if not is_packed(name):
            return save_pt(obj, target, notes, hash_name, allow_untrusted=allow_untrusted)
        with tempfile.TemporaryDirectory(prefix=".composer-", dir=Path(target).parent) as folder:
            states = Path(folder) / STATES_NAME
            manifest = save_pt(obj, os.fspath(states), notes, hash_name, allow_untrusted=allow_untrusted)
            if is_tar(name):
                pack_tar(states, target, name)
            else:
                compress(states, target, compressor_of(name) or "")
        return manifest
    except CheckpointError:
        raise
    except OSError as error:
        raise StorageError(
            error.errno,
            f"{target!r} could not be written: {error.strerror or error}. What was written of it is no checkpoint",
        ) from error


def load_file(
    path: _PathLike,
    *,
    map_location: Any = "cpu",
    mmap: bool = True,
    verify: bool = True,
    trusted: bool = False,
    require_finite: bool = False,
    max_expanded_bytes: int | None = None,
) -> Any:
    """Load one file that `save_file`, `torch.save`, Composer or safetensors wrote.

    Nothing of the file is run: it may build tensors, arrays, numbers, strings and containers, and is refused before it
    began if it asks for more. A file with a manifest is compared with it; for one without, a warning is logged.

    Args:
        path: The file. A name that ends as `save_file` has it says how it is packed; one that ends in
            `.safetensors.index.json` is an index of several files beside it, as Hugging Face writes it.
        map_location: Where tensors go, as `torch.load` has it.
        mmap: Map tensors into memory, so that they are read when they are needed, rather than copy them. Not for
            files of torch before 1.6.
        verify: Compare every byte with the hashes of the manifest, and look for weights that are NaN or infinite.
        trusted: Let the file run code of its own while it is loaded, and log a warning with its hash. Only the call
            says so, for one file: no setting does for a whole process.
        require_finite: Refuse weights that are NaN or infinite, rather than log a warning with their names.
        max_expanded_bytes: How much a compressed file may become, instead of a hundred times its size.

    Returns:
        What was saved.

    Raises:
        NoCheckpointError: If there is no such file.
        CorruptCheckpointError: If the file is not what was written, was cut short or is of no known format.
        UnsafeCheckpointError: If it asks for more than data; the message names it.
        IncompatibleCheckpointError: If it is of a newer format.
        ValueError: If the function that the variable `CHECKPOINT_VALIDATION_FUNCTION` names refuses it.
    """
    source = os.fspath(path)
    validate_file(source)
    if source.endswith(INDEX_SUFFIX):
        from composer_checkpoint.safetensors_index import load_shards  # it stands on this module

        return load_shards(source, map_location=map_location, verify=verify, require_finite=require_finite)
    # Opened once, so that what is verified is what is loaded, whatever gets this name meanwhile.
    with plain_file(source, max_expanded_bytes) as plain, FileReader(plain) as reader:
        kind = format_of(reader)
        if trusted := trusted and kind != "safetensors":  # which has no code that could be trusted
            digest = hash_file(reader.own_path if plain == source else source, "blake3")
            log.warning("%s is loaded as trusted and may run any code. Its BLAKE3 hash is %s.", source, digest)
        obj, finite = _load(source, reader, kind, map_location=map_location, mmap=mmap, verify=verify, trusted=trusted)
        if verify or require_finite:  # it reads every weight, which verifying does anyway
            _check_finite(obj, finite, source, require_finite)
    return obj


def load_open_weights(
    reader: FileReader, source: str, *, map_location: Any = "cpu", verify: bool = True, require_finite: bool = False
) -> Any:
    """Load a `.safetensors` file that is open already, as `load_file` does.

    Args:
        reader: The file.
        source: What to call it.
        map_location: As in `load_file`.
        verify: As in `load_file`.
        require_finite: As in `load_file`.
    """
    obj, finite = _load(
        source, reader, "safetensors", map_location=map_location, mmap=True, verify=verify, trusted=False
    )
    if verify or require_finite:
        _check_finite(obj, finite, source, require_finite)
    return obj


def safe_torch_load(
    composer_states_filepath: _PathLike,
    map_location: Any = "cpu",
    load_monolith_rank0_only: bool = False,
    *,
    verify: bool = True,
    trusted: bool = False,
) -> Any:
    """Load a checkpoint as `load_file` does, under the name that Composer has for it.

    Args:
        composer_states_filepath: The file.
        map_location: Where tensors go.
        load_monolith_rank0_only: Rank 0 reads the file. The others get all of it except the model and the optimizers,
            which are `None` in their `state`. Every rank must call this then.
        verify: As in `load_file`.
        trusted: As in `load_file`.
    """
    from composer_dist import dist  # here, since one process alone does not need it

    def load() -> Any:
        return load_file(composer_states_filepath, map_location=map_location, verify=verify, trusted=trusted)

    if not load_monolith_rank0_only or dist.get_world_size() == 1:
        return load()
    obj: Any = None
    failure: Exception | None = None
    if dist.get_global_rank() == 0:
        try:
            obj = load()
        except Exception as error:  # whatever it is, the others wait and must hear of it
            failure = error
    rest = [failure, _without_weights(obj)]
    dist.broadcast_object_list(rest, src=0)
    if rest[0] is not None:
        raise rest[0]
    return obj if dist.get_global_rank() == 0 else rest[1]


def read_manifest(path: _PathLike) -> Manifest | None:
    """Return a file's manifest without reading its tensors, or `None` if it has none.

    Raises:
        CorruptCheckpointError: If what describes the tensors is not what was written.
    """
    if os.fspath(path).endswith(INDEX_SUFFIX):
        from composer_checkpoint.safetensors_index import read_index  # it stands on this module

        return read_index(path).manifest
    with plain_file(os.fspath(path)) as plain, FileReader(plain) as reader:
        match format_of(reader):
            case "safetensors":
                return read_safetensors(reader)[1]
            case "pt":
                return open_pt(reader).manifest
            case _:
                return None


def verify_file(path: _PathLike) -> Manifest | None:
    """Compare every byte of a file with the hashes of its manifest.

    Returns:
        The manifest, or `None` for a file that came without one; that is only known to be whole as far as its format
        shows it.

    Raises:
        CorruptCheckpointError: If anything differs; the message names the tensor.
    """
    if os.fspath(path).endswith(INDEX_SUFFIX):
        from composer_checkpoint.safetensors_index import verify_shards  # it stands on this module

        return verify_shards(path)
    with plain_file(os.fspath(path)) as plain, FileReader(plain) as reader:
        match format_of(reader):
            case "safetensors":
                return verify_safetensors(reader)
            case "pt":
                return verify_pt(reader)
            case "legacy pt":
                read_legacy_pt(reader)
            case "pickle":
                safe_unpickle(reader.read(0, reader.size_bytes))
    return None


def _load(
    source: str, reader: FileReader, kind: Format, *, map_location: Any, mmap: bool, verify: bool, trusted: bool
) -> tuple[Any, Collection[str]]:
    """Return what a file holds, and the names of weights that were seen to be finite."""
    manifest: Manifest | None = None
    finite: Collection[str] = ()
    match kind:
        case "safetensors":
            obj, manifest, finite = load_safetensors(reader, map_location=map_location, verify=verify)
        case "pt":
            obj, manifest, finite = load_pt(
                reader, map_location=map_location, mmap=mmap, verify=verify, trusted=trusted
            )
        case "legacy pt":
            read_legacy_pt(reader, record_unknown=trusted)
            obj = load_checked(reader.own_path, map_location=map_location, mmap=False, trusted=trusted)
        case "pickle":
            data = reader.read(0, reader.size_bytes)
            obj = pickle.loads(data) if trusted else safe_unpickle(data)
    if manifest is None:
        log.warning("%s is unverified: it has no manifest, so nobody can tell whether its bytes were changed.", source)
    return obj, finite


def refuse_what_is_elsewhere(obj: Any) -> None:
    """Refuse tensors whose elements are not in this process's memory, or not all of them.

    Raises:
        TypeError: If there is one, with the names.
    """
    tensors = dict(named_leaves(obj, torch.Tensor))
    module: Any = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has loaded it
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


def _check_finite(obj: Any, known_finite: Collection[str], source: str, require_finite: bool) -> None:
    names = non_finite_weights(obj, known_finite)
    if not names:
        return
    message = f"{len(names)} tensors are NaN or infinite: {', '.join(names[:_MAX_NAMES])}"
    if require_finite:
        raise CorruptCheckpointError(f"{message}. Load an earlier checkpoint, or load without require_finite.")
    log.warning("%s: %s", source, message)


def _without_weights(obj: Any) -> Any:
    if not isinstance(obj, dict) or not isinstance(obj.get("state"), dict):
        return obj
    return {**obj, "state": {**obj["state"], "model": None, "optimizers": None}}

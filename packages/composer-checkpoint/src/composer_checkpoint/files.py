"""Saving and loading of single files, in the format that the name implies."""

import os
import pickle
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_checkpoint import file_io
from composer_checkpoint._pickle_inspection import read_legacy_pt, safe_unpickle
from composer_checkpoint._tree import named_leaves
from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import CheckpointError, CorruptCheckpointError, StorageError, first_few
from composer_checkpoint.formats import archives, safetensors
from composer_checkpoint.formats.pt import load_checked, load_pt, open_pt, refuse_what_is_elsewhere, save_pt, verify_pt
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.names import is_tar

log = getLogger(__name__)

_PathLike = str | os.PathLike[str]


def save_file(
    obj: Any,
    path: _PathLike,
    *,
    info: Mapping[str, Any] | None = None,
    hash_name: str = file_io.HASH_NAME,
    allow_untrusted: bool = False,
) -> Manifest:
    """Write a checkpoint to one file, with a manifest inside it, and flush it to the disk.

    The suffix selects the format: `.safetensors` (weights only), `.tar`, `.tar.gz`, `.tgz`, `.tar.bz2`, `.tar.lzma`,
    `.pt.bz2`, `.pt.gz`, `.pt.lz4`, `.pt.lzma`, `.pt.lzo`, `.pt.xz`, `.pt.zst`, and for all other names the format of
    `torch.save`, which `torch.load(path, weights_only=True)` reads. For other readers, time deltas and NumPy arrays are
    numbers and tensors; `load_file` converts them back.

    The file is written in place. To avoid incomplete files, write to a temporary name and rename it, with
    `composer_checkpoint.write_atomically`.

    Args:
        obj: Dicts, lists and tuples of tensors, arrays, numbers, strings and `None`.
        path: Path of the file.
        info: Further entries of the manifest, as JSON values: versions, run name, timestamp.
        hash_name: `'xxh3_128'`, which detects damage, or `'blake3'`, about six times slower, which also detects
            forgery if the manifest is kept elsewhere.
        allow_untrusted: Whether to save objects other than data, with a warning. Loading them needs `trusted=True`.

    Returns:
        The manifest.

    Raises:
        StorageError: If the disk is full or fails; also an `OSError`.
        CompressorNotFound: If the program for the suffix is not installed.
        TypeError: If `.safetensors` is to hold more than weights, `info` cannot be represented in JSON, or a tensor is
            a DTensor, of which this rank has only a part, or on the meta device, where it has no elements.
        IncompatibleCheckpointError: If two weights for `.safetensors` have keys that become the same name.
        ValueError: If the hash is unknown.
        UnsafeCheckpointError: If the object has more than data, such as an instance of a custom class, with its
            location.

    Example:
        >>> path = Path(tempfile.mkdtemp()) / "ep1.pt"
        >>> manifest = save_file({"state": {"model": {"weight": torch.ones(2, 3)}}}, path)
        >>> manifest.tensors["state/model/weight"].shape
        (2, 3)
        >>> load_file(path)["state"]["model"]["weight"].sum()
        tensor(6.)
    """
    # All checks come before the first byte is written.
    target = os.fspath(path)
    name = archives.final_name(target)
    archives.check_compressor(name)
    file_io.new_hasher(hash_name)  # raises if it is unknown
    notes = {"torch_version": str(torch.__version__), **(info or {})}
    try:
        if name.endswith(".safetensors"):
            refuse_what_is_elsewhere(dict(named_leaves(obj, torch.Tensor)))
            return safetensors.save_safetensors(obj, target, notes, hash_name)
        if not archives.is_packed(name):
            return save_pt(obj, target, notes, hash_name, allow_untrusted=allow_untrusted)
        # In the same folder, so that the temporary file is on the disk that was chosen for the checkpoint.
        with tempfile.TemporaryDirectory(prefix=".composer-", dir=Path(target).parent) as folder:
            states = Path(folder) / archives.STATES_NAME
            manifest = save_pt(obj, os.fspath(states), notes, hash_name, allow_untrusted=allow_untrusted)
            if is_tar(name):
                archives.pack_tar(states, target, name)
            else:
                archives.compress(states, target, name)
        return manifest
    except CheckpointError:  # some of these are OSErrors too, and already name the file
        raise
    except OSError as error:
        raise StorageError(
            error.errno,
            f"{target!r} could not be written: {error.strerror or error}. Its incomplete content is not a checkpoint",
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

    Nothing in the file is run: it may have tensors, arrays, numbers, strings and containers, and is refused before
    anything is built if it has more. A file with a manifest is compared with it; without one, a warning is logged.

    Args:
        path: Path of the file. The suffix of an archive is one of `save_file`. A name that ends in
            `.safetensors.index.json` is an index of several files next to it, in Hugging Face's format.
        map_location: Device of the tensors, as for `torch.load`.
        mmap: Whether to map tensors into memory, so that they are read on access, rather than to copy them. Not for
            files of torch before 1.6.
        verify: Whether to compare every byte with the hashes of the manifest, and to search for NaN and infinite
            weights.
        trusted: Whether the file may run code while it is loaded; a warning with its hash is logged. Applies to this
            call only.
        require_finite: Whether to refuse NaN and infinite weights, rather than to log a warning with their names.
        max_expanded_bytes: Size limit of a decompressed file, instead of a hundred times its size.

    Returns:
        The object that was saved.

    Raises:
        NoCheckpointError: If the file does not exist.
        CorruptCheckpointError: If the file differs from what was written, was cut short or has an unknown format.
        UnsafeCheckpointError: If it has more than data, with the name of what it needs.
        IncompatibleCheckpointError: If it is of a newer format.
        ValueError: If the function named by the environment variable `CHECKPOINT_VALIDATION_FUNCTION` refuses it.
    """
    source = os.fspath(path)
    validate_file(source)
    if source.endswith(archives.INDEX_SUFFIX):
        return _load_shards(source, map_location, verify, require_finite)
    # Opened once, so that the file that is verified is the one that is loaded, even if another one replaces it.
    with archives.plain_file(source, max_expanded_bytes) as plain, file_io.FileReader(plain) as reader:
        kind = archives.format_of(reader)
        if trusted := trusted and kind != "safetensors":  # that format has no code to trust
            # The hash of an archive itself, not of its unpacked content, since the archive is what the user has.
            digest = file_io.hash_file(reader.own_path if plain == source else source, "blake3")
            log.warning("%s is loaded as trusted and may run any code. Its BLAKE3 hash is %s.", source, digest)
        return _load(source, reader, kind, map_location, verify, require_finite, mmap, trusted)


def safe_torch_load(
    composer_states_filepath: _PathLike,
    map_location: Any = "cpu",
    load_monolith_rank0_only: bool = False,
    *,
    verify: bool = True,
    trusted: bool = False,
) -> Any:
    """Load a checkpoint with `load_file`, under Composer's name for it.

    Args:
        composer_states_filepath: Path of the file.
        map_location: Device of the tensors.
        load_monolith_rank0_only: Whether rank 0 reads the file, and the other ranks get everything but the model and
            the optimizers, which are `None` in their `state`. Every rank must call this if true.
        verify: As for `load_file`.
        trusted: As for `load_file`.
    """
    from composer_checkpoint._ranks import Ranks  # here, since a single process does not need it

    whole: list[Any] = []

    def load() -> Any:
        whole.append(load_file(composer_states_filepath, map_location=map_location, verify=verify, trusted=trusted))
        obj = whole[0]
        if not isinstance(obj, dict) or not isinstance(obj.get("state"), dict):
            return obj
        # The weights are left out of what is sent to the other ranks, which would pickle them.
        return {**obj, "state": {**obj["state"], "model": None, "optimizers": None}}

    rest = Ranks().from_first(load) if load_monolith_rank0_only else load()
    return whole[0] if whole else rest


def read_manifest(path: _PathLike) -> Manifest | None:
    """Return the manifest of a file without reading its tensors; `None` if it has none.

    Raises:
        CorruptCheckpointError: If the metadata of the tensors differs from what was written.
    """
    if os.fspath(path).endswith(archives.INDEX_SUFFIX):
        return safetensors.read_index(path).manifest
    with archives.plain_file(os.fspath(path)) as plain, file_io.FileReader(plain) as reader:
        match archives.format_of(reader):
            case "safetensors":
                return safetensors.read_safetensors(reader)[1]
            case "pt":
                return open_pt(reader).manifest
            case _:
                return None


def verify_file(path: _PathLike) -> Manifest | None:
    """Compare every byte of a file with the hashes of its manifest.

    Returns:
        The manifest, or `None` for a file without one, of which only the structure was checked.

    Raises:
        CorruptCheckpointError: If anything differs, with the name of the tensor, and of the file if there are several.
    """
    if os.fspath(path).endswith(archives.INDEX_SUFFIX):
        index = safetensors.read_index(path)
        for shard in safetensors.checked_shards(index):
            with safetensors.open_shard(index, shard) as reader:
                safetensors.verify_safetensors(reader)
        return index.manifest
    with archives.plain_file(os.fspath(path)) as plain, file_io.FileReader(plain) as reader:
        match archives.format_of(reader):
            case "safetensors":
                return safetensors.verify_safetensors(reader)
            case "pt":
                return verify_pt(reader)
            case "legacy pt":
                read_legacy_pt(reader)
            case "pickle":
                safe_unpickle(reader.read(0, reader.size_bytes))
    return None


def _load(
    source: str,
    reader: file_io.FileReader,
    kind: archives.Format,
    map_location: Any,
    verify: bool,
    require_finite: bool,
    mmap: bool = True,
    trusted: bool = False,
) -> Any:
    manifest: Manifest | None = None
    finite: Collection[str] = ()
    match kind:
        case "safetensors":
            obj, manifest, finite = safetensors.load_safetensors(reader, map_location=map_location, verify=verify)
        case "pt":
            obj, manifest, finite = load_pt(
                reader, map_location=map_location, mmap=mmap, verify=verify, trusted=trusted
            )
        case "legacy pt":
            # Not mapped: torch maps zip archives only.
            read_legacy_pt(reader, record_unknown=trusted)
            obj = load_checked(reader.own_path, map_location=map_location, mmap=False, trusted=trusted)
        case "pickle":
            data = reader.read(0, reader.size_bytes)
            obj = pickle.loads(data) if trusted else safe_unpickle(data)
    if manifest is None:
        log.warning("%s is unverified: it has no manifest, so changes to its bytes cannot be detected.", source)
    # Only if verified or required, since it reads every weight.
    if (verify or require_finite) and (names := non_finite_weights(obj, finite)):
        message = f"{len(names)} tensors are NaN or infinite: {first_few(names)}"
        if require_finite:
            raise CorruptCheckpointError(f"{message}. Load an earlier checkpoint, or load without require_finite.")
        log.warning("%s: %s", source, message)
    return obj


def save_weights_in_shards(
    weights: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int,
    name: str = "model",
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    hash_name: str = file_io.HASH_NAME,
) -> Path:
    """Write weights to `.safetensors` files of a limited size, with an index, in a folder that appears atomically.

    Readers of Hugging Face's format can load them. Weights that fit into one file become `model.safetensors`, without
    an index. Several names of one tensor share a file, which stores it once.

    Args:
        weights: Tensors by name.
        folder: Path of the folder.
        max_shard_bytes: Maximum size of the tensors in one file. A larger tensor gets a file of its own.
        name: Prefix of the files' names.
        info: Entries of the manifests, as for `save_file`.
        overwrite: Whether to replace an existing folder of this name.
        hash_name: As for `save_file`.

    Returns:
        Path of the index, or of the only file, for `load_file`.

    Raises:
        CheckpointConflictError: If the path exists and `overwrite` is false.
        StorageError: If the disk fails.
        TypeError: If a value is not a tensor, or not one that safetensors supports.
        ValueError: If `max_shard_bytes` is less than 1.

    Example:
        >>> import tempfile, torch
        >>> from composer_checkpoint import load_file
        >>> path = save_weights_in_shards(
        ...     {"a": torch.ones(4), "b": torch.zeros(4)}, tempfile.mkdtemp() + "/model", max_shard_bytes=16
        ... )
        >>> sorted(os.listdir(path.parent))
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']
        >>> load_file(path)["a"]
        tensor([1., 1., 1., 1.])
    """
    # Names of one tensor are one part of the size of one: they stay in one file, which stores the tensor once.
    parts = (
        (same, next(iter(same.values())).nbytes)
        for same in safetensors.tied_weights(safetensors.by_text_names(weights))
    )
    shards = safetensors.plan_files(parts, max_shard_bytes, name)
    with write_atomically(folder, overwrite=overwrite, folder=True) as unfinished:
        manifests = {
            shard: save_file(group, unfinished / shard, info=info, hash_name=hash_name)
            for shard, group in shards.items()
        }
        safetensors.write_index(manifests, unfinished, name)
    return Path(folder) / (name + archives.INDEX_SUFFIX if len(shards) > 1 else next(iter(shards)))


def _load_shards(path: str, map_location: Any, verify: bool, require_finite: bool) -> dict[str, Tensor]:
    """Load all files of an index, after comparing their headers with it."""
    index = safetensors.read_index(path)
    weights: dict[str, Any] = {}
    # All headers are compared before the first file is loaded.
    for shard in safetensors.checked_shards(index):
        validate_file(index.path.parent / shard)
        with safetensors.open_shard(index, shard) as reader:
            loaded = _load(reader.path, reader, "safetensors", map_location, verify, require_finite)
        for name in weights.keys() & loaded.keys():  # again, now with the aliases of tensors
            raise safetensors.in_two_shards(index, name, *(each for each in index.shards if each != shard), shard)
        weights.update(loaded)
    return weights


_ALWAYS_FINITE = frozenset(["float4_e2m1fn_x2"])  # has neither, and torch does not compute with it


def non_finite_weights(obj: Any, known_finite: Collection[str] = ()) -> list[str]:
    """Return the names of weights that hold NaN or an infinity, skipping those that are known to be finite."""
    tensors = dict(named_leaves(obj, torch.Tensor))
    weights = {name: tensors[name].detach() for name in file_io.weight_names(tensors) if name not in known_finite}
    if not weights:
        return []
    with ThreadPoolExecutor(file_io.num_threads(), thread_name_prefix="finite") as pool:
        finite = pool.map(_is_finite, weights.values())
        return [name for name, is_finite in zip(weights, finite, strict=True) if not is_finite]


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.is_meta or tensor.layout != torch.strided:
        return True
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype in _ALWAYS_FINITE:
        return True
    if tensor.device.type != "cpu" or dtype not in file_io.FINITE_BITS:
        # Only 8-bit types, for which not every device has this: a large float64 is infinite in float32.
        return bool(torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all())
    return file_io.are_finite(file_io.tensor_bytes(tensor), dtype)


VALIDATION_VARIABLE = "CHECKPOINT_VALIDATION_FUNCTION"

Specs = Sequence[tuple[int, int]]
"""Ranges of a file that will be read: offset and length in bytes of each."""


def chosen_validation() -> Callable[[str, Specs | None], Any] | None:
    """Return the function named by `CHECKPOINT_VALIDATION_FUNCTION='package.module.function'`, if it is set.

    The module is imported, so the variable decides which code runs.
    """
    name = os.environ.get(VALIDATION_VARIABLE)
    if not name:
        return None
    module, _, function = name.rpartition(".")
    if not module:
        raise ValueError(
            f"{VALIDATION_VARIABLE}={name!r} is not a dotted name. Set it to one such as 'package.module.function', or "
            f"unset it."
        )
    return getattr(import_module(module), function)


def validate_file(
    path: str | os.PathLike[str], specs: Specs | None = None, validate: Callable[[str, Specs | None], Any] | None = None
) -> None:
    """Call a validation function, or that of the environment, for a file before any of it, or of some ranges, is read.

    Raises:
        ValueError: If the function returns a false value.
    """
    validate = validate or chosen_validation()
    if validate is not None and not validate(os.fspath(path), specs):
        raise ValueError(
            f"{os.fspath(path)} is refused by {getattr(validate, '__qualname__', validate)} of "
            f"{VALIDATION_VARIABLE}={os.environ.get(VALIDATION_VARIABLE)!r}. Load another checkpoint."
        )

"""Save a model, an optimizer and the rest of a run to separate files."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_checkpoint._ranks import Ranks
from composer_checkpoint._tree import named_leaves
from composer_checkpoint.commit import write_atomically
from composer_checkpoint.errors import CheckpointConflictError, CorruptCheckpointError
from composer_checkpoint.file_io import HASH_NAME, hash_file
from composer_checkpoint.files import save_file, save_weights_in_shards, verify_file
from composer_checkpoint.formats.archives import INDEX_SUFFIX
from composer_checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, FileEntry, Manifest, first_difference
from composer_checkpoint.modular.options import CheckpointSaveOptions
from composer_checkpoint.modular.state_dict import (
    Patterns,
    get_metadata_state_dict,
    get_model_state_dict,
    get_optim_state_dict,
    get_resumption_state_dict,
)
from composer_checkpoint.sharded import save_sharded, verify_folder
from composer_checkpoint.stores.base import is_uri
from composer_dist.devices import Device
from composer_events.formatting import format_name_with_dist_and_time
from composer_events.state import State

PathLike = str | os.PathLike[str]

_FORMATS = ("pt", "safetensors")


class AlreadyExistsError(CheckpointConflictError, ValueError):
    """Raised if a file or folder exists and must not be overwritten."""


@contextmanager
def _as_value_error(path: str, kind: str) -> Iterator[None]:
    """Raise conflicts as `AlreadyExistsError`, which is also a `ValueError`, as in Composer."""
    try:
        yield
    except CheckpointConflictError as error:
        raise AlreadyExistsError(
            f"{kind} {path} already exists. Set overwrite=True to replace it, or choose another name."
        ) from error


def _place_of_part(destination_dir: PathLike, part: str, sharded: bool, save_format: str) -> str:
    folder = os.path.join(_local_path(destination_dir, "destination_dir"), part)
    return folder if sharded else os.path.join(folder, f"{part}.{save_format}")


def _local_path(path: PathLike, argument: str) -> str:
    if is_uri(path):
        raise ValueError(
            f"{argument}={os.fspath(path)!r} is an address, and this saves to a local disk. Save to a folder, and "
            f"upload what is in it, with upload_file() or composer_checkpoint.remote.publish.publish_checkpoint()."
        )
    return os.fspath(path)


def _file_in(path: PathLike, name: str) -> str:
    text = _local_path(path, "path")
    return text if PurePath(text).suffix == PurePath(name).suffix else os.path.join(text, name)


def _check_format(save_format: str, sharded: bool) -> None:
    if save_format not in _FORMATS:
        raise NotImplementedError(f"save_format={save_format!r} is not known. Use one of {', '.join(_FORMATS)}.")
    if sharded and save_format != "pt":
        raise ValueError(
            f"save_format={save_format!r} is one file, and a sharded checkpoint is a folder of "
            f"torch.distributed.checkpoint. Use 'pt', or save without shards."
        )


RESUMPTION_FILENAME = "resumption.pkl"


def save_checkpoint_to_disk(
    destination_dir: PathLike, state: State, options: CheckpointSaveOptions | Mapping[str, Any] | None = None
) -> str:
    """Save a run to one folder atomically. Every rank must call this.

    The folder has `model/`, `optim/`, `resumption.pkl`, `composer_metadata.json`, and a manifest with the hash of each
    file.

    Args:
        destination_dir: A local folder that all ranks share. The checkpoint becomes a folder inside it.
        state: State of the run.
        options: Settings for saving.

    Returns:
        Path of the checkpoint's folder.

    Raises:
        ValueError: If the folder exists and must not be replaced, an option is invalid, or there is nothing to save.
        StorageError: If the disk fails.
    """
    if not isinstance(options, CheckpointSaveOptions):
        options = CheckpointSaveOptions(**(options or {}))
    _check_format(options.save_format, options.sharded_checkpoint)
    # Checked before anything is gathered or written, which may take minutes.
    if options.save_optimizer and len(state.optimizers) != 1:
        raise ValueError(
            f"save_optimizer=True saves one optimizer, and the state has {len(state.optimizers)}. Pass "
            f"CheckpointSaveOptions(save_optimizer=False), and save each one with save_optim_to_disk()."
        )
    state.settle()
    prefix = format_name_with_dist_and_time(options.dir_prefix, state.run_name, state.timestamp)
    folder = os.path.join(_local_path(destination_dir, "destination_dir"), prefix)
    units = ("iteration", "epoch", "batch", "sample", "token")
    info = {"run_name": state.run_name, "timestamp": {unit: int(getattr(state.timestamp, unit)) for unit in units}}
    with (
        _as_value_error(folder, "Directory"),
        checkpoint_folder(folder, overwrite=options.overwrite, info=info) as unfinished,
    ):
        sharded, precision = options.sharded_checkpoint, options.precision
        if options.save_model:
            keys = options.include_keys, options.ignore_keys
            save_model_to_disk(state.model, unfinished, sharded, precision, *keys, save_format=options.save_format)
        if options.save_optimizer:
            save_optim_to_disk(state.model, state.optimizers[0], unfinished, sharded, precision)
        if options.save_resumption_state:
            save_resumption_state_to_disk(state, unfinished)
        microbatch = state.device_train_microbatch_size
        save_composer_metadata_to_disk(unfinished, state.model, sharded, precision, state.device, microbatch)
    return folder


def save_model_to_disk(
    model: nn.Module,
    destination_dir: PathLike,
    sharded_checkpoint: bool = False,
    precision: str | torch.dtype = "fp32",
    include_keys: Patterns = None,
    ignore_keys: Patterns = None,
    overwrite: bool = False,
    save_format: str = "pt",
    *,
    max_shard_bytes: int | None = None,
) -> str | None:
    """Save the weights below `destination_dir/model`. Every rank must call this.

    Args:
        model: As for `get_model_state_dict`.
        destination_dir: A local folder; for a sharded checkpoint, one that all ranks share.
        sharded_checkpoint: Whether each rank writes its shards to `model/`. Otherwise rank 0 writes `model/model.pt`.
        precision: Dtype that floating point tensors are converted to.
        include_keys: Patterns of the names to save.
        ignore_keys: Patterns of the names to leave out.
        overwrite: Whether to replace existing files.
        save_format: `'pt'`, or `'safetensors'` for `model/model.safetensors`.
        max_shard_bytes: With `'safetensors'`, maximum size of a file's tensors in bytes. Larger models are saved to
            several files and their index, `model/model.safetensors.index.json`, as in Hugging Face.

    Returns:
        As for `save_state_dict_to_disk`; of several files, the path of the index.

    Raises:
        ValueError: If the path exists and `overwrite` is false, or an argument is invalid.
        StorageError: If the disk fails.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> path = save_model_to_disk(nn.Linear(2, 1), folder)
        >>> os.path.relpath(path, folder)
        'model/model.pt'
    """
    _check_format(save_format, sharded_checkpoint)
    if max_shard_bytes is not None and save_format != "safetensors":
        raise ValueError(
            f"max_shard_bytes={max_shard_bytes!r} is for save_format='safetensors', and it is {save_format!r}. Change "
            f"one of the two; sharded_checkpoint=True lets each rank write a part."
        )
    is_folder = sharded_checkpoint or max_shard_bytes is not None
    path = _place_of_part(destination_dir, "model", is_folder, save_format)
    state_dict = get_model_state_dict(model, sharded_checkpoint, precision, include_keys, ignore_keys)
    if max_shard_bytes is None:
        return _save(state_dict, path, overwrite, sharded=sharded_checkpoint)

    def write() -> str:
        with _as_value_error(path, "Directory"):
            shards = {"max_shard_bytes": max_shard_bytes, "overwrite": overwrite}
            return os.fspath(save_weights_in_shards(state_dict, path, **shards))

    return Ranks().own_result_of_first(write)


def save_optim_to_disk(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    destination_dir: PathLike,
    sharded_checkpoint: bool = False,
    precision: str | torch.dtype = "fp32",
    include_keys: Patterns = None,
    ignore_keys: Patterns = None,
    overwrite: bool = False,
    save_format: str = "pt",
) -> str | None:
    """Save an optimizer below `destination_dir/optim`. Every rank must call this.

    Args:
        model: The model, which has the parameters' names.
        optimizer: The optimizer, which is not changed.
        destination_dir: As for `save_model_to_disk`.
        sharded_checkpoint: Whether each rank writes its shards to `optim/`. Otherwise rank 0 writes `optim/optim.pt`.
        precision: Dtype that the floating point tensors of its `state` are converted to.
        include_keys: Not supported for optimizers.
        ignore_keys: Not supported for optimizers.
        overwrite: Whether to replace existing files.
        save_format: `'pt'`; safetensors does not support optimizers.

    Returns:
        As for `save_state_dict_to_disk`.

    Raises:
        NotImplementedError: If patterns are passed.
        ValueError: If the path exists and `overwrite` is false, or an argument is invalid.
        StorageError: If the disk fails.
    """
    _check_format(save_format, sharded_checkpoint)
    if save_format != "pt":
        raise ValueError(f"save_format={save_format!r} holds weights only, and no optimizer. Save it as 'pt'.")
    path = _place_of_part(destination_dir, "optim", sharded_checkpoint, save_format)
    state_dict = get_optim_state_dict(model, optimizer, sharded_checkpoint, precision, include_keys, ignore_keys)
    return _save(state_dict, path, overwrite, sharded=sharded_checkpoint)


def save_resumption_state_to_disk(state: State, path: PathLike, overwrite: bool = True) -> str | None:
    """Save the state that resuming needs besides weights and optimizers. Every rank must call this; rank 0 writes.

    Despite its name `resumption.pkl`, which is Composer's, the file can be read with `load_file`.

    Args:
        state: State of the run.
        path: Path of the file, if it ends in `.pkl`; otherwise of the folder for it.
        overwrite: Whether to replace an existing file.

    Returns:
        Path of the file on rank 0, `None` on the others.
    """
    # On all ranks, since it gathers the RNG states.
    resumption = get_resumption_state_dict(state)
    file = _file_in(path, RESUMPTION_FILENAME)
    return Ranks().own_result_of_first(lambda: _write_file(resumption, file, overwrite))


def save_composer_metadata_to_disk(
    path: PathLike,
    model: nn.Module | None = None,
    sharded_state_dict: bool | None = None,
    precision: str | torch.dtype | None = None,
    device: str | Device | None = None,
    device_train_microbatch_size: int | float | None = None,
) -> str | None:
    """Save the result of `get_metadata_state_dict` as JSON. Every rank must call this; rank 0 writes.

    Args:
        path: Path of the file, if it ends in `.json`; otherwise of the folder for `composer_metadata.json`.
        model: As for `get_metadata_state_dict`, like the other arguments.
        sharded_state_dict: Whether the checkpoint is sharded.
        precision: Precision of the checkpoint.
        device: Device whose communication backend is included.
        device_train_microbatch_size: Number of samples in a microbatch.

    Returns:
        Path of the file on rank 0, `None` on the others.
    """
    metadata = get_metadata_state_dict(model, sharded_state_dict, precision, device, device_train_microbatch_size)
    file = _file_in(path, METADATA_FILENAME)

    def write() -> str:
        with write_atomically(file) as unfinished:
            unfinished.write_text(json.dumps(metadata, indent=4))
        return file

    return Ranks().own_result_of_first(write)


def save_state_dict_to_disk(
    state_dict: Mapping[str, Any], path: PathLike, overwrite: bool = False, save_format: str = "pt"
) -> str | None:
    """Save a state dict: to a folder if it has `DTensor`s, or else to a file. Every rank must call this.

    Args:
        state_dict: Tensors, DTensors and plain data. If it is not sharded, that of rank 0 is written.
        path: Path of the file or folder. Suffixes of a folder's name, such as `.pt`, are removed with a warning.
        overwrite: Whether to replace an existing file or folder.
        save_format: `'pt'`, or `'safetensors'` for a file `.safetensors` with weights only.

    Returns:
        Path of the file on rank 0, or of `__{rank}_0.distcp` in the folder, with the placeholder for the rank; `None`
            on ranks that had nothing to write.

    Raises:
        ValueError: If the path exists and `overwrite` is false, or the format does not fit the suffix.
        StorageError: If the disk fails.
    """
    ranks = Ranks()
    # All ranks must agree, since a rank without shards would take the other branch.
    sharded = not ranks.all(not any(isinstance(leaf, DTensor) for _, leaf in named_leaves(dict(state_dict))))
    _check_format(save_format, sharded)
    if not sharded and (PurePath(path).suffix == ".safetensors") != (save_format == "safetensors"):
        raise ValueError(
            f"path={os.fspath(path)!r} cannot be combined with save_format={save_format!r}: names that end in "
            ".safetensors are of that format, and no others are. Change one of the two."
        )
    return _save(state_dict, path, overwrite, sharded=sharded)


def _save(state_dict: Mapping[str, Any], path: PathLike, overwrite: bool, *, sharded: bool) -> str | None:
    target = _local_path(path, "path")
    if not sharded:
        return Ranks().own_result_of_first(lambda: _write_file(state_dict, target, overwrite) if state_dict else None)
    name = PurePath(target)
    stripped = os.fspath(name.with_name(name.name.removesuffix("".join(name.suffixes))))
    if stripped != target:
        warnings.warn(
            f"path={target!r} has a suffix, and a sharded checkpoint is a folder: it is saved as {stripped!r}. Pass "
            f"that name.",
            stacklevel=3,
        )
    with _as_value_error(stripped, "Directory"):
        save_sharded(state_dict, stripped, overwrite=overwrite)
    return os.path.join(stripped, "__{rank}_0.distcp")


def _write_file(content: Mapping[str, Any], path: str, overwrite: bool) -> str:
    with _as_value_error(path, "File"), write_atomically(path, overwrite=overwrite) as unfinished:
        save_file(dict(content), unfinished)
    return path


METADATA_FILENAME = "composer_metadata.json"


@contextmanager
def checkpoint_folder(
    path: str | os.PathLike[str], *, overwrite: bool = False, info: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield a folder for the parts of a checkpoint. On exit it gets a manifest, and then its final name, atomically.

    Every rank must enter and leave the context. After an exception, which must be raised on all ranks, the folder is
    deleted.

    Args:
        path: Final path, on a disk that all ranks share.
        overwrite: Whether to replace an existing folder of this name.
        info: Entries of the manifest about the run, with values that JSON supports. `find_newest` uses the entry
            `{"timestamp": {"epoch": 3}}`.

    Yields:
        Temporary path of the folder. The manifest lists the hashes of all files in it, also of files that other
        programs have written.

    Raises:
        CheckpointConflictError: If the path exists and `overwrite` is false; also a `FileExistsError`.
        StorageError: If the disk fails.

    Example:
        >>> import tempfile, torch
        >>> from composer_checkpoint.modular import save_model_to_disk
        >>> folder = tempfile.mkdtemp()
        >>> with checkpoint_folder(f"{folder}/ep1") as unfinished:
        ...     path = save_model_to_disk(torch.nn.Linear(2, 1), unfinished)
        >>> sorted(os.listdir(f"{folder}/ep1"))
        ['composer_manifest.json', 'composer_metadata.json', 'model']
    """
    ranks = Ranks()
    with ExitStack() as unfinished:  # holds the folder on rank 0, and nothing on the others

        def begin() -> str:
            return str(unfinished.enter_context(write_atomically(path, overwrite=overwrite, folder=True)))

        def commit() -> None:
            _seal(Path(place), info or {})
            unfinished.pop_all().close()

        place = ranks.from_first(begin)  # sent to all ranks, since the temporary name is random
        yield place
        ranks.from_first(commit)


def verify_modular_folder(folder: str | os.PathLike[str]) -> Manifest | None:
    """Verify a modular checkpoint by its manifest or, if it has none, by the manifests of its parts."""
    root = Path(folder)
    if not (root / MANIFEST_NAME).exists():
        for part in sorted(root.iterdir()):
            if part.name != METADATA_FILENAME:
                _verify_part(part)
        return None
    manifest = Manifest.from_json((root / MANIFEST_NAME).read_bytes())
    path = first_difference(root, manifest)  # files that the manifest does not list are ignored
    if path is None:
        return manifest
    if not path.exists():
        raise CorruptCheckpointError(
            f"{root} lacks {path.relative_to(root)}, which was saved with it. Load another checkpoint."
        )
    _verify_part(path)  # if the part has hashes of its own, the error names the damaged tensor
    raise CorruptCheckpointError(f"{path} is not what was written. Load another checkpoint.")


def _verify_part(path: Path) -> None:
    if path.is_dir() and (path / METADATA_NAME).exists():
        verify_folder(path)
    elif path.is_dir():
        for inside in sorted(path.iterdir()):
            _verify_part(inside)
    elif path.suffix in (".pt", ".pkl", ".safetensors") or path.name.endswith(INDEX_SUFFIX):
        verify_file(path)


def _seal(folder: Path, info: Mapping[str, Any]) -> None:
    if not (folder / METADATA_FILENAME).exists():  # the file by which a modular checkpoint is recognized
        (folder / METADATA_FILENAME).write_text(json.dumps(get_metadata_state_dict(), indent=4))
    known: dict[str, FileEntry] = {}
    for manifest in folder.glob(f"*/{MANIFEST_NAME}"):
        inside = manifest.parent.relative_to(folder)
        found = Manifest.from_json(manifest.read_bytes())
        # Hashes of the parts are reused, so that files are not read again. A manifest has one kind of hash only.
        if found.hash_name == HASH_NAME:
            known |= {(inside / name).as_posix(): entry for name, entry in found.files.items()}
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    entries = {
        name: known.get(name) or FileEntry((folder / name).stat().st_size, hash_file(folder / name)) for name in names
    }
    (folder / MANIFEST_NAME).write_text(Manifest(files=entries, info=info).to_json())

"""Open a checkpoint of any kind, and refuse what a format cannot hold."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from composer_checkpoint._tree import refuse_doubled
from composer_checkpoint.commit import read_pointer
from composer_checkpoint.errors import CorruptCheckpointError, NoCheckpointError
from composer_checkpoint.formats.archives import INDEX_SUFFIX, plain_file
from composer_checkpoint.formats.deepspeed import Weights, find_zero_folder, open_zero_source
from composer_checkpoint.formats.per_rank import LAYOUT_NAME, check_local, layout_of, open_local_source
from composer_checkpoint.formats.pt import open_pt_source, tensors_to_write
from composer_checkpoint.formats.safetensors import check_fit, merge_files, open_safetensors_source, read_index
from composer_checkpoint.formats.tensor_source import StoredTensor, TensorSource
from composer_checkpoint.sharded.load import refuse_unfit_entries
from composer_checkpoint.sharded.tensors import check_tree, open_sharded_source

Kind = Literal["composer", "pt", "safetensors", "dcp", "local", "deepspeed", "hf", "modular"]
"""Kinds of checkpoints: `'composer'` is a `.pt` file with the key `state`, `'pt'` any other one, and `'modular'` the
folder with `model/`, `optim/` and `composer_metadata.json`."""

Target = Literal["pt", "safetensors", "dcp", "local"]
"""Target format: a `.pt` or a `.safetensors` file, a sharded folder, or per-rank files."""

_SYMLINK = ".symlink"
_MOST_LINKS = 8
_BIN_INDEX = "pytorch_model.bin.index.json"
_WEIGHTS = ("model.safetensors.index.json", "model.safetensors", _BIN_INDEX, "pytorch_model.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    kind: Kind | None = None,
    record_unknown: bool = False,
    zero_weights: Weights = "fp32",
) -> TensorSource:
    """Open a checkpoint of any kind to read it tensor by tensor. Nothing in it is run.

    Args:
        path: Path of a file, a folder, a link or a pointer such as `latest-rank0.pt`, or the name of per-rank files
            with `{rank}` in it.
        kind: Kind of the checkpoint. Detected when `None`.
        record_unknown: Whether to also open a `.pt` file that has more than data, to inspect it; see `open_pt_source`.
        zero_weights: Which weights of a DeepSpeed checkpoint to open.

    Raises:
        NoCheckpointError: If the path is not a checkpoint, with the files that were searched for.
        CorruptCheckpointError: If the checkpoint is incomplete or damaged.
        UnsafeCheckpointError: If it has more than data.
    """
    place = follow_pointers(path)
    kind = find_kind(place) if kind is None else kind
    match kind:
        case "local":
            source = open_local_source(place)
        case "dcp":
            source = open_sharded_source(place)
        case "deepspeed":
            source = open_zero_source(place, weights=zero_weights)
        case "hf":
            source = _open_folder(Path(place))
        case "modular":
            source = _open_modular(Path(place))
        case _:
            source = _open_file(place, record_unknown)
    if source.format in ("pt", "legacy pt"):
        source.format = "composer" if isinstance(source.tree, dict) and "state" in source.tree else "pt"
    source.path = os.fspath(place)
    return source


def follow_pointers(path: str | os.PathLike[str]) -> str:
    """Return the target of a link or a pointer file, and any other path unchanged.

    Raises:
        CorruptCheckpointError: If there are too many pointers, as in a cycle.
    """
    place = os.fspath(path)
    for _ in range(_MOST_LINKS):
        # On file systems without links, and in copies of a store, a pointer is a small file with its target's name.
        is_pointer = place.endswith(_SYMLINK) or (os.path.islink(place) and not os.path.exists(place))
        # Larger files cannot be pointers, see `read_pointer`, so they need not be read.
        is_small = not os.path.islink(place) and os.path.isfile(place) and os.path.getsize(place) <= 4096
        target = read_pointer(place) if is_pointer or is_small else None
        if target is None:
            return place
        place = os.fspath(target)
    raise CorruptCheckpointError(
        f"{os.fspath(path)!r} leads through more than {_MOST_LINKS} pointers. Name the checkpoint."
    )


def find_kind(path: str | os.PathLike[str]) -> Kind:
    """Return the kind of the checkpoint at a path.

    Raises:
        NoCheckpointError: If the path is not a known kind of checkpoint, with the files that were searched for.
    """
    place = os.fspath(path)
    # A name with the placeholder stands for several files and does not exist itself.
    if "{rank}" in place:
        return "local"
    if os.path.isfile(place):
        return "safetensors" if place.endswith((".safetensors", INDEX_SUFFIX)) else "pt"
    folder = Path(place)
    if not folder.is_dir():
        raise NoCheckpointError(f"there is no checkpoint at {place!r}. Check the path.")
    tests: Mapping[Kind, Callable[[], Any]] = {
        "dcp": lambda: (folder / ".metadata").exists(),
        "modular": lambda: (folder / "composer_metadata.json").exists() or _modular_model(folder),
        "deepspeed": lambda: find_zero_folder(folder),
        "hf": lambda: any((folder / name).exists() for name in (*_WEIGHTS, *_ADAPTERS)),
    }
    for kind, test in tests.items():
        if test():
            return kind
    some = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8])
    raise NoCheckpointError(
        f"{place!r} is not a known kind of checkpoint: it has neither .metadata (torch.distributed.checkpoint), "
        f"composer_metadata.json, mp_rank_00_model_states.pt or latest (DeepSpeed), nor {', '.join(_WEIGHTS)} (Hugging "
        f"Face), but {some or 'nothing'}. Name the checkpoint's own folder or file."
    )


def _open_file(place: str, record_unknown: bool) -> TensorSource:
    if place.endswith(INDEX_SUFFIX):
        return merge_files(read_index(place), open_safetensors_source)
    if place.endswith(".safetensors"):
        with plain_file(place):  # names the file in errors
            return open_safetensors_source(place)
    source = open_pt_source(place, record_unknown=record_unknown)
    if layout_of(source.tree) is not None:
        source.format = "local"
    return source


def _open_folder(folder: Path) -> TensorSource:
    for name in (*_WEIGHTS, *_ADAPTERS):
        path = folder / name
        if not path.exists():
            continue
        if name == _BIN_INDEX:
            source = merge_files(read_index(path, ".bin"), open_pt_source)
        else:
            source = _open_file(os.fspath(path), False)
        source.format = "hf"
        if not source.files:
            source.files = {name: path.stat().st_size}
        return source
    raise NoCheckpointError(f"{folder} has none of {', '.join((*_WEIGHTS, *_ADAPTERS))}. Name a Hugging Face folder.")


def _modular_model(folder: Path) -> Path | None:
    model = folder / "model"
    for candidate in (model / "model.pt", model / "model.safetensors", model / "model.safetensors.index.json"):
        if candidate.exists():
            return candidate
    return model if (model / ".metadata").exists() else None


def _open_modular(folder: Path) -> TensorSource:
    model = _modular_model(folder)
    if model is None:
        raise NoCheckpointError(f"{folder} has no model/model.pt and no model/.metadata, so it holds no weights.")
    # The model part is a checkpoint of its own, of any format.
    source = open_checkpoint(model)
    weights = dict(source.weights)
    state: dict[str, Any] = {"model": weights}
    path = folder / "composer_metadata.json"
    if path.exists():
        try:
            metadata = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            source.close()
            raise CorruptCheckpointError(f"{path} is not JSON: {error!s:.200}.") from error
        state["metadata"] = {"composer_env_info": metadata}
        if isinstance(metadata, dict) and isinstance(metadata.get("huggingface"), dict):
            state["integrations"] = {"huggingface": metadata["huggingface"]}
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    whole = TensorSource("modular", {"state": state}, sum(files.values()), source.manifest, files=files)
    return whole.on_close(source)  # its tensors are read from the model's source


def refuse_unfit(
    tree: Any, target: Target, path: str | os.PathLike[str], *, what: str | None = None, aliases: Iterable[str] = ()
) -> None:
    """Refuse a tree that cannot be written, as far as that is known without reading a tensor.

    Args:
        tree: Dicts, lists and tuples of `StoredTensor`s, tensors and plain data; for `'safetensors'`, tensors by name.
        target: The format.
        path: Path of the output, for messages.
        what: Name of the format in messages.
        aliases: Further names of tensors, for `'safetensors'`.

    Raises:
        IncompatibleCheckpointError: If the format does not support a sparse or quantized tensor, or a name.
        TypeError: If the format does not support a tensor's dtype.
        UnsafeCheckpointError: If the tree has anything other than data.

    Example:
        >>> from composer_checkpoint.tensors import as_stored
        >>> refuse_unfit({"w": as_stored(torch.ones(2, dtype=torch.complex128))}, "safetensors", "out.safetensors")
        Traceback (most recent call last):
        TypeError: w is torch.complex128, which safetensors has no form for. Write a .pt file, or leave it out.
    """
    called = {} if what is None else {"called": what}
    match target:
        case "safetensors":
            check_fit(tree, aliases, **called)
        case "dcp":
            check_tree(tree, path, **called)
        case "local":
            check_local(tree, path, **called)
        case "pt":
            tensors_to_write(tree, path, **called)


def refuse_doubled_names(tree: Any, target: Literal["dcp", "local"]) -> None:
    """Refuse two items that get the same name once the keys of their paths are joined as the format joins them.

    Args:
        tree: Dicts and lists of `StoredTensor`s, tensors and plain data.
        target: `'dcp'` for sharded folders, which join keys by dots, or `'local'` for per-rank files, which join them
            by slashes.

    Raises:
        IncompatibleCheckpointError: With the paths of both items, or of one that is too long for a folder.
    """
    if target == "dcp":
        refuse_unfit_entries(tree, (StoredTensor, torch.Tensor))
    else:
        refuse_doubled(tree, (StoredTensor, torch.Tensor), "/", LAYOUT_NAME)

"""Planning of a Hugging Face folder: the mapping of the checkpoint's weights to the folder's, tensor by tensor."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from composer_checkpoint import CorruptCheckpointError, verify_file
from composer_checkpoint.tensors import (
    StoredTensor,
    TensorSource,
    plan_shards,
    refuse_quantized,
    refuse_sparse,
    refuse_unfit,
    stream_pt,
    stream_shards,
)
from composer_ckpt.folders import metadata_of
from composer_ckpt.lora import has_base, merge_adapters, of_other_adapters
from composer_ckpt.output import DEFAULT_SHARD_BYTES, MismatchError, UsageError
from composer_ckpt.plans import Plan, Progress
from composer_ckpt.selection import once_each, refuse_doubles, renamed_by
from composer_ckpt.weights import chosen_weights, notes_on_the_rest
from composer_hf.adapters import is_adapter_weight
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import meta_model
from composer_hf.published_weights import PublishedPiece, plan_weights, published_name
from composer_hf.publishing import pretrained_folder

__all__ = ["plan_folder", "with_adapter"]

_PREFIX = "model."
_WHOLE = 1 << 62
_MAX_NAMES = 5
_ADAPTER, _MODEL = "adapter_model", "model"
Weights = dict[str, StoredTensor]


def plan_folder(source: TensorSource, options: argparse.Namespace, stack: ExitStack) -> Plan:
    """Plan a folder, reading only descriptions of tensors.

    Args:
        source: The open checkpoint.
        options: Options of `convert`.
        stack: Closes other sources that are opened.

    Raises:
        MissingMetadataError: If the model is unknown.
        UnfittingWeightsError: If weights are missing, or not in the model.
        IncompatibleCheckpointError: If transformers does not know the model.
    """
    metadata = metadata_of(source, options)
    weights, renamed, cast = chosen_weights(source, options)
    refuse_sparse(weights, "--to hf")
    refuse_quantized(weights, "--to hf")
    notes = [*_notes_on_adapters(metadata, options), *notes_on_the_rest(source)]
    is_adapter = metadata.peft_config is not None and options.peft != "merge"
    weights = _named_as_in_composer(weights, source, metadata)
    if source.format == "hf" and metadata.peft_config is not None:  # an adapter folder contains only trained weights
        metadata = replace(metadata, trained_beside_adapter=trained_beside_adapter(weights))
    if metadata.peft_config is not None and not is_adapter:
        weights, metadata, told = merge_adapters(weights, metadata, options, stack)
        notes += told
    elif is_adapter and has_base(weights, metadata):
        notes.append("only the adapter is written; --peft merge adds it to its base")
    if options.include or options.exclude:
        published, dropped, pieces = renamed_by(weights, published_name), {}, []
        notes.append(
            "chosen by --include and --exclude, so that nobody has looked whether they are all that the model needs"
        )
    else:
        weights = once_each(weights, published_name)  # raises if two different weights get the same name
        pieces = plan_weights(_on_meta(weights), metadata, trust_remote_code=options.trust_remote_code)
        published, dropped = _published(pieces, weights), _dropped(pieces)
    if is_adapter:
        notes += _notes_on_other_adapters(weights)
    target = "pt" if options.format == "bin" else "safetensors"
    refuse_unfit(published, target, options.target, what="--to hf")
    name = _ADAPTER if is_adapter else _MODEL
    files = plan_shards(published, _WHOLE if is_adapter else options.max_shard_size or DEFAULT_SHARD_BYTES, name)
    if options.format == "bin":
        files = _as_bin(files)
    return Plan(
        options.source,
        options.target,
        (source.format, "hf"),
        files,
        lambda progress: _write(files, name, metadata, dropped, options, progress),
        cast,
        dropped,
        renamed,
        notes,
        max((tensor.size_bytes for tensor in weights.values()), default=0),
        lambda: _check_ties(pieces, weights),
    )


def _notes_on_adapters(metadata: HuggingFaceMetadata, options: argparse.Namespace) -> list[str]:
    """Return notes on adapters, and raise if options for adapters have no effect."""
    if metadata.peft_config is not None:
        _refuse_options_of_bases(options)
        return []
    if options.peft == "adapter" or options.base_model is not None:
        given = "--peft adapter" if options.peft == "adapter" else f"--base-model {options.base_model!r}"
        raise UsageError(f"{given} is for adapters, and {options.source} is of a model without one. Leave it out.")
    return ["there is no adapter to merge"] if options.peft == "merge" else []


def _notes_on_other_adapters(weights: Weights) -> list[str]:
    others = of_other_adapters(weights)
    listed = ", ".join(others[:_MAX_NAMES])
    return [f"left out, since they are of other adapters than 'default': {listed}"] if others else []


def _refuse_options_of_bases(options: argparse.Namespace) -> None:
    """Raise if options for whole models are given although only the adapter is written."""
    if options.peft != "merge" and options.base_model is not None:
        raise UsageError(
            f"--base-model {options.base_model!r} is for --peft merge, and the adapter is written alone. Give --peft "
            f"merge, or leave it out."
        )
    if options.peft != "merge" and options.max_shard_size is not None:
        raise UsageError("--max-shard-size is of whole models, and the adapter, one file, is written. Leave it out.")


def _named_as_in_composer(weights: Weights, source: TensorSource, metadata: HuggingFaceMetadata) -> Weights:
    """Return the weights with `model.` before their names in the transformers model."""
    if metadata.peft_config is not None:
        is_bare = not any(name.startswith(f"{_PREFIX}base_model.") for name in weights)
        config = metadata.peft_config
        adapters = renamed_by(weights, lambda name: with_adapter(name, config)) if is_bare else weights
        return {f"{_PREFIX}{name}": tensor for name, tensor in adapters.items()} if is_bare else weights
    if source.format != "hf" and source.state.get("integrations"):
        return weights
    prefixed = {f"{_PREFIX}{name}": tensor for name, tensor in weights.items()}
    if source.format == "hf":
        return prefixed
    # Names of a foreign `.pt` may lack the prefix: the variant with more names of the model wins.
    known = meta_model(metadata).state_dict().keys()
    fitting = [len({published_name(name) for name in names} & known) for names in (weights, prefixed)]
    return weights if fitting[0] >= fitting[1] else prefixed


def with_adapter(name: str, config: Mapping[str, Any]) -> str:
    """Return the name in memory of an adapter's weight in `adapter_model.safetensors`.

    Args:
        name: Name in the file.
        config: Configuration of the adapter, which names the modules that are saved whole.

    Example:
        >>> with_adapter("base_model.model.wte.weight", {"modules_to_save": ["wte"]})
        'base_model.model.wte.modules_to_save.default.weight'
    """
    parts = name.split(".")
    added = [place for place, part in enumerate(parts) if part.startswith("lora_") or part == "trainable_tokens_delta"]
    if not added:
        saved = tuple(config.get("modules_to_save") or ())
        for end in range(1, len(parts)):  # peft wraps the outermost module whose name has this ending
            if saved and ".".join(parts[:end]).endswith(saved) and "modules_to_save" not in parts:
                return ".".join([*parts[:end], "modules_to_save", "default", *parts[end:]])
    elif "default" not in parts:
        after = ["weight"] if parts[-1] == "lora_magnitude_vector" else []
        return ".".join([*parts[: added[0] + 1], "default", *parts[added[0] + 1 :], *after])
    return name


def trained_beside_adapter(weights: Weights) -> list[str]:
    """Return the names of weights in an adapter's folder that the adapter did not add."""
    return [plain for name in weights if not is_adapter_weight(plain := published_name(name))]


def _on_meta(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in weights.items()}


class _LastPiece:
    """Cache of the last converted piece, whose parts are written one after the other."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._piece: PublishedPiece | None = None
        self._made: dict[str, torch.Tensor] = {}

    def part(self, piece: PublishedPiece, target: str) -> torch.Tensor:
        """Return one of the weights of a converted piece, and drop it from the cache."""
        if self._piece is not piece or target not in self._made:
            self._made.clear()
            (first,) = piece.sources
            self._piece, self._made = piece, piece.convert({first: self._weights[first].read()})
        return self._made.pop(target).contiguous()


def _published(pieces: Sequence[PublishedPiece], weights: Weights) -> Weights:
    last = _LastPiece(weights)
    published: Weights = {}
    origins: dict[str, str] = {}
    for piece in pieces:
        own = replace(piece, sources=piece.sources[:1], copies=())  # `_check_ties` compares copies before writing
        for target, described in piece.targets.items():
            if target in origins:
                refuse_doubles({origins[target]: target, piece.sources[0]: target})
            origins[target] = piece.sources[0]
            published[target] = StoredTensor(
                described.dtype, tuple(described.shape), lambda own=own, target=target: last.part(own, target)
            )
    return published


def _dropped(pieces: Sequence[PublishedPiece]) -> dict[str, str]:
    return {published_name(name): next(iter(piece.targets)) for piece in pieces for name in piece.copies}


def _check_ties(pieces: Sequence[PublishedPiece], weights: Weights) -> None:
    """Compare tied weights, except those that share a tensor in the checkpoint."""
    for piece in pieces:
        first = weights[piece.sources[0]]
        others = [name for name in piece.copies if first.storage is None or weights[name].storage != first.storage]
        for name in others:
            one = replace(piece, sources=(piece.sources[0], name), copies=(name,))
            one.convert({piece.sources[0]: first.read(), name: weights[name].read()})


def _as_bin(files: Mapping[str, Weights]) -> dict[str, Weights]:
    """Return the files under their names in the `bin` format."""
    return {
        name.replace("model", "pytorch_model", 1)
        .replace("adapter_pytorch_", "adapter_")
        .replace(".safetensors", ".bin"): t
        for name, t in files.items()
    }


def _main_dtype(files: Mapping[str, Weights]) -> torch.dtype | None:
    """Return the floating point dtype that takes most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for tensors in files.values():
        for tensor in tensors.values():
            if tensor.dtype.is_floating_point:
                sizes[tensor.dtype] += tensor.size_bytes
    return sizes.most_common(1)[0][0] if sizes else None


def _write(
    files: Mapping[str, Weights],
    name: str,
    metadata: HuggingFaceMetadata,
    dropped: Mapping[str, str],
    options: argparse.Namespace,
    progress: Progress,
) -> None:
    total = sum(tensor.size_bytes for tensors in files.values() for tensor in tensors.values())
    with pretrained_folder(
        options.target,
        metadata,
        dtype=_main_dtype(files),
        overwrite=options.overwrite,
        trust_remote_code=options.trust_remote_code,
        need_bytes=total,
    ) as folder:
        if options.format == "bin":
            _write_bin(files, folder, progress)
        else:
            info = {"dropped_aliases": dict(dropped)} if dropped else {}
            stream_shards(files, folder, name=name, info=info, progress=progress)
        if not options.no_verify:
            _read_back(files, folder)


def _write_bin(files: Mapping[str, Weights], folder: Path, progress: Progress) -> None:
    for file, tensors in files.items():
        stream_pt(tensors, folder / file, progress=progress)
    if len(files) > 1:
        total = sum(tensor.size_bytes for tensors in files.values() for tensor in tensors.values())
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _read_back(files: Mapping[str, Weights], folder: Path) -> None:
    """Verify the written files against their hashes."""
    for file in files:
        try:
            verify_file(folder / file)
        except CorruptCheckpointError as error:
            raise MismatchError(
                f"what was written is not what was read: {error} Nothing was left. Look at the disk."
            ) from error

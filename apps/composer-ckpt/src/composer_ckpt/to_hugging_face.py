"""Planning of a Hugging Face folder: the mapping of the checkpoint's weights to the folder's, tensor by tensor."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from composer_checkpoint import CorruptCheckpointError, verify_file
from composer_checkpoint.tensors import (
    StoredTensor,
    Target,
    TensorSource,
    refuse_quantized,
    refuse_sparse,
    refuse_unfit,
)
from composer_ckpt.folders import metadata_of
from composer_ckpt.lora import has_base, merge_adapters, of_other_adapters
from composer_ckpt.options import ConvertOptions
from composer_ckpt.output import DEFAULT_SHARD_BYTES, MismatchError, UsageError, first_few
from composer_ckpt.plans import Plan, Progress
from composer_ckpt.selection import once_each, refuse_doubles, renamed_by
from composer_ckpt.weights import choose_weights, notes_on_the_rest
from composer_hf.adapters import is_adapter_weight
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import meta_model
from composer_hf.published_weights import PublishedPiece, plan_weights, published_name
from composer_hf.publishing import on_meta, pretrained_folder
from composer_hf.weight_files import check_ties, main_dtype, plan_files, published_tensors, total_bytes, write_files

_PREFIX = "model."
_KINDS: dict[str, Target] = {"safetensors": "safetensors", "bin": "pt"}
Weights = dict[str, StoredTensor]


def plan_folder(source: TensorSource, options: ConvertOptions, stack: ExitStack) -> Plan:
    """Plan a folder, reading only descriptions of tensors. The stack closes other sources that are opened."""
    metadata = metadata_of(source, options)
    chosen = choose_weights(source, options)
    refuse_sparse(chosen.tensors, "--to hf")
    refuse_quantized(chosen.tensors, "--to hf")
    notes = [*_notes_on_adapters(metadata, options), *notes_on_the_rest(source)]
    is_adapter = metadata.peft_config is not None and options.peft != "merge"
    weights = _named_as_in_composer(chosen.tensors, source, metadata)
    if source.format == "hf" and metadata.peft_config is not None:  # an adapter folder contains only trained weights
        metadata = replace(metadata, trained_beside_adapter=trained_beside_adapter(weights))
    if metadata.peft_config is not None and not is_adapter:
        weights, metadata, told = merge_adapters(weights, metadata, options, stack)
        notes += told
    elif is_adapter and has_base(weights, metadata):
        notes.append("only the adapter is written; --peft merge adds it to its base")
    weights, published, pieces = _published(weights, metadata, options)
    if not pieces:
        notes.append(
            "chosen by --include and --exclude, so they were not compared with the weights that the model needs"
        )
    if is_adapter and (others := of_other_adapters(weights)):
        notes.append(f"left out, since they are of other adapters than 'default': {first_few(others)}")
    refuse_unfit(published, _KINDS[options.format], options.target, what="--to hf")
    size = options.max_shard_size or DEFAULT_SHARD_BYTES
    files = plan_files(published, size, format=options.format, is_adapter=is_adapter)
    dropped = {published_name(name): next(iter(piece.targets)) for piece in pieces for name in piece.copies}
    return Plan(
        source=options.source,
        target=options.target,
        formats=(source.format, "hf"),
        files=files,
        write=lambda progress: _write(files, metadata, dropped, options, progress),
        largest_source=max((tensor.size_bytes for tensor in weights.values()), default=0),
        cast=chosen.cast,
        renamed=chosen.renamed,
        names_with_nan=chosen.names_with_nan,
        warnings=notes,
        dropped_aliases=dropped,
        check=lambda: check_ties(pieces, weights),
    )


def _published(
    weights: Weights, metadata: HuggingFaceMetadata, options: ConvertOptions
) -> tuple[Weights, Weights, list[PublishedPiece]]:
    """Return the weights to read, those of the folder, and the pieces, of which a selection of weights has none."""
    if options.include or options.exclude:
        return weights, renamed_by(weights, published_name), []
    weights = once_each(weights, published_name)  # raises if two different weights get the same name
    pieces = plan_weights(on_meta(weights), metadata, trust_remote_code=options.trust_remote_code)
    refuse_doubles((piece.sources[0], name) for piece in pieces for name in piece.targets)
    return weights, published_tensors(pieces, weights), pieces


def _notes_on_adapters(metadata: HuggingFaceMetadata, options: ConvertOptions) -> list[str]:
    """Return notes on adapters, and raise if options for adapters have no effect."""
    if metadata.peft_config is None:
        if options.peft == "adapter" or options.base_model is not None:
            given = "--peft adapter" if options.peft == "adapter" else f"--base-model {options.base_model!r}"
            raise UsageError(f"{given} is for adapters, and {options.source} is of a model without one. Leave it out.")
        return ["there is no adapter to merge"] if options.peft == "merge" else []
    if options.peft != "merge":  # the adapter is written alone
        for name, value in (("--base-model", options.base_model), ("--max-shard-size", options.max_shard_size)):
            if value is not None:
                raise UsageError(
                    f"{name} {value!r} is for whole models, and the adapter is written alone, as one file. Give --peft "
                    f"merge, or leave it out."
                )
    return []


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

    The configuration of the adapter names the modules that are saved whole.

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


def _write(
    files: dict[str, Weights],
    metadata: HuggingFaceMetadata,
    dropped: Mapping[str, str],
    options: ConvertOptions,
    progress: Progress,
) -> None:
    settings: dict[str, Any] = {"overwrite": options.overwrite, "trust_remote_code": options.trust_remote_code}
    dtype, need = main_dtype(files), total_bytes(files)
    with pretrained_folder(options.target, metadata, dtype=dtype, need_bytes=need, **settings) as folder:
        info = {"dropped_aliases": dict(dropped)} if dropped else {}
        write_files(folder, files, format=options.format, info=info, progress=progress)
        for file in files if not options.no_verify else ():
            try:
                verify_file(folder / file)
            except CorruptCheckpointError as error:
                raise MismatchError(
                    f"the written checkpoint differs from the source: {error} It was deleted. Check the disk."
                ) from error

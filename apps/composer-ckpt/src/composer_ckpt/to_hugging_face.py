"""Planning of a Hugging Face folder, and the names of its weights in memory."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from composer_checkpoint import CorruptCheckpointError, UnfittingWeightsError, verify_file
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
from composer_ckpt.options import ConvertOptions, Plan, Progress
from composer_ckpt.output import DEFAULT_SHARD_BYTES, MismatchError, UsageError, first_few
from composer_ckpt.weights import (
    Weights,
    choose_weights,
    differences,
    notes_on_the_rest,
    once_each,
    refuse_doubles,
    renamed_by,
)
from composer_hf.adapters import is_adapter_weight
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import meta_model
from composer_hf.published_weights import PublishedPiece, plan_weights, published_name, tied_names
from composer_hf.publishing import on_meta, pretrained_folder
from composer_hf.weight_files import check_ties, main_dtype, plan_files, published_tensors, total_bytes, write_files

_PREFIX = "model."
_KINDS: dict[str, Target] = {"safetensors": "safetensors", "bin": "pt"}


def plan_folder(source: TensorSource, options: ConvertOptions, stack: ExitStack) -> Plan:
    """Plan a folder, reading only descriptions of tensors. The stack closes other sources that are opened."""
    metadata = metadata_of(source, options)
    nan: dict[str, None] = {}
    chosen, renamed, changes = choose_weights(source, options, nan)
    refuse_sparse(chosen, "--to hf")
    refuse_quantized(chosen, "--to hf")
    notes = [*_notes_on_adapters(metadata, options), *_notes_on_methods(source), *notes_on_the_rest(source)]
    is_adapter = metadata.peft_config is not None and options.peft != "merge"
    weights = _named_as_in_composer(chosen, source, metadata)
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
    check_ties(pieces, weights)  # also in a dry run
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
        cast=changes,
        renamed=renamed,
        names_with_nan=nan,
        warnings=notes,
        dropped_aliases=dropped,
    )


# Algorithms that change what a model computes, but neither its weights nor its config.
_WITHOUT_TRACE = ("LogitSoftcap", "SquaredReLU")


def _notes_on_methods(source: TensorSource) -> list[str]:
    state: Any = source.tree.get("state") if isinstance(source.tree, Mapping) else None
    saved: Any = state.get("algorithms") if isinstance(state, Mapping) else None
    pairs = [item for item in saved or () if isinstance(item, list | tuple) and len(item) == 2]
    if not (names := [name for name in _WITHOUT_TRACE if name in [pair[0] for pair in pairs]]):
        return []
    return [f"trained with {' and '.join(names)}, which a model loaded from this folder does not apply by itself"]


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
            raise UsageError(
                f"--peft adapter and --base-model are for adapters, and {options.source} is of a model without one. "
                f"Leave them out."
            )
        return ["there is no adapter to merge"] if options.peft == "merge" else []
    if options.peft != "merge" and (options.base_model, options.max_shard_size) != (None, None):
        raise UsageError(
            "--base-model and --max-shard-size are for whole models, and the adapter is written alone, as one file. "
            "Give --peft merge, or leave them out."
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
            read_back(folder / file, verify_file)


def read_back(path: Path, verify: Callable[[Path], object]) -> None:
    """Raise a `MismatchError` if a file or folder is not as it was written."""
    try:
        verify(path)
    except CorruptCheckpointError as error:
        raise MismatchError(
            f"the written checkpoint differs from the source: {error} It was deleted. Check the disk."
        ) from error


def in_memory_weights(weights: Mapping[str, StoredTensor], model: "PreTrainedModel") -> Weights:
    """Return a folder's weights as in the model's state dict, with tied weights under all of their names."""
    expected = model.state_dict()
    found = _put_together(weights, model) if weights.keys() - expected.keys() else dict(weights)
    for alias, kept in tied_names(model).items():
        if kept in found:
            found.setdefault(alias, found[kept])
        elif alias in found:
            found[kept] = found[alias]
    if told := differences(expected, found, "missing", "not in the model"):
        raise UnfittingWeightsError(
            f"the weights do not fit the {type(model).__name__} that the folder's config.json describes: {told}. Put "
            f"the config.json that fits into the folder."
        )
    return {name: found[name] for name in expected}


def _put_together(weights: Mapping[str, StoredTensor], model: "PreTrainedModel") -> Weights:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before transformers 5, names in memory and on disk are the same
        return dict(weights)
    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, list[tuple[str, str]]] = {}
    found: Weights = {}
    for name in sorted(weights, key=_natural):  # the order in which experts are stacked
        new, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            if new in found:
                raise UnfittingWeightsError(
                    f"two weights of the folder would both be called {new!r} in the {type(model).__name__}; the second "
                    f"is {name!r}. Leave one of them out."
                )
            found[new] = weights[name]
        else:
            groups.setdefault(new, []).append((name, pattern))
    for target, parts in groups.items():
        makes = _maker(by_pattern[parts[0][1]], target, parts, weights, model)
        # Run on meta tensors first, to get names and shapes without reading the weights.
        like = makes(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        for name, described in like.items():
            found[name] = StoredTensor(
                described.dtype,
                tuple(described.shape),
                # Defaults bind the loop variables now; the function runs after the loop.
                lambda makes=makes, name=name: makes(StoredTensor.read)[name].contiguous(),
            )
    return found


def _maker(
    converter: Any, target: str, parts: list[tuple[str, str]], weights: Mapping[str, StoredTensor], model: Any
) -> Callable[[Callable[[StoredTensor], torch.Tensor]], dict[str, torch.Tensor]]:
    """Return a function that fuses the parts of a weight, which it reads through its argument."""

    def make(read: Callable[[StoredTensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        own = deepcopy(converter)  # converters collect tensors, and this one is used more than once
        for name, pattern in parts:
            own.add_tensor(target, name, pattern, read(weights[name]))
        made = own.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    return make


def _natural(name: str) -> list[tuple[int, int, str]]:
    # Numbers compare as numbers, so that expert 10 follows expert 9. The tuples make them comparable with text.
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]

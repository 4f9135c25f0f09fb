"""Merging of LoRA weights into their base model, one layer at a time, with weights that the model ties."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from composer_checkpoint import IncompatibleCheckpointError
from composer_checkpoint.formats.tensor_source import are_one
from composer_checkpoint.tensors import StoredTensor, aliases_of
from composer_ckpt.folders import metadata_of
from composer_ckpt.options import ConvertOptions
from composer_ckpt.output import counted, first_few
from composer_ckpt.places import opened
from composer_ckpt.weights import Weights, cast, dtype_name, num_unequal, renamed_by
from composer_hf.adapters import base_after_init, changes_base, is_adapter_weight
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import meta_model
from composer_hf.published_weights import published_name, tied_names

_PREFIX = "model."
_TIED = "tie_word_embeddings"
Pair = tuple[str, str]


def under_each_name(base: Mapping[str, StoredTensor], model: torch.nn.Module | None) -> Weights:
    """Return weights with tied ones under each of their names, since a folder has them under one."""
    found = dict(base)
    for pair in _ties_of_model(model).items():
        own = {published_name(name): name for name in found}
        for missing, there in (pair, pair[::-1]):
            if missing not in own and there in own:
                found[f"{_PREFIX}{missing}"] = found[own[there]]
    return found


def find_ties(base: Mapping[str, StoredTensor], model: torch.nn.Module | None) -> list[Pair]:
    """Return pairs of names of one weight, tied by the model or stored once in the checkpoint."""
    own = {published_name(name): name for name in base}
    of_model = [(own[a], own[b]) for a, b in _ties_of_model(model).items() if a in own and b in own]
    # Sets of two names, since a pair may occur in both orders.
    return list({frozenset(pair): pair for pair in (*aliases_of(base).items(), *of_model)}.values())


def untied_config(
    metadata: HuggingFaceMetadata, apart: Iterable[Pair], model: torch.nn.Module | None, *, trust_remote_code: bool
) -> dict[str, Any]:
    """Return a model's configuration without ties between the given weights."""
    config: dict[str, Any] = {**metadata.config, _TIED: False}
    text = config.get("text_config")  # read by multimodal models in transformers 4
    if isinstance(text, Mapping) and text.get(_TIED):
        config["text_config"] = {**text, _TIED: False}
    if model is not None:
        # Some classes ignore the setting, so a model with the new configuration is checked.
        untied = meta_model(replace(metadata, config=config, peft_config=None), trust_remote_code=trust_remote_code)
        ties = tied_names(untied)
        for alias, kept in apart:
            one, other = published_name(alias), published_name(kept)
            if ties.get(one, one) == ties.get(other, other):
                raise IncompatibleCheckpointError(
                    f"the adapter changes one of {one!r} and {other!r}, and {type(untied).__name__} has them as one "
                    f"weight also with {_TIED}=False, so that no merged model computes the same as the adapted one. "
                    f"Write the adapter with --peft adapter."
                )
    return config


def have_same_elements(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors are equal bit by bit, read piece by piece unless they share storage."""
    is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return are_one(one, other) or (is_alike and not num_unequal(one, other))


def _ties_of_model(model: torch.nn.Module | None) -> dict[str, str]:
    return {} if model is None else tied_names(model)  # pyright: ignore[reportArgumentType]  # of transformers


_BASE = "model.base_model.model."
_ADAPTER = "default"
_TOKENS = "trainable_tokens_delta"
# Settings that keep LoRA a product added to a weight, or that only select the weights. All others are rejected.
_PLAIN_SETTINGS = frozenset(
    {
        *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "runtime_config", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern"),
        *("alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias"),
        *("modules_to_save", "trainable_token_indices", "ensure_weight_tying", "fan_in_fan_out", "target_parameters"),
        *("init_lora_weights", "eva_config", "corda_config", "lora_ga_config", "loftq_config", "layer_replication"),
        *("use_qalora", "qalora_group_size", "megatron_core"),
    }
)
_ADDABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class LayerChange:
    """The change that LoRA adds to one weight."""

    parts: Mapping[str, StoredTensor]  # LoRA weights by kind
    scaling: float  # factor of their product
    is_turned: bool  # whether the weight has the transposed shape of the product
    begin: Callable[[torch.Tensor], torch.Tensor] | None = None  # applies the adapter's initialization to the weight

    @property
    def pair(self) -> tuple[StoredTensor, StoredTensor]:
        """The right and the left factor of the product."""
        one = self.parts.get("lora_A") or self.parts.get("lora_embedding_A")
        other = self.parts.get("lora_B") or self.parts.get("lora_embedding_B")
        if one is None or other is None or len(self.parts) > 2:
            raise IncompatibleCheckpointError(
                f"the adapter has {', '.join(self.parts)} of a layer, and only a pair can be merged. Take another "
                f"checkpoint, or write the adapter with --peft adapter."
            )
        return one, other

    def added_to(self, weight: StoredTensor, name: str, unusual: str) -> StoredTensor:
        """Return the changed weight, which is computed when it is read. Errors mention `unusual` settings."""
        one, other = self.pair
        if weight.dtype not in _ADDABLE:
            raise IncompatibleCheckpointError(
                f"the adapter changes {name}, which is {weight.dtype}, and LoRA is added to weights of "
                f"{', '.join(map(dtype_name, _ADDABLE))}. Give --base-model with the model in one of these, or write "
                f"the adapter with --peft adapter."
            )
        shape = (*other.shape[:1], *one.shape[1:]) if len(one.shape) == len(other.shape) == 2 else ()
        shape = shape[::-1] if self.is_turned else shape
        if shape != weight.shape:
            raise IncompatibleCheckpointError(
                f"the adapter's target_modules have {name}, of shape {tuple(weight.shape)}, and it has a product of "
                f"shape {shape} for it{unusual}. Write the adapter with --peft adapter."
            )

        def fetch() -> torch.Tensor:
            # The same order of operations as in peft, so that the result is identical bit by bit.
            a, b = one.read(), other.read()
            is_small = a.dtype in (torch.float16, torch.bfloat16)  # which peft multiplies in float32 on a CPU
            product = (b.float() @ a.float()) if is_small else b @ a
            change = ((product.T if self.is_turned else product) * self.scaling).to(a.dtype)
            read = weight.read()
            return (read if self.begin is None else self.begin(read)).add_(change)

        # Equal keys mark tied weights: one change of one storage is again one tensor.
        keys = (weight.storage, one.storage, other.storage)
        same = None if None in keys or self.begin else ("merged", *keys, self.scaling, self.is_turned)
        return StoredTensor(weight.dtype, weight.shape, fetch, same)

    def is_same_as(self, other: "LayerChange") -> bool:
        """Return whether both changes are equal. peft ties embeddings to heads, transposed and swapped."""
        if self.scaling != other.scaling:
            return False
        ours, theirs = ([part.read() for part in change.pair] for change in (self, other))
        if self.is_turned != other.is_turned:
            theirs = [theirs[1].T, theirs[0].T]
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def has_base(weights: Iterable[str], metadata: HuggingFaceMetadata) -> bool:
    """Return whether there are base weights other than trained ones and biases, which adapters may include."""
    own = [name for name in weights if not _is_adapters(name) and not name.endswith(".bias")]
    return any(published_name(name) not in metadata.trained_beside_adapter for name in own)


def of_other_adapters(weights: Iterable[str]) -> list[str]:
    """Return the names of adapter weights that do not belong to the adapter `default`."""
    return [name for name in weights if _is_adapters(name) and not is_adapter_weight(name, _ADAPTER)]


def _is_adapters(name: str) -> bool:
    return "lora_" in name or ".modules_to_save." in name or f".{_TOKENS}" in name


def merge_adapters(
    weights: Weights, metadata: HuggingFaceMetadata, options: ConvertOptions, stack: ExitStack
) -> tuple[Weights, HuggingFaceMetadata, list[str]]:
    """Merge LoRA weights into the base model, under the names that its weights have without an adapter.

    The merged model computes the same as the adapted one. If the base ties two weights and the adapter changes one of
    them, as LoRA on an embedding does, both are returned, with a configuration that does not tie them.

    The stack keeps a base open that is not among the weights. Also returned are metadata and notes for the user.
    """
    config = metadata.peft_config or {}
    _check_adapter(config, weights)
    base, trained, metadata = _base_of(weights, metadata, options, stack)
    model = None
    if not (options.include or options.exclude):  # a selection of weights need not fit the model
        model = meta_model(replace(metadata, peft_config=None), trust_remote_code=options.trust_remote_code)
    base = under_each_name(base | trained, model)
    merged, changes = dict(base), dict[str, LayerChange]()
    for name, tensor in weights.items():
        if f".modules_to_save.{_ADAPTER}." in name:
            merged[_plain_name(name.replace(f".modules_to_save.{_ADAPTER}.", "."))] = tensor
    # Settings that may explain why an adapter does not fit its base.
    names = [name for name in ("layer_replication", "target_parameters", "use_qalora") if config.get(name)]
    unusual = f", with {', '.join(names)}" if names else ""
    for module, parts in _by_module(weights).items():
        target = f"{_plain_name(module)}.weight"
        if target not in merged:
            raise IncompatibleCheckpointError(
                f"the adapter has weights for {module!r}, which the base does not have{unusual}."
            )
        is_turned = _is_turned(config, parts, merged[target], model, target)
        is_begun = options.base_model is None or target in trained  # the adapter's initialization is already applied
        begin = None if is_begun else _begin(config, module, is_turned)
        rank, alpha = _rank_and_alpha(config, module)
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        changes[target] = LayerChange(parts, scaling, is_turned, begin)
        # Lazily, so that one layer at a time is in memory.
        merged[target] = changes[target].added_to(merged[target], target, unusual)
    ties = find_ties(base, model)
    _begin_tied(base, merged, changes, ties)
    _put_tokens(weights, base, merged, config, ties)
    return _untied(base, merged, changes, ties, metadata, options, model)


def _base_of(
    weights: Weights, metadata: HuggingFaceMetadata, options: ConvertOptions, stack: ExitStack
) -> tuple[Weights, Weights, HuggingFaceMetadata]:
    config = metadata.peft_config or {}
    own = {name: tensor for name, tensor in weights.items() if not _is_adapters(name)}
    has_biases = config.get("bias", "none") != "none"  # trained, though not listed in `trained_beside_adapter`
    trained = {
        name: tensor
        for name, tensor in own.items()
        if published_name(name) in metadata.trained_beside_adapter or (has_biases and name.endswith(".bias"))
    }
    if options.base_model is None:
        if not has_base(own, metadata):
            raise IncompatibleCheckpointError(
                f"{options.source} has only the adapter's weights. Give --base-model PATH with the model that was "
                f"adapted, or write the adapter with --peft adapter."
            )
        return renamed_by(own, _plain_name), {}, metadata
    if changes_base(config) and not any(".base_layer." in name for name in trained):
        raise IncompatibleCheckpointError(
            f"init_lora_weights={config['init_lora_weights']!r} has changed the base that the adapter was trained "
            f"with, and {options.source} does not say how. Merge a checkpoint of the whole model, without --base-model."
        )
    source = stack.enter_context(opened(options.base_model, tmp_dir=options.tmp_dir, jobs=options.jobs))
    described = metadata_of(source, replace(options, source=options.base_model))
    prefix = _PREFIX if source.format == "hf" else ""
    base = {f"{prefix}{name}": tensor for name, tensor in cast(dict(source.weights), options.output_precision).items()}
    # Training may have added tokens, so the checkpoint's tokenizer comes first.
    tokenizer = metadata.tokenizer_files or described.tokenizer_files
    described = replace(described, tokenizer_files=tokenizer, peft_config=metadata.peft_config)
    return base, renamed_by(trained, _plain_name), described


def _begin(config: Mapping[str, Any], module: str, is_turned: bool) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function that applies an initialization such as PiSSA's to a base weight, or `None` without one."""
    if str(config.get("init_lora_weights")).lower() not in ("pissa", "olora"):
        return None
    rank, alpha = _rank_and_alpha(config, module)
    own = {"r": rank, "lora_alpha": alpha, "fan_in_fan_out": is_turned, "use_rslora": bool(config.get("use_rslora"))}
    return lambda weight: base_after_init(weight, init_lora_weights=config["init_lora_weights"], **own)


def _begin_tied(base: Weights, merged: Weights, changes: Mapping[str, LayerChange], ties: Iterable[Pair]) -> None:
    """Apply the initialization of adapted weights to the weights tied to them, which share memory in training."""
    for pair in ties:
        for one, other in (pair, pair[::-1]):
            change = changes.get(one)
            if change is None or change.begin is None:
                continue
            if other in changes:
                raise IncompatibleCheckpointError(
                    f"the adapter's initialization has changed one weight twice, as {one} and as {other}. Merge a "
                    f"checkpoint of the whole model, without --base-model."
                )
            weight, begin = base[other], change.begin
            # Defaults bind the loop variables now; the function runs after the loop.
            merged[other] = StoredTensor(
                weight.dtype, weight.shape, lambda weight=weight, begin=begin: begin(weight.read()), None
            )


def _put_tokens(
    weights: Weights, base: Weights, merged: Weights, config: Mapping[str, Any], ties: Iterable[Pair]
) -> None:
    """Write the rows of `trainable_token_indices` into embeddings and heads, including tied ones."""
    indices = config.get("trainable_token_indices") or ()
    changed = set[str]()
    for name, rows in weights.items():
        if not (match := re.fullmatch(rf"(.+)\.token_adapter\.{_TOKENS}\.{_ADAPTER}", name)):
            continue
        module = _plain_name(match[1])
        own = indices
        if isinstance(indices, Mapping):  # peft uses the rows of the named layer for a layer tied to it
            own = [*(value for key, value in indices.items() if module.endswith(key)), *indices.values()][0]
        target = f"{module}.weight"
        merged[target] = _with_rows(merged[target], rows, list(own))
        changed.add(target)
    for pair in ties:
        for one, other in (pair, pair[::-1]):
            if one in changed and merged[other] is base[other]:  # unless LoRA changed the other one
                merged[other] = merged[one]


def _with_rows(weight: StoredTensor, rows: StoredTensor, indices: list[int]) -> StoredTensor:
    def fetch() -> torch.Tensor:
        return weight.read().index_copy(0, torch.tensor(indices), rows.read().to(weight.dtype))

    same = None if None in (weight.storage, rows.storage) else ("rows", weight.storage, rows.storage, *indices)
    return StoredTensor(weight.dtype, weight.shape, fetch, same)


def _untied(
    base: Weights,
    merged: Weights,
    changes: Mapping[str, LayerChange],
    ties: Iterable[Pair],
    metadata: HuggingFaceMetadata,
    options: ConvertOptions,
    model: Any,
) -> tuple[Weights, HuggingFaceMetadata, list[str]]:
    """Return the merged weights, with a configuration that unties those that are no longer equal."""

    def are_alike(alias: str, kept: str) -> bool:
        ours, other = changes.get(alias), changes.get(kept)
        if ours is None or other is None:  # unequal if LoRA adapts only one
            return ours is other and have_same_elements(merged[alias], merged[kept])
        return have_same_elements(base[alias], base[kept]) and ours.is_same_as(other)

    apart: list[Pair] = []
    for alias, kept in ties:
        is_changed = [merged[name] is not base[name] for name in (alias, kept)]
        if not any(is_changed) or are_one(merged[alias], merged[kept]):
            continue
        if all(is_changed) and are_alike(alias, kept):
            merged[alias] = merged[kept]
        else:
            apart.append((alias, kept))
    metadata = replace(metadata, peft_config=None, peft_class="")
    if not apart:
        return merged, metadata, []
    config = untied_config(metadata, apart, model, trust_remote_code=options.trust_remote_code)
    told = ", ".join(f"{published_name(alias)} and {published_name(kept)}" for alias, kept in apart)
    note = f"one weight of the base, and two with the adapter, so that tie_word_embeddings is now false: {told}"
    return merged, replace(metadata, config=config), [note]


def _check_adapter(config: Mapping[str, Any], weights: Iterable[str]) -> None:
    """Raise unless all weights belong to one adapter of plain LoRA."""
    kind = str(config.get("peft_type", "")).upper()
    others = [f"{name}={value!r}" for name, value in config.items() if value and name not in _PLAIN_SETTINGS]
    if kind != "LORA" or others:
        told = f"LoRA with {', '.join(others)}" if kind == "LORA" else kind
        raise IncompatibleCheckpointError(
            f"the adapter is {told}, and only plain LoRA is added to its base. Write it with --peft adapter, and merge "
            f"it with peft, if peft supports that."
        )
    if foreign := of_other_adapters(weights):
        raise IncompatibleCheckpointError(
            f"the checkpoint has {counted(len(foreign), 'weight')} of an adapter not called {_ADAPTER!r}, the only one "
            f"that is merged: {first_few(foreign)}. Leave them out with --exclude, or merge with peft."
        )


def _plain_name(name: str) -> str:
    name = _PREFIX + name.removeprefix(_BASE) if name.startswith(_BASE) else name
    return name.replace(".token_adapter.", ".").replace(".base_layer.", ".").replace(".original_module.", ".")


def _by_module(weights: Weights) -> dict[str, Weights]:
    pattern = re.compile(rf"(.+?)\.(lora_\w+)\.{_ADAPTER}(?:\..+)?")
    modules: dict[str, Weights] = {}
    for name, tensor in weights.items():
        if match := pattern.fullmatch(name):
            modules.setdefault(match[1], {})[match[2]] = tensor
    return modules


def _rank_and_alpha(config: Mapping[str, Any], module: str) -> tuple[Any, Any]:
    rank = _of_pattern(config.get("rank_pattern"), module, config.get("r", 8))  # 8 is peft's default of both
    return rank, _of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))


def _of_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as in peft."""
    for pattern, value in dict(patterns or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module.removeprefix(_BASE)):
            return value
    return default


def _is_turned(config: Mapping[str, Any], parts: Weights, weight: StoredTensor, model: Any, target: str) -> bool:
    """Return whether a weight is the transpose of LoRA's product, as in Conv1D and embeddings.

    peft decides by the type of the layer; `fan_in_fan_out` is one setting for layers of both types.
    """
    if "lora_embedding_A" in parts:
        return True
    name = published_name(target).removesuffix(".weight")
    layer = None if model is None else dict(model.named_modules(remove_duplicate=False)).get(name)
    if layer is not None:
        from transformers.pytorch_utils import Conv1D  # already loaded, with the model

        return isinstance(layer, Conv1D)
    # Without the model, the shapes decide, unless the weight is square.
    if len(weight.shape) == 2 and weight.shape[0] != weight.shape[1] and "lora_B" in parts:
        return parts["lora_B"].shape[0] != weight.shape[0]
    return bool(config.get("fan_in_fan_out"))

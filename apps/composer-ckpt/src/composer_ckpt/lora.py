"""Adding LoRA's weights to those that they adapt, one layer at a time."""

import argparse
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from composer_checkpoint import IncompatibleCheckpointError
from composer_checkpoint.tensors import StoredTensor
from composer_ckpt.descriptions import metadata_of
from composer_ckpt.selection import cast, renamed_by
from composer_ckpt.sizes import counted
from composer_ckpt.sources import opened
from composer_ckpt.ties import find_ties, have_same_elements, settle_ties, under_each_name, untied_config
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import meta_model
from composer_hf.published_weights import published_name

__all__ = ["has_base", "merge_adapters", "of_other_adapters"]

_BASE = "model.base_model.model."
_PREFIX = "model."
_ADAPTER = "default"
_MAX_NAMES = 5
_KINDS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_ADDABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Weights = dict[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class LayerChange:
    """What LoRA adds to one weight.

    Args:
        parts: LoRA's weights by their kinds.
        scaling: By what their product is multiplied.
        is_turned: Whether the weight has the product the other way round.
    """

    parts: Mapping[str, StoredTensor]
    scaling: float
    is_turned: bool

    @property
    def pair(self) -> tuple[StoredTensor, StoredTensor]:
        """The right and the left factor of the product.

        Raises:
            IncompatibleCheckpointError: If one of them is missing.
        """
        one = self.parts.get("lora_A") or self.parts.get("lora_embedding_A")
        other = self.parts.get("lora_B") or self.parts.get("lora_embedding_B")
        if one is None or other is None:
            raise IncompatibleCheckpointError(
                f"the adapter has only {', '.join(self.parts)} of a layer. Take another checkpoint."
            )
        return one, other

    def added_to(self, weight: StoredTensor) -> StoredTensor:
        """Return a weight with the change, made when it is read."""
        one, other = self.pair

        def fetch() -> torch.Tensor:
            # In the order in which peft does it, so that the result is the same to the last bit.
            a, b = one.read(), other.read()
            is_small = a.dtype in (torch.float16, torch.bfloat16)
            product = (b.float() @ a.float()) if is_small else b @ a
            change = ((product.T if self.is_turned else product) * self.scaling).to(a.dtype)
            return weight.read().add_(change)

        keys = (weight.storage, one.storage, other.storage)
        same = None if None in keys else ("merged", *keys, self.scaling, self.is_turned)
        return StoredTensor(weight.dtype, weight.shape, fetch, same)

    def is_same_as(self, other: "LayerChange") -> bool:
        """Say whether both add the same. peft ties an embedding's factors to those of a head, turned and swapped."""
        if self.scaling != other.scaling:
            return False
        ours, theirs = ([part.read() for part in change.pair] for change in (self, other))
        if self.is_turned != other.is_turned:
            theirs = [theirs[1].T, theirs[0].T]
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def has_base(weights: Iterable[str]) -> bool:
    """Say whether there are weights besides those of an adapter, with which biases may be trained and saved."""
    return any(not _is_adapters(name) and not name.endswith(".bias") for name in weights)


def of_other_adapters(weights: Iterable[str]) -> list[str]:
    """Return the names of an adapter's weights that are of none called `default`."""
    known = re.compile(rf".*\.(?:(?:{'|'.join(_KINDS)})\.{_ADAPTER}(?:\.weight)?|modules_to_save\.{_ADAPTER}\..+)")
    return [name for name in weights if _is_adapters(name) and not known.fullmatch(name)]


def _is_adapters(name: str) -> bool:
    return "lora_" in name or ".modules_to_save." in name


def merge_adapters(
    weights: Weights, metadata: HuggingFaceMetadata, options: argparse.Namespace, stack: ExitStack, *, is_alone: bool
) -> tuple[Weights, HuggingFaceMetadata, list[str]]:
    """Return the base's weights with LoRA's added, under the names that they have without it, and its description.

    What the merged model computes is what the adapted one does. Where the base ties two weights, and the adapter has
    changed one of them, as LoRA on an embedding does, both are returned, and a configuration that does not tie them.

    Args:
        weights: Under the names that they have in a checkpoint.
        metadata: With the adapter's configuration.
        options: Of `convert`; `base_model` says where the base is, if not among the weights.
        stack: Keeps the base open.
        is_alone: Whether the weights are of a folder of an adapter, which has none but those that were trained.

    Returns:
        Weights, description, and what the user should know.

    Raises:
        IncompatibleCheckpointError: If there is no base, or the adapter is of a kind that is not added.
    """
    config = metadata.peft_config or {}
    _check_kind(config, weights)
    _refuse_other_adapters(weights)
    base, metadata = _base_of(weights, metadata, options, stack, is_alone)
    model = None
    if not (options.include or options.exclude):  # of chosen weights, nobody looks what the model does with them
        model = meta_model(replace(metadata, peft_config=None), trust_remote_code=options.trust_remote_code)
    base = under_each_name(base, model)
    merged, changes = dict(base), dict[str, LayerChange]()
    for name, tensor in weights.items():
        if f".modules_to_save.{_ADAPTER}." in name:
            merged[_plain_name(name.replace(f".modules_to_save.{_ADAPTER}.", "."))] = tensor
    for module, parts in _by_module(weights).items():
        target = f"{_plain_name(module)}.weight"
        if target not in merged:
            raise IncompatibleCheckpointError(f"the adapter has weights for {module!r}, which the base does not have.")
        _check_base(target, merged[target])
        changes[target] = LayerChange(
            parts, _scaling(config, module), _is_turned(config, parts, merged[target], model, target)
        )
        merged[target] = changes[target].added_to(merged[target])
    return _untied(base, merged, changes, metadata, options, model)


def _base_of(
    weights: Weights, metadata: HuggingFaceMetadata, options: argparse.Namespace, stack: ExitStack, is_alone: bool
) -> tuple[Weights, HuggingFaceMetadata]:
    """Return the base's weights with those besides LoRA's that were trained as they are, and its description."""
    base = renamed_by({name: tensor for name, tensor in weights.items() if not _is_adapters(name)}, _plain_name)
    if options.base_model is not None:
        has_biases = (metadata.peft_config or {}).get("bias", "none") != "none"
        trained = {n: tensor for n, tensor in base.items() if is_alone or (has_biases and n.endswith(".bias"))}
        base, metadata = _base_at(options, metadata, stack)
        base |= trained
    if not has_base(base) or (is_alone and options.base_model is None):
        raise IncompatibleCheckpointError(
            f"{options.source} has the adapter's weights alone. Give --base-model PATH with the model that was "
            f"adapted, or write the adapter with --peft adapter."
        )
    return base, metadata


def _untied(
    base: Weights,
    merged: Weights,
    changes: Mapping[str, LayerChange],
    metadata: HuggingFaceMetadata,
    options: argparse.Namespace,
    model: Any,
) -> tuple[Weights, HuggingFaceMetadata, list[str]]:
    """Return merged weights with a configuration that keeps apart those of one weight that differ now."""

    def are_alike(alias: str, kept: str) -> bool:
        ours, other = changes.get(alias), changes.get(kept)
        if ours is None or other is None:
            return ours is other and have_same_elements(merged[alias], merged[kept])
        return have_same_elements(base[alias], base[kept]) and ours.is_same_as(other)

    apart = settle_ties(base, merged, find_ties(base, model), are_alike)
    metadata = replace(metadata, peft_config=None, peft_class="")
    if not apart:
        return merged, metadata, []
    config = untied_config(metadata, apart, model, trust_remote_code=options.trust_remote_code)
    told = ", ".join(f"{published_name(alias)} and {published_name(kept)}" for alias, kept in apart)
    note = f"one weight of the base, and two with the adapter, so that tie_word_embeddings is now false: {told}"
    return merged, replace(metadata, config=config), [note]


def _refuse_other_adapters(weights: Iterable[str]) -> None:
    if others := of_other_adapters(weights):
        raise IncompatibleCheckpointError(
            f"the checkpoint has {counted(len(others), 'weight')} of no adapter called {_ADAPTER!r}, which alone is "
            f"added: {', '.join(others[:_MAX_NAMES])}. Leave them out with --exclude, or merge with peft."
        )


def _check_kind(config: Mapping[str, Any], weights: Iterable[str]) -> None:
    kind = str(config.get("peft_type", "")).upper()
    is_dora = config.get("use_dora") or any("lora_magnitude_vector" in name for name in weights)
    if kind != "LORA" or is_dora or config.get("lora_bias"):
        told = kind if kind != "LORA" else "DoRA" if is_dora else "LoRA with biases of its own (lora_bias)"
        raise IncompatibleCheckpointError(
            f"the adapter is {told}, and only plain LoRA is added to its base. Write it "
            f"with --peft adapter, and merge it with peft."
        )


def _check_base(name: str, weight: StoredTensor) -> None:
    if weight.dtype not in _ADDABLE:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ADDABLE)
        raise IncompatibleCheckpointError(
            f"the adapter changes {name}, which is {weight.dtype}, and LoRA is added to weights of {known}. Give "
            f"--base-model with the model in one of these, or write the adapter with --peft adapter."
        )


def _base_at(
    options: argparse.Namespace, metadata: HuggingFaceMetadata, stack: ExitStack
) -> tuple[Weights, HuggingFaceMetadata]:
    source = stack.enter_context(opened(options.base_model, tmp_dir=options.tmp_dir, jobs=options.jobs))
    given = argparse.Namespace(**{**vars(options), "source": options.base_model})
    described = metadata_of(source, given)
    prefix = _PREFIX if source.format == "hf" else ""
    base = {f"{prefix}{name}": tensor for name, tensor in cast(dict(source.weights), options.output_precision).items()}
    tokenizer = metadata.tokenizer_files or described.tokenizer_files
    return base, replace(described, tokenizer_files=tokenizer, peft_config=metadata.peft_config)


def _plain_name(name: str) -> str:
    """Return a weight's name without what peft puts around it."""
    name = _PREFIX + name.removeprefix(_BASE) if name.startswith(_BASE) else name
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _by_module(weights: Weights) -> dict[str, Weights]:
    """Return LoRA's weights by the module that they adapt and by their kind."""
    pattern = re.compile(rf"(.+)\.({'|'.join(_KINDS)})\.{_ADAPTER}(?:\.weight)?")
    modules: dict[str, Weights] = {}
    for name, tensor in weights.items():
        if match := pattern.fullmatch(name):
            modules.setdefault(match[1], {})[match[2]] = tensor
    return modules


def _scaling(config: Mapping[str, Any], module: str) -> float:
    rank = _of_pattern(config.get("rank_pattern"), module, config.get("r", 8))
    alpha = _of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _of_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return the value of the first pattern that the end of a module's name fits, as peft looks it up."""
    for pattern, value in dict(patterns or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            return value
    return default


def _is_turned(config: Mapping[str, Any], parts: Weights, weight: StoredTensor, model: Any, target: str) -> bool:
    """Say whether a layer has its weight the other way round than LoRA's product, as Conv1D and embeddings have.

    peft goes by the layer, whatever `fan_in_fan_out` says, which is one setting for layers of both kinds.
    """
    if "lora_embedding_A" in parts:
        return True
    name = published_name(target).removesuffix(".weight")
    layer = None if model is None else dict(model.named_modules(remove_duplicate=False)).get(name)
    if layer is not None:
        return type(layer).__name__ == "Conv1D"
    if len(weight.shape) == 2 and weight.shape[0] != weight.shape[1] and "lora_B" in parts:
        return parts["lora_B"].shape[0] != weight.shape[0]
    return bool(config.get("fan_in_fan_out"))

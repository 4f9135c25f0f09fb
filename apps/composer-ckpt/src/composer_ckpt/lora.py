"""Adding LoRA's weights to those that they adapt, one layer at a time."""

import argparse
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from composer_checkpoint import IncompatibleCheckpointError
from composer_checkpoint.tensors import StoredTensor
from composer_ckpt.descriptions import metadata_of
from composer_ckpt.selection import cast, renamed_by
from composer_ckpt.sizes import counted
from composer_ckpt.sources import opened
from composer_hf.metadata import HuggingFaceMetadata

__all__ = ["has_base", "merge_adapters", "of_other_adapters"]

_BASE = "model.base_model.model."
_PREFIX = "model."
_ADAPTER = "default"
_MAX_NAMES = 5
_KINDS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
Weights = dict[str, StoredTensor]


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
    weights: Weights, metadata: HuggingFaceMetadata, options: argparse.Namespace, stack: ExitStack
) -> tuple[Weights, HuggingFaceMetadata]:
    """Return the base's weights with LoRA's added, under the names that they have without it, and its description.

    Args:
        weights: Under the names that they have in a checkpoint.
        metadata: With the adapter's configuration.
        options: Of `convert`; `base_model` says where the base is, if not among the weights.
        stack: Keeps the base open.

    Raises:
        IncompatibleCheckpointError: If there is no base, or the adapter is of a kind that is not added.
    """
    config = metadata.peft_config or {}
    _check_kind(config, weights)
    _refuse_other_adapters(weights)
    base = renamed_by({name: tensor for name, tensor in weights.items() if not _is_adapters(name)}, _plain_name)
    if options.base_model is not None:
        trained = {name: tensor for name, tensor in base.items() if name.endswith(".bias")}
        base, metadata = _base_at(options, metadata, stack)
        if config.get("bias", "none") != "none":  # they were trained with the adapter
            base |= trained
    if not has_base(base):
        raise IncompatibleCheckpointError(
            f"{options.source} has the adapter's weights alone. Give --base-model PATH with the model that was "
            f"adapted, or write the adapter with --peft adapter."
        )
    for name, tensor in weights.items():
        if f".modules_to_save.{_ADAPTER}." in name:
            base[_plain_name(name.replace(f".modules_to_save.{_ADAPTER}.", "."))] = tensor
    for module, parts in _by_module(weights).items():
        target = f"{_plain_name(module)}.weight"
        if target not in base:
            raise IncompatibleCheckpointError(f"the adapter has weights for {module!r}, which the base does not have.")
        before = base[target]
        merged = _merged(before, parts, _scaling(config, module), _is_turned(config, parts))
        for name, tensor in base.items():  # what is tied to a weight changes with it
            if name == target or (before.storage is not None and tensor.storage == before.storage):
                base[name] = merged
    return base, replace(metadata, peft_config=None, peft_class="")


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


def _is_turned(config: Mapping[str, Any], parts: Weights) -> bool:
    return bool(config.get("fan_in_fan_out")) or "lora_embedding_A" in parts


def _merged(weight: StoredTensor, parts: Weights, scaling: float, is_turned: bool) -> StoredTensor:
    one = parts.get("lora_A") or parts.get("lora_embedding_A")
    other = parts.get("lora_B") or parts.get("lora_embedding_B")
    if one is None or other is None:
        raise IncompatibleCheckpointError(
            f"the adapter has only {', '.join(parts)} of a layer. Take another checkpoint."
        )

    def fetch() -> torch.Tensor:
        # In the order in which peft does it, so that the result is the same to the last bit.
        a, b = one.read(), other.read()
        is_small = a.dtype in (torch.float16, torch.bfloat16)
        product = (b.float() @ a.float()) if is_small else b @ a
        change = ((product.T if is_turned else product) * scaling).to(a.dtype)
        return weight.read().add_(change)

    storage = None if weight.storage is None else (weight.storage, "merged")
    return StoredTensor(weight.dtype, weight.shape, fetch, storage)

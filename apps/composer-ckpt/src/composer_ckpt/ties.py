"""Tied weights: lookup, merging with an adapter, and untying."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from composer_checkpoint import IncompatibleCheckpointError
from composer_checkpoint.formats.tensor_source import are_one
from composer_checkpoint.tensors import StoredTensor, aliases_of
from composer_ckpt.dtypes import blocks_of
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import meta_model
from composer_hf.published_weights import published_name, tied_names

_PREFIX = "model."
_TIED = "tie_word_embeddings"
Pair = tuple[str, str]
Weights = dict[str, StoredTensor]


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


def settle_ties(
    before: Mapping[str, StoredTensor], merged: Weights, pairs: Iterable[Pair], are_alike: Callable[[str, str], bool]
) -> list[Pair]:
    """Return the pairs that an adapter has made different, and share, in place, the tensor of those changed equally."""
    apart: list[Pair] = []
    for alias, kept in pairs:
        is_changed = [merged[name] is not before[name] for name in (alias, kept)]
        if not any(is_changed) or are_one(merged[alias], merged[kept]):
            continue
        if all(is_changed) and are_alike(alias, kept):
            merged[alias] = merged[kept]
        else:
            apart.append((alias, kept))
    return apart


def untied_config(
    metadata: HuggingFaceMetadata, apart: Iterable[Pair], model: torch.nn.Module | None, *, trust_remote_code: bool
) -> dict[str, Any]:
    """Return a model's configuration without ties between the given weights.

    Raises:
        IncompatibleCheckpointError: If the model ties them regardless of its configuration.
    """
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
    if are_one(one, other):
        return True
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    # As bytes, since NaN is not equal to itself.
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in blocks_of(one, other))


def _ties_of_model(model: torch.nn.Module | None) -> dict[str, str]:
    return {} if model is None else tied_names(model)  # pyright: ignore[reportArgumentType]  # of transformers

"""Conversion of a Hugging Face folder's weights to their names in memory.

For most models both are the same. Transformers 5 fuses some weights in memory, such as the experts of a mixture, and
defines the conversion for each model.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from composer_checkpoint import UnfittingWeightsError
from composer_checkpoint.tensors import StoredTensor
from composer_ckpt.output import first_few
from composer_hf.published_weights import tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = dict[str, StoredTensor]


def in_memory_weights(weights: Mapping[str, StoredTensor], model: "PreTrainedModel") -> Weights:
    """Return a folder's weights as in the model's state dict, with tied weights under all of their names."""
    expected = model.state_dict()
    found = _put_together(weights, model) if weights.keys() - expected.keys() else dict(weights)
    for alias, kept in tied_names(model).items():
        if kept in found:
            found.setdefault(alias, found[kept])
        elif alias in found:
            found[kept] = found[alias]
    missing = [name for name in expected if name not in found]
    surplus = [name for name in found if name not in expected]
    other = [name for name in found if name in expected and found[name].shape != tuple(expected[name].shape)]
    lists = (("missing", missing), ("not in the model", surplus), ("of another shape", other))
    if told := [f"{len(names)} {what}: {first_few(names, 8)}" for what, names in lists if names]:
        raise UnfittingWeightsError(
            f"the weights do not fit the {type(model).__name__} that the folder's config.json describes: "
            f"{'; '.join(told)}. Put the config.json that fits into the folder."
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

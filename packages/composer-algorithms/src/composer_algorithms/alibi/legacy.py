"""The call of older releases, which named the modules and functions to replace."""

import types
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from torch.optim import Optimizer

from composer_algorithms._legacy import warn_deprecated
from composer_algorithms.alibi.bias import register_alibi
from composer_algorithms.alibi.embeddings import zero_and_freeze_expand_position_embeddings
from composer_algorithms.module_surgery import replace_module_classes

LEGACY_ARGUMENTS = (
    "heads_per_layer",
    "position_embedding_attribute",
    "attention_module",
    "attr_to_replace",
    "alibi_attention",
    "mask_replacement_function",
)


def check_legacy_arguments(
    owner: str, names: Sequence[str], known: Sequence[str], advice: str, stacklevel: int
) -> None:
    """Refuse arguments that no release had, and warn of the others."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise TypeError(f"{owner} got an unexpected keyword argument {unknown[0]!r}.")
    if names:
        warn_deprecated(f"{owner}({'=, '.join(names)}=) {advice}", stacklevel=stacklevel)


def apply_legacy_alibi(
    model: nn.Module,
    max_sequence_length: int,
    optimizers: Optimizer | Sequence[Optimizer] | None,
    **legacy: Any,
) -> bool:
    """Apply ALiBi as older releases did; false if the model has no such attribute, and is to be changed as others are.

    Raises:
        TypeError: If an argument is unknown.
    """
    attribute = legacy.get("attr_to_replace")
    is_used = attribute is not None and hasattr(legacy.get("attention_module"), attribute)
    advice = "are for models that policy_registry does not know" if is_used else "are not needed for this model"
    check_legacy_arguments("apply_alibi", list(legacy), LEGACY_ARGUMENTS, f"{advice}: leave them out.", stacklevel=4)
    if not is_used:
        return False
    if path := legacy.get("position_embedding_attribute"):
        owner, name = _resolve(model, path)

        def without_positions(module: nn.Module, module_index: int) -> nn.Module | None:
            if module is not owner:
                return None
            zero_and_freeze_expand_position_embeddings(module, max_sequence_length, name)
            return module

        replace_module_classes(model, {type(owner): without_positions}, optimizers, include_root=True)
    for module in model.modules():
        if isinstance(module, legacy["attention_module"]):
            _replace_attention(module, max_sequence_length, **legacy)
    return True


def _replace_attention(
    module: nn.Module,
    max_sequence_length: int,
    attr_to_replace: str,
    alibi_attention: Callable[..., Any],
    heads_per_layer: int | None = None,
    mask_replacement_function: Callable[[nn.Module, int], nn.Module] | None = None,
    **others: Any,
) -> None:
    register_alibi(module, int(heads_per_layer or module.num_heads))  # pyright: ignore[reportArgumentType]  # a number
    setattr(module, attr_to_replace, types.MethodType(alibi_attention, module))
    if mask_replacement_function is not None:
        mask_replacement_function(module, max_sequence_length)


def _resolve(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Find the module that has the last part of a path, which may begin with wrappers that are not there."""
    parts = path.split(".")
    for start in range(len(parts)):
        try:
            attrgetter(".".join(parts[start:]))(model)
        except AttributeError:
            continue
        owner = attrgetter(".".join(parts[start:-1]))(model) if len(parts) - start > 1 else model
        return owner, parts[-1]
    raise AttributeError(
        f"position_embedding_attribute={path!r} leads nowhere in this {type(model).__qualname__}, nor does any end of "
        f"it: name the nn.Embedding of the positions, such as 'transformer.wpe'."
    )

"""ALiBi as a function on a model and as an Algorithm."""

import copy
import functools
import logging
import math
import types
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._arguments import check_counts, check_interval, warn_deprecated
from composer_algorithms._method import ModelSurgery, log_no_effect, own_configs
from composer_algorithms.alibi.attention import (
    add_bias,
    attention_name,
    register_alibi,
    register_attention_functions,
    zero_and_freeze_expand_position_embeddings,
)
from composer_algorithms.module_surgery import ReplacementFunction, replace_module_classes
from composer_events import Event, Logger, State

__all__ = ["Alibi", "apply_alibi", "enlarge_mask"]

_log = logging.getLogger("composer.algorithms.alibi")


def apply_alibi(
    model: nn.Module,
    max_sequence_length: int,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    **legacy: Any,
) -> int:
    """Replace the position embeddings of a transformer with a bias on its attention scores.

    The score of two tokens is lowered by their distance times a slope, which differs between heads. The table of
    position embeddings becomes a frozen table of `max_sequence_length` zeros. Supported are GPT-2, BERT and RoBERTa of
    transformers and the modules in `policy_registry`. Other models stay unchanged, with a warning in the log. A second
    call changes only the length.

    Args:
        model: Changed in place; contains a model of transformers, or is one.
        max_sequence_length: Maximum length of the sequences in training and afterwards.
        optimizers: Existing optimizers of the model, from which the position embeddings are removed.
        **legacy: Arguments of older releases: `heads_per_layer`, `position_embedding_attribute`, `attention_module`,
            `attr_to_replace`, `alibi_attention`, `mask_replacement_function`. They are used for models whose attention
            module has the attribute to replace, and ignored otherwise.

    Returns:
        The number of changed modules.

    Raises:
        ValueError: If `max_sequence_length` is not above 0.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11))
        >>> apply_alibi(model, max_sequence_length=64)
        2
        >>> model.wpe.weight.shape, model.h[0].attn.alibi_slopes
        (torch.Size([64, 8]), tensor([0.0625, 0.0039]))

    Reference:
        Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation", ICLR
        2022, arXiv:2108.12409. Bidirectional attention, as in BERT, has the same bias by distance.
    """
    check_counts(max_sequence_length=max_sequence_length)
    if legacy and apply_legacy_alibi(model, max_sequence_length, optimizers, **legacy):
        return sum(hasattr(module, "alibi_slopes") for module in model.modules())
    # transformers is optional and slow to import. The registry is read at each call, since users may add to it.
    from composer_algorithms.alibi.attention_surgery_functions import policy_registry

    policies: dict[type[nn.Module], ReplacementFunction] = {
        key: functools.partial(function, max_sequence_length=max_sequence_length)
        for key, function in policy_registry.items()
    }
    replaced = replace_module_classes(model, policies, optimizers, include_root=True)
    if not replaced:
        known = [f"{one.__module__}.{one.__qualname__}" for one in policy_registry]
        known_text = f"Supported are {', '.join(known)}" if known else "Without transformers no class is supported"
        why = f"it has no module of a supported class. {known_text}; register others in policy_registry"
        log_no_effect(_log, "ALiBi", model, why)
        return 0
    _switch_attention(model, max_sequence_length)
    _log.info("ALiBi: %d modules were changed, for up to %d tokens.", len(replaced), max_sequence_length)
    return len(replaced)


def _switch_attention(model: nn.Module, max_sequence_length: int) -> None:
    """Select the ALiBi attention functions in the transformers models that have slopes."""
    biased = [module for module in model.modules() if hasattr(module, "alibi_slopes")]
    if not biased or find_spec("transformers") is None:
        return
    from transformers import PreTrainedModel

    register_attention_functions()
    own_configs(model)
    configs = [getattr(module, "config", None) for module in biased]
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        # RoBERTa needs more positions than max_sequence_length, so read the number from the embeddings.
        positions = [one.num_alibi_positions for one in module.modules() if hasattr(one, "num_alibi_positions")]
        if positions and hasattr(module.config, "max_position_embeddings"):
            module.config.max_position_embeddings = positions[0]
            # Saved with the configuration, so that it records the shape that the saved weights require.
            module.config.composer_alibi = {"max_sequence_length": max_sequence_length}
        # BERT's attention has a configuration since transformers 5.
        uses_config = any(module.config is config for config in configs)
        if uses_config and module._can_set_attn_implementation():
            module.set_attn_implementation(attention_name(module.config._attn_implementation))


def _attn(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    head_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention with ALiBi, as a replacement for the method `_attn` of an attention module.

    Returns:
        Output of shape `(batch, heads, queries, depth)`, and attention weights.
    """
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    scores = scores + add_bias(self.alibi_slopes, None, *scores.shape[-2:], is_causal=True)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = self.attn_dropout(torch.softmax(scores, dim=-1).to(value.dtype))
    if head_mask is not None:
        weights = weights * head_mask
    return torch.matmul(weights, value), weights


def enlarge_mask(module: nn.Module, max_sequence_length: int) -> nn.Module:
    """Enlarge the causal mask in the buffer `bias` of an attention module, if it exists.

    Args:
        module: Changed in place.
        max_sequence_length: Side of the new mask.

    Returns:
        The module.

    Example:
        >>> attention = nn.Module()
        >>> attention.register_buffer("bias", torch.ones(1, 1, 2, 2, dtype=torch.bool).tril())
        >>> enlarge_mask(attention, 4).bias.shape
        torch.Size([1, 1, 4, 4])
    """
    old = getattr(module, "bias", None)
    if isinstance(old, Tensor):
        # The only public way to find out whether a buffer is persistent.
        is_saved = "bias" in module.state_dict()
        causal = torch.ones(max_sequence_length, max_sequence_length, dtype=torch.bool, device=old.device).tril()
        module.register_buffer("bias", causal[None, None], persistent=is_saved)
    return module


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
    """Raise on unknown arguments, and warn about legacy ones."""
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
    """Apply ALiBi to a custom model as in older releases; return whether the legacy arguments describe one."""
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
    enlarge: Callable[[nn.Module, int], nn.Module] | None = legacy.get("mask_replacement_function")
    attention: Any
    for attention in model.modules():
        if isinstance(attention, legacy["attention_module"]):
            register_alibi(attention, int(legacy.get("heads_per_layer") or attention.num_heads))
            setattr(attention, str(attribute), types.MethodType(legacy["alibi_attention"], attention))
            if enlarge is not None:
                enlarge(attention, max_sequence_length)
    return True


def _resolve(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Find the owner of the last part of a path, trying shorter paths if leading parts do not exist."""
    parts = path.split(".")
    for start in range(len(parts)):
        try:
            attrgetter(".".join(parts[start:]))(model)
        except AttributeError:
            continue
        owner = attrgetter(".".join(parts[start:-1]))(model) if len(parts) - start > 1 else model
        return owner, parts[-1]
    raise AttributeError(
        f"position_embedding_attribute={path!r} does not exist in this {type(model).__qualname__}, nor does any suffix "
        f"of it: name the nn.Embedding of the positions, such as 'transformer.wpe'."
    )


_LEGACY = (*LEGACY_ARGUMENTS, "attention_module_name")


class Alibi(ModelSurgery):
    """Replace position embeddings with ALiBi on `INIT`, and train on shorter sequences.

    On `AFTER_DATALOADER` each sequence of a batch is split into `1 / train_sequence_length_scaling` shorter ones: a
    tensor of shape `(B, S)` becomes `(B / scaling, S * scaling)`. Values per example, such as class labels, are
    repeated. Evaluation uses whole sequences, and so does training if the model has no supported module. Loading a
    checkpoint of a model with ALiBi applies the algorithm.

    Args:
        max_sequence_length: Maximum length of the sequences in training and afterwards.
        train_sequence_length_scaling: Length of training sequences as a fraction of those of the dataloader.
        **legacy: Arguments of older releases, which are ignored.

    Raises:
        ValueError: If a number is not above 0; on `AFTER_DATALOADER`, if a batch cannot be split in this way.

    Example:
        >>> Alibi(max_sequence_length=1024)
        Alibi(max_sequence_length=1024,train_sequence_length_scaling=0.25)

    Reference:
        Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation", ICLR
        2022, arXiv:2108.12409.
    """

    surgery_rank = 1  # before algorithms that change the layers it replaces
    acts_on = frozenset({Event.INIT, Event.AFTER_DATALOADER})

    def __init__(self, max_sequence_length: int, train_sequence_length_scaling: float = 0.25, **legacy: Any) -> None:
        check_legacy_arguments("Alibi", list(legacy), _LEGACY, "are not used any more: leave them out.", stacklevel=3)
        check_counts(max_sequence_length=max_sequence_length)
        check_interval("(0, inf)", train_sequence_length_scaling=train_sequence_length_scaling)
        self.max_sequence_length = max_sequence_length
        self.train_sequence_length_scaling = train_sequence_length_scaling
        self._applied = False
        self._has_effect = True

    def match(self, event: Event, state: State) -> bool:
        """Return whether the event is the first INIT, or AFTER_DATALOADER."""
        # Only the first INIT: a second pass would act on a model that has ALiBi already.
        return (event == Event.INIT and not self._applied) or (event == Event.AFTER_DATALOADER and self._has_effect)

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Apply ALiBi to the model, or split the sequences of the batch."""
        if event == Event.INIT:
            self._has_effect = apply_alibi(state.model, self.max_sequence_length, state.optimizers) > 0
            self._applied = True
        elif event == Event.AFTER_DATALOADER and isinstance(state.batch, Mapping):
            state.batch = _cut(state.batch, self.train_sequence_length_scaling)

    def __repr__(self) -> str:
        return (
            f"Alibi(max_sequence_length={self.max_sequence_length},"
            f"train_sequence_length_scaling={self.train_sequence_length_scaling})"
        )


def _cut(batch: Mapping[str, Any], scaling: float) -> Mapping[str, Any]:
    if scaling == 1:
        return batch
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor) and value.ndim}
    sequences = {key: value for key, value in tensors.items() if value.ndim >= 2}
    if not sequences:
        return batch
    # Other tensors, such as attention masks of higher rank, may have other leading dims.
    old_size, old_length = sequences.get("input_ids", next(iter(sequences.values()))).shape[:2]
    size, length = round(old_size / scaling), round(old_length * scaling)
    if not (math.isclose(size, old_size / scaling) and math.isclose(length, old_length * scaling)):
        raise ValueError(
            f"a batch of {old_size} sequences of {old_length} tokens cannot be split into {old_size / scaling:g} of "
            f"{old_length * scaling:g} by train_sequence_length_scaling={scaling!r}: choose lengths that the scaling "
            f"divides."
        )
    # A copy, since the dataloader may keep its batches and yield them again.
    cut: Any = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    for key, value in tensors.items():
        if value.shape[:2] == (old_size, old_length):
            cut[key] = value.reshape(size, length, *value.shape[2:])
        elif value.ndim == 1 and len(value) == old_size and size % old_size == 0:
            cut[key] = value.repeat_interleave(size // old_size)
        else:
            raise ValueError(
                f"the batch's {key!r} of shape {tuple(value.shape)} has neither a value for each of the {old_size} "
                f"times {old_length} tokens nor one for each sequence, so it cannot be split by "
                f"train_sequence_length_scaling={scaling!r}: remove it from the batch, or use a scaling of 1."
            )
    return cut

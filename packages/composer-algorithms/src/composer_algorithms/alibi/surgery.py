"""ALiBi as a function on a model."""

import copy
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.optim import Optimizer

from composer_algorithms._numbers import check_count
from composer_algorithms.alibi.legacy import apply_legacy_alibi
from composer_algorithms.alibi.registry import AlibiReplacementFunction
from composer_algorithms.module_surgery import ReplacementFunction, replace_module_classes

__all__ = ["apply_alibi"]

_log = logging.getLogger("composer.algorithms.alibi")


def apply_alibi(
    model: nn.Module,
    max_sequence_length: int,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    **legacy: Any,
) -> None:
    """Replace the position embeddings of a transformer by a bias of its attention scores.

    The score of two tokens is lowered by their distance times a slope, which is another one for each head. The table
    of position embeddings becomes one of `max_sequence_length` zeros, which is not trained. Known are GPT-2, BERT and
    RoBERTa of transformers, and what was added to `policy_registry`. For other models nothing happens but a warning in
    the log. A second call changes the length only.

    Args:
        model: Changed in place; it may contain a model of transformers, or be one.
        max_sequence_length: The longest sequence that the model will see, in training or afterwards.
        optimizers: Those that train the model, if they exist already: the position embeddings leave them.
        **legacy: Arguments of older releases: `heads_per_layer`, `position_embedding_attribute`, `attention_module`,
            `attr_to_replace`, `alibi_attention`, `mask_replacement_function`. They are used for models whose attention
            module has the attribute to replace, and otherwise ignored.

    Raises:
        ValueError: If `max_sequence_length` is not above 0.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11))
        >>> apply_alibi(model, max_sequence_length=64)
        >>> model.wpe.weight.shape, model.h[0].attn.alibi_slopes
        (torch.Size([64, 8]), tensor([0.0625, 0.0039]))

    Reference:
        Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation", ICLR
        2022, arXiv:2108.12409. Between both directions, as in BERT, the bias is that of the distance as well.
    """
    check_count("max_sequence_length", max_sequence_length, "tokens")
    if legacy and apply_legacy_alibi(model, max_sequence_length, optimizers, **legacy):
        return
    # transformers is optional and slow to import. The registry is read now: users add to it.
    from composer_algorithms.alibi.attention_surgery_functions import policy_registry

    policies = {key: _with_length(function, max_sequence_length) for key, function in policy_registry.items()}
    replaced = replace_module_classes(model, policies, optimizers, include_root=True)
    if not replaced:
        known = [f"{one.__module__}.{one.__qualname__}" for one in policy_registry]
        _log.warning(
            "ALiBi has no effect on this %s: it has no module of a supported class. %s; others can be added to "
            "policy_registry.",
            type(model).__qualname__,
            f"Those are {', '.join(known)}" if known else "Without transformers there is none",
        )
        return
    _switch_attention(model, max_sequence_length)
    _log.info("ALiBi: %d modules were changed, for up to %d tokens.", len(replaced), max_sequence_length)


def _with_length(function: AlibiReplacementFunction, max_sequence_length: int) -> ReplacementFunction:
    def policy(module: nn.Module, module_index: int, /) -> nn.Module | None:
        return function(module, module_index, max_sequence_length)

    return policy


def _switch_attention(model: nn.Module, max_sequence_length: int) -> None:
    """Let the models of transformers that have slopes look up the attention functions that use them."""
    biased = [module for module in model.modules() if hasattr(module, "alibi_slopes")]
    if not biased or find_spec("transformers") is None:
        return
    from transformers import PreTrainedModel

    from composer_algorithms.alibi.attention import attention_name, register_attention_functions

    register_attention_functions()
    _give_own_configs(model)
    configs = [getattr(module, "config", None) for module in biased]
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        positions = [one.num_alibi_positions for one in module.modules() if hasattr(one, "num_alibi_positions")]
        if positions and hasattr(module.config, "max_position_embeddings"):
            module.config.max_position_embeddings = positions[0]
            # It is saved with the configuration, so that who loads the weights can see what they need.
            module.config.composer_alibi = {"max_sequence_length": max_sequence_length}
        uses_config = any(
            module.config is config for config in configs
        )  # BERT's attention has one since transformers 5
        if uses_config and module._can_set_attn_implementation():
            module.set_attn_implementation(attention_name(module.config._attn_implementation))


def _give_own_configs(model: nn.Module) -> None:
    """Replace the configurations of transformers that a model holds by copies, among which what was one stays one.

    Others may have made a model of the same one, or make one later, and that is to have no ALiBi.
    """
    from transformers import PretrainedConfig

    copied: dict[int, Any] = {}
    for module in model.modules():
        configs = {name: held for name, held in vars(module).items() if isinstance(held, PretrainedConfig)}
        for name, config in configs.items():
            setattr(module, name, copy.deepcopy(config, copied))

"""Multi-token prediction: heads that predict tokens after the next one, as an additional loss."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._arguments import check_counts, check_interval
from composer_algorithms._method import ModelSurgery, check_initialized, count_or_warn, refuse_conflicts, report
from composer_algorithms._optimizer_surgery import as_optimizers
from composer_algorithms._tensors import add_term
from composer_algorithms.metadata import METHODS
from composer_algorithms.transformer_surgery import ForwardTensor, add_to_optimizers, output_layers
from composer_dist.wrapping import unwrap_model
from composer_events import Event, Logger, State
from composer_models.targets import IGNORED

__all__ = ["METADATA", "MultiTokenHeads", "MultiTokenPrediction", "apply_multi_token_prediction", "multi_token_loss"]

METADATA = METHODS["multi_token_prediction"]

_log = logging.getLogger("composer.algorithms.multi_token_prediction")

# Settings of transformers by which models change their logits after the output layer, other than
# final_logit_softcapping, which the heads follow.
_CHANGES = (
    *("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"),
    *("logits_soft_cap", "output_logit_soft_cap"),
)


class _Head(nn.Module):
    """Residual layer that begins as the identity, so that its logits begin as those of the next token."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[1], device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


def apply_multi_token_prediction(
    model: nn.Module, num_extra_tokens: int = 1, optimizers: Optimizer | list[Optimizer] | None = None
) -> int:
    """Add heads to a causal language model that predict the tokens after the next one, for `multi_token_loss`.

    Head `k` computes `h + silu(W h + b)` of the last hidden states `h`, with `W` and `b` of 0 at first, and the output
    layer of the model computes its logits. In training, one product computes the logits of the model and the heads; in
    evaluation, heads are not computed. Outputs of the model stay the same. A second call changes nothing.

    Supported are `ComposerGPT` and causal language models of transformers.

    Args:
        model: Changed in place: the heads are its attribute `multi_token_heads`.
        num_extra_tokens: Number of heads, 1 or more.
        optimizers: Existing optimizers of the model. Matrices and vectors of the heads join the groups of others of
            their shape or, if there are none, of the first one.

    Returns:
        The number of heads.

    Raises:
        ValueError: If `num_extra_tokens` is less than 1, the weights are on the meta device, or the model scales its
            logits after its output layer, as Cohere and Granite do.

    Warns:
        NoEffectWarning: If the model is not a causal language model of such a kind.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=8, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=8))
        >>> apply_multi_token_prediction(model, num_extra_tokens=2)
        2
        >>> batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
        >>> loss = model.loss(model(batch), batch)
        >>> loss = loss + multi_token_loss(model.multi_token_heads.take_logits(), batch["labels"])

    Reference:
        Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction", ICML 2024,
        arXiv:2404.19737. There each head is a transformer layer.
    """
    check_counts(1, num_extra_tokens=num_extra_tokens)
    if (present := getattr(unwrap_model(model), "multi_token_heads", None)) is not None:
        return len(present)
    known = as_optimizers(optimizers)
    old_params: dict[str, Tensor] = dict(model.named_parameters())
    layer = next((each for each in output_layers(model) if _is_causal(each, model)), None)
    if layer is None:
        return count_or_warn("MultiTokenPrediction", model, "output layer for the next token", 0)
    cap = _own_cap(layer, model)
    weight = layer.wte.weight if hasattr(layer, "wte") else layer.weight
    check_initialized("MultiTokenPrediction", weight)
    heads = MultiTokenHeads([_Head(weight) for _ in range(num_extra_tokens)])
    if hasattr(layer, "ln_f"):  # ComposerGPT, whose output layer is a function
        layer.ln_f.register_forward_hook(partial(_append_outputs, heads))
    else:
        layer.register_forward_pre_hook(partial(_append_inputs, heads))
    layer.register_forward_hook(partial(_split, heads.kept, num_extra_tokens, cap))
    cast(Any, unwrap_model(model)).multi_token_heads = heads
    if known:
        add_to_optimizers(model, old_params, known)
    return num_extra_tokens


class MultiTokenHeads(nn.ModuleList):
    """The heads for tokens after the next one, and their logits in the present forward pass."""

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__(heads)
        self.kept = ForwardTensor()

    def take_logits(self) -> Tensor:
        """Return the logits of the last forward pass in training, shape `(heads * batch, tokens, vocabulary)`, once.

        Raises:
            RuntimeError: If there has been no such pass since the last call.
        """
        logits, self.kept.value = self.kept.value, None
        if logits is None:
            raise RuntimeError(
                "multi_token_heads have no logits: the model has not called its output layer in training mode since "
                "they were last taken. Turn off losses that replace the output layer, such as fused ones."
            )
        return logits


def multi_token_loss(logits: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Compute the cross entropy of each head `k` and the token `k + 1` places ahead.

    The sum over heads and tokens is divided by the number of next-token targets, as is the loss of the next token.
    Means over microbatches or ranks that are weighted by this number are therefore the mean over the whole batch.

    Args:
        logits: Shape `(heads * batch, tokens, vocabulary)`, first those of `k = 1`. Computed in float32 at least.
        labels: Token ids, shape `(batch, tokens)`, not shifted. -100 is ignored.
        position_ids: The shape of `labels`. Tokens of a packed document are not predicted from another document.

    Returns:
        A scalar. A head without any token to predict adds 0.

    Reference:
        See `apply_multi_token_prediction`. Equation (2) of the paper is the sum over tokens and heads.
    """
    losses: list[Tensor] = []
    for ahead, own in enumerate(logits.split(labels.shape[0]), 2):
        targets = labels[:, ahead:]
        if position_ids is not None:
            targets = targets.where(position_ids[:, ahead:] - position_ids[:, :-ahead] == ahead, IGNORED)
        targets = F.pad(targets, (0, min(ahead, labels.shape[1])), value=IGNORED)
        own = own.to(torch.promote_types(own.dtype, torch.float32)).flatten(0, 1)
        losses.append(F.cross_entropy(own, targets.flatten(), ignore_index=IGNORED, reduction="sum"))
    return torch.stack(losses).sum() / (labels[:, 1:] != IGNORED).sum().clamp(min=1)


@dataclass(repr=False, eq=False)
class MultiTokenPrediction(ModelSurgery):
    """Train a causal language model to also predict the tokens after the next one.

    On `INIT` it applies `apply_multi_token_prediction` to `state.model` and `state.optimizers`, after algorithms that
    replace layers. On `BEFORE_BACKWARD` it adds `coefficient * multi_token_loss(...)` of the `labels` in the batch to
    `state.loss`, divided by the number of next-token targets of the microbatch. Loading a checkpoint of the changed
    model applies it. Hugging Face folders and exported models do not contain the heads.

    Args:
        num_extra_tokens: Number of heads, 1 or more.
        coefficient: 0 or more. The paper counts the losses of all tokens equally, as 1 does.

    Raises:
        ValueError: If an argument is out of range; on `INIT`, if there is another one; in training, if the
            batch has no `labels`.

    Example:
        >>> MultiTokenPrediction()
        MultiTokenPrediction(num_extra_tokens=1, coefficient=1.0)

    Reference:
        See `apply_multi_token_prediction`.
    """

    acts_on = frozenset({Event.INIT, Event.BEFORE_BACKWARD})
    surgery_rank = 6  # after changes of the output layer, such as LogitSoftcap, which then apply to the heads as well
    runs_after = frozenset({"MixUp", "CutMix"})  # they replace the loss
    conflicts_with = MappingProxyType(
        {"MultiTokenPrediction": "The model has one set of heads. Use one, with num_extra_tokens=... for more heads."}
    )
    schedulable = ("coefficient",)

    num_extra_tokens: int = 1
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        check_counts(1, num_extra_tokens=self.num_extra_tokens)
        check_interval("[0, inf)", coefficient=self.coefficient)

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Add the heads, or the loss of their predictions."""
        heads = getattr(unwrap_model(state.model), "multi_token_heads", None)
        if event == Event.INIT:
            refuse_conflicts(self, state)
            count = apply_multi_token_prediction(state.model, self.num_extra_tokens, state.optimizers)
            report(_log, logger, {"multi_token_prediction/num_heads": count})
        elif heads is not None:
            labels = state.batch.get("labels") if isinstance(state.batch, Mapping) else None
            if labels is None:
                raise ValueError("MultiTokenPrediction needs 'labels' in the batch, the ids of the tokens. Add them.")
            term = self.coefficient * multi_token_loss(heads.take_logits(), labels, state.batch.get("position_ids"))
            state.loss = add_term(state.loss, "multi_token_loss", term)


def _is_causal(layer: Any, model: nn.Module) -> bool:
    return hasattr(layer, "ln_f") or any(
        owner.can_generate() and not owner.config.is_encoder_decoder for owner in _owners(layer, model)
    )


def _owners(layer: Any, model: nn.Module) -> list[Any]:
    """Return the models of transformers with this output layer."""
    models: list[Any] = [each for each in unwrap_model(model).modules() if hasattr(each, "can_generate")]
    return [each for each in models if each.get_output_embeddings() is layer]


def _own_cap(layer: Any, model: nn.Module) -> float | None:
    """Return the cap of the logits that a model of transformers applies after its output layer."""
    caps = [None]
    for owner in _owners(layer, model):
        config = owner.config.get_text_config()
        if changed := [name for name in _CHANGES if getattr(config, name, None) not in (None, 1)]:
            raise ValueError(
                f"{type(owner).__qualname__} changes its logits after its output layer "
                f"({changed[0]}={getattr(config, changed[0])!r} in its configuration), which MultiTokenPrediction does "
                f"not support. Leave MultiTokenPrediction out."
            )
        caps.append(getattr(config, "final_logit_softcapping", None))
    return caps[-1]


# Functions of the module, so that models with them can be copied and pickled. The hidden states of the heads extend the
# batch, so that the model, in one product, treats their logits as its own, and DDP and FSDP see the heads being used.
def _append_outputs(heads: nn.ModuleList, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return torch.cat([output, *(head(output) for head in heads)]) if module.training else output


def _append_inputs(heads: nn.ModuleList, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (_append_outputs(heads, module, (), arguments[0]), *arguments[1:])


def _split(
    kept: ForwardTensor, num_heads: int, cap: float | None, module: nn.Module, arguments: Any, output: Tensor
) -> Tensor:
    if not module.training:
        return output
    size = output.shape[0] // (num_heads + 1)
    # One split joins both gradients in one pass; unlike `split`, it lets models change their logits in place.
    own, of_heads = output.unsafe_split_with_sizes([size, num_heads * size])
    kept.value = of_heads if cap is None else torch.tanh(of_heads / cap) * cap
    return own

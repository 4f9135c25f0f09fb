"""Fused cross entropy: train language models without the logits of all tokens in memory."""

import inspect
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_algorithms._arguments import check_interval
from composer_algorithms._method import Method, count_or_warn, refuse_conflicts, report
from composer_algorithms.metadata import METHODS
from composer_dist.wrapping import unwrap_model
from composer_events import Event, Logger, NoEffectWarning, State
from composer_models.targets import IGNORED

__all__ = ["METADATA", "FusedCrossEntropy", "apply_fused_cross_entropy"]

METADATA = METHODS["fused_cross_entropy"]

_log = logging.getLogger("composer.algorithms.fused_cross_entropy")

_NO_LOGITS = "It needs logits, which FusedCrossEntropy does not compute in training."


def apply_fused_cross_entropy(
    model: nn.Module, label_smoothing: float = 0.0, kernel: Literal["torch", "liger"] = "torch"
) -> int:
    """Compute the loss of a language model in training without the logits of all tokens in memory.

    The output layer computes the loss from hidden states and labels, with `composer_models.linear_cross_entropy`. The
    outputs of the model have `TokenLosses` in place of logits. Without labels, and in evaluation, they have logits.

    Supported are `ComposerGPT` and causal and masked language models of transformers. A second call only changes
    the other arguments.

    Args:
        model: Changed in place.
        label_smoothing: As in `torch.nn.functional.cross_entropy`, in [0, 1].
        kernel: `'torch'`, or on GPUs `'liger'`; see `composer_models.linear_cross_entropy`.

    Returns:
        The number of output layers.

    Raises:
        MissingConditionalImportError: If `kernel` is `'liger'` and liger-kernel is not installed.
        ValueError: If `label_smoothing` is out of range or cannot be combined with `kernel`, the output layer is not
            `nn.Linear`, or the model adds other terms to its loss.

    Warns:
        NoEffectWarning: If the model is of another kind.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=8, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=8))
        >>> apply_fused_cross_entropy(model)
        1
        >>> ids = torch.arange(8)[None]
        >>> type(model({"input_ids": ids, "labels": ids})).__name__
        'TokenLosses'

    Reference:
        Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, arXiv:2411.09009.
    """
    from composer_models.gpt import GPT  # loads the metrics
    from composer_models.token_losses import check_kernel, linear_cross_entropy

    check_interval("[0, 1]", label_smoothing=label_smoothing)
    check_kernel(kernel, label_smoothing)
    count = 0
    for module in unwrap_model(model).modules():
        if isinstance(module, GPT):
            module.token_losses = partial(linear_cross_entropy, label_smoothing=label_smoothing, kernel=kernel)
            count += 1
        elif (shifts := _shifts_labels(module)) is not None:
            head = _fuse_head(module, label_smoothing, kernel)
            if not hasattr(module, "_has_fused_loss"):
                module.register_forward_pre_hook(partial(_take_labels, head, shifts), with_kwargs=True)
                module.register_forward_hook(partial(_add_loss, head))
                vars(module)["_has_fused_loss"] = True
            count += 1
    return count_or_warn("FusedCrossEntropy", model, "output layer of a language model of a supported kind", count)


@dataclass(repr=False, eq=False)
class FusedCrossEntropy(Method):
    """Compute the loss of a language model in training without the logits of all tokens in memory.

    On `INIT` it applies `apply_fused_cross_entropy` to `state.model`, after algorithms that replace layers. On
    `FIT_START` it validates that the metrics of training can be computed without logits. Weights and checkpoints do not
    change. `LogitSoftcap` and `ZLoss` work as with logits.

    Args:
        label_smoothing: As in `torch.nn.functional.cross_entropy`, in [0, 1]. `LabelSmoothing` needs logits.
        kernel: `'torch'`, or on GPUs `'liger'` for the Triton kernel of liger-kernel, which the extra `liger` provides.

    Raises:
        MissingConditionalImportError: If `kernel` is `'liger'` and liger-kernel is not installed.
        ValueError: If `label_smoothing` is out of range or cannot be combined with `kernel`; on INIT, if
            `LabelSmoothing` or `MultiTokenPrediction` is there too, and see `apply_fused_cross_entropy`; on FIT_START,
            if a metric of training needs logits; in the first batch, if `kernel` does not run on the device.

    Example:
        >>> FusedCrossEntropy()
        FusedCrossEntropy(label_smoothing=0.0, kernel='torch')

    Reference:
        See `apply_fused_cross_entropy`.
    """

    acts_on = frozenset({Event.INIT, Event.FIT_START})
    surgery_rank = 6  # after the algorithms that replace layers
    conflicts_with = MappingProxyType(
        {
            "LabelSmoothing": f"{_NO_LOGITS} Use FusedCrossEntropy(label_smoothing=...) in its place.",
            "MultiTokenPrediction": f"{_NO_LOGITS} Leave one of them out.",
        }
    )

    label_smoothing: float = 0.0
    kernel: Literal["torch", "liger"] = "torch"

    def __post_init__(self) -> None:
        from composer_models.token_losses import check_kernel  # loads torch.distributed.tensor

        check_interval("[0, 1]", label_smoothing=self.label_smoothing)
        check_kernel(self.kernel, self.label_smoothing)

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Change the model and log the number of output layers, or validate the metrics of training."""
        refuse_conflicts(self, state)  # on FIT_START as well, since a checkpoint may bring algorithms
        if event == Event.INIT:
            count = apply_fused_cross_entropy(state.model, self.label_smoothing, self.kernel)
            report(_log, logger, {"fused_cross_entropy/num_output_layers": count})
            return
        metrics: Mapping[str, Any] = state.train_metrics or {}
        if unfit := [name for name, metric in metrics.items() if not getattr(metric, "accepts_token_losses", False)]:
            raise ValueError(
                f"the metrics {', '.join(unfit)} of training need logits, which FusedCrossEntropy does not compute in "
                f"training. Compute them in evaluations only, or use LanguageCrossEntropy, LanguagePerplexity and "
                f"MaskedAccuracy."
            )


class _FusedLinear(nn.Linear):
    """Output layer that returns the statistics of losses while there are targets."""

    label_smoothing = 0.0
    kernel: Literal["torch", "liger"] = "torch"
    own_cap: float | None = None  # cap of the logits that the model applies after this layer
    logit_softcap: float | None = None
    targets: Tensor | None = None
    num_items: Any = None
    statistics: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        from composer_models.token_losses import token_statistics  # loads torch.distributed.tensor

        if self.targets is None:
            return super().forward(input)
        if self.own_cap and self.logit_softcap:
            raise ValueError(
                f"the model caps its logits (final_logit_softcapping={self.own_cap!r}), and LogitSoftcap does it "
                f"again, which FusedCrossEntropy does not support. Leave LogitSoftcap out."
            )
        cap = self.own_cap or self.logit_softcap
        self.statistics = token_statistics(input, self.weight, self.targets, self.bias, softcap=cap, kernel=self.kernel)
        if isinstance(self.weight, DTensor):  # hooks of tensor parallelism expect one
            return DTensor.from_local(self.statistics, self.weight.device_mesh)
        return self.statistics


def find_label_shift(model: nn.Module) -> bool | None:
    """Return whether the loss of a language model is that of the next token; `None` for models of another kind."""
    from composer_models.gpt import GPT  # loads the metrics

    for module in model.modules():
        if isinstance(module, GPT):
            return True
        if (shifts := _shifts_labels(module)) is not None:
            return shifts
    return None


def _shifts_labels(module: nn.Module) -> bool | None:
    """Return whether the loss of a language model of transformers is that of the next token; `None` for others."""
    config: Any = getattr(module, "config", None)
    # Encoder-decoder models make inputs of labels, and multimodal models choose tokens for the loss.
    if not hasattr(module, "get_output_embeddings") or hasattr(config, "text_config") or config.is_encoder_decoder:
        return None
    from transformers.models.auto import modeling_auto  # loaded already, since this is a model of transformers

    def is_among(names: Mapping[Any, Any]) -> bool:
        known = {name for each in names.values() for name in ([each] if isinstance(each, str) else each)}
        return any(one.__name__ in known and one.__module__.startswith("transformers.") for one in type(module).__mro__)

    if not is_among(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return False if is_among(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) else None
    # Models that compute the loss themselves, such as BartForCausalLM, do not shift the labels.
    return "loss_function" in inspect.unwrap(type(module).forward).__code__.co_names


def _fuse_head(model: Any, label_smoothing: float, kernel: str) -> _FusedLinear:
    config = model.config
    head = model.get_output_embeddings()
    name = type(model).__qualname__
    if not isinstance(head, nn.Linear) or type(head).forward not in (nn.Linear.forward, _FusedLinear.forward):
        raise ValueError(
            f"FusedCrossEntropy needs an output layer that is nn.Linear, and that of {name} is a "
            f"{type(head).__qualname__}, whose output is not only a product with weights. Leave FusedCrossEntropy out, "
            f"or leave the output layer as it is."
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"FusedCrossEntropy computes the whole loss, and {name} adds a term for its experts with "
            f"output_router_logits=True. Set it to False, or leave FusedCrossEntropy out."
        )
    # In place, since hooks, sharding and tied weights refer to the layer.
    head.__class__ = _FusedLinear
    fused: Any = head
    fused.label_smoothing, fused.kernel = label_smoothing, kernel
    fused.own_cap = getattr(config, "final_logit_softcapping", None)
    return fused


# Functions of the module, so that models with them can be copied and pickled.
def _take_labels(head: _FusedLinear, shifts: bool, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
    """Give the labels to the output layer in place of the model."""
    head.targets = head.statistics = None
    labels = keywords.get("labels")
    if not module.training:
        return None
    if labels is None:
        warnings.warn(
            f"FusedCrossEntropy has no effect, because this {type(module).__qualname__} is called in training without "
            f"labels. Call it with labels=..., as HuggingFaceModel does.",
            NoEffectWarning,
            stacklevel=2,
        )
        return None
    head.targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED) if shifts else labels
    head.num_items = keywords.get("num_items_in_batch")
    return arguments, {name: value for name, value in keywords.items() if name not in ("labels", "num_items_in_batch")}


def _add_loss(head: _FusedLinear, module: nn.Module, arguments: Any, output: Any) -> Any:
    """Put the loss into the outputs of the model, and the losses of tokens in place of logits."""
    from composer_models.token_losses import reduce_statistics

    if head.targets is None:
        return None
    targets, statistics, head.targets, head.statistics = head.targets, head.statistics, None, None
    is_mapping = isinstance(output, Mapping)
    logits = output["logits"] if is_mapping else output[0]
    # Hooks of tensor parallelism convert the outputs of a sharded layer.
    if statistics is None or not (logits is statistics or head.own_cap or isinstance(head.weight, DTensor)):
        raise ValueError(
            f"{type(module).__qualname__} changes its logits after its output layer, for example by a factor in its "
            f"configuration, which FusedCrossEntropy does not support. Leave FusedCrossEntropy out."
        )
    losses = reduce_statistics(statistics, targets, label_smoothing=head.label_smoothing)
    if head.num_items is not None:
        loss = losses.loss * (targets != IGNORED).sum() / torch.as_tensor(head.num_items, device=losses.loss.device)
        losses = losses._replace(loss=loss)
    if not is_mapping:
        return losses.loss, losses, *output[1:]
    return type(output)(**{**output, "loss": losses.loss, "logits": losses})

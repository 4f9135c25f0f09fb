"""Gradient clipping: bound the gradients by their norm, by value, or by the norms of the weights they belong to."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from composer_algorithms._arguments import check_choice, check_interval, warn_deprecated
from composer_algorithms._maximal_batch import clip_norm, clip_to_weights, clip_value, unit_coefficients, unit_norms
from composer_algorithms._method import Method
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import has_flat_parameters
from composer_events.event import Event

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["AGC", "GradientClipping", "apply_agc", "apply_gradient_clipping", "METADATA"]

METADATA = METHODS["gradient_clipping"]

_TYPES = ("norm", "value", "adaptive")

ClippingType = Literal["norm", "value", "adaptive"]


def apply_gradient_clipping(
    model: nn.Module | Iterable[Tensor],
    clipping_type: ClippingType | str,
    clipping_threshold: float,
    fsdp_enabled: bool = False,
    *,
    eps: float = 0.0,
) -> None:
    """Clip the gradients of a model, in place.

    - `'norm'`: all gradients are scaled by one factor, so that their joint Euclidean norm is at most the threshold.
    - `'value'`: each element is clamped to `[-threshold, threshold]`.
    - `'adaptive'`: the gradient of each unit (a row of the weights; a vector is one unit) is scaled so that its norm is
      at most `threshold` times the norm of the unit's weights.

    Gradients may be sharded by `fully_shard` or tensor parallelism; norms are then those of the whole gradient, and
    every rank must call this. Parameters without a gradient are skipped.

    Args:
        model: The model, or its parameters.
        clipping_type: `'norm'`, `'value'` or `'adaptive'`.
        clipping_threshold: Threshold, 0 or more.
        fsdp_enabled: Whether FSDP1 (`FullyShardedDataParallel`) shards the model.
        eps: Minimum assumed for the norms of weights with `'adaptive'`. With 0, weights that are all zero never move;
            the paper uses 1e-3.

    Raises:
        ValueError: If the type is unknown, the threshold is negative or not a number, or the type is `'adaptive'` for a
            model sharded by FSDP1.

    Example:
        >>> import torch
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> apply_gradient_clipping([weight], "norm", 1.0)
        >>> weight.grad
        tensor([0.6000, 0.8000])

    Reference:
        Norm: Pascanu et al., 2012, arXiv:1211.5063. Adaptive: Brock et al., "High-Performance Large-Scale Image
        Recognition Without Normalization", ICML 2021, arXiv:2102.06171, eq. (3).
    """
    _check(clipping_type, clipping_threshold, eps)
    parameters: Iterable[Tensor]
    if callable(method := getattr(model, "parameters", None)):
        parameters = cast("Iterable[Tensor]", method())
    else:
        parameters = cast("Iterable[Tensor]", model)
        if not isinstance(model, Iterable):
            raise TypeError(f"model={model!r} has no parameters: pass a model, or its parameters.")
    if clipping_type == "value":
        clip_value(parameters, clipping_threshold)  # elementwise, so sharding does not matter
    elif fsdp_enabled:
        _clip_under_fsdp1(cast("nn.Module", model), clipping_type, clipping_threshold)
    elif clipping_type == "norm":
        clip_norm(parameters, clipping_threshold)
    else:
        _apply_agc(parameters, clipping_threshold=clipping_threshold, **({"eps": eps} if eps else {}))


# Names and arguments of the next three functions are Composer's: users' tests call the last two, and patch the first.
def _apply_agc(parameters: Iterable[Tensor], clipping_threshold: float, eps: float = 0.0) -> None:
    """Clip each unit of the gradients relative to its weights, in place."""
    clip_to_weights(parameters, clipping_threshold, eps)


@torch.no_grad()
def _get_clipped_gradient_coeff(weights: Tensor, grad: Tensor, clipping_threshold: float = 0.01) -> Tensor:
    """Return the factor for each unit of a gradient."""
    return unit_coefficients(weights, grad, clipping_threshold, eps=0.0)


@torch.no_grad()
def _unitwise_norm(tensor: Tensor) -> Tensor:
    """Return the norm of each unit of weights or of a gradient."""
    return unit_norms(tensor)


def apply_agc(model: nn.Module | Iterable[Tensor], clipping_threshold: float = 0.01) -> None:
    """Clip adaptively, under the name of this method in Composer 0.7.

    Args:
        model: The model, or its parameters.
        clipping_threshold: As for `apply_gradient_clipping(model, "adaptive", clipping_threshold)`.
    """
    warn_deprecated(
        f"apply_agc is now a kind of gradient clipping: write apply_gradient_clipping(model, 'adaptive', "
        f"{clipping_threshold!r}).",
        stacklevel=2,
    )
    apply_gradient_clipping(model, "adaptive", clipping_threshold)


class GradientClipping(Method):
    """Clip the gradients of each step.

    On `AFTER_TRAIN_BATCH`, when the gradients of all microbatches are complete and unscaled, it calls
    `apply_gradient_clipping`. If an optimizer evaluates a batch twice, as SAM does, it clips both times. Under
    DeepSpeed it does nothing: the engine clips inside its step, as configured.

    Attributes:
        clip_grad_norm: Implementation of `'norm'`. A loop that distributes its model in a custom way assigns its own,
            `strategy.clip_grad_norm`: a function of the parameters and the threshold.

    Args:
        clipping_type: `'norm'`, `'value'` or `'adaptive'`.
        clipping_threshold: Threshold, 0 or more.
        eps: See `apply_gradient_clipping`.

    Raises:
        ValueError: If the type is unknown, or the threshold is negative or not a number.

    Example:
        >>> GradientClipping("norm", 1.0)
        GradientClipping(clipping_type='norm', clipping_threshold=1.0)

    Reference:
        See `apply_gradient_clipping`.
    """

    acts_on = frozenset({Event.INIT, Event.AFTER_TRAIN_BATCH})

    def __init__(self, clipping_type: ClippingType | str, clipping_threshold: float, *, eps: float = 0.0) -> None:
        _check(clipping_type, clipping_threshold, eps)
        self.clipping_type = clipping_type
        self.clipping_threshold = clipping_threshold
        self.eps = eps
        self.clip_grad_norm: Callable[[Iterable[Tensor], float], Any] | None = None

    def apply(self, event: Event, state: "State", logger: "Logger | None") -> None:
        """Clip the gradients; on INIT, reject settings that DeepSpeed does not support."""
        if state.deepspeed_enabled:
            self._check_for_deepspeed()
        elif event != Event.AFTER_TRAIN_BATCH:
            return
        elif self.clipping_type == "norm" and self.clip_grad_norm is not None:
            self.clip_grad_norm(state.model.parameters(), self.clipping_threshold)
        else:
            apply_gradient_clipping(
                state.model,
                self.clipping_type,
                self.clipping_threshold,
                fsdp_enabled=has_flat_parameters(state.model),
                eps=self.eps,
            )

    def __repr__(self) -> str:
        eps = f", eps={self.eps!r}" if self.eps else ""
        return (
            f"GradientClipping(clipping_type={self.clipping_type!r}, clipping_threshold={self.clipping_threshold!r}"
            f"{eps})"
        )

    def _check_for_deepspeed(self) -> None:
        if self.clipping_type != "norm":
            raise NotImplementedError(
                f"clipping_type={self.clipping_type!r} cannot be used under DeepSpeed, which clips by 'norm' only: use "
                f"that, or train without DeepSpeed."
            )
        if self.clipping_threshold <= 0:
            raise ValueError(
                f"clipping_threshold={self.clipping_threshold!r} cannot be used under DeepSpeed, which takes 0 for no "
                f"clipping: pass a number above 0."
            )


def AGC(clipping_threshold: float = 0.01) -> GradientClipping:  # the name of the class in Composer 0.7
    """Create the `GradientClipping` that was a class of its own in Composer 0.7.

    Args:
        clipping_threshold: As for `GradientClipping("adaptive", clipping_threshold)`.
    """
    warn_deprecated(
        f"AGC is now a kind of gradient clipping: write GradientClipping('adaptive', {clipping_threshold!r}).",
        stacklevel=2,
    )
    return GradientClipping("adaptive", clipping_threshold)


def _clip_under_fsdp1(model: nn.Module, clipping_type: str, threshold: float) -> None:
    if clipping_type == "adaptive":
        raise ValueError(
            "clipping_type='adaptive' needs whole units of the weights, and FSDP1 keeps slices of flattened tensors: "
            "shard the model with FSDP2 (fully_shard), or clip by 'norm' or 'value'."
        )
    from torch.distributed.fsdp import FullyShardedDataParallel  # already loaded, since the model is one

    for module in model.modules():
        # Each root clips everything below it.
        if isinstance(module, FullyShardedDataParallel) and module.check_is_root():
            module.clip_grad_norm_(max_norm=threshold)


def _check(clipping_type: str, threshold: float, eps: float) -> None:
    check_choice(_TYPES, clipping_type=clipping_type)
    check_interval("[0, inf)", clipping_threshold=threshold, eps=eps)


_CHECKPOINTS = frozenset({Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT})
_EVALUATIONS_BEGIN = frozenset({Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START})
_EVALUATIONS_END = frozenset({Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END})
# BATCH_START would suffice for the forward pass. But other algorithms act on these events too, and the weights that
# they see must not depend on whether a checkpoint was just saved.
_TRAINING = frozenset(
    {
        Event.ITERATION_START,
        Event.EPOCH_START,
        Event.BEFORE_DATALOADER,
        Event.BATCH_START,
        Event.BATCH_END,
        Event.EPOCH_END,
        Event.ITERATION_END,
        Event.FIT_END,
    }
)
# Events on which the two sets may have to be exchanged.
CHANGES_OF_WEIGHTS = frozenset(
    {*_CHECKPOINTS, *_EVALUATIONS_BEGIN, *_EVALUATIONS_END, *_TRAINING, Event.EVAL_START, Event.EVAL_END}
)


class ActiveWeights:
    """Track which set of weights the model holds, and exchange the sets when an event requires the other one.

    Evaluation and checkpoints get the average, everything else the weights being trained. Between the events that
    enclose several evaluators the average stays in place, so that they cost only two exchanges in total.
    """

    def __init__(self) -> None:
        self.is_average = False
        self._among_evaluators = False

    def concerned_by(self, event: Event, state: "State") -> bool:
        """Return whether `follow` would act on this event."""
        if event in _CHECKPOINTS and not _is_save_due(event, state):
            return False
        wanted = self._wanted(event)
        return wanted is not None and wanted != self.is_average

    def follow(self, event: Event, exchange: Callable[[], None]) -> None:
        """Call `exchange` if the event requires the set of weights that the model does not hold."""
        wanted = self._wanted(event)
        if event in _EVALUATIONS_BEGIN:
            self._among_evaluators = True
        elif event in _EVALUATIONS_END or event in _TRAINING:  # a failed evaluation has no end event
            self._among_evaluators = False
        if wanted is not None and wanted != self.is_average:
            exchange()
            self.is_average = wanted

    def _wanted(self, event: Event) -> bool | None:
        if event in _CHECKPOINTS or event in _EVALUATIONS_BEGIN or event == Event.EVAL_START:
            return True
        if event in _TRAINING or event in _EVALUATIONS_END:
            return False
        if event == Event.EVAL_END and not self._among_evaluators:
            return False
        return None


def _is_save_due(event: Event, state: "State") -> bool:
    # Checkpoint callbacks are recognized by their interval: their class is in a package that this one cannot import.
    for callback in state.callbacks:
        is_due: object = getattr(callback, "is_save_due", None) or getattr(callback, "save_interval", None)
        if callable(is_due) and is_due(state, event):
            return True
    return False

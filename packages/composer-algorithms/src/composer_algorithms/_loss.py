"""The model's loss for targets other than those of the batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from composer_algorithms._tensors import require_tensor
from composer_algorithms.label_smoothing import LabelSmoothing
from composer_dist.devices import get_precision_context
from composer_events import State


def loss_for_target(state: State, target_key: Any, target: Tensor) -> Tensor:
    """Return the loss of `state.outputs` with `target` in place of the batch's target, which is restored afterwards.

    The loss is computed as the training loop computes its own: in the precision of the state, and with labels smoothed
    if `state.algorithms` smooth those under `target_key`.
    """
    outputs = require_tensor(state.outputs, "the model's output")
    loss_fn = find_loss(state.model)
    own_target = state.batch_get_item(target_key)
    # LabelSmoothing acts around the loop's own loss only, so the batch has its plain labels back by now.
    for algorithm in state.algorithms:
        if isinstance(algorithm, LabelSmoothing) and algorithm.target_key == target_key:
            target = algorithm.smooth(outputs, target)
    state.batch_set_item(target_key, target)
    try:  # the batch must get its own target back even if the loss fails
        with precision_context(state, outputs.device.type):
            return require_tensor(loss_fn(outputs, state.batch), "the model's loss")
    finally:
        state.batch_set_item(target_key, own_target)


def find_loss(model: nn.Module) -> Callable[..., Any]:
    """Return `model.loss`, or `model.module.loss` where the model is wrapped."""
    for owner in (model, getattr(model, "module", None)):
        loss = getattr(owner, "loss", None)
        if loss is None:
            continue
        if not callable(loss):
            raise TypeError(
                f"{type(owner).__qualname__}.loss is {loss!r}, which cannot be called: interpolate_loss=True needs a "
                f"method loss(outputs, batch)."
            )
        return loss
    raise AttributeError(
        f"{type(model).__qualname__} has no method loss(outputs, batch), which interpolate_loss=True calls a second "
        f"time: use a ComposerModel, or interpolate_loss=False."
    )


def precision_context(state: State, device_type: str) -> AbstractContextManager[Any]:
    """Return the autocast of the run, which the loop enters for its own passes, but not for most events."""
    if state.precision is None:  # a custom loop whose state leaves precision alone
        return nullcontext()
    return get_precision_context(state.precision, state.precision_config, device_type=device_type)

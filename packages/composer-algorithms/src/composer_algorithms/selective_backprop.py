"""Selective backprop: run the backward pass mainly for examples with a large loss."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer_algorithms._arguments import check_choice, check_counts, check_interval, takes_keyword, warn_deprecated
from composer_algorithms._draws import ResumableDraws
from composer_algorithms._loss import find_loss, precision_context
from composer_algorithms._method import Method, elapsed_fraction
from composer_algorithms._pairs import check_pairs
from composer_algorithms._tensors import UnsupportedBatchError, batch_tensor, require_tensor
from composer_algorithms.metadata import METHODS
from composer_dist.wrapping import unwrap_model
from composer_events import Event, Logger, State, batch_set
from composer_models.base import model_eval_mode

__all__ = ["SelectiveBackprop", "select_using_loss", "selective_backprop", "should_selective_backprop", "METADATA"]

METADATA = METHODS["selective_backprop"]

_INTERPOLATION = {3: "linear", 4: "bilinear", 5: "trilinear"}


def should_selective_backprop(
    current_duration: float, batch_idx: int, start: float = 0.5, end: float = 0.9, interrupt: int = 2
) -> bool:
    """Return whether examples of this batch should be dropped.

    Args:
        current_duration: Progress of training in the unit of `start` and `end`, such as a fraction or epochs.
        batch_idx: Index of the batch in its epoch, from 0.
        start: Start of the interval in which examples are dropped, inclusive.
        end: End of the interval, exclusive.
        interrupt: Keep every `interrupt`-th batch whole: 2 for every other batch, 0 for none.

    Example:
        >>> [should_selective_backprop(0.6, batch) for batch in range(4)]
        [True, False, True, False]
    """
    is_inside = start <= current_duration < end
    return is_inside and (interrupt == 0 or (batch_idx + 1) % interrupt != 0)


def select_using_loss(
    input: Tensor,
    target: Tensor,
    model: Callable[[Tensor], Any],
    loss_fun: Callable[..., Tensor],
    keep: float = 0.5,
    scale_factor: float = 1,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a subset of a batch that favors examples with a large loss.

    The example with the `r`-th smallest of `n` losses, `r` from 0, is drawn with a probability proportional to
    `((r + 0.5) / n) ** (1 / keep - 1)`, without replacement. No device synchronization is needed, because the drawn
    positions in the order of the losses do not depend on their values.

    Args:
        input: Shape `(batch, ...)`.
        target: Shape `(batch, ...)`.
        model: Function from inputs to outputs. Called once without gradients, in its current mode.
        loss_fun: Called as `loss_fun(outputs, target, reduction="none")`; several values of an example are averaged.
        keep: Fraction of the examples to draw, in (0, 1]; at least one is drawn. With 1 nothing is computed.
        scale_factor: Scale of the spatial dims of the inputs for computing the losses, in (0, 1].
        generator: CPU generator of the random numbers. PyTorch's default generator when `None`.

    Returns:
        The drawn inputs, in full size, and their targets.

    Raises:
        TypeError: If `loss_fun` is not callable or takes no `reduction`, `input` or `target` is not a tensor, or the
            inputs to scale are integers.
        ValueError: If `keep` or `scale_factor` is outside (0, 1], the inputs to scale do not have one, two or three
            spatial dims, or the loss has fewer than one value per example.

    Example:
        >>> x, y = torch.rand(8, 2), torch.tensor([0, 1] * 4)
        >>> inputs, targets = select_using_loss(x, y, nn.Linear(2, 2), F.cross_entropy, keep=0.25)
        >>> len(inputs), len(targets)
        (2, 2)

    Reference:
        Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", 2019, arXiv:1910.00762.
    """
    chosen = _choose(input, target, model, loss_fun, keep, scale_factor, generator)
    if chosen is None:
        return input, target
    return input[chosen.to(input.device)], target[chosen.to(target.device)]


def selective_backprop(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Call `select_using_loss`, of which this is a deprecated alias."""
    warn_deprecated("selective_backprop is now called select_using_loss.", stacklevel=2)
    return select_using_loss(*args, **kwargs)


@dataclass(repr=False, eq=False)
class SelectiveBackprop(ResumableDraws, Method):
    """Train on a subset of each batch that favors examples with a large loss.

    On `AFTER_DATALOADER`, while training is between `start` and `end`, the losses of the batch are computed in the
    run's precision, and `state.batch` is reduced to the examples that `select_using_loss` draws: all tensors, lists and
    tuples with one entry per example. It acts before every other algorithm, on the examples as loaded. The model must
    be a `ComposerModel` whose `loss` takes `reduction`.

    Args:
        start: Fraction of training after which examples are dropped, in [0, 1].
        end: Fraction of training until which examples are dropped, in [0, 1].
        keep: Fraction of the examples to keep, in (0, 1].
        scale_factor: See `select_using_loss`.
        interrupt: See `should_selective_backprop`.
        input_key: Index, key or `(getter, setter)` pair of the inputs in the batch.
        target_key: The same for the targets.
        score_mode: Mode of the model when computing the losses. With `'train'`, its current mode, dropout is active and
            these examples update batch norm statistics, too; `'eval'` is eval mode.

    Raises:
        ValueError: If a number is outside its range or `score_mode` is unknown.
        RuntimeError: On INIT, if the model is not a `ComposerModel`.
        TypeError: On INIT, if its loss, or the loss function passed to it, takes no `reduction`.

    Example:
        >>> SelectiveBackprop(start=0.3, keep=0.25).end
        0.9

    Reference:
        Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", 2019, arXiv:1910.00762. The paper
        compares losses with those of earlier batches too, and scores with the weights of earlier steps.
    """

    surgery_rank = 7
    # On the examples as loaded: the losses of mixed or cropped examples would not be comparable.
    runs_first = True
    computes_losses = True
    schedulable = ("keep", "scale_factor")
    acts_on = frozenset({Event.INIT, Event.AFTER_DATALOADER})

    start: float = 0.5
    end: float = 0.9
    keep: float = 0.5
    scale_factor: float = 1.0
    interrupt: int = 2
    input_key: Any = 0
    target_key: Any = 1
    _: KW_ONLY
    score_mode: Literal["train", "eval"] = "train"

    def __post_init__(self) -> None:
        check_interval("(0, 1]", keep=self.keep, scale_factor=self.scale_factor)
        check_interval("[0, 1]", start=self.start, end=self.end)
        if self.start > self.end:
            raise ValueError(
                f"start={self.start!r} is after end={self.end!r}, so no example would be dropped: swap them."
            )
        check_counts(0, interrupt=self.interrupt)
        check_choice(("train", "eval"), score_mode=self.score_mode)

    def match(self, event: Event, state: State) -> bool:
        """Return whether the event is INIT, or a batch has been loaded that is to be reduced."""
        if event == Event.INIT:
            return True
        if event != Event.AFTER_DATALOADER or self.keep >= 1:
            return False
        elapsed = elapsed_fraction(state, "SelectiveBackprop")
        batch_idx = state.timestamp.batch_in_epoch.value
        return should_selective_backprop(float(elapsed), batch_idx, self.start, self.end, self.interrupt)

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Validate the model on INIT, and drop examples on AFTER_DATALOADER."""
        if event == Event.INIT:
            from composer_models.base import ComposerModel  # loads the metrics, which select_using_loss does not need

            if not isinstance(unwrap_model(state.model), ComposerModel):
                raise RuntimeError(
                    f"SelectiveBackprop computes losses with the model's own loss, and "
                    f"{type(state.model).__qualname__} is not a ComposerModel: create one with "
                    f"ComposerModel.from_module(module, loss_fn)."
                )
            if self.keep < 1:  # otherwise the loss is never called with `reduction`
                _check_loss(_inner_loss(state.model))
            return
        to_device = state.device.tensor_to_device
        input = to_device(batch_tensor(state, self.input_key, "input_key"))
        target = to_device(batch_tensor(state, self.target_key, "target_key"))
        loss = find_loss(state.model)  # not cached, since an algorithm may have replaced the model
        _check_loss(loss)
        own_input = state.batch_get_item(self.input_key)

        def loss_of_batch(outputs: Any, target: Tensor, reduction: str) -> Any:
            return loss(outputs, self._scored_batch(state, own_input, target), reduction=reduction)

        mode = model_eval_mode(state.model) if self.score_mode == "eval" else nullcontext()
        with mode, precision_context(state, input.device.type):
            chosen = _choose(
                input,
                target,
                lambda scored: state.model(self._scored_batch(state, scored, target)),
                loss_of_batch,
                self.keep,
                self.scale_factor,
                self.next_generator(state),
            )
        if chosen is not None:
            state.batch = self._selected(state, input[chosen], target[chosen], chosen)

    def _scored_batch(self, state: State, input: Tensor, target: Tensor) -> Any:
        batch = batch_set(copy.copy(state.batch), self.input_key, input)
        return state.device.batch_to_device(batch_set(batch, self.target_key, target))

    def _selected(self, state: State, input: Tensor, target: Tensor, chosen: Tensor) -> Any:
        num_examples = len(state.batch_get_item(self.input_key))

        def has_one_each(value: Any) -> bool:
            return isinstance(value, Tensor) and value.ndim > 0 and len(value) == num_examples

        # A shallow copy, so that the batch of the dataloader is not changed.
        batch = batch_set(copy.copy(state.batch), self.input_key, input)
        batch = batch_set(batch, self.target_key, target)
        keys = list(batch) if isinstance(batch, Mapping) else range(len(batch) if isinstance(batch, Sequence) else 0)
        for key in keys:
            value = batch[key]
            if value is input or value is target:  # already reduced
                continue
            if has_one_each(value):
                batch = batch_set(batch, key, state.device.tensor_to_device(value)[chosen])
            elif type(value) in (list, tuple) and len(value) == num_examples:
                # As many tensors as examples may also be columns, each with one entry per example.
                if all(map(has_one_each, value)):
                    continue
                batch = batch_set(batch, key, type(value)(value[index] for index in chosen.tolist()))
        return batch


def _choose(
    input: Tensor,
    target: Tensor,
    model: Callable[[Tensor], Any],
    loss_fun: Callable[..., Any],
    keep: float,
    scale_factor: float,
    generator: torch.Generator | None,
) -> Tensor | None:
    """Return the indices of the examples to keep, or `None` for all."""
    check_interval("(0, 1]", keep=keep, scale_factor=scale_factor)
    _check_loss(loss_fun)
    check_pairs(input, target, None)
    if scale_factor != 1 and not (input.is_floating_point() and input.ndim in _INTERPOLATION):
        error = ValueError if input.is_floating_point() else UnsupportedBatchError
        raise error(
            f"scale_factor={scale_factor!r} needs floating point inputs with one, two or three spatial dims; got "
            f"{input.dtype} of shape {tuple(input.shape)}: pass scale_factor=1, or convert them in the dataset."
        )
    num_kept = max(1, int(keep * len(input)))
    if num_kept >= len(input):
        return None
    # Drawn before the forward pass, since a copy to the device issued after it may have to wait for it.
    # Gumbel top-k: the largest log-probabilities with Gumbel noise are a sample without replacement. The half keeps the
    # logarithm of the smallest loss finite.
    log_p = (1 / keep - 1) * ((torch.arange(len(input), dtype=torch.float64) + 0.5) / len(input)).log()
    noise = -torch.empty(len(input), dtype=torch.float64).exponential_(generator=generator).log()
    ranks = (log_p + noise).topk(num_kept).indices.to(input.device, non_blocking=True)
    with torch.no_grad():
        scored = input
        if scale_factor != 1:
            mode = _INTERPOLATION[input.ndim]
            scored = F.interpolate(input, scale_factor=scale_factor, mode=mode, align_corners=False)
        losses = require_tensor(loss_fun(model(scored), target, reduction="none"), "the loss with reduction='none'")
        if losses.ndim == 0 or len(losses) != len(input):
            raise ValueError(
                f"the loss with reduction='none' has the shape {tuple(losses.shape)}, and there are {len(input)} "
                f"examples: it must have at least one value for each of them."
            )
        losses = losses.flatten(1).mean(dim=1) if losses.ndim > 1 else losses
        return losses.argsort()[ranks.to(losses.device)]


def _check_loss(loss_fun: object) -> None:
    if callable(loss_fun):
        # Module.__call__ accepts any arguments, so look at forward.
        called = loss_fun.forward if isinstance(loss_fun, nn.Module) else loss_fun
        try:
            if takes_keyword(called, "reduction"):
                return
        except ValueError:  # written in C, without a signature
            return
    raise TypeError(
        f"loss_fun={loss_fun!r} must take a keyword argument `reduction`. Selective backprop calls it with "
        f"reduction='none' for the loss of each example: pass such a function, like torch.nn.functional.cross_entropy."
    )


def _inner_loss(model: nn.Module) -> object:
    """Return the function to which `model.loss` passes its keyword arguments."""
    from composer_models import ComposerClassifier  # loads the metrics, which select_using_loss does not need
    from composer_models.base import ModuleAdapter

    loss: Any = find_loss(model)
    for kind, name in ((ComposerClassifier, "_loss_fn"), (ModuleAdapter, "loss_fn")):
        if getattr(loss, "__func__", None) is kind.loss:
            return getattr(loss.__self__, name)
    return loss

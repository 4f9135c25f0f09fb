"""Multi-view evaluation: average predictions over mirrored and shifted images (test-time augmentation)."""

import warnings
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from composer_algorithms._arguments import check_choice, check_counts
from composer_algorithms._method import Method
from composer_algorithms._tensors import UnsupportedBatchError, batch_tensor, image_size, require_tensor
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, NoEffectWarning, State
from composer_events.batches import ensure_tuple

__all__ = ["METADATA", "MultiViewEval", "multi_view_forward"]

METADATA = METHODS["multi_view_eval"]

Average = Literal["logits", "probabilities"]

_STARTS = frozenset({Event.FIT_START, Event.EVAL_START})  # when labels are checked; `Trainer.eval` has only the second


def multi_view_forward(
    model: Callable[[Tensor], Tensor], input: Tensor, flip: bool = True, shift: int = 0, average: Average = "logits"
) -> Tensor:
    """Average the predictions for images and for changed views of them.

    The views are computed as one batch. With `flip`, mirror images have half of the weight. With `shift`, the images
    moved by that many pixels to the upper left and to the lower right have a quarter each; pixels beyond the edge are
    reflections.

    Args:
        model: Computes logits of shape `(batch, classes)`.
        input: Shape `(batch, ..., height, width)`. Not changed.
        flip: Whether to include mirror images.
        shift: Distance in pixels, less than height and width. 0 leaves shifted images out.
        average: `'logits'`, or `'probabilities'` to return the logarithm of their mean.

    Returns:
        Averaged logits, shape `(batch, classes)`.

    Raises:
        ValueError: If `shift` is negative or too large, or `average` is unknown.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
        >>> images = torch.rand(4, 3, 2, 2)
        >>> torch.equal(multi_view_forward(model, images), multi_view_forward(model, images.flip(-1)))
        True

    Reference:
        Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, arXiv:2404.00498.
    """
    check_counts(0, shift=shift)
    check_choice(("logits", "probabilities"), average=average)
    return _average(model(_make_views(input, flip, shift)), len(input), flip, shift, average)


@dataclass(repr=False, eq=False)
class MultiViewEval(Method):
    """Evaluate predictions averaged over views of each image.

    On `EVAL_BEFORE_FORWARD` the images of the microbatch are replaced by all their views; on `EVAL_AFTER_FORWARD`
    `state.outputs` become the averages as in `multi_view_forward`, and the images are restored. Metrics and callbacks
    get these outputs. Training and `Trainer.predict` are not changed. The model's output must be logits of shape
    `(batch, classes)`, computed from the images alone.

    Args:
        flip: See `multi_view_forward`.
        shift: See `multi_view_forward`.
        average: See `multi_view_forward`.
        input_key: Index, key or `(getter, setter)` pair of the images in the batch.
        evaluators: Labels of the evaluators that use views. All when empty.

    Raises:
        ValueError: If `shift` is negative or `average` is unknown.

    Example:
        >>> MultiViewEval(shift=1).average
        'logits'

    Reference:
        See `multi_view_forward`.
    """

    acts_on = frozenset({*_STARTS, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD})

    flip: bool = True
    shift: int = 0
    average: Average = "logits"
    input_key: Any = 0
    _: KW_ONLY
    evaluators: Collection[str] = ()

    def __post_init__(self) -> None:
        check_counts(0, shift=self.shift)
        check_choice(("logits", "probabilities"), average=self.average)
        self.evaluators = ensure_tuple(self.evaluators)
        self._images = torch.empty(0)
        self._has_warned = False

    def match(self, event: Event, state: State) -> bool:
        """Return whether a microbatch of a selected evaluator is evaluated, or a run begins and there are none."""
        if event in _STARTS:
            labels = {each.label for each in state.evaluators}
            return bool(labels and self.evaluators) and labels.isdisjoint(self.evaluators) and not self._has_warned
        return super().match(event, state) and (not self.evaluators or state.dataloader_label in self.evaluators)

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Replace the images by their views, or average the outputs; warn if there is no selected evaluator."""
        if event in _STARTS:
            self._has_warned = True
            warnings.warn(
                f"MultiViewEval(evaluators={self.evaluators!r}) has no effect, since the evaluators are "
                f"{', '.join(repr(each.label) for each in state.evaluators)}. Use their labels.",
                NoEffectWarning,
                stacklevel=2,
            )
            return
        if event == Event.EVAL_BEFORE_FORWARD:
            self._images = batch_tensor(state, self.input_key, "input_key")
            state.batch_set_item(self.input_key, _make_views(self._images, self.flip, self.shift))
            return
        state.batch_set_item(self.input_key, self._images)
        outputs = require_tensor(state.outputs, "the model's output")
        state.outputs = _average(outputs, len(self._images), self.flip, self.shift, self.average)
        self._images = torch.empty(0)


def _make_views(input: Tensor, flip: bool, shift: int) -> Tensor:
    """Return all views one after the other; the images count twice next to shifted ones."""
    sizes = image_size(input)
    if shift >= min(sizes):
        raise ValueError(f"shift={shift!r} must be less than the height and width of the images; got {sizes}.")
    views = [input]
    if shift:
        for sign in (-1, 1):
            lines = [_reflected(torch.arange(size, device=input.device) + sign * shift, size) for size in sizes]
            views.append(input[..., lines[0][:, None], lines[1]])
    return torch.cat([*views, *(view.flip(-1) for view in views if flip)])


def _reflected(index: Tensor, size: int) -> Tensor:
    return (size - 1) - ((size - 1) - index.abs()).abs()


def _average(outputs: Tensor, num_images: int, flip: bool, shift: int, average: Average) -> Tensor:
    of_shifts = outputs.new_tensor([0.5, 0.25, 0.25] if shift else [1.0])[:, None, None]
    if outputs.ndim != 2 or len(outputs) != (1 + flip) * len(of_shifts) * num_images:
        raise UnsupportedBatchError(
            f"MultiViewEval averages logits of shape (batch, classes), and {num_images} images and their views have "
            f"outputs of shape {tuple(outputs.shape)}. Use one MultiViewEval, and only for such models."
        )
    views, weights = outputs.unflatten(0, (1 + flip, -1, num_images)), of_shifts / (1 + flip)
    if average == "logits":
        return (weights * views).sum(dim=(0, 1))
    return (views.log_softmax(dim=-1) + weights.log()).logsumexp(dim=(0, 1))

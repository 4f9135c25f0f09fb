"""Logging of images of the training data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from composer_events.arguments import check_counts, to_time
from composer_events.callback import Callback
from composer_models.targets import infer_target_type
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["ImageVisualizer"]

_MODES: Final = ("input", "segmentation")
_UNITS: Final = (TimeUnit.BATCH, TimeUnit.EPOCH)
_TRAIN: Final = "Images/Train"
_EVAL: Final = "Images/Eval"


class ImageVisualizer(Callback):
    """Log images of the first microbatch of every interval as `Images/Train`, and of each evaluation as `Images/Eval`.

    They are copied to the CPU only if some logger accepts images.

    Args:
        interval: Interval in training: a number of batches, or a time in batches or epochs.
        mode: `'input'`, or `'segmentation'` to also log the predicted and the true masks. Their values are class
            indices. Negative targets, which losses ignore, get the number of classes as their index.
        num_images: Maximum number of images of a batch.
        channels_last: Whether channels are the last dim.
        input_key: Location of the images in the batch: an index, a key, or functions; see `State.batch_get_item`.
        target_key: Location of the targets, with `mode='segmentation'`.

    Raises:
        ValueError: If the mode is unknown or the interval has another unit; when images are logged, if a key is not in
            the batch.

    Example:
        >>> visualizer = ImageVisualizer(interval='1ep', mode='segmentation', num_images=4)
    """

    def __init__(
        self,
        interval: int | str | Time[int] = "100ba",
        mode: str = "input",
        num_images: int = 8,
        channels_last: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        check_counts(num_images=num_images)
        self.mode = mode.lower()
        if self.mode not in _MODES:
            raise ValueError(f"mode={mode!r} must be one of {', '.join(map(repr, _MODES))}.")
        self.interval = to_time("interval", interval, TimeUnit.BATCH)
        if self.interval.unit not in _UNITS or int(self.interval) < 1:
            raise ValueError(f"interval={interval!r} must be batches or epochs, 1 or more, such as '100ba' or '1ep'.")
        self.num_images = num_images
        self.channels_last = channels_last
        self.input_key = input_key
        self.target_key = target_key
        self._last_logged: int | None = None

    def before_forward(self, state: State, logger: Logger) -> None:
        """Log the inputs of training."""
        if self.mode == "input" and self._is_due(state):
            self._log_inputs(state, logger, _TRAIN)

    def before_loss(self, state: State, logger: Logger) -> None:
        """Log the inputs and masks of training."""
        if self.mode == "segmentation" and self._is_due(state):
            self._log_segmented(state, logger, _TRAIN)

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Log the inputs of an evaluation."""
        if self.mode == "input" and state.eval_timestamp.num_batches == 0:
            self._log_inputs(state, logger, _EVAL)

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Log the inputs and masks of an evaluation."""
        if self.mode == "segmentation" and state.eval_timestamp.num_batches == 0:
            self._log_segmented(state, logger, _EVAL)

    def _is_due(self, state: State) -> bool:
        now = int(state.timestamp.get(self.interval.unit))
        if now % int(self.interval) or now == self._last_logged:  # later microbatches, or batches of the epoch
            return False
        self._last_logged = now
        return True

    def _log_inputs(self, state: State, logger: Logger, name: str) -> None:
        if logger.takes("log_images"):
            images = state.batch_get_item(self.input_key)
            if _are_images(images):
                logger.log_images(self._for_log(images), name=name, channels_last=self.channels_last, use_table=True)

    def _log_segmented(self, state: State, logger: Logger, name: str) -> None:
        if not logger.takes("log_images"):
            return
        keys = self.input_key, self.target_key
        images, targets = (state.batch_get_item(key)[: self.num_images] for key in keys)
        outputs: Any = state.outputs
        outputs = torch.stack(tuple(outputs)) if isinstance(outputs, Sequence) else outputs
        predicted, true = _as_classes(outputs[: self.num_images].detach(), targets)
        if _are_images(images):
            logger.log_images(
                self._for_log(images),
                name=name,
                channels_last=self.channels_last,
                masks={"prediction": self._for_log(predicted), "ground_truth": self._for_log(true)},
                use_table=True,
            )

    def _for_log(self, tensor: Tensor) -> Any:
        tensor = tensor[: self.num_images].detach().cpu()
        return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()  # NumPy lacks bfloat16


def _are_images(value: Any) -> bool:
    # With a single number per sample, there is nothing to show.
    return isinstance(value, Tensor) and value.ndim in (3, 4) and value.numel() > value.shape[0]


def _as_classes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted and the true class of each pixel."""
    num_classes = outputs.shape[1]
    if infer_target_type(outputs, targets) == "one_hot":
        targets = targets.argmax(dim=1)
    # Losses ignore negative targets, but loggers need a valid class index to color them.
    return outputs.argmax(dim=1), torch.where(targets < 0, num_classes, targets)

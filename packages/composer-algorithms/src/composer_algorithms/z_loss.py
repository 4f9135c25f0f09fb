"""Z-loss: keep the normalizer of the softmax near 1."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_algorithms._arguments import check_interval
from composer_algorithms._method import Method
from composer_algorithms._tensors import add_term, require_tensor
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, State
from composer_models.targets import IGNORED

__all__ = ["METADATA", "ZLoss", "z_loss"]

METADATA = METHODS["z_loss"]


def z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the mean of `log(Z)^2`, where `Z` is the sum of the exponentials of the logits.

    Args:
        logits: Shape `(..., classes)`. Computed in float32 at least.
        mask: Shape `(...)`; nonzero where the logits count, such as at tokens that are not padding. All when `None`.

    Returns:
        A scalar; 0 if nothing counts.

    Example:
        >>> z_loss(torch.zeros(3, 4).log_softmax(dim=-1))  # Z is 1
        tensor(0.)

    Reference:
        Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, arXiv:2204.02311, section 5.
    """
    squares = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(dim=-1).square()
    if mask is None:
        return squares.mean()
    weights = (mask != 0).to(squares.dtype)
    return (squares * weights).sum() / weights.sum().clamp(min=1)


@dataclass(repr=False, eq=False)
class ZLoss(Method):
    """Add `coefficient * z_loss(logits)` to the loss, so that logits do not drift to large values.

    On `BEFORE_BACKWARD` it changes `state.loss`, after MixUp and CutMix. The logits are `state.outputs`, or their
    `logits` for outputs of transformers, with classes or tokens in the last dim. Logits with four dims are those of
    images, with classes in dim 1. Where the batch has `labels` for all logits, it is a mean over those whose label is
    not -100, the tokens of the loss in language models. Otherwise, an `attention_mask` of the logits' shape in the
    batch leaves out padding.

    Args:
        coefficient: 0 or more.

    Raises:
        ValueError: If `coefficient` is negative; in training, if logits with four dims have neither labels of the shape
            of an image per example nor of the shape `logits.shape[:-1]`.

    Example:
        >>> ZLoss()
        ZLoss(coefficient=0.0001)

    Reference:
        See `z_loss`.
    """

    acts_on = frozenset({Event.BEFORE_BACKWARD})
    runs_after = frozenset({"MixUp", "CutMix"})  # they replace the loss
    schedulable = ("coefficient",)

    coefficient: float = 1e-4

    def __post_init__(self) -> None:
        check_interval("[0, inf)", coefficient=self.coefficient)
        self._model: Any = None
        self._shifts: bool | None = None  # whether the loss of the model is that of the next token

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Add the term to the loss."""
        outputs: Any = state.outputs
        outputs = getattr(outputs, "logits", outputs)
        log_z = getattr(outputs, "log_z", None)  # of a loss that was computed without logits
        # The only logit of a token with the same normalizer.
        logits = require_tensor(outputs, "the model's output") if log_z is None else log_z[..., None]
        logits, mask = (
            _of_pixels(logits, state.batch) if logits.ndim == 4 else (logits, self._mask(state, logits.shape))
        )
        state.loss = add_term(state.loss, "z_loss", self.coefficient * z_loss(logits, mask))

    def _mask(self, state: State, shape: torch.Size) -> Tensor | None:
        """Return which logits count, so that microbatches and ranks have the weights of their losses."""
        batch: Any = state.batch
        if not isinstance(batch, Mapping):
            return None
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        if isinstance(labels, Tensor) and labels.shape == shape[:-1] and len(labels.shape) == 2:
            if self._model is not state.model:
                from composer_algorithms.fused_cross_entropy import find_label_shift  # loads composer_models

                self._model, self._shifts = state.model, find_label_shift(state.model)
            if self._shifts:
                labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            return labels != IGNORED
        return mask if isinstance(mask, Tensor) and mask.shape == shape[:-1] else None


def _of_pixels(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor | None]:
    """Return the logits of images with the classes last, and which of them count."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    maps = [each for each in values if isinstance(each, Tensor) and each.ndim == 3 and len(each) == len(logits)]
    of_pixels = logits.movedim(1, -1)
    for classes_last in (of_pixels, logits):
        if fitting := [each for each in maps if each.shape == classes_last.shape[:-1]]:
            return classes_last, fitting[-1] != IGNORED  # targets follow inputs
    if not maps:
        raise ValueError(
            f"ZLoss finds no classes in logits of shape {tuple(logits.shape)}: with four dims, they are in dim 1 if "
            f"the batch has labels of shape (batch, height, width), and it has none. Leave ZLoss out, or add "
            f"z_loss(...) to the model's loss."
        )
    return of_pixels, None  # labels of another resolution

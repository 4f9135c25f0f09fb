"""Metrics of language models and of binary classification."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from composer_models.token_losses import TokenLosses

__all__ = [
    "MaskedAccuracy",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "BinaryF1Score",
    "InContextLearningMetric",
    "InContextLearningQAAccuracy",
    "InContextLearningLMAccuracy",
    "InContextLearningMultipleChoiceAccuracy",
    "InContextLearningCodeEvalAccuracy",
    "InContextLearningMCExpectedCalibrationError",
    "InContextLearningLMExpectedCalibrationError",
]


class MaskedAccuracy(Metric):
    """Accuracy over the targets that are not ignored.

    Args:
        ignore_index: The target that is ignored.
        dist_sync_on_step: Synchronize over ranks at every `forward` of the metric.

    Example:
        >>> metric = MaskedAccuracy(ignore_index=-100)
        >>> metric.update(torch.eye(3), torch.tensor([0, 2, -100]))
        >>> metric.compute()
        tensor(0.5000)
    """

    full_state_update = False
    higher_is_better = True
    accepts_token_losses = True
    correct: Tensor
    total: Tensor

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.ignore_index = ignore_index
        self.add_state("correct", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor | TokenLosses, target: Tensor) -> None:
        """Count the correct predictions of a batch.

        Args:
            preds: Logits of shape `(batch, ..., classes)`, or losses that were computed without them.
            target: Class indices of shape `(batch, ...)`.
        """
        counts = target != self.ignore_index
        is_correct = preds.is_correct if isinstance(preds, TokenLosses) else preds.argmax(dim=-1) == target
        self.correct += (is_correct & counts).sum()
        self.total += counts.sum()

    def compute(self) -> Tensor:
        """Divide the number of correct predictions by the number of targets."""
        return self.correct / self.total


class LanguageCrossEntropy(Metric):
    """Cross entropy per token, averaged over all tokens that are not ignored.

    Args:
        dist_sync_on_step: Synchronize over ranks at every `forward` of the metric.
        ignore_index: The target of ignored tokens.
        vocab_size: Ignored with a `DeprecationWarning`; it is read from the logits.

    Example:
        >>> metric = LanguageCrossEntropy()
        >>> metric.update(torch.zeros(1, 3, 4), torch.tensor([[2, 0, -100]]))
        >>> metric.compute()
        tensor(1.3863)
    """

    full_state_update = False
    higher_is_better = False
    accepts_token_losses = True
    sum_loss: Tensor
    total_items: Tensor

    def __init__(
        self, dist_sync_on_step: bool = False, ignore_index: int = -100, *, vocab_size: int | None = None
    ) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        if vocab_size is not None:
            warnings.warn(
                f"{type(self).__name__}(vocab_size={vocab_size!r}) is not needed any more and is ignored: the logits "
                f"have that size. Leave it out.",
                DeprecationWarning,
                stacklevel=2,
            )
        self.ignore_index = ignore_index
        self.add_state("sum_loss", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total_items", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, output: Tensor | TokenLosses | Mapping[str, Tensor], target: Tensor) -> None:
        """Add the tokens of a batch.

        Args:
            output: Logits of shape `(batch, ..., vocabulary)` or losses that were computed without them, or a mapping
                with either as the entry `'logits'`.
            target: Token indices of shape `(batch, ...)`.

        Raises:
            TypeError: If `output` has another type.
        """
        logits = _logits_of(output)
        if isinstance(logits, TokenLosses):
            losses = logits.cross_entropy.where(target != self.ignore_index, 0)
        else:
            logits, target = logits.flatten(0, -2), target.flatten().long()
            losses = F.cross_entropy(logits, target, ignore_index=self.ignore_index, reduction="none")
        # Summed in the dtype of the state: a sum of 16-bit losses would lose digits or overflow.
        self.sum_loss += losses.sum(dtype=self.sum_loss.dtype)
        self.total_items += (target != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Divide the summed loss by the number of tokens."""
        return self.sum_loss / self.total_items


class LanguagePerplexity(LanguageCrossEntropy):
    """Perplexity: the exponential of the mean cross entropy per token.

    Example:
        >>> metric = LanguagePerplexity()
        >>> metric.update(torch.zeros(1, 3, 4), torch.tensor([[2, 0, -100]]))
        >>> metric.compute()
        tensor(4.)
    """

    def compute(self) -> Tensor:
        """Take the exponential of the mean cross entropy."""
        # Of the mean over all tokens: a mean of perplexities of batches would depend on how the data is batched.
        return torch.exp(super().compute())


class BinaryF1Score(Metric):
    """F1 score, the harmonic mean of precision and recall, of class 1 of two.

    Args:
        dist_sync_on_step: Synchronize over ranks at every `forward` of the metric.

    Example:
        >>> metric = BinaryF1Score()
        >>> metric.update(torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 0, 0]))
        >>> metric.compute()
        tensor(0.6667)
    """

    full_state_update = False
    higher_is_better = True
    true_positive: Tensor
    false_positive: Tensor
    false_negative: Tensor

    def __init__(self, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        for name in ("true_positive", "false_positive", "false_negative"):
            self.add_state(name, default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, output: Tensor | Mapping[str, Tensor], target: Tensor) -> None:
        """Count the predictions of a batch.

        Args:
            output: Logits of shape `(batch, 2)`, or a mapping with the entry `'logits'`.
            target: 0 or 1, shape `(batch,)`.

        Raises:
            TypeError: If `output` has another type.
        """
        predicted = _logits_of(output).argmax(dim=1) == 1
        actual = target == 1
        self.true_positive += (predicted & actual).sum()
        self.false_positive += (predicted & ~actual).sum()
        self.false_negative += (~predicted & actual).sum()

    def compute(self) -> Tensor:
        """Compute the score from the counts."""
        # The harmonic mean in terms of counts: precision alone would be 0 / 0 without positive predictions.
        return self.true_positive / (self.true_positive + 0.5 * (self.false_negative + self.false_positive))


class InContextLearningMetric(Metric):
    """Placeholder of removed metrics, so that old pickles can be read; it cannot be constructed."""

    full_state_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"{type(self).__name__} was removed: the name remains so that files which mention it can be read. "
            f"Evaluate language models with an evaluation harness, or define a torchmetrics.Metric of your own."
        )

    update = compute = __init__


InContextLearningQAAccuracy = InContextLearningMetric
InContextLearningLMAccuracy = InContextLearningMetric
InContextLearningMultipleChoiceAccuracy = InContextLearningMetric
InContextLearningCodeEvalAccuracy = InContextLearningMetric
InContextLearningMCExpectedCalibrationError = InContextLearningMetric
InContextLearningLMExpectedCalibrationError = InContextLearningMetric


def _logits_of(output: Any) -> Any:
    if isinstance(output, Tensor | TokenLosses):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    raise TypeError(
        f"output is a {type(output).__name__}, from which the metric cannot take logits: give a tensor, or a mapping "
        f"with the entry 'logits'."
    )

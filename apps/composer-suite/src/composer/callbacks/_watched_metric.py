"""Base class of callbacks that stop training based on the value of a metric."""

from __future__ import annotations

import difflib
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from composer_events.arguments import check_functions, check_texts
from composer_events.callback import Callback
from composer_events.metric_entries import higher_is_better, metric_with, number_of, refuse_several

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["Comparison", "MetricStopper"]

Comparison = Callable[[Any, Any], Any]

_NAMED: Final[dict[str, Comparison]] = {
    "greater": torch.greater,
    "gt": torch.greater,
    "less": torch.less,
    "lt": torch.less,
}


class MetricStopper(Callback):
    """Callback that checks a metric after each epoch and evaluation.

    Args:
        monitor: Name of the metric, or of an entry of a metric with several numbers.
        dataloader_label: `'train'`, or the label of an evaluator.
        comp: Comparison of two values: its name, or a function of the new and the old value. `None` chooses it by the
            metric's `higher_is_better`, or else by the metric's name.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `comp` is an unknown name.
    """

    def __init__(self, monitor: str, dataloader_label: str, comp: str | Comparison | None) -> None:
        check_texts(monitor=monitor, dataloader_label=dataloader_label)
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        self.stop_reason: str | None = None
        self._goes_by_metric = comp is None
        if isinstance(comp, str):
            if comp.lower() not in _NAMED:
                accepted = ", ".join(map(repr, _NAMED))
                raise ValueError(f"comp={comp!r} must be one of {accepted}, or a function of two values.")
            comp = _NAMED[comp.lower()]
        check_functions(comp=comp)
        self.comp: Comparison = _comparison(higher_is_better(monitor)) if comp is None else comp

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that the metric exists, and choose the comparison.

        Raises:
            ValueError: If the dataloader is known, and has no such metric or the metric has several numbers.
        """
        self.stop_reason = None
        label, labels = self.dataloader_label, [evaluator.label for evaluator in state.evaluators]
        metrics = self._metrics(state)
        # Metrics of a custom loop may not be known yet, so a missing one is an error only for a known dataloader.
        if (label == "train" and state.train_metrics) or (label in labels and label in state.eval_metrics):
            name = self._name_in(metrics)
            refuse_several(name, metrics[name], self.monitor)
        elif label not in ("train", state.dataloader_label, *labels):
            warnings.warn(
                f"dataloader_label={label!r} does not name a dataloader: their labels are "
                f"{', '.join(map(repr, [state.dataloader_label or 'train', *labels]))}, so {self.monitor!r} stops "
                f"nothing. Name one of them.",
                stacklevel=2,
            )
        if self._goes_by_metric:
            is_higher = higher_is_better(self.monitor, metrics.get(metric_with(metrics, self.monitor) or self.monitor))
            if is_higher is None:
                warnings.warn(
                    f"Neither the metric {self.monitor!r} of {label!r} nor its name says whether larger or smaller "
                    f"values are better. Larger is assumed. Pass comp='greater' or comp='less', or give the metric an "
                    f"attribute higher_is_better.",
                    stacklevel=2,
                )
            self.comp = _comparison(is_higher)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Check the metric, if it is that of this evaluator."""
        self._look_if_named(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Check the metric, if it is that of training."""
        self._look_if_named(state)

    def _look_if_named(self, state: State) -> None:
        # The state has the label of the dataloader that the current event belongs to.
        if self.dataloader_label == state.dataloader_label:
            metrics = self._metrics(state)
            name = self._name_in(metrics)
            self._look(state, torch.as_tensor(number_of(name, metrics[name].compute(), self.monitor)))

    @abstractmethod
    def _look(self, state: State, value: torch.Tensor) -> None:
        """Stop training if the value requires it."""

    def _metrics(self, state: State) -> Mapping[str, Any]:
        if self.dataloader_label == "train" and state.train_metrics:
            return state.train_metrics
        return state.eval_metrics.get(self.dataloader_label, {})

    def _name_in(self, metrics: Mapping[str, Any]) -> str:
        if (name := metric_with(metrics, self.monitor)) is None:
            near = difflib.get_close_matches(self.monitor, list(metrics), n=1, cutoff=0.0)
            hint = f"Did you mean {near[0]!r}?" if near else "Name the label of an evaluator that has metrics."
            raise ValueError(
                f"The dataloader labeled {self.dataloader_label!r} has no metric {self.monitor!r}; its metrics are "
                f"{sorted(metrics)}. {hint}"
            )
        return name


def _comparison(is_higher_better: bool | None) -> Comparison:
    # If it is unknown which values are better, larger is assumed, as in Composer.
    return torch.less if is_higher_better is False else torch.greater

"""The metric that a stopper watches, and the comparison of its values."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from composer_events.arguments import check_functions, check_texts
from composer_events.metric_entries import higher_is_better, metric_with, number_of, refuse_several

if TYPE_CHECKING:
    from composer_events.state import State

Comparison = Callable[[Any, Any], Any]

_NAMED: Final[dict[str, Comparison]] = {
    "greater": torch.greater,
    "gt": torch.greater,
    "less": torch.less,
    "lt": torch.less,
}


def choose_comparison(comp: str | Comparison | None, monitor: str) -> Comparison:
    """Return the function that decides whether its first argument is better than its second.

    Args:
        comp: The function, its name, or `None` to go by the name of the metric until the metric itself is known.
        monitor: Name of the metric.

    Raises:
        TypeError: If `comp` is neither, or `monitor` is not a string.
        ValueError: If no function has that name.
    """
    check_texts(monitor=monitor)
    if comp is None:
        return torch.less if higher_is_better(monitor) is False else torch.greater
    if not isinstance(comp, str):
        check_functions(comp=comp)
        return comp
    if comp.lower() not in _NAMED:
        raise ValueError(f"comp={comp!r} must be one of {', '.join(map(repr, _NAMED))}, or a function of two values.")
    return _NAMED[comp.lower()]


def comparison_for(state: State, monitor: str, dataloader_label: str) -> Comparison:
    """Return the comparison for a metric, by its `higher_is_better` or else by its name.

    Warns:
        UserWarning: If both leave open whether larger values are better. Larger is then assumed, as in Composer.
    """
    is_train = dataloader_label == "train"
    metrics = (state.train_metrics or {}) if is_train else state.eval_metrics.get(dataloader_label, {})
    is_higher = higher_is_better(monitor, metrics.get(metric_with(metrics, monitor) or monitor))
    if is_higher is None:
        warnings.warn(
            f"Neither the metric {monitor!r} of {dataloader_label!r} nor its name says whether larger or smaller "
            f"values are better: larger ones are taken to be. Pass comp='greater' or comp='less', or give the metric "
            f"an attribute higher_is_better.",
            stacklevel=3,
        )
    return torch.less if is_higher is False else torch.greater


def check_watched(state: State, monitor: str, dataloader_label: str) -> None:
    """Check at the start of training that the watched metric exists.

    Raises:
        ValueError: If the dataloader is known and has no such metric, or one with several numbers.
    """
    labels = [evaluator.label for evaluator in state.evaluators]
    metrics: Any = None
    if dataloader_label == "train" and state.train_metrics:
        metrics = state.train_metrics
    elif dataloader_label in labels and dataloader_label in state.eval_metrics:
        metrics = state.eval_metrics[dataloader_label]
    if metrics is not None:
        name = _name_in(metrics, monitor, dataloader_label)
        refuse_several(name, metrics[name], monitor)
    elif dataloader_label not in ("train", state.dataloader_label, *labels):
        warnings.warn(
            f"dataloader_label={dataloader_label!r} is none of the dataloaders' labels, "
            f"{', '.join(map(repr, [state.dataloader_label or 'train', *labels]))}, so {monitor!r} stops nothing. Name "
            f"one of them.",
            stacklevel=3,
        )


def compute_metric(state: State, monitor: str, dataloader_label: str) -> torch.Tensor:
    """Return the value of a metric, or of one of its entries.

    Raises:
        ValueError: If there is no such metric, or it has several values.
    """
    if dataloader_label == "train" and state.train_metrics:
        metrics: Any = state.train_metrics
    else:
        metrics = state.eval_metrics.get(dataloader_label, {})
    name = _name_in(metrics, monitor, dataloader_label)
    return torch.as_tensor(number_of(name, metrics[name].compute(), monitor))


def _name_in(metrics: Mapping[str, Any], monitor: str, dataloader_label: str) -> str:
    if (name := metric_with(metrics, monitor)) is None:
        near = difflib.get_close_matches(monitor, list(metrics), n=1, cutoff=0.0)
        hint = f"Did you mean {near[0]!r}?" if near else "Name the label of an evaluator that has metrics."
        raise ValueError(
            f"There is no metric {monitor!r} of the dataloader labelled {dataloader_label!r}, which has "
            f"{sorted(metrics)}. {hint}"
        )
    return name

"""Evaluators: a dataloader with the metrics to compute and how often."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from composer_events.arguments import check_counts, check_texts, to_interval
from composer_events.data_spec import DataSpec, default_split_batch, ensure_data_spec, size_of_batches
from composer_events.event import Event
from composer_events.intervals import create_interval_scheduler, evaluate_periodically
from composer_events.state import State
from composer_time import Time

__all__ = ["Evaluator", "ensure_evaluator", "evaluate_periodically", "validate_eval_automicrobatching"]


class Evaluator:
    """Dataloader to evaluate on.

    Args:
        label: Names the results: `metrics/<label>/<metric name>`.
        dataloader: A dataloader, a `DataSpec` or the keyword arguments of one.
        metric_names: Which of the model's metrics to compute, as regular expressions that are searched for anywhere in
            a metric's name, ignoring case. `None` computes those that the loop chooses, `[]` none.
        subset_num_batches: Stop after this number of batches; -1 for no limit. `None` leaves it to the loop.
        eval_interval: How often: epochs, a timestring, a `Time` or a function `(state, event) -> bool`. `None` leaves
            it to the loop.
        device_eval_microbatch_size: Samples per forward pass. `None` uses the dataloader's batch size, which may be
            `None` if the `DataSpec` has its own `split_batch`; `'auto'` starts with the batch size and lets the loop
            halve it when the device runs out of memory.
        metrics: The metrics themselves, one or a mapping, instead of the model's. They are copied. Deprecated.

    Raises:
        TypeError: If the label is not a string, or the number of batches or the interval has another type.
        ValueError: If the label is empty, `metric_names` is not a list of regular expressions, the interval is less
            than 0, or a number is out of its range.
        AttributeError: If the dataloader has no `batch_size` and none is given.
    """

    def __init__(
        self,
        *,
        label: str,
        dataloader: Any,
        metric_names: list[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: int | str | Time[Any] | Callable[[State, Event], bool] | None = None,
        device_eval_microbatch_size: int | str | float | None = None,
        metrics: Any = None,
    ) -> None:
        _check_metric_names(metric_names)
        check_texts(label=label)
        if not label:
            raise ValueError("label='' names no results. Give a name, such as 'eval'.")
        if subset_num_batches is not None:
            check_counts(-1, subset_num_batches=subset_num_batches)
        if subset_num_batches == 0:
            raise ValueError(
                "subset_num_batches=0 leaves nothing to evaluate on. Give a number of batches from 1, or -1 for all."
            )
        self.label = label
        self.dataloader: DataSpec = ensure_data_spec(dataloader)
        self.metric_names = metric_names
        self.metrics: dict[str, Any] | None = None if metrics is None else _own_metrics(metrics)
        self.subset_num_batches = subset_num_batches
        self.eval_interval = eval_interval
        self.auto_microbatching = device_eval_microbatch_size == "auto"
        self.device_eval_microbatch_size = _microbatch_size(device_eval_microbatch_size, self.dataloader)

    @property
    def eval_interval(self) -> Callable[[State, Event], bool] | None:
        """Function that returns whether to evaluate now. Assigned intervals are converted to a function."""
        return self._eval_interval

    @eval_interval.setter
    def eval_interval(self, eval_interval: int | str | Time[Any] | Callable[[State, Event], bool] | None) -> None:
        if eval_interval is None:
            self._eval_interval = None
            return
        interval = to_interval("eval_interval", eval_interval)
        self._eval_interval = (
            interval
            if callable(interval)
            # On *_END events, which come before *_CHECKPOINT, so that checkpoints include the results.
            else create_interval_scheduler(interval, checkpoint_events=False, final_events={Event.FIT_END})
        )

    def select_metrics(self, model_metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Select the metrics to compute: those of this evaluator, or else of the model, whose names match.

        Args:
            model_metrics: The model's metrics by name. The result holds the same objects, in the same order.
        """
        metrics = dict(model_metrics) if self.metrics is None else dict(self.metrics)
        if self.metric_names is None:
            return metrics
        patterns = [re.compile(name, re.IGNORECASE) for name in self.metric_names]
        return {name: metric for name, metric in metrics.items() if any(p.search(name) for p in patterns)}


def ensure_evaluator(evaluator: Any, default_metric_names: list[str]) -> Evaluator:
    """Wrap a dataloader or `DataSpec` as the evaluator `'eval'`; return an `Evaluator` unchanged."""
    if isinstance(evaluator, Evaluator):
        return evaluator
    return Evaluator(label="eval", dataloader=evaluator, metric_names=default_metric_names)


def validate_eval_automicrobatching(*args: Any, **kwargs: Any) -> None:
    """Emit a deprecation warning. `Evaluator` makes this check itself; the name is kept until 1.0."""
    warnings.warn(
        "validate_eval_automicrobatching() does nothing any more, since Evaluator checks device_eval_microbatch_size "
        "when it is made. Leave the call out.",
        DeprecationWarning,
        stacklevel=2,
    )


def _check_metric_names(metric_names: object) -> None:
    if metric_names is None:
        return
    names = cast("list[object]", metric_names)
    if not isinstance(metric_names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"metric_names={metric_names!r} should be a list of strings: the names of metrics, or regular expressions "
            f"that match them, such as ['Accuracy']."
        )
    for name in cast("list[str]", names):
        try:
            re.compile(name, re.IGNORECASE)
        except re.error as error:
            raise ValueError(
                f"metric_names has {name!r}, which is not a regular expression: {error}. Write `re.escape(name)` for "
                f"a name that has brackets, stars or the like."
            ) from error


def _own_metrics(metrics: Any) -> dict[str, Any]:
    warnings.warn(
        "Evaluator(metrics=...) is now metric_names=[...] with the metrics in the model's get_metrics(); the old form "
        "will be removed in release 1.0.",
        DeprecationWarning,
        stacklevel=3,
    )
    own = copy.deepcopy(metrics)
    # A MetricCollection is not a Mapping, but has `items`.
    if hasattr(own, "items"):
        return dict(cast("Iterable[tuple[str, Any]]", own.items()))
    return {type(own).__name__: own}


def _microbatch_size(size: int | str | float | None, data_spec: DataSpec) -> int | float | None:
    if size is None:
        return _batch_size(data_spec, may_be_unknown=data_spec.split_batch is not default_split_batch)
    if size == "auto":
        for holder in (data_spec, data_spec.dataloader):
            parallel: object = getattr(holder, "seq_parallel_world_size", 1)
            if parallel != 1:
                raise ValueError(
                    f"device_eval_microbatch_size='auto' cannot be combined with seq_parallel_world_size={parallel!r} "
                    "of the dataloader, where each sample is spread over ranks. Give the microbatch size as a number."
                )
        warnings.warn(
            "device_eval_microbatch_size='auto' may run into CUDA errors that cannot be distinguished from a lack of "
            "memory. If evaluation fails with one, give the microbatch size as a number.",
            UserWarning,
            stacklevel=3,
        )
        return _batch_size(data_spec, may_be_unknown=False)
    # bool is a subclass of int, but True is not a number of samples.
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size > 0:
        return size
    raise ValueError(
        f"device_eval_microbatch_size={size!r} is neither a number of samples above 0 nor 'auto'. Leave it out to "
        f"evaluate whole batches."
    )


def _batch_size(data_spec: DataSpec, *, may_be_unknown: bool) -> int | float | None:
    dataloader = data_spec.dataloader
    if not hasattr(dataloader, "batch_size"):
        raise AttributeError(
            f"device_eval_microbatch_size is needed, since the dataloader, a {type(dataloader).__name__!r}, has no "
            f"attribute batch_size to take it from."
        )
    size = size_of_batches(dataloader)
    if size is None and not may_be_unknown:
        raise ValueError(
            f"device_eval_microbatch_size is needed, since the dataloader, a {type(dataloader).__name__!r}, has "
            f"batch_size=None to take it from."
        )
    return size

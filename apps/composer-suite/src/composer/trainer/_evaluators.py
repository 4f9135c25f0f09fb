"""From what the user gave as `eval_dataloader` to evaluators with their metrics, intervals and subsets."""

import copy
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from composer.trainer._arguments import check_interval, check_iterable, check_subset
from composer.trainer._caller import level_of_user
from composer_dist.devices import Device
from composer_events.batches import ensure_tuple
from composer_events.evaluator import Evaluator, ensure_evaluator
from composer_models import ComposerModel

_log = logging.getLogger("composer.trainer.trainer")


def make_evaluators(
    given: Any,
    model: ComposerModel,
    eval_interval: Any,
    subset_num_batches: int,
    device: Device,
    present: Sequence[Evaluator] = (),
) -> list[Evaluator]:
    """Wrap each dataloader into an Evaluator that computes all metrics of the model.

    Args:
        given: One dataloader, DataSpec or Evaluator, several of one kind, or None.
        model: Says which metrics there are.
        eval_interval: For evaluators that have no interval.
        subset_num_batches: For evaluators that say nothing about it; -1 for all batches.
        device: Where they run.
        present: Those that stay where none are given.

    Raises:
        TypeError: If the model's metrics have no names.
        ValueError: If Evaluators and other dataloaders are mixed, if none of the metrics that one names is there, if a
            dataloader's end cannot be known and no subset limits it, if the size of microbatches is to be found out on
            another device than a GPU, or if a metric has no values to begin with.
    """
    items = _listed(given)
    if not items:
        _warn_of_idle(eval_interval, subset_num_batches, present)
    kinds = {isinstance(item, Evaluator) for item in items}
    if len(kinds) > 1:
        raise ValueError(
            "Mixing Evaluator with other classes is not allowed, please wrapall other classes with the Evaluator "
            f"class. eval_dataloader holds {[type(item).__name__ for item in items]}."
        )
    metrics = metrics_by_name(model, is_train=False)
    if items:
        check_metrics(metrics)
    names = list(metrics)
    check_subset("eval_subset_num_batches", subset_num_batches)
    check_interval(eval_interval)
    for item in items:
        check_iterable("eval_dataloader", item)
    # Copies, since what is filled in is this Trainer's business, and the user may give them to another one.
    evaluators = [copy.copy(ensure_evaluator(item, names)) for item in items]
    warn_of_known_labels(evaluators, [])
    for evaluator in evaluators:
        _check_names(evaluator, metrics)
        if evaluator.auto_microbatching and device.name != "gpu":
            raise ValueError(
                f"Can only use adaptive device_eval_microbatch_size on GPU, and device is {device.name!r}: other "
                f"devices do not say that they are out of memory. Give evaluator {evaluator.label!r} a number."
            )
        if evaluator.subset_num_batches is None:
            evaluator.subset_num_batches = subset_num_batches
        if evaluator.eval_interval is None:
            evaluator.eval_interval = eval_interval
        if evaluator.subset_num_batches == -1:
            _refuse_endless(evaluator)
    return evaluators


def _check_names(evaluator: Evaluator, metrics: Mapping[str, Any]) -> None:
    if evaluator.metric_names and not evaluator.select_metrics(metrics):
        there = ", ".join(metrics if evaluator.metrics is None else evaluator.metrics) or "none at all"
        raise ValueError(
            f"Evaluator {evaluator.label!r} has metric_names={evaluator.metric_names!r}, and no metric is called so. "
            f"There are {there}. Name some of these, or leave metric_names out for all."
        )


def _warn_of_idle(eval_interval: Any, subset_num_batches: int, present: Sequence[Evaluator]) -> None:
    if eval_interval in (0, 1) and subset_num_batches == -1:
        return
    labels = ", ".join(repr(evaluator.label) for evaluator in present)
    keep = f" again; {labels} of before keep what they have" if labels else ""
    warnings.warn(
        f"Without an eval_dataloader, eval_interval={eval_interval!r} and "
        f"eval_subset_num_batches={subset_num_batches!r} has no effect. If trying to run an evaluator, give it as "
        f"eval_dataloader{keep}.",
        stacklevel=level_of_user(),
    )


def warn_of_known_labels(evaluators: Sequence[Evaluator], others: Iterable[Evaluator]) -> None:
    """Say where two evaluators of one label will write over each other's results."""
    known = {evaluator.label for evaluator in others}
    for evaluator in evaluators:
        if evaluator.label in known and others:
            warnings.warn(
                f"eval_dataloader label {evaluator.label!r} is that of another evaluator of this Trainer; its metrics "
                "are replaced. Use Evaluator(label=...) with a label of its own.",
                stacklevel=level_of_user(),
            )
        elif evaluator.label in known:
            _log.warning("Several evaluators have the label %r and share its metrics.", evaluator.label)
        known.add(evaluator.label)


def _listed(given: Any) -> Sequence[Any]:
    if isinstance(given, (list, tuple)) and given and not all(map(_is_batch, given)):
        return ensure_tuple(given)
    is_none = given is None or (isinstance(given, (list, tuple)) and not given)
    return () if is_none else (given,)


def _is_batch(item: Any) -> bool:
    """Say whether an item of a list is a batch, and the list a dataloader, or a dataloader, one of several."""
    return isinstance(item, (tuple, Tensor)) or (isinstance(item, Mapping) and "dataloader" not in item)


def _refuse_endless(evaluator: Evaluator) -> None:
    loader = evaluator.dataloader.dataloader
    if not hasattr(loader, "__len__"):
        return
    try:
        len(loader)
    except TypeError as error:
        raise ValueError(
            f"eval_subset_num_batches must be set when using an infinite sized dataloader: evaluator "
            f"{evaluator.label!r} has {loader!r}, whose length is unknown. Say how many batches an evaluation reads."
        ) from error


def metrics_by_name(model: ComposerModel, *, is_train: bool) -> Mapping[str, Any]:
    """Return the model's own metrics of training or of evaluation.

    Raises:
        TypeError: If `get_metrics` returns them without names.
    """
    metrics: Any = model.get_metrics(is_train=is_train)
    # By what it has, since neither a ModuleDict nor a MetricCollection is a Mapping.
    if hasattr(metrics, "keys") and hasattr(metrics, "items"):
        return metrics
    raise TypeError(
        f"{type(model).__name__}.get_metrics(is_train={is_train}) returned {metrics!r}, a {type(metrics).__name__}. It "
        "returns a dict of names to metrics, such as {'MulticlassAccuracy': MulticlassAccuracy(...)}, and {} where "
        "there are none."
    )


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Refuse metrics that have nothing to count from.

    Raises:
        ValueError: With the name of one that was made on the meta device.
    """
    for name, metric in metrics.items():
        states = [value for part in metric.modules() for value in getattr(part, "metric_state", {}).values()]
        if any(isinstance(state, Tensor) and state.is_meta for state in states):
            raise ValueError(
                f"the metric {name!r} of the model, a {type(metric).__name__}, is on the meta device, where it has no "
                f"numbers to count from and nobody can give it any. Make the model's metrics below "
                f"`with torch.device('cpu'):`, also where the rest of the model is made on the meta device."
            )


def metrics_of(evaluator: Evaluator, model: ComposerModel) -> dict[str, Any]:
    """Return own copies of the metrics that the evaluator names."""
    return copy.deepcopy(evaluator.select_metrics(metrics_by_name(model, is_train=False)))

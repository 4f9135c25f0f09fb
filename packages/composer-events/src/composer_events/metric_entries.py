"""Entries of metrics with several numbers, such as one for each class, by name: `MAP/map_50`, `Accuracy/2`."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast

from composer_events.logger_destination import format_log_data_value, is_tensor

__all__ = ["by_entry", "metric_with", "number_of", "refuse_several", "higher_is_better"]

_LONGEST = 4096  # longer vectors are curves over samples, not values per class


def by_entry(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, with each entry of a dict, list, tuple or vector under its own name.

    Args:
        values: By name. Tensors stay on their device; those with several dimensions, and long ones, are not split.

    Example:
        >>> by_entry({"MAP": {"map": 0.4, "map_50": 0.6}, "Accuracy": 0.5, "KID": (0.1, 0.01)})
        {'MAP/map': 0.4, 'MAP/map_50': 0.6, 'Accuracy': 0.5, 'KID/0': 0.1, 'KID/1': 0.01}
    """
    entries: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = cast("Mapping[Any, Any]", value).items()
        elif isinstance(value, (list, tuple)):
            inner = enumerate(cast("Iterable[Any]", value))
        elif is_tensor(value) and value.ndim == 1 and 1 < len(value) <= _LONGEST:
            inner = enumerate(value.unbind())
        else:
            entries[name] = value
            continue
        entries |= by_entry({f"{name}/{key}": entry for key, entry in inner})
    return entries


def metric_with(metrics: Mapping[str, Any], entry: str) -> str | None:
    """Return the name of the metric that an entry belongs to, or that has this name, or `None`."""
    # The longest match, because the name of a metric may be a prefix of another one.
    return max((name for name in metrics if f"{entry}/".startswith(f"{name}/")), key=len, default=None)


def number_of(name: str, value: Any, entry: str) -> Any:
    """Return one number of a metric."""
    entries = by_entry({name: value})
    if _size(entries.get(entry)) != 1:
        several = ", ".join(repr(key) for key, one in entries.items() if _size(one) == 1)
        has = f"has {several}. Name one of these." if several else f"is {format_log_data_value(value)}."
        raise ValueError(f"{entry!r} is not one number; the metric {name!r} {has}")
    return entries[entry]


def refuse_several(name: str, metric: Any, entry: str) -> None:
    """Reject a metric with several numbers if no entry was named, as far as a copy without updates shows."""
    if entry != name:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns about `compute` before `update`
            fresh = copy.deepcopy(metric)
            fresh.reset()
            for part in fresh.modules():
                part.sync_on_compute = False  # other ranks do not take part, so a sync would hang
            value = fresh.compute()
    except Exception:  # a metric without updates may raise any error
        return
    if any(map(_size, by_entry({name: value}).values())):
        number_of(name, value, entry)


def _size(value: Any) -> int:
    """Return the number of elements of a value without entries; 0 if it is not numeric."""
    return value.numel() if is_tensor(value) else int(getattr(value, "size", isinstance(value, (int, float))))


# Parts of names without separators, and whole words that are too short to be searched for inside other words.
_LOWER_PARTS = (
    *("loss", "error", "perplexity", "crossentropy", "negativelog", "neglog", "divergence", "distance"),
    *("editrate", "failurerate", "falsepositiverate", "falsenegativerate", "bitsper", "brier"),
    *("perceptualimagepatch", "rankedprobability"),  # scores and similarities by name, and distances
)
_LOWER_WORDS = {
    *("bpb", "bpc", "cer", "deviance", "ece", "eer", "fid", "kid", "kl", "lpips", "mae", "mape", "mer", "mse"),
    *("fnr", "fpr", "msle", "nll", "ppl", "rmse", "rmsle", "smape", "ter", "wer"),
}
_HIGHER_PARTS = (
    *("accuracy", "precision", "recall", "specificity", "sensitivity", "score", "exactmatch", "hitrate", "auroc"),
    *("intersectionoverunion", "signaldistortionratio", "jaccard", "bleu", "rouge", "meteor", "psnr", "ssim"),
    *("ndcg", "similarity", "correlation"),
    *("explainedvariance", "kappa", "matthews", "quality", "reward", "passrate", "successrate", "winrate"),
)
_HIGHER_WORDS = {
    *("acc", "acc1", "acc5", "ap", "auc", "auprc", "chrf", "dice", "em", "f1", "fbeta", "iou", "map", "map50"),
    *("mcc", "miou", "mrr", "r2", "top1", "top5"),
}


def higher_is_better(name: str, metric: object = None) -> bool | None:
    """Return whether a larger value of a metric is better, according to the metric or else to its name.

    Args:
        name: The metric's name, also as it is logged: `'MulticlassAccuracy'`, `'metrics/eval/val_wer'`,
            `'loss/train/total'`.
        metric: The metric, if available. Its attribute `higher_is_better`, as in torchmetrics, takes precedence over
            the name.

    Returns:
        `None` if it is unknown.

    Example:
        >>> higher_is_better("MulticlassAccuracy"), higher_is_better("metrics/eval/CrossEntropy")
        (True, False)
    """
    own = getattr(metric, "higher_is_better", None)
    if own is not None:
        return bool(own)
    name = re.sub(r"^metrics/[^/]*/", "", name)  # the evaluator's label may contain any word
    # scikit-learn's scorers: `neg_mean_squared_error` grows as the error falls. `neg_log_likelihood` is a loss.
    positive = re.sub(r"(?<![a-z0-9])neg_(?!log_(?:likelihood|prob))", "", name)
    if positive != name:
        better = higher_is_better(positive)
        return None if better is None else not better
    words = {*re.split(r"[^a-z0-9]+", name.lower()), *re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower().split()}
    joined = re.sub(r"[^a-z0-9]", "", name.lower())
    # "DistanceIntersectionOverUnion" contains "distance", but higher is better.
    if words & _LOWER_WORDS or (any(part in joined for part in _LOWER_PARTS) and "intersectionoverunion" not in joined):
        return False
    if words & _HIGHER_WORDS or any(part in joined for part in _HIGHER_PARTS):
        return True
    return None

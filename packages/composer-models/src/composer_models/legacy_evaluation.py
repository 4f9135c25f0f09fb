"""Adapter for the evaluation protocol of early releases.

Models of early releases define `validate(batch) -> (outputs, targets)` and `metrics(train) -> Metric |
MetricCollection | dict`, instead of `eval_forward`, `update_metric` and `get_metrics`.
"""

import contextlib
import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["translate_legacy_evaluation"]

# The last targets of validate() by model, with a reference to their outputs. Outside the model, so that copies and
# pickles of it contain no tensors; weakly referenced, so that targets are freed together with the outputs.
_last_targets: "WeakKeyDictionary[torch.nn.Module, tuple[ReferenceType[Any], Any]]" = WeakKeyDictionary()


def translate_legacy_evaluation(cls: type) -> None:
    """Add the methods of the current protocol to a class with the old protocol, and warn about it.

    Of an old method and the new one that replaces it, the one in the more derived class is used, and the new one if a
    class defines both.

    Args:
        cls: The subclass of `ComposerModel` that is being created; changed in place.
    """
    spoken: list[str] = []
    if _is_closer(cls, "validate", than="eval_forward"):
        spoken.append("validate(batch)")
        if _is_closer(cls, "validate", than="update_metric"):
            cls.update_metric = _update_metric
        cls.eval_forward = _eval_forward
    if _is_closer(cls, "metrics", than="get_metrics"):
        spoken.append("metrics(train)")
        cls.get_metrics = _get_metrics
    if spoken:
        warnings.warn(
            f"{cls.__name__} defines {' and '.join(spoken)}, the evaluation protocol of early releases, which is "
            f"removed in 1.0. Define eval_forward(batch, outputs=None), update_metric(batch, outputs, metric) and "
            f"get_metrics(is_train) instead.",
            DeprecationWarning,
            stacklevel=4,  # past __init_subclass__ and ABCMeta.__new__, to the class statement
        )


def _is_closer(cls: type, legacy: str, *, than: str) -> bool:
    if getattr(cls, than) in (_eval_forward, _update_metric, _get_metrics):
        return False  # a base class was adapted already, and calls the methods of this class
    for owner in cls.__mro__:
        if than in vars(owner):
            return False
        if legacy in vars(owner):
            return _takes_one_argument(vars(owner)[legacy])
    return False


def _takes_one_argument(method: object) -> bool:
    if not inspect.isfunction(method):
        return False  # an unrelated attribute of this name
    try:
        inspect.signature(method).bind(None, None)
    except TypeError:
        return False  # an unrelated method of this name
    return True


def _eval_forward(self: Any, batch: Any, outputs: Any | None = None) -> Any:
    """Call `validate`, and store its targets for `update_metric`.

    Called for training metrics too, as in early releases: outputs of the training forward have no targets.
    """
    outputs, targets = self.validate(batch)
    _remember(self, outputs, targets)
    return outputs


def _update_metric(self: Any, batch: Any, outputs: Any, metric: "Metric") -> None:
    """Update a metric with the outputs and the targets that `validate` returned for the same batch."""
    validated, targets = _last_targets.get(self, (None, None))
    if validated is None or validated() is not _identity(outputs):
        # A different batch, or replaced outputs: the targets must be computed again.
        _, targets = self.validate(batch)
    metric.update(outputs, targets)


def _remember(model: torch.nn.Module, outputs: Any, targets: Any) -> None:
    """Store targets until the outputs of the same batch are freed."""
    # A weak reference, because `forget` is stored in _last_targets and would keep the model alive.
    model_reference = ref(model)

    def forget(validated: "ReferenceType[Any]") -> None:
        model = model_reference()
        if model is not None and _last_targets.get(model, (None,))[0] is validated:
            del _last_targets[model]

    _last_targets.pop(model, None)
    with contextlib.suppress(TypeError):  # no weak references to a number, for example; validate() runs again then
        _last_targets[model] = ref(_identity(outputs), forget), targets


def _identity(outputs: Any) -> Any:
    """Return the object that identifies outputs: their first tensor, as tuples and dicts have no weak references."""
    if isinstance(outputs, Mapping):
        outputs = tuple(cast("Mapping[Any, Any]", outputs).values())
    if isinstance(outputs, tuple | list):
        return next((part for part in cast("tuple[Any, ...]", outputs) if isinstance(part, torch.Tensor)), None)
    return outputs


def _get_metrics(self: Any, is_train: bool = False) -> "dict[str, Metric]":
    """Return the metrics of `metrics(train)` by name."""
    from composer_models.metrics import metrics_by_name  # torchmetrics takes longer to import than torch

    return metrics_by_name(self.metrics(is_train))

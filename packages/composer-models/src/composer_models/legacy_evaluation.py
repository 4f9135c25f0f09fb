"""The evaluation protocol of early releases, translated into today's.

Models of that time define `validate(batch) -> (outputs, targets)` and `metrics(train) -> Metric | MetricCollection |
dict`, where today's define `eval_forward`, `update_metric` and `get_metrics`.
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

# The targets that validate() returned last, by model, and by which outputs they are known. Kept outside the model, so
# that no copy or pickle of it carries tensors, and only for as long as somebody has the outputs.
_last_targets: "WeakKeyDictionary[torch.nn.Module, tuple[ReferenceType[Any], Any]]" = WeakKeyDictionary()


def translate_legacy_evaluation(cls: type) -> None:
    """Give a class that speaks the old protocol the methods of the new one, and warn about it.

    Of an old method and the new one in its place, the one defined lower in the class hierarchy counts, and the new one
    if a class defines both.

    Args:
        cls: A subclass of `ComposerModel` that is being created; changed in place.
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
            f"{cls.__name__} defines {' and '.join(spoken)}, the evaluation protocol of early releases, which goes "
            f"away in 1.0. Define eval_forward(batch, outputs=None), update_metric(batch, outputs, metric) and "
            f"get_metrics(is_train) instead.",
            DeprecationWarning,
            stacklevel=4,  # past __init_subclass__ and ABCMeta.__new__, to the class statement
        )


def _is_closer(cls: type, legacy: str, *, than: str) -> bool:
    if getattr(cls, than) in (_eval_forward, _update_metric, _get_metrics):
        return False  # a base class was translated already, and calls whatever this class defines
    for owner in cls.__mro__:
        if than in vars(owner):
            return False
        if legacy in vars(owner):
            return _takes_one_argument(vars(owner)[legacy])
    return False


def _takes_one_argument(method: object) -> bool:
    if not inspect.isfunction(method):
        return False  # an attribute that happens to have the name
    try:
        inspect.signature(method).bind(None, None)
    except TypeError:
        return False  # somebody's own helper of that name
    return True


def _eval_forward(self: Any, batch: Any, outputs: Any | None = None) -> Any:
    """Call `validate`, and keep its targets for `update_metric`.

    Runs for training metrics too, as it did then: outputs of the training forward come without targets.
    """
    outputs, targets = self.validate(batch)
    _remember(self, outputs, targets)
    return outputs


def _update_metric(self: Any, batch: Any, outputs: Any, metric: "Metric") -> None:
    """Update a metric with the outputs and the targets that `validate` made of the same batch."""
    validated, targets = _last_targets.get(self, (None, None))
    if validated is None or validated() is not _identity(outputs):
        # Another batch than the last one, or somebody put other outputs in place: the targets must be found again.
        _, targets = self.validate(batch)
    metric.update(outputs, targets)


def _remember(model: torch.nn.Module, outputs: Any, targets: Any) -> None:
    """Keep targets until the outputs of the same batch are gone."""
    model_reference = ref(model)

    def forget(validated: "ReferenceType[Any]") -> None:
        model = model_reference()
        if model is not None and _last_targets.get(model, (None,))[0] is validated:
            del _last_targets[model]

    _last_targets.pop(model, None)
    with contextlib.suppress(TypeError):  # a number, say, has no weak references: validate() runs again for each metric
        _last_targets[model] = ref(_identity(outputs), forget), targets


def _identity(outputs: Any) -> Any:
    """Find what outputs are recognised by: their first tensor, since tuples and dicts have no weak references."""
    if isinstance(outputs, Mapping):
        outputs = tuple(cast("Mapping[Any, Any]", outputs).values())
    if isinstance(outputs, tuple | list):
        return next((part for part in cast("tuple[Any, ...]", outputs) if isinstance(part, torch.Tensor)), None)
    return outputs


def _get_metrics(self: Any, is_train: bool = False) -> "dict[str, Metric]":
    """Name the metrics that `metrics(train)` gives."""
    from composer_models.metrics import metrics_by_name  # torchmetrics takes longer to import than torch

    return metrics_by_name(self.metrics(is_train))

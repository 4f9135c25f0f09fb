"""What a run has measured by the time of a save, by the names that loggers use."""

from logging import getLogger
from typing import TYPE_CHECKING, Any

from composer_events.metric_entries import by_entry, metric_with, refuse_several

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["Measured", "metric_of"]

log = getLogger(__name__)


class Measured:
    """Keeps the latest value of each evaluation's metrics, for whoever keeps the best checkpoints."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def note(self, state: "State", metrics: set[str]) -> None:
        """Take note of an evaluation that has ended.

        Args:
            state: The training state.
            metrics: By which the best are to be kept.

        Raises:
            ValueError: If one of them was not measured, and no other evaluation can.
        """
        label = state.dataloader_label
        for name in () if label is None else state.eval_metrics.get(label, ()):
            if name in state.eval_metric_values:
                self._values |= by_entry({f"metrics/{label}/{name}": state.eval_metric_values[name]})
        to_come = tuple(f"metrics/{other}/" for other in {*state.eval_metrics, "train"} - {label})
        for metric in metrics - self._values.keys():
            if metric.startswith("metrics/") and not metric.startswith(to_come):
                raise ValueError(
                    f"save_keep keeps the best checkpoints by {metric!r}, which no evaluation measures. Measured are "
                    f"{', '.join(self._values) or 'no metrics'}. Name one of these, or add the metric to the model or "
                    f"the evaluator."
                )

    def by_now(self, state: "State", metrics: set[str]) -> dict[str, float]:
        """Return some metrics, those of training and the losses included. What was not measured is logged."""
        if not metrics:
            return {}
        train = by_entry({f"metrics/train/{name}": value for name, value in state.train_metric_values.items()})
        known = {**train, **state.total_loss_dict, **self._values}
        for metric in metrics - known.keys():
            log.warning(
                "The best checkpoints by %r cannot be told yet: it has not been measured. Measured were: %s.",
                metric,
                ", ".join(known) or "none",
            )
        return {metric: float(known[metric]) for metric in metrics & known.keys()}


def metric_of(state: "State", logged_name: str | None) -> object:
    """Return the metric that is logged as `metrics/<label>/<name>`, or has an entry of this name; `None` if none is.

    Raises:
        ValueError: If it has several numbers, and none of them is named.
    """
    metrics = {"train": state.train_metrics or {}, **state.eval_metrics}
    logged = {f"metrics/{label}/{name}": one for label, of_label in metrics.items() for name, one in of_label.items()}
    if logged_name is None or (name := metric_with(logged, logged_name)) is None:
        return None
    refuse_several(name, logged[name], logged_name)
    return logged[name]

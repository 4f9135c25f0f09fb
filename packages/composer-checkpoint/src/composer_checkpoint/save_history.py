"""Which checkpoints a run has saved, as each of them says of those before it."""

import uuid
from logging import getLogger
from typing import TYPE_CHECKING, Any

from composer_checkpoint.checkpoint_uploads import CheckpointUploads, Save
from composer_checkpoint.retention import KeptFiles
from composer_checkpoint.save_folder import LINEAGE_KEY
from composer_checkpoint.state import own_file
from composer_dist import dist
from composer_events.metric_entries import by_entry, metric_with, refuse_several
from composer_time import Timestamp

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["Measured", "metric_of", "SaveHistory"]


class SaveHistory:
    """Takes note of a run's saves, and takes over those of the run that it resumes.

    Args:
        kept: The run's files, some of which are deleted one day.
        uploads: The same in the store.

    Attributes:
        timestamps: When in training each path was saved, also before a resumption.
    """

    def __init__(self, kept: KeptFiles, uploads: CheckpointUploads) -> None:
        self.timestamps: dict[str, Timestamp] = {}
        self._kept = kept
        self._uploads = uploads
        self._saving: Save | None = None
        self._lineage: str | None = None
        self._loaded_kept: Any = ()
        self._loaded_kept_remotely: Any = None

    def begin(self, job: Save) -> None:
        """Take note of a save whose content is about to be collected, so that the checkpoint lists itself."""
        self.timestamps[own_file(job.address or job.path)] = job.timestamp
        self._saving = job

    def end(self) -> None:
        """Take note that its content was collected."""
        self._saving = None

    def lineage(self) -> str:
        """Return what this run's checkpoints share, drawn with the first of them. Every rank must call this."""
        if self._lineage is None:
            drawn = [uuid.uuid4().hex]
            dist.broadcast_object_list(drawn, src=0)
            self._lineage = drawn[0]
        return self._lineage

    def state_dict(self) -> dict[str, Any]:
        """Return which checkpoints there are, those of before a resumption and the one that is saved included."""
        job = self._saving
        own = [] if job is None else [(own_file(job.path), job.timestamp.state_dict(), job.metrics)]
        saved = {
            "all_saved_checkpoints_to_timestamp": [(name, time.state_dict()) for name, time in self.timestamps.items()],
            "kept": [*self._kept.state_dict(), *own],
            LINEAGE_KEY: self._lineage,
        }
        remotely = self._uploads.state_dict(job)
        return saved if remotely is None else {**saved, "kept_remotely": remotely}

    def load_state_dict(self, state: dict[str, Any], *, resumes: bool) -> None:
        """Take over which checkpoints there are.

        Args:
            state: What `state_dict` gave.
            resumes: Whether the run goes on by itself, and its checkpoints belong together with those of before.
        """
        self.timestamps = {}
        for name, saved in state.get("all_saved_checkpoints_to_timestamp", ()):
            timestamp = Timestamp()
            timestamp.load_state_dict(saved)
            self.timestamps[name] = timestamp
        if resumes:
            self._lineage = state.get(LINEAGE_KEY)
        self._loaded_kept = state.get("kept", ())
        self._loaded_kept_remotely = state.get("kept_remotely")

    def take_over(self, folder: str, template: str | None, remote_template: str | None, run_name: str | None) -> None:
        """Let what was loaded be deleted one day, as far as it is where this run saves, and called as it calls its own.

        Args:
            folder: Where it saves.
            template: What its files are called below it.
            remote_template: What they are called in the store, if they are put there.
            run_name: The run's name.
        """
        if self._loaded_kept:
            self._kept.load_state_dict(self._loaded_kept, folder, template or "", run_name)
            self._loaded_kept = ()
        if self._loaded_kept_remotely is not None:
            self._uploads.load_state_dict(self._loaded_kept_remotely, remote_template)
            self._loaded_kept_remotely = None


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

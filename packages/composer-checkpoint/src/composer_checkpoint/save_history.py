"""Record of the checkpoints that a run has saved, which each checkpoint lists."""

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

__all__ = ["MetricHistory", "metric_of", "SaveHistory"]


class SaveHistory:
    """Record the saves of a run, and adopt those of the run that it resumes.

    Args:
        kept: The run's files on disk, with their retention.
        uploads: The run's files in the store.

    Attributes:
        timestamps: The time in training of each saved path, including those of before a resume.
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
        """Record a save before its content is collected, so that the checkpoint lists itself."""
        self.timestamps[own_file(job.address or job.path)] = job.timestamp
        self._saving = job

    def end(self) -> None:
        """End the save that `begin` recorded."""
        self._saving = None

    def lineage(self) -> str:
        """Return the id that all checkpoints of this run share, drawn on first use. Every rank must call this."""
        if self._lineage is None:
            drawn = [uuid.uuid4().hex]  # each rank draws another one, so rank 0's is used
            dist.broadcast_object_list(drawn, src=0)
            self._lineage = drawn[0]
        return self._lineage

    def state_dict(self) -> dict[str, Any]:
        """Return the list of checkpoints, including those of before a resume and the current save."""
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
        """Load the list of checkpoints.

        Args:
            state: The result of `state_dict`.
            resumes: Whether the run resumes by itself, so that its checkpoints belong to the same lineage.
        """
        self.timestamps = {}
        for name, saved in state.get("all_saved_checkpoints_to_timestamp", ()):
            timestamp = Timestamp()
            timestamp.load_state_dict(saved)
            self.timestamps[name] = timestamp
        if resumes:  # any other load begins a new lineage
            self._lineage = state.get(LINEAGE_KEY)
        # Adopted by `take_over`, which knows the folder and names of this run.
        self._loaded_kept = state.get("kept", ())
        self._loaded_kept_remotely = state.get("kept_remotely")

    def take_over(self, folder: str, template: str | None, remote_template: str | None, run_name: str | None) -> None:
        """Adopt loaded checkpoints in this run's folder and with its names, so that retention may delete them.

        Args:
            folder: The folder that the run saves to.
            template: The template of file names in it.
            remote_template: The template of names in the store, if the run uploads.
            run_name: The run's name.
        """
        if self._loaded_kept:
            self._kept.load_state_dict(self._loaded_kept, folder, template or "", run_name)
            self._loaded_kept = ()
        if self._loaded_kept_remotely is not None:
            self._uploads.load_state_dict(self._loaded_kept_remotely, remote_template)
            self._loaded_kept_remotely = None


log = getLogger(__name__)


class MetricHistory:
    """Latest values of metrics, by which retention keeps the best checkpoints."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def note(self, state: "State", metrics: set[str]) -> None:
        """Record the metrics of an evaluation that has ended.

        Args:
            state: The training state.
            metrics: The metrics by which the best checkpoints are kept.

        Raises:
            ValueError: If one of them was not measured, and no other evaluation can measure it.
        """
        label = state.dataloader_label
        for name in () if label is None else state.eval_metrics.get(label, ()):
            if name in state.eval_metric_values:
                self._values |= by_entry({f"metrics/{label}/{name}": state.eval_metric_values[name]})
        # Other evaluators, and training, may measure it later.
        to_come = tuple(f"metrics/{other}/" for other in {*state.eval_metrics, "train"} - {label})
        for metric in metrics - self._values.keys():
            if metric.startswith("metrics/") and not metric.startswith(to_come):
                raise ValueError(
                    f"save_keep keeps the best checkpoints by {metric!r}, which no evaluation measures. Measured are "
                    f"{', '.join(self._values) or 'no metrics'}. Name one of these, or add the metric to the model or "
                    f"the evaluator."
                )

    def by_now(self, state: "State", metrics: set[str]) -> dict[str, float]:
        """Return the current values of some metrics, including training metrics and losses. Missing ones are logged."""
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
    """Return the metric that is logged as `metrics/<label>/<name>`, or has an entry of this name, or `None`.

    Raises:
        ValueError: If it has several numbers and the name selects none of them.
    """
    metrics = {"train": state.train_metrics or {}, **state.eval_metrics}
    logged = {f"metrics/{label}/{name}": one for label, of_label in metrics.items() for name, one in of_label.items()}
    if logged_name is None or (name := metric_with(logged, logged_name)) is None:
        return None
    refuse_several(name, logged[name], logged_name)
    return logged[name]

"""The run of MLflow in the names of checkpoints."""

from typing import TYPE_CHECKING

from composer_checkpoint.names import PartialFilePath
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.stores.mlflow import EXPERIMENT_PLACEHOLDER, RUN_PLACEHOLDER, MLFlowObjectStore

if TYPE_CHECKING:
    from composer_checkpoint.upload import RemoteUploader
    from composer_events import Logger

__all__ = ["asks_for_run", "path_with_run", "run_of", "with_run"]


def asks_for_run(template: str | None) -> bool:
    """Return whether a name has a placeholder of the experiment or the run.

    Example:
        >>> asks_for_run("runs/{mlflow_run_id}/checkpoints")
        True
    """
    return template is not None and (EXPERIMENT_PLACEHOLDER in template or RUN_PLACEHOLDER in template)


def run_of(logger: "Logger", uploader: "RemoteUploader | None") -> dict[str, str]:
    """Return what the placeholders stand for. Every rank must call this.

    Args:
        logger: Of its destinations, the first that has begun a run, as an `MLFlowLogger` does, says which.
        uploader: Otherwise, if it is of MLflow's artifacts, the run that it begins on rank 0.

    Returns:
        The experiment and the run; nothing if there is neither.
    """
    for destination in getattr(logger, "destinations", ()):
        experiment_id, run_id = (getattr(destination, name, None) for name in ("experiment_id", "run_id"))
        if isinstance(experiment_id, str) and isinstance(run_id, str):
            return {EXPERIMENT_PLACEHOLDER: experiment_id, RUN_PLACEHOLDER: run_id}
    if uploader is None or not asks_for_run(uploader.remote_folder):
        return {}
    ranks = Ranks()

    def begin() -> dict[str, str]:
        store = uploader.remote_backend if ranks.rank == 0 else None
        if not isinstance(store, MLFlowObjectStore):
            return {}
        return {EXPERIMENT_PLACEHOLDER: store.experiment_id, RUN_PLACEHOLDER: store.run_id}

    return ranks.exchange(begin, lambda found: found[:1] * len(found))


def with_run(template: str, run: dict[str, str]) -> str:
    """Return a name in which the placeholders are filled in, and the others left as they are."""
    for placeholder, value in run.items():
        template = template.replace(placeholder, value)
    return template


def path_with_run(path: PartialFilePath, run: dict[str, str]) -> PartialFilePath:
    """Return a path in which they are filled in."""
    return PartialFilePath(with_run(path.filename, run), None if path.folder is None else with_run(path.folder, run))

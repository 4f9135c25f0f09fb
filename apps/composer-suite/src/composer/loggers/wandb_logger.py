"""Runs in Weights & Biases."""

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from composer.loggers._service_queue import PixelsAndMasks, QueuedLogger, open_on_ranks, require
from composer_dist import get_global_rank, get_world_size
from composer_events.logger import Logger
from composer_events.state import State

__all__ = ["WandBLogger"]

_PATIENCE_S = 600.0  # longer than for other services, since files are also uploaded at the end
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9\-_.]")


class WandBLogger(QueuedLogger):
    """Logger for Weights & Biases: hyperparameters, metrics, tables, images with masks, and files as artifacts.

    All calls to W&B are made in order by a separate thread. Without a network, set `WANDB_MODE=offline` and run
    `wandb sync` later.

    Args:
        project: The project. This argument and the next four override `init_kwargs`.
        group: The group of the run.
        name: The name of the run; by default the `run_name` of the Trainer. If every rank has a run, `-rank<r>` is
            added, and the name without it is the default `group`.
        entity: The user or team.
        tags: Tags of the run.
        log_artifacts: Whether to upload files, such as checkpoints, as artifacts.
        rank_zero_only: Whether only rank 0 logs. Otherwise each rank has a run.
        init_kwargs: Further arguments of `wandb.init`.
        patience_s: Seconds that the start and the end of the run wait for W&B.

    Attributes:
        entity: The user or team, set at INIT; `None` if W&B does not return it.
        project: The project, set at INIT; `None` if W&B does not return it.
        run_dir: The folder of the run's files, set at INIT.
        run_url: The URL of the run, set at INIT; `None` offline.

    Raises:
        MissingConditionalImportError: If wandb is not installed; the extra `wandb` brings it.

    Example:
        >>> from composer.loggers import WandBLogger
        >>> logger = WandBLogger(project="plums", init_kwargs={"mode": "offline", "dir": "logs"})
    """

    shows_many_metrics = True  # and is preferred by callbacks that log many, such as `ActivationMonitor`
    _shows_masks = True

    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        tags: Sequence[str] | None = None,
        log_artifacts: bool = False,
        rank_zero_only: bool = True,
        init_kwargs: dict[str, Any] | None = None,
        *,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        require("wandb", extra="wandb")
        if log_artifacts and rank_zero_only and get_world_size() > 1:
            warnings.warn(
                "log_artifacts=True keeps the files of rank 0 only, since rank_zero_only=True. If each rank has files, "
                "as with sharded checkpoints, `rank_zero_only` should be set to False.",
                stacklevel=2,
            )
        super().__init__(rank_zero_only, patience_s)
        given = {"project": project, "group": group, "name": name, "entity": entity, "tags": tags}
        self._init_kwargs = {**(init_kwargs or {}), **{key: value for key, value in given.items() if value is not None}}
        self._rank_zero_only, self._log_artifacts = rank_zero_only, log_artifacts
        self.entity: str | None = self._init_kwargs.get("entity")
        self.project: str | None = self._init_kwargs.get("project")
        self.run_dir: str | None = None
        self.run_url: str | None = None

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table."""

        def send(values: dict[str, Any]) -> None:
            _wandb().log({name: _wandb().Table(columns=list(columns), rows=values["rows"])}, step)

        self._post(send, {"rows": [list(row) for row in rows]})

    def init(self, state: State, logger: Logger) -> None:
        """Start the run. Every rank must call this.

        Raises:
            ValueError, TypeError: If `wandb.init` rejects `init_kwargs`.
            wandb.errors.UsageError: If W&B rejects the use, for example without an API key.
        """
        name = self._init_kwargs.get("name") or state.run_name
        arguments = {**self._init_kwargs, "name": name}
        if not self._rank_zero_only:
            arguments["name"] = f"{name}-rank{get_global_rank()}"
            arguments["group"] = arguments.get("group") or name
        usage_error = require("wandb.errors", extra="wandb").UsageError
        begun = open_on_ranks(
            self._outbox,
            lambda: _begin(arguments),
            *(ValueError, TypeError, usage_error),
            is_enabled=self._enabled,
        )
        if (own := begun[get_global_rank()]) is not None:
            self.run_dir, self.run_url = own["dir"], own["url"]
        if begun[0] is not None:  # all ranks need the names for downloads, but perhaps only rank 0 has a run
            self.entity, self.project = begun[0]["entity"], begun[0]["project"]

    def can_upload_files(self) -> bool:
        """Return whether files are uploaded."""
        return self._enabled and self._log_artifacts

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Upload a file as a new version of an artifact, if `log_artifacts` is set.

        Its aliases are `latest` and its time, such as `ep3-ba120`.
        """
        del overwrite  # W&B keeps all versions of an artifact
        if not self.can_upload_files() or self._outbox.is_down:
            return
        name = _artifact_name(remote_file_name)
        stamps = _stamps(state)  # now, since training continues before the upload starts
        aliases = ["latest", f"ep{state.timestamp.num_epochs}-ba{state.timestamp.num_batches}"]

        def send(copy: Path) -> None:
            wandb = _wandb()
            kind = file_path.suffix.removeprefix(".")
            artifact = wandb.Artifact(name=name, type="model" if kind == "pt" else kind or "file", metadata=stamps)
            artifact.add_file(str(copy), name=file_path.name)  # W&B makes its own copy, so this one can be deleted
            wandb.log_artifact(artifact, aliases=aliases)

        self._post_file(file_path, send)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Download a file that was uploaded as an artifact: the latest version, or the one given after a colon.

        Raises:
            RuntimeError: If the entity or project is unknown, or the artifact has several files.
            FileNotFoundError: If the artifact does not exist.
            FileExistsError: If `destination` exists, and `overwrite` is false.
        """
        del progress_bar
        if not self.entity or not self.project:
            raise RuntimeError(
                f"entity={self.entity!r} and project={self.project!r} must both be known to download "
                f"{remote_file_name!r}. Give them to WandBLogger, or let a Trainer begin the run first."
            )
        if os.path.exists(destination) and not overwrite:
            raise FileExistsError(f"destination={destination!r} already exists. Give overwrite=True.")
        wandb = require("wandb", extra="wandb")
        name, colon, version = remote_file_name.partition(":")
        path = f"{self.entity}/{self.project}/{_artifact_name(name)}:{version if colon else 'latest'}"
        try:
            artifact = wandb.Api().artifact(path)
        except wandb.errors.CommError as error:
            raise FileNotFoundError(f"W&B has no artifact {path!r}.") from error
        folder = Path(destination).absolute().parent
        # Next to the destination, so that the move stays on one file system and is atomic.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".wandb-") as scratch:
            artifact.download(root=scratch)
            files = [file for file in Path(scratch).rglob("*") if file.is_file()]
            if len(files) != 1:
                names = ", ".join(str(file.relative_to(scratch)) for file in files)
                raise RuntimeError(f"{path!r} has {len(files)} files ({names}); only one can be {destination!r}.")
            files[0].replace(destination)

    def post_close(self) -> None:
        """End the run, as failed if an exception is being handled, and wait for its uploads."""
        # Evaluated here: the exception is not visible on the other thread.
        exit_code = int(sys.exc_info()[1] is not None)
        self._outbox.close(lambda: _finish(exit_code))

    def _send_hyperparameters(self, values: dict[str, Any]) -> None:
        _wandb().config.update(values, allow_val_change=True)

    def _send_images(
        self, images: PixelsAndMasks, name: str, step: int | None, labels: dict[int, str] | None, use_table: bool
    ) -> None:
        wandb = _wandb()
        shown = [wandb.Image(image, masks=_masks(found, labels)) for image, found in images]
        if use_table:
            wandb.log({f"{name} Table": wandb.Table(columns=[name], rows=[[image] for image in shown])}, step)
        else:
            wandb.log({name: shown}, step)

    def _send_metrics(self, values: dict[str, Any], step: int | None) -> None:
        _wandb().log(values, step)


def _wandb() -> Any:
    """Return the module, which holds the run. A logger that held the run itself could not be pickled."""
    return require("wandb", extra="wandb")


def _begin(arguments: dict[str, Any]) -> dict[str, str | None]:
    run = _wandb().init(**arguments)
    if getattr(run, "disabled", False):  # such a run has no URL, entity or project
        return {"dir": run.dir, "url": None, "entity": "disabled", "project": "disabled"}
    return {"dir": run.dir, "url": run.url, "entity": run.entity or None, "project": run.project or None}


def _finish(exit_code: int) -> None:
    wandb = _wandb()
    if wandb.run is not None:  # at interpreter exit, W&B may already have finished it
        wandb.finish(exit_code=exit_code)


def _masks(masks: dict[str, NDArray[Any]], class_labels: dict[int, str] | None) -> dict[str, dict[str, Any]] | None:
    labels = {} if class_labels is None else {"class_labels": class_labels}
    return {name: {"mask_data": mask, **labels} for name, mask in masks.items()} or None


def _artifact_name(remote_file_name: str) -> str:
    name = _NOT_IN_NAMES.sub(".", remote_file_name)
    if name != remote_file_name:
        warnings.warn(
            f"W&B knows no artifact called {remote_file_name!r}: names have letters, digits, '-', '_' and '.' only. It "
            f"is called {name!r} there.",
            stacklevel=3,
        )
    return name


def _stamps(state: State) -> dict[str, Any]:
    stamps = {f"timestamp/{name}": _plain(value) for name, value in state.timestamp.state_dict().items()}
    if state.dataloader is not state.train_dataloader:
        stamps |= {f"eval_timestamp/{name}": _plain(value) for name, value in state.eval_timestamp.state_dict().items()}
    return stamps


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)

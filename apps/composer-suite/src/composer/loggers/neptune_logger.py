"""Runs in Neptune's format, for servers of version 2 and offline files."""

import os
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from composer.loggers._service_queue import PATIENCE_S, PixelsAndMasks, QueuedLogger, require
from composer_dist import get_global_rank
from composer_events.arguments import check_flags, check_texts
from composer_events.hparams import convert_nested_dict_to_flat_dict
from composer_events.logger import Logger
from composer_events.state import State

__all__ = ["NeptuneLogger"]

_INTEGRATION = "source_code/integrations/neptune-MosaicML"  # the key by which Neptune identifies such runs


class NeptuneLogger(QueuedLogger):
    """Logger for Neptune's client: hyperparameters, metrics, traces, images, and optionally files.

    Neptune's hosted service does not accept new users, and its client is no longer developed. Use MLFlowLogger or
    WandBLogger for new projects. `mode='offline'` writes files, `mode='debug'` keeps everything in memory, and
    self-hosted servers still work. All calls are made in order by a separate thread.

    Args:
        project: The project; by default the environment variable `NEPTUNE_PROJECT`.
        api_token: By default the environment variable `NEPTUNE_API_TOKEN`.
        rank_zero_only: Whether only rank 0 logs. Otherwise each rank has a run.
        upload_checkpoints: Whether to upload files, such as checkpoints.
        base_namespace: The namespace of all logged values.
        mode: `'async'`, `'sync'`, `'offline'`, `'debug'` or `'read-only'`.
        patience_s: Seconds that the start and the end of the run wait for Neptune.
        **neptune_kwargs: Further arguments of `neptune.init_run`.

    Raises:
        MissingConditionalImportError: If neptune is not installed; the extra `neptune` brings it.
        ValueError: If `base_namespace` is empty.
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        api_token: str | None = None,
        rank_zero_only: bool = True,
        upload_checkpoints: bool = False,
        base_namespace: str = "training",
        mode: str | None = None,
        patience_s: float = PATIENCE_S,
        **neptune_kwargs: Any,
    ) -> None:
        require("neptune", extra="neptune")
        check_flags(upload_checkpoints=upload_checkpoints)
        check_texts(base_namespace=base_namespace)
        if not base_namespace:
            raise ValueError("base_namespace='' must not be empty. Give a name such as 'training'.")
        super().__init__(rank_zero_only, patience_s)
        self._upload_checkpoints, self._base_namespace = upload_checkpoints, base_namespace
        self._arguments = {
            "project": project,
            "api_token": api_token,
            # On ranks that do not log, `neptune_run` still returns a run, which sends nothing.
            "mode": mode if self._enabled else "debug",
            **neptune_kwargs,
        }
        self._run: Any = None
        self._last_steps: dict[str, int] = {}

    @property
    def neptune_run(self) -> Any:
        """The run, started on first use."""
        if self._run is None:
            neptune = require("neptune", extra="neptune")
            given = {name: value for name, value in self._arguments.items() if value is not None}
            self._run = neptune.init_run(**given)
        return self._run

    @property
    def base_handler(self) -> Any:
        """The part of the run under `base_namespace`."""
        return self.neptune_run[self._base_namespace]

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Log the actions of algorithms."""
        self._post(self._assign, traces, "traces", is_kept=True)

    def init(self, state: State, logger: Logger) -> None:
        """Start the run."""
        if not self._enabled:
            return

        def begin() -> bool:
            self.neptune_run["sys/name"] = state.run_name
            self.neptune_run[_INTEGRATION] = version("composer-suite")
            self.base_handler["rank"] = get_global_rank()
            return True

        neptune_error = require("neptune.exceptions", extra="neptune")
        self._outbox.open(begin, neptune_error.NeptuneMissingApiTokenException, TypeError, ValueError)

    def can_upload_files(self) -> bool:
        """Return whether files are uploaded."""
        return self._enabled and self._upload_checkpoints

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Upload a file, if `upload_checkpoints` is set. Symbolic links are left out."""
        if not self.can_upload_files() or file_path.is_symlink() or remote_file_name.endswith(".symlink"):
            return
        if self._outbox.is_down:
            return

        def send(copy: Path) -> None:
            if overwrite or not self.neptune_run.exists(f"{self._base_namespace}/{remote_file_name}"):
                self.base_handler[remote_file_name].upload(str(copy), wait=True)
                return
            warnings.warn(
                f"Neptune already has a file {remote_file_name!r}, which is not replaced, since overwrite is false.",
                stacklevel=2,
            )

        self._post_file(file_path, send)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Download a file.

        Raises:
            FileNotFoundError: If the file does not exist.
            FileExistsError: If `destination` exists, and `overwrite` is false.
        """
        if os.path.exists(destination) and not overwrite:
            raise FileExistsError(f"destination={destination!r} already exists. Give overwrite=True.")
        self._outbox.drain()  # its upload may still be queued
        if not self.neptune_run.exists(f"{self._base_namespace}/{remote_file_name}"):
            raise FileNotFoundError(f"Neptune has no file {remote_file_name!r} under {self._base_namespace!r}.")
        self.base_handler[remote_file_name].download(destination=destination, progress_bar=progress_bar)

    def post_close(self) -> None:
        """End the run, and wait until all values have been sent."""
        self._outbox.close(lambda: self.neptune_run.stop())
        self._run, self._last_steps = None, {}

    def _send_hyperparameters(self, values: dict[str, Any]) -> None:
        self._assign(values, "hyperparameters")

    def _send_images(
        self, images: PixelsAndMasks, name: str, step: int | None, labels: dict[int, str] | None, use_table: bool
    ) -> None:
        from neptune.types import File  # already loaded, with the run

        for image, _ in images:
            self.base_handler[f"images/{name}"].append(File.as_image(image / 255.0), step=step)

    def _assign(self, values: dict[str, Any], namespace: str) -> None:
        from neptune.utils import stringify_unsupported  # already loaded, with the run

        self.base_handler[namespace] = stringify_unsupported(convert_nested_dict_to_flat_dict(values))

    def _send_metrics(self, values: dict[str, Any], step: int | None) -> None:
        for name, value in values.items():
            # Neptune rejects a step that is not later than the previous one.
            if step is not None and step <= self._last_steps.get(name, -1):
                continue
            if step is not None:
                self._last_steps[name] = step
            self.base_handler[f"metrics/{name}"].append(value, step=step)

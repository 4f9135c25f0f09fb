"""Experiments in Comet."""

from typing import Any

import numpy as np

from composer.loggers._service_queue import PATIENCE_S, PixelsAndMasks, QueuedLogger, require
from composer_dist import get_global_rank
from composer_events.logger import Logger
from composer_events.state import State

__all__ = ["CometMLLogger"]

_OPACITY = 0.6  # of a mask over its image
_COLORS = 255 * np.array(
    # Colors of the classes, in cyclic order: Okabe and Ito's palette, safe for color blindness.
    [[0, 0, 0], [0.9, 0.6, 0], [0.35, 0.7, 0.9], [0, 0.6, 0.5], [0.95, 0.9, 0.25], [0, 0.45, 0.7], [0.8, 0.4, 0]]
)


class CometMLLogger(QueuedLogger):
    """Logger for Comet: hyperparameters, metrics, tables, and images with masks.

    All calls to Comet are made in order by a separate thread. Without a network, pass
    `exp_kwargs={'online': False}` and upload the archive later with `comet upload`.

    Args:
        workspace: The workspace.
        project_name: The project.
        log_code: Whether Comet stores the source code.
        log_graph: Whether Comet stores the graph of the model.
        name: The name of the experiment; by default the `run_name` of the Trainer. If every rank has an experiment,
            `-rank<r>` is added.
        rank_zero_only: Whether only rank 0 logs. Otherwise each rank has an experiment.
        exp_kwargs: Further arguments of `comet_ml.Experiment`; `online=False` makes it an `OfflineExperiment`.
        patience_s: Seconds that the start and the end of the run wait for Comet.

    Attributes:
        experiment: The experiment; `None` on ranks that do not log, and if Comet cannot be reached.
        name: The name of the experiment, set at INIT.

    Raises:
        MissingConditionalImportError: If comet-ml is not installed; the extra `comet` brings it.
        ValueError, TypeError: If Comet rejects the arguments, or has no API key.
    """

    _images_name = "Image"
    _shows_masks = True

    def __init__(
        self,
        workspace: str | None = None,
        project_name: str | None = None,
        log_code: bool = False,
        log_graph: bool = False,
        name: str | None = None,
        rank_zero_only: bool = True,
        exp_kwargs: dict[str, Any] | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        comet_ml = require("comet_ml", extra="comet")
        super().__init__(rank_zero_only, patience_s)
        self.name: str | None = name
        self.rank_zero_only = rank_zero_only
        self.experiment: Any = None
        self._arguments = {"log_code": log_code, "log_graph": log_graph, **(exp_kwargs or {})}
        given = {"workspace": workspace, "project_name": project_name}
        self._arguments |= {key: value for key, value in given.items() if value is not None}
        if self._enabled:
            self._outbox.open(lambda: self._begin(comet_ml), ValueError, TypeError)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table as JSON."""
        if not self._enabled:
            return
        pandas = require("pandas", extra="comet")
        frame = pandas.DataFrame([list(row) for row in rows], columns=list(columns))

        def send() -> None:
            self.experiment.log_table(f"{name}.json", frame, orient="split", index=False)

        self._outbox.post(send, size_bytes=int(frame.memory_usage().sum()))

    def init(self, state: State, logger: Logger) -> None:
        """Name the experiment."""
        if self._enabled:
            self.name = self.name or state.run_name
            if not self.rank_zero_only:
                self.name += f"-rank{get_global_rank()}"
            if not self._outbox.is_open:  # a second run after `post_close`
                self._outbox.open(lambda: self._begin(require("comet_ml", extra="comet")), ValueError, TypeError)
            self._outbox.post(lambda: self.experiment.set_name(self.name), is_kept=True)

    def post_close(self) -> None:
        """End the experiment, and wait until all values have been sent."""
        if self._enabled:
            self._outbox.close(lambda: self.experiment.end())

    def _begin(self, comet_ml: Any) -> None:
        """Start an experiment, on the outbox's thread, since Comet's client retries for minutes."""
        arguments = dict(self._arguments)
        kind = comet_ml.Experiment if arguments.pop("online", True) else comet_ml.OfflineExperiment
        experiment = kind(**arguments)
        if not experiment.alive:
            raise ConnectionError("the experiment was not started. See Comet's own log for the reason.")
        experiment.log_other("Created from", "mosaicml-composer")  # the value by which Comet identifies such runs
        self.experiment = experiment

    def _send_hyperparameters(self, values: dict[str, Any]) -> None:
        self.experiment.log_parameters(values)

    def _send_metrics(self, values: dict[str, Any], step: int | None) -> None:
        self.experiment.log_metrics(dic=values, step=step)

    def _send_images(
        self, images: PixelsAndMasks, name: str, step: int | None, labels: dict[int, str] | None, use_table: bool
    ) -> None:
        # Each image as `<name>_<i>`, and for each of its masks the image with an overlay, and the mask.
        for index, (image, masks) in enumerate(images):
            self.experiment.log_image(image, name=f"{name}_{index}", step=step)
            for mask_name, mask in masks.items():
                colored = _COLORS[mask.astype(int) % len(_COLORS)]
                # Without an alpha channel, since the colors have three channels.
                over = (1 - _OPACITY) * image[:, :, :3] + _OPACITY * colored
                title = f"{name}_{index} + {mask_name} mask overlaid"
                self.experiment.log_image(over.astype(np.uint8), name=title, step=step)
                self.experiment.log_image(colored.astype(np.uint8), name=f"{mask_name}_{index} mask", step=step)

"""What a place is that logged values and files go to."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any

from composer_events.callback import Callback

if TYPE_CHECKING:
    from pathlib import Path

    from composer_events.state import State

__all__ = ["LoggerDestination"]


class LoggerDestination(Callback, ABC):
    """Take what a `Logger` hands on: a file, a console, a service.

    Every method does nothing until a subclass says otherwise, and the `Logger` calls only those that a subclass
    overrides. A destination is a callback too. On `Event.INIT` it acts before the other callbacks, so that they can
    log; on all other events after them, so that it can write down what they logged.

    Example:
        >>> class Remember(LoggerDestination):
        ...     def __init__(self):
        ...         self.metrics = {}
        ...     def log_metrics(self, metrics, step=None):
        ...         self.metrics.update(metrics)
    """

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Take the settings of the run.

        Args:
            hyperparameters: By name.
        """

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Take numbers measured at one step.

        Args:
            metrics: By name. Tensors may still be on their device.
            step: The count of batches that they belong to.
        """

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Take a table.

        Args:
            columns: Names of the columns.
            rows: A list of cells for each row.
            name: Name of the table.
            step: The count of batches that it belongs to.
        """

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: dict[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Take images.

        Args:
            images: An array, a tensor, or a sequence of them; each an image or a stack of images.
            name: Name of the group of images.
            channels_last: Whether channels are the last axis, not the one before height and width.
            step: The count of batches that they belong to.
            masks: Segmentation masks by name, as many as images.
            mask_class_labels: Names of the classes in the masks.
            use_table: Whether to show the images in a table, where the destination can.
        """

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Take notes on what the run did, such as which algorithms acted on which event.

        Args:
            traces: By name.
        """

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Take a file. The caller may change or delete it as soon as this returns.

        Args:
            state: The training state.
            remote_file_name: Name of the copy.
            file_path: Where the file is now.
            overwrite: Whether a file of that name may be replaced.
        """

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Bring back a file that was uploaded.

        Args:
            remote_file_name: Name of the copy.
            destination: Where to put it.
            overwrite: Whether a file at `destination` may be replaced.
            progress_bar: Whether to show how far it is.

        Raises:
            NotImplementedError: If the destination keeps no files.
        """
        raise NotImplementedError(
            f"{type(self).__name__} keeps no files, so {remote_file_name!r} cannot be downloaded from it. "
            f"Ask a destination whose `can_upload_files()` is True."
        )

    def can_upload_files(self) -> bool:
        """Answer whether files that are handed to `upload_file` are kept."""
        return False

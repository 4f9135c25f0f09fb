"""Export of the model at the end of training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from composer.utils.inference import ExportFormat, Transform, export_with_logger
from composer_dist.wrapping import unwrap_model
from composer_events.callback import Callback

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["ExportForInferenceCallback"]

_NEED_SAMPLE = (ExportFormat.ONNX, ExportFormat.EXPORT)  # formats that trace the model


class ExportForInferenceCallback(Callback):
    """Export the model at the end of training, with `composer.utils.inference.export_with_logger`.

    Args:
        save_format: `'torchscript'`, `'onnx'`, `'export'` or `'safetensors'`; see `ExportFormat`.
        save_path: A path or a URI; with an object store, or a logger that keeps files, the name there.
        save_object_store: An `ObjectStore`.
        sample_input: Input of the model. Default: the first batch of training, for formats that need one.
        transforms: Functions that modify the copy before it is written, such as `quantize_dynamic`.
        input_names: For `'onnx'`.
        output_names: For `'onnx'`.

    Raises:
        ValueError: If the format is unknown; at the end of training, if the model is not a `torch.nn.Module`.

    Example:
        >>> exporter = ExportForInferenceCallback('export', 'exported/model.pt2')
    """

    def __init__(
        self,
        save_format: str | ExportFormat,
        save_path: str,
        save_object_store: Any = None,
        sample_input: Any = None,
        transforms: Transform | Sequence[Transform] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        if save_object_store is not None and not callable(getattr(save_object_store, "upload_object", None)):
            raise TypeError(
                f"save_object_store={save_object_store!r} must be an ObjectStore, such as S3ObjectStore('b'), or None."
            )
        self.save_format = save_format
        self.save_path = save_path
        self.save_object_store = save_object_store
        self.sample_input = sample_input
        self.transforms = transforms
        self.input_names = input_names
        self.output_names = output_names
        self._needs_sample = ExportFormat(save_format) in _NEED_SAMPLE and sample_input is None

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Copy the first batch, if the format needs one."""
        if self._needs_sample:
            self.sample_input = copy.deepcopy(state.batch)  # a copy, since algorithms may change the batch in place
            self._needs_sample = False

    def fit_end(self, state: State, logger: Logger) -> None:
        """Export the model."""
        self.export_model(state, logger)

    def export_model(self, state: State, logger: Logger) -> None:
        """Export the current model.

        Raises:
            ValueError: If it is not a `torch.nn.Module`, or its weights are sharded.
        """
        model: Any = state.model
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model is a {type(model).__name__}, and only a torch.nn.Module can be exported. Give the Trainer a "
                f"ComposerModel."
            )
        export_with_logger(
            model=unwrap_model(model),
            save_format=self.save_format,
            save_path=self.save_path,
            logger=logger,
            save_object_store=self.save_object_store,
            # With an empty dict of keywords, a sample that is a tuple or a dict stays a single argument.
            sample_input=(self.sample_input, {}),
            transforms=self.transforms,
            input_names=self.input_names,
            output_names=self.output_names,
        )

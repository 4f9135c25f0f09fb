"""Export of the model that a Trainer holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_dist.strategy import unwrap_model

if TYPE_CHECKING:
    from composer.utils.inference import ExportFormat
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["export_model"]


def export_model(
    state: State, logger: Logger, save_format: str | ExportFormat, save_path: str, *, sample_input: Any, **settings: Any
) -> None:
    """Write the model of a state, as `export_with_logger` does, with the latest batch as a sample where it needs one.

    Args:
        state: The state.
        logger: The logger.
        save_format: See `export_with_logger`.
        save_path: See `export_with_logger`.
        sample_input: One batch, or `None`.
        **settings: See `export_with_logger`.
    """
    from composer.utils import inference  # here, since few trainings export

    needs_sample = inference.ExportFormat(save_format) in (inference.ExportFormat.ONNX, inference.ExportFormat.EXPORT)
    if sample_input is None and needs_sample:
        sample_input = state.batch
    inference.export_with_logger(
        model=unwrap_model(state.model),
        save_format=save_format,
        save_path=save_path,
        logger=logger,
        sample_input=(sample_input, {}),
        **settings,
    )

"""Datasets of mosaicml-streaming, which are streamed from object stores during training."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from streaming import MDSWriter as MDSWriter
    from streaming import Stream as Stream
    from streaming import StreamingDataLoader as StreamingDataLoader
    from streaming import StreamingDataset as StreamingDataset

__all__ = ["StreamingDataset", "StreamingDataLoader", "Stream", "MDSWriter"]

_look_up, __dir__ = lazy_face(
    __name__,
    {"streaming": ["StreamingDataset", "StreamingDataLoader", "Stream", "MDSWriter"]},
    removed={"StreamingDatasetWriter": "datasets are now written with composer.datasets.streaming.MDSWriter."},
)


def __getattr__(name: str) -> object:
    try:
        return _look_up(name)
    except ModuleNotFoundError as error:
        if error.name != "streaming":
            raise
        from composer_models import MissingConditionalImportError  # needed only without the package

        raise MissingConditionalImportError("streaming", "mosaicml-streaming", distribution="composer-suite") from error

"""Datasets that are read while they train, and what a killed run of them left behind."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from streaming import StreamingDataset as StreamingDataset

    from composer_dist.stale_memory import clean_stale_shared_memory as clean_stale_shared_memory

__all__ = ["StreamingDataset", "clean_stale_shared_memory"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer.datasets.streaming": ["StreamingDataset"],
        "composer_dist.stale_memory": ["clean_stale_shared_memory"],
    },
    submodules=["streaming"],
)

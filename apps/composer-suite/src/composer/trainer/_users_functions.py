"""What the functions that a DataSpec was given must return."""

from collections.abc import Sequence
from typing import Any, NoReturn

from composer_events.data_spec import DataSpec

__all__ = ["split", "transform_batch", "transform_microbatch"]


def transform_batch(spec: DataSpec, batch: Any) -> Any:
    """Return what `batch_transforms` makes of a batch, or raise TypeError if that is nothing."""
    transformed = spec.batch_transforms(batch)
    return _returned_nothing("batch_transforms", spec) if transformed is None else transformed


def transform_microbatch(spec: DataSpec, microbatch: Any) -> Any:
    """Return what `microbatch_transforms` makes of a microbatch, or raise TypeError if that is nothing."""
    transformed = spec.microbatch_transforms(microbatch)
    return _returned_nothing("microbatch_transforms", spec) if transformed is None else transformed


def split(spec: DataSpec, batch: Any, size: Any) -> Sequence[Any]:
    """Return the microbatches that `split_batch` makes of a batch.

    Raises:
        TypeError: If those are no microbatches.
    """
    microbatches = spec.split_batch(batch, size)
    if not hasattr(microbatches, "__len__") or not len(microbatches):
        raise TypeError(
            f"split_batch={spec.split_batch!r} returned {microbatches!r}. It must return a list of microbatches, with "
            f"one at least."
        )
    return microbatches


def _returned_nothing(name: str, spec: DataSpec) -> NoReturn:
    raise TypeError(
        f"{name}={getattr(spec, name)!r} returned None. It must return the batch, also if it changes it in place."
    )

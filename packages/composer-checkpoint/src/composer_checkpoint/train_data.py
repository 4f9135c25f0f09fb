"""What a checkpoint says about the data it was trained on, so that the rest of an epoch is of the same data."""

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from composer_checkpoint.errors import IncompatibleCheckpointError, shown
from composer_checkpoint.sharded._ranks import Ranks

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["TRAIN_DATA_KEY", "begin_epoch_again", "describe_train_data", "refuse_other_data"]

TRAIN_DATA_KEY = "train_data"
"""In a checkpoint's `metadata`: how many samples the dataset has, and what its order was drawn from."""


def describe_train_data(state: "State") -> dict[str, int]:
    """Return the length of a map-style train dataset, and the seed of a sampler that has one of its own."""
    loader = state.train_dataloader
    if not isinstance(loader, DataLoader):
        return {}
    found: dict[str, int] = {}
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):
        found["num_samples"] = len(dataset)
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.shuffle:
            found["shuffle_seed"] = sampler.seed
    return found


def refuse_other_data(saved: Mapping[str, Any], state: "State", path: str) -> None:
    """Refuse a checkpoint of inside an epoch of other data, whose batches cannot be told apart any more.

    Every rank must call this, and rank 0 compares for all. Between two epochs, data may change.

    Args:
        saved: The checkpoint's `state`.
        state: The training state, not yet changed.
        path: The checkpoint, for the message.

    Raises:
        IncompatibleCheckpointError: On all ranks, if the dataset has another length or its order another seed.
    """
    ranks = Ranks()
    ranks.together(lambda: _compare(saved, state, path) if ranks.rank == 0 else None)


def begin_epoch_again(saved: dict[str, Any]) -> None:
    """Change what was saved inside an epoch so that the epoch begins again, with whatever data there is now."""
    saved.pop("dataset_state", None)
    timestamps = saved.get("timestamp") or {}
    timestamp = timestamps.get("Timestamp", timestamps)
    for name in timestamp:
        if name.endswith("_in_epoch"):
            timestamp[name] = 0
        elif name in ("epoch_wct", "batch_wct"):
            timestamp[name] = timedelta()


def _compare(saved: Mapping[str, Any], state: "State", path: str) -> None:
    metadata, timestamps = saved.get("metadata"), saved.get("timestamp")
    if not isinstance(metadata, Mapping) or not isinstance(timestamps, Mapping):
        return
    before, now = metadata.get(TRAIN_DATA_KEY), describe_train_data(state)
    timestamp = timestamps.get("Timestamp", timestamps)
    if not isinstance(before, Mapping) or not isinstance(timestamp, Mapping) or not timestamp.get("batch_in_epoch"):
        return
    differing = [name for name, value in now.items() if name in before and before[name] != value]
    if differing:
        told = " and ".join(f"{name}={shown(before[name])} (now {now[name]!r})" for name in differing)
        raise IncompatibleCheckpointError(
            f"{path} was saved inside epoch {shown(timestamp.get('epoch'))}, after "
            f"{shown(timestamp['batch_in_epoch'])} batches of a train dataset with {told}: which "
            f"samples are left in the epoch cannot be told. Train on the same data, "
            f"load a checkpoint from the end of an epoch, begin the epoch again with load_restart_epoch=True of the "
            f"Trainer or restart_epoch=True of load_checkpoint(), or go on after as many batches of the data of now "
            f"with load_ignore_keys=['state/metadata/{TRAIN_DATA_KEY}/*']."
        )

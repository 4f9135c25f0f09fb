"""What `State` knows of the data that the loop reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sized
from operator import index
from typing import Any, SupportsIndex, cast

from composer_time import Time, TimeUnit

__all__ = ["DataSource", "dataset_of", "resume_dataset"]


class DataSource:
    """The part of `State` that holds the dataloaders."""

    dataset_state: dict[str, Any] | None
    dataset_resumption: dict[str, Any]
    _train_dataloader: Any
    _dataloader: Any = None
    _dataloader_label: str | None = None
    _dataloader_len: Time[int] | None = None

    @property
    def dataloader(self) -> Any:
        """What the loop reads from now; see `set_dataloader`."""
        return self._dataloader

    @property
    def dataloader_label(self) -> str | None:
        """The name of `dataloader`."""
        return self._dataloader_label

    @property
    def dataloader_len(self) -> Time[int] | None:
        """How many batches the loop reads in an epoch, `None` if that is not known.

        Assign a number to read fewer than there are, or -1 to ask the dataloader.

        Raises:
            RuntimeError: If it is assigned while there is no dataloader.
            TypeError: If something else than a whole number or a `Time` is assigned.
            ValueError: If a `Time` in another unit than batches is assigned.
        """
        return self._dataloader_len

    @dataloader_len.setter
    def dataloader_len(self, num_batches: int | Time[int]) -> None:
        num_batches = _to_num_batches(num_batches)
        if self._dataloader is None:
            raise RuntimeError(
                f"dataloader_len={num_batches} has no dataloader to refer to. Call "
                f"state.set_dataloader(dataloader, label, {num_batches}) instead."
            )
        length = _length_of(self._dataloader)
        if length is not None and num_batches > length:
            warnings.warn(
                f"DataloaderNumBatchesWarning: dataloader_len={num_batches} is more than the {length} batches that "
                f"the dataloader has. Each epoch ends after {length} batches.",
                UserWarning,
                stacklevel=2,
            )
        if num_batches < 0 or (length is not None and num_batches > length):
            self._dataloader_len = None if length is None else Time(length, TimeUnit.BATCH)
        else:
            self._dataloader_len = Time(num_batches, TimeUnit.BATCH)

    def set_dataloader(
        self,
        dataloader: Iterable[Any] | None = None,
        dataloader_label: str | None = None,
        dataloader_len: int | Time[int] = -1,
    ) -> None:
        """Choose what the loop reads from.

        Args:
            dataloader: Any iterable of batches; `None` for nothing.
            dataloader_label: Its name, which a dataloader has to have.
            dataloader_len: How many batches to read in an epoch; -1 asks the dataloader.

        Raises:
            TypeError: If `dataloader_len` is not a whole number or a `Time`.
            ValueError: If a dataloader comes without a label, or `dataloader_len` is not in batches.
        """
        if dataloader is not None and dataloader_label is None:
            raise ValueError(
                f"The dataloader {dataloader!r} has no dataloader_label. Give one, such as 'train' or 'eval': metrics "
                f"and logs are named by it."
            )
        self._dataloader = dataloader
        self._dataloader_label = None if dataloader is None else dataloader_label
        self._dataloader_len = None
        if dataloader is not None:
            self.dataloader_len = dataloader_len

    @property
    def train_dataloader(self) -> Any:
        """What is trained on. A dataset state that waits for a dataset is given to the one assigned here."""
        return self._train_dataloader

    @train_dataloader.setter
    def train_dataloader(self, train_dataloader: Iterable[Any] | None) -> None:
        self._train_dataloader = train_dataloader
        resume_dataset(self)


def resume_dataset(source: DataSource) -> None:
    """Give the training dataset the state that waits for it, once."""
    dataset, waiting = dataset_of(source.train_dataloader), source.dataset_state
    if not waiting or waiting.get("train") is None or not hasattr(dataset, "load_state_dict"):
        return
    dataset.load_state_dict(waiting["train"])
    source.dataset_resumption["train"] = True
    source.dataset_state = {**waiting, "train": None}  # the dict itself is the caller's


def dataset_of(dataloader: Any) -> Any:
    """Find the dataset under a dataloader, a `DataSpec` or an `Evaluator`; `None` if there is none."""
    while hasattr(dataloader, "dataloader"):
        dataloader = dataloader.dataloader
    return getattr(dataloader, "dataset", None)


def _to_num_batches(given: Any) -> int:
    if isinstance(given, Time):
        length = cast("Time[Any]", given)
        if length.unit is not TimeUnit.BATCH:
            raise ValueError(
                f"dataloader_len={str(length)!r} is not in batches, which is what a dataloader has. Give a number of "
                f"batches, or -1 to ask the dataloader."
            )
        return int(length)
    if not isinstance(given, SupportsIndex) or isinstance(given, bool):
        raise TypeError(
            f"dataloader_len={given!r} is not a number of batches. Give a whole number, a Time in batches, or -1 to "
            f"ask the dataloader."
        )
    return index(given)


def _length_of(dataloader: object) -> int | None:
    if not isinstance(dataloader, Sized):
        return None
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):  # torch dataloaders over iterable datasets have a __len__ that raises
        return None

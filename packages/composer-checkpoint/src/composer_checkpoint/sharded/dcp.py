"""`torch.distributed.checkpoint` under the names that Composer has for it, with readers that trust nothing."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from composer_checkpoint.retry import retry
from composer_checkpoint.sharded._addresses import only_one_process
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.sharded._sources import Source
from composer_checkpoint.sharded.load import load_with_reader
from composer_checkpoint.sharded.planner import ComparingLoadPlanner
from composer_checkpoint.sharded.reader import VerifyingReader
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError
from composer_checkpoint.validation import Specs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DistCPObjectStoreReader", "FileSystemReaderWithValidation", "dist_cp_load"]

# Optimizers have had it in their groups since torch 2.8, and nothing follows from one that was not saved.
_NEWER_KEY = "decoupled_weight_decay"


Validation = Callable[[str, Specs | None], Any]


def dist_cp_load(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
    process_group: "ProcessGroup | None" = None,
) -> None:
    """Load into a state dict, in place, as `torch.distributed.checkpoint.load` does. Every rank must call this.

    Settings of an optimizer that a checkpoint of before torch 2.8 cannot have stay as they are.

    Args:
        state_dict: Tensors, DTensors and plain data.
        storage_reader: Such as `VerifyingReader`.
        planner: One that refuses the checkpoint of another model when `None`.
        process_group: The ranks that hold the state dict. All of them when `None`.

    Raises:
        CheckpointError: If the checkpoint is damaged, unsafe or of another model.
        Exception: Whatever the reader or the planner raises, as it is: torch's own function wraps it into an error
            that `except Exception` does not catch.

    Example:
        >>> import tempfile, torch
        >>> from composer_checkpoint.sharded import VerifyingReader, save_sharded
        >>> folder = tempfile.mkdtemp() + "/ep1"
        >>> manifest = save_sharded({"w": torch.ones(2)}, folder)
        >>> state_dict = {"w": torch.zeros(2)}
        >>> dist_cp_load(state_dict, VerifyingReader(folder))
        >>> state_dict["w"]
        tensor([1., 1.])
    """
    planner = planner or ComparingLoadPlanner(may_lack=(_NEWER_KEY,))
    if isinstance(storage_reader, VerifyingReader) and isinstance(planner, ComparingLoadPlanner):
        # Not through torch, which makes one error of all that a reader may find wrong.
        load_with_reader(state_dict, storage_reader, planner, Ranks(process_group))
        return
    try:
        with warnings.catch_warnings():
            # One process alone is nothing to warn of.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            load(state_dict, storage_reader=storage_reader, planner=planner, process_group=process_group)
    except CheckpointException as error:
        first = next(iter(error.failures.values()), None)
        raise (first[0] if first else RuntimeError(str(error))) from error


class FileSystemReaderWithValidation(VerifyingReader):
    """Reads a folder as `VerifyingReader` does, after a function has looked at each of its files.

    Args:
        path: The folder.
        validation_function: Gets a file's path, and where the stretches begin that will be read of it and how long
            they are; what it returns is true if the file may be read. The function that the variable
            `CHECKPOINT_VALIDATION_FUNCTION` names when `None`, if there is one.
        verify: As in `VerifyingReader`.
    """

    def __init__(
        self, path: str | os.PathLike[str], validation_function: Validation | None = None, *, verify: bool = True
    ) -> None:
        super().__init__(path, verify=verify, validation_function=validation_function)


class DistCPObjectStoreReader(FileSystemReaderWithValidation):
    """Reads a folder of a store. Each node fetches the files that its ranks need, each file once.

    Args:
        source_path: What the names of the folder's objects begin with.
        destination_path: A local folder for the files, the same for all ranks of a node. What it holds already is not
            fetched again, if it has the object's size.
        object_store: The store.
        device_mesh: Not needed: whichever ranks load, each of them gets what it asks for.
        validation_function: As in `FileSystemReaderWithValidation`.
        verify: As in `VerifyingReader`.
    """

    def __init__(
        self,
        source_path: str,
        destination_path: str | os.PathLike[str],
        object_store: ObjectStore,
        device_mesh: "DeviceMesh | None" = None,
        validation_function: Validation | None = None,
        *,
        verify: bool = True,
    ) -> None:
        self.source_path, self.destination_path = source_path.rstrip("/"), os.fspath(destination_path)
        self.object_store = object_store
        super().__init__(self.destination_path, validation_function, verify=verify)

    def open_source(self) -> Source:
        """Return the store's folder."""
        return _StoreSource(self.object_store, self.source_path, Path(self.destination_path))


class _StoreSource:
    """A folder of a store, whose files are fetched when they are asked for, by one process at a time."""

    def __init__(self, store: ObjectStore, name: str, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.folder = store.get_uri(name)
        self._store, self._name, self._place = store, name, place

    def size_bytes(self, name: str) -> int | None:
        """Return how long an object is, `None` if there is none."""
        try:
            return _again(self._store.get_object_size)(f"{self._name}/{name}")
        except FileNotFoundError:
            return None

    def local_path(self, name: str) -> Path:
        """Return the path of the fetched object."""
        path = self._place / name
        with only_one_process(path):
            if not path.exists() or path.stat().st_size != self.size_bytes(name):
                _again(self._store.download_object)(f"{self._name}/{name}", path, overwrite=True)
        return path


_again = retry(ObjectStoreTransientError, num_attempts=5)

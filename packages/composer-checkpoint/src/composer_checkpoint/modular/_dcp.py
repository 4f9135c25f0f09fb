"""The folders of sharded checkpoints: what they list, and reading them with a planner of the user's."""

from typing import TYPE_CHECKING, Any

from composer_checkpoint.modular._sources import Source
from composer_checkpoint.sharded import load_sharded, read_folder_metadata
from composer_checkpoint.sharded._ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner

__all__ = ["Path", "load_folder", "read_entries"]

Path = tuple[str | int, ...]


def read_entries(source: Source) -> dict[Path, Any]:
    """Return what a folder holds by its place in the state dict: a description, or for plain data one of bytes.

    Every rank must call this; rank 0 reads.
    """
    ranks = Ranks()

    def read() -> dict[Path, Any]:
        if ranks.rank:
            return {}
        metadata = read_folder_metadata(source.path, storage_options=source.storage_options)
        paths = metadata.planner_data or {}
        return {paths.get(name, (name,)): entry for name, entry in metadata.state_dict_metadata.items()}

    return ranks.exchange(read, lambda results: results[:1] * len(results))


def load_folder(state_dict: dict[str, Any], source: Source, *, strict: bool, planner: "LoadPlanner | None") -> None:
    """Load into a state dict, in place. Every rank must call this.

    Raises:
        CheckpointError: If the checkpoint is damaged or of another model.
    """
    load_sharded(state_dict, source.path, strict=strict, storage_options=source.storage_options, planner=planner)

"""What one rank of a node downloads for all of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_checkpoint.archives import STATES_NAME, unpack
from composer_checkpoint.errors import CheckpointError, NoCheckpointError
from composer_checkpoint.fetching import get_file
from composer_checkpoint.names import is_tar, partial_format
from composer_dist import dist

__all__ = ["download_checkpoint", "fetch_together", "not_here", "of_first_rank_of_node"]


def download_checkpoint(
    path: str | os.PathLike[str],
    node_checkpoint_folder: str | os.PathLike[str],
    object_store: Any = None,
    progress_bar: bool = True,
    fsdp_sharded_state_dict_enabled: bool = False,
) -> tuple[str, str | None, bool]:
    """Bring a checkpoint of one file to this node, and unpack it if it is a tar archive. Every rank must call this.

    The first rank of each node does it for the others.

    Args:
        path: A local path, an address, or with `object_store` the name of an object. `{rank}`, `{local_rank}` and
            `{node_rank}` are filled in with 0.
        node_checkpoint_folder: Where to, the same folder for all ranks of a node.
        object_store: Where `path` is. An `ObjectStore`, or a logger destination that can download.
        progress_bar: Whether to show the progress.
        fsdp_sharded_state_dict_enabled: Whether each rank brings a file of its own, whose name has its rank.

    Returns:
        The file that `safe_torch_load` reads, the folder into which it was unpacked, `None` if it was no archive, and
        whether this rank unpacked a file of its own, although it is not rank 0.

    Raises:
        FileNotFoundError: On all ranks, if there is no such checkpoint.
        CheckpointError: On all ranks, if an archive is damaged or has members that lead out of it.
    """
    rank = dist.get_global_rank() if fsdp_sharded_state_dict_enabled else 0
    places = (dist.get_local_rank(), dist.get_node_rank()) if fsdp_sharded_state_dict_enabled else (0, 0)
    source = partial_format(os.fspath(path), rank=rank, local_rank=places[0], node_rank=places[1])
    name = os.path.basename(source).removesuffix(".symlink")
    local = Path(node_checkpoint_folder) / f"rank{rank}_{name}"
    unpacked = Path(node_checkpoint_folder) / f"rank{rank}" if is_tar(name) else None
    states = local if unpacked is None else unpacked / STATES_NAME
    fetches = fsdp_sharded_state_dict_enabled or dist.get_local_rank() == 0

    def fetch() -> None:
        get_file(source, local, object_store, overwrite=True, progress_bar=progress_bar)
        if unpacked is not None:
            unpacked.mkdir(parents=True, exist_ok=True)
            unpack(os.fspath(local), name, states)

    fetch_together(fetch if fetches else lambda: None)
    return os.fspath(states), unpacked and os.fspath(unpacked), unpacked is not None and rank > 0


def fetch_together(fetch: Callable[[], None]) -> None:
    """Fetch, and raise on all ranks if any failed. Every rank must call this."""
    mine: Exception | None = None
    try:
        fetch()
    except Exception as error:  # whatever it is, the others must not wait
        mine = error
    failures = dist.all_gather_object(
        None if mine is None else (isinstance(mine, FileNotFoundError), f"{type(mine).__name__}: {mine}")
    )
    if mine is not None:
        raise mine
    for rank, failure in enumerate(failures):
        if failure is not None:
            is_missing, text = failure
            kind = NoCheckpointError if is_missing else CheckpointError
            raise kind(not_here("the checkpoint", rank, text))


def of_first_rank_of_node(folder: str) -> str:
    """Return what the first rank of this node calls a folder. Every rank must call this."""
    folders = dist.all_gather_object((dist.get_node_rank(), dist.get_local_rank(), folder))
    return next(shared for node, local, shared in folders if node == dist.get_node_rank() and local == 0)


def not_here(what: str, rank: int, reason: str) -> str:
    """Say that another rank should have brought a file."""
    return (
        f"No such file or directory: {what}. This likely implies a download failed on local rank 0, which is global "
        f"rank {rank} ({reason}). Look at the log of that rank."
    )

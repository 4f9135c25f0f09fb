"""Where the parts of a checkpoint go: names, formats, and what must not be overwritten."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath

from composer_checkpoint.errors import CheckpointConflictError
from composer_checkpoint.sharded._ranks import Ranks
from composer_checkpoint.stores.addresses import is_uri

__all__ = [
    "AlreadyExistsError",
    "PathLike",
    "as_value_error",
    "check_format",
    "check_suffix",
    "file_in",
    "local_path",
    "on_rank_zero",
    "place_of_part",
    "without_suffixes",
]

PathLike = str | os.PathLike[str]

_FORMATS = ("pt", "safetensors")


class AlreadyExistsError(CheckpointConflictError, ValueError):
    """There is a file or folder of this name, and it must not be overwritten."""


@contextmanager
def as_value_error(path: str, kind: str) -> Iterator[None]:
    """Raise a conflict as an error that is a `ValueError`, too."""
    try:
        yield
    except CheckpointConflictError as error:
        raise AlreadyExistsError(_conflict(path, kind)) from error


def place_of_part(destination_dir: PathLike, part: str, sharded: bool, save_format: str, overwrite: bool) -> str:
    """Return where a part goes. Every rank must call this.

    Raises:
        ValueError: On all ranks, before anything is gathered, if something is there and must not be overwritten.
    """
    folder = os.path.join(local_path(destination_dir, "destination_dir"), part)
    path = folder if sharded else os.path.join(folder, f"{part}.{save_format}")

    def look() -> None:
        if not overwrite and os.path.lexists(path):
            raise AlreadyExistsError(_conflict(path, "Directory" if sharded else "File"))

    on_rank_zero(look, path)
    return path


def on_rank_zero(work: Callable[[], None], path: str) -> str | None:
    """Let rank 0 work, and return the path there, `None` on other ranks; its error is raised on all of them."""
    ranks = Ranks()
    ranks.together(work if ranks.rank == 0 else lambda: None)
    return path if ranks.rank == 0 else None


def local_path(path: PathLike, argument: str) -> str:
    """Return the path as text.

    Raises:
        ValueError: If it is an address.
    """
    if is_uri(path):
        raise ValueError(
            f"{argument}={os.fspath(path)!r} is an address, and this saves to a local disk. Save to a folder, and "
            f"upload what is in it, with upload_file() or composer_checkpoint.publish.publish_checkpoint()."
        )
    return os.fspath(path)


def file_in(path: PathLike, name: str) -> str:
    """Return the path of a file: the path itself if it ends like the name, else the name in that folder."""
    text = local_path(path, "path")
    return text if PurePath(text).suffix == PurePath(name).suffix else os.path.join(text, name)


def without_suffixes(path: str) -> str:
    """Return the path without what follows the first dot of its name."""
    name = PurePath(path)
    return os.fspath(name.with_name(name.name.removesuffix("".join(name.suffixes))))


def check_format(save_format: str, sharded: bool) -> None:
    """Refuse a format that is not known, or that has no shards."""
    if save_format not in _FORMATS:
        raise NotImplementedError(f"save_format={save_format!r} is not known. Use one of {', '.join(_FORMATS)}.")
    if sharded and save_format != "pt":
        raise ValueError(
            f"save_format={save_format!r} is one file, and a sharded checkpoint is a folder of "
            f"torch.distributed.checkpoint. Use 'pt', or save without shards."
        )


def check_suffix(path: PathLike, save_format: str) -> None:
    """Refuse a file name that says another format."""
    if (PurePath(path).suffix == ".safetensors") != (save_format == "safetensors"):
        raise ValueError(
            f"path={os.fspath(path)!r} does not go with save_format={save_format!r}: names that end in .safetensors "
            f"are of that format, and no others are. Change one of the two."
        )


def _conflict(path: str, kind: str) -> str:
    return f"{kind} {path} already exists. Set overwrite=True to replace it, or choose another name."

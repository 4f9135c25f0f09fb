"""What a save is called: here, in the store, and what points to it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from composer_checkpoint.archives import check_compressor
from composer_checkpoint.names import PartialFilePath, check_filename, partial_format, sharded_folder
from composer_checkpoint.state_io import Layout, layout_of, path_of, prefix_dir_of
from composer_checkpoint.stores.addresses import parse_uri
from composer_time import Time, Timestamp

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["Save", "check_templates", "name_save", "template_of_run", "to_path", "within_folder"]


@dataclass(frozen=True, slots=True)
class Save:
    """One save: its names, the time in training, and what was measured by then. Per-rank files keep `{rank}`.

    `address` is where it lasts, if that is a store. Then `path` is the same, or a temporary file.
    """

    path: str
    address: str | None
    timestamp: Timestamp
    metrics: dict[str, float]
    link: str | None
    remote_name: str | None
    remote_pointer: str | None


def check_templates(
    filename: str, latest_filename: str | None, interval: "Time[Any] | str | int | None", overwrite: bool
) -> None:
    """Refuse names that cannot tell the saves of a run apart, or the link to the latest one from a save.

    Args:
        filename: The template of the saves.
        latest_filename: That of the link, or `None` for no link.
        interval: As in `check_filename`.
        overwrite: Whether one name for several saves is wanted.

    Raises:
        ValueError: If there are such names.
        CompressorNotFound: If the program that the file name asks for is not installed.
    """
    check_filename(filename, interval=interval, overwrite=overwrite)
    check_compressor(filename)
    if latest_filename is None:
        return
    check_filename(str(latest_filename), argument="save_latest_filename", overwrite=True)
    if str(latest_filename).lstrip("/") == filename:
        raise ValueError(
            f"save_latest_filename={latest_filename!r} is what the checkpoints are called, too, so that the link to "
            f"the latest one would replace it. Give them two names, or pass save_latest_filename=None."
        )


def name_save(
    state: "State",
    filename: PartialFilePath,
    link: PartialFilePath | None,
    remote_name: PartialFilePath | None,
    remote_pointer: PartialFilePath | None,
    remote_folder: str | None,
    metrics: dict[str, float],
) -> Save:
    """Fill in the names of a save of now."""
    path = path_of(state, filename.filename, filename.folder)
    remote = None if remote_name is None else _remote_name(state, remote_name.filename)
    address = None
    if remote_folder is not None and remote is not None:
        place, root = urlsplit(remote_folder), "/" if parse_uri(remote_folder).path.startswith("/") else ""
        address = f"{place.scheme}://{place.netloc}/{root}{remote}"
        path = address if layout_of(state) is Layout.SHARDED else path  # each rank writes there itself
    return Save(
        path=path,
        address=address,
        timestamp=state.timestamp,
        metrics=metrics,
        link=None if link is None else link.format(state),
        remote_name=remote,
        remote_pointer=None if remote_pointer is None else remote_pointer.format(state),
    )


def _remote_name(state: "State", filename: str) -> str:
    template = within_folder(state, filename)
    if layout_of(state) is Layout.LOCAL:
        template = template.replace("{rank}", "{{rank}}")
    return PartialFilePath(template).format(state)


def within_folder(state: "State", filename: str) -> str:
    """Return the template of what a save is called below the folder that is saved to: a file, or a sharded folder."""
    return sharded_folder(filename, prefix_dir_of(state)) if layout_of(state) is Layout.SHARDED else filename


def template_of_run(state: "State", name: PartialFilePath | None) -> str | None:
    """Return the template of what this run's saves are called below the folder, or `None` if they are not put there."""
    return None if name is None else partial_format(within_folder(state, name.filename), run_name=state.run_name)


def to_path(name: str | None, folder: str | None = None) -> PartialFilePath | None:
    """Return a user's template, or `None` for none."""
    return None if name is None else PartialFilePath(str(name).lstrip("/"), folder)

"""What a `CheckpointSaver` may be made with."""

import os
from collections.abc import Mapping
from typing import Any

from composer_checkpoint.ignore_keys import check_ignore_keys
from composer_checkpoint.names import OF_FOLDER, OF_SAVE
from composer_checkpoint.save_names import check_templates
from composer_events.arguments import check_counts, check_flags, check_names, check_places, check_seconds, to_interval
from composer_events.formatting import check_placeholders
from composer_time import Time

__all__ = ["check_saver_arguments"]

_REMOTE_EXAMPLE = "{run_name}/checkpoints/ep{epoch}-ba{batch}-rank{rank}.pt"


def check_saver_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that cannot be used, or contradict each other. What to keep is checked by who keeps it.

    Args:
        given: The arguments by their names.

    Raises:
        TypeError: If one is of the wrong kind.
        ValueError: If one cannot be used.
        CompressorNotFound: If the program that the file name asks for is not installed.
    """

    def some(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    check_places(**some("folder", "filename"))
    check_names(_REMOTE_EXAMPLE, **some("remote_file_name", "latest_remote_file_name"))
    check_placeholders(OF_FOLDER, **some("folder"))
    check_placeholders(OF_SAVE, **some("remote_file_name", "latest_remote_file_name"))
    latest = given["latest_filename"]
    if latest is not None:
        check_places(latest_filename=latest)
    check_flags(may_be_none=True, **some("overwrite", "weights_only", "async_save"))
    check_counts(**some("num_concurrent_uploads"))
    check_counts(-1, **some("remote_num_checkpoints_to_keep"))
    check_seconds(**some("upload_timeout_in_seconds"))
    check_seconds(may_be_none=True, **some("save_timeout_in_seconds"))
    if given["save_async_policy"] not in ("wait", "skip"):
        raise ValueError(f"save_async_policy={given['save_async_policy']!r} is not known. Use 'wait' or 'skip'.")
    check_ignore_keys("save_ignore_keys", given["ignore_keys"])
    interval = to_interval("save_interval", given["save_interval"])
    filename = os.fspath(given["filename"]).lstrip("/")
    check_templates(filename, latest, interval if isinstance(interval, Time) else None, bool(given["overwrite"]))

"""Checking every byte of a sharded checkpoint."""

import os
from collections.abc import Mapping
from typing import Any

from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.file_io import hash_file
from composer_checkpoint.manifest import Manifest
from composer_checkpoint.sharded.reader import OpenShards, VerifyingReader, list_parts

__all__ = ["verify_folder"]


def verify_folder(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Manifest | None:
    """Compare all files of a sharded checkpoint with its manifest. One process suffices; no model is needed.

    Args:
        folder: A local path, or a URI that fsspec knows.
        storage_options: For fsspec.

    Returns:
        The manifest; `None` if there is none, so that only the structure and the shards' own checksums could be
        checked.

    Raises:
        NoCheckpointError: If there is no such checkpoint.
        UnsafeCheckpointError: If it asks for anything that a checkpoint does not need.
        CorruptCheckpointError: If a byte is not what was written; the message names the shard and the tensor.
    """
    reader = VerifyingReader(folder, verify=False, storage_options=storage_options)  # what is checked is said here
    parts = list_parts(reader.read_metadata()).values()
    manifest, source = reader.manifest, reader.source
    damaged: set[str] = set()
    if manifest is not None:
        damaged = {
            name
            for name, entry in manifest.files.items()
            if hash_file(source.local_path(name), manifest.hash_name) != entry.hash
        }
        parts = [part for part in parts if part.file in damaged or part.dtype is None]
    with OpenShards(source) as shards:
        shards.for_each(  # names the damaged tensor
            lambda part: shards.check(part, manifest, checksums=manifest is None), parts
        )
    if damaged:
        raise CorruptCheckpointError(
            f"{os.path.join(source.folder, min(damaged))} has bytes that are not those that were written, outside of "
            f"any tensor. Load another checkpoint."
        )
    return manifest

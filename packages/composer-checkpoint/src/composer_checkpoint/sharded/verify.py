"""Verification of every byte of a sharded checkpoint."""

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
        folder: A local path, or a URI that fsspec supports.
        storage_options: Options for fsspec.

    Returns:
        The manifest; `None` if the folder has none, and only the structure and the shards' own checksums could be
        checked.

    Raises:
        NoCheckpointError: If the checkpoint does not exist.
        UnsafeCheckpointError: If it has more than data.
        CorruptCheckpointError: If a byte differs from what was written, with the shard and the tensor.
    """
    reader = VerifyingReader(folder, verify=False, storage_options=storage_options)  # the hashes are compared below
    parts = list_parts(reader.read_metadata()).values()
    manifest, source = reader.manifest, reader.source
    damaged: set[str] = set()
    if manifest is not None:
        damaged = {
            name
            for name, entry in manifest.files.items()
            if hash_file(source.local_path(name), manifest.hash_name) != entry.hash
        }
        # Tensors in intact files are proven by the hash of the file, so only objects are left to check.
        parts = [part for part in parts if part.file in damaged or part.dtype is None]
    with OpenShards(source) as shards:
        shards.for_each(  # raises an error that names the damaged tensor
            lambda part: shards.check(part, manifest, checksums=manifest is None), parts
        )
    if damaged:
        raise CorruptCheckpointError(
            f"{os.path.join(source.folder, min(damaged))} has bytes that are not those that were written, outside of "
            f"any tensor. Load another checkpoint."
        )
    return manifest

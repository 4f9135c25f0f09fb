"""Verify a checkpoint on demand."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_checkpoint.manifest import Manifest


def verify(path: str | os.PathLike[str]) -> "Manifest | None":
    """Compare every byte of a checkpoint with the hashes in its manifest.

    Args:
        path: Path of the file or folder, or of a link to one.

    Returns:
        The manifest, or `None` if the checkpoint has none.

    Raises:
        NoCheckpointError: If the checkpoint does not exist.
        CorruptCheckpointError: If anything differs, with the tensor or the file.
    """
    # Imported late: the package imports this module eagerly, and these modules import torch, which is slow.
    if os.path.isdir(path):
        from composer_checkpoint.modular.save import METADATA_FILENAME, verify_modular_folder

        if os.path.exists(os.path.join(path, METADATA_FILENAME)):
            return verify_modular_folder(path)
        from composer_checkpoint.sharded import verify_folder

        return verify_folder(path)
    from composer_checkpoint.files import verify_file

    return verify_file(path)

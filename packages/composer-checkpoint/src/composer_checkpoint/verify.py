"""Whether a checkpoint is what was written, on demand."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_checkpoint.manifest import Manifest

__all__ = ["verify"]


def verify(path: str | os.PathLike[str]) -> "Manifest | None":
    """Compare every byte of a checkpoint, a file or a folder, with the hashes of its manifest.

    Args:
        path: The file or folder, or a link to one.

    Returns:
        The manifest, or `None` for a checkpoint that came without one.

    Raises:
        NoCheckpointError: If there is nothing.
        CorruptCheckpointError: If anything differs; the message names the tensor or the file.
    """
    # Here, because the package loads this module at once, and these load torch.
    if os.path.isdir(path):
        from composer_checkpoint.modular.save import METADATA_FILENAME, verify_modular_folder

        if os.path.exists(os.path.join(path, METADATA_FILENAME)):
            return verify_modular_folder(path)
        from composer_checkpoint.sharded import verify_folder

        return verify_folder(path)
    from composer_checkpoint.files import verify_file

    return verify_file(path)

"""Two marks by which a `.pt` file says that this package wrote it, and how to tell that neither was touched.

One is a member of the archive, the manifest, with a hash of every storage. The other is the archive's comment at the
very end of the file, the seal, with a hash of everything else: the manifest itself, the pickle, every header and every
byte of padding. So each byte of the file is hashed exactly once, and a flipped bit that hides one mark leaves the
other.
"""

import re

from blake3 import blake3

from composer_checkpoint._zip_layout import Readable, ZipLayout
from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.manifest import MANIFEST_NAME, Manifest

__all__ = ["EMPTY_SEAL", "PAYLOAD_FOLDER", "check_seal", "is_sealed", "seal"]

PAYLOAD_FOLDER = "data/"
EMPTY_SEAL = b"composer blake3 " + b"0" * 64
_SEAL = re.compile(rb"composer blake3 [0-9a-f]{64}")


def seal(file: Readable, layout: ZipLayout) -> bytes:
    """Return the seal of a file: the hash of all that is neither a storage nor the comment."""
    hasher = blake3()
    position = 0
    storages = [member for name, member in layout.members.items() if name.startswith(PAYLOAD_FOLDER)]
    for member in sorted(storages, key=lambda member: member.offset):
        hasher.update(file.read(position, member.offset - position))
        position = member.end
    hasher.update(file.read(position, file.size_bytes - len(layout.comment) - position))
    return b"composer blake3 " + hasher.hexdigest().encode()


def is_sealed(file: Readable) -> bool:
    """Return whether a file ends in a seal, right or not."""
    size_bytes = min(len(EMPTY_SEAL), file.size_bytes)
    return _SEAL.fullmatch(file.read(file.size_bytes - size_bytes, size_bytes)) is not None


def check_seal(file: Readable, layout: ZipLayout) -> Manifest | None:
    """Return the manifest after both marks were found whole, or `None` for a file that has neither.

    Raises:
        CorruptCheckpointError: If only one of them is there, or they do not fit the file.
    """
    member = layout.members.get(MANIFEST_NAME)
    is_sealed = _SEAL.fullmatch(layout.comment) is not None
    if member is None and not is_sealed:
        return None
    if member is None or not is_sealed:
        missing = "the manifest among its members" if member is None else "the seal at its end"
        raise CorruptCheckpointError(
            f"the file was written with a manifest and a seal, and {missing} is missing or damaged. "
            f"Load another checkpoint."
        )
    if seal(file, layout) != layout.comment:
        raise CorruptCheckpointError(
            f"the file's description of its tensors (its pickle, manifest or headers) is not what was written: its "
            f"hash is not the one in the seal, {layout.comment.decode()!r}. Load another checkpoint."
        )
    return Manifest.from_json(file.read(member.offset, member.size_bytes))

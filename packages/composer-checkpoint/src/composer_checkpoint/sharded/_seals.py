"""A hash of the manifest inside the manifest, so that no bit of it can change unnoticed."""

from dataclasses import replace

from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.hashing import hash_bytes
from composer_checkpoint.manifest import Manifest

__all__ = ["check_seal", "sealed"]

_KEY = "manifest_hash"


def sealed(manifest: Manifest) -> Manifest:
    """Return the manifest with its hash in `info`."""
    plain = Manifest.from_json(manifest.to_json())  # as it will be read: with lists for tuples, say
    return replace(plain, info={**plain.info, _KEY: _hash(plain)})


def check_seal(manifest: Manifest, where: str) -> None:
    """Compare a manifest with its hash.

    Raises:
        CorruptCheckpointError: If it is not what was written.
    """
    if manifest.info.get(_KEY) != _hash(manifest):
        raise CorruptCheckpointError(
            f"{where} is not what was written: its hash, which it has in itself, differs. Load another checkpoint."
        )


def _hash(manifest: Manifest) -> str:
    info = {key: value for key, value in manifest.info.items() if key != _KEY}
    return hash_bytes(replace(manifest, info=info).to_json().encode(), manifest.hash_name)

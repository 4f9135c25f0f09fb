"""The command `composer_validate_remote_path`: check a URI in an object store before a run needs it."""

import argparse
import sys
from collections.abc import Sequence

from composer_checkpoint.stores.opening import list_remote_objects

__all__ = ["main", "validate_remote_path"]


def validate_remote_path(remote_path: str) -> str:
    """Return a sentence with the number of objects under a URI.

    Args:
        remote_path: URI, such as `'s3://bucket/folder'`.
    """
    return f"Found {len(list_remote_objects(remote_path))} objects at {remote_path}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the sentence, or the error, and return the exit status."""
    parser = argparse.ArgumentParser("composer_validate_remote_path", description="Count the objects under a URI.")
    parser.add_argument("remote_path", metavar="URI", help="such as s3://bucket/folder")
    remote_path: str = parser.parse_args(arguments).remote_path
    try:
        sys.stdout.write(f"{validate_remote_path(remote_path)}\n")
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        sys.stderr.write(f"composer_validate_remote_path: error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

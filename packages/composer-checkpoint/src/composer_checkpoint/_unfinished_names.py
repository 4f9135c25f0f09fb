"""Names of what is not yet, or no longer, a checkpoint: they say what it will be, and who writes it."""

import os
import re
import secrets
from pathlib import Path
from typing import Literal

from composer_checkpoint._writers import WRITER_PATTERN, this_writer

__all__ = ["UNFINISHED", "is_unfinished", "name_beside"]

# .tmp-: not finished, or already replaced; never read. .old-: a whole folder, moved aside for an instant where the
# file system cannot swap two names; put back if its writer died in that instant. .set-: the record of several files
# that get their names together.
UNFINISHED = re.compile(rf"(?P<name>.+)\.(?P<kind>tmp|old|set)-(?P<writer>{WRITER_PATTERN})-[0-9a-f]{{8}}", re.DOTALL)
_LONGEST_NAME_BYTES = 255


def name_beside(final: Path, kind: Literal["tmp", "old", "set"] = "tmp") -> Path:
    """Return a path in the same folder that nobody else uses and that says who writes it."""
    mark = f".{kind}-{this_writer()}-{secrets.token_hex(4)}"
    kept = os.fsencode(final.name)[: _LONGEST_NAME_BYTES - len(mark)]
    return final.with_name(kept.decode(errors="ignore") + mark)


def is_unfinished(name: str) -> bool:
    """Return whether a file or folder of this name is not yet, or no longer, a checkpoint."""
    found = UNFINISHED.fullmatch(name)
    return found is not None and found["kind"] != "old"

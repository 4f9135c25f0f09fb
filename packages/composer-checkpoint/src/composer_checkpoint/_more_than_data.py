"""What is saved and could not be loaded, since it is more than data; found before anything is written."""

import io
import zipfile
from typing import Any

import torch

from composer_checkpoint._formats import final_name
from composer_checkpoint._rehearsal import rehearse
from composer_checkpoint._tree import named_leaves
from composer_checkpoint.errors import CheckpointError, UnsafeCheckpointError

__all__ = ["more_than_data", "refuse_more_than_data", "unknown_globals_of"]

_MAX_NAMES = 10
_PLAIN = frozenset([type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter])


def refuse_more_than_data(obj: Any, path: str) -> None:
    """Raise if anything of a checkpoint is no data, with where it is.

    Raises:
        UnsafeCheckpointError: If so: it could be loaded with trust only, and no run resumes from it.
    """
    found = [
        f"{name or 'the object'} ({told})"
        for name, leaf in named_leaves(obj)
        if type(leaf) not in _PLAIN and not isinstance(leaf, torch.Tensor) and (told := _fault_of(leaf)) is not None
    ]
    if found:
        raise more_than_data(path, ", ".join(found[:_MAX_NAMES]))


def more_than_data(path: str, held: str) -> UnsafeCheckpointError:
    """Return the error for a file that would hold more than data."""
    return UnsafeCheckpointError(
        f"{final_name(path)} was not saved, since it could not be loaded again: it would hold {held}, which is more "
        f"than data. Have state_dict() return numbers, strings, tensors, lists and dicts, leave the part out "
        f"(save_ignore_keys), or save it with save_file(..., allow_untrusted=True), for loading with trust."
    )


def unknown_globals_of(saved: bytes) -> set[str]:
    """Return what the bytes that `torch.save` wrote ask for beyond data."""
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return rehearse(archive.read(pickled), record_unknown=True).unknown_globals


def _fault_of(leaf: Any) -> str | None:
    buffer = io.BytesIO()
    try:
        torch.save(leaf, buffer)
        unknown = unknown_globals_of(buffer.getvalue())
    except CheckpointError as error:
        return f"a {type(leaf).__qualname__}: {error}"
    except Exception as error:  # whatever an object raises that cannot be pickled
        return f"a {type(leaf).__qualname__}, which cannot be pickled: {error!s:.100}"
    return ", ".join(sorted(unknown)) or None

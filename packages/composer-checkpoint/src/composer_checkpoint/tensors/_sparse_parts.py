"""The dense tensors that a sparse one consists of, apart and put together again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from composer_checkpoint._rehearsal import SPARSE_PARTS
from composer_checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError

if TYPE_CHECKING:
    from composer_checkpoint.tensors.source import StoredTensor

__all__ = ["SparseParts", "is_sparse", "parts_of", "refuse_sparse"]


@dataclass(frozen=True, slots=True, eq=False)
class SparseParts:
    """What a sparse tensor consists of.

    Args:
        layout: As torch has it, such as `torch.sparse_coo`.
        parts: Its indices and its values, by the names that torch has for them, in the order of their pickles.
        is_coalesced: Of the coordinate layout, whether the indices are sorted and unique; `None` where nobody knows.
    """

    layout: torch.layout
    parts: "Mapping[str, StoredTensor]"
    is_coalesced: bool | None = None

    def put_together(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Read the parts and return the sparse tensor.

        Raises:
            CorruptCheckpointError: If they do not fit each other, or the shape.
        """
        parts = [part.read() for part in self.parts.values()]
        try:
            if self.layout == torch.sparse_coo:
                indices, values = parts
                return torch.sparse_coo_tensor(
                    indices, values, shape, check_invariants=True, is_coalesced=self.is_coalesced
                )
            compressed, plain, values = parts
            return torch.sparse_compressed_tensor(
                compressed, plain, values, shape, layout=self.layout, check_invariants=True
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise CorruptCheckpointError(
                f"the parts of a tensor of layout {self.layout} and size {list(shape)} do not fit: {error!s:.200} Load "
                f"another checkpoint."
            ) from error


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return whether it is of one of the layouts that are known here."""
    return str(tensor.layout).removeprefix("torch.") in SPARSE_PARTS


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a sparse tensor consists of, by the names that torch has for it."""
    if tensor.layout == torch.sparse_coo:  # whose public methods want it coalesced
        return {"indices": tensor._indices(), "values": tensor._values()}
    return {name: getattr(tensor, name)() for name in SPARSE_PARTS[str(tensor.layout).removeprefix("torch.")]}


def refuse_sparse(tensors: "Mapping[str, StoredTensor]", what: str) -> None:
    """Refuse sparse tensors where only dense ones can be.

    Args:
        tensors: By name.
        what: What takes no sparse ones, for the message.

    Raises:
        IncompatibleCheckpointError: If there is one.
    """
    for name, tensor in tensors.items():
        if tensor.sparse is not None:
            raise IncompatibleCheckpointError(
                f"{name} is a tensor of layout {tensor.sparse.layout}, and {what} takes dense ones alone. Write a .pt "
                f"file, which keeps it, leave it out, or load the file with load_file() and make it dense with "
                f"to_dense()."
            )

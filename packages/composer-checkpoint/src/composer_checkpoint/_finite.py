"""Which weights are NaN or infinite."""

import re
from typing import Any

import torch

from composer_checkpoint._tree import named_leaves

__all__ = ["non_finite_weights"]

_WEIGHTS = re.compile("(state/)?model/")


def non_finite_weights(obj: Any) -> list[str]:
    """Return the names of weights that hold NaN or an infinity: of the model's, or of all where there is no model."""
    tensors = {name: leaf for name, leaf in named_leaves(obj) if isinstance(leaf, torch.Tensor)}
    weights = {name: tensor for name, tensor in tensors.items() if _WEIGHTS.match(name)}
    return [name for name, tensor in (weights or tensors).items() if not _is_finite(tensor.detach())]


def _is_finite(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
        return True
    if tensor.layout != torch.strided:
        return tensor.layout != torch.sparse_coo or _is_finite(tensor._values())
    if tensor.element_size() == 1 and tensor.is_floating_point():
        tensor = tensor.float()  # torch adds up no float8
    # A sum reads each element once and allocates nothing. It may overflow without an infinity; then all are looked at.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())

"""Which weights are NaN or infinite, by looking at the bits of their exponents."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from composer_checkpoint._payload_hashing import num_threads
from composer_checkpoint._tree import named_leaves

__all__ = ["non_finite_weights"]

_WEIGHTS = re.compile("(state/)?model/")

# Integers of each dtype's size, and the smallest that, without its sign, is NaN or an infinity: all exponent bits set,
# except for the 8-bit format that has no infinity and one NaN.
_BITS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF << 52),
    torch.float32: (torch.int32, 0xFF << 23),
    torch.bfloat16: (torch.int16, 0xFF << 7),
    torch.float16: (torch.int16, 0x1F << 10),
    torch.float8_e5m2: (torch.int8, 0x1F << 2),
    torch.float8_e4m3fn: (torch.int8, 0x7F),
}
_PIECE = 1 << 16  # elements; with its copy it stays in the core's cache


def non_finite_weights(obj: Any) -> list[str]:
    """Return the names of weights that hold NaN or an infinity: of the model's, or of all where there is no model."""
    tensors = {name: leaf for name, leaf in named_leaves(obj) if isinstance(leaf, torch.Tensor)}
    weights = {name: tensor.detach() for name, tensor in tensors.items() if _WEIGHTS.match(name)} or tensors
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="finite") as pool:
        finite = pool.map(_is_finite, weights.values())
        return [name for name, is_finite in zip(weights, finite, strict=True) if not is_finite]


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.is_meta or tensor.layout != torch.strided:
        return True
    if tensor.device.type != "cpu" or tensor.dtype not in _BITS:
        return bool(torch.isfinite(tensor.float()).all())
    integers, limit = _BITS[tensor.dtype]
    elements = tensor.detach().resolve_neg().contiguous().view(-1).view(integers).numpy()
    without_sign = np.iinfo(elements.dtype).max
    return all(
        int((elements[start : start + _PIECE] & without_sign).max()) < limit
        for start in range(0, len(elements), _PIECE)
    )

"""Comparison of bytes with their hashes, and search for NaN and infinite weights by their exponent bits."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from composer_checkpoint._tree import named_leaves
from composer_checkpoint.errors import CorruptCheckpointError
from composer_checkpoint.file_io import FileReader, MappedFile, hash_ranges, num_threads, tensor_bytes

__all__ = ["non_finite_weights", "verify_ranges", "weight_names"]

_MAX_NAMES = 10
_WEIGHTS = re.compile("(state/)?model/")

# The integer types of each dtype's size, and the smallest bit pattern that is NaN or infinite: all exponent bits set,
# except for float8_e4m3fn, which has no infinity and one NaN. With the sign bit set, the same patterns are the largest
# unsigned integers, so two maxima decide and no value is converted.
_BITS: dict[str, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]] = {
    "float64": (np.int64, np.uint64, 0x7FF << 52),
    "float32": (np.int32, np.uint32, 0xFF << 23),
    "bfloat16": (np.int16, np.uint16, 0xFF << 7),
    "float16": (np.int16, np.uint16, 0x1F << 10),
    "float8_e5m2": (np.int8, np.uint8, 0x1F << 2),
    "float8_e4m3fn": (np.int8, np.uint8, 0x7F),
}
_ALWAYS_FINITE = frozenset(["float4_e2m1fn_x2"])  # has neither, and torch does not compute with it
_PIECE = 1 << 16  # elements; small enough to stay in the core's cache between the two maxima


def non_finite_weights(obj: Any, known_finite: Collection[str] = ()) -> list[str]:
    """Return the names of weights that hold NaN or an infinity, skipping those that are known to be finite."""
    tensors = dict(named_leaves(obj, torch.Tensor))
    weights = {name: tensors[name].detach() for name in weight_names(tensors) if name not in known_finite}
    if not weights:
        return []
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="finite") as pool:
        finite = pool.map(_is_finite, weights.values())
        return [name for name, is_finite in zip(weights, finite, strict=True) if not is_finite]


def weight_names(names: Iterable[str]) -> list[str]:
    """Return the names that are a model's weights, or all names if there are none."""
    names = list(names)
    return [name for name in names if _WEIGHTS.match(name)] or names


def verify_ranges(
    file: FileReader,
    ranges: Mapping[str, tuple[int, int]],
    manifest_hashes: Mapping[str, str],
    hash_name: str,
    weights: Mapping[str, tuple[str, str]],
    mapped: MappedFile | None,
    describe: Callable[[str], str] = str,
) -> set[str]:
    """Compare ranges of a file with their hashes, and search for NaN and infinities while the bytes are at hand.

    `weights` has, for each weight, the name of its range and that of its dtype. Returns the names of the weights in
    which no NaN and no infinity was found.
    """
    indices = {name: index for index, name in enumerate(ranges)}
    # A storage of two weights with different dtypes is checked as one of these only.
    dtypes = {indices[name]: dtype for name, dtype in weights.values() if dtype in _BITS}
    not_finite: set[int] = set()

    def look(index: int, elements: memoryview) -> None:  # called from several threads
        dtype = dtypes.get(index)
        if dtype is not None and index not in not_finite and not _are_finite(elements, dtype):
            not_finite.add(index)

    hashes = hash_ranges(file, [*ranges.values()], hash_name, mapped=mapped, look=look)
    wrong = [name for name, found in zip(ranges, hashes, strict=True) if found != manifest_hashes[name]]
    if wrong:
        raise CorruptCheckpointError(
            f"the bytes of {', '.join(map(describe, wrong[:_MAX_NAMES]))} are not those that were written "
            f"({len(wrong)} of {len(hashes)} hashes differ; the first is at byte {ranges[wrong[0]][0]}). Load another "
            f"checkpoint."
        )
    return {
        name
        for name, (of_range, dtype) in weights.items()
        if indices[of_range] not in not_finite and dtypes.get(indices[of_range]) == dtype
    }


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.is_meta or tensor.layout != torch.strided:
        return True
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype in _ALWAYS_FINITE:
        return True
    if tensor.device.type != "cpu" or dtype not in _BITS:
        # Only 8-bit types, for which not every device has this: a large float64 is infinite in float32.
        return bool(torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all())
    return _are_finite(tensor_bytes(tensor), dtype)


def _are_finite(elements: memoryview, dtype: str) -> bool:
    signed, unsigned, limit = _BITS[dtype]
    integers = np.frombuffer(elements, signed)
    sign = 1 << 8 * integers.itemsize - 1
    pieces = (integers[start : start + _PIECE] for start in range(0, len(integers), _PIECE))
    return all(piece.max() < limit and piece.view(unsigned).max() < sign + limit for piece in pieces)

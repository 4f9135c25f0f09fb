"""The header of a safetensors file, read strictly."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from composer_checkpoint._strict_json import parse_json
from composer_checkpoint._zip_layout import Readable
from composer_checkpoint.errors import CorruptCheckpointError

__all__ = ["DTYPES", "LENGTH", "METADATA_KEY", "Header", "TensorSlot", "read_header"]

LENGTH = struct.Struct("<Q")
METADATA_KEY = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_MAX_DIMS = 64  # torch has no tensors of more

# Each dtype's name in torch, and the bytes of one element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
}


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor, and where its bytes lie in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors by name, the texts that came with them, and the header as it stands in the file."""

    tensors: dict[str, TensorSlot]
    metadata: dict[str, str]
    raw: bytes


def read_header(file: Readable) -> Header:
    """Read a header and compare it with the file.

    Raises:
        CorruptCheckpointError: If it is not JSON of the format, or its tensors do not fill the file exactly.
    """
    if file.size_bytes < LENGTH.size:
        _refuse(f"it has {file.size_bytes} bytes, fewer than the length of a header")
    (length,) = LENGTH.unpack(file.read(0, LENGTH.size))
    if length > min(MAX_HEADER_BYTES, file.size_bytes - LENGTH.size):
        _refuse(f"its header would have {length} bytes; the file has {file.size_bytes}")
    raw = file.read(LENGTH.size, length)
    try:
        parsed: Any = parse_json(raw.decode())
    except (ValueError, RecursionError) as error:
        _refuse(f"its header is not JSON: {error!s:.200}")
    if not isinstance(parsed, dict):
        _refuse("its header is not an object")
    metadata = parsed.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        _refuse("its metadata is not texts by name")
    start = LENGTH.size + length
    tensors = {name: _slot(name, value, start) for name, value in parsed.items()}
    _check_filled(tensors, start, file.size_bytes)
    return Header(tensors, metadata, raw)


def _slot(name: str, value: Any, start: int) -> TensorSlot:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if dtype in DTYPES:
            torch_dtype, item_bytes = DTYPES[dtype]
        case _:
            torch_dtype, item_bytes, shape, begin, end = "", 0, [], 0, -1
    is_shape = len(shape) <= _MAX_DIMS and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
    if not is_shape or not 0 <= begin <= end or math.prod(shape) * item_bytes != end - begin:
        _refuse(f"its tensor {name!r:.200} is described as {value!r:.200}, whose dtype, shape and bytes do not fit")
    return TensorSlot(torch_dtype, tuple(shape), start + begin, end - begin)


def _check_filled(tensors: Mapping[str, TensorSlot], start: int, size_bytes: int) -> None:
    position = start
    for name, slot in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
        if slot.offset != position:
            _refuse(f"its tensor {name!r:.200} starts at byte {slot.offset}, where {position} was expected")
        position += slot.size_bytes
    if position != size_bytes:
        _refuse(f"its tensors end at byte {position}, and the file has {size_bytes}")


def _refuse(what: str) -> NoReturn:
    raise CorruptCheckpointError(f"the file is not a whole safetensors file: {what}. Load another checkpoint.")

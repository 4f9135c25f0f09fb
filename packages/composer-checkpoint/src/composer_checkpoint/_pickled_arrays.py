"""NumPy arrays and tensors inside a plain pickle, built only after their sizes were compared with their bytes."""

import io
import math
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from composer_checkpoint._geometry import check_geometry
from composer_checkpoint._legacy_pt import read_legacy_bytes
from composer_checkpoint._pickle_calls import Call, Unchangeable
from composer_checkpoint._tree import map_tree
from composer_checkpoint.errors import CorruptCheckpointError, shown
from composer_checkpoint.unpickler import (
    PLAIN_GLOBALS,
    PickledCounter,
    PickledOrderedDict,
    PickledSlice,
    PickledText,
    RestrictedUnpickler,
    refuse_global,
    run_restricted,
    scan,
)

__all__ = ["array_globals", "plain_array", "plain_dtype", "safe_unpickle"]

# Booleans, numbers, bytes and text: no objects, and no structures or dates, whose dtypes carry a state of their own.
_PLAIN_KINDS = frozenset("biufcSU")

_MAX_DIMS = 64

# Stands for the class itself, which would make arrays of any size when it is called.
_ARRAY_CLASS = object()


@cache
def array_globals() -> Mapping[str, Any]:
    """Return what a pickle of arrays and tensors may name."""
    return {
        "numpy.ndarray": _ARRAY_CLASS,
        "numpy.dtype": PickledDtype,
        "numpy._core.multiarray._reconstruct": _reconstruct,
        "numpy._core.multiarray.scalar": _scalar,
        "numpy._core.numeric._frombuffer": _frombuffer,
        "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
        "torch.storage._load_from_bytes": _load_storage,
        "torch.Size": _size,
        "torch.device": torch.device,
        "torch.torch_version.TorchVersion": PickledText,
        **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
    }


def plain_dtype(name: Any) -> np.dtype[Any]:
    """Return a dtype of numbers or text by its short name, such as `f8`."""
    if type(name) is not str or len(name) > 12:
        raise CorruptCheckpointError(f"an array's dtype is {shown(name)}, not a name. Load another checkpoint.")
    dtype = np.dtype(name)
    if dtype.kind not in _PLAIN_KINDS:
        refuse_global(f"an array of {dtype}")
    return dtype


class PickledDtype:
    """What `numpy.dtype(...)` makes in a pickle; the byte order follows as a state."""

    def __init__(self, name: Any, align: Any = False, copy: Any = True) -> None:
        self.dtype = plain_dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        if order not in ("<", ">", "|", "="):
            raise ValueError("no byte order")
        self.dtype = self.dtype.newbyteorder(order)


class _PickledArray(np.ndarray[Any, Any]):
    """An array that takes over its state only where it fits; `_reconstruct` makes it empty."""

    pickled_dtype: np.dtype[Any] = np.dtype(np.int8)

    def __setstate__(self, state: Any, /) -> None:
        _, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, PickledDtype) or type(data) is not bytes or type(shape) is not tuple:
            raise ValueError("the state of an array is a shape, a dtype and bytes")
        if len(shape) > _MAX_DIMS or any(type(size) is not int or not 0 <= size < 1 << 63 for size in shape):
            raise ValueError(f"a shape has up to {_MAX_DIMS} whole numbers from 0")
        if math.prod(shape) * dtype.dtype.itemsize != len(data):
            raise ValueError(f"shape {shape} of {dtype.dtype} does not fill {len(data)} bytes")
        native = dtype.dtype.newbyteorder("=")  # of others NumPy makes a copy, and a pickle might name one often
        super().__setstate__((1, shape, native, bool(is_fortran), data))  # pyright: ignore[reportArgumentType]  # NumPy wants a plain bool
        self.pickled_dtype = dtype.dtype  # for `plain_array`: NumPy 2.5 deprecates to set `dtype`


class _PickledTensor(Unchangeable, torch.Tensor):
    """A tensor that cannot be given another geometry, nor hooks."""


class _PickledStorage(Unchangeable):
    """A storage whose bytes cannot be said to be other ones."""

    __slots__ = ("storage",)

    def __init__(self, storage: torch.storage.TypedStorage) -> None:
        self.storage = storage


def plain_array(value: Any) -> Any:
    """Return an array, tensor, storage or slice as what it is without its guard; anything else as it is."""
    if type(value) is _PickledArray:
        array = value.view(np.ndarray)
        return array if array.dtype == value.pickled_dtype else array.view(value.pickled_dtype)
    if type(value) is _PickledTensor:
        return value.as_subclass(torch.Tensor)
    if type(value) is PickledSlice:
        return value.itself()
    return value.storage if type(value) is _PickledStorage else value


def _reconstruct(subtype: Any, shape: Any, typecode: Any) -> np.ndarray[Any, Any]:
    if subtype is not _ARRAY_CLASS or shape != (0,):
        raise ValueError("only empty arrays are reconstructed")
    return _PickledArray((0,), np.int8)


def _frombuffer(buffer: Any, dtype: Any, shape: Any, order: Any, axis_order: Any = None) -> np.ndarray[Any, Any]:
    if not isinstance(buffer, bytes | bytearray) or not isinstance(dtype, PickledDtype) or axis_order is not None:
        raise ValueError("an array has bytes and a dtype")
    return np.frombuffer(buffer, dtype.dtype).reshape(shape, order=order)


def _size(dims: Any = ()) -> torch.Size:
    if type(dims) is not tuple:
        raise ValueError("a size is made of a tuple")
    return torch.Size(dims)


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, PickledDtype) or type(data) is not bytes or len(data) != dtype.dtype.itemsize:
        raise ValueError("a scalar has a dtype and as many bytes")
    return np.frombuffer(data, dtype.dtype)[0]


def _load_storage(data: Any) -> Any:
    if type(data) is not bytes:
        raise ValueError("a storage is bytes")
    read_legacy_bytes(memoryview(data))
    return _PickledStorage(torch.load(io.BytesIO(data), weights_only=True))


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    if not isinstance(storage, _PickledStorage) or not isinstance(storage.storage, torch.storage.TypedStorage):
        raise ValueError("a tensor has a storage")
    storage = storage.storage
    untyped = storage._untyped_storage  # pyright: ignore[reportPrivateUsage]  # the public way warns of its end
    item_bytes = storage.dtype.itemsize
    check_geometry("a tensor", size, stride, offset, untyped.nbytes() // item_bytes, item_bytes)
    tensor = torch.empty(0, dtype=storage.dtype).set_(untyped, offset, size, stride)
    return tensor.as_subclass(_PickledTensor)


def safe_unpickle(source: Any, allow: Mapping[str, Any] | None = None) -> Any:
    """Read a pickle that holds plain data, NumPy arrays or tensors; refuse every other one before it ran.

    Args:
        source: The bytes, a path, or a file opened for reading bytes.
        allow: What the pickle may name besides, by dotted name, such as
            `{"torch.distributed.checkpoint.metadata.Metadata": Metadata}`. Its values can be called by the pickle with
            any arguments, and get any attributes if they are classes.

    Returns:
        The object.

    Raises:
        UnsafeCheckpointError: If the pickle asks for anything else; the message names it.
        CorruptCheckpointError: If it is not a whole pickle.

    Example:
        >>> safe_unpickle(pickle.dumps({"epoch": 3, "lengths": (1, 2)}))
        {'epoch': 3, 'lengths': (1, 2)}
        >>> safe_unpickle(pickle.dumps(os.getcwd))
        Traceback (most recent call last):
        composer_checkpoint.errors.UnsafeCheckpointError: the file asks for posix.getcwd (global not in allowlist), ...
    """
    if isinstance(source, str | os.PathLike):
        source = Path(source).read_bytes()
    elif not isinstance(source, bytes | bytearray | memoryview):
        source = source.read()
    data: bytes | memoryview = memoryview(source)
    scan(data)
    table = {**PLAIN_GLOBALS, **array_globals(), **(allow or {})}
    return map_tree(run_restricted(RestrictedUnpickler(data, table)), _itself, shared=True)


def _itself(_: str, value: Any) -> Any:
    """Return what a thing stands for that was built with checks, and anything else as it is."""
    match value:
        case PickledOrderedDict():
            ordered = OrderedDict(value)
            vars(ordered).update(vars(value))
            return ordered
        case PickledCounter():
            return Counter(value)
        case deque():
            return deque(map(plain_array, value), value.maxlen)
        case _:
            return Call.itself(plain_array(value))

"""Inspection of a checkpoint's pickle, with descriptions in place of tensors, and safe unpickling of plain data.

Inspection shows the content of a file (names, dtypes, shapes, and the location of each tensor's bytes) without reading
the tensors, and refuses anything that must not reach torch's own loader.
"""

import io
import mmap as mapping
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from composer_checkpoint._tree import named_leaves, unique_name
from composer_checkpoint.errors import CorruptCheckpointError, UnsafeCheckpointError, shown
from composer_checkpoint.file_io import FileReader
from composer_checkpoint.pickles import (
    PLAIN_GLOBALS,
    Budget,
    PickledText,
    RestrictedUnpickler,
    any_state,
    check_geometry,
    run_restricted,
    scan,
    unknown_global,
)

# The names by which torch wrote dtypes before it had untyped storages. It still writes most dtypes in this way.
_STORAGES = (
    "Double Float Half BFloat16 Long Int Short Char Byte Bool ComplexDouble ComplexFloat QUInt8 QInt8 QInt32 QUInt4x2 "
    "QUInt2x4"
)
# Not the public attribute `dtype`, which warns that typed storages are deprecated.
STORAGE_DTYPES: Mapping[str, torch.dtype] = {
    f"{name}Storage": getattr(torch, f"{name}Storage")._dtype for name in _STORAGES.split()
}

# Dense components of a sparse tensor by its layout, in the order in which they are pickled.
SPARSE_PARTS = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}

_MAX_UNKNOWN = 1000

# Containers that a plain pickle may have, but torch's weights-only loader does not support.
_NOT_OF_TORCH = frozenset(
    ["collections.defaultdict", "collections.deque", *(f"builtins.{name}" for name in ("int", "float", "list", "dict"))]
)


@dataclass(frozen=True, slots=True)
class Dtype:
    """Name of a dtype, and the bytes of one element."""

    name: str
    item_bytes: int


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """Range of bytes in the file, and the list that collects the tensors that use it."""

    key: str
    dtype: Dtype
    numel: int
    views: "list[TensorSpec]" = field(default_factory=list, compare=False, repr=False)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.item_bytes


@dataclass(slots=True, eq=False)
class TensorSpec:
    """Description of a tensor: its geometry, and the location of its bytes.

    `is_conj` and `is_neg` mean that the elements must be conjugated or negated after reading.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: StorageSpec
    is_conj: bool = False
    is_neg: bool = False

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its elements in a contiguous copy."""
        return prod(self.shape) * self.dtype.item_bytes

    @property
    def byte_range(self) -> tuple[int, int] | None:
        """Return the range of its elements in the storage if they are contiguous and in row-major order."""
        expected = 1
        for count, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            # The stride of a dim of size 1 is arbitrary.
            if count != 1 and step != expected:
                return (0, 0) if self.size_bytes == 0 else None
            expected *= count
        start = self.offset * self.dtype.item_bytes
        return start, start + self.size_bytes


@dataclass(slots=True, eq=False)
class SparseSpec:
    """Description of a sparse tensor: its layout, shape, and dense components by name.

    `is_coalesced` is `None` where the file does not record it.
    """

    layout: str
    shape: tuple[int, ...]
    parts: Mapping[str, TensorSpec]
    is_coalesced: bool | None

    @property
    def dtype(self) -> Dtype:
        return self.parts["values"].dtype

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts.values())


@dataclass(slots=True)
class PickleInspection:
    """Result of an inspection: the tree, its tensors by name, its storages by key, and globals not on the allowlist.

    `tensors` are dense; the components of a sparse tensor in `sparse` are among them, as `name/indices`. `views` has
    all tensors, even those without a name, such as one in a set. `offsets` of the storages' bytes in the file are known
    only for files of torch before 1.6.
    """

    tree: Any = None
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    sparse: dict[str, SparseSpec] = field(default_factory=dict)
    views: list[TensorSpec] = field(default_factory=list)
    storages: dict[str, StorageSpec] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    unknown_globals: set[str] = field(default_factory=set)


def inspect_pickle(
    data: bytes | memoryview, *, record_unknown: bool = False, drop_attributes: bool = False
) -> PickleInspection:
    """Inspect a pickle of torch, with descriptions in place of tensors.

    With `record_unknown`, globals that are not on the allowlist are collected, with an inert object in place of each;
    otherwise the first is refused. With `drop_attributes`, tensors with Python attributes are read, without these.
    """
    # Before anything is built; the restricted unpickler relies on it.
    scan(data)
    inspection = PickleInspection()
    table = {**_stand_ins(), **_WITHOUT_ATTRIBUTES} if drop_attributes else _stand_ins()
    inspection.tree = run_restricted(_InspectingUnpickler(data, table, inspection, record_unknown))
    for name, spec in named_leaves(inspection.tree, cast("type[Any]", TensorSpec | SparseSpec)):
        (inspection.tensors if isinstance(spec, TensorSpec) else inspection.sparse)[name] = spec
    # Components get unique names, since a dict may have a tensor under the name of one.
    taken = dict.fromkeys(inspection.tensors, 0)
    for name, spec in inspection.sparse.items():
        inspection.tensors |= {unique_name(f"{name}/{part}", taken): own for part, own in spec.parts.items()}
    names = {id(tensor): name for name, tensor in inspection.tensors.items()}
    # All views are checked, not only the named ones: torch would build the others as well.
    for tensor in inspection.views:
        item_bytes = tensor.dtype.item_bytes
        numel = tensor.storage.size_bytes // item_bytes
        name = names.get(id(tensor), "a tensor")
        check_geometry(name, tensor.shape, tensor.stride, tensor.offset, numel, item_bytes)
    return inspection


class Unknown:
    """Base class of inert objects, one for each class not on the allowlist; they accept all calls and do nothing."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Unknown":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    __setstate__ = __setitem__ = append = extend = add = __init__

    def __call__(self, *args: Any, **kwargs: Any) -> "Unknown":
        return self


class _InspectingUnpickler(RestrictedUnpickler):
    with_items = (dict, Unknown)

    def __init__(
        self, data: bytes | memoryview, table: Mapping[str, Any], inspection: PickleInspection, record_unknown: bool
    ) -> None:
        super().__init__(data, table, {**_ARRAY_STATES, Unknown: any_state})
        self.inspection = inspection
        self.record_unknown = record_unknown
        self.unknown: dict[str, type[Unknown]] = {}

    def find_unknown(self, name: str) -> Any:
        if not self.record_unknown:
            return super().find_unknown(name)
        if name not in self.unknown:
            if len(self.unknown) >= _MAX_UNKNOWN:  # bounds the memory for classes made below
                raise UnsafeCheckpointError(
                    f"the file asks for more than {_MAX_UNKNOWN} functions and classes that checkpoints do not need; "
                    f"nothing of it was run. Load another file."
                )
            self.unknown[name] = type("Unknown", (Unknown,), {"name": name})
            self.inspection.unknown_globals.add(name)
        return self.unknown[name]

    def persistent_load(self, pid: Any, /) -> StorageSpec:
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] not in ("storage", b"storage"):
            return super().persistent_load(pid)
        # The format before torch 1.6 has a sixth item, which once described a view of another storage; now it is None.
        _, dtype, key, _, numel, *view = pid
        if not isinstance(dtype, Dtype) or type(key) is not str or type(numel) is not int or not 0 <= numel < 1 << 60:
            raise CorruptCheckpointError(
                f"a tensor's bytes are described as {shown(pid)}, without a dtype, a key or a size. "
                f"Load another checkpoint."
            )
        storage = StorageSpec(key, dtype, numel, self.inspection.views)
        known = self.inspection.storages.setdefault(key, storage)
        # An empty storage may be shared by tensors of several dtypes.
        if view not in ([], [None]) or (known != storage and known.size_bytes | storage.size_bytes):
            raise CorruptCheckpointError(
                f"the bytes {shown(key)} are described twice, as {known.numel} of {known.dtype.name} and as "
                f"{storage.numel} of {storage.dtype.name}. Load another checkpoint."
            )
        return storage


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, hooks: Any = None, *rest: Any
) -> TensorSpec:
    return _tensor_v3(storage, offset, size, stride, requires_grad, hooks, storage.dtype, *rest)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> TensorSpec:
    if not isinstance(storage, StorageSpec) or not isinstance(dtype, Dtype):
        raise ValueError("a tensor has a storage and a dtype")
    lazily: Mapping[str, Any] = metadata or {}
    # A value of True is the flag of a lazy conjugation or negation; anything else would be a Python attribute.
    if hooks or any(value is not True for value in lazily.values() if value):
        raise ValueError("a tensor has no hooks")
    tensor = TensorSpec(dtype, tuple(size), tuple(stride), offset, storage, "conj" in lazily, "neg" in lazily)
    storage.views.append(tensor)
    return tensor


def _parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> Any:
    if hooks or state:
        raise ValueError("a parameter has no hooks and no attributes")
    return data


def _device_tensor(data: Any, dtype: Any, device: Any, requires_grad: Any) -> TensorSpec:
    """Describe a tensor of a device without storages, such as XLA, by its elements on the CPU."""
    if not isinstance(data, TensorSpec) or data.dtype != dtype:
        raise ValueError("a tensor of a device has elements of its dtype")
    return data


def _sparse(layout: Any, data: Any) -> SparseSpec:
    names = SPARSE_PARTS.get(layout) if type(layout) is str else None
    if names is None or not isinstance(data, list | tuple) or len(data) <= len(names):
        raise ValueError("a sparse tensor has a known layout, its parts and a size")
    parts, size, rest = data[: len(names)], data[len(names)], data[len(names) + 1 :]
    if not all(isinstance(part, TensorSpec) for part in parts) or not _is_size(size):
        raise ValueError("a sparse tensor consists of dense ones and has a size that can be counted")
    # After the size, torch 2.1 and later write whether a coordinate tensor is coalesced.
    if len(rest) > (layout == "sparse_coo") or any(value not in (None, True, False) for value in rest):
        raise ValueError("a sparse tensor is coalesced or not")
    return SparseSpec(layout, tuple(size), dict(zip(names, parts, strict=True)), rest[0] if rest else None)


def _is_size(size: Any) -> bool:
    is_counts = isinstance(size, list | tuple) and all(type(count) is int and count >= 0 for count in size)
    return is_counts and prod(size) < 1 << 63


@cache
def _stand_ins() -> Mapping[str, Any]:
    rebuilding: dict[str, Callable[..., Any]] = {
        "_rebuild_tensor": _tensor,
        "_rebuild_tensor_v2": _tensor,
        "_rebuild_tensor_v3": _tensor_v3,
        "_rebuild_qtensor": lambda storage, offset, size, stride, _, *rest: _tensor(
            storage, offset, size, stride, *rest
        ),
        "_rebuild_parameter": _parameter,
        "_rebuild_parameter_with_state": _parameter,
        "_rebuild_device_tensor_from_cpu_tensor": _device_tensor,
        "_rebuild_sparse_tensor": _sparse,
        # A string instead of a `TensorSpec`, since a meta tensor has neither bytes nor a storage.
        "_rebuild_meta_tensor_no_storage": lambda dtype, size, stride, requires_grad: f"meta {shown(tuple(size))}",
    }
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return {
        **{name: value for name, value in PLAIN_GLOBALS.items() if name not in _NOT_OF_TORCH},
        **{name: value for name, value in array_globals().items() if name.startswith("numpy.")},
        **{f"torch._utils.{name}": function for name, function in rebuilding.items()},
        **{
            f"torch.{name}": Dtype(str(dtype).removeprefix("torch."), dtype.itemsize)
            for name, dtype in STORAGE_DTYPES.items()
        },
        **{f"torch.{name}": Dtype(name, dtype.itemsize) for name, dtype in dtypes.items()},
        **{f"torch.{name}": name for name, value in vars(torch).items() if isinstance(value, torch.qscheme)},
        "torch.storage.UntypedStorage": Dtype("uint8", 1),
        "torch.Size": tuple,
        "torch.device": torch.device,
        "torch.serialization._get_layout": lambda name: (
            name.removeprefix("torch.") if type(name) is str else shown(name)
        ),
        "torch.torch_version.TorchVersion": PickledText,
    }


LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_LEADING_PICKLES = 3  # magic number, version, and the writer's byte order and sizes


def read_legacy_pt(file: FileReader | bytes, *, record_unknown: bool = False) -> PickleInspection:
    """Read and check everything but the tensors' elements of a file of torch before 1.6."""
    if isinstance(file, bytes):
        return _read_legacy(memoryview(file), record_unknown)
    mapped = mapping.mmap(file.descriptor, file.size_bytes, access=mapping.ACCESS_READ)
    with mapped, memoryview(mapped) as view:
        return _read_legacy(view, record_unknown)


def _read_legacy(view: memoryview, record_unknown: bool) -> PickleInspection:
    pickles: list[PickleInspection] = []
    position = 0
    # The leading pickles are checked as well, since torch unpickles all of them. The last one is the list of storages,
    # in the order in which their bytes follow.
    for number in range(_LEADING_PICKLES + 2):
        start, position = position, scan(view, position)
        is_content = number == _LEADING_PICKLES
        pickles.append(inspect_pickle(bytes(view[start:position]), record_unknown=record_unknown and is_content))
    inspection, keys = pickles[_LEADING_PICKLES], pickles[-1].tree
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(inspection.storages):
        raise CorruptCheckpointError("the file lists other storages than its tensors need. Load another checkpoint.")
    for key in keys:
        storage = inspection.storages[key]
        header = bytes(view[position : position + 8])
        inspection.offsets[key] = position + 8
        position += 8 + storage.size_bytes
        if len(header) < 8 or struct.unpack("<q", header)[0] != storage.numel or position > len(view):
            raise CorruptCheckpointError(
                f"the file of {len(view)} bytes does not have the {storage.size_bytes} bytes of storage {shown(key)}: "
                f"it was cut short or damaged. Load another checkpoint."
            )
    if position != len(view):
        raise CorruptCheckpointError(
            f"the file has {len(view) - position} more bytes after its last storage. Load another checkpoint."
        )
    return inspection


# Booleans, numbers, bytes and text. Objects are refused, and so are structures and dates, whose dtypes have a state.
_PLAIN_KINDS = frozenset("biufcSU")

_MAX_DIMS = 64  # NumPy's own limit

# Placeholder for the array class, which a pickle could otherwise call to allocate an array of any size.
_ARRAY_CLASS = object()


@cache
def array_globals() -> Mapping[str, Any]:
    """Return the allowlist for pickles of arrays and tensors."""
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
    """Return the dtype of numbers or text with a short name, such as `f8`."""
    # Short, since NumPy would also parse the description of a structure, of any length.
    if type(name) is not str or len(name) > 12:
        raise CorruptCheckpointError(f"an array's dtype is {shown(name)}, not a name. Load another checkpoint.")
    dtype = np.dtype(name)
    if dtype.kind not in _PLAIN_KINDS:
        raise unknown_global(f"an array of {dtype}")
    return dtype


class PickledDtype:
    """Result of `numpy.dtype(...)` in a pickle, whose byte order follows as a state."""

    def __init__(self, name: Any, align: Any = False, copy: Any = True) -> None:
        self.dtype = plain_dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        if order not in ("<", ">", "|", "="):
            raise ValueError("no byte order")
        self.dtype = self.dtype.newbyteorder(order)


def _array_state(state: Any, budget: Budget) -> Any:
    _, shape, dtype, is_fortran, data = state
    if not isinstance(dtype, PickledDtype) or type(data) is not bytes or type(shape) is not tuple:
        raise ValueError("the state of an array is a shape, a dtype and bytes")
    if len(shape) > _MAX_DIMS or any(type(size) is not int or not 0 <= size < 1 << 63 for size in shape):
        raise ValueError(f"a shape has up to {_MAX_DIMS} whole numbers from 0")
    if prod(shape) * dtype.dtype.itemsize != len(data):
        raise ValueError(f"shape {shape} of {dtype.dtype} does not fill {len(data)} bytes")
    budget.charge(len(data))  # NumPy copies arrays of the other byte order
    return 1, shape, dtype.dtype, bool(is_fortran), data  # NumPy wants a plain bool


_ARRAY_STATES = {np.ndarray: _array_state, PickledDtype: any_state}


def _reconstruct(subtype: Any, shape: Any, typecode: Any) -> np.ndarray[Any, Any]:
    # NumPy always writes this shape. Any other would allocate as much memory as the file asks for.
    if subtype is not _ARRAY_CLASS or shape != (0,):
        raise ValueError("only empty arrays are reconstructed")
    return np.empty(0, np.int8)


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
    read_legacy_pt(data)  # torch.load() runs only after this check
    return torch.load(io.BytesIO(data), weights_only=True)


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    if not isinstance(storage, torch.storage.TypedStorage):
        raise ValueError("a tensor has a storage")
    untyped = storage._untyped_storage  # pyright: ignore[reportPrivateUsage]  # the public way is deprecated and warns
    item_bytes = storage.dtype.itemsize
    check_geometry("a tensor", size, stride, offset, untyped.nbytes() // item_bytes, item_bytes)
    return torch.empty(0, dtype=storage.dtype).set_(untyped, offset, size, stride)


def safe_unpickle(source: Any, allow: Mapping[str, Any] | None = None) -> Any:
    """Load a pickle of plain data, NumPy arrays or tensors. Any other pickle is refused before it runs.

    Args:
        source: The bytes, a path, or a file opened in binary mode.
        allow: Further allowed globals by dotted name, such as
            `{"torch.distributed.checkpoint.metadata.Metadata": Metadata}`. The pickle can call them with any arguments,
            and set any attributes of them if they are classes.

    Returns:
        The object.

    Raises:
        UnsafeCheckpointError: If the pickle needs a global that is not allowed, with its name.
        CorruptCheckpointError: If it is not a whole pickle.

    Example:
        >>> import pickle
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
    allow = allow or {}
    states = {**_ARRAY_STATES, **{kind: any_state for kind in allow.values() if isinstance(kind, type)}}
    found = run_restricted(RestrictedUnpickler(data, {**PLAIN_GLOBALS, **array_globals(), **allow}, states))
    for _ in named_leaves(found, torch.Tensor):  # raises if it is nested too deeply for readers
        pass
    return found


def _tensor_without_attributes(function: Any, kind: Any, args: Any, state: Any) -> TensorSpec | SparseSpec:
    tensor = function(*args)
    if not isinstance(tensor, TensorSpec | SparseSpec):
        raise ValueError("only a tensor is rebuilt from its type")
    return tensor


def _tensor_class(*_: Any) -> None:
    raise ValueError("tensors are rebuilt, not called for")


# torch pickles a tensor that has Python attributes in this way. DeepSpeed adds attributes to parameters.
_WITHOUT_ATTRIBUTES: Mapping[str, Any] = {
    "torch._tensor._rebuild_from_type_v2": _tensor_without_attributes,
    "torch.Tensor": _tensor_class,
}

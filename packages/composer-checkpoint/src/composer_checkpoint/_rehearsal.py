"""A dry run of a `.pt` file's pickle, in which descriptions stand in for tensors.

It shows what the file holds (names, dtypes, shapes, and which bytes are whose) without reading those bytes, and refuses
whatever torch's own loader should not get to see.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from composer_checkpoint._geometry import check_geometry
from composer_checkpoint._pickle_calls import Unchangeable
from composer_checkpoint._tree import named_leaves, untaken
from composer_checkpoint.errors import CorruptCheckpointError, UnsafeCheckpointError, shown
from composer_checkpoint.unpickler import PLAIN_GLOBALS, PickledText, RestrictedUnpickler, run_restricted, scan

__all__ = [
    "SPARSE_PARTS",
    "AnyTensorSpec",
    "Rehearsal",
    "RehearsingUnpickler",
    "SparseSpec",
    "StorageSpec",
    "TensorSpec",
    "rehearse",
]

# The names in which torch wrote dtypes before it had untyped storages, and still writes most.
_STORAGE_DTYPES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "ComplexDoubleStorage": ("complex128", 16),
    "ComplexFloatStorage": ("complex64", 8),
    "QUInt8Storage": ("quint8", 1),
    "QInt8Storage": ("qint8", 1),
    "QInt32Storage": ("qint32", 4),
    "QUInt4x2Storage": ("quint4x2", 1),
    "QUInt2x4Storage": ("quint2x4", 1),
}

# The dense tensors that a sparse one consists of, by its layout, in the order in which they are pickled.
SPARSE_PARTS = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}

_MAX_UNKNOWN = 1000

# Containers that a plain pickle may have, and that torch's weights-only loader does not fill.
_NOT_OF_TORCH = frozenset(
    ["collections.defaultdict", "collections.deque", *(f"builtins.{name}" for name in ("int", "float", "list", "dict"))]
)


# Without slots the two have no __setstate__ of the dataclass's own, which a pickle could call.
@dataclass(frozen=True)
class Dtype(Unchangeable):
    """A dtype's name, and the bytes of one element."""

    name: str
    item_bytes: int


@dataclass(frozen=True)
class StorageSpec(Unchangeable):
    """A stretch of bytes in the file, and where the tensors that look at it are collected."""

    key: str
    dtype: Dtype
    numel: int
    views: "list[TensorSpec]" = field(default_factory=list, compare=False, repr=False)

    @property
    def size_bytes(self) -> int:
        """How many bytes it has."""
        return self.numel * self.dtype.item_bytes


class AnyTensorSpec(Unchangeable):
    """What stands for one tensor, dense or sparse."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class TensorSpec(AnyTensorSpec):
    """A tensor that is not there: how it looks and where its bytes would be.

    Its elements are conjugated or negated, if it says so, once they are read.
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
        """The bytes of its elements, were they copied out."""
        return prod(self.shape) * self.dtype.item_bytes

    @property
    def byte_range(self) -> tuple[int, int] | None:
        """Where its elements lie in its storage if they lie there in row-major order, one after the other."""
        expected = 1
        for count, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if count != 1 and step != expected:
                return (0, 0) if self.size_bytes == 0 else None
            expected *= count
        start = self.offset * self.dtype.item_bytes
        return start, start + self.size_bytes


@dataclass(slots=True, eq=False)
class SparseSpec(AnyTensorSpec):
    """A sparse tensor that is not there: its layout, its size, and the dense ones that it consists of, by their names.

    `is_coalesced` is `None` where the file does not say.
    """

    layout: str
    shape: tuple[int, ...]
    parts: Mapping[str, TensorSpec]
    is_coalesced: bool | None

    @property
    def dtype(self) -> Dtype:
        """The dtype of its values."""
        return self.parts["values"].dtype

    @property
    def size_bytes(self) -> int:
        """The bytes of all its parts."""
        return sum(part.size_bytes for part in self.parts.values())


@dataclass(slots=True)
class Rehearsal:
    """What a pickle would make: the tree, its tensors by name, its storages by key, and the names it may not have.

    `tensors` are dense; a sparse one in `sparse` has its parts there, as `name/indices`. `views` has all tensors, also
    those that no name leads to, such as one in a set.
    """

    tree: Any = None
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    sparse: dict[str, SparseSpec] = field(default_factory=dict)
    views: list[TensorSpec] = field(default_factory=list)
    storages: dict[str, StorageSpec] = field(default_factory=dict)
    unknown_globals: set[str] = field(default_factory=set)

    def name_tensors(self) -> None:
        """Find the tensors of the tree."""
        for name, spec in named_leaves(self.tree, AnyTensorSpec):
            if isinstance(spec, TensorSpec):
                self.tensors[name] = spec
            elif isinstance(spec, SparseSpec):
                self.sparse[name] = spec
        taken = dict.fromkeys(self.tensors, 0)
        for name, spec in self.sparse.items():
            self.tensors |= {untaken(f"{name}/{part}", taken): own for part, own in spec.parts.items()}


def rehearse(data: bytes | memoryview, *, record_unknown: bool = False) -> Rehearsal:
    """Run a pickle of torch's with stand-ins for all that it makes.

    Args:
        data: The pickle.
        record_unknown: Collect the names that are not allowed, and go on with an inert object for each, rather than
            refuse the first.

    Raises:
        UnsafeCheckpointError: If the pickle asks for what checkpoints do not need.
        CorruptCheckpointError: If it is damaged, or a tensor does not fit its storage.
    """
    scan(data)
    rehearsal = Rehearsal()
    rehearsal.tree = run_restricted(RehearsingUnpickler(data, rehearsal, record_unknown))
    rehearsal.name_tensors()
    names = {id(tensor): name for name, tensor in rehearsal.tensors.items()}
    for tensor in rehearsal.views:
        _check_view(names.get(id(tensor), "a tensor"), tensor)
    return rehearsal


def _check_view(name: str, tensor: TensorSpec) -> None:
    item_bytes = tensor.dtype.item_bytes
    numel = tensor.storage.size_bytes // item_bytes
    check_geometry(name, tensor.shape, tensor.stride, tensor.offset, numel, item_bytes)


class RehearsingUnpickler(RestrictedUnpickler):
    """Reads a pickle into what is known of its tensors; a subclass may know more names."""

    def __init__(self, data: bytes | memoryview, rehearsal: Rehearsal, record_unknown: bool) -> None:
        super().__init__(data, _stand_ins())
        self.rehearsal = rehearsal
        self.record_unknown = record_unknown
        self.unknown: dict[str, type[Unknown]] = {}

    def find_unknown(self, name: str) -> Any:
        if not self.record_unknown:
            return super().find_unknown(name)
        if name not in self.unknown:
            if len(self.unknown) >= _MAX_UNKNOWN:
                raise UnsafeCheckpointError(
                    f"the file asks for more than {_MAX_UNKNOWN} functions and classes that checkpoints do not need; "
                    f"nothing of it was run. Load another file."
                )
            self.unknown[name] = type("Unknown", (Unknown,), {"name": name})
            self.rehearsal.unknown_globals.add(name)
        return self.unknown[name]

    def persistent_load(self, pid: Any, /) -> StorageSpec:
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] not in ("storage", b"storage"):
            return super().persistent_load(pid)
        _, dtype, key, _, numel, *view = pid
        if not isinstance(dtype, Dtype) or type(key) is not str or type(numel) is not int or not 0 <= numel < 1 << 60:
            raise CorruptCheckpointError(
                f"a tensor's bytes are described as {shown(pid)}, without a dtype, a key or a size. "
                f"Load another checkpoint."
            )
        storage = StorageSpec(key, dtype, numel, self.rehearsal.views)
        known = self.rehearsal.storages.setdefault(key, storage)
        # An empty storage may be shared by tensors of several dtypes.
        if view not in ([], [None]) or (known != storage and known.size_bytes | storage.size_bytes):
            raise CorruptCheckpointError(
                f"the bytes {shown(key)} are described twice, as {known.numel} of {known.dtype.name} and as "
                f"{storage.numel} of {storage.dtype.name}. Load another checkpoint."
            )
        return storage


class Unknown:
    """Stands for an object of a class that is not allowed: takes everything, does nothing."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Unknown":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> "Unknown":
        return self

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Do nothing."""

    def extend(self, values: Any) -> None:
        """Do nothing."""

    def add(self, value: Any) -> None:
        """Do nothing."""


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TensorSpec:
    return _checked_tensor(storage, storage.dtype, offset, size, stride, *rest)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> TensorSpec:
    return _checked_tensor(storage, dtype, offset, size, stride, requires_grad, hooks, metadata)


def _quantized(
    storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, requires_grad: Any, hooks: Any
) -> TensorSpec:
    return _checked_tensor(storage, storage.dtype, offset, size, stride, requires_grad, hooks)


def _checked_tensor(
    storage: Any,
    dtype: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    *rest: Any,
) -> TensorSpec:
    if not isinstance(storage, StorageSpec) or not isinstance(dtype, Dtype):
        raise ValueError("a tensor has a storage and a dtype")
    if hooks or any(value for mapping in rest if mapping for value in mapping.values() if value is not True):
        raise ValueError("a tensor has no hooks")
    lazily = {name for mapping in rest if mapping for name in mapping}
    tensor = TensorSpec(dtype, tuple(size), tuple(stride), offset, storage, "conj" in lazily, "neg" in lazily)
    storage.views.append(tensor)
    return tensor


def _parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> Any:
    if hooks or state:
        raise ValueError("a parameter has no hooks and no attributes")
    return data


def _sparse(layout: Any, data: Any) -> SparseSpec:
    names = SPARSE_PARTS.get(layout) if type(layout) is str else None
    if names is None or not isinstance(data, list | tuple) or len(data) <= len(names):
        raise ValueError("a sparse tensor has a known layout, its parts and a size")
    parts, size, rest = data[: len(names)], data[len(names)], data[len(names) + 1 :]
    if not all(isinstance(part, TensorSpec) for part in parts) or not isinstance(size, list | tuple):
        raise ValueError("a sparse tensor consists of dense ones and has a size")
    if not all(type(count) is int and count >= 0 for count in size) or prod(size) >= 1 << 63:
        raise ValueError("a size has whole numbers, and not more elements than can be counted")
    # What else there is after the size is a coordinate tensor's being coalesced, since torch 2.1.
    if len(rest) > (layout == "sparse_coo") or any(value not in (None, True, False) for value in rest):
        raise ValueError("a sparse tensor is coalesced or not")
    return SparseSpec(layout, tuple(size), dict(zip(names, parts, strict=True)), rest[0] if rest else None)


def _meta_tensor(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> str:
    return f"meta {shown(tuple(size))}"


def _device(*names: Any) -> str:
    return ":".join(map(shown, names))


def _layout(name: Any) -> str:
    return name.removeprefix("torch.") if type(name) is str else shown(name)


@cache
def _stand_ins() -> Mapping[str, Any]:
    import torch  # here, so that naming this module does not load it

    from composer_checkpoint._pickled_arrays import array_globals

    rebuilding: dict[str, Callable[..., Any]] = {
        "_rebuild_tensor": _tensor,
        "_rebuild_tensor_v2": _tensor,
        "_rebuild_tensor_v3": _tensor_v3,
        "_rebuild_qtensor": _quantized,
        "_rebuild_parameter": _parameter,
        "_rebuild_parameter_with_state": _parameter,
        "_rebuild_sparse_tensor": _sparse,
        "_rebuild_meta_tensor_no_storage": _meta_tensor,
    }
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return {
        **{name: value for name, value in PLAIN_GLOBALS.items() if name not in _NOT_OF_TORCH},
        **{name: value for name, value in array_globals().items() if name.startswith("numpy.")},
        **{f"torch._utils.{name}": function for name, function in rebuilding.items()},
        **{f"torch.{name}": Dtype(*dtype) for name, dtype in _STORAGE_DTYPES.items()},
        **{f"torch.{name}": Dtype(name, dtype.itemsize) for name, dtype in dtypes.items()},
        **{f"torch.{name}": name for name, value in vars(torch).items() if isinstance(value, torch.qscheme)},
        "torch.storage.UntypedStorage": Dtype("uint8", 1),
        "torch.Size": tuple,
        "torch.device": _device,
        "torch.serialization._get_layout": _layout,
        "torch.torch_version.TorchVersion": PickledText,
    }

"""Common interface for reading checkpoints of all formats tensor by tensor."""

import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from composer_checkpoint._pickle_inspection import SPARSE_PARTS
from composer_checkpoint._tree import Names, by_joined_names, children_of, map_tree, named_leaves, resolve_lazy
from composer_checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composer_checkpoint.formats._zip import Readable
from composer_checkpoint.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class SparseParts:
    """Components of a sparse tensor: indices and values by torch's names for them, in the order of torch's pickles.

    `is_coalesced` tells, for the coordinate layout, whether the indices are sorted and unique; `None` if unknown.
    """

    layout: torch.layout
    parts: "Mapping[str, StoredTensor]"
    is_coalesced: bool | None = None

    def put_together(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Read the parts and return the sparse tensor."""
        parts = [part.read() for part in self.parts.values()]
        try:
            # Checked here: torch's kernels do not check indices, and wrong ones would access memory out of bounds.
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


def refuse_sparse(tensors: "Mapping[str, StoredTensor]", what: str) -> None:
    """Raise if there is a sparse tensor, for formats of dense ones only.

    Args:
        tensors: Tensors by name.
        what: Name of the format in the message.

    Raises:
        IncompatibleCheckpointError: If a tensor is sparse.
    """
    for name, tensor in tensors.items():
        if tensor.sparse is not None:
            raise IncompatibleCheckpointError(
                f"{name} is a tensor of layout {tensor.sparse.layout}, and {what} takes dense ones only. Write a .pt "
                f"file, which keeps it, leave it out, or load the file with load_file() and make it dense with "
                f"to_dense()."
            )


def refuse_quantized(tensors: "Mapping[str, StoredTensor]", what: str) -> None:
    """Refuse quantized tensors, since their scale is not stored, without which the elements have no meaning.

    Args:
        tensors: Tensors by name.
        what: Name of the format in the message.

    Raises:
        IncompatibleCheckpointError: If a tensor is quantized.
    """
    for name, tensor in tensors.items():
        if tensor.is_quantized:
            raise IncompatibleCheckpointError(
                f"{name} is quantized, as {tensor.dtype}, and {what} takes plain tensors only. Leave it out, or load "
                f"the file with load_file() and make it plain with dequantize()."
            )


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Tensor that is not in memory.

    Args:
        dtype: Dtype of its elements.
        shape: Shape of the tensor.
        fetch: Function that reads the tensor on each call, on the CPU, with its elements in row-major order.
        storage: Key that is equal for names of the same tensor, such as tied weights. `None` where the checkpoint does
            not record it.
        fetch_range: Function `(start, count)` that reads a range of elements in row-major order, where that needs less
            memory than the whole tensor.
        sparse: Components of a sparse tensor, for which `fetch` returns a sparse one. `None` for a dense tensor.
        place: The range of the file in which the elements lie in row-major order.

    Example:
        >>> stored = as_stored(torch.ones(2, 3))
        >>> stored.size_bytes
        24
        >>> stored.read().sum()
        tensor(6.)
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]
    storage: Hashable | None = None
    fetch_range: Callable[[int, int], torch.Tensor] | None = None
    sparse: SparseParts | None = None
    place: "FileRange | None" = None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its elements, or, for a sparse tensor, of its components."""
        if self.sparse is not None:
            return sum(part.size_bytes for part in self.sparse.parts.values())
        return self.numel * self.dtype.itemsize

    @property
    def is_quantized(self) -> bool:
        """Return whether the elements have values only together with a scale, which is not stored."""
        return str(self.dtype).startswith(("torch.qint", "torch.quint"))

    def read(self) -> torch.Tensor:
        """Read the tensor and return it. The caller owns it.

        Raises:
            CorruptCheckpointError: If its bytes cannot be read.
        """
        return self.fetch()

    def read_range(self, start: int, count: int) -> torch.Tensor:
        """Read `count` elements in row-major order, beginning at `start`.

        Raises:
            IncompatibleCheckpointError: If the tensor is sparse.
        """
        if self.sparse is not None:
            raise IncompatibleCheckpointError(
                f"a tensor is of layout {self.sparse.layout}, and sparse tensors are not read in pieces. Load the file "
                f"with load_file() and make it dense with to_dense()."
            )
        if self.fetch_range is not None:
            return self.fetch_range(start, count)
        # Without a way to read a part, read everything.
        return self.fetch().reshape(-1)[start : start + count]

    def rows(self, start: int, count: int) -> "StoredTensor":
        """Return `count` items of the first dimension, beginning at `start`."""
        shape = (count, *self.shape[1:])
        row = math.prod(self.shape[1:])
        return StoredTensor(
            self.dtype,
            shape,
            lambda: self.read_range(start * row, count * row).reshape(shape),
            None if self.storage is None else (self.storage, start, count),
            lambda first, number: self.read_range(start * row + first, number),
        )

    def to(self, dtype: torch.dtype) -> "StoredTensor":
        """Return the same tensor in another dtype, rounded once, from the stored one."""
        if dtype == self.dtype:
            return self
        if self.sparse is not None:
            # Indices remain integers.
            parts = {**self.sparse.parts, "values": self.sparse.parts["values"].to(dtype)}
            return sparse_stored(self.shape, SparseParts(self.sparse.layout, parts, self.sparse.is_coalesced))
        return StoredTensor(
            dtype,
            self.shape,
            lambda: self.fetch().to(dtype),
            None if self.storage is None else (self.storage, dtype),  # tied weights stay tied
            lambda start, count: self.read_range(start, count).to(dtype),
        )


def as_stored(tensor: torch.Tensor) -> StoredTensor:
    """Wrap a tensor in memory as a `StoredTensor`."""
    plain = resolve_lazy(tensor.detach())
    names = SPARSE_PARTS.get(str(plain.layout).removeprefix("torch."))
    if names is not None:
        is_coordinates = plain.layout == torch.sparse_coo
        # The public methods of coordinates require a coalesced tensor.
        parts = {name: as_stored(getattr(plain, f"_{name}" if is_coordinates else name)()) for name in names}
        is_coalesced = plain.is_coalesced() if is_coordinates else None
        return sparse_stored(tuple(plain.shape), SparseParts(plain.layout, parts, is_coalesced))
    # Empty tensors may all have the address 0, which does not make them one tensor.
    key = (plain.data_ptr(), tuple(plain.stride()), tuple(plain.shape), plain.dtype) if plain.numel() else None
    return StoredTensor(plain.dtype, tuple(plain.shape), lambda: plain.cpu().contiguous(), key)


def sparse_stored(shape: tuple[int, ...], sparse: SparseParts) -> StoredTensor:
    """Return a sparse `StoredTensor` from its components."""
    keys = tuple(part.storage for part in sparse.parts.values())
    same = None if None in keys else (sparse.layout, keys)
    return StoredTensor(sparse.parts["values"].dtype, shape, lambda: sparse.put_together(shape), same, None, sparse)


@dataclass(slots=True)
class TensorSource:
    """Checkpoint that is read tensor by tensor. Close it, or use it in a `with` statement.

    Args:
        format: Name of the format, such as `'composer'` or `'dcp'`.
        tree: All of its content in dicts, lists and tuples, with a `StoredTensor` in place of each tensor.
        size_bytes: Size of its files.
        manifest: The manifest, if any.
        unsafe_globals: Globals beyond data that it refers to. None was imported; an inert object replaces each.
        missing: Names that an index lists and no file has.
        files: Sizes of the files by name, if there are several.
        path: Its path, with links resolved.

    Example:
        >>> import tempfile
        >>> from composer_checkpoint import save_file
        >>> from composer_checkpoint.tensors import open_checkpoint
        >>> path = tempfile.mkdtemp() + "/ep1.pt"
        >>> manifest = save_file({"state": {"model": {"weight": torch.ones(2, 3)}}}, path)
        >>> with open_checkpoint(path) as source:
        ...     {name: tensor.shape for name, tensor in source.tensors.items()}
        {'state/model/weight': (2, 3)}
    """

    format: str
    tree: Any
    size_bytes: int
    manifest: Manifest | None = None
    unsafe_globals: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    path: str = ""
    tensors: Mapping[str, StoredTensor] = field(init=False)
    _open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.tensors = tensors_in(self.tree)

    @property
    def weights(self) -> Mapping[str, StoredTensor]:
        """Return the model's tensors by the model's own names, wherever they are in the tree.

        Names of nested dicts are joined by dots, as in a flat `state_dict()`.

        Raises:
            IncompatibleCheckpointError: If two tensors would get the same name.
        """
        return by_joined_names(self._model(), StoredTensor, ".", "a model, whose names are flat", are_one)

    @property
    def non_weight_entries(self) -> list[str]:
        """Return the names of entries of the model that are not tensors, such as a module's extra state."""
        found: list[str] = []

        def note(name: str, value: Any) -> Any:
            if children_of(value) is None and not isinstance(value, StoredTensor):
                found.append(name)
            return value

        map_tree(self._model(), note, names=Names("."))
        return found

    @property
    def aliases(self) -> dict[str, str]:
        """Return the names of weights that are the same tensor as an earlier one, with the name of that one."""
        return aliases_of(self.weights)

    @property
    def state(self) -> Mapping[str, Any]:
        """Return the training state, such as timestamp and metadata; empty for a file that holds only weights."""
        tree = self.tree
        state = tree.get("state") if isinstance(tree, dict) else None
        return state if isinstance(state, dict) else {}

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def on_close(self, opened: Any) -> "TensorSource":
        """Close another object together with this one, which is returned."""
        self._open.callback(opened.close)
        return self

    def __enter__(self) -> "TensorSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _model(self) -> Any:
        tree = self.tree
        if not isinstance(tree, dict):
            return {}
        state = tree.get("state")
        if isinstance(state, dict) and isinstance(state.get("model"), dict):
            return state["model"]
        # Keys that other libraries commonly use.
        for key in ("model", "module", "state_dict", "model_state_dict"):
            if isinstance(tree.get(key), dict) and next(iter(tensors_in(tree[key])), None) is not None:
                return tree[key]
        return {} if isinstance(state, dict) else tree


class Bytes(Readable, Protocol):
    """Bytes that are read by position, of a file with a name."""

    path: str

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from an offset."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FileRange:
    """Elements that lie in row-major order in an open file, from an offset on."""

    # A class instead of closures, of which 5,000 tensors would need 45,000 objects for the garbage collector to visit.
    file: Bytes
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __call__(self) -> torch.Tensor:
        """Read all elements."""
        return self.read(0, math.prod(self.shape)).reshape(self.shape)

    def read(self, start: int, count: int) -> torch.Tensor:
        """Read a range of elements directly into the tensor's memory."""
        buffer = torch.empty(count * self.dtype.itemsize, dtype=torch.uint8)
        if buffer.numel():
            self.file.read_into(memoryview(cast(Any, buffer.numpy())), self.offset + start * self.dtype.itemsize)
        return buffer.view(self.dtype)


def in_file(file: Bytes, offset: int, dtype: torch.dtype, shape: tuple[int, ...], key: Hashable) -> StoredTensor:
    """Return a tensor whose elements lie in row-major order in an open file."""
    place = FileRange(file, offset, dtype, shape)
    return StoredTensor(dtype, shape, place, key, place.read, place=place)


def tensors_in(tree: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a tree by names such as `state/model/fc.weight`."""
    return dict(named_leaves(tree, StoredTensor))


def are_one(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two are known to be the same tensor, as tied weights are."""
    if one is other:
        return True
    is_known = one.storage is not None and one.numel > 0
    return is_known and (one.storage, one.dtype, one.shape) == (other.storage, other.dtype, other.shape)


def aliases_of(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return the names that are the same tensor as an earlier one, with the name of that one."""
    seen: dict[Hashable, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.storage is not None and tensor.numel:
            first = seen.setdefault((tensor.storage, tensor.dtype, tensor.shape), name)
            if first != name:
                aliases[name] = first
    return aliases

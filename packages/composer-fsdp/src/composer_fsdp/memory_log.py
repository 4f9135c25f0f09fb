"""Log of tensor memory and of communication between ranks."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as tdist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # documented by PyTorch under this name only
from torch.utils._pytree import tree_leaves  # torch has no public name for it

Kind = str
ACTIVATIONS, GATHERED, COMMUNICATION = "activations", "gathered", "communication"

# For each operator: the collective's name, the index of its group argument, and the traffic factor k. With ring
# algorithms a rank in a group of n sends k * (n - 1) / n times the larger of input and output.
_COLLECTIVES = {
    "_allgather_base_": ("all_gather", 2, 1),
    "_reduce_scatter_base_": ("reduce_scatter", 2, 1),
    "allreduce_": ("all_reduce", 1, 2),
    "all_gather_into_tensor": ("all_gather", 2, 1),
    "reduce_scatter_tensor": ("reduce_scatter", 3, 1),
    "all_reduce": ("all_reduce", 2, 2),
}


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory in use at its peak."""

    bytes: int
    place: str
    kinds: dict[Kind, int]


class MemoryLog(TorchDispatchMode):
    """Dispatch mode that records tensor memory after each operation.

    The kind of a storage may become known after its allocation, so totals by kind are computed at the end.

    Attributes:
        works_on_host: Whether new tensors count as host memory.
        calls: The number of collectives, by name.
        sent: The bytes that this rank sent, by collective.
    """

    def __init__(self, place: Callable[[], str], fake_mode: object) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self.works_on_host = False
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._place = place
        self._changes: list[tuple[int, int]] = []  # (storage number, change in bytes)
        self._began = 0
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # of live storages, by address
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._gathered: set[int] = set()
        self._kinds: dict[int, Kind] = {}
        self._on_host: set[int] = set()
        self._places: list[tuple[int, str]] = []  # (index of the first change, phase)

    def mark(self, tensors: Iterable[torch.Tensor], kind: Kind, *, on_host: bool = False) -> None:
        """Set the kind of tensors, retroactively since their allocation."""
        self._note_place()
        for tensor in tensors:
            number = self._see(tensor)
            self._kinds[number] = kind
            if on_host:
                self._on_host.add(number)

    def begin(self) -> None:
        """Restart the counts of collectives and the search for the peak."""
        self._began = len(self._changes)
        self.calls.clear()
        self.sent.clear()

    def peak(self, *, on_host: bool = False) -> Moment:
        """Return the peak of memory on the device or on the host."""
        total = highest = at = 0
        for index, (number, change) in enumerate(self._changes):
            if (number in self._on_host) == on_host:
                total += change
                if index >= self._began and total > highest:
                    highest, at = total, index + 1
        kinds: Counter[Kind] = Counter()
        for number, change in self._changes[:at]:
            if (number in self._on_host) == on_host:
                kinds[self._kinds.get(number, ACTIVATIONS)] += change
        place = next((place for until, place in reversed(self._places) if until < at), self._place())
        return Moment(highest, place, {kind: size for kind, size in kinds.items() if size})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # wrapper subclasses dispatch again with their inner tensors
        self._note_place()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "fsdp":
            self._see_gathering(name, args, kwargs)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._see_collective(name, args, result)
        for tensor in tree_leaves((args, kwargs, result)):
            # Real tensors, such as the ranks of a mesh, are not part of the simulated model.
            if isinstance(tensor, torch.Tensor) and getattr(tensor, "fake_mode", None) is self._fake_mode:
                self._see(tensor)
        self._look_again(self._gathered)
        return result

    def _see_gathering(self, name: str, args: Any, kwargs: Any) -> None:
        """Record the buffers of FSDP2's operators, which resizes their storages without dispatching an operation."""
        if name == "all_gather_copy_in":
            self._mark_new(args[1:2], COMMUNICATION)
            return
        whole = args[0] if name.startswith("chunk_cat") else ()
        self._mark_new(whole, GATHERED)
        out = kwargs.get("out", ())
        is_whole = name == "split_with_sizes_copy"
        self._mark_new(out if is_whole else [out], GATHERED if is_whole else COMMUNICATION)

    def _see_collective(self, name: str, args: Any, result: Any) -> None:
        tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
        self._mark_new(tensors, COMMUNICATION)
        if name in _COLLECTIVES and tensors:
            kind, group_index, times = _COLLECTIVES[name]
            size = _group_size(args[group_index])
            largest = max(t.numel() * t.itemsize for t in tensors)
            self.calls[kind] += 1
            self.sent[kind] += times * largest * (size - 1) // size

    def _mark_new(self, tensors: Iterable[Any], kind: Kind) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                number = self._see(tensor)
                self._kinds.setdefault(number, kind)
                self._gathered.add(number)

    def _see(self, tensor: torch.Tensor) -> int:
        storage = _plain(tensor).untyped_storage()
        address = storage._cdata  # the only unique key: storages of fake tensors have no data pointer
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._sizes)
            self._sizes[number] = 0
            if self.works_on_host:
                self._on_host.add(number)
            self._alive[number] = weakref.ref(storage)
            # Forget the address as soon as the storage is freed, since another storage may reuse it.
            weakref.finalize(storage, self._lose, address, number).atexit = False
        self._change(number, storage.nbytes())
        return number

    def _change(self, number: int, size: int) -> None:
        change = size - self._sizes[number]
        if change:
            self._sizes[number] = size
            self._changes.append((number, change))

    def _lose(self, address: int, number: int) -> None:
        self._change(number, 0)
        self._alive.pop(number, None)
        self._gathered.discard(number)
        self._numbers.pop(address, None)

    def _note_place(self) -> None:
        place = self._place()
        if not self._places or self._places[-1][1] != place:
            # FSDP2 resizes the storages of gathered weights between phases, without dispatching an operation.
            self._look_again(self._alive)
            self._places.append((len(self._changes), place))

    def _look_again(self, numbers: Iterable[int]) -> None:
        for number in tuple(numbers):  # a copy, since a finalizer may remove entries meanwhile
            storage = self._alive[number]() if number in self._alive else None
            if storage is not None:
                self._change(number, storage.nbytes())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _group_size(group: Any) -> int:
    if isinstance(group, int):  # functional collectives that take the group size
        return group
    if isinstance(group, str):
        # Functional collectives take the group's name, which only this private function resolves.
        c10d: Any = tdist.distributed_c10d
        return c10d._resolve_process_group(group).size()
    return tdist.ProcessGroup.unbox(group).size()

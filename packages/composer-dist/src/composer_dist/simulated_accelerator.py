"""A simulated accelerator: a PyTorch device with its own memory, whose tensors are computed on the CPU."""

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _setup_privateuseone_for_python_backend,  # pyright: ignore[reportPrivateUsage]  # see `_register_backend`
)

from composer_dist.devices import Device

__all__ = ["DeviceCounts", "SimulatedAccelerator"]

DEVICE_TYPE = "simgpu"
_DEVICE = torch.device("cpu")  # replaced when the backend is registered, since the name is unknown to torch before
_HOST = torch.device("cpu")
_FILES_TO_SKIP = (str(Path(torch.__file__).parent), __file__)


@dataclass
class DeviceCounts:
    """What the host asked of the device, by the innermost line outside PyTorch (`file:line function`).

    Attributes:
        synchronizations: Waits of the host for the device. As in `torch.cuda.set_sync_debug_mode`, these are copies
            without `non_blocking=True`, reads of values such as `item`, operations whose result has a shape that
            depends on values, such as `nonzero`, and calls of `synchronize` other than an event's.
        event_waits: Calls of `Event.synchronize`.
        copies_to_device: Copies from the host.
        copies_to_host: Copies from the device.
        kernels: Operations that compute on the device. A fused operation on many tensors is one.
    """

    synchronizations: Counter[str] = field(default_factory=lambda: Counter())
    event_waits: Counter[str] = field(default_factory=lambda: Counter())
    copies_to_device: Counter[str] = field(default_factory=lambda: Counter())
    copies_to_host: Counter[str] = field(default_factory=lambda: Counter())
    kernels: Counter[str] = field(default_factory=lambda: Counter())


class SimulatedAccelerator(Device):
    """A device of type `simgpu` with memory of its own, to test code for GPUs on a machine without one.

    It exists within a `with` statement, in the thread that entered it: `torch.randn(2, device="simgpu")`,
    `tensor.to("simgpu")`, `module.to("simgpu")` and `Trainer(device=accelerator)` work there.

    - Operations that mix its tensors with CPU tensors raise, except where CUDA accepts a CPU scalar or CPU indices.
    - `counting` counts synchronizations, copies and kernels by the line that caused them.
    - A copy to pinned memory with `non_blocking=True` is NaN, or the smallest integer, until an event recorded after
      it, its stream or the device has been synchronized. Changing pinned memory before its copy to the device has
      finished raises at that synchronization.
    - `torch.Event`, `torch.Stream`, pinned memory, the functions of `torch.accelerator`, `torch.autocast`, `GradScaler`,
      `torch.save` and `torch.load(map_location=...)` work.
    - A request for more memory than `memory_bytes` raises `torch.OutOfMemoryError`.
    - It has its own random generator, which `torch.manual_seed` seeds.

    Results are those of the CPU's kernels, to the last bit where the CPU would run the same operations. It does not
    simulate NCCL, CUDA graphs, `torch.compile`, sparse or quantized tensors, `torch.Generator(device="simgpu")`, memory
    fragmentation, more than one device, or time. Recurrent layers such as `nn.LSTM` do not run. Streams run in the
    order of the calls, so a missing wait between two of them is not noticed.

    PyTorch cannot unregister a device type. After the first use in a process, `torch.accelerator` therefore refers to
    this type, which is unavailable outside the `with` statement. On a machine with a GPU, use it in a separate process,
    such as one of `run_ranks`.

    Args:
        memory_bytes: Size of the memory.
        shares_cpu_generator: Whether to draw random numbers from the CPU's generator instead, so that a training run
            has the same random numbers as on the CPU.

    Example:
        >>> with SimulatedAccelerator() as accelerator:
        ...     weight = torch.ones(2, device="simgpu", requires_grad=True)
        ...     with accelerator.counting() as counts:
        ...         (weight * 2).sum().backward()
        ...         value = weight.grad[0].item()
        >>> value, counts.synchronizations.total()
        (2.0, 1)
    """

    name: ClassVar[str] = "simulated"
    dist_backend: ClassVar[str] = "gloo"

    def __init__(self, *, memory_bytes: int = 80 * 2**30, shares_cpu_generator: bool = False) -> None:
        if memory_bytes <= 0:
            raise ValueError(f"`memory_bytes={memory_bytes}` must be positive.")
        _register_backend()
        self._device = _DEVICE
        self._memory = _Memory(memory_bytes)
        self._generator = None if shares_cpu_generator else torch.Generator().manual_seed(torch.initial_seed())
        self._default_stream = self._stream = _Stream()
        self._copies: list[_Copy] = []
        self._num_launched = 0
        self._counts: list[DeviceCounts] = []
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        global _current, _is_active
        if _is_active:
            raise RuntimeError("A SimulatedAccelerator is in use already. Leave its `with` statement first.")
        before = _current, _is_active
        self._exit.callback(_make_current, *before)
        _make_current(self, True)
        # Threads of the autograd engine would not have the mode below, and the engine makes none for a device that is
        # registered after the first backward pass.
        self._exit.enter_context(torch.autograd.set_multithreading_enabled(False))
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        self._exit.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)  # `module.to` keeps the parameters of optimizers
        for owner, name, value in _replacements(self):
            self._exit.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        self._exit.enter_context(_Mode())
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def module_to_device(self, module: Any) -> Any:
        """Move a module's parameters and buffers to this device, in place, and return it."""
        return module.to(self._device)

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device, copied asynchronously if its memory is pinned."""
        return tensor.to(self._device, non_blocking=True)

    @contextmanager
    def counting(self) -> Generator[DeviceCounts]:
        """Count what the host asks of the device within the `with` statement."""
        counts = DeviceCounts()
        self._counts.append(counts)
        try:
            yield counts
        finally:
            self._counts = [each for each in self._counts if each is not counts]

    def synchronize(self, device: object = None) -> None:
        """Wait for all operations and copies."""
        self._note("synchronizations")
        self._finish(lambda copy: True)

    def _note(self, kind: str) -> None:
        if not self._counts:
            return
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # `inspect.stack` reads the source of each frame
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_FILES_TO_SKIP):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        for counts in self._counts:
            getattr(counts, kind)[place] += 1

    def _launch(self, on_host: Callable[[], Tensor | None], version: int, arrived: Tensor | None = None) -> None:
        self._num_launched += 1
        self._copies = [each for each in self._copies if each.on_host() is not None]
        self._copies.append(_Copy(self._stream, self._num_launched, on_host, version, arrived))

    def _finish(self, is_done: Callable[["_Copy"], bool]) -> None:
        """Finish those copies for which the predicate is true."""
        done = [copy for copy in self._copies if is_done(copy)]
        self._copies = [copy for copy in self._copies if not is_done(copy)]
        for copy in done:
            copy.finish()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let CPU operations draw from the generator of this device."""
        if self._generator is None:
            yield
            return
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self._generator.get_state())
        try:
            yield
        finally:
            self._generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)


_current: SimulatedAccelerator | None = None  # also after it was left, since its tensors can still be read
_is_active = False


def _make_current(accelerator: SimulatedAccelerator | None, is_active: bool) -> None:
    global _current, _is_active
    _current, _is_active = accelerator or _current, is_active


class _Tensor(Tensor):
    """A tensor of the simulated device; `on_host` holds its values."""

    on_host: Tensor
    allocation: "_Allocation | None"

    @staticmethod
    def __new__(cls, on_host: Tensor) -> "_Tensor":
        tensor = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]  # documented for subclasses
            cls,
            on_host.size(),
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            layout=on_host.layout,
            device=_DEVICE,
        )
        tensor.on_host = on_host
        tensor.allocation = None if _current is None else _current._memory.allocate(on_host)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"{repr(self.on_host.detach())[:-1]}, device='{_DEVICE}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The form of devices whose tensors have no storage, which a weights-only load accepts.
        values = torch._utils._rebuild_device_tensor_from_cpu_tensor
        args = (self.detach().cpu(), self.dtype, str(_DEVICE), self.requires_grad)
        if not getattr(self, "_is_param", False):
            return values, args
        args = (torch.Tensor.detach(self), self.requires_grad, {})
        return torch._utils._rebuild_parameter, args

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            if self.grad is not None:
                copied.grad = self.grad.__deepcopy__(memo)
            memo[id(self)] = copied
        return memo[id(self)]

    def as_subclass(self, cls: type[Any]) -> Any:
        if self.requires_grad:
            raise RuntimeError(f"{DEVICE_TYPE} does not support `as_subclass` of a tensor that requires a gradient.")
        return _combined_with(cls)(self.on_host)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.on_host.data_ptr()

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, _Tensor):
            raise RuntimeError(f"Cannot set `data` of a tensor on {_DEVICE} to one on {value.device}.")
        Tensor.data.__set__(self, value)
        self.on_host, self.allocation = value.on_host, value.allocation


@functools.cache
def _combined_with(cls: type[Any]) -> type[Any]:
    return cls if issubclass(cls, _Tensor) else type(cls.__name__, (cls, _Tensor), {})


class _Mode(TorchDispatchMode):
    """Dispatch of operations that make tensors on the device, or pinned memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pins = kwargs.get("pin_memory") or func in (_aten.is_pinned.default, _aten._pin_memory.default)
        has_tensors = any(isinstance(leaf, _Tensor) for leaf in _leaves(args, kwargs))
        if pins or has_tensors or _is_sim(kwargs.get("device")):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


_aten = torch.ops.aten
_READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXES = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_TAKES_SCALARS = {"masked_fill", "masked_fill_", "fill_", "fill", "lerp_", "cat"}  # besides pointwise and foreach ones
_FREE = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.detach.default)


def _is_sim(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE_TYPE


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    return tree_leaves((args, kwargs))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with tensors of the device, or that makes some."""
    accelerator = _current
    assert accelerator is not None, "there is no tensor of the device without it"
    if func is _aten.is_pinned.default:
        return not isinstance(args[0], _Tensor) and _is_pinned(args[0])
    if func is _aten._pin_memory.default:
        return _mark_pinned(args[0].clone())
    if func is _aten._fused_sdp_choice.default:
        return 0  # the plain implementation: fused kernels of the CPU have operations of their own
    if func in _COPIES:
        return _copy(accelerator, func, args, kwargs)
    tensors = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, _Tensor)]
    device = kwargs.get("device")
    stays = _is_sim(device) if device is not None else bool(on_device)
    if on_device:
        _check_devices(accelerator, func, args, kwargs, tensors)
    is_random = stays and torch.Tag.nondeterministic_seeded in func.tags
    if is_random and kwargs.get("generator") is not None:
        raise RuntimeError(f"Expected a '{DEVICE_TYPE}' device type for generator but found 'cpu'")
    if on_device and _waits(func, args):
        accelerator._note("synchronizations")
        accelerator._finish(lambda copy: copy.stream is accelerator._stream)
    if stays and not func.is_view and func not in _FREE:
        accelerator._note("kernels")
    plain = {**kwargs, "device": _HOST} if _is_sim(device) else dict(kwargs)
    is_pinned = bool(plain.pop("pin_memory", False))
    args_on_host, plain = tree_map(_values, args), tree_map(_values, plain)
    if is_random:
        with accelerator._drawing():
            result = func(*args_on_host, **plain)
    else:
        result = func(*args_on_host, **plain)
    for tensor in on_device:
        if tensor.size() != tensor.on_host.size() or tensor.stride() != tensor.on_host.stride():
            changed = _Tensor(tensor.on_host)
            with torch._C._DisableTorchDispatch():  # or setting `data` would come back here
                tensor.data = changed
    if is_pinned:
        return _mark_pinned(result)
    known = {id(tensor.on_host): tensor for tensor in on_device}

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, _Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else _Tensor(leaf) if stays else leaf

    return tree_map(wrap, result)


def _values(leaf: Any) -> Any:
    return leaf.on_host if isinstance(leaf, _Tensor) else leaf


def _check_devices(accelerator: SimulatedAccelerator, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
    """Raise if an operation mixes devices where CUDA does not allow it."""
    on_host = [tensor for tensor in tensors if not isinstance(tensor, _Tensor)]
    if not on_host:
        return
    name = func.overloadpacket.__name__
    takes_scalars = torch.Tag.pointwise in func.tags or name in _TAKES_SCALARS or name.startswith("_foreach")
    if func in _INDEXES and isinstance(args[0], _Tensor):
        for index in args[1]:
            if index is not None and not isinstance(index, _Tensor):
                accelerator._note("copies_to_device")
                accelerator._note("synchronizations")
        on_host = [args[2]] if len(args) > 2 and not isinstance(args[2], _Tensor) else []
        takes_scalars = True
    elif name.startswith("_fused"):
        on_host = []  # raises by itself if step counts and weights are on different devices
    if any(tensor.dim() > 0 or not takes_scalars for tensor in on_host):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {_DEVICE} and "
            f"{on_host[0].device}! (when calling {func})"
        )


def _waits(func: Any, args: Any) -> bool:
    """Return whether the host waits for the operation's result."""
    if func in _INDEXES:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        # A scalar of the host is put by `masked_fill`, without `nonzero`.
        fills = len(args) > 2 and args[2].numel() == 1 and not isinstance(args[2], _Tensor)
        return bool(masks) and not fills
    return not _READS_VALUES.isdisjoint(func.tags)


def _copy(accelerator: SimulatedAccelerator, func: Any, args: Any, kwargs: Any) -> Any:
    """Copy between tensors, of which at least one is on the device."""
    is_async = bool(kwargs.get("non_blocking", args[2] if func is _aten.copy_.default and len(args) > 2 else False))
    if func is _aten._to_copy.default:
        source, target, device = args[0], None, kwargs.get("device")
        goes_to_device = _is_sim(device) if device is not None else isinstance(source, _Tensor)
        to = {**kwargs, "device": _HOST, "non_blocking": False, "pin_memory": None}
        values = func(_values(source), **to)
    else:
        target, source = args[:2]
        goes_to_device = isinstance(target, _Tensor)
        values = _values(source)
    crosses = isinstance(source, _Tensor) != goes_to_device
    if not crosses:
        accelerator._note("kernels")
    else:
        accelerator._note("copies_to_device" if goes_to_device else "copies_to_host")
        if not is_async:
            accelerator._note("synchronizations")
            accelerator._finish(lambda copy: copy.stream is accelerator._stream)
    if goes_to_device:
        if target is None:
            target = _Tensor(values)
        else:
            target.on_host.copy_(values)
        if crosses and is_async and _is_pinned(source):
            accelerator._launch(weakref.ref(source), source._version)
        return target
    if target is None:  # PyTorch makes pinned memory for it
        target = _mark_pinned(torch.empty_like(values)) if is_async else values
    if is_async and _is_pinned(target):
        arrived = values.to(target.dtype, copy=True)
        _fill_with_garbage(target, arrived)
        accelerator._launch(lambda: target, 0, arrived)
    elif target is not values:
        target.copy_(values)
    return target


def _fill_with_garbage(target: Tensor, arrived: Tensor) -> None:
    if target.dtype == torch.bool:
        target.copy_(~arrived)
    elif target.is_floating_point() or target.is_complex():
        target.fill_(torch.nan)
    else:
        target.fill_(torch.iinfo(target.dtype).min)


@dataclass(eq=False)
class _Copy:
    """A copy that has not finished: to the host if it has values, else to the device."""

    stream: "_Stream"
    number: int
    on_host: Callable[[], Tensor | None]
    version: int
    arrived: Tensor | None = None

    def finish(self) -> None:
        on_host = self.on_host()
        if self.arrived is not None and on_host is not None:
            with torch.no_grad():
                on_host.copy_(self.arrived)
        elif on_host is not None and on_host._version != self.version:
            raise RuntimeError(
                "Pinned memory was changed while its copy to the device could still read it. Wait for an event "
                "recorded after the copy, or use other memory."
            )


def _mark_pinned(tensor: Tensor) -> Tensor:
    tensor.untyped_storage()._is_simulated_pinned = True
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "_is_simulated_pinned", False)


class _Allocation:
    """Memory of a storage, until the last tensor with that storage is gone."""

    def __init__(self, memory: "_Memory", num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = memory

    def __del__(self) -> None:
        self._memory.allocated -= self.num_bytes


class _Memory:
    """The memory of the device, with the statistics of a caching allocator."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.allocated = self.peak = self.reserved = self.peak_reserved = self.num_ooms = 0
        self._allocations: weakref.WeakValueDictionary[int, _Allocation] = weakref.WeakValueDictionary()

    def allocate(self, tensor: Tensor) -> _Allocation:
        storage = tensor.untyped_storage()
        known = self._allocations.get(storage._cdata)
        if known is not None:
            return known
        num_bytes = storage.nbytes()
        if self.allocated + num_bytes > self.size:
            self.num_ooms += 1
            raise torch.OutOfMemoryError(
                f"{DEVICE_TYPE} out of memory. Tried to allocate {num_bytes} bytes. Of {self.size} bytes, "
                f"{self.allocated} are allocated."
            )
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        known = self._allocations[storage._cdata] = _Allocation(self, num_bytes)
        return known

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset_peaks(self, device: object = None) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def stats(self, device: object = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.peak_reserved,
            "num_alloc_retries": 0,
            "num_ooms": self.num_ooms,
        }


class _Stream:
    """A stream, whose operations run in the order of the calls."""

    def __new__(cls, device: Any = None, **settings: Any) -> Any:
        return object.__new__(cls) if device is None or _is_sim(device) else _TORCH_STREAM(device, **settings)

    device_index = 0

    @property
    def device(self) -> torch.device:
        return _DEVICE

    def synchronize(self) -> None:
        accelerator = _require_current()
        accelerator._note("synchronizations")
        accelerator._finish(lambda copy: copy.stream is self)

    def query(self) -> bool:
        return all(copy.stream is not self for copy in _require_current()._copies)

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record(self)
        return event

    def wait_event(self, event: "_Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "_Stream") -> None:
        """Wait on the device, where all operations run in the order of the calls."""

    def __enter__(self) -> Self:
        accelerator = _require_current()
        self._before = accelerator._stream
        accelerator._stream = self
        return self

    def __exit__(self, *error: object) -> None:
        _require_current()._stream = self._before


class _Event:
    """An event, which tells the host that the copies before it have finished."""

    def __new__(cls, device: Any = None, **settings: Any) -> Any:
        return object.__new__(cls) if device is None or _is_sim(device) else _TORCH_EVENT(device, **settings)

    def __init__(self, device: Any = None, **settings: Any) -> None:
        self._stream: _Stream | None = None
        self._number = 0

    @property
    def device(self) -> torch.device:
        return _DEVICE

    def record(self, stream: _Stream | None = None) -> None:
        accelerator = _require_current()
        self._stream, self._number = stream or accelerator._stream, accelerator._num_launched

    def _covers(self, copy: _Copy) -> bool:
        return copy.stream is self._stream and copy.number <= self._number

    def wait(self, stream: _Stream | None = None) -> None:
        """Wait on the device, where all operations run in the order of the calls."""

    def query(self) -> bool:
        """Return whether the copies had finished at the last call; they finish with this one."""
        accelerator = _require_current()
        is_finished = not any(map(self._covers, accelerator._copies))
        accelerator._finish(self._covers)
        return is_finished

    def synchronize(self) -> None:
        accelerator = _require_current()
        accelerator._note("event_waits")
        accelerator._finish(self._covers)


_TORCH_STREAM, _TORCH_EVENT = torch.Stream, torch.Event


def _require_current() -> SimulatedAccelerator:
    if _current is None:
        raise RuntimeError("There is no simulated device. Use it within `with SimulatedAccelerator():`.")
    return _current


def _set_stream(stream: _Stream) -> None:
    _require_current()._stream = stream


def _replacements(accelerator: SimulatedAccelerator) -> list[tuple[Any, str, Any]]:
    """Return what PyTorch has no hooks for, as owner, name and value."""
    memory = accelerator._memory
    functions = {
        "synchronize": accelerator.synchronize,
        "current_stream": lambda device=None: accelerator._stream,
        "set_stream": _set_stream,
        "empty_cache": memory.empty_cache,
        "memory_stats": memory.stats,
        "memory_allocated": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.peak,
        "memory_reserved": lambda device=None: memory.reserved,
        "max_memory_reserved": lambda device=None: memory.peak_reserved,
        "reset_peak_memory_stats": memory.reset_peaks,
        "get_memory_info": lambda device=None: (memory.size - memory.allocated, memory.size),
    }
    owners = [(torch.accelerator, name, value) for name, value in functions.items() if hasattr(torch.accelerator, name)]
    return [*owners, (torch, "Event", _Event), (torch, "Stream", _Stream)]


class _Backend(SimpleNamespace):
    """The module `torch.simgpu`, which PyTorch asks about the device."""

    Stream, Event = _Stream, _Event

    @staticmethod
    def is_available() -> bool:
        return _is_active

    @staticmethod
    def is_initialized() -> bool:
        return _is_active

    @staticmethod
    def device_count() -> int:
        return int(_is_active)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        if _current is not None and _current._generator is not None:
            _current._generator.manual_seed(seed)

    manual_seed = manual_seed_all

    @staticmethod
    def get_rng_state(device: object = None) -> Tensor:
        return (_require_current()._generator or torch.default_generator).get_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: object = None) -> None:
        (_require_current()._generator or torch.default_generator).set_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_LOWER = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input linear matmul mm mv bmm addmm "
    "addmv addbmm baddbmm prelu scaled_dot_product_attention"
)
_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm group_norm norm.Scalar nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp cumprod cumsum prod prod.dim_int sum "
    "sum.dim_IntList softmax.int log_softmax.int"
)
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put scatter_add tensordot"
_libraries: tuple[Any, ...] = ()  # keeps the kernels registered


def _register_backend() -> None:
    """Make the device type known to PyTorch, for the rest of the process.

    All of PyTorch's private interface that a backend in Python needs is used here, in `_Tensor` and in `_run`; the
    public way is a C++ extension.
    """
    global _DEVICE, _libraries
    if _libraries:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", DEVICE_TYPE):
        raise RuntimeError(f"PyTorch's only slot for other devices is in use for {name!r}. Use another process.")
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_Backend())
    _DEVICE = torch.device(DEVICE_TYPE, 0)
    library = torch.library.Library("aten", "IMPL")
    for names, dtype_for in ((_LOWER, _autocast_dtype), (_FLOAT32, lambda _: torch.float32), (_WIDEST, _widest)):
        for each in names.split():
            packet, _, overload = each.partition(".")
            operation = getattr(getattr(_aten, packet), overload or "default")
            library.impl(operation, _autocast_kernel(operation, dtype_for), "AutocastPrivateUse1")
    # `torch.tensor` and threads without the mode reach these.
    for operation in (_aten.empty.memory_format, _aten.empty_strided.default, _aten.copy_.default):
        library.impl(operation, _kernel(operation), "PrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries = library, others


def _kernel(operation: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(operation, args, kwargs)


def _autocast_dtype(tensors: list[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(DEVICE_TYPE)


def _widest(tensors: list[Tensor]) -> torch.dtype:
    has_float32 = any(tensor.dtype == torch.float32 for tensor in tensors)
    return torch.float32 if has_float32 else torch.get_autocast_dtype(DEVICE_TYPE)


def _autocast_kernel(operation: Any, dtype_for: Callable[[list[Tensor]], torch.dtype]) -> Callable[..., Any]:
    """Return an operation that converts the floating point tensors of the device first."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        def is_converted(leaf: Any) -> bool:
            return isinstance(leaf, _Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64

        dtype = dtype_for([leaf for leaf in _leaves(args, kwargs) if is_converted(leaf)])
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            args, kwargs = tree_map(lambda leaf: leaf.to(dtype) if is_converted(leaf) else leaf, (args, kwargs))
            return operation(*args, **kwargs)

    return kernel

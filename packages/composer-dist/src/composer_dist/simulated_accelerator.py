"""A simulated accelerator: a PyTorch device with its own memory, whose tensors are computed on the CPU."""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from composer_dist import _simulated_tensors as tensors
from composer_dist.devices import Device

__all__ = ["DeviceCounts", "SimulatedAccelerator"]

_FILES_TO_SKIP = (str(Path(torch.__file__).parent), __file__, tensors.__file__)


@dataclass
class DeviceCounts:
    """Counts of requests to the device, by the innermost line outside PyTorch (`file:line function`).

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
    - `torch.Event`, `torch.Stream`, pinned memory, the functions of `torch.accelerator`, `torch.autocast`,
      `GradScaler`, `torch.save` and `torch.load(map_location=...)` work.
    - A request for more memory than `memory_bytes` raises `torch.OutOfMemoryError`.
    - It has its own random generator, which `torch.manual_seed` seeds.
    - `DistributedDataParallel`, FSDP2 and DTensor work in ranks of gloo, each with a device of its own. A collective
      does not count as a synchronization, as with NCCL, though the host waits until gloo has finished it.

    Results are those of the CPU's kernels, to the last bit where the CPU would run the same operations. It does not
    simulate NCCL's failures, CUDA graphs, `torch.compile`, sparse or quantized tensors,
    `torch.Generator(device="simgpu")`, memory fragmentation, memory that FSDP2 frees by resizing a storage, more than
    one device per process, or time. Recurrent layers such as `nn.LSTM` do not run. Streams run in the order of the
    calls, so a missing wait between two of them is not noticed.

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
        tensors.register_backend(
            Stream=_Stream, Event=_Event, current_stream=_current_stream, stream=lambda stream: stream
        )
        self._device = tensors.device()
        own = None if shares_cpu_generator else torch.Generator().manual_seed(torch.initial_seed())
        self._runtime = Runtime(memory_bytes, own)
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        if tensors.is_active():
            raise RuntimeError("A SimulatedAccelerator is in use already. Leave its `with` statement first.")
        tensors.make_current(self._runtime, is_active=True)
        self._exit.callback(tensors.make_current, self._runtime, is_active=False)
        # Threads of the autograd engine would not have the mode below, and the engine makes none for a device that is
        # registered after the first backward pass.
        self._exit.enter_context(torch.autograd.set_multithreading_enabled(False))
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        self._exit.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)  # `module.to` keeps the parameters of optimizers
        for owner, name, value in _replacements(self._runtime):
            self._exit.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        self._exit.enter_context(tensors.Mode())
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
        self._runtime.counts.append(counts)
        try:
            yield counts
        finally:
            self._runtime.counts = [each for each in self._runtime.counts if each is not counts]


class Runtime:
    """The state of the device: its memory and generator, the current stream, copies on their way, and counts."""

    def __init__(self, memory_bytes: int, generator: torch.Generator | None) -> None:
        self.memory = _Memory(memory_bytes)
        self.generator = generator
        self.stream = _Stream()
        self.copies: list[_Copy] = []
        self.num_launched = 0
        self.counts: list[DeviceCounts] = []
        self._lock = threading.Lock()  # other threads copy, too

    def note(self, kind: str) -> None:
        if not self.counts:
            return
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # `inspect.stack` reads the source of each frame
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_FILES_TO_SKIP):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        for counts in self.counts:
            getattr(counts, kind)[place] += 1

    def launch(self, on_host: Callable[[], Tensor | None], version: int, arrived: Tensor | None = None) -> None:
        with self._lock:
            self.num_launched += 1
            self.copies = [each for each in self.copies if each.on_host() is not None]
            self.copies.append(_Copy(self.stream, self.num_launched, on_host, version, arrived))

    def wait(self) -> None:
        """Wait for what the current stream has to do, and count it."""
        self.note("synchronizations")
        self.finish(lambda copy: copy.stream is self.stream)

    def finish(self, is_done: Callable[["_Copy"], bool]) -> None:
        """Finish those copies for which the predicate is true."""
        with self._lock:
            done = [copy for copy in self.copies if is_done(copy)]
            self.copies = [copy for copy in self.copies if not is_done(copy)]
        for copy in done:
            copy.finish()

    def synchronize(self, device: object = None) -> None:
        """Wait for all operations and copies."""
        self.note("synchronizations")
        self.finish(lambda copy: True)

    @contextmanager
    def drawing(self) -> Generator[None]:
        """Return a context in which CPU operations draw from the generator of this device."""
        if self.generator is None:
            yield
            return
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)


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
                f"{tensors.DEVICE_TYPE} out of memory. Tried to allocate {num_bytes} bytes. Of {self.size} bytes, "
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
        return (
            object.__new__(cls) if device is None or tensors.is_simulated(device) else _TORCH_STREAM(device, **settings)
        )

    stream_id = device_index = 0
    device_type = 20  # c10::DeviceType::PrivateUse1

    @property
    def device(self) -> torch.device:
        return tensors.device()

    def synchronize(self) -> None:
        runtime = tensors.current()
        runtime.note("synchronizations")
        runtime.finish(lambda copy: copy.stream is self)

    def query(self) -> bool:
        return all(copy.stream is not self for copy in tensors.current().copies)

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        recorded: Any = event or _Event()
        recorded.record(self)
        return recorded

    def wait_event(self, event: "_Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "_Stream") -> None:
        """Wait on the device, where all operations run in the order of the calls."""

    def __enter__(self) -> Self:
        runtime = tensors.current()
        self._before = runtime.stream
        runtime.stream = self
        return self

    def __exit__(self, *error: object) -> None:
        tensors.current().stream = self._before


class _Event:
    """An event, which tells the host that the copies before it have finished."""

    def __new__(cls, device: Any = None, **settings: Any) -> Any:
        return (
            object.__new__(cls) if device is None or tensors.is_simulated(device) else _TORCH_EVENT(device, **settings)
        )

    def __init__(self, device: Any = None, **settings: Any) -> None:
        self._stream: _Stream | None = None
        self._number = 0

    @property
    def device(self) -> torch.device:
        return tensors.device()

    def record(self, stream: _Stream | None = None) -> None:
        runtime = tensors.current()
        self._stream, self._number = stream or runtime.stream, runtime.num_launched

    def _covers(self, copy: _Copy) -> bool:
        return copy.stream is self._stream and copy.number <= self._number

    def wait(self, stream: _Stream | None = None) -> None:
        """Wait on the device, where all operations run in the order of the calls."""

    def query(self) -> bool:
        """Return whether the copies had finished at the last call; they finish with this one."""
        runtime = tensors.current()
        is_finished = not any(map(self._covers, runtime.copies))
        runtime.finish(self._covers)
        return is_finished

    def synchronize(self) -> None:
        runtime = tensors.current()
        runtime.note("event_waits")
        runtime.finish(self._covers)


_TORCH_STREAM, _TORCH_EVENT = torch.Stream, torch.Event


def _current_stream(device: object = None) -> _Stream:
    return tensors.current().stream


def _set_stream(stream: _Stream) -> None:
    tensors.current().stream = stream


def _replacements(runtime: Runtime) -> list[tuple[Any, str, Any]]:
    """Return what PyTorch has no hooks for, as owner, name and value."""
    memory = runtime.memory
    functions = {
        "synchronize": runtime.synchronize,
        "current_stream": _current_stream,
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
    data = property(torch.Tensor.data.__get__, tensors.set_data)  # pyright: ignore[reportAttributeAccessIssue]
    return [*owners, (torch, "Event", _Event), (torch, "Stream", _Stream), (torch.Tensor, "data", data)]

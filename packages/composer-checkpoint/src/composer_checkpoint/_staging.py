"""Copies of tensors in host memory that is kept from one snapshot to the next."""

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from composer_checkpoint.errors import CheckpointError

__all__ = ["Snapshot", "StagingArea", "storage_key"]

# Copies in threads of ours, two or more at a time, reach the memory's speed; torch's own threads, which wait for each
# other after every tensor, took four to eight times as long on two busy cores.
_NUM_THREADS = min(4, os.cpu_count() or 1)


class StagingArea:
    """Host memory for snapshots. Making it costs more than filling it, so it is reused while shapes stay the same.

    What lies on a CUDA device is copied through a stream of its own into page-locked memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="staging")

    def snapshot(self, sources: Mapping[str, torch.Tensor], may_wait: Callable[[torch.Tensor], bool]) -> "Snapshot":
        """Begin a snapshot. The one before must not be in use any more.

        Args:
            sources: The tensors, by names that stay the same from snapshot to snapshot.
            may_wait: Whether a tensor may still be read after this has returned, until the snapshot is complete.
        """
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in sources.items()}
        return Snapshot(sources, self._buffers, may_wait, self._pool, self._streams)

    def close(self) -> None:
        """Give the memory back."""
        self._pool.shutdown()
        self._buffers = {}

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(name)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            return known
        with torch.inference_mode(False):  # another thread, which is not in that mode, copies into it
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class Snapshot:
    """Copies of tensors as they were when this was made.

    Tensors that may wait are copied by `complete`, in another thread, or by the device while it goes on working. Until
    `wait` has returned nothing may change them.
    """

    def __init__(
        self,
        sources: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        may_wait: Callable[[torch.Tensor], bool],
        pool: ThreadPoolExecutor,
        streams: dict[torch.device, torch.cuda.Stream],
    ) -> None:
        self.copies = dict(buffers)
        self._pool = pool
        self._completed = threading.Event()
        on_cuda = {name: tensor for name, tensor in sources.items() if tensor.is_cuda}
        elsewhere = {name: tensor for name, tensor in sources.items() if name not in on_cuda}
        self._later = {name: tensor for name, tensor in elsewhere.items() if may_wait(tensor)}
        self._watched = {name: (tensor, _version(tensor)) for name, tensor in sources.items() if may_wait(tensor)}
        self._may_change = False
        self._on_cuda = _CudaCopies(on_cuda, self.copies, may_wait, streams)
        self._copy({name: tensor for name, tensor in elsewhere.items() if name not in self._later})
        if not self._later:
            self._completed.set()

    def complete(self) -> None:
        """Copy what is left. Called by the thread that writes."""
        try:
            self._copy(self._later)
            self._on_cuda.finish()
        finally:
            self.release()

    def confirm(self) -> None:
        """Check that nothing was changed too early, as far as autograd counts it. Called before the copies are used up.

        The count rises only at the end of an operation, and one may still be running that began before the copy's end.
        So this is asked as late as can be, when the copies are on the disk and only the rename is missing.

        Raises:
            CheckpointError: If a tensor was changed before `wait` had returned.
        """
        changed = [name for name, (tensor, version) in self._watched.items() if _version(tensor) != version]
        if changed and not self._may_change:
            raise CheckpointError(
                f"{changed[0]!r} was changed while it was copied, so this checkpoint would mix two steps and was not "
                f"written. Call wait_for_staging() before the optimizer's step, or leave the tensor out of "
                f"stable_until_step."
            )

    def release(self) -> None:
        """Give up what is not copied yet, so that nobody waits for it."""
        self._later = {}
        self._completed.set()

    def wait(self) -> None:
        """Return when the tensors may be changed. CUDA is told to wait; the CPU does not."""
        self._completed.wait()
        self._on_cuda.hold_back()
        self._may_change = True

    def _copy(self, sources: Mapping[str, torch.Tensor]) -> None:
        copies = self.copies
        list(self._pool.map(lambda name: copies[name].copy_(sources[name].detach()), sources))


class _CudaCopies:
    """Copies that CUDA devices make while they go on working."""

    def __init__(
        self,
        sources: Mapping[str, torch.Tensor],
        copies: Mapping[str, torch.Tensor],
        may_wait: Callable[[torch.Tensor], bool],
        streams: dict[torch.device, torch.cuda.Stream],
    ) -> None:
        self._sources = dict(sources)  # their memory must not be given to others before they are copied
        self._done: list[tuple[torch.device, torch.cuda.Event]] = []
        for device in {tensor.device for tensor in sources.values()}:
            if device not in streams:
                streams[device] = torch.cuda.Stream(device)
            side, current = streams[device], torch.cuda.current_stream(device)
            side.wait_stream(current)
            here = [name for name, tensor in sources.items() if tensor.device == device]
            with torch.cuda.stream(side):
                for waits in (False, True):
                    for name in here:
                        if may_wait(sources[name]) == waits:
                            copies[name].copy_(sources[name].detach(), non_blocking=True)
                    event = torch.cuda.Event()
                    event.record(side)
                    if not waits:
                        current.wait_event(event)
            self._done.append((device, event))

    def hold_back(self) -> None:
        """Let work that is given to the devices from now on begin after the copies."""
        for device, event in self._done:
            torch.cuda.current_stream(device).wait_event(event)

    def finish(self) -> None:
        """Return when the copies are there."""
        for _, event in self._done:
            event.synchronize()
        self._sources = {}


def storage_key(tensor: torch.Tensor) -> Hashable:
    """Return what two tensors share that are the same elements of the same memory."""
    if tensor.layout != torch.strided:
        return id(tensor)
    kind = tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg()  # one memory may be read in several ways
    return *kind, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


def _version(tensor: torch.Tensor) -> int:
    """Return how often the tensor was changed in place, as autograd counts it; tensors of inference mode do not."""
    return 0 if tensor.is_inference() else tensor._version

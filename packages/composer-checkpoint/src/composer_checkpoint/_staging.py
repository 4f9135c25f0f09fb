"""Snapshots of tensors in reusable host memory."""

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from composer_checkpoint.errors import CheckpointError

# Two or more threads that each copy a tensor reach the memory's bandwidth. Torch's own threads, which synchronize after
# every tensor, took four to eight times as long on two busy cores.
_NUM_THREADS = min(4, os.cpu_count() or 1)


class StagingArea:
    """Host memory for snapshots, reused while shapes stay the same, since allocating it takes longer than filling it.

    Tensors on an accelerator with streams are copied through a side stream into page-locked memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="staging")

    def snapshot(self, sources: Mapping[str, torch.Tensor], may_wait: Callable[[torch.Tensor], bool]) -> "Snapshot":
        """Begin a snapshot. The previous one must no longer be in use."""
        buffers: dict[str, torch.Tensor] = {}
        for name, tensor in sources.items():
            known = self._buffers.get(name)
            if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
                with torch.inference_mode(False):  # another thread, not in that mode, copies into it
                    known = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=_has_streams(tensor))
            buffers[name] = known
        self._buffers = buffers
        return Snapshot(sources, self._buffers, may_wait, self._pool, self._streams)

    def close(self) -> None:
        self._pool.shutdown()
        self._buffers = {}


class Snapshot:
    """Copies of tensors as they were when the snapshot was made.

    Tensors that may wait are copied later, by `complete` in another thread or by the device in the background. Nothing
    may change them until `wait` has returned.
    """

    def __init__(
        self,
        sources: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        may_wait: Callable[[torch.Tensor], bool],
        pool: ThreadPoolExecutor,
        streams: dict[torch.device, torch.Stream],
    ) -> None:
        self.copies = dict(buffers)
        self._pool = pool
        self._completed = threading.Event()
        on_device = {name: tensor for name, tensor in sources.items() if _has_streams(tensor)}
        elsewhere = {name: tensor for name, tensor in sources.items() if name not in on_device}
        self._later = {name: tensor for name, tensor in elsewhere.items() if may_wait(tensor)}
        self._watched = {name: (tensor, _version(tensor)) for name, tensor in sources.items() if may_wait(tensor)}
        self._changed_early: list[str] | None = None  # known once `wait` has allowed changes
        self._on_device = _DeviceCopies(on_device, self.copies, may_wait, streams)
        self._copy({name: tensor for name, tensor in elsewhere.items() if name not in self._later})
        if not self._later:
            self._completed.set()

    def complete(self) -> None:
        """Copy the remaining tensors. Called by the thread that writes."""
        try:
            self._copy(self._later)
            self._on_device.finish()
        finally:
            self.release()

    def confirm(self) -> None:
        """Raise if a tensor was changed too early, according to autograd's version counter.

        The counter rises only at the end of an operation, so one that began before the end of the copy may still be
        running. Call this as late as possible: when the copies are on disk, before the rename.
        """
        changed = self._changed() if self._changed_early is None else self._changed_early
        if changed:
            raise CheckpointError(
                f"{changed[0]!r} was changed while it was copied, so this checkpoint would mix two steps and was not "
                f"written. Call wait_for_staging() before the optimizer's step, or leave the tensor out of "
                f"stable_until_step."
            )

    def release(self) -> None:
        """Discard tensors that are not copied yet, and unblock `wait`."""
        self._later = {}
        self._completed.set()

    def wait(self) -> None:
        """Return when the tensors may be changed. Streams of devices wait for the copies; the CPU does not."""
        self._completed.wait()
        self._on_device.hold_back()
        if self._changed_early is None:
            self._changed_early = self._changed()

    def _changed(self) -> list[str]:
        return [name for name, (tensor, version) in self._watched.items() if _version(tensor) != version]

    def _copy(self, sources: Mapping[str, torch.Tensor]) -> None:
        copies = self.copies
        # list() waits for the copies and raises their errors.
        list(self._pool.map(lambda name: copies[name].copy_(sources[name].detach()), sources))


class _DeviceCopies:
    def __init__(
        self,
        sources: Mapping[str, torch.Tensor],
        copies: Mapping[str, torch.Tensor],
        may_wait: Callable[[torch.Tensor], bool],
        streams: dict[torch.device, torch.Stream],
    ) -> None:
        self._sources = dict(sources)  # keeps their memory from being reused before they are copied
        self._done: list[tuple[torch.device, torch.Event]] = []
        for device in {tensor.device for tensor in sources.values()}:
            if device not in streams:
                streams[device] = torch.Stream(device)
            # The copies must see the work that is already queued.
            side, current = streams[device], torch.accelerator.current_stream(device)
            side.wait_stream(current)
            here = [name for name, tensor in sources.items() if tensor.device == device]
            with side:
                for waits in (False, True):
                    for name in here:
                        if may_wait(sources[name]) == waits:
                            copies[name].copy_(sources[name].detach(), non_blocking=True)
                    # Tensors that may not wait are copied first, and only those hold up the current stream.
                    event = torch.Event(device)
                    event.record(side)
                    if not waits:
                        current.wait_event(event)
            self._done.append((device, event))

    def hold_back(self) -> None:
        for device, event in self._done:
            torch.accelerator.current_stream(device).wait_event(event)

    def finish(self) -> None:
        for _, event in self._done:
            event.synchronize()
        self._sources = {}


def _has_streams(tensor: torch.Tensor) -> bool:
    """Return whether a device can copy a tensor to the host in the background, which MPS cannot."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == tensor.device.type != "mps"


def storage_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors with the same elements of the same memory."""
    if tensor.layout != torch.strided:
        return id(tensor)
    # One memory may be interpreted in several ways.
    kind = tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return *kind, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


def _version(tensor: torch.Tensor) -> int:
    """Return autograd's count of in-place changes, or 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version

"""What a model's buffers were before a batch, to be made so again."""

from collections import deque

from torch import Tensor, nn

from composer.trainer._tensor_copies import copies_of, copy_all, local_part


class KeptBuffers:
    """Copies of a model's buffers, such as running means, which a forward pass over a bad batch ruins.

    What PyTorch has not seen change since the latest copy is not copied again: a constant, however large, costs memory
    once and no time. A kernel of one's own has to say what it changes (`torch.autograd.graph.increment_version`).

    Args:
        model: Its modules are looked up once, their buffers at each batch.
        num_batches: Of how many batches the copies are kept.
    """

    def __init__(self, model: nn.Module, num_batches: int = 1) -> None:
        # The dict itself, here and below: to look buffers up one by one takes longer than to copy them.
        self._owners = [module for module in model.modules() if module._buffers]  # pyright: ignore[reportPrivateUsage]
        self._kept: deque[list[_OfModule]] = deque(maxlen=num_batches)

    def keep(self) -> None:
        """Remember the buffers as they are before a batch."""
        if not self._owners:
            return
        latest = self._kept[-1] if self._kept else [None] * len(self._owners)
        kept: list[_OfModule] = []
        made: list[_OfModule] = []
        for owner, before in zip(self._owners, latest, strict=True):
            if before is None or not before.is_current():
                before = _OfModule(owner, room=before if self._kept.maxlen == 1 else None)
                made.append(before)
            kept.append(before)
        _fill(made)
        self._kept.append(kept)

    def restore(self) -> None:
        """Make the buffers what they were before the earliest of the batches, be they changed or replaced."""
        for of_module in self._kept[0] if self._kept else ():
            of_module.restore()


class _OfModule:
    """The buffers of one module, and copies of their values once `_fill` has made these.

    Args:
        owner: The module.
        room: Earlier copies that nobody needs any more.
    """

    def __init__(self, owner: nn.Module, room: "_OfModule | None") -> None:
        self._buffers = owner._buffers  # pyright: ignore[reportPrivateUsage]
        self._seen = dict(self._buffers)  # which tensors they are
        self.tensors = [local_part(tensor) for tensor in self._seen.values() if tensor is not None]
        # batch_norm() changes running means without saying so, and these kinds of tensors do not count changes.
        is_silent = any(t.is_inference() or hasattr(t, "to_local") for t in self._seen.values() if t is not None)
        self._changes_unseen = is_silent or "running_mean" in self._seen
        self._versions = None if self._changes_unseen else self._count()
        self.copies: list[Tensor] = []
        if room is not None and [_kind(t) for t in room.copies] == [_kind(t) for t in self.tensors]:
            self.copies = room.copies

    def is_current(self) -> bool:
        """Say whether nothing has changed or replaced a buffer since."""
        return not self._changes_unseen and self._is_same() and self._count() == self._versions

    def restore(self) -> None:
        """Put the tensors back, with their values."""
        copy_all(self.tensors, self.copies)
        self._buffers.clear()
        self._buffers.update(self._seen)

    def _is_same(self) -> bool:
        now, seen = self._buffers, self._seen
        return len(now) == len(seen) and all(now.get(name) is tensor for name, tensor in seen.items())

    def _count(self) -> list[int]:
        """Return how often each tensor has been changed in place."""
        return [tensor._version for tensor in self._seen.values() if tensor is not None]


def _fill(made: list[_OfModule]) -> None:
    """Copy what there is now, into the room there is."""
    anew = [of_module for of_module in made if not of_module.copies]
    old = [of_module for of_module in made if of_module.copies]
    copy_all([c for of_module in old for c in of_module.copies], [t for of_module in old for t in of_module.tensors])
    copies = iter(copies_of([tensor for of_module in anew for tensor in of_module.tensors]))
    for of_module in anew:
        of_module.copies = [next(copies) for _ in of_module.tensors]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device

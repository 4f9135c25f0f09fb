"""Ghost batch normalization: normalize small parts of the batch by their own statistics."""

import logging
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._arguments import check_counts
from composer_algorithms._method import ModelSurgery, log_no_effect, report
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import count_module_instances, replace_module_classes, transfer_hooks
from composer_events import Event, Logger, State

__all__ = [
    "GhostBatchNorm",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "apply_ghost_batchnorm",
    "METADATA",
]

METADATA = METHODS["ghost_batchnorm"]

_log = logging.getLogger("composer.algorithms.ghost_batchnorm")
_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class _GhostBatchNorm(nn.Module):
    """Normalize each ghost batch by its own statistics, with the parameters and averages of one batch norm.

    A batch of `N` examples is split into `n = ceil(N / ghost_batch_size)` parts, as by `torch.chunk`. Each updates the
    running averages in turn, with the momentum divided by `n`. There is one part less if the last one would have a
    single value per channel, which has no variance, and a batch of fewer than `ghost_batch_size` examples is one part.
    Evaluation mode, which uses the averages, splits nothing.
    """

    num_dims: ClassVar[tuple[int, ...]] = ()

    def __init__(self, base_batchnorm: _BatchNorm, ghost_batch_size: int = 32) -> None:
        super().__init__()
        check_counts(ghost_batch_size=ghost_batch_size)
        self.ghost_batch_size = ghost_batch_size
        self.batchnorm = base_batchnorm
        self.batchnorm._already_ghost_batchnormed = True  # pyright: ignore[reportArgumentType]  # a mark
        # A subclass may define its own forward, which must be called.
        self._is_plain = type(base_batchnorm) in _GHOSTS
        if self._is_plain:
            transfer_hooks(base_batchnorm, self)  # forward does not call the module that has them

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch."""
        norm = self.batchnorm
        # Without running averages, evaluation mode normalizes by the batch as well.
        if not (norm.training or norm.running_mean is None):
            return norm(input)
        num_chunks = -(-len(input) // self.ghost_batch_size)
        chunks = input.chunk(num_chunks)
        if len(chunks[-1]) < len(chunks[0]) and chunks[-1].numel() == norm.num_features:
            num_chunks -= 1
            chunks = input.tensor_split(num_chunks)
        if self._is_plain:
            return self._normalize(input, chunks, num_chunks)
        momentum = norm.momentum
        if momentum is not None:  # without one it is already the average over all ghost batches
            norm.momentum = momentum / num_chunks
        try:
            return torch.cat([norm(one) for one in chunks])
        finally:
            norm.momentum = momentum

    def _normalize(self, input: Tensor, chunks: Sequence[Tensor], num_chunks: int) -> Tensor:
        if input.ndim not in self.num_dims:
            raise ValueError(
                f"the input of shape {tuple(input.shape)} has {input.ndim} dims, and {type(self).__name__} takes "
                f"{' or '.join(map(str, self.num_dims))}."
            )
        norm = self.batchnorm
        mean, var = (norm.running_mean, norm.running_var) if norm.training else (None, None)
        outputs: list[Tensor] = []
        for chunk, momentum in zip(chunks, self._momenta(len(chunks), num_chunks), strict=True):
            # The function, not the module: one increment of the count of batches serves all parts.
            outputs.append(F.batch_norm(chunk, mean, var, norm.weight, norm.bias, True, momentum, norm.eps))
        return torch.cat(outputs)

    def _momenta(self, num_updates: int, num_chunks: int) -> list[float]:
        """Count the updates of the running averages that follow, and return the momentum of each."""
        norm = self.batchnorm
        count = norm.num_batches_tracked if norm.training else None
        if count is not None:
            count.add_(num_updates)
        if norm.momentum is not None:
            # All parts together then move the averages about as far as one update of the whole batch.
            return [norm.momentum / num_chunks] * num_updates
        # Average over all ghost batches so far, whose count is needed on the host, as in torch's batch norm.
        last = num_updates if count is None else int(count)
        return [1 / (last - i) for i in reversed(range(num_updates))]

    def extra_repr(self) -> str:
        """Return the size of the ghost batches."""
        return f"ghost_batch_size={self.ghost_batch_size}"

    @staticmethod
    def from_batchnorm(module: _BatchNorm, ghost_batch_size: int = 32) -> "_GhostBatchNorm":
        """Wrap a batch norm in the class for its number of dims."""
        for base, ghost in _GHOSTS.items():
            if isinstance(module, base):
                return ghost(module, ghost_batch_size)
        raise TypeError(
            f"module={module!r} is not a {' or '.join(base.__name__ for base in _GHOSTS)}: it has no ghost form."
        )


class GhostBatchNorm1d(_GhostBatchNorm):
    """Normalize each ghost batch by its own statistics, as a replacement for `torch.nn.BatchNorm1d`.

    Args:
        base_batchnorm: The batch norm; it becomes the child `batchnorm`.
        ghost_batch_size: Examples in a ghost batch.

    Raises:
        ValueError: If `ghost_batch_size` is not above 0.

    Example:
        >>> GhostBatchNorm1d(nn.BatchNorm1d(8), 16)(torch.rand(32, 8)).shape
        torch.Size([32, 8])
    """

    num_dims = (2, 3)


class GhostBatchNorm2d(_GhostBatchNorm):
    """Normalize each ghost batch by its own statistics, as a replacement for `torch.nn.BatchNorm2d`.

    It takes the same arguments as `GhostBatchNorm1d`.

    Example:
        >>> GhostBatchNorm2d(nn.BatchNorm2d(8), 16)(torch.rand(32, 8, 2, 2)).shape
        torch.Size([32, 8, 2, 2])
    """

    num_dims = (4,)


class GhostBatchNorm3d(_GhostBatchNorm):
    """Normalize each ghost batch by its own statistics, as a replacement for `torch.nn.BatchNorm3d`.

    It takes the same arguments as `GhostBatchNorm1d`.

    Example:
        >>> GhostBatchNorm3d(nn.BatchNorm3d(8), 16)(torch.rand(32, 8, 2, 2, 2)).shape
        torch.Size([32, 8, 2, 2, 2])
    """

    num_dims = (5,)


_GHOSTS: dict[type[nn.Module], type[_GhostBatchNorm]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


def apply_ghost_batchnorm(
    model: nn.Module, ghost_batch_size: int = 32, optimizers: Optimizer | Sequence[Optimizer] | None = None
) -> None:
    """Wrap each batch norm of a model, so that it normalizes ghost batches by their own statistics.

    The batch norms stay the same objects, inside a `GhostBatchNorm1d`, `2d` or `3d`. A second call changes nothing.

    Args:
        model: Changed in place.
        ghost_batch_size: Examples per ghost batch.
        optimizers: Existing optimizers of the model. No parameter is added or removed.

    Raises:
        ValueError: If `ghost_batch_size` is not above 0.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        >>> apply_ghost_batchnorm(model, ghost_batch_size=16)
        >>> type(model[1]).__name__
        'GhostBatchNorm1d'

    Reference:
        Dimitriou and Arandjelovic, "A New Look at Ghost Normalization", 2020, arXiv:2007.08554; Hoffer et al., "Train
        longer, generalize better", NeurIPS 2017, arXiv:1705.08741, algorithm 1.
    """
    check_counts(ghost_batch_size=ghost_batch_size)

    def ghost_of(module: _BatchNorm, module_index: int) -> nn.Module | None:
        is_inside = hasattr(module, "_already_ghost_batchnormed")
        return None if is_inside else _GhostBatchNorm.from_batchnorm(module, ghost_batch_size)

    replace_module_classes(model, dict.fromkeys(_GHOSTS, ghost_of), optimizers)
    if not count_module_instances(model, _GhostBatchNorm):
        log_no_effect(_log, "GhostBatchNorm", model, "below it there is no BatchNorm1d, 2d or 3d")


class GhostBatchNorm(ModelSurgery):
    """Wrap the batch norms of `state.model` on `INIT`, so that they normalize ghost batches.

    It acts after the algorithms that replace operators. A microbatch with fewer examples, such as the last one of an
    epoch, is one ghost batch. Loading a checkpoint of the changed model applies the algorithm.

    Args:
        ghost_batch_size: Examples per ghost batch.

    Raises:
        ValueError: If `ghost_batch_size` is not above 0.

    Example:
        >>> GhostBatchNorm(ghost_batch_size=16)
        GhostBatchNorm(ghost_batch_size=16)

    Reference:
        Dimitriou and Arandjelovic, "A New Look at Ghost Normalization", 2020, arXiv:2007.08554. As in Hoffer et al.,
        2017, each ghost batch in turn updates the running averages, here with a share of the momentum.
    """

    surgery_rank = 3

    def __init__(self, ghost_batch_size: int = 32) -> None:
        check_counts(ghost_batch_size=ghost_batch_size)
        self.ghost_batch_size = ghost_batch_size

    def apply(self, event: Event, state: State, logger: Logger | None = None) -> None:
        """Wrap the batch norms, and log their number."""
        apply_ghost_batchnorm(state.model, self.ghost_batch_size, state.optimizers)
        count = count_module_instances(state.model, _GhostBatchNorm)
        report(_log, logger, {"GhostBatchNorm/num_new_modules": count})

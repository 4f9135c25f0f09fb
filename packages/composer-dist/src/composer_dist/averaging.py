"""Sums, means and copies over the ranks, of many numbers with few collectives."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as tdist

from composer_dist.objects import cpu_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BUCKET_BYTES", "average_gradients", "average_values", "broadcast_tensors", "sum_counts"]

TNumber = TypeVar("TNumber", int, float)

BUCKET_BYTES = 25 * 2**20
"""How many bytes of gradients travel together."""


def average_gradients(
    parameters: Iterable[torch.Tensor], group: "ProcessGroup | None" = None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace each gradient by its mean over the ranks, in place. Every rank of the group must call this.

    A parameter that a rank has no gradient for counts as zero there, and gets the mean. Where no rank has one, there
    is none afterwards. A rank waits for its device only if it has no gradient for some parameter.

    Args:
        parameters: The same on every rank, in the same order. Those that need no gradient are left out.
        group: The ranks to average over. All of them when `None`.
        bucket_bytes: About how many bytes travel in one collective.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    for bucket in _buckets(trainable, bucket_bytes):
        _average_bucket(bucket, group)


def average_values(values: Mapping[str, torch.Tensor], group: "ProcessGroup | None" = None) -> dict[str, torch.Tensor]:
    """Return the mean of each value over the ranks, by way of one collective. Every rank of the group must call this.

    Nobody waits for the device. The names must be the same on every rank; their order does not matter.

    Args:
        values: Floating-point tensors on one device; they are not changed.
        group: The ranks to average over. All of them when `None`.
    """
    if not values:
        return {}
    names = sorted(values)
    flat = torch.cat([values[name].detach().reshape(-1) for name in names])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32)).div(tdist.get_world_size(group))
    tdist.all_reduce(flat, group=group)
    parts = flat.split([values[name].numel() for name in names])
    means = {
        name: part.view(values[name].shape).to(values[name].dtype) for name, part in zip(names, parts, strict=True)
    }
    return {name: means[name] for name in values}


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor], group: "ProcessGroup | None" = None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace each tensor by that of the group's first rank, in place. Every rank of the group must call this.

    Args:
        tensors: The same shapes and dtypes on every rank, in the same order.
        group: The ranks that take part. All of them when `None`.
        bucket_bytes: About how many bytes travel in one collective.
    """
    for bucket in _buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        tdist.broadcast(flat, group_src=0, group=group)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def sum_counts(values: Sequence[TNumber], group: "ProcessGroup | None" = None) -> list[TNumber]:
    """Return the sum of each number over the ranks, by way of one collective between the hosts.

    Every rank of the group must call this. Integers are exact below 2**53.
    """
    totals = torch.tensor(values, dtype=torch.float64)
    tdist.all_reduce(totals, group=cpu_group(group))
    return [type(value)(total) for value, total in zip(values, totals.tolist(), strict=True)]


def _buckets(parameters: Iterable[torch.Tensor], size_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Cut the parameters into lists of one device and dtype each, by what all ranks know alike."""
    open_buckets: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], int]] = {}
    for parameter in parameters:
        key = (parameter.device, parameter.dtype)
        bucket, filled_bytes = open_buckets.pop(key, ([], 0))
        bucket.append(parameter)
        filled_bytes += parameter.nbytes
        if filled_bytes >= size_bytes:
            yield bucket
        else:
            open_buckets[key] = (bucket, filled_bytes)
    for bucket, _ in open_buckets.values():
        yield bucket


def _average_bucket(bucket: list[torch.Tensor], group: "ProcessGroup | None") -> None:
    """Average the gradients of a few parameters with one collective.

    Behind the gradients travels a number for each parameter, which is above 0 if any rank has a gradient for it.
    """
    numel = sum(parameter.numel() for parameter in bucket)
    flat = torch.zeros(numel + len(bucket), dtype=bucket[0].dtype, device=bucket[0].device)
    views = [
        view.view(parameter.shape)
        for view, parameter in zip(flat[:numel].split([p.numel() for p in bucket]), bucket, strict=True)
    ]
    is_used = flat[numel:].fill_(1)
    for index, (parameter, view) in enumerate(zip(bucket, views, strict=True)):
        if parameter.grad is None:
            is_used[index] = 0
        else:
            view.copy_(parameter.grad)
    flat.div_(tdist.get_world_size(group))  # before the sum, which could overflow in float16
    tdist.all_reduce(flat, group=group)
    for index, (parameter, view) in enumerate(zip(bucket, views, strict=True)):
        if parameter.grad is not None:
            parameter.grad.copy_(view)
        elif is_used[index] > 0:
            parameter.grad = view.clone()

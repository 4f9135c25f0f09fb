"""Exchange between the ranks during training: whether all have a batch, its size, the clock and the losses.

A single process exchanges nothing. Neither do ranks whose dataloaders have equal batches by construction, unless the
losses or the clock are read or a listener may stop the training. Training then waits for no other rank: the collectives
start early and run beside the forward and backward pass. Only ranks that may run out of batches at different times ask
before each batch, and only those whose batches may differ in size ask for it before the forward pass.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as tdist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from composer_dist import RankDisagreementError, agreement, dist, get_global_rank, get_world_size
from composer_dist.ddp import start_sum, sum_counts
from composer_dist.devices import get_device
from composer_dist.initialize import DEFAULT_TIMEOUT_S
from composer_dist.strategy import Strategy
from composer_events.arguments import check_seconds
from composer_events.data_spec import DataSpec


class Ranks:
    """Facts that depend on all ranks, and are the same on every rank.

    Attributes:
        same_num_batches: Whether every rank has the same number of batches.
        same_batch_size: Whether, in addition, every rank has the same number of samples in each batch.
        listen: Whether any rank has a listener that reads the losses or metrics of batches.
        reads_each_batch: Whether any rank has a listener that must not miss those of a batch.
        shares_results: Whether, in addition, there are several ranks.
        may_stop: Whether there are several ranks, and any has a listener that can stop the training, such as an
            algorithm, or that reads the clock.
        flags: Whether any rank had set each flag that was sent with the counts of the latest batch.
        losses: The averages of the losses of each batch.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.world_size = strategy.world_size
        self._is_alone = get_world_size() == 1  # the strategy's `world_size` is also 1 if all ranks share one batch
        self.same_num_batches = True
        self.same_batch_size = True
        self.listen = self.reads_each_batch = True
        self.shares_results = False
        self.may_stop = False
        self.losses = LossMeans(strategy)
        self._count_tokens: bool | None = None  # unknown before the first batch
        self.flags: Sequence[bool] = ()
        self._total: Callable[[], Sequence[float]] | None = None
        self._of_batch: tuple[float, int, Callable[[], float]] = (0, 0, float)

    def begin(
        self, data_spec: DataSpec, *, listens: bool = False, reads_each_batch: bool = True, may_stop: bool = False
    ) -> None:
        """Compare the dataloaders before they are read. Every rank must call this."""
        self._count_tokens = None
        self.flags = ()
        loader = data_spec.dataloader
        same_num_batches = keeps_length(loader)
        # Only PyTorch may build the batches, of as many samples on every rank.
        collates = same_num_batches and loader.collate_fn is cast(Any, data).default_collate
        of_this_rank = {
            "same_num_batches": same_num_batches,
            "same_batch_size": collates and data_spec.counts_by_default,
            "listen": listens,
            "reads_each_batch": reads_each_batch,
            "may_stop": may_stop,
        }
        num_ranks = dict(
            zip(of_this_rank, self._strategy.sum([int(fact) for fact in of_this_rank.values()]), strict=True)
        )
        self.same_num_batches = self.world_size in (1, num_ranks["same_num_batches"])
        self.same_batch_size = self.world_size in (1, num_ranks["same_batch_size"])
        self.listen = num_ranks["listen"] > 0
        self.reads_each_batch = num_ranks["reads_each_batch"] > 0
        self.shares_results = self.listen and not self._is_alone
        self.may_stop = num_ranks["may_stop"] > 0 and not self._is_alone

    def all_have_a_batch(self, has_batch: bool) -> bool:
        """Return whether every rank still has a batch; the rank that runs out first ends the epoch for all."""
        if self.same_num_batches:
            return has_batch
        return self._strategy.sum([int(has_batch)])[0] == self.world_size

    def any(self, *flags: bool) -> Sequence[bool]:
        """Return whether any rank has set each flag. Every rank must call this."""
        return [total > 0 for total in self._strategy.sum([int(flag) for flag in flags])]

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers. Every rank must call this."""
        # A sum with one slot per rank, because the strategies have no maximum.
        rank = get_global_rank()
        return max(sum_over_everybody([number if other == rank else 0 for other in range(get_world_size())]))

    def start_total(self, num_samples: float, num_tokens: int, end_batch_s: Callable[[], float], *flags: bool) -> None:
        """Start to add up the samples and tokens of a batch. Every rank must call this.

        Args:
            num_samples: Of this rank.
            num_tokens: Of this rank.
            end_batch_s: Returns the seconds since its last call. With several ranks it is called now, so that a batch
                lasts from the start of the previous one to its own, on all ranks as on rank 0.
            flags: Sent along, the same number on every rank.
        """
        self._of_batch, self._total = (num_samples, num_tokens, end_batch_s), None
        if self._is_alone or (self.same_batch_size and not self.may_stop and self._count_tokens is False):
            return
        counts = (num_samples, num_tokens, _of_rank_0(end_batch_s()), *flags)
        self._total = self._start_sum([float(count) for count in counts])

    def total(self) -> tuple[int, int, float]:
        """Return the samples and tokens of the batch over all ranks, and its duration in seconds."""
        num_samples, num_tokens, end_batch_s = self._of_batch
        if self._is_alone:
            return int(num_samples), num_tokens, end_batch_s()
        if self._total is not None:
            samples, tokens, seconds, *flags = self._total()
            self.flags = [flag > 0 for flag in flags]
            if self._count_tokens is None:
                self._count_tokens = tokens > 0
            return round(samples), round(tokens), seconds
        if num_tokens:
            raise ValueError(
                f"A batch has {num_tokens} tokens, but the first batch had none on any rank. Give a "
                "DataSpec(dataloader, get_num_tokens_in_batch=...) that counts the tokens of every batch."
            )
        return round(num_samples * self.world_size), 0, end_batch_s()

    def seconds_of_last_batch(self) -> float:
        """Return rank 0's seconds since the start of the last batch if `total` has not returned them, else 0.

        Every rank must call this.
        """
        return 0.0 if self._total is None else self._start_sum([_of_rank_0(self._of_batch[2]())])()[0]

    def start_comparison(
        self, weight: float, num_microbatches: int, *, is_count_of_samples: bool
    ) -> Callable[[], tuple[float, bool]] | None:
        """Start to compare a batch with those of the other ranks. Every rank must call this.

        Args:
            weight: The weight of this rank's batch; its loss counts in proportion to it.
            num_microbatches: The number of microbatches on this rank.
            is_count_of_samples: Whether the weight is the number of samples, which is the same on all ranks if
                `same_batch_size` is set.

        Returns:
            A function that waits, and returns the average weight of a batch per rank and whether all ranks have equally
            many microbatches; `None` if weights and numbers are known to be equal.
        """
        if self.world_size == 1 or (self.same_batch_size and is_count_of_samples):
            return None
        sums = self._start_sum([float(weight), float(num_microbatches), float(num_microbatches**2)])

        def finish() -> tuple[float, bool]:
            # By Cauchy-Schwarz, the numbers are equal if and only if n times the sum of squares is the squared sum.
            total, count, squares = sums()
            return total / self.world_size, squares * self.world_size == count**2

        return finish

    def _start_sum(self, values: Sequence[float]) -> Callable[[], Sequence[float]]:
        if self.world_size == get_world_size():
            return start_sum(values)
        sums = self._strategy.sum(values)  # ranks that share a batch count once, which takes several collectives
        return lambda: sums


def _of_rank_0(seconds: float) -> float:
    return seconds if get_global_rank() == 0 else 0.0


def sum_over_everybody(values: Sequence[int]) -> Sequence[int]:
    """Return the sum of each number over all ranks, including ranks that share a batch. Every rank must call this."""
    return values if get_world_size() == 1 else sum_counts(values)


def next_batch(batches: Iterator[Any], dataloader: Any, num_read: int, default: Any) -> Any:
    """Return the next batch of a dataloader, or `default` at its end.

    Raises:
        RuntimeError: If a dataset has raised `StopIteration` on a rank while the other ranks still have batches.
    """
    try:
        return next(batches)
    except StopIteration as end:
        if get_world_size() > 1 and keeps_length(dataloader) and num_read < len(dataloader):
            dataset = cast("type[object]", type(dataloader.dataset))
            raise RuntimeError(
                f"A StopIteration of {dataset.__module__}.{dataset.__qualname__} has ended the dataloader on global "
                f"rank {get_global_rank()} after {num_read} of its {len(dataloader)} batches, while the "
                "other ranks read on. A map-style dataset must not raise StopIteration, and its __len__ must be the "
                "number of its samples."
            ) from end
        return default
    except Exception as error:
        dataset = getattr(dataloader, "dataset", None)
        if dataset is not None:
            num_workers = getattr(dataloader, "num_workers", 0)
            reader = f"a {type(dataloader).__name__}" + (f" with num_workers={num_workers}" if num_workers else "")
            error.add_note(f"{reader} was reading {type(dataset).__module__}.{type(dataset).__qualname__}")
        raise


def keeps_length(dataloader: Any) -> bool:
    """Return whether a dataloader has the same number of batches as those of the other ranks.

    This is known for a DataLoader over a DistributedSampler.
    """
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    sampler: Any = getattr(batch_sampler, "sampler", None)
    return (
        isinstance(dataloader, DataLoader)
        and type(batch_sampler) is BatchSampler
        and type(sampler) is DistributedSampler
        and sampler.num_replicas > 1  # otherwise each rank may have its own dataset
        and not isinstance(cast(Any, dataloader).dataset, IterableDataset)
    )


def agreed_facts(dataloader: Any) -> dict[str, Any]:
    """Return the facts about a dataloader that must agree on all ranks that share one dataset."""
    facts: dict[str, Any] = {"type": type(dataloader).__name__}
    if not isinstance(dataloader, DataLoader):
        return facts
    loader = cast("DataLoader[Any]", dataloader)
    facts["dataset"] = type(loader.dataset).__name__
    sampler: Any = getattr(cast(Any, loader).batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        names = ("num_replicas", "drop_last", "shuffle", "seed", "num_samples")
        facts |= {f"sampler.{name}": getattr(cast(object, sampler), name) for name in names}
        facts |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if sampler.num_replicas == 1:  # each rank may have its own dataset
            del facts["dataset"], facts["sampler.num_samples"]
    return facts


TOTAL = "loss/train/total"
"""The log name of the loss that is minimized."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss of a batch, summed over microbatches or ranks in proportion to their shares of the batch.

    Attributes:
        value: The sum of the finite losses, each weighted by its share.
        share: The share of the batch that has a finite loss. The mean is `value / share`, which is not needed for the
            total of a batch without missing parts, whose shares sum to 1.
        missing: For the total, the share left out because its loss is not finite, such as a mean over no labels;
            `None` if nothing is missing.
    """

    value: Tensor
    share: Tensor
    missing: Tensor | None = None

    def mean(self, *, is_total: bool) -> Tensor:
        """Return the mean; NaN if the share is 0."""
        if not is_total:
            return self.value / self.share
        if self.missing is None:  # a division would only add rounding
            return self.value
        return torch.where(self.missing > 0, self.value / self.share, self.value)


class BatchLosses:
    """The losses of this rank's microbatches, added up when they are read."""

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[Tensor, float]]] = {}
        self._total: Tensor | None = None
        self._sums: dict[str, LossSum] | None = None

    def clear(self) -> None:
        """Drop all losses."""
        self._parts, self._total, self._sums = {}, None, None

    def add(self, name: str, value: Tensor, share: float) -> None:
        """Add the loss of a microbatch, a scalar, and its share of the batch of all ranks."""
        weighted = weigh(value.detach(), share)
        # Until the losses are read, a callback or a CUDA graph may change the original in place.
        self._parts.setdefault(name, []).append((weighted.clone() if share == 1.0 else weighted, share))

    @property
    def names(self) -> tuple[str, ...]:
        """The log names of the losses."""
        return tuple(self._parts)

    @property
    def total(self) -> Tensor:
        """The sum of the loss that is minimized, which is not finite if that of a microbatch is not."""
        if self._total is None:
            self._total = _sum_of(self._parts[TOTAL])
        return self._total

    def sums(self) -> Mapping[str, LossSum]:
        """Return the sum of each loss over the microbatches in which it is finite.

        A NaN would hide the losses of the other microbatches and ranks.
        """
        if self._sums is None:
            self._sums = {name: self._add_up(name, parts) for name, parts in self._parts.items()}
        return self._sums

    def _add_up(self, name: str, parts: Sequence[tuple[Tensor, float]]) -> LossSum:
        value = self.total if name == TOTAL else _sum_of(parts)
        # In 16 bits the shares of many microbatches would not add up to 1.
        dtype = torch.promote_types(value.dtype, torch.float32)
        shares = torch.tensor([share for _, share in parts], dtype=dtype).to(value.device, non_blocking=True)
        if value.is_cpu and math.isfinite(value.item()):  # the usual case, where a read costs no wait
            return LossSum(value, shares.sum())
        values = torch.stack([value for value, _ in parts])
        finite = values.nan_to_num(0.0, 0.0, 0.0)
        is_finite = values == finite
        missing = shares.mul(~is_finite).sum() if name == TOTAL else None
        return LossSum(finite.sum(), shares.mul(is_finite).sum(), missing)

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each loss over this rank's batch, by log name."""
        total = self.total
        if len(self._parts[TOTAL]) > 1 and not (total.is_cpu and math.isfinite(total.item())):
            return means_of(self.sums())
        return {name: total if name == TOTAL else self.sums()[name].mean(is_total=False) for name in self._parts}


def weigh(loss: Tensor, share: float) -> Tensor:
    """Return a loss multiplied by the share of its microbatch."""
    if share == 1.0:
        return loss
    # Not a product with 0: the loss of a microbatch without weight may be NaN.
    return loss * share if share else torch.zeros_like(loss)


def _sum_of(parts: Sequence[tuple[Tensor, float]]) -> Tensor:
    return parts[0][0] if len(parts) == 1 else torch.stack([value for value, _ in parts]).sum()


def means_of(sums: Mapping[str, LossSum]) -> dict[str, Tensor]:
    """Return the mean of each loss by its name."""
    return {name: loss.mean(is_total=name == TOTAL) for name, loss in sums.items()}


def mean_total(losses: BatchLosses, strategy: Strategy) -> Tensor:
    """Return the mean of the total over all ranks, without non-finite losses. Every rank must call this."""
    total = losses.sums()[TOTAL]
    missing = torch.zeros_like(total.share) if total.missing is None else total.missing
    summed = strategy.mean({"value": total.value, "share": total.share, "missing": missing})
    return LossSum(**summed).mean(is_total=True)


class LossMeans:
    """Averages of the losses of each batch over the ranks.

    A model may return different losses in each batch and on each rank. The ranks therefore exchange every name that any
    rank has had, each with the share of the batch that has it now, in one dtype. They compare their names and dtypes at
    the first batch, and again after a batch in which a rank has a new one.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._names: list[str] = []  # without the total, which every rank has in every batch
        self._dtype = torch.float32  # float64 once a rank has had a loss in float64
        self._own: set[str] = set()
        self._own_dtype = torch.float32
        self._must_compare = True

    def begin(self, losses: BatchLosses) -> list[Tensor]:
        """Return what the ranks exchange about the losses of a batch. Every rank must call this.

        It must follow `end` of the batch before on every rank.
        """
        if self._strategy.world_size == 1:
            return []
        sums = losses.sums()
        self._own.update(name for name in sums if name != TOTAL)
        for loss in sums.values():
            self._own_dtype = torch.promote_types(self._own_dtype, loss.value.dtype)
        if self._must_compare:
            names, dtypes = zip(*dist.all_gather_object((self._own, self._own_dtype)), strict=True)
            self._names = sorted(set[str]().union(*names))
            self._dtype = functools.reduce(torch.promote_types, dtypes)
            self._must_compare = False
        total = sums[TOTAL]
        none = torch.zeros_like(total.share)
        values = [total.value, total.share, none if total.missing is None else total.missing]
        for name in self._names:
            values += (sums[name].value, sums[name].share) if name in sums else (none, none)
        # Divided before the sum, and in float32 at least, so that half precision cannot overflow.
        parts = torch.stack([value.to(self._dtype) for value in values]).div(get_world_size())
        has_new_dtype = torch.promote_types(self._own_dtype, self._dtype) != self._dtype
        has_news = has_new_dtype or not self._own <= set(self._names)
        return [torch.tensor([has_news, *(name in sums for name in self._names)]), parts]

    def end(self, losses: BatchLosses, gathered: Sequence[Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Record new names, and return a function that returns the means over the samples of all ranks.

        They include losses that only other ranks have. When a name first occurs after the first batch, the ranks that
        have it return their own value.
        """
        if not gathered:
            return losses.means
        facts, parts = gathered
        self._must_compare, *are_there = cast("list[bool]", facts.any(dim=0).tolist())  # pyright: ignore[reportUnknownMemberType]
        names = [name for name, is_there in zip(self._names, are_there, strict=True) if is_there]
        places = [place for place, is_there in enumerate(are_there) if is_there]

        def means() -> dict[str, Tensor]:
            total, *others = parts.sum(dim=0).unbind()
            own = losses.sums()
            sums = dict(own)
            sums[TOTAL] = LossSum(total.to(own[TOTAL].value.dtype), *others[:2])
            for name, place in zip(names, places, strict=True):
                value, share = others[2 + 2 * place : 4 + 2 * place]
                sums[name] = LossSum(value.to(own[name].value.dtype) if name in own else value, share)
            return means_of(sums)

        return means


_MOST_SHOWN = 8
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, which differs between processes


def broadcast_error(refusal: Exception, device: Any, dist_timeout: Any) -> None:
    """Report to the other ranks that this one rejects its arguments. Every rank must call this, or `compare`.

    Raises:
        RankDisagreementError: Unless all ranks reject theirs with the same message.
    """
    try:
        if get_world_size() == 1:
            return
        chosen, timeout_s = None, DEFAULT_TIMEOUT_S
        with suppress(Exception):  # falls back to the default device, which the other ranks most likely use
            chosen = get_device(device)
        with suppress(Exception):
            check_seconds(dist_timeout=dist_timeout)
            timeout_s = dist_timeout
        dist.initialize_dist(get_device(None) if chosen is None else chosen, timeout_s)
        compare({}, refusal)
    except RankDisagreementError:
        raise
    except Exception:
        return  # without the other ranks, the caller raises this rank's own error


def compare(facts: Mapping[str, Any], refusal: Exception | None = None) -> None:
    """Raise, on every rank alike, if the facts of the ranks differ or some reject their arguments.

    Every rank must call this, or `broadcast_error`.

    Raises:
        RankDisagreementError: With the facts that differ, or with the error of each rank.
    """
    said = None if refusal is None else _ADDRESS.sub("", f"{type(refusal).__name__}: {refusal}")
    try:
        agreement.check_agreement({"refusal": said, **facts})
    except RankDisagreementError:
        # The disagreement is raised on every rank, so all of them reach this collective.
        of_ranks = dist.all_gather_object(said)
        if not any(of_ranks):
            raise
        refusals = [f"rank {rank}: {text}" for rank, text in enumerate(of_ranks) if text]
        raise RankDisagreementError(
            f"{len(refusals)} of {len(of_ranks)} ranks cannot use the arguments that they were given:\n  "
            + "\n  ".join(refusals[:_MOST_SHOWN])
            + "\nThe arguments of every rank must be good, and the same where they are not about files or loggers."
        ) from refusal


def open_store(key: str) -> Any:
    """Return a client of the default store."""
    # PyTorch has no public accessor for its store, and a second store would need another port.
    shared = distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    # A clone, because calls of one client block each other.
    return tdist.PrefixStore(key, shared.clone())  # pyright: ignore[reportPrivateImportUsage]  # documented there

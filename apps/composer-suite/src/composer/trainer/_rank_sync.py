"""What the ranks of a run tell each other while they train: who has a batch, how much it holds, what the clock says.

A rank that is alone asks nobody. Ranks whose dataloaders keep step by construction know each other's batches without
asking, so they exchange nothing either, unless somebody reads the losses or the clock.
"""

from __future__ import annotations

import itertools
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as tdist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from composer.trainer._error_context import name_dataset
from composer_dist import RankDisagreementError, agreement, dist, get_global_rank, get_world_size
from composer_dist.ddp import sum_counts
from composer_dist.devices import Device, get_device
from composer_dist.initialize import DEFAULT_TIMEOUT_S
from composer_dist.strategy import Strategy
from composer_events.data_spec import DataSpec

__all__ = [
    "begin_stage",
    "first_failure_of_others",
    "TOTAL",
    "LossMeans",
    "add_finite",
    "mean_total",
    "missing_share",
    "over_their_shares",
    "compare",
    "share_refusal",
    "open_store",
]


class Ranks:
    """Answers, alike on every rank, what one rank cannot know by itself.

    Args:
        strategy: Knows the other ranks.

    Attributes:
        keep_length: Whether every rank has as many batches.
        keep_step: Whether every rank also has as many samples in every batch.
        listen: Whether any rank has somebody who reads the losses or the clock of each batch.
        may_stop: Whether any rank has somebody who can end the training, an algorithm for example.
        log: Whether any rank has a destination of the log.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.world_size = strategy.world_size
        self._is_alone = get_world_size() == 1  # ranks that share a batch are not
        self.keep_length = True
        self.keep_step = True
        self.listen = True
        self.may_stop = True
        self.log = True
        self._count_tokens: bool | None = None  # known after the first batch
        self._losses = LossMeans(strategy)

    def begin(self, data_spec: DataSpec, *, listens: bool = False, may_stop: bool = False, logs: bool = False) -> None:
        """Compare the dataloaders before they are read. Every rank must call this.

        Args:
            data_spec: What this rank is going to read.
            listens: Whether somebody on this rank reads the losses or the clock.
            may_stop: Whether somebody on this rank can end the training.
            logs: Whether this rank has a destination of the log.
        """
        self._count_tokens = None
        of_length, in_step, listening, stopping, logging = self._strategy.sum(
            [
                int(keeps_length(data_spec.dataloader)),
                int(keeps_step(data_spec)),
                int(listens),
                int(may_stop),
                int(logs),
            ]
        )
        self.keep_length = of_length == self.world_size or self.world_size == 1
        self.keep_step = in_step == self.world_size or self.world_size == 1
        self.listen, self.may_stop, self.log = listening > 0, stopping > 0, logging > 0

    def all_have_a_batch(self, has_batch: bool) -> bool:
        """Say whether every rank still has a batch; the rank that runs out first ends the epoch of all."""
        if self.keep_length:
            return has_batch
        return self._strategy.sum([int(has_batch)])[0] == self.world_size

    def any_stops(self, stops: bool, *, for_good: bool) -> tuple[bool, bool]:
        """Return whether any rank wants training to end here, and for good, if anybody could have asked for it."""
        if self._is_alone or not self.may_stop:
            return stops, for_good
        stopping, stopping_for_good = self._strategy.sum([int(stops), int(for_good)])
        return stopping > 0, stopping_for_good > 0

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers. Every rank must call this."""
        rank = get_global_rank()
        return max(sum_over_everybody([number if other == rank else 0 for other in range(get_world_size())]))

    def mean_losses(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of each loss over the samples of all ranks that have it. Every rank must call this.

        A name that no rank had in the first batch has, when it comes for the first time, the value of this rank alone.
        """
        return over_their_shares(losses) if self.world_size == 1 else self._losses(losses)

    def total(self, num_samples: float, num_tokens: int, duration_s: float = 0.0) -> tuple[int, int, float]:
        """Return the samples and tokens of a batch on all ranks together, and rank 0's duration of it.

        Args:
            num_samples: Those of this rank. A float where a rank holds part of a sample.
            num_tokens: Those of this rank.
            duration_s: What this rank's clock says.

        Raises:
            ValueError: If a batch has tokens although the first one had none.
        """
        if self._is_alone:
            return int(num_samples), num_tokens, duration_s
        if self.keep_step and not self.listen and self._count_tokens is False:
            self._refuse_tokens(num_tokens)
            return round(num_samples * self.world_size), 0, duration_s
        of_rank_0 = duration_s if get_global_rank() == 0 else 0.0
        has_news = float(self._losses.has_news)
        samples, tokens, seconds, num_news = self._strategy.sum(
            [float(num_samples), float(num_tokens), of_rank_0, has_news]
        )
        if num_news:
            self._losses.compare_names()
        if self._count_tokens is None:
            self._count_tokens = tokens > 0
        return round(samples), round(tokens), seconds

    def compare_batch(self, weight: float, num_microbatches: int, *, is_count_of_samples: bool) -> tuple[float, bool]:
        """Return a batch's weight on a rank on average, and whether every rank cuts it into as many microbatches.

        Args:
            weight: What this rank's batch weighs; its loss counts in proportion to that.
            num_microbatches: How many this rank has.
            is_count_of_samples: Whether the weight is the number of samples, which all ranks have alike when they
                keep step.
        """
        if self.world_size == 1 or (self.keep_step and is_count_of_samples):
            return weight, True
        # Numbers are all equal just if their squares add up to no more than those of their mean.
        total, count, squares = self._strategy.sum([float(weight), num_microbatches, num_microbatches**2])
        return total / self.world_size, squares * self.world_size == count**2

    def _refuse_tokens(self, num_tokens: int) -> None:
        if num_tokens:
            raise ValueError(
                f"A batch has {num_tokens} tokens, but the first batch had none on any rank. Give a "
                "DataSpec(dataloader, get_num_tokens_in_batch=...) that counts the tokens of every batch."
            )


def sum_over_everybody(values: Sequence[int]) -> Sequence[int]:
    """Return the sum of each number over all ranks, also those that share a batch. Every rank must call this."""
    return values if get_world_size() == 1 else sum_counts(values)


def next_batch(batches: Iterator[Any], dataloader: Any, num_read: int, default: Any) -> Any:
    """Return the next batch of a dataloader, or `default` at its end.

    Raises:
        RuntimeError: If a dataset has ended it with a `StopIteration`, on a rank that the others expect to go on.
    """
    try:
        return next(batches)
    except StopIteration as end:
        if get_world_size() > 1 and keeps_length(dataloader) and num_read < len(dataloader):
            dataset = type(dataloader.dataset)
            raise RuntimeError(
                f"A StopIteration of {dataset.__module__}.{dataset.__qualname__} has ended the dataloader on global "
                f"rank {get_global_rank()} after {num_read} of its {len(dataloader)} batches, which the other ranks go "
                "on to read. A dataset that is asked for samples by number raises another exception if it has no such "
                "sample, and its __len__ says how many there are."
            ) from end
        return default
    except Exception as error:
        name_dataset(error, dataloader)
        raise


def keeps_length(dataloader: Any) -> bool:
    """Say whether a dataloader gives its rank as many batches as those of the other ranks give theirs.

    That is known of a DataLoader that cuts what a DistributedSampler deals out.
    """
    return (
        isinstance(dataloader, DataLoader)
        and type(dataloader.batch_sampler) is BatchSampler
        and type(dataloader.batch_sampler.sampler) is DistributedSampler
        and dataloader.batch_sampler.sampler.num_replicas > 1  # else each rank may have a dataset of its own
        and not isinstance(dataloader.dataset, IterableDataset)
    )


def keeps_step(data_spec: DataSpec) -> bool:
    """Say whether the batches have as many samples on every rank too: nothing but PyTorch itself makes them."""
    loader = data_spec.dataloader
    return keeps_length(loader) and loader.collate_fn is default_collate and data_spec.counts_by_default


def agreed_facts(dataloader: Any) -> dict[str, Any]:
    """Return what all ranks must find the same in their dataloaders, if these share one dataset."""
    if not isinstance(dataloader, DataLoader):
        return {"type": type(dataloader).__name__}
    facts: dict[str, Any] = {"type": type(dataloader).__name__, "dataset": type(dataloader.dataset).__name__}
    sampler = getattr(dataloader.batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        names = ("num_replicas", "drop_last", "shuffle", "seed", "num_samples")
        facts |= {f"sampler.{name}": getattr(sampler, name) for name in names}
        facts |= {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        if sampler.num_replicas == 1:  # then each rank may have a dataset of its own
            del facts["dataset"], facts["sampler.num_samples"]
    return facts


_MOST_KEPT: Final = 20_000  # characters, the last ones: the store has them in memory
_KEY: Final = "first"

_stages: Final = itertools.count()  # of this process; all ranks have as many
_stage = next(_stages)


def begin_stage() -> None:
    """Forget what failed before. Every rank must call this, for each fit, evaluation and prediction."""
    global _stage
    _stage = next(_stages)


def first_failure_of_others(error: BaseException) -> str | None:
    """Tell the other ranks what this one has failed of, and return what one that failed before has told.

    Nobody waits for another rank, which may be gone, and so may the store.

    Args:
        error: What ends this rank's training. A signal is nobody's failure, but a launcher sends one after a failure.

    Returns:
        The rank and its traceback; `None` if this rank is the first, or nothing was told.
    """
    if get_world_size() == 1:
        return None
    rank = f"Rank {get_global_rank()}"
    told = f"{rank} failed first:\n{''.join(traceback.format_exception(error))[-_MOST_KEPT:]}"
    try:
        store = open_store(f"composer/failure/{_stage}")
        if isinstance(error, Exception):
            first = store.compare_set(_KEY, "", told).decode(errors="replace")
        elif store.check([_KEY]):
            first = store.get(_KEY).decode(errors="replace")
        else:
            return None
    except Exception:  # of what kind it is depends on the store; that of this rank is what counts
        return None
    return None if first.startswith(f"{rank} ") else first


TOTAL = "loss/train/total"
"""The log name of the loss that is minimised."""

_SHARE = "\0share"  # not part of a loss's own name
"""Ends the name of the share of a batch that has a loss, next to the loss, which is a sum weighted by such shares."""

_MISSING = "\0missing"
"""The share of a batch whose total is not finite and so left out: the mean over one label of which none counts, say."""


def add_finite(losses: dict[str, Tensor], name: str, loss: Tensor, share: float) -> None:
    """Add a microbatch's loss, weighted by its share in the batch, to those of the batch if it is finite.

    A NaN would hide the losses of the other microbatches and ranks.
    """
    dtype = torch.promote_types(loss.dtype, torch.float32)
    missing = torch.nan_to_num((loss * 0).to(dtype), nan=share)
    _add(losses, name, torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0))
    _add(losses, name + _SHARE, share - missing)
    if name == TOTAL:
        _add(losses, _MISSING, missing)


def missing_share(losses: Mapping[str, Tensor]) -> Tensor:
    """Return the share of this rank's batch whose loss is not finite: 0 if all of it is."""
    total = losses[TOTAL]
    return losses[_MISSING] if _MISSING in losses else torch.nan_to_num(total * 0, nan=1.0)


def mean_total(losses: Mapping[str, Tensor], strategy: Strategy) -> Tensor:
    """Return the mean of the total over all ranks, without what is not finite. Every rank must call this."""
    sums = {name: losses[name] for name in (TOTAL, TOTAL + _SHARE, _MISSING) if name in losses}
    return over_their_shares(strategy.mean(sums))[TOTAL]


class LossMeans:
    """Averages the losses of each batch, by one collective whose size all ranks know.

    A model may return other losses in one batch than in the next, and on one rank than on another. What is exchanged
    is therefore made up of the names that any rank has had, each with the share of the batch that has it now. The ranks
    compare their names at the first batch, and once more after a batch in which one of them has a new one.

    Args:
        strategy: Takes the means.

    Attributes:
        has_news: Whether this rank has a name that the ranks have not compared.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.has_news = False
        self._strategy = strategy
        self._names: list[str] = []  # apart from the total, which every rank has in every batch
        self._own: set[str] = set()
        self._is_first = True

    def compare_names(self) -> None:
        """Find out which names there are. Every rank must call this."""
        self._names = sorted(set().union(*dist.all_gather_object(sorted(self._own))))
        self.has_news = False

    def __call__(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of each loss over the samples, of all ranks, that have it. Every rank must call this."""
        self._note({name for name in losses if name != TOTAL and name + _SHARE in losses})
        if self._is_first:
            self.compare_names()
            self._is_first = False
        total = losses[TOTAL].detach()
        none, no_share = torch.zeros_like(total), torch.zeros_like(total, dtype=torch.float32)
        asked = {TOTAL: total, _MISSING: losses.get(_MISSING, no_share)}
        asked[TOTAL + _SHARE] = losses.get(TOTAL + _SHARE, no_share)
        for name in self._names:
            asked[name] = losses.get(name, none).detach()
            asked[name + _SHARE] = losses.get(name + _SHARE, no_share)
        means = self._strategy.mean(asked)
        return over_their_shares({name: means.get(name, value.detach()) for name, value in losses.items()})

    def _note(self, names: set[str]) -> None:
        if not names <= self._own:
            self._own |= names
            self.has_news = not self._own <= set(self._names)


def over_their_shares(losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each loss over the share of the batch that has it: NaN where none of the batch has a finite one."""
    means = {
        name: loss / losses[name + _SHARE] if name + _SHARE in losses else loss
        for name, loss in losses.items()
        if not name.endswith((_SHARE, _MISSING))
    }
    if _MISSING in losses:  # otherwise the shares add up to 1 but for their rounding, and the total keeps its last bit
        means[TOTAL] = torch.where(losses[_MISSING] > 0, means[TOTAL], losses[TOTAL])
    return means


def _add(losses: dict[str, Tensor], name: str, loss: Tensor) -> None:
    losses[name] = losses[name] + loss if name in losses else loss


_MOST_SHOWN = 8
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, which is another one in each process


def share_refusal(refusal: Exception, device: Any, dist_timeout: Any) -> None:
    """Tell the other ranks that this one refuses its arguments. Every rank must call this, or `compare`.

    Raises:
        RankDisagreementError: If they do not all refuse theirs in the same words.
    """
    try:
        if get_world_size() == 1:
            return
        dist.initialize_dist(_device_of(device), _timeout_s_of(dist_timeout))
        compare({}, refusal)
    except RankDisagreementError:
        raise
    except Exception:
        return  # nobody is there to be told, and what is wrong here is known


def compare(facts: Mapping[str, Any], refusal: Exception | None = None) -> None:
    """Raise, on every rank alike, if the ranks have different facts, or if some refuse their arguments.

    Every rank must call this, or `share_refusal`.

    Args:
        facts: As `check_agreement` takes them.
        refusal: With what this rank refuses its arguments, if it does.

    Raises:
        RankDisagreementError: With the facts that differ, or else with what each rank refuses.
    """
    said = None if refusal is None else _ADDRESS.sub("", f"{type(refusal).__name__}: {refusal}")
    try:
        agreement.check_agreement({"refusal": said, **facts})
    except RankDisagreementError:
        of_ranks = dist.all_gather_object(said)
        if not any(of_ranks):
            raise
        refusals = [f"rank {rank}: {text}" for rank, text in enumerate(of_ranks) if text]
        raise RankDisagreementError(
            f"{len(refusals)} of {len(of_ranks)} ranks cannot use the arguments that they were given:\n  "
            + "\n  ".join(refusals[:_MOST_SHOWN])
            + "\nThe arguments of every rank must be good, and the same where they are not about files or loggers."
        ) from refusal


def _device_of(device: Any) -> Device:
    try:
        return get_device(device)
    except Exception:
        return get_device(None)  # which is what the other ranks most likely have


def _timeout_s_of(dist_timeout: Any) -> float:
    try:
        check_dist_timeout(dist_timeout)
    except Exception:
        return DEFAULT_TIMEOUT_S
    return dist_timeout


def open_store(key: str) -> Any:
    """Return a client of the store, with keys of its own.

    Args:
        key: What the keys begin with.
    """
    # PyTorch keeps the store for itself; one of our own would need a port of its own.
    shared = distributed_c10d._get_default_store()
    # A client of its own, since the calls of one client wait for each other.
    return tdist.PrefixStore(key, shared.clone())  # pyright: ignore[reportPrivateImportUsage]  # documented there


def check_dist_timeout(timeout_s: Any) -> None:
    """Check a timeout for the collectives.

    Raises:
        ValueError: If it is not a finite number greater than 0.
    """
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:
        raise ValueError(
            f"dist_timeout={timeout_s!r} must be a finite number of seconds greater than 0. For a day write 86400."
        )

"""What the ranks of a run tell each other while they train: who has a batch, how much it holds, what the clock says.

A rank that is alone asks nobody. Ranks whose dataloaders keep step by construction know each other's batches without
asking, so they exchange nothing either, unless somebody reads the losses or the clock.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from composer.trainer._blame import name_dataset
from composer.trainer._loss_means import LossMeans, over_their_shares
from composer_dist import get_global_rank, get_world_size
from composer_dist.ddp import sum_counts
from composer_dist.strategy import Strategy
from composer_events.data_spec import DataSpec


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

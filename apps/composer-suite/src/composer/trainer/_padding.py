"""The samples that a DistributedSampler repeats at the end of an epoch, so that every rank has as many."""

from typing import Any

from torch.utils.data.distributed import DistributedSampler

from composer_events.data_spec import DataSpec


class Padding:
    """Finds the repeated samples of one pass over a dataloader.

    They are the last sample of each of the last ranks, in the batch with which the sampler comes to its end.

    Args:
        dataloader: Any; only one over a DistributedSampler that does not drop its tail repeats samples.
    """

    def __init__(self, dataloader: Any) -> None:
        self._num_repeated = 0
        self._is_own = False
        self._num_left = 0
        sampler = getattr(getattr(dataloader, "batch_sampler", None), "sampler", None)
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
            dataset: Any = sampler.dataset  # of a length, since the sampler was made
            self._num_repeated = sampler.total_size - len(dataset)
            self._is_own = sampler.rank >= sampler.num_replicas - self._num_repeated
            self._num_left = sampler.num_samples

    def in_batch(self, num_samples: int | float) -> tuple[int, bool]:
        """Return how many samples of the next batch are repeated on all ranks together, and whether this rank has one.

        Args:
            num_samples: How many samples the batch has on this rank.
        """
        if self._num_repeated == 0:
            return 0, False
        self._num_left -= int(num_samples)
        return (0, False) if self._num_left > 0 else (self._num_repeated, self._is_own)


def without_last(microbatch: Any, data_spec: DataSpec) -> tuple[Any, bool]:
    """Return a microbatch without its last sample, and whether anything is left that counts.

    A microbatch of one sample is returned as it is: it is computed all the same, because the other ranks may wait for
    this rank's part of the model.
    """
    num_samples = int(data_spec.get_num_samples_in_batch(microbatch))
    if num_samples <= 1:
        return microbatch, False
    return data_spec.split_batch(microbatch, num_samples - 1)[0], True

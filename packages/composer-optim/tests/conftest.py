"""What the tests share: a training state that is nothing but what a scheduler reads."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings

from composer_time import Time, Timestamp

# A deadline would measure how busy the machine is.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


@dataclass
class Training:
    timestamp: Timestamp
    max_duration: Time | None
    dataloader_len: Time | None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


@pytest.fixture
def training():
    """Make a state, `batch` batches into a training of `max_duration`, with `batches_per_epoch` (`None`: unknown)."""

    def make(max_duration, batches_per_epoch=1000, batch=0, **counters):
        length = None if batches_per_epoch is None else Time(batches_per_epoch, "ba")
        duration = None if max_duration is None else Time.from_timestring(max_duration)
        return Training(Timestamp(batch=batch, **counters), duration, length)

    return make

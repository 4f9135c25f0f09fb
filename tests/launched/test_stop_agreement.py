"""Ranks that run at their own speed stop after the same batch.

On a CPU the ranks of a Trainer keep step, since each batch's gradients are waited for. On GPUs the processes run ahead
of their devices by as much as they like, so what they agree by is tested by itself, without anything that holds them.
"""

import random
import time

import pytest

from composer.trainer._shutdown import StopAgreement
from composer_dist import get_global_rank
from composer_dist.testing import run_ranks

NUM_BATCHES = 1000
ROUNDS = 2


def train_at_own_speed(askers, seed):
    """Go through batches of random length, and return for each round the last one and whether it was agreed on."""
    draw = random.Random(seed + get_global_rank())
    ends = []
    for round_number in range(ROUNDS):
        received = []
        agreement = StopAgreement(lambda received=received: 15 if received else None)
        agreement.begin()
        at = random.Random(seed + round_number).randrange(1, 30)
        ended = 0
        while ended < NUM_BATCHES:
            time.sleep(draw.random() * 0.02 * (1 + get_global_rank() / 2))
            ended += 1
            if ended == at and get_global_rank() in askers:
                received.append(True)
            if ended < NUM_BATCHES and agreement.stops_here():
                break
        agreement.end(has_failed=False)
        ends.append((ended, agreement.is_agreed, agreement.request))
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("askers", [(0,), (2,), (0, 1, 2)], ids=str)
def test_ranks_at_different_speeds_stop_after_the_same_batch(tmp_path, askers):
    ranks = run_ranks(train_at_own_speed, askers, 7, store=tmp_path / "store", world_size=3)
    assert ranks[0] == ranks[1] == ranks[2]
    for ended, is_agreed, request in ranks[0]:
        assert is_agreed
        assert ended < NUM_BATCHES
        assert request == 15


def come_to_the_end_first():
    """Train on one batch on rank 0, and on many on rank 1, which is asked to stop when rank 0 has gone."""
    received = []
    agreement = StopAgreement(lambda: 15 if received else None)
    agreement.begin()
    begun_s = time.monotonic()
    for batch in range(20):
        if get_global_rank() == 0:
            break
        time.sleep(0.1)
        if batch == 5:
            received.append(True)
        if agreement.stops_here():
            break
    agreement.end(has_failed=False)
    return batch, agreement.is_agreed, time.monotonic() - begun_s


def test_a_rank_that_has_come_to_its_end_is_waited_for_by_nobody(tmp_path):
    first, second = run_ranks(come_to_the_end_first, store=tmp_path / "store")
    assert first[:2] == (0, False)
    assert second[:2] == (19, False)  # it goes on to its own end
    assert second[2] < 30  # and not the minute for which it would wait for an answer

"""Which ranks are slow, from their time in each part of a batch."""

import pytest

from composer_dist.launch.stragglers import Straggler, Stragglers, find_slow
from composer_dist.progress import PARTS, Board, Recorder, waiting
from composer_time import Timestamp

NOTHING = dict.fromkeys(PARTS, 0.0)


def work(*ranks):
    """Return the work of ranks, given in milliseconds per batch."""
    return {rank: NOTHING | {part: ms / 1000 for part, ms in parts.items()} for rank, parts in enumerate(ranks)}


@pytest.mark.parametrize(
    ("ranks", "slow"),
    [
        ([{"data": 50, "train": 5}, {"data": 1, "train": 5, "backward": 49}], {0: "data"}),
        ([{"train": 5, "backward": 40}, {"train": 25, "backward": 20}], {1: "train"}),
        ([{"callbacks": 5}, {"callbacks": 5}, {"callbacks": 40}], {2: "callbacks"}),
        ([{"optimizer": 9}, {"optimizer": 9}, {"optimizer": 9}, {"optimizer": 30}], {3: "optimizer"}),
        ([{"data": 50}, {"data": 50}, {"data": 1}, {"data": 1}, {"data": 1}], {0: "data", 1: "data"}),
        # Equal ranks, and less than a factor of 2.
        ([{"data": 50}, {"data": 50}], {}),
        ([{"data": 50}, {"data": 90}], {}),
        # Three times as long, but hardly a part of a batch; and less than the clock can tell.
        ([{"data": 3, "backward": 100}, {"data": 1, "backward": 102}], {}),
        ([{"data": 0.6}, {"data": 0.2}], {}),
        # Rank 1 waits for rank 0 in a collective of its own, which looks like work in a forward pass.
        ([{"callbacks": 50, "train": 5}, {"callbacks": 1, "train": 54}], {}),
        ([{"data": 50, "train": 5}, {"data": 1, "train": 54}], {0: "data"}),
        # Evaluating and saving are not the same on all ranks.
        ([{"checkpoint": 500, "data": 5}, {"data": 5}], {}),
        # Rank 1 waits in a callback or in the forward pass for rank 0, which evaluates or saves alone.
        ([{"evaluation": 50, "train": 5}, {"callbacks": 50, "train": 5}], {}),
        ([{"checkpoint": 50}, {"train": 50}], {}),
    ],
)
def test_the_rank_that_works_longest_outside_collectives_is_slow(ranks, slow):
    assert find_slow(work(*ranks)) == slow


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("composer_dist.progress.time.monotonic", lambda: self.now)


def train(recorders, clock, batches, data_s):
    """Let the ranks do batches, each with its own time for data; the clock is set back for each rank."""
    began = clock.now
    for batch in batches:
        start = clock.now
        for recorder, seconds in zip(recorders, data_s, strict=True):
            clock.now = start
            stamp = Timestamp(batch=batch)
            recorder.enter("before_dataloader", stamp)
            recorder.leave("before_dataloader")
            clock.now += seconds
            recorder.enter("before_backward")
            recorder.leave("before_backward")
            clock.now = start + max(data_s)
            recorder.enter("batch_end", Timestamp(batch=batch + 1))
            recorder.leave("batch_end")
    return clock.now - began


@pytest.fixture
def board():
    board = Board(2)
    yield board
    board.close()


def test_a_rank_is_named_once_after_it_was_slow_for_some_time(board, monkeypatch):
    clock = Clock(monkeypatch)
    recorders = [Recorder(board.slot(rank), rank=rank) for rank in range(2)]
    for recorder in recorders:
        recorder.enter("fit_start", Timestamp(batch=40))
        recorder.leave("fit_start")
    search = Stragglers(2)
    told = []
    for batch in range(40, 300):
        data_s = (0.1, 0.1) if batch < 100 else (0.1, 0.3)
        train(recorders, clock, [batch], data_s)
        told += [(batch, each) for each in search.look(board.read_all())]
    ((batch, straggler),) = told
    assert straggler == Straggler(1, "data", pytest.approx(0.3), pytest.approx(0.1), batch + 1)
    assert straggler.factor == pytest.approx(3.0)
    assert str(straggler) == (
        "rank 1 is slow, and the other ranks wait for it: reading data takes 300 ms of each of its batches, "
        "3 times as long as on the other ranks (100 ms)"
    )
    # Windows of 7 batches of 0.3 s; slow in five of them, of which the first may have begun before.
    assert 100 + 4 * 7 <= batch <= 100 + 7 * 7
    row = search.table()["data"]
    assert (row["min"], row["slowest_rank"]) == (pytest.approx(0.1), 1)
    assert row["median"] == pytest.approx((row["min"] + row["max"]) / 2)


def test_a_rank_that_is_slow_for_a_moment_is_not_named(board, monkeypatch):
    clock = Clock(monkeypatch)
    recorders = [Recorder(board.slot(rank), rank=rank) for rank in range(2)]
    search = Stragglers(2)
    for batch in range(200):
        train(recorders, clock, [batch], (0.1, 3.0 if batch % 40 == 0 else 0.1))
        assert search.look(board.read_all()) == []


def test_waits_for_other_ranks_are_no_work_of_the_part_in_which_they_are(board, monkeypatch):
    clock = Clock(monkeypatch)
    recorder = Recorder(board.slot(0), rank=0)
    monkeypatch.setattr("composer_dist.progress._recorder", recorder)
    recorder.enter("before_dataloader")
    recorder.leave("before_dataloader")
    clock.now += 1.0
    with waiting:
        clock.now += 1.0
        with waiting:
            clock.now += 4.0
    clock.now += 2.0
    recorder.enter("after_dataloader")
    seconds = board.read(0).seconds
    assert (seconds["data"], seconds["collective"]) == (3.0, 5.0)

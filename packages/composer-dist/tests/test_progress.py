import subprocess
import sys

import pytest

from composer_dist import flight_recorder
from composer_dist.progress import PHASES, VARIABLE, Board, Recorder, phase_of
from composer_time import Timestamp


@pytest.fixture
def board():
    board = Board(2)
    yield board
    board.close()


def test_a_board_shows_what_another_process_has_recorded_even_after_its_end(board):
    code = (
        "from composer_dist.progress import progress_recorder\n"
        "from composer_time import Timestamp\n"
        "recorder = progress_recorder()\n"
        "recorder.enter('after_backward', Timestamp(epoch=1, batch=7, sample=56, token=9))\n"
        "recorder.leave('after_backward')\n"
        "recorder.note_loss(0.5, 6)\n"
        "recorder.note_checkpoint(4)\n"
        "recorder.enter('batch_end')\n"
        "import os; os._exit(3)\n"
    )
    environ = {"PATH": "", VARIABLE: board.slot(1), "RANK": "5"}
    assert subprocess.run([sys.executable, "-c", code], env=environ).returncode == 3
    progress = board.read(1)
    assert (progress.rank, progress.event, progress.phase, progress.is_inside_event) == (
        5,
        "batch_end",
        "callbacks",
        True,
    )
    assert (progress.epoch, progress.batch, progress.samples, progress.tokens) == (1, 7, 56, 9)
    assert (progress.loss, progress.loss_batch, progress.checkpoint_batch) == (0.5, 6, 4)
    assert progress.checkpoint_s > progress.started_s
    assert [each.rank for each in board.read_all()] == [5]


def test_the_counter_is_odd_inside_an_event_and_grows_with_each_mark(board):
    recorder = Recorder(board.slot(0), rank=0)
    seen = [board.read(0).counter]
    for event in ("before_forward", "after_forward"):
        recorder.enter(event, Timestamp())
        seen.append(board.read(0).counter)
        recorder.leave(event)
        seen.append(board.read(0).counter)
    assert seen == [0, 1, 2, 3, 4]
    assert board.read(0).phase == "train"


def test_time_is_counted_for_the_phase_in_which_it_passed(board, monkeypatch):
    now = 100.0
    monkeypatch.setattr("composer_dist.progress.time.monotonic", lambda: now)
    recorder = Recorder(board.slot(0), rank=0)
    for event, seconds in (("before_dataloader", 2.0), ("after_dataloader", 3.0), ("after_train_batch", 4.0)):
        recorder.enter(event)
        recorder.leave(event)
        now += seconds
    recorder.enter("batch_checkpoint")
    now += 5.0
    recorder.leave("batch_checkpoint")
    seconds = board.read(0).seconds
    assert {name: value for name, value in seconds.items() if value} == {
        "data": 2.0,
        "train": 3.0,
        "optimizer": 4.0,
        "checkpoint": 5.0,
    }


def test_the_end_of_callbacks_is_recorded_after_a_training_without_errors(board):
    recorder = Recorder(board.slot(0), rank=0)
    recorder.enter("before_forward")
    with recorder.closing():  # of another Trainer, or after an error
        assert board.read(0).event == "before_forward"
    recorder.enter("fit_end")
    assert board.read(0).phase == "checkpoint"  # which includes the last save
    recorder.leave("fit_end")
    with recorder.closing():
        assert (board.read(0).event, board.read(0).phase) == ("close", "checkpoint")
    assert board.read(0).phase == "between"


def test_progress_within_a_phase_changes_neither_phase_nor_event(board):
    recorder = Recorder(board.slot(0), rank=0)
    recorder.enter("fit_end")
    before = board.read(0)
    recorder.note_progress()
    after = board.read(0)
    assert after.counter > before.counter
    assert (after.event, after.phase, after.is_inside_event) == (before.event, before.phase, True)


def test_a_slot_belongs_to_one_living_process(board):
    Recorder(board.slot(0), rank=0)
    code = "import sys; from composer_dist.progress import Recorder; Recorder(sys.argv[1], 0)"
    refused = subprocess.run([sys.executable, "-c", code, board.slot(0)], capture_output=True, text=True)
    assert "A rank has one process that trains" in refused.stderr
    taken = [subprocess.run([sys.executable, "-c", code, board.slot(1)]).returncode for _ in range(2)]
    assert taken == [0, 0]  # the first process has ended, so that its successor may take the slot


@pytest.mark.parametrize("is_inside", [True, False])
def test_every_event_has_a_phase(is_inside):
    events = pytest.importorskip("composer_events.event")
    assert {phase_of(event.value, is_inside=is_inside) for event in events.Event} <= set(PHASES)


@pytest.mark.parametrize("text", ["abc", "5min", "-3", "nan"])
def test_a_malformed_hang_timeout_is_warned_about_and_ends_nothing(board, monkeypatch, text):
    monkeypatch.setenv(flight_recorder.HANG_TIMEOUT, text)
    with pytest.warns(UserWarning, match=f"COMPOSER_HANG_TIMEOUT='{text}' must be a number of seconds"):
        flight_recorder.start(Recorder(board.slot(0), rank=0), None)

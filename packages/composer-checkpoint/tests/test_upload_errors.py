"""Uploads that fail on one rank: an error on all of them, at the next step, and no talk between ranks otherwise."""

import os
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as tdist

from composer_checkpoint import CheckpointSaver
from composer_checkpoint.checkpoint_uploads import CheckpointUploads
from composer_checkpoint.remote.logger import RemoteUploaderDownloader
from composer_checkpoint.remote.upload import RemoteUploader
from composer_dist import dist
from composer_dist.progress import Board, Recorder
from composer_dist.testing import run_ranks
from composer_events import Engine, Event, Logger, LoggerDestination, State


def begin(saver, destinations=()):
    layer = torch.nn.Linear(2, 1)
    state = State(
        layer,
        rank_zero_seed=1,
        run_name="plum",
        device="cpu",
        max_duration="9ba",
        dataloader=list(range(9)),
        callbacks=[*destinations, saver],
    )
    engine = Engine(state, Logger(state, list(destinations)))
    engine.run_event(Event.INIT)
    engine.run_event(Event.FIT_START)
    return engine


def step(engine):
    state = engine.state
    state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(samples=1)
    for event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT):
        engine.run_event(event)


def batch_and_error(engine, has_ended=lambda: True):
    """Train until an error; what the second batch has begun, or one after it, has ended before the next one."""
    try:
        for batch in range(1, 7):
            step(engine)
            if batch >= 2:
                wait_until(has_ended)
            tdist.barrier()
    except FileExistsError as error:
        return int(engine.state.timestamp.batch), str(error)
    return None


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def saver_to(folder, **settings):
    return CheckpointSaver(folder, "ba{batch}.pt", "run/ba{batch}.pt", save_interval="2ba", **settings)


def fail_in_the_store(async_save):
    saver = saver_to("memory://box/run", async_save=async_save)
    engine = begin(saver)
    if dist.get_global_rank() != 0:
        return batch_and_error(engine)
    # The memory of this rank, which no other sees.
    saver.remote_uploader.remote_backend.upload_object("run/ba2.pt", __file__)

    def has_ended():
        is_written = os.path.exists(os.path.join(saver.folder, "ba2.pt"))
        return is_written and all(upload.done() for upload in saver.remote_uploader.futures)

    return batch_and_error(engine, has_ended)


@pytest.mark.parametrize("async_save", [False, True])
def test_what_fails_in_the_store_is_raised_by_all_ranks_at_one_step(tmp_path, async_save):
    first, second = run_ranks(fail_in_the_store, async_save, store=tmp_path / "store")
    assert first == second
    batch, text = first
    # What is written in the background is sent after one of the next batches; the one after that says how it went.
    assert batch in ((3, 4, 5, 6) if async_save else (2, 3))
    assert "ba2.pt already exists, but overwrite was set to False" in text


class Refuses(LoggerDestination):
    """Takes no files, though it says that it does."""

    def can_upload_files(self):
        return True

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        raise FileExistsError(f"{remote_file_name} exists")


def fail_in_a_logger(folder):
    return batch_and_error(begin(saver_to(folder), [Refuses()]))


def test_what_a_logger_refuses_is_raised_by_all_ranks(tmp_path):
    found = run_ranks(fail_in_a_logger, str(tmp_path / "saved"), store=tmp_path / "store")
    assert found == [(2, "run/ba2.pt exists")] * 2


def count_talks():
    engine = begin(saver_to("memory://box/run"))
    counts, reduce = [0], tdist.all_reduce

    def count(*arguments, **settings):
        counts[0] += 1
        return reduce(*arguments, **settings)

    tdist.all_reduce = count
    step(engine)
    before_a_save = counts[0]
    step(engine)
    engine.run_event(Event.FIT_END)  # which waits for the upload
    counts[0] = 0
    engine.run_event(Event.BATCH_END)
    return before_a_save, counts[0]


def test_ranks_do_not_talk_while_nothing_is_uploaded(tmp_path):
    assert run_ranks(count_talks, store=tmp_path / "store") == [(0, 0), (0, 0)]


WAITS = {
    "checkpoint_uploads": lambda uploader: CheckpointUploads(uploader, overwrite=True, timeout_s=50).wait(),
    "remote.logger": lambda uploader: RemoteUploaderDownloader.fit_end(SimpleNamespace(_uploader=uploader), None, None),
    "remote.upload": RemoteUploader.wait,
}


@pytest.mark.parametrize("module", WAITS)
def test_a_launcher_sees_progress_during_a_wait_for_uploads(monkeypatch, module):
    board, upload = Board(1), Future()
    monkeypatch.setattr("composer_dist.progress._recorder", Recorder(board.slot(0), rank=0))
    monkeypatch.setattr(f"composer_checkpoint.{module}._POLL_S", 0.01)

    def end_after_progress():
        wait_until(lambda: board.read(0).counter >= 4)
        uploader.futures.clear()
        upload.set_result(None)

    uploader = SimpleNamespace(futures=[upload], remote_folder="s3://b", check_workers=lambda: None)
    thread = threading.Thread(target=end_after_progress)
    thread.start()
    WAITS[module](uploader)
    thread.join()
    assert board.read(0).phase == "start"
    board.close()

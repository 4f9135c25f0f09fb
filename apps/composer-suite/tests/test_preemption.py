"""A signal during fit: the batch is finished, a checkpoint saved, and the process left with the signal's status."""

import logging
import os
import signal
import threading

import pytest
import torch

from composer.core import Callback

DEFAULTS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGUSR1: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


class Send(Callback):
    """Send this process signals in the middle of a batch."""

    def __init__(self, *signums, at=1):
        self.signums, self.at = signums, at

    def after_loss(self, state, logger):
        if int(state.timestamp.batch) == self.at:
            for signum in self.signums:
                os.kill(os.getpid(), signum)


@pytest.fixture(autouse=True)
def _handlers_are_those_of_before():
    yield
    assert {signum: signal.getsignal(signum) for signum in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_training_after_the_batch_with_a_checkpoint(make_trainer, tmp_path, signum, status):
    trainer = make_trainer(max_duration="9ba", callbacks=Send(signum), save_folder=str(tmp_path), save_interval="99ba")
    with pytest.raises(SystemExit) as leave:
        trainer.fit()
    assert leave.value.code == status
    assert int(trainer.state.timestamp.batch) == 2
    assert [path.rpartition("/")[2] for path in trainer.saved_checkpoints] == ["ep0-ba2-rank0.pt"]


def test_training_goes_on_from_there_to_the_same_weights(make_trainer, make_loader, tmp_path):
    settings = {"max_duration": "7ba", "save_folder": str(tmp_path), "save_interval": "99ba", "run_name": "plum"}

    def loader():
        return make_loader(20, 4, shuffle=True)

    whole = make_trainer(max_duration="7ba", train_dataloader=loader())
    whole.fit()
    first = make_trainer(**settings, train_dataloader=loader(), callbacks=Send(signal.SIGTERM, at=2))
    with pytest.raises(SystemExit):
        first.fit()
    first.close()
    second = make_trainer(**settings, train_dataloader=loader(), autoresume=True)
    assert int(second.state.timestamp.batch) == 3
    second.fit()
    for got, expected in zip(second.state.model.parameters(), whole.state.model.parameters(), strict=True):
        assert torch.equal(got, expected)


def test_what_the_interval_has_saved_is_not_saved_twice(make_trainer, tmp_path):
    trainer = make_trainer(
        max_duration="9ba", callbacks=Send(signal.SIGTERM), save_folder=str(tmp_path), save_interval="1ba"
    )
    with pytest.raises(SystemExit):
        trainer.fit()
    assert [path.rpartition("/")[2] for path in trainer.saved_checkpoints] == ["ep0-ba1-rank0.pt", "ep0-ba2-rank0.pt"]


def test_a_save_in_the_background_is_waited_for(make_trainer, tmp_path):
    trainer = make_trainer(
        max_duration="9ba",
        callbacks=Send(signal.SIGTERM),
        save_folder=str(tmp_path),
        save_interval="1ba",
        save_async=True,
        save_async_policy="skip",
    )
    with pytest.raises(SystemExit):
        trainer.fit()
    assert (tmp_path / "ep0-ba2-rank0.pt").is_file()


def test_without_a_folder_training_ends_with_a_warning(make_trainer, caplog):
    trainer = make_trainer(max_duration="9ba", callbacks=Send(signal.SIGTERM))
    with caplog.at_level(logging.WARNING, "composer"), pytest.raises(SystemExit) as leave:
        trainer.fit()
    assert leave.value.code == 143
    assert "Training stops after batch 2" in caplog.text
    assert "SIGTERM. Nothing is saved: give save_folder" in caplog.text


def test_a_second_interrupt_leaves_at_once(make_trainer):
    trainer = make_trainer(max_duration="9ba", callbacks=Send(signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert int(trainer.state.timestamp.batch) == 1  # the second batch was not finished


def test_a_second_sigterm_is_no_more_than_the_first(make_trainer):
    trainer = make_trainer(max_duration="9ba", callbacks=Send(signal.SIGUSR1, signal.SIGTERM))
    with pytest.raises(SystemExit) as leave:
        trainer.fit()
    assert leave.value.code == 143
    assert int(trainer.state.timestamp.batch) == 2


def test_a_signal_in_the_last_batch_lets_training_come_to_its_end(make_trainer, recorder):
    trainer = make_trainer(max_duration="2ba", callbacks=Send(signal.SIGTERM), loggers=recorder)
    with pytest.raises(SystemExit) as leave:
        trainer.fit()
    assert leave.value.code == 143
    assert recorder.events()[-1] == "FIT_END"


def test_a_handler_of_the_users_own_is_called_too(make_trainer):
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    try:
        trainer = make_trainer(max_duration="9ba", callbacks=Send(signal.SIGTERM))
        with pytest.raises(SystemExit):
            trainer.fit()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert seen == [signal.SIGTERM, signal.SIGTERM]  # by way of the Trainer, and after it


def test_a_signal_that_is_ignored_stays_so(make_trainer):
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        make_trainer(max_duration="2ba", callbacks=Send(signal.SIGINT)).fit()
    finally:
        signal.signal(signal.SIGINT, previous)


def test_handlers_come_back_after_an_error(make_trainer):
    class Broken(Callback):
        def batch_end(self, state, logger):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(max_duration="2ba", callbacks=Broken()).fit()


def test_another_thread_can_train(make_trainer):
    trainer = make_trainer(max_duration="2ba")
    thread = threading.Thread(target=trainer.fit)
    thread.start()
    thread.join()
    assert int(trainer.state.timestamp.batch) == 2


def test_a_trainer_that_was_stopped_can_go_on(make_trainer):
    trainer = make_trainer(max_duration="4ba", callbacks=Send(signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer.fit()
    trainer.fit()
    assert int(trainer.state.timestamp.batch) == 4

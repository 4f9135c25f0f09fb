"""A signal while a Trainer does something else than `fit`: everything closes, then the process ends."""

import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from composer.core import Callback, Event

DEFAULT = signal.SIG_DFL
BOTH = [signal.SIGTERM, signal.SIGUSR1]
SCRIPT = """
    import gc, os, signal, sys, threading, time
    import torch
    from composer import Callback, Trainer
    from composer.models import ComposerModel
    from torch.utils.data import DataLoader, TensorDataset

    class Closing(Callback):
        def close(self, state, logger):
            print("closing", flush=True)
            if "while a thread closes it" in sys.argv:
                time.sleep(1)
            elif sys.argv[1].startswith("while"):
                os.kill(os.getpid(), signal.SIGTERM)
            print("closed", flush=True)

    network = torch.nn.Linear(4, 2)
    model = ComposerModel.from_module(network, torch.nn.functional.cross_entropy)
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), batch_size=4)
    trainer = Trainer(model=model, train_dataloader=loader, max_duration="1ep", device="cpu", progress_bar=False,
                      optimizers=torch.optim.SGD(network.parameters(), lr=0.1), callbacks=[Closing()])
    trainer.fit()
    if "while it goes" in sys.argv:
        del trainer
        gc.collect()
        time.sleep(5)
        print("went on", flush=True)
    if "while a thread closes it" in sys.argv:
        threading.Thread(target=trainer.close).start()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        print("went on", flush=True)
    if "after fit" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
        print("went on", flush=True)
    if "in a forked process" in sys.argv:
        if not (pid := os.fork()):
            os.kill(os.getpid(), signal.SIGTERM)
            print("went on", flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == signal.SIGTERM, "it did not end as it would have without a Trainer"
"""


def send(signum=signal.SIGTERM):
    os.kill(os.getpid(), signum)


class AtEvaluation(Callback):
    """Send this process a signal in the middle of an evaluation."""

    def __init__(self, signum=signal.SIGTERM):
        self.signum = signum
        self.is_closed = False

    def eval_batch_start(self, state, logger):
        send(self.signum)

    def close(self, state, logger):
        self.is_closed = True


class AtBatch(Callback):
    """Send this process a signal in the middle of a batch."""

    def __init__(self, signum):
        self.signum = signum

    def after_loss(self, state, logger):
        send(self.signum)


@pytest.fixture(autouse=True)
def _handlers_are_those_of_before():
    assert [signal.getsignal(signum) for signum in BOTH] == [DEFAULT, DEFAULT]
    yield
    assert [signal.getsignal(signum) for signum in BOTH] == [DEFAULT, DEFAULT]


@pytest.mark.parametrize("signum", BOTH, ids=str)
def test_a_signal_during_an_evaluation_lets_the_trainer_close(make_trainer, make_loader, signum):
    callback = AtEvaluation(signum)
    with pytest.raises(SystemExit) as leave, make_trainer(callbacks=callback, eval_dataloader=make_loader(8, 4)) as it:
        it.eval()
    assert leave.value.code == 143
    assert callback.is_closed


@pytest.mark.parametrize(
    ("when", "status"),
    [
        ("after fit", 143),
        ("while it closes", 0),  # what the script was for is done
        ("while it goes", 143),
        ("while a thread closes it", 143),
        ("in a forked process", 0),
    ],
)
def test_a_script_closes_its_loggers_though_it_never_says_so(tmp_path, when, status):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    result = subprocess.run([sys.executable, str(path), when], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["closing", "closed"], result.stderr
    assert result.returncode == status


def test_what_closes_is_not_broken_off(make_trainer):
    told = []

    class Slow(Callback):
        def close(self, state, logger):
            send()
            told.append("closed")

    trainer = make_trainer(max_duration="1ba", callbacks=[Slow(), Slow()])
    with pytest.raises(SystemExit) as leave:
        trainer.close()
    assert leave.value.code == 143
    assert told == ["closed", "closed"]


def test_an_interrupt_is_still_one(make_trainer):
    make_trainer()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_handler_of_the_users_own_decides(make_trainer):
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    try:
        make_trainer()
        send()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert seen == [signal.SIGTERM]


def test_one_that_comes_later_stays_when_the_trainer_closes(make_trainer):
    def handler(signum, frame):
        raise AssertionError

    trainer = make_trainer()
    signal.signal(signal.SIGTERM, handler)
    try:
        trainer.close()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, DEFAULT)


def test_a_second_trainer_is_still_closed_when_the_first_one_is(make_trainer):
    first, second = make_trainer(), make_trainer()
    first.close()
    with pytest.raises(SystemExit):
        send()
    second.close()
    assert signal.getsignal(signal.SIGTERM) == DEFAULT


def test_a_trainer_that_cannot_be_made_leaves_no_handler(make_trainer):
    class Broken(Callback):
        def init(self, state, logger):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(callbacks=Broken())
    assert signal.getsignal(signal.SIGTERM) == DEFAULT


def test_a_signal_is_left_to_faulthandler_which_python_does_not_know(make_trainer, tmp_path):
    with open(tmp_path / "stacks", "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            make_trainer(max_duration="1ba", callbacks=AtBatch(signal.SIGUSR1)).fit()
            send(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert (tmp_path / "stacks").read_text().count("most recent call first") >= 2


def test_another_thread_can_make_a_trainer(make_trainer):
    made = []
    thread = threading.Thread(target=lambda: made.append(make_trainer(max_duration="1ba")))
    thread.start()
    thread.join()
    made[0].engine.run_event(Event.BEFORE_LOAD)
    assert signal.getsignal(signal.SIGTERM) == DEFAULT

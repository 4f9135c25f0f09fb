"""The console on a real terminal: a pty of 80 or 120 columns."""

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
import threading

import pytest

from composer.core import Callback


class Terminal:
    """A pty whose output is kept."""

    def __init__(self, columns):
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (24, columns))
        self._chunks = []
        self._has_grown = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        while True:
            try:
                chunk = os.read(self.master, 4096)
            except OSError:  # the last writer has closed
                chunk = b""
            with self._has_grown:
                self._chunks.append(chunk)
                self._has_grown.notify_all()
            if not chunk:
                return

    @property
    def text(self):
        return b"".join(self._chunks).decode()

    def wait_for(self, pattern, timeout_s=120):
        with self._has_grown:
            assert self._has_grown.wait_for(lambda: re.search(pattern, self.text), timeout_s), self.text

    def screen(self):
        """Wait for the end of the output, and return the lines as they are left on the screen."""
        self._thread.join(120)
        lines = []
        for line in self.text.replace("\r\n", "\n").split("\n"):
            shown = ""
            for part in line.split("\r"):
                shown = part + shown[len(part) :]
            lines.append(shown.rstrip())
        return lines


@pytest.mark.parametrize("columns", [80, 120])
def test_each_line_fits_and_has_loss_and_metrics(columns, make_trainer, make_loader):
    terminal = Terminal(columns)
    with (
        os.fdopen(terminal.slave, "w") as stream,
        make_trainer(
            progress_bar=True, console_stream=stream, max_duration="2ep", eval_dataloader=make_loader(6, 2)
        ) as trainer,
    ):
        trainer.fit()
    lines = terminal.screen()
    assert all(len(line) <= columns for line in re.split(r"[\r\n]+", terminal.text))
    bars = [line for line in lines if line.startswith("train epoch")]
    assert len(bars) == 2  # one line an epoch
    for number, bar in enumerate(bars, 1):
        assert re.match(rf"train epoch {number}/2, loss=[\d.]+, Accuracy=[\d.]+ \|█+\| 2/2 \[.*(ba/s|s/ba)\]$", bar)
        assert len(bar) == columns - 3  # elastic
    assert re.match(r"eval at epoch 2: CrossEntropy [\d.]+.*, MulticlassAccuracy", lines[lines.index(bars[1]) + 1])


def test_a_bar_names_the_loss_of_the_batch_just_done(make_trainer, monkeypatch):
    class NumbersLosses(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"loss/train/total": float(state.timestamp.batch)})

    monkeypatch.setattr("composer.loggers._text_output._REDRAWN_S", 0)
    terminal = Terminal(80)
    with (
        os.fdopen(terminal.slave, "w") as stream,
        make_trainer(
            progress_bar=True, console_stream=stream, max_duration="4ba", callbacks=NumbersLosses()
        ) as trainer,
    ):
        trainer.fit()
    terminal.screen()
    drawn = re.findall(r"loss=(\d), .*?\| (\d)/4", terminal.text)
    assert drawn[:4] == [(number, number) for number in "1234"]


SCRIPT = """
import sys, time, torch
from composer import Callback, Trainer
from composer.models import ComposerModel

class Sleeps(Callback):
    def batch_end(self, state, logger):
        time.sleep(0.05)

model = ComposerModel.from_module(torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy)
data = [(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))] * 100
with Trainer(
    model=model, train_dataloader=data, device_train_microbatch_size=4, max_duration="100ep", device="cpu",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=Sleeps(), save_folder=sys.argv[1],
) as trainer:
    trainer.fit()
"""


def test_an_interrupt_names_the_checkpoint_on_a_line_of_its_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    terminal = Terminal(120)
    process = subprocess.Popen(
        [sys.executable, script, str(tmp_path / "saved")],
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that the terminal sends signals
    )
    try:
        os.close(terminal.slave)
        terminal.wait_for(r"loss=[\d.]+ \|.*\| [1-9]\d*/100")
        os.write(terminal.master, b"\x03")  # Ctrl-C
        assert process.wait(60) == 130
    finally:
        process.kill()
    lines = terminal.screen()
    (path,) = (tmp_path / "saved").glob("ep0-ba*-rank0.pt")
    batch = re.search(r"ba(\d+)", path.name)[1]
    at = lines.index(f"Training stops after batch {batch} because of SIGINT. A checkpoint is saved: {path}")
    assert lines[at + 1].startswith("train epoch 1/100")


def test_a_traceback_begins_a_line_below_the_bar(make_trainer, make_loader):
    class Fails(Callback):
        def batch_end(self, state, logger):
            raise RuntimeError("wrong")

    terminal = Terminal(80)
    with os.fdopen(terminal.slave, "w") as stream:
        trainer = make_trainer(progress_bar=True, console_stream=stream, max_duration="2ep", callbacks=Fails())
        with pytest.raises(RuntimeError, match="wrong"):
            trainer.fit()
        stream.write("Traceback")
        stream.flush()
        trainer.close()
    *_, bar, last = terminal.screen()
    assert bar.startswith("train epoch 1/2")
    assert last == "Traceback"

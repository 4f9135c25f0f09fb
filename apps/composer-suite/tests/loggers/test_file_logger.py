# ruff: noqa: T201 (what is printed is what is tested)
"""One file for each rank has everything that was logged and printed, and loses nothing."""

import gc
import multiprocessing
import re
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest
import torch

from composer.core import Callback
from composer.loggers import FileLogger, LoggerDestination, RemoteUploaderDownloader


class Keeper(LoggerDestination):
    """Keeps what is uploaded, by name, each time."""

    def __init__(self):
        self.files = []

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        self.files.append((remote_file_name, file_path.read_text(), overwrite))


def lines_of(path):
    return path.read_text().splitlines()


def test_each_kind_of_entry_has_its_line(begun, tmp_path):
    logger = begun(FileLogger(capture_stdout=False, capture_stderr=False)).logger
    logger.log_hyperparameters({"lr": 0.25, "name": "plum"})
    logger.log_metrics({"loss": torch.tensor(0.5), "text": "so"}, step=3)
    logger.log_table(["a", "b"], [[1, "ü"]], name="mine")
    logger.log_traces({"algorithm_traces/EMA": 1})
    assert (tmp_path / "plum/logs-rank0.txt").read_text() == (
        "[hyperparameter]: lr: 0.2500 \n"
        '[hyperparameter]: name: "plum" \n'
        "[metric][batch=3]: loss: 0.5000 \n"
        '[metric][batch=3]: text: "so" \n'
        '[table]: mine: {"columns":["a","b"],"data":[[1,"ü"]]}\n'
        "[trace]: algorithm_traces/EMA:1\n"
    )


def test_a_tensor_without_values_is_written_as_its_shape(begun, tmp_path):
    logger = begun(FileLogger(capture_stdout=False, capture_stderr=False)).logger
    logger.log_metrics({"loss": torch.zeros((), device="meta"), "norms": [torch.zeros(3, device="meta")]}, step=3)
    assert lines_of(tmp_path / "plum/logs-rank0.txt") == [
        '[metric][batch=3]: loss: "Tensor of shape torch.Size([])" ',
        '[metric][batch=3]: norms: ["Tensor of shape torch.Size([3])"] ',
    ]


def test_traces_are_left_out_where_they_are_not_wanted(begun):
    file = FileLogger(log_traces=False, capture_stdout=False, capture_stderr=False)
    begun(file).logger.log_traces({"mine": 1})
    assert Path(file.filename).read_text() == ""


def test_a_training_is_in_the_file(make_trainer, tmp_path):
    trainer = make_trainer(max_duration="2ba", loggers=FileLogger(), run_name="plum")
    trainer.fit()
    trainer.close()
    lines = lines_of(tmp_path / "plum/logs-rank0.txt")
    assert sum(bool(re.match(r"\[metric\]\[batch=[01]\]: loss/train/total: \d\.\d{4} $", line)) for line in lines) == 2
    assert "[hyperparameter]: rank_zero_seed: 3 " in lines


def test_what_is_printed_from_the_construction_to_the_end_is_copied(begun, tmp_path, capsys):
    file = FileLogger()
    print("before the run has a name")
    engine = begun(file)
    print("first\n\nthird")
    print("half", end="")
    print(" a line", file=sys.stdout)
    print("an error", file=sys.stderr)
    engine.close()
    print("afterwards")
    assert lines_of(tmp_path / "plum/logs-rank0.txt") == [
        "[stdout]: before the run has a name",
        "[stdout]: first",
        "",
        "[stdout]: third",
        "[stdout]: half a line",
        "[stderr]: an error",
    ]
    assert capsys.readouterr().out.startswith("before the run has a name\nfirst\n\nthird\nhalf a line\nafterwards")


def test_an_entry_does_not_go_on_with_a_line_that_was_printed(begun, tmp_path):
    logger = begun(FileLogger()).logger
    print("half", end="")
    logger.log_metrics({"loss": 1}, step=0)
    assert lines_of(tmp_path / "plum/logs-rank0.txt") == ["[stdout]: half", "[metric][batch=0]: loss: 1 "]


def test_the_console_is_as_before_afterwards(begun):
    out, err, own = sys.stdout.write, sys.stderr.write, "write" in vars(sys.stdout)
    begun(FileLogger()).close()
    assert (sys.stdout.write, sys.stderr.write) == (out, err)
    assert ("write" in vars(sys.stdout)) == own


def test_writing_still_says_how_much_was_written(begun):
    begun(FileLogger())
    assert sys.stdout.write("four") == 4


def test_an_exception_that_nobody_catches_is_the_last_that_is_in_the_file(begun, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch has put its own there once there were ranks
    engine = begun(FileLogger())
    try:
        raise RuntimeError("My Exception!")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    engine.close()
    assert lines_of(tmp_path / "plum/logs-rank0.txt")[-1] == "[stderr]: RuntimeError: My Exception!"


def test_an_exception_that_ends_a_with_block_is_in_the_file(make_trainer, tmp_path):
    class Fail(Callback):
        def batch_end(self, state, logger):
            raise RuntimeError("My Exception!")

    with (
        pytest.raises(RuntimeError, match="My Exception!"),
        make_trainer(max_duration="2ba", loggers=FileLogger(), callbacks=Fail(), run_name="plum") as trainer,
    ):
        trainer.fit()
    lines = lines_of(tmp_path / "plum/logs-rank0.txt")
    assert "[stderr]: RuntimeError: My Exception!" in lines
    assert any(line.startswith("[metric][batch=0]: loss/train/total") for line in lines)


def test_names_are_known_once_the_run_has_one(begun):
    file = FileLogger("logs/{run_name}-{rank}-of-{world_size}.txt", "/far/{run_name}.txt")
    with pytest.raises(RuntimeError, match=r"has no name before Event\.INIT"):
        _ = file.filename
    begun(file)
    assert file.filename == "logs/plum-0-of-1.txt"
    assert file.remote_file_name == "far/plum.txt"


def test_a_file_that_is_there_is_not_lost_by_accident(begun, tmp_path):
    begun(FileLogger()).close()
    with pytest.raises(FileExistsError, match=r"filename=.* is 'plum/logs-rank0.txt' in this run.*overwrite=True"):
        begun(FileLogger())
    (tmp_path / "plum/logs-rank0.txt").write_text("old\n")
    begun(FileLogger(overwrite=True)).logger.log_metrics({"new": 1}, step=0)
    assert lines_of(tmp_path / "plum/logs-rank0.txt") == ["[metric][batch=0]: new: 1 "]


def test_a_run_that_is_resumed_goes_on_with_its_file(make_trainer, tmp_path):
    settings = {"run_name": "plum", "save_folder": str(tmp_path / "ckpt"), "autoresume": True}
    for duration in ("2ba", "4ba"):
        trainer = make_trainer(max_duration=duration, loggers=FileLogger(), **settings)
        trainer.fit()
        trainer.close()
    text = (tmp_path / "plum/logs-rank0.txt").read_text()
    assert re.findall(r"\[batch=(\d)\]: loss/train/total", text) == ["0", "1", "2", "3"]


def test_the_file_is_uploaded_at_the_interval_and_at_the_end(make_trainer):
    keeper = Keeper()
    trainer = make_trainer(max_duration="4ba", loggers=[FileLogger(flush_interval=3), keeper], run_name="plum")
    trainer.fit()
    num_during_fit = len(keeper.files)
    trainer.close()
    # Two epochs begin, the third batch ends, and fit does; then close.
    assert (num_during_fit, len(keeper.files)) == (4, 5)
    assert {(name, overwrite) for name, _, overwrite in keeper.files} == {("plum/logs-rank0.txt", True)}
    assert "[batch=2]: loss/train/total" in keeper.files[2][1]
    assert "[batch=3]: loss/train/total" not in keeper.files[2][1]


class LogsAtTheEnd(Callback):
    def close(self, state, logger):
        logger.log_metrics({"own/last": 5})


def test_what_others_log_while_they_close_is_in_the_file_and_uploaded(make_trainer, tmp_path):
    keeper = Keeper()
    trainer = make_trainer(
        max_duration="1ba", loggers=[FileLogger(), keeper], callbacks=LogsAtTheEnd(), run_name="plum"
    )
    trainer.fit()
    trainer.close()
    assert lines_of(tmp_path / "plum/logs-rank0.txt")[-1] == "[metric][batch=1]: own/last: 5 "
    assert keeper.files[-1][1] == (tmp_path / "plum/logs-rank0.txt").read_text()


def test_a_store_that_is_down_does_not_keep_the_file_from_the_next_one(make_trainer, tmp_path):
    class Down(LoggerDestination):
        is_closing = False

        def upload_file(self, state, remote_file_name, file_path, *, overwrite):
            if self.is_closing:
                raise ConnectionError("for good")

    down, keeper = Down(), Keeper()
    trainer = make_trainer(max_duration="1ba", loggers=[FileLogger(), down, keeper], run_name="plum")
    trainer.fit()
    down.is_closing = True
    trainer.close()
    assert keeper.files[-1][1] == (tmp_path / "plum/logs-rank0.txt").read_text()


def test_an_upload_that_fails_at_the_end_costs_no_line_and_is_tried_once_more(make_trainer, tmp_path, caplog):
    class FailsOnce(Keeper):
        is_closing = False

        def upload_file(self, state, remote_file_name, file_path, *, overwrite):
            if self.is_closing:
                self.is_closing = False
                raise ConnectionError("for a moment")
            super().upload_file(state, remote_file_name, file_path, overwrite=overwrite)

    keeper = FailsOnce()
    trainer = make_trainer(max_duration="1ba", loggers=[FileLogger(), keeper], run_name="plum")
    trainer.fit()
    keeper.files.clear()
    keeper.is_closing = True
    trainer.close()
    assert keeper.files == [("plum/logs-rank0.txt", (tmp_path / "plum/logs-rank0.txt").read_text(), True)]
    assert "for a moment" in caplog.text


def test_a_store_that_is_closed_already_stays_so_and_misses_the_last_lines(make_trainer, tmp_path, caplog):
    uploader = RemoteUploaderDownloader(f"file://{tmp_path}/far")
    trainer = make_trainer(
        max_duration="1ba", loggers=[uploader, FileLogger()], callbacks=LogsAtTheEnd(), run_name="plum"
    )
    trainer.fit()
    trainer.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("upload")]
    here, far = (next(folder.rglob("logs-rank0.txt")).read_text() for folder in (tmp_path / "plum", tmp_path / "far"))
    assert here == far + "[metric][batch=1]: own/last: 5 \n"
    assert "alone, since RemoteUploaderDownloader has closed before. List it after the FileLogger." in caplog.text


def test_pieces_are_gathered_up_to_the_size_of_the_buffer(begun, tmp_path):
    engine = begun(FileLogger(buffer_size=100, capture_stdout=False, capture_stderr=False))
    engine.logger.log_metrics({"loss": 1}, step=0)
    path = tmp_path / "plum/logs-rank0.txt"
    assert path.read_text() == ""
    engine.logger.log_metrics({"loss": 1, "a_long_name" * 10: 2}, step=1)
    assert len(lines_of(path)) == 3


class Printing(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        print(f"sample {index}")
        return torch.zeros(2), 0


def test_what_workers_of_a_dataloader_print_is_in_the_file_once(make_trainer, tmp_path):
    loader = torch.utils.data.DataLoader(Printing(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    trainer = make_trainer(
        train_dataloader=loader, max_duration="1ep", loggers=FileLogger(buffer_size=4096), run_name="plum"
    )
    with trainer:
        print("before the workers begin")
        trainer.fit()
    lines = lines_of(tmp_path / "plum/logs-rank0.txt")
    assert sorted(line for line in lines if "sample" in line and "stdout" in line) == [
        f"[stdout]: sample {index}" for index in range(8)
    ]
    assert lines.count("[stdout]: before the workers begin") == 1


def test_lines_of_several_processes_stay_whole_and_an_unfinished_one_is_kept(begun, tmp_path):
    fork = multiprocessing.get_context("fork")
    has_begun, may_end = fork.Event(), fork.Event()

    def slow():
        print("slow: one", end="")
        has_begun.set()
        may_end.wait(60)
        print(", two\nslow: without an end", end="")

    def quick():
        has_begun.wait(60)
        print("quick: one\nquick: two")
        may_end.set()

    begun(FileLogger(capture_stderr=False))
    children = [fork.Process(target=run) for run in (slow, quick)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert lines_of(tmp_path / "plum/logs-rank0.txt") == [
        "[stdout]: quick: one",
        "[stdout]: quick: two",
        "[stdout]: slow: one, two",
        "[stdout]: slow: without an end",
    ]


FULL_DISK = """
import resource, signal, sys, warnings
from composer.core import Engine, Event, State
from composer.loggers import FileLogger, Logger

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = FileLogger("log.txt", capture_stdout=False, capture_stderr=False)
state = State(None, rank_zero_seed=0, run_name="plum", device="cpu", callbacks=[file])
engine = Engine(state, Logger(state, file))
engine.run_event(Event.INIT)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    for step in range(100):
        engine.logger.log_metrics({"loss": step}, step=step)
    if sys.argv[1] == "heals":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine.close()
print(*(warning.message for warning in caught), sep="\\n")
"""


@pytest.mark.parametrize("disk", ["heals", "stays full"])
def test_a_full_disk_costs_a_warning_and_no_line(tmp_path, disk):
    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, disk], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    said = done.stdout.splitlines()
    assert "cannot be written to now; training continues" in said[0]
    expected = "".join(f"[metric][batch={step}]: loss: {step} \n" for step in range(100))
    written = (tmp_path / "log.txt").read_text()
    if disk == "heals":
        assert (written, len(said)) == (expected, 1)
    else:
        assert written == expected[:500]
        assert said[1:] == [
            f"The last {len(expected) - 500} bytes of the log are not in 'log.txt': it could not be written to."
        ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_ends_no_training_where_warnings_are_errors(begun, caplog):
    engine = begun(FileLogger("/dev/full", capture_stdout=False, capture_stderr=False, overwrite=True))
    engine.logger.log_metrics({"loss": 1.0}, step=0)
    engine.logger.log_metrics({"loss": 2.0}, step=1)
    engine.close()
    lost = "[metric][batch=0]: loss: 1.0000 \n[metric][batch=1]: loss: 2.0000 \n"
    first, last = (message for message in caplog.messages if "/dev/full" in message)
    assert "cannot be written to now; training continues" in first
    assert last.startswith(f"The last {len(lost)} bytes of the log are not in '/dev/full'")


def test_a_process_that_is_killed_has_written_everything(tmp_path):
    script = textwrap.dedent(
        """
        import os, signal
        from composer.core import Engine, Event, State
        from composer.loggers import FileLogger, Logger

        file = FileLogger("log.txt")
        state = State(None, rank_zero_seed=0, run_name="plum", device="cpu", callbacks=[file])
        engine = Engine(state, Logger(state, file))
        engine.run_event(Event.INIT)
        for step in range(50):
            engine.logger.log_metrics({"loss": step}, step=step)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False)
    assert len(lines_of(tmp_path / "log.txt")) == 50


def test_an_interval_of_none_is_refused():
    with pytest.raises(ValueError, match="flush_interval=0 must be 1 or more"):
        FileLogger(flush_interval=0)


def test_a_logger_that_nobody_takes_keeps_nothing_of_what_is_printed():
    gone = weakref.ref(FileLogger())
    print("this")
    gc.collect()
    assert gone() is None
    print("that goes to the console still")

"""Traces of trainings that fail, the copies that loggers keep, and the names of processes."""

import json
from pathlib import Path

import pytest
import torch

from composer import Trainer
from composer.core import Callback
from composer.loggers import LoggerDestination
from composer.models import ComposerModel
from composer.profiler import EventRecorder, JSONTraceHandler, Profiler, ProfilerAction, cyclic_schedule
from composer.profiler.json_trace_merger import merge_traces
from composer_dist.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The profiler is enabled:UserWarning")


def make_trainer(trace_handlers, *, torch_folder=None, **more):
    """Return a trainer of two epochs of four batches, of which the first three of each are recorded."""
    data = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long)) for _ in range(4)]
    model = ComposerModel.from_module(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
    profiler = Profiler(
        cyclic_schedule(warmup=1, active=2, repeat=1),
        trace_handlers,
        sys_prof_cpu=False,
        torch_prof_profile_memory=False,
        torch_prof_with_flops=torch_folder is not None,
        torch_prof_folder=str(torch_folder),
    )
    settings = {
        "train_dataloader": data,
        "device_train_microbatch_size": 4,
        "max_duration": "2ep",
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "device": "cpu",
        "progress_bar": False,
        "run_name": "run",
    }
    return Trainer(model, profiler=profiler, **settings | more)


def phases(trace, name):
    return [event["ph"] for event in trace if event["name"] == name]


class Fails(Callback):
    def __init__(self, batch, event="before_loss"):
        self.batch, self.event = batch, event

    def run_event(self, event, state, logger):
        if event.value == self.event and int(state.timestamp.batch) == self.batch:
            raise OSError("the disk is full")


class Keeps(LoggerDestination):
    """Keeps files as a store without overwriting does."""

    def __init__(self):
        self.files = {}

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        assert overwrite or remote_file_name not in self.files
        self.files[remote_file_name] = Path(file_path).read_text()


def unclosed(trace):
    """Return the names of spans that have no end, and check that each end is that of the innermost open span."""
    open_spans = {}
    for event in trace:
        spans = open_spans.setdefault((event["pid"], event["tid"]), [])
        if event["ph"] == "B":
            spans.append(event)
        elif event["ph"] == "E":
            begin = spans.pop()
            assert (begin["name"], begin["ts"] <= event["ts"]) == (event["name"], True)
    return [begin["name"] for spans in open_spans.values() for begin in spans]


def fail_while_training(folder, *, batch=6, event="before_loss", **settings):
    handler, recorder = JSONTraceHandler(folder=str(folder)), EventRecorder()
    with (
        pytest.raises(OSError, match="the disk is full"),
        make_trainer([handler, recorder], callbacks=Fails(batch, event), **settings) as trainer,
    ):
        trainer.fit()
    return handler, recorder


def test_a_run_that_fails_leaves_traces_in_which_every_span_ends(tmp_path):
    handler, _ = fail_while_training(tmp_path)
    for path in (handler.saved_traces[-1], tmp_path / "merged_trace.json"):
        trace = json.loads(Path(path).read_text())
        assert unclosed(trace) == []
    assert phases(trace, "event/fit") == ["B", "E"]
    assert phases(trace, "event/train_batch") == ["B", "E"] * 3  # those of the cycle that was cut off are no cycle


def test_spans_end_when_training_fails_and_not_when_it_is_closed():
    recorder = EventRecorder()
    trainer = make_trainer(recorder, callbacks=Fails(6))
    with pytest.raises(OSError, match="the disk is full"):
        trainer.fit()
    ends = {span.name: span.begin_ns + span.duration_ns for span in recorder.spans}
    assert ends["event/fit"] == ends["event/epoch"] == ends["event/batch"] == ends["event/train_batch"]
    trainer.close()


def test_training_that_goes_on_after_a_failure_has_spans_of_its_own(tmp_path):
    fails = Fails(6)
    with make_trainer(JSONTraceHandler(folder=str(tmp_path)), callbacks=fails) as trainer:
        with pytest.raises(OSError, match="the disk is full"):
            trainer.fit()
        fails.batch = -1
        trainer.fit()
    trace = json.loads((tmp_path / "merged_trace.json").read_text())
    assert unclosed(trace) == []
    assert phases(trace, "event/fit") == ["B", "E"] * 2


def test_a_marker_around_a_training_that_fails_and_is_repeated_goes_on(tmp_path):
    fails, recorder = Fails(6), EventRecorder()
    trainer = make_trainer(recorder, callbacks=fails)
    with trainer, trainer.state.profiler.marker("attempts", actions=tuple(ProfilerAction)):
        with pytest.raises(OSError, match="the disk is full"):
            trainer.fit()
        fails.batch = -1
        trainer.fit()
    (attempts,) = [span for span in recorder.spans if span.name == "attempts"]
    fits = [span for span in recorder.spans if span.name == "event/fit"]
    assert len(fits) == 2
    assert attempts.begin_ns + attempts.duration_ns >= fits[1].begin_ns + fits[1].duration_ns


@pytest.mark.parametrize("max_duration", ["1ep", "2ep"])
def test_the_copies_of_a_logger_have_what_the_files_have(tmp_path, max_duration):
    keeps = Keeps()
    handler = JSONTraceHandler(folder=str(tmp_path))
    with make_trainer(handler, loggers=keeps, max_duration=max_duration) as trainer:
        trainer.fit()
    copies = {name.removeprefix("run/traces/"): text for name, text in keeps.files.items()}
    assert copies == {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert [unclosed(json.loads(text)) for text in copies.values()] == [[]] * len(copies)


@pytest.mark.parametrize("num_traces_to_keep", [0, 1])
def test_the_copies_of_a_logger_are_all_there_where_no_file_is_kept(tmp_path, num_traces_to_keep):
    keeps = Keeps()
    handler = JSONTraceHandler(folder=str(tmp_path), num_traces_to_keep=num_traces_to_keep)
    with make_trainer(handler, loggers=keeps) as trainer:
        trainer.fit()
    assert {name.removeprefix("run/traces/") for name in keeps.files} == {
        "ep0-ba3-rank0.json",
        "ep1-ba7-rank0.json",
        "merged_trace.json",
    }
    assert len(handler.saved_traces) == num_traces_to_keep


def test_the_copies_of_a_logger_are_whole_also_when_training_fails(tmp_path):
    keeps = Keeps()
    handler, _ = fail_while_training(tmp_path, loggers=keeps)
    for path in (handler.saved_traces[-1], tmp_path / "merged_trace.json"):
        copy = keeps.files[f"run/traces/{Path(path).name}"]
        assert (copy, unclosed(json.loads(copy))) == (Path(path).read_text(), [])


def test_spans_of_all_ranks_end_in_the_merged_trace_when_training_fails(tmp_path):
    run_ranks(fail_on_both_ranks, str(tmp_path), store=tmp_path / "store")
    trace = json.loads((tmp_path / "traces" / "merged_trace.json").read_text())
    assert {event["pid"] for event in trace if event["name"] == "event/fit" and event["ph"] == "E"} == {0, 1}
    assert unclosed(trace) == []


def fail_on_both_ranks(folder):
    fail_while_training(f"{folder}/traces")


def test_a_run_that_fails_in_its_first_cycle_leaves_what_was_recorded(tmp_path):
    keeps = Keeps()
    handler, _ = fail_while_training(tmp_path / "traces", batch=1, loggers=keeps, torch_folder=tmp_path / "torch")
    assert handler.saved_traces == [str(tmp_path / "traces" / "ep0-ba1-rank0.json")]
    for name in ("ep0-ba1-rank0.json", "merged_trace.json"):
        text = (tmp_path / "traces" / name).read_text()
        assert keeps.files[f"run/traces/{name}"] == text
        trace = json.loads(text)
        assert unclosed(trace) == []
        assert phases(trace, "event/train_batch") == ["B", "E"] * 2  # what warmed up, and what was cut off
        assert "aten::linear" in {event["name"] for event in trace}
    of_torch = json.loads((tmp_path / "torch" / "rank0.1.pt.trace.json").read_text())
    assert of_torch["global_rank"] == 0


@pytest.mark.parametrize("event", ["before_loss", "before_dataloader", "epoch_start"])
def test_a_run_that_fails_before_anything_was_recorded_leaves_no_file(tmp_path, event):
    fail_while_training(tmp_path / "traces", batch=0, event=event, torch_folder=tmp_path / "torch")
    assert [*(tmp_path / "traces").iterdir(), *(tmp_path / "torch").iterdir()] == []


def test_a_first_cycle_that_training_has_no_time_for_leaves_none(tmp_path):
    handler = JSONTraceHandler(folder=str(tmp_path / "traces"))
    with make_trainer(handler, max_duration="2ba", torch_folder=tmp_path / "torch") as trainer:
        trainer.fit()
    assert [*(tmp_path / "traces").iterdir(), *(tmp_path / "torch").iterdir()] == []


def test_each_of_several_ranks_leaves_its_own_of_a_first_cycle_without_waiting_for_another(tmp_path):
    run_ranks(fail_in_the_first_cycle, str(tmp_path), store=tmp_path / "store")
    paths = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in paths] == ["ep0-ba1-rank0.json", "ep0-ba1-rank1.json"]
    assert [unclosed(json.loads(path.read_text())) for path in paths] == [[], []]


def fail_in_the_first_cycle(folder):
    fail_while_training(f"{folder}/traces", batch=1)


def processes(trace):
    """Return the names and places that each process is given."""
    found = {}
    for event in trace:
        if event["ph"] == "M" and event["name"].startswith("process_"):
            found.setdefault(event["pid"], set()).update(map(str, event["args"].values()))
    return found


def test_each_rank_has_one_name_also_with_torchs_operators_in_its_trace(tmp_path):
    handler = JSONTraceHandler(folder=f"{tmp_path}/traces")
    with make_trainer(handler, torch_folder=tmp_path / "torch") as trainer:
        trainer.fit()
    for path in (tmp_path / "traces").iterdir():
        trace = json.loads(path.read_text())
        assert "aten::linear" in {event["name"] for event in trace}
        assert processes(trace) == {0: {"Rank 0 training loop process", "0"}}
        of_spans = next(event["tid"] for event in trace if event["name"] == "event/train_batch")
        names = {str(e["args"]) for e in trace if e["name"] == "thread_name" and e["tid"] == of_spans}
        assert names == {"{'name': 'Training Loop'}"}


def test_each_rank_has_one_name_where_torchs_own_files_are_merged_by_hand(tmp_path):
    def torchs_file(rank):
        # a GPU is a process to torch, by its number on its machine, which the rank on another machine has, too
        described = [
            {"name": "process_name", "ph": "M", "ts": 1, "pid": pid, "tid": 0, "args": {"name": "python"}}
            for pid in (500 + rank, 0)
        ]
        kernel = {"name": f"kernel of {rank}", "ph": "X", "ts": 5, "dur": 1, "pid": 0, "tid": 7}
        path = tmp_path / f"torch{rank}.json"
        path.write_text(json.dumps({"global_rank": rank, "traceEvents": [*described, kernel]}))
        return str(path)

    merge_traces(str(tmp_path / "all.json"), torchs_file(0), torchs_file(9))
    trace = json.loads((tmp_path / "all.json").read_text())
    assert processes(trace) == {
        0: {"Rank 0 training loop process", "0"},
        9: {"Rank 9 training loop process", "9"},
    }
    pids = {event["name"]: event["pid"] for event in trace if event["ph"] == "X"}
    assert pids == {"kernel of 0": 0, "kernel of 9": 9}

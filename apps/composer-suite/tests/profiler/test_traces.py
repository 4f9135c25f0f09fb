"""Traces of whole trainings, written, merged over ranks and cycles, and read back."""

import gzip
import json
from decimal import Decimal
from pathlib import Path
from threading import Semaphore

import pytest
import torch

from composer import Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import CheckpointSaver
from composer.core import Callback
from composer.models import ComposerModel
from composer.profiler import JSONTraceHandler, Profiler, SystemProfiler, TorchProfiler, cyclic_schedule
from composer.profiler.json_trace_merger import extend_trace, merge_traces, parse_trace
from composer_dist.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The profiler is enabled:UserWarning")


class Watches(Callback):
    def batch_end(self, state, logger):
        pass


def make_trainer(profiler, **more):
    data = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long)) for _ in range(4)]
    model = ComposerModel.from_module(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
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


def spans_only(handler, **settings):
    off = {"sys_prof_cpu": False, "torch_prof_profile_memory": False, "torch_prof_with_flops": False}
    return Profiler(cyclic_schedule(warmup=1, active=2, repeat=1), handler, **off | settings)


def phases(trace, name):
    return [event["ph"] for event in trace if event["name"] == name]


def test_a_run_leaves_a_trace_with_a_span_for_each_event_algorithm_and_callback(tmp_path):
    handler = JSONTraceHandler(folder=f"{tmp_path}/{{run_name}}")
    with make_trainer(spans_only(handler), algorithms=GradientClipping("norm", 1.0), callbacks=Watches()) as trainer:
        trainer.fit()
    trace = json.loads((tmp_path / "run" / "merged_trace.json").read_text())
    for name in ("event/epoch", "event/batch", "event/forward", "event/dataloader"):
        assert "B" in phases(trace, name)
        assert "E" in phases(trace, name)
    assert phases(trace, "event/train_batch") == ["B", "E"] * 6  # two epochs of a warm-up and two batches
    assert phases(trace, "algorithm/GradientClipping/event/after_train_batch") == ["B", "E"] * 6
    assert "B" in phases(trace, "callback/Watches/event/batch_end")
    batch = next(event for event in trace if event["name"] == "event/train_batch" and event["args"]["epoch"] == 1)
    assert batch["args"] == {"epoch": 1, "batch": 4}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "ep0-ba3-rank0.json",
        "ep1-ba7-rank0.json",
        "merged_trace.json",
    ]


def test_older_traces_are_deleted_and_the_merged_one_keeps_them_all(tmp_path):
    handler = JSONTraceHandler(folder=str(tmp_path), num_traces_to_keep=1)
    with make_trainer(spans_only(handler)) as trainer:
        trainer.fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ep1-ba7-rank0.json", "merged_trace.json"]
    trace = json.loads((tmp_path / "merged_trace.json").read_text())
    begins = [event["ts"] for event in trace if event["name"] == "event/train_batch" and event["ph"] == "B"]
    assert len(begins) == 6
    assert begins == sorted(begins)


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "of_another_run.json").write_text("[]")
    with pytest.raises(FileExistsError, match="is not empty"):
        make_trainer(spans_only(JSONTraceHandler(folder=str(tmp_path))))
    make_trainer(spans_only(JSONTraceHandler(folder=str(tmp_path), overwrite=True))).close()
    assert (tmp_path / "of_another_run.json").read_text() == "[]"


def test_the_profiler_stands_behind_the_callbacks_and_before_the_saver(tmp_path):
    handler = JSONTraceHandler(folder=f"{tmp_path}/traces")
    watches = Watches()
    profiler = spans_only(handler)
    with make_trainer(profiler, callbacks=watches, save_folder=f"{tmp_path}/checkpoints") as trainer:
        assert trainer.state.callbacks[:-1] == [watches, profiler, handler]
        assert isinstance(trainer.state.callbacks[-1], CheckpointSaver)
        assert trainer.state.profiler is profiler


def test_torchs_operators_are_in_the_trace_of_their_rank(tmp_path):
    handler = JSONTraceHandler(folder=f"{tmp_path}/traces")
    profiler = spans_only(
        handler,
        torch_prof_with_flops=True,
        torch_prof_folder=f"{tmp_path}/torch",
        torch_prof_num_traces_to_keep=1,
        torch_prof_use_gzip=True,
    )
    with make_trainer(profiler) as trainer:
        trainer.fit()
    assert [path.name for path in (tmp_path / "torch").iterdir()] == ["rank0.7.pt.trace.json.gz"]
    trace = json.loads((tmp_path / "traces" / "merged_trace.json").read_text())
    operators = [event for event in trace if event["name"] == "aten::linear"]
    assert len(operators) == 4  # two epochs of two batches; those of the warm-up are thrown away
    assert {event["pid"] for event in operators} == {0}


def test_recording_pauses_while_a_trace_is_written(tmp_path):
    """With stacks, the second trace had 5 GB: all the calls with which the first one was written."""
    profiler = Profiler(
        cyclic_schedule(wait=0, warmup=0, active=1, repeat=0),
        JSONTraceHandler(folder=f"{tmp_path}/json"),
        torch_prof_folder=f"{tmp_path}/torch",
        torch_prof_with_stack=True,
        sys_prof_cpu=False,
    )
    with make_trainer(profiler, max_duration="2ba") as trainer:
        trainer.fit()
    events = json.loads((tmp_path / "torch" / "rank0.2.pt.trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert any("torch_profiler.py" in name and "batch_end" in name for name in names)  # stacks are recorded
    writing = {"_save", "_merge", "merge_traces", "extend_trace"}
    assert not [name for name in names if "json_trace_" in name and name.rpartition(": ")[2] in writing]


def test_an_epoch_that_is_shorter_than_a_cycle_has_a_trace_of_its_own(tmp_path):
    profiler = Profiler(
        cyclic_schedule(warmup=0, active=6),
        JSONTraceHandler(folder=f"{tmp_path}/traces"),
        sys_prof_cpu=False,
        torch_prof_profile_memory=False,
        torch_prof_folder=f"{tmp_path}/torch",
    )
    with make_trainer(profiler) as trainer:
        trainer.fit()
    for name in ("rank0.4.pt.trace.json", "rank0.8.pt.trace.json"):
        events = json.loads((tmp_path / "torch" / name).read_text())["traceEvents"]
        assert sum(event["name"] == "aten::linear" for event in events) == 4


def test_the_ranks_traces_come_together_on_one_clock(tmp_path):
    run_ranks(train_on_a_rank, str(tmp_path / "traces"), store=tmp_path / "store")
    trace = json.loads((tmp_path / "traces" / "merged_trace.json").read_text())
    assert {event["pid"] for event in trace if event["name"] == "event/train_batch"} == {0, 1}
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names == {"Rank 0 training loop process", "Rank 1 training loop process"}


def train_on_a_rank(folder):
    with make_trainer(spans_only(JSONTraceHandler(folder=folder)), max_duration="1ep") as trainer:
        trainer.fit()


def trace_of(rank, clock_us, begin_us):
    fact = {"ph": "M", "pid": 77, "tid": 5}
    return [
        {"name": "global_rank", "args": {"value": rank}, **fact},
        {"name": "clock_sync_timestamp_us", "args": {"value": clock_us}, **fact},
        {"name": "work", "ph": "B", "ts": begin_us, "pid": 77, "tid": 5},
        {"name": "MulBackward0", "ph": "B", "ts": begin_us, "pid": 77, "tid": 6},
        {"name": "nobody's", "ph": "i", "ts": begin_us},
        {"name": "torch's own", "ph": "i", "ts": begin_us, "pid": 77, "tid": "PyTorch Profiler (0)"},
    ]


def test_clocks_are_set_to_that_of_the_lowest_rank(tmp_path):
    (tmp_path / "0.json").write_text(json.dumps(trace_of(0, 1_000, 1_500)))
    with gzip.open(tmp_path / "1.json.gz", "wt") as file:
        json.dump({"traceEvents": trace_of(1, 4_000, 4_600)}, file)
    merge_traces(str(tmp_path / "all.json"), str(tmp_path / "1.json.gz"), str(tmp_path / "0.json"))
    trace = json.loads((tmp_path / "all.json").read_text())
    assert [(event["pid"], event["ts"]) for event in trace if event["name"] == "work"] == [(1, 1_600), (0, 1_500)]
    order = {
        (event["pid"], event["tid"]): event["args"]["sort_index"]
        for event in trace
        if event["name"] == "thread_sort_index"
    }
    assert order == {(0, 5): 99_999, (0, 6): 1, (1, 5): 99_999, (1, 6): 1}
    assert {"nobody's", "torch's own"}.isdisjoint(event["name"] for event in trace)
    merge_traces(str(tmp_path / "again.json"), str(tmp_path / "all.json"), str(tmp_path / "0.json"), object_form=True)
    again = json.loads((tmp_path / "again.json").read_text())["traceEvents"]
    assert [event["ts"] for event in again if event["name"] == "work"] == [1_600, 1_500, 1_500]


@pytest.mark.parametrize("text", ['[{"name": "a"}', '[{"name": "a"},\n', '{"traceEvents": [{"name": "a"}]}'])
def test_traces_that_were_cut_off_are_read(text):
    assert parse_trace(text, "trace.json") == [{"name": "a"}]


@pytest.mark.parametrize("text", ["", "3", '{"events": []}', "[1]", "<html>"])
def test_what_is_no_trace_is_refused_by_name(text):
    with pytest.raises(TypeError, match=r"'trace\.json' is not a trace"):
        parse_trace(text, "trace.json")


def test_a_profiler_does_not_go_with_microbatches_found_out():
    with pytest.raises(ValueError, match="not compatible with the profiler"):
        make_trainer(spans_only([]), device_train_microbatch_size="auto")


@pytest.mark.parametrize("profiler", [Profiler, "profiler"])
def test_what_is_no_profiler_is_refused(profiler):
    with pytest.raises(TypeError, match=r"is not a composer\.profiler\.Profiler"):
        make_trainer(profiler)


@pytest.mark.parametrize("callback", [TorchProfiler, SystemProfiler])
def test_what_belongs_to_a_profiler_says_so_where_there_is_none(callback):
    with pytest.raises(RuntimeError, match="Profiler"):
        make_trainer(None, callbacks=callback())


def test_the_machines_load_is_in_the_trace_in_units_that_its_names_say(tmp_path):
    psutil = pytest.importorskip("psutil")
    readings = Semaphore(0)

    class Handler(JSONTraceHandler):
        def process_counter_event(self, name, *event):
            super().process_counter_event(name, *event)
            if name == "cpu":
                readings.release()

    profiler = spans_only(
        Handler(folder=str(tmp_path)),
        sys_prof_cpu=True,
        sys_prof_memory=True,
        sys_prof_disk=True,
        sys_prof_net=True,
        sys_prof_stats_thread_interval_seconds=0.001,
    )

    class WaitsForCounters(Callback):
        def batch_start(self, state, logger):
            if int(state.timestamp.batch_in_epoch) == 2:
                for _ in range(3):  # where a third reading has begun, a second one is whole
                    assert readings.acquire(timeout=120)

    with make_trainer(profiler, callbacks=WaitsForCounters(), max_duration="1ep") as trainer:
        trainer.fit()
    trace = json.loads((tmp_path / "merged_trace.json").read_text())
    counters = {event["name"]: event["args"] for event in trace if event["ph"] == "C"}
    assert 0 <= counters["cpu"]["cpu_percent"] <= 100
    assert 0 < counters["memory/virtual"]["used_gib"] <= psutil.virtual_memory().total / 2**30
    assert all(args["kb_sent"] >= 0 for name, args in counters.items() if name.endswith("kb_sent"))
    for disk in psutil.disk_io_counters(perdisk=True):
        assert counters[f"disk/{disk}/read_bytes"].keys() == {"read_kib"}


def test_what_a_machine_hides_costs_one_warning_and_no_other_reading(tmp_path, caplog, monkeypatch):
    psutil = pytest.importorskip("psutil")
    refusals, readings = Semaphore(0), Semaphore(0)

    def refuse(*, perdisk):
        refusals.release()
        raise PermissionError("/proc/diskstats")

    class Handler(JSONTraceHandler):
        def process_counter_event(self, name, *event):
            super().process_counter_event(name, *event)
            readings.release()

    class WaitsForCounters(Callback):
        def batch_start(self, state, logger):
            if int(state.timestamp.batch) == 2:
                for _ in range(4):
                    assert readings.acquire(timeout=120)

    monkeypatch.setattr(psutil, "disk_io_counters", refuse)
    settings = {"sys_prof_cpu": True, "sys_prof_disk": True, "sys_prof_stats_thread_interval_seconds": 0.001}
    profiler = spans_only(Handler(folder=str(tmp_path)), **settings)
    with make_trainer(profiler, callbacks=WaitsForCounters(), max_duration="1ep") as trainer:
        trainer.fit()
    assert refusals.acquire(blocking=False)
    assert not refusals.acquire(blocking=False)
    said = [record.getMessage() for record in caplog.records if "SystemProfiler" in record.getMessage()]
    assert said == ["The SystemProfiler leaves out what cannot be read: PermissionError: /proc/diskstats"]


def test_counters_of_ones_own_leave_a_trace_that_viewers_can_read(tmp_path):
    class Counts(Callback):
        def batch_start(self, state, logger):
            values = {"tensor": torch.tensor(0.5), "whole": 2, "odd": float("nan"), "text": "no number"}
            state.profiler.marker("mine").counter(values)
            state.profiler.marker("nothing").counter({"odd": float("inf")})

    with make_trainer(
        spans_only(JSONTraceHandler(folder=str(tmp_path))), callbacks=Counts(), max_duration="1ep"
    ) as trainer:
        trainer.fit()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    trace = json.loads((tmp_path / "merged_trace.json").read_text(), parse_constant=refuse)
    counters = [(event["name"], event["args"]) for event in trace if event["ph"] == "C"]
    assert counters == [("mine", {"tensor": 0.5, "whole": 2})] * 3


def test_training_that_ends_before_a_cycle_does_says_why_there_is_no_trace(tmp_path, caplog):
    with make_trainer(spans_only(JSONTraceHandler(folder=str(tmp_path))), max_duration="2ba") as trainer:
        trainer.fit()
    assert list(tmp_path.iterdir()) == []
    assert "training has ended before a cycle of the schedule did" in caplog.text


@pytest.mark.parametrize("interval_s", [0, -1.0])
def test_a_machine_that_would_be_read_without_pause_is_refused(interval_s):
    with pytest.raises(ValueError, match=r"stats_thread_interval_seconds=.* more than 0"):
        SystemProfiler(stats_thread_interval_seconds=interval_s)


def test_a_name_without_the_time_keeps_its_latest_file(tmp_path):
    handler = JSONTraceHandler(folder=str(tmp_path), filename="rank{rank}.json", num_traces_to_keep=1)
    off = {"sys_prof_cpu": False, "torch_prof_profile_memory": False, "torch_prof_with_flops": False}
    schedule = cyclic_schedule(wait=0, warmup=0, active=1)
    with make_trainer(Profiler(schedule, handler, **off)) as trainer:
        trainer.fit()
    assert handler.saved_traces == [str(tmp_path / "rank0.json")]
    assert (tmp_path / "rank0.json").exists()


def test_files_of_ranks_are_not_called_as_the_merged_one():
    with pytest.raises(ValueError, match=r"filename='merged_trace\.json' is merged_trace_filename, too"):
        JSONTraceHandler(filename="merged_trace.json")


def test_cycles_of_one_rank_stay_apart_when_their_files_are_merged(tmp_path):
    def write(rank, clock_us, ts):
        path = tmp_path / f"{rank}-{clock_us}.json"
        facts = {"global_rank": rank, "clock_sync_timestamp_us": clock_us}
        events = [{"name": n, "ph": "M", "pid": rank, "tid": 1, "args": {"value": v}} for n, v in facts.items()]
        path.write_text(json.dumps([*events, {"name": "step", "ph": "B", "pid": rank, "tid": 1, "ts": ts}]))
        return str(path)

    files = [write(0, 1000, 1010), write(0, 5000, 5020), write(1, 1100, 1115), write(1, 5100, 5130)]
    merge_traces(str(tmp_path / "merged.json"), *files)
    merged = json.loads((tmp_path / "merged.json").read_text())
    assert [(e["pid"], e["ts"]) for e in merged if e["name"] == "step"] == [(0, 1010), (0, 5020), (1, 1015), (1, 5030)]


def test_each_cycles_file_says_whose_it_is_also_without_a_pause_between(tmp_path):
    handler = JSONTraceHandler(folder=str(tmp_path))
    off = {"sys_prof_cpu": False, "torch_prof_profile_memory": False, "torch_prof_with_flops": False}
    profiler = Profiler(cyclic_schedule(warmup=0, active=2, repeat=0), handler, **off)
    with make_trainer(profiler, max_duration="1ep") as trainer:
        trainer.fit()
    assert len(handler.saved_traces) == 2
    for path in handler.saved_traces:
        with open(path) as file:
            assert phases(json.load(file), "process_name") == ["M"]


@pytest.mark.parametrize("answer", [None, "recording"])
def test_a_schedule_that_names_no_action_is_refused_at_the_first_batch(answer, tmp_path):
    handler = JSONTraceHandler(folder=str(tmp_path))
    profiler = Profiler(lambda state: answer, handler, sys_prof_cpu=False, torch_prof_profile_memory=False)
    with pytest.raises((TypeError, ValueError), match=r"ProfilerAction.*'active_and_save'"):
        make_trainer(profiler).fit()


def test_a_schedule_may_name_its_actions(tmp_path):
    handler = JSONTraceHandler(folder=str(tmp_path))
    off = {"sys_prof_cpu": False, "torch_prof_profile_memory": False, "torch_prof_with_flops": False}
    profiler = Profiler(lambda state: "active_and_save", handler, **off)
    with make_trainer(profiler, max_duration="2ba") as trainer:
        trainer.fit()
    assert len(handler.saved_traces) == 2


def test_further_cycles_come_behind_a_merged_trace_as_if_merged_at_once(tmp_path):
    def write(name, rank, clock_us, start_us):
        events = [
            {"name": "global_rank", "ph": "M", "pid": rank, "tid": 1, "args": {"value": rank}},
            {"name": "clock_sync_timestamp_us", "ph": "M", "pid": rank, "tid": 1, "args": {"value": clock_us}},
            {"name": name, "ph": "B", "ts": start_us, "pid": rank, "tid": 1},
        ]
        (tmp_path / name).write_text(json.dumps(events))
        return str(tmp_path / name)

    first = [write("first0", 0, 100, 110), write("first1", 1, 130, 145)]
    second = [write("second0", 0, 200, 210), write("second1", 1, 260, 275)]
    merged, at_once = str(tmp_path / "merged.json"), str(tmp_path / "at_once.json")
    merge_traces(merged, *first)
    before = Path(merged).read_text()
    extend_trace(merged, *second)
    assert Path(merged).read_text().startswith(before.removesuffix("\n]\n"))
    merge_traces(at_once, *first, *second)

    def spans(path):
        return {event["name"]: event["ts"] for event in json.loads(Path(path).read_text()) if event["ph"] == "B"}

    assert spans(merged) == spans(at_once) == {"first0": 110, "first1": 115, "second0": 210, "second1": 215}


def test_what_was_not_merged_is_not_extended(tmp_path):
    path = tmp_path / "own.json"
    path.write_text("[]")
    with pytest.raises(TypeError, match="does not end as a merged trace"):
        extend_trace(str(path), str(path))
    assert path.read_text() == "[]"


def spans_of(trace, name):
    """Return begin and end of each span of a rank, and the batch in which it began."""
    spans, begins = [], {}
    for event in trace:
        if event["name"] == name and event["ph"] == "B":
            begins[event["pid"]] = event
        elif event["name"] == name and event["ph"] == "E":
            begin = begins.pop(event["pid"])
            spans.append((begin["pid"], begin["args"]["batch"], begin["ts"], event["ts"]))
    return spans


def steps_of_operators(trace, pids=lambda pid: pid):
    """Return for each linear layer's operator the rank, and the batches in whose forward pass its middle lies."""
    forwards = spans_of(trace, "event/forward")
    found = []
    for operator in (event for event in trace if event["name"] == "aten::linear"):
        rank, middle = pids(operator["pid"]), operator["ts"] + operator["dur"] / 2
        found.append((rank, [batch for pid, batch, begin, end in forwards if pid == rank and begin <= middle <= end]))
    return found


def spans_and_operators(folder):
    torch_folder = f"{folder}/torch"
    return spans_only(
        JSONTraceHandler(folder=f"{folder}/traces"),
        torch_prof_with_flops=True,
        torch_prof_folder=torch_folder,
        torch_prof_overwrite=True,
    )


def test_torchs_operators_lie_in_the_forward_pass_of_their_step(tmp_path):
    with make_trainer(spans_and_operators(tmp_path)) as trainer:
        trainer.fit()
    trace = json.loads((tmp_path / "traces" / "merged_trace.json").read_text())
    assert steps_of_operators(trace) == [(0, [1]), (0, [2]), (0, [5]), (0, [6])]


def test_torchs_own_files_are_merged_by_hand_beneath_the_spans(tmp_path):
    with make_trainer(spans_and_operators(tmp_path)) as trainer:
        trainer.fit()
    spans = tmp_path / "spans.json"
    events = json.loads((tmp_path / "traces" / "merged_trace.json").read_text())
    spans.write_text(json.dumps([event for event in events if event["ph"] in "BEM"]))
    files = [str(tmp_path / "torch" / name) for name in ("rank0.3.pt.trace.json", "rank0.7.pt.trace.json")]
    merge_traces(str(tmp_path / "all.json"), str(spans), *files)
    trace = json.loads((tmp_path / "all.json").read_text())
    assert steps_of_operators(trace, pids=lambda pid: 0) == [(0, [1]), (0, [2]), (0, [5]), (0, [6])]


def test_torchs_operators_of_several_ranks_lie_in_the_forward_pass_of_their_own(tmp_path):
    run_ranks(train_with_operators_on_a_rank, str(tmp_path), store=tmp_path / "store")
    trace = json.loads((tmp_path / "traces" / "merged_trace.json").read_text())
    assert sorted(steps_of_operators(trace)) == [(0, [1]), (0, [2]), (1, [1]), (1, [2])]
    for name in ("event/fit", "event/iteration", "event/epoch"):
        assert sorted(pid for pid, *_ in spans_of(trace, name)) == [0, 1]


def train_with_operators_on_a_rank(folder):
    with make_trainer(spans_and_operators(folder), max_duration="1ep") as trainer:
        trainer.fit()


def test_torchs_own_file_goes_by_the_clock_of_its_ranks_cycle(tmp_path):
    def write(name, content):
        (tmp_path / name).write_text(json.dumps(content))
        return str(tmp_path / name)

    operator = {"name": "operator", "ph": "X", "ts": 50.5, "dur": 10.0, "pid": 77, "tid": 77}
    unstamped = {"name": "thread_name", "ph": "M", "pid": 77, "tid": 77, "args": {"name": "thread 77 (python)"}}
    of_torch = {"global_rank": 1, "baseTimeNanoseconds": 6_000_000, "traceEvents": [unstamped, operator]}
    cycles = [(0, 1_000), (1, 1_300), (0, 5_000), (1, 5_900)]
    files = [write(f"{rank}-{clock}.json", trace_of(rank, clock, clock + 100)) for rank, clock in cycles]
    merge_traces(str(tmp_path / "all.json"), write("torch.json", of_torch), *files)
    trace = json.loads((tmp_path / "all.json").read_text())
    # 6000 + 50.5 by the clock of rank 1, which was 900 before that of rank 0 in the second cycle
    assert [(e["ts"], e["dur"]) for e in trace if e["name"] == "operator"] == [(5_150.5, 10.0)]
    assert unstamped | {"pid": 1} in trace


def test_operators_that_touch_still_do_where_floats_are_coarse():
    base_ns = 1_790_857_026_000_000_000  # of a real file, as are times of so many digits
    outer = {"name": "outer", "ts": 4706948223843.368, "dur": 76.284}
    inner = {"name": "inner", "ts": 4706948223843.491, "dur": 76.161}  # ends with the outer one
    after = {"name": "after", "ts": 4706948223919.652, "dur": 0.1}  # begins there
    text = json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": [outer, inner, after]})
    outer, inner, after = parse_trace(text, "torch.json")
    assert outer["ts"] == pytest.approx(1_795_563_974_223_843.368, abs=0.25, rel=0)
    assert outer["ts"] <= inner["ts"]
    assert outer["ts"] + outer["dur"] == inner["ts"] + inner["dur"] == after["ts"]
    # readers that count in decimals, as Perfetto does, see the very same times
    assert all(Decimal(str(event["ts"])) == Decimal(event["ts"]) for event in (outer, inner, after))


def test_all_spans_of_saved_cycles_end_and_no_others_are_added(tmp_path):
    handler = JSONTraceHandler(folder=str(tmp_path))
    with make_trainer(spans_only(handler), max_duration="2ep") as trainer:
        trainer.fit()
    trace = json.loads((tmp_path / "merged_trace.json").read_text())
    begins = sorted(event["name"] for event in trace if event["ph"] == "B")
    ends = sorted(event["name"] for event in trace if event["ph"] == "E")
    assert begins == ends
    assert [batch for _, batch, *_ in spans_of(trace, "event/epoch")] == [0, 4]
    last = json.loads(Path(handler.saved_traces[-1]).read_text())
    assert {event["name"] for event in last if event["ph"] == "E"} >= {"event/epoch", "event/train_batch"}
    assert phases(trace, "event/train_batch") == ["B", "E"] * 6


def test_an_epoch_that_training_leaves_in_its_middle_ends_with_it(tmp_path):
    with make_trainer(spans_only(JSONTraceHandler(folder=str(tmp_path))), max_duration="3ba") as trainer:
        trainer.fit()
        trainer.fit(duration="5ba")
    trace = json.loads((tmp_path / "merged_trace.json").read_text())
    open_spans = []
    for event in trace:
        if event["ph"] == "B":
            open_spans.append(event["name"])
        elif event["ph"] == "E":
            assert open_spans.pop() == event["name"]
    assert open_spans == []


@pytest.mark.parametrize("num_traces_to_keep", [0, 1])
def test_ends_reach_the_merged_trace_where_no_other_file_is_kept(tmp_path, num_traces_to_keep):
    handler = JSONTraceHandler(folder=str(tmp_path), num_traces_to_keep=num_traces_to_keep)
    with make_trainer(spans_only(handler), max_duration="1ep") as trainer:
        trainer.fit()
    trace = json.loads((tmp_path / "merged_trace.json").read_text())
    assert phases(trace, "event/fit") == ["B", "E"]
    assert len(list(tmp_path.iterdir())) == num_traces_to_keep + 1


def test_spans_of_a_cycle_that_is_not_saved_stay_out_when_training_ends(tmp_path):
    actions = ["active_and_save", "active", "active", "active"]
    off = {"sys_prof_cpu": False, "torch_prof_profile_memory": False, "torch_prof_with_flops": False}
    profiler = Profiler(
        lambda state: actions[int(state.timestamp.batch) % 4], JSONTraceHandler(folder=str(tmp_path)), **off
    )
    with make_trainer(profiler, max_duration="3ba") as trainer:
        trainer.fit()
    trace = json.loads((tmp_path / "merged_trace.json").read_text())
    assert phases(trace, "event/train_batch") == phases(trace, "event/fit") == ["B", "E"]

"""Schedules say which batches are looked at; markers say what took how long."""

from types import SimpleNamespace

import pytest
import torch

from composer.core import State, Timestamp
from composer.profiler import EventRecorder, Profiler, ProfilerAction, TraceHandler, cyclic_schedule

SKIP, WARMUP, ACTIVE, SAVE = (
    ProfilerAction.SKIP,
    ProfilerAction.WARMUP,
    ProfilerAction.ACTIVE,
    ProfilerAction.ACTIVE_AND_SAVE,
)


class Keeps(TraceHandler):
    def __init__(self):
        self.durations, self.instants, self.counters = [], [], []

    def process_duration_event(self, name, categories, is_start, timestamp, wall_clock_time_ns):
        self.durations.append((name, is_start))

    def process_instant_event(self, name, categories, timestamp, wall_clock_time_ns):
        self.instants.append(name)

    def process_counter_event(self, name, categories, timestamp, wall_clock_time_ns, values):
        self.counters.append((name, dict(values)))


def at(batch, *, length=None, resumed_at=0):
    profiler = SimpleNamespace(resumption_batch_idx=resumed_at)
    return SimpleNamespace(timestamp=Timestamp(batch_in_epoch=batch), dataloader_len=length, profiler=profiler)


def bound(action=ACTIVE):
    handler = Keeps()
    profiler = Profiler(
        lambda state: action, handler, sys_prof_cpu=False, torch_prof_profile_memory=False, torch_prof_with_flops=False
    )
    profiler.bind_to_state(State(torch.nn.Linear(1, 1), rank_zero_seed=0, run_name="run", device="cpu"))
    return profiler, handler


@pytest.mark.parametrize(
    ("settings", "length", "actions"),
    [
        ({}, None, [WARMUP, ACTIVE, ACTIVE, ACTIVE, SAVE, SKIP, SKIP]),
        ({"skip_first": 1, "wait": 1, "active": 1}, None, [SKIP, SKIP, WARMUP, SAVE, SKIP]),
        ({"warmup": 0, "active": 2, "repeat": 2}, None, [ACTIVE, SAVE, ACTIVE, SAVE, SKIP]),
        ({"warmup": 1, "active": 1, "repeat": 0}, None, [WARMUP, SAVE, WARMUP, SAVE, WARMUP, SAVE]),
        ({"warmup": 0, "active": 9}, 3, [ACTIVE, ACTIVE, SAVE]),
    ],
)
def test_a_schedule_waits_warms_up_and_records_in_turn_and_saves_at_the_end_of_an_epoch(settings, length, actions):
    schedule = cyclic_schedule(**settings)
    assert [schedule(at(batch, length=length)) for batch in range(len(actions))] == actions


def test_after_a_checkpoint_the_schedule_begins_where_training_goes_on():
    schedule = cyclic_schedule(skip_first=1, warmup=0, active=1)
    assert [schedule(at(batch, resumed_at=5)) for batch in range(4, 8)] == [SKIP, SKIP, SAVE, SKIP]


@pytest.mark.parametrize(("name", "number"), [("active", 0), ("wait", -1), ("repeat", -2)])
def test_a_schedule_without_batches_is_refused(name, number):
    with pytest.raises(ValueError, match=f"{name}={number} must be {1 if name == 'active' else 0} or more"):
        cyclic_schedule(**{name: number})


def test_a_marker_records_blocks_calls_and_pairs_of_start_and_finish():
    profiler, handler = bound()
    marker = profiler.marker("work")

    @marker
    def add(first, second):
        return first + second

    @marker()
    def double(number):
        return 2 * number

    with marker:
        pass
    marker.start()
    marker.finish()
    assert (add(1, second=2), double(4)) == (3, 8)
    assert handler.durations == [("work", True), ("work", False)] * 4


def test_a_marker_is_made_once_for_a_name():
    profiler, _ = bound()
    assert profiler.marker("work") is profiler.marker("work")


def test_starting_twice_and_finishing_without_a_start_are_errors():
    marker = bound()[0].marker("work")
    with pytest.raises(RuntimeError, match="'work' is not started"):
        marker.finish()
    marker.start()
    with pytest.raises(RuntimeError, match="'work' is already started"):
        marker.start()


def test_what_is_skipped_is_not_recorded_unless_the_marker_asks_for_it():
    profiler, handler = bound(SKIP)
    with profiler.marker("usual"), profiler.marker("always", actions=list(ProfilerAction)):
        pass
    assert handler.durations == [("always", True), ("always", False)]


def test_an_end_is_recorded_just_if_its_begin_was():
    profiler, handler = bound(SKIP)
    marker = profiler.marker("work")
    marker.start()
    profiler.schedule = lambda state: ACTIVE
    marker.finish()
    marker.start()
    profiler.schedule = lambda state: SKIP
    marker.finish()
    assert handler.durations == [("work", True), ("work", False)]


def test_instants_and_counters_come_beside_the_durations():
    profiler, handler = bound()
    marker = profiler.marker("work", record_instant_on_start=True, record_instant_on_finish=True)
    with marker:
        marker.instant()
    marker.counter({"samples": 3})
    assert handler.instants == ["work"] * 3
    assert handler.counters == [("work", {"samples": 3})]


def test_a_profiler_without_a_trainer_has_no_markers():
    with pytest.raises(RuntimeError, match=r"Give it to a Trainer as profiler=\.\.\."):
        Profiler(cyclic_schedule(), [], sys_prof_cpu=False).marker("work")


def test_a_timeline_of_memory_needs_shapes_memory_and_stacks():
    with pytest.raises(ValueError, match="torch_prof_with_stack=True"):
        Profiler(cyclic_schedule(), [], torch_prof_memory_filename="memory.html", torch_prof_record_shapes=True)


def test_remote_names_are_noted_and_cut_to_the_path():
    from composer.profiler import JSONTraceHandler

    handler = JSONTraceHandler(
        remote_file_name="s3://bucket/traces/{rank}.json", merged_trace_remote_file_name="merged.json"
    )
    profiler = Profiler(
        cyclic_schedule(), handler, sys_prof_cpu=False, torch_prof_remote_file_name="s3://bucket/torch/{rank}.json"
    )
    assert profiler.remote_filenames == [
        "s3://bucket/traces/{rank}.json",
        "merged.json",
        "s3://bucket/torch/{rank}.json",
    ]
    assert (handler.remote_file_name, handler.merged_trace_remote_file_name) == ("traces/{rank}.json", "merged.json")


def test_the_recorder_keeps_the_latest_spans_and_the_sums_of_all():
    recorder = EventRecorder(num_spans=2)
    for begin_ns in (0, 10_000_000, 20_000_000):
        recorder.process_duration_event("event/batch", [], True, Timestamp(), begin_ns)
        recorder.process_duration_event("event/loss", [], True, Timestamp(), begin_ns + 1_000_000)
        recorder.process_duration_event("event/loss", [], False, Timestamp(), begin_ns + 2_000_000)
        recorder.process_duration_event("event/batch", [], False, Timestamp(batch=1), begin_ns + 4_000_000)
    assert [(span.name, span.begin_ns) for span in recorder.spans] == [
        ("event/loss", 21_000_000),
        ("event/batch", 20_000_000),
    ]
    assert {name: (time.count, time.total_ns) for name, time in recorder.times.items()} == {
        "event/loss": (3, 3_000_000),
        "event/batch": (3, 12_000_000),
    }
    assert recorder.table().splitlines()[2].split() == ["event/loss", "3", "0.003", *["1.000"] * 4, "25.0%"]


def record(recorder, name, begin_ms, end_ms, inside=()):
    recorder.process_duration_event(name, [], True, Timestamp(), 1_000_000 * begin_ms)
    for inner in inside:
        record(recorder, *inner)
    recorder.process_duration_event(name, [], False, Timestamp(), 1_000_000 * end_ms)


def test_shares_are_of_steps_with_the_wait_for_data_and_the_callbacks_of_a_batch():
    recorder = EventRecorder()
    loss = ("event/loss", 3, 5)
    step = [("event/dataloader", 0, 2), ("event/batch", 2, 8, [loss]), ("callback/Saves/event/batch_end", 8, 10)]
    evaluation = ("event/eval_all", 10, 30, [("callback/Watches/event/eval_end", 20, 25)])
    record(recorder, "event/epoch", 0, 30, [*step, evaluation])
    assert recorder.shares_of_steps() == {
        "event/dataloader": 0.2,
        "event/batch": 0.6,
        "event/loss": 0.2,
        "callback/Saves/event/batch_end": 0.2,
    }


@pytest.mark.parametrize(("share", "expected_ms"), [(0, 0), (0.5, 50), (0.95, 95), (1, 100), (0.125, 12.5)])
def test_quantiles_lie_between_the_spans_that_were_measured(share, expected_ms):
    recorder = EventRecorder()
    for duration_ms in reversed(range(101)):
        record(recorder, "work", 0, duration_ms)
    assert recorder.times["work"].quantile_ns(share) == pytest.approx(1_000_000 * expected_ms)


def test_quantiles_are_of_the_latest_spans_and_sums_of_all():
    recorder = EventRecorder()
    for duration_ms in [1] * 1_000 + [2] * 1_000:
        record(recorder, "work", 0, duration_ms)
    time = recorder.times["work"]
    assert (time.count, time.total_ns, time.quantile_ns(0), time.longest_ns) == (2_000, 3_000_000_000, 2e6, 2e6)


def test_there_are_no_shares_before_the_first_step_is_over():
    recorder = EventRecorder()
    recorder.process_duration_event("event/batch", [], True, Timestamp(), 0)
    record(recorder, "event/loss", 1, 2)
    assert recorder.shares_of_steps() == {}
    assert recorder.table().splitlines()[1].split()[0] == "event/loss"

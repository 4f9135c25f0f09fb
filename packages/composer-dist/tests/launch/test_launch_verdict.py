"""Which rank is blamed, and how long a rank may take, without processes."""

import pytest

from composer_dist.launch.args import HangTimeouts
from composer_dist.launch.stacks import Frame, Stack
from composer_dist.launch.verdict import View, decide
from composer_dist.launch.watch import Limits, Watch
from composer_dist.progress import Board, Recorder


def _view(rank, **values):
    return View(**{"rank": rank, "idle_s": 9.0, "where": "", "phase": "train", "batch": 3} | values)


def _call(number, name="nccl:all_reduce", shape=(4,), *, is_done=False):
    entry = {"sequence": number, "name": name, "shapes": [list(shape)], "dtypes": ["Float"], "is_done": is_done}
    return {"0 default_pg": {number: entry}}


def test_ranks_in_a_collective_wait_for_the_one_outside():
    verdict = decide([_view(0, collective="all_reduce"), _view(1, doing="is running in f"), _view(2, collective="x")])
    assert list(verdict.stuck) == [1]
    assert list(verdict.waiting) == [0, 2]


def test_a_rank_that_ended_during_the_training_is_blamed_and_a_finished_one_is_not():
    assert list(decide([_view(0, collective="barrier"), _view(1, exit_code=0)]).stuck) == [1]
    assert list(decide([_view(0, doing="sleeps"), _view(1, exit_code=0, phase="between")]).stuck) == [0]


def test_a_rank_whose_device_waits_for_a_collective_is_not_blamed():
    ahead, behind = _call(8), _call(7, is_done=True)
    verdict = decide([_view(0, calls=ahead, doing="waits in item"), _view(1, calls=behind, doing="sleeps")])
    assert list(verdict.stuck) == [1]


@pytest.mark.parametrize("other", [_call(5, "nccl:broadcast"), _call(5, shape=(9,))], ids=["order", "shape"])
def test_the_rank_with_another_collective_is_named(other):
    views = [_view(rank, collective="all_reduce", calls=other if rank == 2 else _call(5)) for rank in range(4)]
    verdict = decide(views)
    assert list(verdict.stuck) == [2]
    assert "rank 2: " + ("broadcast" if "broadcast" in str(other) else "all_reduce number 5 of Float [9]") in (
        verdict.cause
    )


def test_a_rank_that_misses_a_collective_is_named():
    calls = _call(5)
    views = [_view(0, collective="a", calls=calls), _view(1, collective="a", calls=_call(4, is_done=True))]
    views[0].calls["0 default_pg"] |= _call(4, is_done=True)["0 default_pg"]
    assert list(decide(views).stuck) == [1]


@pytest.mark.parametrize(("world_size", "is_told"), [("1", True), ("2", False)])
def test_a_node_whose_ranks_all_wait_does_not_blame_them(tmp_path, monkeypatch, world_size, is_told):
    now = 0.0
    monkeypatch.setattr("composer_dist.launch.watch.time.monotonic", lambda: now)
    frame = Frame("/x/torch/distributed/distributed_c10d.py", 1, "all_reduce")
    monkeypatch.setattr("composer_dist.launch.watch.collect", lambda *_: {0: Stack("S", [frame], "")})
    monkeypatch.setattr(Watch, "_ask", lambda *_: {})
    board = Board(1)
    recorder = Recorder(board.slot(0), rank=0)
    recorder.enter("before_forward")
    watch = Watch(HangTimeouts.parse("3"), tmp_path)
    env = {"RANK": "0", "WORLD_SIZE": world_size, "COMPOSER_STACK_FILE": str(tmp_path / "stacks.txt")}
    watch.begin(board, {0: env}, {0: recorder_pid()})
    verdicts = []
    for _ in range(10):
        now += 1.0
        verdicts.append(watch.look({}))
    assert any(verdicts) == is_told
    board.close()


@pytest.mark.parametrize("text", ["0", "x", "nan", "12,foo=3", "checkpoint=-1", ""])
def test_a_malformed_timeout_is_refused(text):
    with pytest.raises(ValueError, match="--hang-timeout"):
        HangTimeouts.parse(text)


def test_limits_adapt_to_the_run_and_phases_may_have_their_own():
    limits = Limits(HangTimeouts.parse("auto"))
    assert limits.of("train") == 180
    assert limits.of("train", is_first_batch=True) == 1800
    limits.see("train", 30.0)
    assert limits.of("train") == 600
    own = Limits(HangTimeouts.parse("20,checkpoint=900"))
    assert (own.of("train"), own.of("checkpoint"), own.of("start")) == (20, 900, 1800)


def test_an_hour_with_slow_evaluation_and_saves_raises_no_alarm(monkeypatch, tmp_path):
    now = 0.0
    monkeypatch.setattr("composer_dist.launch.watch.time.monotonic", lambda: now)
    board = Board(1)
    recorder = Recorder(board.slot(0), rank=0)
    watch = Watch(HangTimeouts.parse("auto"), tmp_path)
    watch.begin(board, {0: {"RANK": "0"}}, {0: recorder_pid()})
    plan = [("before_forward", 400.0)]  # the first batch compiles
    for _ in range(6):
        plan += [("before_dataloader", 5.0), ("before_forward", 1.0)] * 20
        plan += [("eval_start", 300.0), ("eval_end", 60.0), ("batch_checkpoint", 400.0)]
    assert sum(seconds for _, seconds in plan) > 3600
    for event, seconds in plan:
        recorder.enter(event)
        if event != "batch_checkpoint":
            recorder.leave(event)
        for _ in range(int(seconds)):
            now += 1.0
            assert watch.look({}) is None
    board.close()


def recorder_pid():
    import os

    return os.getpid()

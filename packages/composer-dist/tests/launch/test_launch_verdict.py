"""Which rank is blamed, and how long a rank may take, without processes."""

import json
import threading
import time
from dataclasses import asdict

import pytest
from torch.distributed import HashStore

from composer_dist.launch.args import HangTimeouts
from composer_dist.launch.nodes import Nodes
from composer_dist.launch.stacks import Frame, Stack
from composer_dist.launch.verdict import View, decide
from composer_dist.launch.watch import Limits, Watch, report
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


def test_ranks_that_wait_for_a_collective_outside_of_it_are_not_blamed_for_another_one():
    begun = _call(5, "gloo:all_reduce")  # with async_op=True, and waited for by the script itself
    views = [_view(rank, doing="is waiting in main", calls=begun) for rank in (1, 2)]
    views.append(_view(0, collective="broadcast", calls=_call(5, "gloo:broadcast")))
    assert list(decide(views).stuck) == [0]


def test_a_rank_that_waits_for_the_averages_of_gradients_is_in_a_collective():
    frames = [Frame("/x/composer_dist/ddp.py", 439, "finish"), Frame("/x/train.py", 1, "main")]
    assert Stack("S", frames, "").collective == "the collectives of data parallelism"


def test_a_rank_that_misses_a_collective_is_named():
    calls = _call(5)
    views = [_view(0, collective="a", calls=calls), _view(1, collective="a", calls=_call(4, is_done=True))]
    views[0].calls["0 default_pg"] |= _call(4, is_done=True)["0 default_pg"]
    assert list(decide(views).stuck) == [1]


def test_ranks_of_which_nothing_is_known_are_named_if_all_others_wait():
    unknown = _view(1, is_unknown=True, doing="is on a node that does not answer,")
    assert decide([_view(0, collective="all_reduce"), unknown]).stuck == {1: "is on a node that does not answer,"}
    assert list(decide([_view(0, doing="sleeps"), unknown]).stuck) == [0]


def test_views_survive_the_way_to_another_node():
    sent = _view(3, collective="all_reduce", idle_s=float("inf"), calls=_call(7))
    assert View.from_json(json.loads(json.dumps(asdict(sent)))) == sent


def test_a_report_names_ranks_that_do_the_same_together():
    views = [_view(rank, collective="all_reduce", where="here") for rank in (0, 1, 2, 3, 5)]
    views += [_view(4, doing="is running in f", where="there")]
    assert report(decide(views), views)[1:] == [
        "stuck: rank 4 is running in f there.",
        "waiting for it: each of ranks 0-3, 5 waits in all_reduce here.",
    ]


class _Launcher:
    """A launcher of one rank, with a clock that the test sets."""

    def __init__(self, rank, store, folder, monkeypatch, function="all_reduce"):
        self.board = Board(1)
        self.recorder = Recorder(self.board.slot(0), rank=rank)
        self.recorder.enter("before_forward")
        self.watch = Watch(HangTimeouts.parse("3"), folder)
        file = "/x/torch/distributed/distributed_c10d.py" if function == "all_reduce" else "/x/train.py"
        stack = Stack("S", [Frame(file, 1, function)], f"{function} of rank {rank}")
        monkeypatch.setattr(self.watch, "_collect", lambda _: {0: stack})
        monkeypatch.setattr(self.watch, "_ask", lambda _: {})
        self.nodes = Nodes(lambda: store, [rank], 2, "0")
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "COMPOSER_STACK_FILE": str(folder / "stacks.txt")}
        self.watch.begin(self.board, {0: env}, {0: recorder_pid()}, self.nodes)

    def close(self):
        self.watch.close()
        self.board.close()


@pytest.fixture
def launchers(tmp_path, monkeypatch):
    """Return a function that makes the launchers of two nodes with a store of this process."""
    store, made = HashStore(), []

    def make(*functions):
        for rank, function in enumerate(functions):
            (tmp_path / str(rank)).mkdir()
            made.append(_Launcher(rank, store, tmp_path / str(rank), monkeypatch, function))
        return made

    yield make
    for launcher in made:
        launcher.close()


def look_until(launchers, is_enough, timeout_s=60.0):
    """Let the launchers look by turns, each in a thread, as one waits for the other; return their verdicts."""
    verdicts = {}

    def look(number):
        deadline_s = time.monotonic() + timeout_s
        while not is_enough(verdicts) and time.monotonic() < deadline_s:
            if number not in verdicts and (verdict := launchers[number].watch.look({})) is not None:
                verdicts[number] = verdict
            time.sleep(0.05)

    threads = [threading.Thread(target=look, args=(number,)) for number in range(len(launchers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts


def test_the_launchers_of_two_nodes_agree_on_the_rank_that_is_stuck(launchers, tmp_path, capsys):
    verdicts = look_until(launchers("all_reduce", "load"), lambda found: len(found) == 2)
    assert [list(verdicts[number].stuck) for number in range(2)] == [[1], [1]]
    assert capsys.readouterr().err.count("stuck: rank 1 is waiting in load (/x/train.py:1)") == 2
    report = (tmp_path / "0" / "hang.txt").read_text()
    assert "all_reduce of rank 0" in report
    assert "load of rank 1" in report
    assert not (tmp_path / "1" / "hang.txt").exists()


@pytest.mark.parametrize("busy", [0, 1])
def test_a_node_is_not_blamed_while_another_one_makes_progress(launchers, busy):
    made = launchers("all_reduce", "load")
    began_s = time.monotonic()

    def is_enough(verdicts):
        made[busy].recorder.enter("before_forward")
        return verdicts or time.monotonic() - began_s > 7.0

    assert look_until(made, is_enough) == {}
    assert made[1 - busy].watch.is_stalled({})
    assert made[0].nodes.asked == 0  # nor interrupted for its stack


def test_a_node_without_the_store_decides_alone(launchers, monkeypatch):
    first, second = launchers("all_reduce", "all_reduce")
    first.watch.close()

    def fail(*_):
        raise ConnectionError

    monkeypatch.setattr(second.nodes, "_exchange", fail)
    verdicts = look_until([second], lambda found: found)
    assert list(verdicts[0].stuck) == [0]
    assert "does not answer" in verdicts[0].stuck[0] or "has never reported" in verdicts[0].stuck[0]


def test_a_node_whose_ranks_have_ended_does_not_keep_the_others_from_deciding(launchers, monkeypatch):
    monkeypatch.setattr("composer_dist.launch.nodes._BEAT_S", 0.1)
    monkeypatch.setattr("composer_dist.launch.nodes._SILENT_S", 1.0)
    first, second = launchers("all_reduce", "all_reduce")
    assert second.nodes.refresh()
    first.watch.close({0: 0})  # as when torch waits for the other nodes
    assert second.nodes.refresh()
    verdicts = look_until([second], lambda found: found)
    assert list(verdicts[0].stuck) == [0]
    assert "ended with exit code 0" in verdicts[0].stuck[0]


def test_the_store_is_connected_again_after_an_error():
    stores = [object(), HashStore()]  # the first one as after a lost connection
    nodes = Nodes(lambda: stores.pop(0), [0], 2, "0")
    assert nodes.refresh(10.0)
    nodes.close()


def test_a_node_that_was_not_read_for_some_time_is_not_silent_because_of_that(monkeypatch):
    monkeypatch.setattr("composer_dist.launch.nodes._BEAT_S", 0.02)
    monkeypatch.setattr("composer_dist.launch.nodes._SILENT_S", 2.0)
    store = HashStore()
    first, second = made = [Nodes(lambda: store, [rank], 2, "0") for rank in range(2)]
    second.tell({"is_over": False})
    assert second.refresh()
    first.read_all(True)
    assert first.refresh()
    first.read_all(False)
    deadline_s = time.monotonic() + 30.0
    while not first.others()[0].is_silent and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert first.others()[0].is_silent
    first.read_all(True)
    assert not first.others()[0].is_silent
    for each in made:
        each.close()


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
    plan += [("fit_end", 1500.0), ("close", 1500.0)]  # the last save and its upload
    assert sum(seconds for _, seconds in plan) > 3600
    for event, seconds in plan:
        recorder.enter(event)
        if event not in ("batch_checkpoint", "fit_end", "close"):
            recorder.leave(event)
        for _ in range(int(seconds)):
            now += 1.0
            assert watch.look({}) is None
    board.close()


def recorder_pid():
    import os

    return os.getpid()

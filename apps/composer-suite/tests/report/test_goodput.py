"""Where the time of a run went, from the record of its attempts."""

import json
import math
import time

import pytest

from composer.report._goodput import goodput, summarize
from composer.report._run_files import OwnAttempt
from composer_dist.attempts import FILE, read_attempts, write_attempt


def attempt(started, updated, first_batch, batch, launch="a", **seconds):
    assert sum(seconds.values()) == updated - started
    facts = {"launch": launch, "number": int(started), "started": started, "updated": updated, "ending": "failed"}
    return facts | {"first_batch": first_batch, "batch": batch, "seconds": seconds}


def test_a_run_without_a_record_has_no_goodput():
    assert goodput([]) is None


def test_batches_that_several_attempts_trained_count_once():
    attempts = [
        attempt(0, 100, 0, 100, train=100),
        attempt(100, 150, 80, 130, train=50),  # repeats 20 batches of the first
        attempt(150, 160, 0, 0, start=10),  # failed before it trained
        attempt(160, 180, 70, 90, train=20),  # repeats 10 more of the first, and the whole second
    ]
    found = goodput(attempts)
    assert found["lost_batches"] == 30 + 50
    assert found["seconds"]["training that was lost"] == 30 + 50
    assert found["seconds"]["training"] == 70 + 20
    assert found["total_s"] == 180
    assert found["share"] == pytest.approx(90 / 180)


def test_the_time_between_two_launches_is_not_part_of_the_run():
    attempts = [
        attempt(0, 10, 0, 5, train=8, hang=2),
        attempt(15, 20, 5, 9, evaluation=2, checkpoint=1, data=1, callbacks=1),
        attempt(1020, 1030, 9, 12, launch="b", start=4, optimizer=5, between=1),
    ]
    found = goodput(attempts)
    assert (found["total_s"], found["between_launches_s"], found["num_launches"]) == (30, 1000, 2)
    assert {kind: spent for kind, spent in found["seconds"].items() if spent} == {
        "training": 13,
        "start": 4,
        "restarts": 5,
        "waiting for data": 1,
        "callbacks": 1,
        "evaluation": 2,
        "checkpoints": 1,
        "no progress": 2,
        "other": 1,
    }
    assert summarize(found) == (
        "goodput 43.3 % of 30.0 s in 3 attempts; restarts 16.7 %, start 13.3 %, evaluation 6.7 %, no progress 6.7 %, "
        "waiting for data 3.3 %, callbacks 3.3 %, checkpoints 3.3 %, other 3.3 %"
    )


def test_a_step_of_the_clock_is_no_time_of_a_run(tmp_path, monkeypatch):
    own, now_s = OwnAttempt(), time.time()
    own.start(0, {})
    for step_s in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda step_s=step_s: now_s + step_s)
        own.write(tmp_path, 5, {}, "running")
        (found,) = read_attempts(tmp_path)
        assert 0 <= found["updated"] - found["started"] < 60
        assert found["seconds"]["start"] < 60


def test_the_attempts_before_are_kept_beside_a_damaged_one_and_a_file_that_is_no_record_is_not_replaced(tmp_path):
    for number in range(3):
        write_attempt(tmp_path, attempt(number, number + 1, 0, 1, launch=str(number), train=1))
    record = json.loads((tmp_path / FILE).read_text())
    del record["attempts"][1]["batch"]
    record["attempts"][2]["seconds"]["train"] = math.nan
    record["attempts"].append({**record["attempts"][0], "batch": 10**400})
    (tmp_path / FILE).write_text(json.dumps(record))
    write_attempt(tmp_path, attempt(9, 10, 0, 1, launch="9", train=1))
    assert [each["launch"] for each in read_attempts(tmp_path)] == ["0", "9"]
    (tmp_path / FILE).write_text("[")
    write_attempt(tmp_path, attempt(11, 12, 0, 1, launch="11", train=1))
    assert [each["launch"] for each in read_attempts(tmp_path)] == ["11"]
    assert (tmp_path / f"{FILE}.damaged").read_text() == "["

"""Runs of two ranks, one of which is slow, what the launcher says about it, and where the time of the run went."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer.report import read_run
from composer.report.cli import main
from composer_dist.attempts import read_attempts

SCRIPT = Path(__file__).with_name("slow_script.py")
# A window has at least 5 batches, and may begin after the part of its first batch and end before that of its last.
LEAST_S = 0.04 * (1 - 1 / 5)  # of the 40 ms per batch that slow_script.py sleeps


def launch(tmp_path, fault, num_batches, *options):
    environ = os.environ | {"COMPOSER_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "composer_dist.launch", "-n", "2", *options]
    command += [str(SCRIPT), fault, str(num_batches), str(tmp_path)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stderr.splitlines() if " is slow, " in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause", "part"),
    [("data", "reading data", "data"), ("callback", "algorithms, callbacks and loggers", "callbacks")],
)
def test_a_slow_rank_is_named_once_with_its_cause(tmp_path, fault, cause, part):
    (told,) = launch(tmp_path, fault, 400)
    assert told.startswith(f"composer: warning: rank 1 is slow, and the other ranks wait for it: {cause} takes ")
    (attempt,) = read_attempts(tmp_path / "runs" / "slow")
    (straggler,) = attempt["stragglers"]
    assert (straggler["rank"], straggler["cause"]) == (1, part)
    assert straggler["factor"] >= 2
    assert straggler["seconds"] >= LEAST_S
    row = attempt["ranks"][part]
    assert row["min"] <= row["median"] <= row["max"]
    assert row["slowest_rank"] == 1
    assert row["max"] - row["min"] >= 0.02
    assert attempt["ending"] == "finished"


@pytest.mark.slow
def test_ranks_that_are_equally_slow_are_not_named(tmp_path):
    assert launch(tmp_path, "nothing", 350) == []
    (attempt,) = read_attempts(tmp_path / "runs" / "slow")
    assert attempt["stragglers"] == []
    assert attempt["ranks"]["callbacks"]["min"] >= LEAST_S


@pytest.mark.slow
def test_the_time_of_a_run_that_was_started_again_adds_up(tmp_path, capsys):
    began_s = time.time()
    launch(tmp_path, "hang", 80, "--hang-timeout", "3,checkpoint=60", "--max-restarts", "1")
    ended_s = time.time()
    folder = tmp_path / "runs" / "slow"
    first, second = read_attempts(folder)
    assert began_s <= first["started"] < first["updated"] <= second["started"] < second["updated"] <= ended_s
    assert [first["ending"], second["ending"]] == ["hang", "finished"]
    assert [first["first_batch"], second["first_batch"], second["batch"]] == [0, 40, 80]
    assert main([str(folder), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    found = run["goodput"]
    assert found["total_s"] == pytest.approx(second["updated"] - first["started"], abs=0.01)
    assert (found["num_attempts"], found["num_launches"], found["lost_batches"]) == (2, 1, first["batch"] - 40)
    assert found["lost_batches"] in (14, 15)
    seconds = found["seconds"]
    assert seconds["no progress"] >= 3
    assert seconds["waiting for data"] >= (55 + 40) * 0.04
    assert min(seconds[kind] for kind in ("training", "training that was lost", "start", "restarts", "checkpoints")) > 0
    assert read_run(folder).status["status"] == "finished"

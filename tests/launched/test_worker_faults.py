"""When a DataLoader's worker of one rank fails, all ranks end soon, and the cause is the last thing that is said."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("worker_fault_script.py")
COMPOSER = [sys.executable, "-m", "composer"]
START_S = 150  # interpreters that import torch on a busy machine
TIMEOUT_S = 6  # the script's DataLoader's
BOUND_S = 45  # from when the failure is known to the end of all ranks, less than the script's dist_timeout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        ("raises", ["Caught ArithmeticError in DataLoader worker process 0", "no point today"]),
        ("killed", ["is killed by signal: Killed"]),
        ("hangs", [f"DataLoader timed out after {TIMEOUT_S} seconds"]),
    ],
)
def test_all_ranks_end_and_the_last_thing_said_is_which_dataset_was_read(tmp_path, fault, causes):
    file = tmp_path / "time_of_the_fault"
    command = [*COMPOSER, "-n", "2", str(SCRIPT), fault, str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    went_on_s = time.time() - float(file.read_text())
    assert run.returncode == 1
    assert "trained to the end" not in run.stdout
    end = (run.stdout + run.stderr)[-4000:]
    by = "a DataLoader with num_workers=1 was reading __main__.Points"
    for cause in [*causes, by, "raised in the dataloader of epoch 0, batch 2 on rank 1"]:
        assert cause in end
    assert went_on_s < BOUND_S + (TIMEOUT_S if fault == "hangs" else 0)

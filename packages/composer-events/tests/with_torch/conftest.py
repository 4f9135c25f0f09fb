"""What needs torch, which this package does not ask for, is collected only where torch is."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torch") else ["*"]

BEGINNING = """
import json, sys, warnings
import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)
rank, folder, seen = int(sys.argv[1]), sys.argv[2], {}
store = torch.distributed.FileStore(f"{folder}/store", 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""

END = """
torch.distributed.barrier()  # nobody leaves while the other still needs an answer
torch.distributed.destroy_process_group()
with open(f"{folder}/seen-{rank}.json", "w") as file:
    json.dump(seen, file)
"""

# Importing torch twice takes seconds on an idle machine, and much longer on a busy one.
TIMEOUT_S = 300


@pytest.fixture
def run_two_ranks(tmp_path):
    """Run a program on two ranks, which know their `rank`, and return what each of them put into its dict `seen`."""
    processes = []

    def run(program):
        (tmp_path / "program.py").write_text(BEGINNING + program + END)
        for rank in range(2):
            command = [sys.executable, str(tmp_path / "program.py"), str(rank), str(tmp_path)]
            with open(tmp_path / f"errors-{rank}.txt", "w") as errors:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                processes.append(subprocess.Popen(command, stdout=errors, stderr=errors, env=environment))
        _wait(processes)
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (0, None)]
        texts = [f"rank {rank}:\n{(tmp_path / f'errors-{rank}.txt').read_text()}" for rank in failed]
        assert not failed, "\n".join(texts)
        assert all(process.poll() == 0 for process in processes), f"a rank did not end within {TIMEOUT_S} s"
        return [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]

    yield run
    for process in processes:
        process.kill()
        process.wait()


def _wait(processes):
    """Wait until both have ended, or one has failed, which the other would wait for."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.1)

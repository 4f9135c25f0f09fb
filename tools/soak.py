"""Run a small training on two ranks again and again, and report every run that does not end with exit code 0.

    python tools/soak.py [--launches 500] [--at-once 2] [--timeout-s 120]

Each run trains with 0, 1 or 2 loader workers, saves after each batch in the background, and exits right after the last
save, with the model and the trainer still referenced. Every second run resumes the one before. It is meant to run with
more work than processors, since faults at the exit of a process show under load.

The ranks are forked from this process, which has imported everything: that saves the imports, most of a launch's time,
while each rank still ends as a script does, by the finalization of its interpreter. A rank that still runs after the
timeout prints the stacks of its threads and is killed. The exit status is 0 if all runs ended with exit code 0, else 1.
"""

import argparse
import collections
import faulthandler
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.models import ComposerClassifier
from composer.utils import dist

_NUM_RANKS = 2


@dataclass
class Run:
    """Run number `number`, whose ranks are the processes `pids`."""

    number: int
    root: Path
    begin_s: float = field(default_factory=time.monotonic)
    pids: dict[int, int] = field(default_factory=dict)  # the rank of each process that has not ended
    codes: list[int] = field(default_factory=list)

    def output(self, rank: int) -> Path:
        """Return the file with the output of a rank."""
        return self.root / f"{self.number}-{rank}.txt"


def train(folder: str, num_workers: int, duration: str) -> Trainer:
    """Train, and return what a script would still hold at its end."""
    dist.initialize_dist("cpu")
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
    loader = DataLoader(data, 4, sampler=dist.get_sampler(data, shuffle=True), num_workers=num_workers)
    trainer = Trainer(
        model=ComposerClassifier(torch.nn.Linear(8, 4), num_classes=4),
        train_dataloader=loader,
        max_duration=duration,
        save_folder=folder,
        save_interval="1ba",
        save_async=True,
        save_num_checkpoints_to_keep=2,
        autoresume=True,
        run_name="soak",
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    return trainer


def import_what_training_imports(root: Path) -> None:
    """Import the modules that a training imports lazily, so that each rank need not do it again."""
    names = root / "modules.txt"
    if not (pid := os.fork()):
        train(str(root / "probe"), 0, "1ep")
        names.write_text("\n".join(sys.modules))
        os._exit(0)
    os.waitpid(pid, 0)
    for name in names.read_text().split():
        with suppress(Exception):  # some depend on the state of training
            importlib.import_module(name)


def start(run: Run, timeout_s: float) -> Trainer | None:
    """Fork the ranks of a run. Only the ranks return a trainer, once they have trained."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(_NUM_RANKS):
        pid = os.fork()
        if pid:
            run.pids[pid] = rank
            continue
        output = os.open(run.output(rank), os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(_NUM_RANKS), "LOCAL_WORLD_SIZE": str(_NUM_RANKS), "MASTER_PORT": str(port)}
        pair = run.number // 2
        return train(str(run.root / str(pair)), pair % 3, f"{1 + run.number % 2}ep")
    return None


def main() -> tuple[int, Trainer | None]:
    """Start all runs, `--at-once` at a time, and return the exit status; in a rank, return its trainer too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the thread pool of OpenMP does not survive a fork
    codes: collections.Counter[int] = collections.Counter()
    begin_s = time.monotonic()
    # Deleted by the system's own cleanup if this process is killed; a rank must not delete it at its end.
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    import_what_training_imports(root)
    waiting, running = list(range(args.launches)), list[Run]()
    while waiting or running:
        busy = {run.number // 2 for run in running}
        ready = next((number for number in waiting if number // 2 not in busy), None)
        if ready is not None and len(running) < args.at_once:
            waiting.remove(ready)
            running.append(Run(ready, root))
            if trainer := start(running[-1], args.timeout_s):
                return 0, trainer
            continue
        pid, status = os.wait()
        run = next(run for run in running if pid in run.pids)
        rank, code = run.pids.pop(pid), os.waitstatus_to_exitcode(status)
        run.codes.append(code)
        if code:
            print(f"run {run.number}, rank {rank}: exit code {code}\n{run.output(rank).read_text()}", flush=True)
            for other in run.pids:  # it may wait for this rank until its timeout
                os.kill(other, signal.SIGABRT)
        if not run.pids:
            running.remove(run)
            codes[next((code for code in run.codes if code), 0)] += 1
            if sum(codes.values()) % 50 == 0:
                print(f"{sum(codes.values())} runs, {time.monotonic() - begin_s:.0f} s", dict(codes), flush=True)
    print(f"{codes[0]} of {args.launches} runs ended with exit code 0, in {time.monotonic() - begin_s:.0f} s")
    return (0 if set(codes) == {0} else 1), None


if __name__ == "__main__":
    exit_status, held = main()  # a rank ends here, with its trainer still referenced
    sys.exit(exit_status)

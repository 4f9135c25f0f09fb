"""How long training stands still for a sharded checkpoint of 479 MiB: synchronous, in the background, torch's.

    python benchmarks/checkpoint_async.py [--rounds 5] [--step-s 0.4] [--folder /tmp]

One process trains in steps of a fixed length, in which the CPU is idle as it is while an accelerator computes. The
stall is the time in calls for checkpoints: begin, wait before the optimizer's step, and the check after each step.
Printed are medians and ranges over the rounds, and how they compare with the synchronous save. The first save of each
kind, which makes its memory, is shown apart.
"""

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rows import Row, add_option, write

from composer_checkpoint.async_save import AsyncSaver
from composer_checkpoint.sharded import save_sharded

State = dict[str, dict[str, torch.Tensor]]


def make_state() -> State:
    """Return weights and two moments of ten layers each, 479 MiB in all."""
    return {
        kind: {f"layer{i}": torch.randn(1046, 4000) for i in range(10)} for kind in ("model", "exp_avg", "exp_avg_sq")
    }


class Loop:
    """Steps of a fixed length; what a checkpoint takes of them is summed up."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.stall_s = 0.0

    def timed(self, call: Callable[[], Any]) -> Any:
        """Call, and count the time as standing still."""
        start = time.perf_counter()
        value = call()
        self.stall_s += time.perf_counter() - start
        return value

    def forward_and_backward(self) -> None:
        """Let an accelerator work."""
        time.sleep(self._step_s)


def wait(save: Callable[[Path], object], loop: Loop, path: Path) -> None:
    """Save while training waits."""
    loop.timed(lambda: save(path))
    loop.forward_and_backward()


def ours(saver: AsyncSaver, state: State, stable: bool, loop: Loop, path: Path) -> None:
    """Save in the background; `stable` tensors are copied while the forward and backward passes run."""
    tensors = [tensor for group in state.values() for tensor in group.values()] if stable else []
    loop.timed(lambda: saver.save(state, path, sharded=True, stable_until_step=tensors))
    while saver.is_saving:
        loop.forward_and_backward()
        loop.timed(saver.wait_for_staging)
        state["model"]["layer0"] += 1
        loop.timed(saver.check)


def torchs(state: State, loop: Loop, path: Path) -> None:
    """Save in torch's background thread."""
    response: Any = loop.timed(lambda: dcp.async_save(state, checkpoint_id=path))
    done: Future[None] = response
    while not done.done():
        loop.forward_and_backward()


def measure(step_s: float, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return the stalls in seconds, the first one first, of each kind in turns."""
    state = make_state()
    with AsyncSaver() as saver, AsyncSaver() as eager:
        kinds: dict[str, Callable[[Loop, Path], None]] = {
            "synchronous": lambda loop, path: wait(lambda path: save_sharded(state, path), loop, path),
            "ours, stable tensors": lambda loop, path: ours(saver, state, True, loop, path),
            "ours, all copied at once": lambda loop, path: ours(eager, state, False, loop, path),
            "torch async_save": lambda loop, path: torchs(state, loop, path),
        }
        stalls: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds + 1):
            for kind, run in kinds.items():
                loop, path = Loop(step_s), folder / "checkpoint"
                run(loop, path)
                stalls[kind].append(loop.stall_s)
                shutil.rmtree(path)
    return stalls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.4)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    add_option(parser)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        stalls = measure(options.step_s, options.rounds, Path(folder))
    whole = statistics.median(stalls["synchronous"][1:])
    print(f"{'kind':26} {'first':>8} {'median':>8} {'range':>17} {'of synchronous':>15}")
    for kind, (first, *later) in stalls.items():
        median, low, high = statistics.median(later), min(later), max(later)
        print(f"{kind:26} {first:7.3f}s {median:7.3f}s {low:7.3f}-{high:7.3f}s {median / whole:15.1%}")
    medians_ms = {kind: 1000 * statistics.median(later) for kind, (_, *later) in stalls.items()}
    torchs_ms = medians_ms.pop("torch async_save")
    rows = [
        Row(what=f"stall of a sharded checkpoint, {kind}", ours=ours_ms, plain=torchs_ms, ratio=ours_ms / torchs_ms)
        for kind, ours_ms in medians_ms.items()
    ]
    write(options.json, rows)


if __name__ == "__main__":
    main()

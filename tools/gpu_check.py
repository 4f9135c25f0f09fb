"""Check on a machine with a GPU what needs one, in one call, and print a table.

    python tools/gpu_check.py [--minutes 8.5] [--recipe-minutes 3] [--device cpu] [--only NAME ...]

The machine needs this repository, Python 3.11 or newer, torch, torchvision, torchmetrics and transformers. Nothing is
installed: the packages are found in the checkout, and their metadata is made up in a temporary folder. Each case runs
in a process of its own with a time of its own, so that one that crashes or hangs costs only itself. First come those
that measure nothing, a few at a time; then, one after the other, those that do. The exit status is 0 if every case
passed or could not be run on this machine, 1 if one failed or there was no time for it, and 2 without a GPU or one of
these libraries.

With `--device cpu` it runs what makes sense without a GPU, on tiny sizes: a check of the check.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from gpu_cases.as_installed import ROOT, add_stand_ins, source_folders, write_metadata

NEEDED = ("torch", "torchvision", "torchmetrics", "transformers")
AT_ONCE = 4
LEAST_S = 15.0  # a case that has less time is not begun: so long it takes to import everything
RECIPE = "recipe.stdlib"


@dataclass(frozen=True, slots=True)
class Case:
    """One check.

    Attributes:
        name: Module and function.
        what: What it shows, for the table.
        limit_s: How long it may take.
        alone: Whether nothing else may run beside it, as it measures.
        on_cpu: Whether it makes sense without a GPU.
        package: Where the module is.
    """

    name: str
    what: str
    limit_s: float = 90.0
    alone: bool = False
    on_cpu: bool = True
    package: str = "gpu_cases"


CASES = (
    Case("precision.amp_bf16", "amp_bf16"),
    Case("precision.amp_fp16", "amp_fp16 with a GradScaler", on_cpu=False),
    Case("precision.fp16_overflow", "amp_fp16, gradients that overflow", on_cpu=False),
    Case("precision.fp16_divergence", "amp_fp16, a loss that is NaN", on_cpu=False),
    Case("precision.divergence_unwaited", "a NaN is found without waiting", on_cpu=False),
    Case("memory.auto_microbatch", "microbatches 'auto', memory runs out", on_cpu=False),
    Case("checkpoints.async_snapshot", "asynchronous checkpoints are snapshots", limit_s=120.0),
    Case("checkpoints.async_unwaited", "pinned copies beside the GPU's work", on_cpu=False),
    Case("checkpoints.resume", "resumption, random numbers included"),
    Case("sharding.fsdp_full", "FSDP2, full checkpoints"),
    Case("sharding.fsdp_sharded", "FSDP2, sharded checkpoints"),
    Case("speed.compiled", "torch.compile", limit_s=150.0),
    Case("speed.channels_last", "ChannelsLast"),
    Case("speed.fused_adamw", "DecoupledAdamW(fused=True)"),
    Case("speed.fused_by_default", "our optimizers are fused on a GPU"),
    Case("methods.functions", "methods as functions"),
    Case("methods.image_algorithms", "methods for images", limit_s=150.0),
    Case("methods.text_algorithms", "methods for text"),
    Case("waits.steps", "steps that never wait for the GPU", limit_s=150.0, on_cpu=False),
    Case("waits.named", "SyncMonitor names a line", on_cpu=False),
    Case("features.bfloat16_weights", "a model in bfloat16", on_cpu=False),
    Case("features.cuda_graphs", "CUDA graphs and microbatches", limit_s=150.0, on_cpu=False),
    Case("features.memory_files", "records of memory, under FSDP", on_cpu=False),
    Case("features.offloaded", "FSDP with weights on the CPU"),
    Case("features.recomputed", "recomputed activations"),
    Case("features.hugging_face", "a model of transformers"),
    Case("features.loaded_by_workers", "DataLoader with workers"),
    Case("features.profiled", "the profiler"),
    Case("features.several_methods", "seven methods, compiled", limit_s=150.0),
    Case("features.group_of_the_script", "NCCL group of the script", on_cpu=False),
    Case("suite.marked", "tests marked gpu", limit_s=180.0),
    Case("speed.mfu", "SpeedMonitor's MFU", alone=True),
    Case("checkpoints.async_stall", "stall of an asynchronous checkpoint", limit_s=120.0, alone=True),
    Case("overhead.tiny", "Trainer beside a loop by hand, tiny steps", alone=True),
    Case("overhead.gpt", "Trainer beside a loop by hand, GPT", alone=True),
    Case(RECIPE, "a recipe", limit_s=600.0, alone=True),
)


@dataclass(frozen=True, slots=True)
class Result:
    """How a case went: `'passed'`, `'failed'`, `'skipped'` or `'no time'`, with a figure or a reason."""

    case: Case
    outcome: str
    seconds: float
    figure: str


class Runner:
    """Runs cases in processes of their own until the time is up.

    Args:
        folder: For what the processes need and write.
        device: `'cuda'` or `'cpu'`.
        deadline_s: When all has to be over, on the clock of `time.monotonic`.
        recipe_minutes: How long the recipe may take.
    """

    def __init__(self, folder: Path, device: str, deadline_s: float, recipe_minutes: float) -> None:
        self._folder, self._device, self._deadline_s = folder, device, deadline_s
        self._recipe_minutes = recipe_minutes
        self._running: set[subprocess.Popen[bytes]] = set()
        path = [ROOT / "tools", *source_folders(), folder]
        self._variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "TOKENIZERS_PARALLELISM": "0"}

    def run_all(self, cases: Sequence[Case], at_once: int, report: Callable[[Result], None]) -> list[Result]:
        """Run the cases, some at once and some alone, and report each when it is done."""

        def run(case: Case) -> Result:
            result = self.run(case)
            report(result)
            return result

        pool = ThreadPoolExecutor(at_once)
        try:
            beside = list(pool.map(run, [case for case in cases if not case.alone]))
            return beside + [run(case) for case in cases if case.alone]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self._running):  # none is left but where this program is interrupted
                _kill(process)

    def run(self, case: Case) -> Result:
        """Run one case, for as long as it may and there is time."""
        left_s = self._deadline_s - time.monotonic()
        if left_s < LEAST_S:
            return Result(case, "no time", 0.0, "the time was up before it began")
        limit_s = min(case.limit_s, left_s)
        variables = dict(self._variables)
        if case.name == RECIPE:
            variables["GPU_CHECK_RECIPE_MINUTES"] = str(min(self._recipe_minutes, (left_s - LEAST_S) / 60))
        answer, log = self._folder / f"{case.name}.json", self._folder / f"{case.name}.log"
        # Unbuffered, so that what a case said before it crashed is in the log.
        command = [sys.executable, "-u", "-m", "gpu_cases", f"{case.package}.{case.name}", self._device, str(answer)]
        start = time.monotonic()
        with open(log, "wb") as file:
            status = self._call(command, variables, file.fileno(), limit_s)
        return _result(case, status, limit_s, time.monotonic() - start, answer, log)

    def _call(self, command: list[str], variables: dict[str, str], output: int, limit_s: float) -> int | None:
        """Run a process and return its exit status, or `None` after it was killed with all that it had started."""
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
        self._running.add(process)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            return None
        finally:
            self._running.discard(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _result(case: Case, status: int | None, limit_s: float, seconds: float, answer: Path, log: Path) -> Result:
    if status is None:
        return Result(case, "failed", seconds, f"not done after {limit_s:.0f} s{_last_words(log)}")
    if not answer.exists():
        return Result(case, "failed", seconds, f"ended with status {status} and no answer{_last_words(log)}")
    said = json.loads(answer.read_text())
    return Result(case, said["outcome"], seconds, said["figure"])


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((f": {line.strip()[:200]}" for line in reversed(lines) if line.strip()), "")


def describe(device: str, missing: Sequence[str]) -> str:
    """Return one line about machine and libraries."""
    import torch

    versions = ", ".join(f"{name} {version(name)}" for name in NEEDED)
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    stand_ins = f"; stand-ins for {' and '.join(missing)}, which are not installed" if missing else ""
    return f"{name}, Python {platform.python_version()}, {versions}{stand_ins}"


def table(results: Sequence[Result]) -> str:
    """Return a line for each case."""
    width = max(len(result.case.what) for result in results)
    lines = [f"{'case':{width}}  {'outcome':8}{'seconds':>8}  figure"]
    for result in results:
        figure = " ".join(result.figure.split())
        lines.append(f"{result.case.what:{width}}  {result.outcome:8}{result.seconds:8.1f}  {figure[:400]}")
    return "\n".join(lines)


def is_good(results: Sequence[Result]) -> bool:
    """Answer whether every case passed, or could not be run on this machine."""
    return all(result.outcome in ("passed", "skipped") for result in results)


def choose(names: Sequence[str] | None, device: str) -> list[Case]:
    """Return the cases of these names, or all that make sense on a device."""
    known = {case.name: case for case in CASES}
    if unknown := [name for name in names or () if name not in known]:
        raise SystemExit(f"--only: {', '.join(unknown)} not among the cases, which are {', '.join(known)}.")
    chosen = [known[name] for name in names] if names else list(CASES)
    if left := [case for case in chosen if device == "cuda" or case.on_cpu]:
        return left
    raise SystemExit(f"--only: {', '.join(case.name for case in chosen)} makes sense on a GPU alone.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the table and return the exit status."""
    start_s = time.monotonic()
    asked = _read(arguments)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(f"{', '.join(missing)} not installed: the check needs {', '.join(NEEDED)}.")
        return 2
    import torch  # here, so that --help costs nothing

    if asked.device == "cuda" and not torch.cuda.is_available():
        print("No GPU: torch sees no CUDA device here. Run this where there is one, or with --device cpu.")
        return 2
    cases = choose(asked.only, asked.device)
    with tempfile.TemporaryDirectory(prefix="gpu_check") as name:
        folder = Path(name)
        write_metadata(folder)
        print(describe(asked.device, add_stand_ins(folder)), flush=True)
        runner = Runner(folder, asked.device, start_s + 60 * asked.minutes, asked.recipe_minutes)
        at_once = min(AT_ONCE, os.cpu_count() or 1) if asked.device == "cuda" else 1
        results = runner.run_all(cases, at_once, _report)
        for result in results:
            if result.outcome == "failed":
                print(f"\n== {result.case.name}\n{_tail(folder / f'{result.case.name}.log')}")
        if asked.logs:
            asked.logs.mkdir(parents=True, exist_ok=True)
            for log in folder.glob("*.log"):
                shutil.copy2(log, asked.logs)
    results.sort(key=lambda result: cases.index(result.case))
    print(f"\n{table(results)}\n{time.monotonic() - start_s:.0f} s in all")
    return 0 if is_good(results) else 1


def _report(result: Result) -> None:
    print(f"{result.outcome}: {result.case.name} ({result.seconds:.0f} s)", flush=True)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").rstrip().split("\n")[-30:]) if log.exists() else ""


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check what needs a GPU, on a machine that has one.")
    parser.add_argument("--minutes", type=float, default=8.5, help="after which all is over")
    parser.add_argument("--recipe-minutes", type=float, default=3.0, help="of these, for the recipe")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a check of the check")
    parser.add_argument("--logs", type=Path, help="a folder that gets what each case printed")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these cases, such as precision.amp_bf16")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no case outlives this program
    sys.exit(main())

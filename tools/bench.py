"""Run the benchmarks and write what they measured into one table, docs/benchmarks.md.

    bench.py [--minutes 15] [--only NAME ...] [--output PAGE]

Each script of benchmarks/ runs in a process of its own, one after the other, with a time of its own. A script that
fails, or for which there was no time, has a line in the table that says so, and makes the exit status 1. A budget that
is broken does not: a timing is no test. It stays in the table. With `--only` the page is printed, unless `--output`
says where it goes.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ranges import ROOT

FOLDER = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
LIBRARIES = ("torch", "torchvision", "torchmetrics", "transformers", "lightning", "accelerate")
LEAST_S = 5.0  # a script that has less time is not begun

INTRODUCTION = """\
# Benchmarks

What the Trainer, checkpoints and startup cost compared with the same work in plain PyTorch. A ratio below 1 means that
composer-suite is faster.
"""

METHOD = """\
## How it is measured

`make bench` runs every script of `benchmarks/` and writes this page; this run took {minutes:.0f} minutes. "Plain
PyTorch" is the fastest way to do the same without composer-suite. "Peers" are other installed libraries. Both sides of
a ratio are measured in turns. Most ratios are the median over pairs of turns, so they can differ from the quotient of
the two times in the same row. "Met" is whether the measurement is within the budget of its script.

The rows "step with ..." measure one short round of each speed-up method, in processor time on one thread.
[The table of methods](algorithms/README.md) has five rounds; use that one to compare methods.

Machine: {machine}.

Other programs may have been running, and the clock rate varies: ratios of two runs differ by a few percent, and times
by more. Compare ratios of one run only. No GPU was used; `python tools/gpu_check.py` measures on a GPU.
"""

# The rows of the summary, with what each of them is called there.
SUMMARY = {
    "Trainer step, plain": "Training step of a very small network",
    "Trainer step, typical": "The same with 4 algorithms, 5 callbacks, 2 loggers, 2 microbatches",
    "step of a network of 0.6 million parameters": "Training step of a network with 0.6 million parameters",
    "step of 10 ms with ten callbacks and three loggers, to one without": "Ten callbacks and three loggers",
    "DDP step of a GPT, Trainer": "Training step of a GPT with DDP, two ranks",
    "FSDP2 step of a GPT, Trainer": "Training step of a GPT with FSDP2, two ranks",
    "save_file .pt, 48 MiB, to torch.save, fsync": "Saving a checkpoint of 48 MiB with hashes",
    "warm: load_file .pt, 48 MiB, to warm: torch.load, each page touched": "Loading and verifying it, from memory",
    "stall of a sharded checkpoint, ours, stable tensors": "Interruption of training by an asynchronous checkpoint",
    "launching 2 ranks, whole run, to torchrun": "Launching two ranks, compared with `torchrun`",
    "from composer import Trainer": "`from composer import Trainer`, compared with `import torch`",
}


@dataclass(frozen=True, slots=True)
class Script:
    """One benchmark, and how it is run here.

    Attributes:
        name: Of the file, without its ending.
        arguments: So many rounds as it has time for.
        limit_s: How long it may take.
    """

    name: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 60.0

    @property
    def command(self) -> str:
        """What to type for the same rows."""
        return " ".join(["python", f"benchmarks/{self.name}.py", *self.arguments])


PLAN = (
    Script("time_import"),
    Script("timestamp"),
    Script("engine"),
    Script("import_time", ("2",), 120.0),
    Script("launch", ("--rounds", "3"), 120.0),
    Script("trainer_overhead", ("--rounds", "5", "--steps", "500"), 150.0),
    Script("peers", ("--rounds", "5"), 120.0),
    Script("callbacks", ("--turns", "150"), 150.0),
    Script("callbacks_long_runs", ("--quick",), 90.0),
    Script("optimizers", (), 90.0),
    Script("language_models", (), 300.0),
    Script("ema"),
    Script("algorithms", ("--rounds", "5"), 180.0),
    Script("algorithms_surgery", ("--rounds", "11"), 240.0),
    Script("method_costs", ("--rounds", "1", "--epochs", "2"), 150.0),
    Script("checkpoint", ("--quick",), 90.0),
    Script("checkpoint_async", ("--rounds", "3"), 120.0),
    Script("ddp", ("--rounds", "3"), 150.0),
    Script("fsdp", ("--rounds", "3"), 180.0),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a script: its rows, as `benchmarks/rows.py` has them, and what went wrong, if anything did."""

    script: Script
    rows: Sequence[Mapping[str, Any]]
    seconds: float
    fault: str = ""


def run(script: Script, folder: Path, left_s: float) -> Outcome:
    """Run one script for as long as it may and there is time."""
    if left_s < LEAST_S:
        return Outcome(script, [], 0.0, "there was no time left to run it")
    limit_s = min(script.limit_s, left_s)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "rows.json"
        command = [sys.executable, str(folder / f"{script.name}.py"), *script.arguments, "--json", str(answer)]
        status, said = _call(command, limit_s)
        rows = json.loads(answer.read_text()) if answer.exists() else []
    seconds = time.monotonic() - start_s
    if status is None:
        return Outcome(script, rows, seconds, f"it was not done after {limit_s:.0f} s")
    is_broken = any(row["is_met"] is False for row in rows)
    if not rows or (status and not is_broken):  # 1 is also what a broken budget gives
        return Outcome(script, rows, seconds, f"it ended with status {status}: {_last_line(said)}")
    return Outcome(script, rows, seconds)


def _call(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Return a process's status and all that it said; `None` after it was killed with what it had started."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:  # also where this program is interrupted
                os.killpg(process.pid, signal.SIGKILL)


def _last_line(text: str) -> str:
    return next((line.strip()[:200] for line in reversed(text.split("\n")) if line.strip()), "it said nothing")


def page(outcomes: Sequence[Outcome], machine: str) -> str:
    """Return the text of the page."""
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    rows = [line for outcome in outcomes for line in _lines(outcome)]
    method = METHOD.format(minutes=minutes, machine=machine)
    head = ("what", "ours", "plain PyTorch", "peers", "ratio", "budget", "met", "command")
    everything = _table(head, ("---", "--:", "--:", "---", "--:", "--:", "---", "---"), rows)
    return "\n".join([INTRODUCTION, *_summary(rows), method, "## All measurements\n", everything])


def _summary(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the most important rows as a table, and how many budgets were met."""
    by_name = {row[0]: row for row in rows}
    chosen = [(text, *by_name[name][1:5]) for name, text in SUMMARY.items() if name in by_name]
    if chosen:
        head = ("", "composer-suite", "plain PyTorch", "peers", "ratio")
        yield _table(head, ("---", "--:", "--:", "---", "--:"), chosen)
    budgets = [row[6] for row in rows if row[6]]
    yield f"{budgets.count('yes')} of {len(budgets)} budgets are met.\n"


def _table(head: tuple[str, ...], rule: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(_escaped(cell) for cell in line)} |\n" for line in (head, rule, *rows))


def _lines(outcome: Outcome) -> list[tuple[str, ...]]:
    command = f"`{outcome.script.command}`"
    lines = [_line(row, command) for row in outcome.rows]
    if outcome.fault:
        lines.append((f"**failed**: {outcome.fault}", "", "", "", "", "", "no", command))
    return lines


def _line(row: Mapping[str, Any], command: str) -> tuple[str, ...]:
    unit = row["unit"]
    plain = "" if row["plain"] is None else _quantity(row["plain"], unit)
    peers = ", ".join(f"{name} {_quantity(value, unit)}" for name, value in row["peers"].items())
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3g}" if row["ratio"] < 0.1 else f"{row['ratio']:.2f}"
    met = {True: "yes", False: "**no**", None: ""}[row["is_met"]]
    return row["what"], _quantity(row["ours"], unit), plain, peers, ratio, row["budget"], met, command


def _quantity(value: float, unit: str) -> str:
    """Write a number with three digits, or all of a large one."""
    number = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def machine() -> str:
    """Describe processor, memory and versions."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    libraries = ", ".join(f"{name} {found}" for name in LIBRARIES if (found := _version(name)))
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores, {pages / 2**30:.0f} GiB, Python {platform.python_version()}, {libraries}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write(path: Path, text: str) -> None:
    """Replace the page in one step."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    try:
        os.chmod(file.name, 0o644)  # a temporary file is its owner's alone
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise


def main(
    arguments: Sequence[str] | None = None, plan: Sequence[Script] = PLAN, folder: Path = FOLDER, page_path: Path = PAGE
) -> int:
    """Run the benchmarks, write the page and return the exit status."""
    parser = argparse.ArgumentParser(description="Run the benchmarks and write docs/benchmarks.md.")
    parser.add_argument("--minutes", type=float, default=15.0, help="after which nothing is begun any more")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[script.name for script in plan], help="only these"
    )
    parser.add_argument("--output", type=Path, help="where the page goes")
    asked = parser.parse_args(arguments)
    deadline_s = time.monotonic() + 60 * asked.minutes
    outcomes: list[Outcome] = []
    for script in plan:
        if asked.only and script.name not in asked.only:
            continue
        outcomes.append(run(script, folder, deadline_s - time.monotonic()))
        print(f"{script.name}: {outcomes[-1].seconds:.0f} s {outcomes[-1].fault}".rstrip(), file=sys.stderr, flush=True)
    text = page(outcomes, machine())
    output = asked.output or (None if asked.only else page_path)
    if output is None:
        print(text, end="")
    else:
        write(output, text)
    return 1 if any(outcome.fault for outcome in outcomes) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no benchmark outlives this program
    sys.exit(main())

"""How long saving and loading one checkpoint file takes, next to `torch.save` and `torch.load` of the same state.

    .venv/bin/python benchmarks/checkpoint.py [--quick] [--folder FOLDER]

The state is a model's weights and two moments for each, 480 MiB (`--quick`: 48 MiB, without budgets: the disk hardly
begins). What is compared takes turns, so that a change in the machine's load meets all;
a ratio is that of the medians. Saving ends when the disk has the file
(`fsync`); ours has hashed it by then. Loading by torch maps the file and touches one byte of each page, which brings
little of a file to the processor that the page cache has. Ours maps it and has compared every hash, for which all of it
must come. What that takes at least is in the rows named "bound": torch's loading, and all cores that read every byte
once, or hash it without any other check. "warm" rows begin with the file in the page cache, "cold" ones with the file
on the disk. Processor time is that of all threads, and of the system in their name; where other work shares the
machine, it says more.
"""

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rows import Row, add_option, write

from composer_checkpoint import hash_tensors, inspect_file, load_file, save_file

WIDTH = 1024
# Of the ratios, at full size. Verifying must not cost the throughput of the disk; of a file that is in memory already,
# the bounds tell what is left to gain.
BUDGETS = {
    "save_file .pt": 1.15,
    "weights: save_file .safetensors": 0.5,
    "cold: load_file .pt": 1.3,
    "cold: load_file .safetensors": 1.3,
}

Times = dict[str, list[tuple[float, float]]]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Time saving and loading one checkpoint file.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, and three rounds")
    parser.add_argument("--folder", help="where the files are written, and removed from")
    add_option(parser)
    options = parser.parse_args()
    state = make_state(num_layers=4 if options.quick else 40)
    rounds = 3 if options.quick else 15
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(f"{size_mib(state):.0f} MiB, medians of {rounds} rounds")
        rows = time_saving(state, Path(folder), rounds)
        rows += time_loading(state, Path(folder), rounds)
        rows += time_inspecting(Path(folder), rounds, num_mib=200 if options.quick else 2048)
    if not options.quick:
        rows = [judged(row) for row in rows]
    write(options.json, rows)


def judged(row: Row) -> Row:
    """Return a row with its budget, if it has one."""
    name = row.what.partition(" MiB, to ")[0].rpartition(", ")[0]
    if row.ratio is None or name not in BUDGETS:
        return row
    budget = BUDGETS[name]
    print(f"{name:42}{row.ratio:8.2f}{budget:8.2f}  {'met' if row.ratio <= budget else 'NOT met'}")
    return replace(row, budget=f"{budget:.2f}", is_met=row.ratio <= budget)


def make_state(num_layers: int) -> dict[str, Any]:
    """Return weights and Adam's moments, in Composer's layout."""
    model = {f"layers.{index}.weight": torch.randn(WIDTH, WIDTH) for index in range(num_layers)}
    moments = {
        name: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight)}
        for name, weight in model.items()
    }
    return {"state": {"model": model, "optimizers": {"AdamW": {"state": moments}}}}


def time_saving(state: dict[str, Any], folder: Path, rounds: int) -> list[Row]:
    """Time saving everything, and the weights alone."""
    weights = state["state"]["model"]
    times = take_turns(
        rounds,
        {
            "torch.save, fsync": lambda: save_with_torch(state, folder / "torch.pt"),
            "save_file .pt": lambda: save_file(state, folder / "ours.pt"),
            "weights: torch.save, fsync": lambda: save_with_torch(weights, folder / "weights.pt"),
            "weights: save_file .safetensors": lambda: save_file(weights, folder / "weights.safetensors"),
        },
        before=lambda: clear(folder),
    )
    rows = report(times, "torch.save, fsync", ["save_file .pt"], size_mib(state))
    return rows + report(times, "weights: torch.save, fsync", ["weights: save_file .safetensors"], size_mib(weights))


def time_loading(state: dict[str, Any], folder: Path, rounds: int) -> list[Row]:
    """Time loading, with the file in the page cache and out of it."""
    theirs, ours, safetensors = folder / "torch.pt", folder / "ours.pt", folder / "ours.safetensors"
    save_with_torch(state, theirs)
    save_file(state, ours)
    save_file(dict(enumerate_names(state)), safetensors)
    actions: dict[str, Callable[[], Any]] = {
        "torch.load, each page touched": lambda: touch_pages(load_with_torch(theirs)),
        "bound: torch.load, each byte read": lambda: read_all(load_with_torch(theirs)),
        "bound: torch.load, each byte hashed": lambda: hash_all(load_with_torch(theirs)),
        "load_file .pt": lambda: load_file(ours),
        "load_file .pt, verify=False": lambda: load_file(ours, verify=False),
        "load_file .safetensors": lambda: load_file(safetensors),
    }
    rows: list[Row] = []
    for case, before in (
        ("warm", gc.collect),
        ("cold", lambda: [drop_from_cache(path) for path in (theirs, ours, safetensors)]),
    ):
        times = take_turns(rounds, {f"{case}: {name}": action for name, action in actions.items()}, before)
        reference, *others = times
        rows += report(times, reference, others, size_mib(state))
    return rows


def time_inspecting(folder: Path, rounds: int, num_mib: int) -> list[Row]:
    """Time the description of a file."""
    clear(folder)
    save_file({f"layers.{index}": torch.zeros(WIDTH, WIDTH) for index in range(num_mib // 4)}, folder / "large.pt")
    times = take_turns(rounds, {"inspect_file": lambda: inspect_file(folder / "large.pt")})
    what, milliseconds = f"inspect_file of {num_mib} MiB", 1000 * medians(times["inspect_file"])[0]
    print(f"{what:42}{milliseconds:9.1f} ms")
    return [Row(what=what, ours=milliseconds)]


def take_turns(rounds: int, actions: dict[str, Callable[[], Any]], before: Callable[[], Any] = gc.collect) -> Times:
    """Return the seconds, and those of processors, that each action took in each round but the first."""
    times: Times = {name: [] for name in actions}
    order = random.Random(0)
    for round_ in range(rounds + 1):
        for name, action in order.sample(list(actions.items()), len(actions)):  # what came before has its effects
            before()
            start, cpu_start = time.perf_counter(), time.process_time()
            result = action()
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            del result
            if round_:
                times[name].append((seconds, cpu_seconds))
    return times


def report(times: Times, reference: str, others: list[str], mib: float) -> list[Row]:
    """Print medians, throughput, and the ratios to the reference; return a row for each of the others."""
    base, cpu_base = medians(times[reference])
    rows: list[Row] = []
    for name in (reference, *others):
        seconds, cpu_seconds = medians(times[name])
        print(
            f"{name:42}{1000 * seconds:9.1f} ms{mib / seconds:9.0f} MiB/s{seconds / base:8.2f}"
            f"{1000 * cpu_seconds:9.1f} ms of processors{cpu_seconds / cpu_base:6.2f}"
        )
        what = f"{name}, {mib:.0f} MiB, to {reference}"
        rows.append(Row(what=what, ours=1000 * seconds, plain=1000 * base, ratio=seconds / base))
    return rows[1:]


def medians(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the medians of both kinds of seconds."""
    seconds, cpu_seconds = zip(*rounds, strict=True)
    return statistics.median(seconds), statistics.median(cpu_seconds)


def save_with_torch(state: Any, path: Path) -> None:
    """Save, and wait until the disk has it."""
    torch.save(state, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def load_with_torch(path: Path) -> Any:
    """Map a file."""
    return torch.load(path, mmap=True, weights_only=True)


def touch_pages(state: Any) -> Any:
    """Read one byte of each page."""
    for _, tensor in enumerate_names(state):
        tensor.view(-1).view(torch.uint8)[::4096].sum()
    return state


def read_all(state: Any) -> Any:
    """Read every element, which torch shares out to all cores."""
    for _, tensor in enumerate_names(state):
        tensor.sum()
    return state


def hash_all(state: Any) -> Any:
    """Hash every tensor."""
    hash_tensors(dict(enumerate_names(state)))
    return state


def enumerate_names(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor with a name."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value
        else:
            yield from enumerate_names(value, f"{prefix}{key}/")


def size_mib(state: Any) -> float:
    """Return the size of all tensors."""
    return sum(tensor.nbytes for _, tensor in enumerate_names(state)) / (1 << 20)


def clear(folder: Path) -> None:
    """Remove the files, and wait until the disk is idle."""
    for path in folder.iterdir():
        path.unlink()
    os.sync()


def drop_from_cache(path: Path) -> None:
    """Forget the file's pages, so that the next read goes to the disk."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()

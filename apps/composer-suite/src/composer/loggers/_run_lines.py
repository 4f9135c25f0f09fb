"""Lines about a run for the console: at its start, after each evaluation and at its end."""

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch

from composer.loggers._service_queue import as_number
from composer_dist import get_local_world_size, get_world_size
from composer_dist.wrapping import unwrap_model
from composer_events.data_spec import size_of_batches
from composer_events.metric_entries import higher_is_better, metric_with
from composer_events.state import State
from composer_optim.compile import compiled_from
from composer_time import Timestamp


def start_lines(state: State, hparams: Mapping[str, Any]) -> list[str]:
    """Describe the environment, the model, the data, the hyperparameters of the script, and the loaded checkpoint."""
    named = {str(name): value for name, value in hparams.items()}
    given = [f"{name}={named[name]}" for name in sorted(named) if not _OF_TRAINER.fullmatch(name)]
    lines = [_environment(state), _model(state), _data(state)]
    lines.append(f"hyperparameters: {', '.join(given)}" if given else "")
    if state.load_path is not None:
        is_resumed = state.timestamp.num_batches > 0
        lines.append(f"{'Resumed from' if is_resumed else 'Loaded'} {state.load_path} at {moment(state)}")
    return [line for line in lines if line]


# What the Trainer logs by itself, and the other lines show.
_OF_TRAINER = re.compile(
    "composer_version|composer_commit_hash|num_nodes|num_[a-z]+s_per_node|node_name|rank_zero_seed|enabled_algorithms/.*"
)


def moment(state: State) -> str:
    """Return the number of the latest batch, and of its epoch, counted from 1."""
    stamp: Timestamp = state.timestamp
    epoch = stamp.num_epochs + (1 if stamp.num_batches_in_epoch or not stamp.num_batches else 0)
    return f"epoch {epoch}, batch {stamp.num_batches}"


def _environment(state: State) -> str:
    device = torch.cuda.get_device_name() if state.device.name == "gpu" else state.device.name
    num_ranks, num_nodes = get_world_size(), get_world_size() // get_local_world_size()
    ranks = _count(num_ranks, "rank") + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
    strategy = type(state.strategy).__name__
    return _joined(
        f"Composer {metadata.version('composer-suite')}, PyTorch {torch.__version__}",
        f"{device}, {state.precision.value}",
        ranks if state.strategy is None or strategy == "SingleDevice" else f"{ranks}, {strategy}",
        f"run {state.run_name}, seed {state.rank_zero_seed}",
    )


def _model(state: State) -> str:
    model = unwrap_model(state.model)
    parts = [child for child in model.children() if next(child.parameters(), None) is not None]
    name = type(model).__name__ + (f"({type(parts[0]).__name__})" if len(parts) == 1 else "")
    total, trainable = count_parameters(model)
    return _joined(
        f"{name}: {total:,} parameters, {'all' if total == trainable else f'{trainable:,}'} trainable",
        *(f"{type(each).__name__}, lr {_rates(each)}" for each in state.optimizers),
        ", ".join(getattr(each, "__name__", type(each).__name__) for each in compiled_from(state.schedulers)),
        ", ".join(type(each).__name__ for each in state.algorithms),
    )


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return the number of all parameters of a model, and of those that are trained."""
    # DeepSpeed's partitioned parameters have 0 elements, and the whole number in an attribute.
    sizes = [(getattr(each, "ds_numel", each.numel()), each.requires_grad) for each in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trainable in sizes if is_trainable)


def batch_size_of(loader: Any) -> Any:
    """Return the batch size of a dataloader, or `None` if it is unknown."""
    with suppress(Exception):  # a property of a custom loader may raise anything
        return size_of_batches(loader)
    return None


def _rates(optimizer: torch.optim.Optimizer) -> str:
    # Not the current ones, which a warm-up starts at 0.
    rates = (float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))


def _data(state: State) -> str:
    loader: Any = state.train_dataloader
    parts: list[str] = []
    if loader is not None and state.max_duration is not None:
        length = None if state.dataloader is not loader else state.dataloader_len
        batches = "batches" if length is None else _count(int(length), "batch")
        size = batch_size_of(loader)
        per_rank = " per rank" if get_world_size() > 1 else ""
        batches += "" if size is None else f" of {size}{per_rank}"
        batches += "" if length is None else " per epoch"
        parts.append(f"{batches}, {state.max_duration.to_timestring()}")
    trains = state.max_duration is not None
    labels = [_with_interval(each.label, each.eval_interval) if trains else each.label for each in state.evaluators]
    parts.append(f"evaluation: {', '.join(labels)}" if labels else "")
    for callback in state.callbacks:
        if callback.saves_checkpoints:
            saver: Any = callback
            parts.append(_with_interval("checkpoints", saver.save_interval) + f" in {_folder(saver, state)}")
    return _joined(*parts)


def _with_interval(name: str, is_due: Any) -> str:
    interval = getattr(is_due, "interval", None)  # missing if it is a user's function
    return name if interval is None else f"{name} every {interval.to_timestring()}"


def _folder(saver: Any, state: State) -> str:
    uploader = saver.remote_uploader
    place = saver.folder if uploader is None else uploader.remote_folder
    return str(place).replace("{run_name}", str(state.run_name))


class BestResults:
    """The best value of each metric of the evaluations so far, with the moment of it."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, str]] = {}

    def lines(self, state: State, results: Mapping[str, Any]) -> list[str]:
        """Take the results of an evaluation, by the names of the metrics, and describe them in a line."""
        label, stamp = state.dataloader_label or "eval", state.timestamp
        is_within = stamp.num_batches_in_epoch or not stamp.num_epochs
        now = f"batch {stamp.num_batches}" if is_within else f"epoch {stamp.num_epochs}"
        metrics: Mapping[str, Any] = state.eval_metrics.get(label, {})
        described: list[str] = []
        for name, number in _numbers(results):
            is_higher = higher_is_better(name, metrics.get(metric_with(metrics, name) or ""))
            best = "" if is_higher is None else self._compare(f"{label}/{name}", number, now, is_higher=is_higher)
            described.append(f"{name} {number:.4g}{best}")
        return [f"{label} at {now}: {', '.join(described)}"] if described else []

    def _compare(self, name: str, number: float, now: str, *, is_higher: bool) -> str:
        best, when = self.found.get(name, (math.nan, ""))
        if not (number <= best if is_higher else number >= best) and not math.isnan(number):
            self.found[name] = number, now
            return " (best)" if when else ""
        return f" (best {best:.4g} at {when})" if when else ""


def _numbers(results: Mapping[str, Any]) -> list[tuple[str, float]]:
    numbers = ((name, as_number(value)) for name, value in results.items())
    return [(name, number) for name, number in numbers if number is not None]


def end_lines(
    state: State, seconds: float, is_early: bool, results: Mapping[str, Any], run_folders: Iterable[str]
) -> list[str]:
    """Describe the end of training: how long it took, the final results, the last checkpoint, and the run page."""
    ended = f"{'Stopped early' if is_early else 'Finished'} at {moment(state)}, in {format_seconds(seconds)}"
    reasons = [reason for _, reason in stop_reasons(state)] if is_early else ()
    numbers = ", ".join(f"{name} {number:.4g}" for name, number in _numbers(results))
    saved = [path for each in state.callbacks for path in getattr(each, "saved_checkpoints", ())[-1:]]
    return [
        ": ".join(filter(None, (ended, *reasons, numbers))),
        *(f"Last checkpoint: {path}" for path in saved),
        *(f"Run page: composer report {folder}" for folder in run_folders),
    ]


def stop_reasons(state: State) -> Iterator[tuple[str, str]]:
    """Yield the class and the `stop_reason` of callbacks and algorithms that have one."""
    for each in (*state.callbacks, *state.algorithms):
        with suppress(Exception):  # a foreign property may raise anything
            reason = getattr(each, "stop_reason", None)
            if isinstance(reason, str):
                yield type(each).__name__, reason


def format_seconds(seconds: float) -> str:
    """Return a duration: `5.2 s`, or `1:02:03` from a minute on."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 3600}:{time.strftime('%M:%S', time.gmtime(seconds))}"


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _joined(*parts: str) -> str:
    return " | ".join(filter(None, parts))

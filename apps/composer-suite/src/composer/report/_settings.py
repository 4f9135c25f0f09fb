"""Settings of a run, read once at its start: model, data, optimizer, schedule, parallelism, script and environment."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from numbers import Integral, Real
from typing import Any, Final, cast

import torch

from composer import _version
from composer.loggers._run_lines import batch_size_of, count_parameters
from composer_dist import get_local_world_size, get_world_size
from composer_dist.wrapping import unwrap_model
from composer_events.logger_destination import LoggerDestination
from composer_events.state import State
from composer_optim import Schedule
from composer_optim.compile import compiled_from
from composer_time import Time

__all__ = ["environment", "fit_settings", "script_facts", "typed_settings"]


def environment(state: State) -> dict[str, Any]:
    """Return the versions, the device and the command of the run."""
    facts: dict[str, Any] = {
        "composer": _version.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "host": platform.node(),
        "num_cpus": os.cpu_count(),
        "device": state.device.name,
        "world_size": get_world_size(),
        "command": sys.argv,
    }
    if state.device.name == "gpu":
        with suppress(Exception):
            facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


_GIT_TIMEOUT_S: Final = 2.0


def script_facts() -> dict[str, Any]:
    """Return the path of the running script and the git commit of its folder, as far as they can be found."""
    script = sys.argv[0] if sys.argv else ""
    is_file = os.path.isfile(script)
    facts: dict[str, Any] = {"script/path": os.path.abspath(script)} if is_file else {}
    folder = os.path.dirname(os.path.realpath(script)) if is_file else os.getcwd()
    with suppress(OSError, subprocess.SubprocessError):  # no git, no answer in time
        facts["script/git_commit"] = _git(folder, "rev-parse", "HEAD")
        facts["script/git_branch"] = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
        facts["script/has_uncommitted_changes"] = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    return facts


def _git(folder: str, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", folder, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        text=True,
        timeout=_GIT_TIMEOUT_S,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # so that reading the status does not write to the index
    )
    return result.stdout.strip()


_LEFT_OUT: Final = object()  # not a plain value, so `_plain_items` drops it
_LONGEST: Final = 100  # items; a longer tuple is data, not a setting
_DEEPEST: Final = 3  # nested lists; this also ends lists that contain themselves
_MOST_BITS: Final = 1024  # larger integers exceed the limits of JSON readers and of Python's own conversion
_WEIGHTS: Final = frozenset({"params", "param_names"})


def typed_settings(state: State) -> dict[str, Any]:
    """Return the settings of the optimizers and the algorithms, by names such as `optimizer/lr`.

    Call it before training, when schedulers and checkpoints have not yet changed the settings of the script. Values
    that are not plain, or are on a device and would require synchronization, are left out.
    """
    found: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    readers: list[tuple[str, Any, Callable[[Any], Mapping[str, Any]]]] = []
    with suppress(Exception):  # foreign objects may raise anything, also below
        readers += [("optimizer", each, _settings_of_groups) for each in state.optimizers]
    with suppress(Exception):
        readers += [(f"algorithms/{type(each).__name__}", each, _arguments) for each in state.algorithms]
    for kind, each, read in readers:
        counts[kind] += 1
        name = kind if counts[kind] == 1 else f"{kind}-{counts[kind]}"  # of repeated names
        if kind == "optimizer":
            found[name] = type(each).__name__
        with suppress(Exception):
            found |= {f"{name}/{key}": value for key, value in read(each).items()}
    return found


def fit_settings(state: State) -> dict[str, Any]:
    """Return the settings of a call of `fit`: model, data, schedulers, callbacks, parallelism, duration and precision.

    Call it when training starts, after the algorithms have changed the model. Values are left out that are not plain,
    or whose objects raise an exception.
    """
    settings = _plain_items({name: getattr(state, name, _LEFT_OUT) for name in ("max_duration", "precision")})
    for read in (_model, _data, _schedulers, _parallelism, _listeners):
        with suppress(Exception):  # foreign objects may raise anything
            settings |= _plain_items(read(state))
    return settings


def _model(state: State) -> dict[str, Any]:
    model: Any = unwrap_model(state.model)
    inner = getattr(model, "module", None)
    num_all, num_trained = count_parameters(model)
    return {
        "model": type(model).__name__,
        "model/module": type(inner).__name__ if isinstance(inner, torch.nn.Module) else _LEFT_OUT,
        "model/num_parameters": num_all,
        "model/num_trainable_parameters": num_trained,
    }


def _data(state: State) -> dict[str, Any]:
    found = _loader("train_dataloader", state.train_dataloader)
    with suppress(Exception):
        found |= {"train_dataloader/num_batches": int(cast("Any", state.dataloader_len))}
    with suppress(Exception):
        for evaluator in state.evaluators:
            loader = getattr(evaluator.dataloader, "dataloader", evaluator.dataloader)  # of a DataSpec
            found |= _loader(f"evaluators/{evaluator.label}", loader)
    return found


def _loader(name: str, loader: Any) -> dict[str, Any]:
    size = batch_size_of(loader)
    found: dict[str, Any] = {} if size is None else {f"{name}/batch_size": size}
    with suppress(Exception):
        found[f"{name}/num_workers"] = loader.num_workers
    with suppress(Exception):
        found[f"{name}/dataset"] = type(loader.dataset).__name__
        found[f"{name}/num_samples"] = len(loader.dataset)
    return found


def _schedulers(state: State) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, each in enumerate(compiled_from(state.schedulers), 1):
        name = "scheduler" if number == 1 else f"scheduler-{number}"
        parts = {name: each}
        if isinstance(each, Schedule):
            parts[f"{name}/curve"] = each.curve
        for key, part in parts.items():
            found[key] = getattr(part, "__name__", type(part).__name__)
            if not inspect.isroutine(part) and not isinstance(part, torch.optim.lr_scheduler.LRScheduler):
                found |= {f"{key}/{argument}": value for argument, value in _arguments(part).items()}
    return found


def _parallelism(state: State) -> dict[str, Any]:
    world_size = get_world_size()
    kind, config = "none", None
    if state.deepspeed_enabled:
        kind, config = "DeepSpeed", state.deepspeed_config
    elif state.fsdp_enabled:
        kind, config = "FSDP", _changed_fields(state.fsdp_config)
    elif state.is_model_ddp or world_size > 1:
        kind = "DDP"
    found = {"parallelism": kind if state.tp_config is None else f"{kind} and tensor parallel"}
    found |= {"parallelism/world_size": world_size, "parallelism/num_nodes": world_size // get_local_world_size()}
    return found | {f"parallelism/{key}": value for key, value in (config or {}).items() if value is not None}


def _changed_fields(config: Any) -> dict[str, Any]:
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    return {
        name: value
        for name, (value, default) in values.items()
        if not name.startswith("_") and value != default and value != ()
    }


def _listeners(state: State) -> dict[str, Any]:
    loggers = [each for each in state.callbacks if isinstance(each, LoggerDestination)]
    others = [each for each in state.callbacks if not isinstance(each, LoggerDestination)]
    return {"algorithms": _names(state.algorithms), "callbacks": _names(others), "loggers": _names(loggers)}


def _names(objects: Iterable[object]) -> str:
    return ", ".join(type(each).__name__ for each in objects) or "none"


def _settings_of_groups(optimizer: Any) -> dict[str, Any]:
    """Return the settings that all parameter groups share, and the rest for each group."""
    groups = [_plain_items(group, _WEIGHTS) for group in optimizer.param_groups]
    common = {
        key: value for key, value in groups[0].items() if all(key in group and group[key] == value for group in groups)
    }
    rest = [(f"group{number}/{key}", key, group[key]) for number, group in enumerate(groups) for key in group]
    return common | {name: value for name, key, value in rest if key not in common}


def _arguments(algorithm: Any) -> dict[str, Any]:
    """Return the attributes with the names of the constructor's parameters.

    Other public attributes may change with each batch, such as the mixing weight of MixUp. They are included only if a
    parameter has no attribute of its name, since one of them probably holds its value. Properties are not read.
    """
    kept: dict[str, Any] = vars(algorithm)  # without properties, whose code could synchronize
    parameters = inspect.signature(type(algorithm)).parameters.values()
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    # The public attribute comes last, so it takes precedence.
    found = {name: kept[key] for name in names for key in (f"_{name}", name) if key in kept}
    if len(found) < len(names) or not names:
        found |= {name: value for name, value in kept.items() if not name.startswith("_")}
    return _plain_items(found)


def _plain_items(settings: Mapping[Any, Any], without: frozenset[str] = frozenset()) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(name, str) and name not in without:
            with suppress(Exception):  # a foreign object may raise anything
                plain[name] = _plain(value)
    return plain


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Enum):  # first, because a member may also be a string or a number
        return _plain(value.value, depth)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Time):
        return str(cast("Time[Any]", value))
    # By exact type: subclasses, such as DTensor, may need a collective to read.
    if type(value) in (torch.Tensor, torch.nn.Parameter) and (value.device.type, value.ndim) == ("cpu", 0):
        return _plain(value.item())
    if isinstance(value, Integral) and int(value).bit_length() <= _MOST_BITS:
        return int(value)
    if isinstance(value, Real):  # NumPy's among them
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (tuple, list)) and len(cast("list[Any]", value)) <= _LONGEST and depth < _DEEPEST:
        return [_plain(item, depth + 1) for item in cast("list[Any]", value)]
    raise TypeError(f"a {type(value).__name__} is not plain")  # no repr: it may read a device

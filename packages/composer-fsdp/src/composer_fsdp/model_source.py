"""Loading of models, batches, functions and settings given on the command line."""

import importlib
import importlib.util
import inspect
import json
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_fsdp.config import FSDP2Config, FSDPConfig, ParallelismConfig, explain_key
from composer_fsdp.parse import parse_parallelism


def load_named(where: str, option: str) -> Any:
    """Load the object named by `path/to/file.py:name` or `package.module:name`."""
    source, _, name = where.rpartition(":")
    if not source or not name:
        raise ValueError(f"{option}={where!r} names no object. Give it as path/to/file.py:name or package.module:name.")
    if source.endswith(".py"):
        module = _load_file(Path(source), option)
    else:
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` does
        module = importlib.import_module(source)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            known = [key for key in vars(module) if not key.startswith("_")]
            raise ValueError(f"{option}={where!r}: {source} has no {name!r}. {explain_key(name, known)}")
        value = getattr(value, part)
    return value


def load_model(where: str) -> tuple[nn.Module, Any]:
    """Create a model, and optionally a batch, on the meta device without allocating memory."""
    named = load_named(where, "MODEL")
    if isinstance(named, nn.Module):
        raise ValueError(
            f"MODEL={where!r} is a {type(named).__name__}, and not what makes one. Name a function without arguments "
            f"that returns it, so that its weights need no memory, and put code that trains it under "
            f"`if __name__ == '__main__':`."
        )
    made = _call(named, where, "MODEL")
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"MODEL={where!r} made {model!r}, a {type(model).__name__}. It has to return a torch.nn.Module, or a pair "
            f"of one and a batch."
        )
    return model, batch


def make_batch(where: str, batch_size: int | None) -> Any:
    """Return the batch made by a function, which is passed `batch_size` if it has such a parameter."""
    return _call(load_named(where, "--batch"), where, "--batch", batch_size=batch_size)


def load_optimizer(where: str) -> Callable[..., torch.optim.Optimizer]:
    """Return an optimizer class of `torch.optim` by name, or load a function that makes one from parameters."""
    if ":" in where:
        return load_named(where, "--optimizer")
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    if where not in kinds:
        raise ValueError(
            f"--optimizer={where!r} is not an optimizer of torch.optim. {explain_key(where, kinds)} For another one, "
            f"give path/to/file.py:name of a function of parameters."
        )
    return kinds[where]


def load_config(text: str | None) -> ParallelismConfig:
    """Load settings given as JSON, a JSON or TOML file, or the name of a Python object.

    Args:
        text: The value of the option; `None` means `FSDPConfig()`. A dict is the value of `parallelism_config`, or of
            its `'fsdp'` entry.
    """
    given: Any = {} if text is None else _read(text)
    if isinstance(given, FSDPConfig):
        return ParallelismConfig(fsdp=given)
    if isinstance(given, FSDP2Config):
        return ParallelismConfig(fsdp2=given)
    if isinstance(given, Mapping) and not {"fsdp", "fsdp2", "tp"} & set(given):
        given = {"fsdp": given}
    config = parse_parallelism(given)
    if config is None:
        raise ValueError(f"--config={text!r} has no settings. Give at least '{{\"fsdp\": {{}}}}'.")
    return config


def _read(text: str) -> Any:
    if text.lstrip().startswith("{"):
        return _parse(text, json.loads, "--config")
    if text.endswith(".toml"):
        return _parse(Path(text).read_text(), tomllib.loads, text)
    if Path(text).is_file():
        return _parse(Path(text).read_text(), json.loads, text)
    if ":" in text:
        return load_named(text, "--config")
    raise ValueError(
        f"--config={text!r} is neither settings nor a file of them. Give JSON such as "
        f'\'{{"sharding_strategy": "FULL_SHARD"}}\', a .json or .toml file, or path/to/file.py:name.'
    )


def _parse(text: str, parse: Callable[[str], Any], where: str) -> Any:
    try:
        given = parse(text)
    except ValueError as error:  # base class of the errors of both parsers
        raise ValueError(f"{where} cannot be read: {error}. It has {text[:80]!r}. Give a table of settings.") from error
    if not isinstance(given, dict):
        raise TypeError(f"{where} holds {given!r}, a {type(given).__name__}. Give a table of settings.")
    return given


def _load_file(path: Path, option: str) -> Any:
    if not path.is_file():
        raise ValueError(f"{option}: there is no file {str(path)!r}. Give it as path/to/file.py:name.")
    name = f"composer_fsdp_given_{path.stem}"
    if getattr(sys.modules.get(name), "__file__", None) == str(path):
        return sys.modules[name]  # run a file once even if several options name it
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    # Registered before it runs, as dataclasses and pickle look up a class's module there.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` does
    spec.loader.exec_module(module)
    return module


def _call(function: Any, where: str, option: str, **known: Any) -> Any:
    if not callable(function):
        raise TypeError(f"{option}={where!r} is {function!r}, which cannot be called. Give a function.")
    try:
        # Pass only the arguments that the function declares.
        taken = {name: value for name, value in known.items() if name in inspect.signature(function).parameters}
        with torch.device("meta"):  # tensors without storage, so that models of any size can be created
            return function(**{name: value for name, value in taken.items() if value is not None})
    except Exception as error:
        raise ValueError(
            f"{option}={where!r} fails with {error!r}. It has to work without arguments, under torch.device('meta'), "
            f"where tensors have no values."
        ) from error

"""The command `composer-fsdp`: what a configuration would do to a model, without doing it."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_fsdp.config import ParallelismConfig
from composer_fsdp.parse import parse_parallelism
from composer_fsdp.plan import ShardingPlan, make_plan
from composer_fsdp.tied import resolve_ties
from composer_fsdp.wrap_rules import Unit, choose_units

__all__ = ["explain", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        model = _make_model(options.model)
        plan = make_plan(_read_config(options.config), precision=options.precision, world_size=options.world_size)
        text = explain(model, plan)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        sys.stderr.write(f"composer-fsdp: {error}\n")
        return 2
    sys.stdout.write(text + "\n")
    return 0


def explain(model: nn.Module, plan: ShardingPlan) -> str:
    """Return the units of a model as a tree, with how many numbers each has and a rank holds, and the settings.

    Args:
        model: A ComposerModel, of which the direct children are sharded. It may be on the meta device.
        plan: How.
    """
    units = resolve_ties(model, choose_units(model, plan), plan.tie_policy)
    taken: set[int] = set()
    rows: dict[str, str] = {}
    for unit in units:
        own = [p for m in (unit.module, *unit.partners) for p in m.parameters() if id(p) not in taken]
        own = list(dict.fromkeys(own))
        taken.update(map(id, own))
        rows[unit.name] = _row(unit, sum(p.numel() for p in own), _shards(plan))
    left = sum(p.numel() for p in model.parameters() if id(p) not in taken)
    lines = [rows[name] for name in sorted(rows, key=lambda name: name.split("."))]
    if left:
        lines.append(f"whole on every rank: {left:,} parameters")
    return "\n".join([*lines, plan.describe()])


def _row(unit: Unit, numel: int, shards: int) -> str:
    depth = unit.name.count(".")
    options = f" {dict(unit.options)}" if unit.options else ""
    sizes = f"{numel:,} parameters, {-(-numel // shards):,} a rank"
    return f"{'  ' * depth}{unit.name} ({type(unit.module).__name__}): {sizes}{options}"


def _shards(plan: ShardingPlan) -> int:
    return plan.degrees.get("data_parallel_shard", 1) if plan.sharding_strategy != "NO_SHARD" else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer-fsdp", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("explain", help="print which modules are sharded as one, and all settings")
    command.add_argument("model", metavar="FILE.py:FUNCTION", help="a function without arguments that makes the model")
    command.add_argument("config", help="a JSON file with the value of parallelism_config, or of its 'fsdp'")
    command.add_argument("--world-size", type=int, default=8, help="over how many ranks (default: 8)")
    command.add_argument("--precision", default="fp32", help="of the run (default: fp32)")
    return parser


def _make_model(where: str) -> nn.Module:
    path, _, name = where.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"MODEL={where!r} names no function of a file. Give it as path/to/file.py:make_model.")
    spec = importlib.util.spec_from_file_location("composer_fsdp_explained", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}. Give one without arguments that makes the model.")
    with torch.device("meta"):  # nothing of it has to fit anywhere
        model: Any = function()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where} returned {model!r}, which is no torch.nn.Module.")
    return model


def _read_config(path: str) -> ParallelismConfig:
    given = json.loads(Path(path).read_text())
    config = parse_parallelism(given if {"fsdp", "fsdp2"} & set(given) else {"fsdp": given})
    if config is None:
        raise ValueError(f"{path} has no settings. Give at least {{'fsdp': {{}}}}.")
    return config

"""Whether what a training state holds besides the weights can be loaded, found out before anything is changed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_checkpoint.errors import IncompatibleCheckpointError, UnfittingOptimizerError, shown
from composer_checkpoint.modular._names import group_names, parameters_by_name
from composer_dist.strategy import canonical_name
from composer_events.batches import ensure_tuple
from composer_time import Timestamp

if TYPE_CHECKING:
    from composer_events import State

__all__ = ["named_optimizers", "refuse_unfitting_state"]

_DICTS = ("optimizers", "timestamp", "dataset_state")


def refuse_unfitting_state(state: "State", saved: Mapping[str, Any], path: str) -> None:
    """Refuse a training state of which a part could not be loaded when the weights would be changed already.

    Args:
        state: The training state, not yet changed.
        saved: The checkpoint's `state`.
        path: The checkpoint, for the message.

    Raises:
        IncompatibleCheckpointError: If a part is not of the kind that training states have.
        UnfittingOptimizerError: If an optimizer has other parameters now.
    """
    for name in _DICTS:
        if saved.get(name) and not isinstance(saved[name], Mapping):
            raise _misshapen(path, f"state/{name}", saved[name], "a dict")
    algorithms: Any = saved.get("algorithms") or []
    if not isinstance(algorithms, Mapping) and not (_is_list(algorithms) and all(map(_is_pair, algorithms))):
        raise _misshapen(path, "state/algorithms", algorithms, "a list of names with their states")
    _refuse_impossible_time(saved.get("timestamp") or {}, path)
    # An engine compares on its own, and algorithms that are applied first may change what is optimized.
    if not state.deepspeed_enabled and not algorithms and isinstance(state.model, nn.Module):
        for name, optimizer in named_optimizers(ensure_tuple(state.optimizers)):
            theirs = (saved.get("optimizers") or {}).get(name)
            if theirs is not None and isinstance(optimizer, torch.optim.Optimizer):
                _refuse_another_optimizer(state.model, optimizer, name, theirs, path)


def _refuse_impossible_time(timestamps: Mapping[str, Any], path: str) -> None:
    if "Timestamp" not in timestamps:
        return  # which is warned about
    timestamp = Timestamp()
    try:
        timestamp.load_state_dict(dict(timestamps["Timestamp"]))
        negative = {
            name: value for name, value in timestamp.state_dict().items() if isinstance(value, int) and value < 0
        }
        if negative:
            raise ValueError(f"{negative} is before the beginning")
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleCheckpointError(
            f"{path} does not say when in training it was saved. Its state/timestamp/Timestamp is none: {error} "
            f"Nothing was changed. Load another checkpoint, or its weights with load_weights_only=True."
        ) from error


def _refuse_another_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, saved: Any, path: str
) -> None:
    if isinstance(saved, Mapping) and "param_groups" not in saved:
        return  # an optimizer with a layout of its own
    where = f"state/optimizers/{name}"
    groups: Any = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not _is_list(groups) or not all(isinstance(each, Mapping) and _is_list(each.get("params")) for each in groups):
        raise _misshapen(path, f"{where}/param_groups", groups, "a list of dicts with 'params'")
    saved_names: list[Any] = [parameter for group in groups for parameter in group["params"]]
    of_parameters: Any = saved.get("state")
    if not isinstance(of_parameters, Mapping) or not all(
        isinstance(of_parameters.get(parameter, {}), Mapping) for parameter in saved_names
    ):
        raise _misshapen(path, f"{where}/state", of_parameters, "a dict with a dict for each parameter")
    sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (optimizer.param_groups, groups))
    if any(isinstance(parameter, int) for parameter in saved_names):
        if sizes != saved_sizes:
            raise _of_other_parameters(path, name, f"has groups of {saved_sizes} parameters, and now of {sizes}")
    # What is sharded, torch loads by rules of its own.
    elif not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        _compare_names(model, optimizer, name, {canonical_name(str(saved_name)) for saved_name in saved_names}, path)


def _compare_names(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, saved_names: set[str], path: str
) -> None:
    # The checkpoint may know a tied weight by any of its names.
    aliases: dict[int, set[str]] = {}
    for alias, parameter in parameters_by_name(model).items():
        aliases.setdefault(id(parameter), set()).add(alias)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    first_names = [first_name for group in group_names(model, optimizer) for first_name in group]
    own = {
        first_name: aliases.get(id(parameter), {first_name})
        for first_name, parameter in zip(first_names, parameters, strict=True)
    }
    missing = sorted(first_name for first_name, names in own.items() if names.isdisjoint(saved_names))
    unexpected = sorted(saved_names.difference(*own.values()))
    if missing:
        told = f"has no state of {missing[0]!r} ({len(missing)} such parameters in all), which is optimized now"
        raise _of_other_parameters(path, name, told)
    if unexpected:
        told = f"has the parameter {shown(unexpected[0])} ({len(unexpected)} in all), which is not optimized now"
        raise _of_other_parameters(path, name, told)


def _of_other_parameters(path: str, name: str, told: str) -> UnfittingOptimizerError:
    return UnfittingOptimizerError(
        f"{path} was saved with an optimizer of other parameters: its {name} {told}. Nothing was changed. Restore the "
        f"model and the optimizer that it was saved with, or load the weights alone with load_weights_only=True."
    )


def _misshapen(path: str, where: str, value: object, expected: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"{path} is no training state: its {where} is {shown(value)}, and should be {expected}. Nothing was changed. "
        f"Load another checkpoint, or leave that out with load_ignore_keys=[{where!r}]."
    )


def named_optimizers(optimizers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Name each optimizer as checkpoints do: by its class; the second of one class is `Name#1`."""
    names: list[str] = []
    for optimizer in optimizers:
        count = names.count(name := type(optimizer).__qualname__)
        names.append(name)
        yield (f"{name}#{count}" if count else name), optimizer


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_pair(value: Any) -> bool:
    return _is_list(value) and len(value) == 2 and isinstance(value[0], str)

"""Optimizer state that `load_ignore_keys` leaves out of a checkpoint, and that the optimizer keeps instead."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from logging import getLogger
from typing import Any

import torch

from composer_checkpoint._spread import group_names
from composer_checkpoint._tree import map_tree
from composer_checkpoint.errors import first_few
from composer_checkpoint.state import name_of_optimizer, owner_of
from composer_dist import dist
from composer_dist.wrapping import canonical_name
from composer_events.batches import ensure_tuple
from composer_events.state import State, named_by_class

log = getLogger(__name__)

_Path = tuple[Any, ...]  # within an optimizer's state: () for all of it, (parameter,), or (parameter, name of a value)


class KeptOptimizers:
    """Complete a checkpoint's optimizers so that they can be loaded, and restore their own values after that.

    `before` is the checkpoint's `state`, and `after` the same without the parts that were left out, changed in place.
    Every rank must create one.
    """

    def __init__(self, state: State, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        strategy: Any = owner_of(state)  # DeepSpeed's, which ignores missing entries
        self._kept: list[tuple[Any, dict[Any, Any], list[_Path], dict[Any, dict[str, Any]]]] = []
        for name, optimizer, keys in _optimizers(state):
            theirs, mine = _optimizer_in(before, name), _optimizer_in(after, name)
            is_given = isinstance(mine, dict) and isinstance(theirs, dict) and "param_groups" in theirs
            lost = _lost_state(theirs, mine) if is_given else []
            # One rank alone may have read the file.
            lost = [path for of_rank in dist.all_gather_object(lost) for path in of_rank]
            if not is_given and not lost:
                continue
            if strategy is None:
                own = self._keep(optimizer, keys, lost)
            else:
                whole = strategy.optimizer_state_dict(state.model, optimizer)["state"] if lost else {}
                own = _by_number_and_key([dict(whole.get(number, {})) for number, _ in enumerate(chain(*keys))], keys)
            if is_given:
                _complete_groups(theirs, mine, keys, [] if strategy else optimizer.param_groups)
                _complete_state(theirs, mine, lost, own, is_whole=strategy is not None)

    def _keep(self, optimizer: Any, keys: Sequence[Sequence[str]], lost: list[_Path]) -> dict[Any, dict[str, Any]]:
        """Record an optimizer's own state, and return it by the numbers and names of its parameters."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = _by_number_and_key([dict(optimizer.state.get(each, {})) for each in parameters], keys)
        self._kept.append((optimizer, _by_number_and_key(parameters, keys), lost, own))
        return own

    def put_back(self) -> None:
        for optimizer, parameters, lost, own in self._kept:
            state = optimizer.state  # loading has replaced the dict
            for path in lost:
                for key in path[:1] or [key for key in own if isinstance(key, int)]:
                    parameter = parameters.get(_canonical(key))
                    values = own.get(_canonical(key), {})
                    if len(path) == 2 and path[1] in values:
                        state[parameter][path[1]] = values[path[1]]
                    elif len(path) < 2 and values:
                        state[parameter] = values
                    elif len(path) < 2 and parameter is not None:
                        state.pop(parameter, None)


def _optimizer_in(saved: Mapping[str, Any], name: str) -> Any:
    return (saved.get("optimizers") or {}).get(name)


def _optimizers(state: State) -> Iterator[tuple[str, Any, Sequence[Sequence[str]]]]:
    """Yield each optimizer with its name in checkpoints, and the names of the parameters in its groups."""
    strategy: Any = owner_of(state)  # DeepSpeed's, which orders parameters differently
    if strategy is None:
        for name, optimizer in named_by_class(ensure_tuple(state.optimizers)):
            yield name, optimizer, group_names(state.model, optimizer) if hasattr(optimizer, "param_groups") else []
        return
    for optimizer in state.optimizers:
        yield name_of_optimizer(state, optimizer), optimizer, strategy.parameter_names(state.model)


def _by_number_and_key(values: Sequence[Any], keys: Sequence[Sequence[str]]) -> dict[Any, Any]:
    return dict(enumerate(values)) | dict(zip(chain(*keys), values, strict=True))


def _complete_groups(
    theirs: Mapping[str, Any], mine: dict[str, Any], keys: Sequence[Sequence[str]], own_groups: Sequence[Any]
) -> None:
    """Fill in settings that were left out, from the optimizer's own groups if they are given."""
    own_settings = [{key: value for key, value in group.items() if key != "params"} for group in own_groups]
    if "param_groups" not in mine:
        # Checkpoints identify parameters either by number or by name.
        is_numbered, numbers = any(isinstance(key, int) for key in theirs.get("state") or ()), count()
        names = [[next(numbers) if is_numbered else key for key in group] for group in keys]
        settings = own_settings or [{} for _ in keys]
        mine["param_groups"] = [{**own, "params": group} for own, group in zip(settings, names, strict=True)]
        return
    saved: Any = theirs["param_groups"]
    left: Any = mine["param_groups"]
    if isinstance(left, list) and all(isinstance(group, Mapping) for group in [*saved, *left]):
        _fill_groups(saved, left, keys, own_settings)
    # Anything else is refused later, with an error about the group.


def _fill_groups(
    saved: Sequence[Any], left: list[Any], keys: Sequence[Sequence[str]], own_settings: Sequence[Mapping[str, Any]]
) -> None:
    if len(left) < len(saved):
        left[:] = [next((each for each in left if each.get("params") == one.get("params")), {}) for one in saved]
    own_of: dict[Any, Mapping[str, Any]] = {}
    numbers = count()
    for own, group in zip(own_settings, keys, strict=False):
        own_of |= dict.fromkeys(group, own) | {next(numbers): own for _ in group}
    for one, group in zip(saved, left, strict=False):
        group.setdefault("params", one.get("params"))
        own = next((own_of[_canonical(key)] for key in group["params"] or () if _canonical(key) in own_of), {})
        group |= {key: own[key] for key in one.keys() - group.keys() if key in own}


def _lost_state(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[_Path]:
    saved, left = theirs.get("state"), mine.get("state")
    if left is None:
        return [()]
    if not isinstance(saved, dict) or not isinstance(left, dict):
        return []
    paths: list[_Path] = [(key,) for key in saved if key not in left]
    for key, values in saved.items():
        if isinstance(values, dict) and isinstance(left.get(key), dict):
            paths += [(key, name) for name in values if name not in left[key]]
    return paths


def _complete_state(
    theirs: Mapping[str, Any], mine: dict[str, Any], lost: Sequence[_Path], own: Mapping[Any, Any], *, is_whole: bool
) -> None:
    """Complete the remaining state, so that each parameter has all of its values or none."""
    state: dict[Any, Any] = mine.setdefault("state", {})
    begun_again: list[Any] = []
    for key, name in (path for path in lost if len(path) == 2):
        if key in state and name not in own.get(_canonical(key), ()):
            del state[key]
            begun_again.append(key)
        elif key in state and not is_whole:
            state[key][name] = theirs["state"][key][name]
    if begun_again:
        log.warning(
            "load_ignore_keys leaves out a part of the optimizer's state of %d parameters, and the optimizer has none "
            "of its own yet, so all of their state is reinitialized: %s",
            len(begun_again),
            first_few(begun_again),
        )


def _canonical(key: Any) -> Any:
    return canonical_name(key) if isinstance(key, str) else key


def leave_out_their_state(state: State, weights: Collection[Any], saved: Mapping[str, Any]) -> None:
    """Remove the state that optimizers and algorithms keep for weights that were left out of a checkpoint, in place.

    `weights` are the names of all weights that the checkpoint had, and `saved` is what is left of its `state`.
    """
    left_out = {*map(_plain, weights)} - {*map(_plain, saved.get("model") or ())}
    if not left_out:
        return
    removed: set[str] = set()
    for optimizer_name, saved_optimizer in (saved.get("optimizers") or {}).items():
        if not isinstance(saved_optimizer, dict) or not isinstance(saved_optimizer.get("state"), dict):
            continue
        names = _names_of_numbers(state, optimizer_name, saved_optimizer)
        for key in list(saved_optimizer["state"]):
            if (name := _plain(names.get(key, key))) in left_out:
                del saved_optimizer["state"][key]
                removed.add(name)

    def prune(_: str, container: Any) -> Any:
        names = container if isinstance(container, dict) else ()
        for key in [key for key in names if torch.is_tensor(container[key]) and _plain(key) in left_out]:
            del container[key]
            removed.add(_plain(key))
        return container

    map_tree(saved.get("algorithms"), prune, shared=True)
    if removed:
        log.warning(
            "load_ignore_keys leaves out %d weights, so what optimizers and algorithms keep of them is left out as "
            "well, and is reinitialized: %s",
            len(removed),
            first_few(sorted(removed)),
        )


def _names_of_numbers(state: State, optimizer_name: str, saved: Mapping[str, Any]) -> dict[Any, str]:
    """Return the names of parameters that old checkpoints number by their position in an optimizer's groups."""
    numbers = [number for group in saved.get("param_groups", ()) for number in group["params"]]
    if not any(isinstance(number, int) for number in numbers):
        return {}
    names = [key for name, _, keys in _optimizers(state) if name == optimizer_name for key in chain(*keys)]
    return dict(zip(numbers, names, strict=False))  # a different number of parameters is refused later


def _plain(name: object) -> str:
    """Return a weight's name without the prefixes of wrappers and weight averages."""
    plain = canonical_name(str(name))
    while plain.startswith("module."):
        plain = plain.removeprefix("module.")
    return plain

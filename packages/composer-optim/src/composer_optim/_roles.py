"""Division of a model's parameters into those that Muon orthogonalizes and those that AdamW updates."""

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]  # has no public name
from torch.nn.parameter import is_lazy

from composer_dist.wrapping import canonical_name

MUON, ADAMW = "muon", "adamw"
_Named = tuple[str | None, Tensor]
_log = logging.getLogger("composer_optim.muon")


def make_groups(params: Any, groups: Sequence[Mapping[str, Any]] | None, known: Iterable[str]) -> list[dict[str, Any]]:
    """Return parameter groups, each with a role.

    Args:
        params: A model, parameters, named parameters, or parameter groups.
        groups: Options of the parameters whose names match a pattern.
        known: Names of the options that a group may have.

    Raises:
        TypeError: If `params` or `groups` has another type, or `groups` is given without names.
        ValueError: If a pattern matches nothing or contradicts another one, or an option is unknown.
    """
    if isinstance(params, nn.Module):
        named = [(canonical_name(name), param) for name, param in params.named_parameters()]
        by_role = _roles_in(params)
        parts = [({}, named, {id(param): by_role[id(param)] for _, param in named})]
    elif isinstance(params, Tensor):
        raise TypeError("params is a single tensor. Pass the model, or a list of parameters.")
    else:
        parts = []
        for group in _as_groups(list(params)):
            # A comprehension would add a level to the stack of the warning on Python 3.11.
            parts.append(_part_of(group))
    chosen = _match(groups or [], [pair for _, named, _ in parts for pair in named], known)
    result: dict[tuple[int, int | None, str], dict[str, Any]] = {}
    for index, (options, named, by_role) in enumerate(parts):
        for name, param in named:
            entry = chosen.get(id(param))
            asked = {} if entry is None or groups is None else {**groups[entry]}
            asked.pop("params", None)
            role = _agreed_role(name, param, asked.pop("role", None), options.get("role"), by_role)
            group = result.setdefault((index, entry, role), {**options, **asked, "role": role, "params": []})
            group["params"].append(param if name is None else (name, param))
    # Matrices first: an algorithm that adds a parameter of no group adds it to the first one.
    return sorted(result.values(), key=lambda group: group["role"] != MUON)


def check_params(params: Iterable[Tensor], names: Sequence[str] | None, role: str, *, is_by_hand: bool) -> None:
    """Raise if an optimizer cannot update a parameter in its role."""
    for index, param in enumerate(params):
        name = f"parameter {index} of the group" if names is None else f"the parameter {names[index]!r}"
        if is_lazy(param):
            raise ValueError(
                f"{name} has no shape yet, which determines its role. Pass a batch through the model before creating "
                "the optimizer."
            )
        if param.is_complex():
            raise ValueError(f"{name} is complex, which Muon does not support. Give it to torch.optim.AdamW.")
        if is_by_hand and role == MUON and param.ndim < 2:
            raise ValueError(
                f"role='muon' cannot be used for {name} of shape {tuple(param.shape)}: only tensors with two or more "
                "dims can be orthogonalized. Use role='adamw' for it."
            )


def _as_groups(params: list[Any]) -> list[Mapping[str, Any]]:
    if not params or not isinstance(params[0], Mapping):
        return [{"params": params}]
    return cast("list[Mapping[str, Any]]", params)


def _part_of(group: Mapping[str, Any]) -> tuple[dict[str, Any], list[_Named], dict[int, str]]:
    """Return the options, the parameters and the roles of a user's group, whose modules are not known."""
    options, content = {key: value for key, value in group.items() if key != "params"}, group["params"]
    listed: list[Any] = [content] if isinstance(content, Tensor) else list(content)
    named: list[_Named] = [
        (canonical_name(each[0]), each[1]) if isinstance(each, tuple) else (None, each) for each in listed
    ]
    if options.get("role") is None and any(param.ndim >= 2 for _, param in named):
        warnings.warn(
            "Muon got parameters without their modules, so that it orthogonalizes the updates of all matrices, "
            "including those of embeddings and of the output layer. Pass the model instead of its parameters, or "
            "groups with a 'role' of 'muon' or 'adamw'.",
            UserWarning,
            stacklevel=4,
        )
    return options, named, {id(param): MUON if param.ndim >= 2 else ADAMW for _, param in named}


def _roles_in(model: nn.Module) -> dict[int, str]:
    """Return the role of each parameter by id: hidden matrices and filters are orthogonalized."""
    roles: dict[int, str] = {}
    last: nn.Module | None = None
    get_head: Any = None
    for module in model.modules():
        is_filter = isinstance(module, _ConvNd)
        for name, param in module.named_parameters(recurse=False):
            if is_lazy(param):
                raise ValueError(
                    f"the parameter {name!r} of a {type(module).__name__} has no shape yet, which determines its role. "
                    "Pass a batch through the model before creating the optimizer."
                )
            is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            is_matrix = param.ndim == 2 or (is_filter and param.ndim > 2)
            role = MUON if is_matrix and not is_embedding else ADAMW
            # AdamW if any owner of a shared weight is an embedding.
            roles[id(param)] = ADAMW if roles.get(id(param)) == ADAMW else role
        if isinstance(module, nn.Linear):
            last = module
        get_head = get_head or getattr(module, "get_output_embeddings", None)  # of Hugging Face models
    for param in _parameters_of_head(model, last, get_head):
        roles[id(param)] = ADAMW
    return roles


def _parameters_of_head(model: nn.Module, last: nn.Module | None, get_head: Any) -> Iterable[nn.Parameter]:
    """Return the parameters of the output layer: the one that the model names, or else its last `nn.Linear`."""
    named = get_head() if get_head is not None else None
    if isinstance(named, nn.Module):
        return named.parameters()
    if last is None:
        return ()
    name = next(name for name, module in model.named_modules() if module is last)
    _log.info("Muon takes %r, the last nn.Linear, for the output layer, which AdamW updates.", name)
    return last.parameters()


def _match(groups: Sequence[Mapping[str, Any]], named: list[_Named], known: Iterable[str]) -> dict[int, int]:
    """Return the position in `groups` of each parameter that one of them matches, by id."""
    chosen: dict[int, int] = {}
    names = [name for name, _ in named if name is not None]
    if groups and len(names) < len(named):
        raise TypeError(
            "groups matches the names of parameters, and params has none. Pass the model, or model.named_parameters()."
        )
    pattern_of: dict[int, str] = {}
    for index, group in enumerate(groups):
        if unknown := sorted({*group} - {*known, "params", "role"}):
            raise ValueError(
                f"groups[{index}] has the unknown option {unknown[0]!r}. Options: {', '.join(sorted(known))}."
            )
        patterns = group.get("params", ())
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            matched = [(name, param) for name, param in named if name is not None and fnmatchcase(name, pattern)]
            if not matched:
                close = get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
                raise ValueError(
                    f"groups[{index}]: the pattern {pattern!r} matches no parameter. Names such as: {', '.join(close)}."
                )
            for name, param in matched:
                other = chosen.setdefault(id(param), index)
                if other != index:
                    raise ValueError(
                        f"the parameter {name!r} matches {pattern_of[id(param)]!r} of groups[{other}] and {pattern!r} "
                        f"of groups[{index}]. Make the patterns disjoint."
                    )
                pattern_of[id(param)] = pattern
    return chosen


def _agreed_role(name: str | None, param: Tensor, asked: Any, given: Any, by_role: Mapping[int, str]) -> str:
    """Return the role by pattern, by group or by shape, of which the first two must not contradict each other."""
    for role in (asked, given):
        if role not in (None, MUON, ADAMW):
            raise ValueError(f"role={role!r} must be 'muon' or 'adamw'.")
    if asked is not None and given is not None and asked != given:
        raise ValueError(
            f"the parameter {name!r} has role={given!r} in params and role={asked!r} in groups. Remove one of them."
        )
    role = asked or given
    if role is None:
        return by_role[id(param)]
    check_params([param], None if name is None else [name], role, is_by_hand=True)
    return role

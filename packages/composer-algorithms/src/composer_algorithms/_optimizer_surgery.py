"""Updates of optimizer parameter groups after modules were replaced."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composer_events import ensure_tuple

__all__ = ["Replacement", "as_optimizers", "follow_replacements", "rename_in_optimizer", "update_params_in_optimizer"]


@dataclass(frozen=True, slots=True)
class Replacement:
    """Record of one replacement: its path, the old parameters and the new module."""

    path: str
    old_params: Mapping[str, Tensor]
    new: nn.Module


_Place = tuple[int, int]  # positions of an optimizer, and of one of its parameter groups


def as_optimizers(optimizers: Any) -> tuple[Optimizer, ...]:
    """Return one optimizer, several or none as a tuple; wrappers with `param_groups` and `state` are accepted."""
    opts = ensure_tuple(optimizers)
    for opt in opts:
        if not (hasattr(opt, "param_groups") and hasattr(opt, "state")):
            raise TypeError(
                f"optimizers holds an object of type {type(opt).__qualname__}, which is not a torch.optim.Optimizer: "
                "pass the model's optimizer, a list of them, or None where it is built afterwards."
            )
    return opts


def update_params_in_optimizer(
    old_params: Iterable[Tensor], new_params: Iterable[Tensor], optimizers: Optimizer | Sequence[Optimizer]
) -> None:
    """Exchange parameters in the group that holds them, and drop the optimizer state of the removed ones.

    Parameters in both sets stay in place. The group keeps its order, and new parameters follow in the given order.

    Args:
        old_params: Parameters of the replaced modules.
        new_params: Parameters of the new modules.
        optimizers: One optimizer, or several of which one holds the old parameters. Changed in place.

    Raises:
        RuntimeError: If there are new parameters but no single group for them: the optimizer has several groups, and
            the old parameters are in none or in more than one of them. Also if the optimizer was built from
            `named_parameters()`: use `replace_module_classes`, which knows the names.
        NotImplementedError: If there are several optimizers and not exactly one of them holds the old parameters.
        TypeError: If `optimizers` contains anything other than optimizers.

    Example:
        >>> import torch
        >>> old, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
        >>> update_params_in_optimizer(old.parameters(), new.parameters(), optimizer)
        >>> optimizer.param_groups[0]["params"][0] is new.weight
        True
    """
    opts = as_optimizers(optimizers)
    old, new = _by_id(old_params), _by_id(new_params)
    removed, added = _without(old, new), _without(new, old)
    if not removed and not added:
        return
    places = _places(opts)
    place = _only_place(opts, {places[key] for key in old if key in places}, "the parameters") if added else None
    _exchange(opts, removed, {key: (tensor, place) for key, tensor in added.items() if place is not None}, names={})


def follow_replacements(
    replacements: Sequence[Replacement], root: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> None:
    """Exchange the parameters of each replacement, putting new ones into the groups of their predecessors.

    A new parameter joins the group of the old ones with the same last name and, if there are several, the same number
    of dims, so that weights stay with weights and biases with biases. A frozen parameter joins only if its predecessor
    was frozen in a group, too.
    """
    opts: tuple[Optimizer, ...] = ensure_tuple(optimizers)
    names = {id(tensor): name for name, tensor in root.named_parameters()}
    for replacement in replacements:
        places = _places(opts)  # again for each, since nested replacements move parameters that were just added
        new_params = dict(replacement.new.named_parameters())
        kept = _by_id(replacement.old_params.values())
        removed = _without(kept, _by_id(new_params.values()))
        added: dict[int, tuple[Tensor, _Place]] = {}
        for name, tensor in new_params.items():
            # Shared parameters may be in an optimizer already, and torch rejects a parameter in two groups.
            if id(tensor) in kept or id(tensor) in places or not _is_optimized(name, tensor, replacement, places):
                continue
            candidates = _predecessors_places(name, tensor, replacement, places)
            what = f"the parameter {f'{replacement.path}.{name}'.lstrip('.')!r}"
            added[id(tensor)] = (tensor, _only_place(opts, candidates, what))
        _exchange(opts, removed, added, names)


def rename_in_optimizer(root: nn.Module, optimizers: Optimizer | Sequence[Optimizer] | None) -> None:
    """Update the parameter names in optimizers that were built from `named_parameters()`."""
    names = {id(tensor): name for name, tensor in root.named_parameters()}
    for optimizer in ensure_tuple(optimizers):
        _exchange((optimizer,), {}, {}, names)


def _by_id(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    # By identity: comparing tensors with == is elementwise.
    return {id(tensor): tensor for tensor in tensors}


def _without(tensors: Mapping[int, Tensor], others: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key not in others}


def _places(optimizers: Sequence[Optimizer]) -> dict[int, _Place]:
    return {
        id(tensor): (o, g)
        for o, optimizer in enumerate(optimizers)
        for g, group in enumerate(optimizer.param_groups)
        for tensor in group["params"]
    }


def _is_optimized(name: str, tensor: Tensor, replacement: Replacement, places: Mapping[int, _Place]) -> bool:
    if tensor.requires_grad:
        return True
    leaf, old_params = name.rpartition(".")[2], replacement.old_params
    alike = [old for old_name, old in old_params.items() if old_name.rpartition(".")[2] == leaf]
    own = old_params.get(name)
    return any(id(old) in places and not old.requires_grad for old in (alike if own is None else [own]))


def _predecessors_places(
    name: str, tensor: Tensor, replacement: Replacement, places: Mapping[int, _Place]
) -> set[_Place]:
    if name in replacement.old_params and id(replacement.old_params[name]) in places:
        return {places[id(replacement.old_params[name])]}
    known = {old_name: old for old_name, old in replacement.old_params.items() if id(old) in places}
    same_leaf = [old for old_name, old in known.items() if old_name.rpartition(".")[2] == name.rpartition(".")[2]]
    same_dims = [old for old in same_leaf if old.ndim == tensor.ndim]
    for likely in (same_dims, same_leaf):  # the closest matches first
        if len(found := {places[id(old)] for old in likely}) == 1:
            return found
    return {places[id(old)] for old in known.values()}


def _only_place(optimizers: Sequence[Optimizer], candidates: set[_Place], what: str) -> _Place:
    if len(candidates) == 1:
        return next(iter(candidates))
    if len(optimizers) == 1 and len(optimizers[0].param_groups) == 1:
        return (0, 0)  # a single group is the only place, also for parameters without a predecessor
    where = "more than one" if candidates else "none"
    error = RuntimeError if len(optimizers) == 1 else NotImplementedError
    raise error(
        f"no single parameter group fits {what} of a module that was replaced: the parameters of the module "
        f"before are in {where} of the {sum(len(one.param_groups) for one in optimizers)} groups of "
        f"{len(optimizers)} optimizer(s). Replace modules first and build the optimizer from the changed model."
    )


def _exchange(
    optimizers: Sequence[Optimizer],
    removed: Mapping[int, Tensor],
    added: Mapping[int, tuple[Tensor, _Place]],
    names: Mapping[int, str],
) -> None:
    for o, optimizer in enumerate(optimizers):
        for tensor in removed.values():
            optimizer.state.pop(tensor, None)
        for g, group in enumerate(optimizer.param_groups):
            # Groups are changed in place, since schedulers and wrappers of the optimizer hold the same dicts.
            newcomers = [tensor for tensor, place in added.values() if place == (o, g)]
            if "param_names" in group:  # parallel to "params" since torch 2.6
                if any(id(tensor) not in names for tensor in newcomers):
                    raise RuntimeError(
                        "the optimizer was built from named_parameters(), and names of new parameters are not known "
                        "here: use replace_module_classes with optimizers=, which knows them, or rebuild the optimizer."
                    )
                pairs = zip(group["params"], group["param_names"], strict=True)
                kept = [names.get(id(tensor), name) for tensor, name in pairs if id(tensor) not in removed]
                group["param_names"] = kept + [names[id(tensor)] for tensor in newcomers]
            group["params"] = [tensor for tensor in group["params"] if id(tensor) not in removed] + newcomers

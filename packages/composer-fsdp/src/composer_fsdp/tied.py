"""Weights that several modules share, which may not be torn apart."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from composer_dist.strategy import canonical_name
from composer_fsdp.wrap_rules import Unit

__all__ = [
    "check_param_tying",
    "get_standalone_and_tied_modules",
    "legalize_param_sharing_between_modules",
    "resolve_ties",
]


def get_standalone_and_tied_modules(modules: Sequence[nn.Module]) -> tuple[list[nn.Module], set[nn.Module]]:
    """Return those modules that share no weights with another of them, in their order, and those that do.

    A module inside another one shares its weights with it. Modules without parameters are in neither.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in modules:
        for parameter in module.parameters():
            owners.setdefault(id(parameter), []).append(module)
    tied = {module for sharing in owners.values() if len(sharing) > 1 for module in sharing}
    standalone = [m for m in modules if m not in tied and next(m.parameters(), None) is not None]
    return standalone, tied


def legalize_param_sharing_between_modules(
    model: nn.Module, modules_to_shard: Sequence[nn.Module], whole: Collection[nn.Parameter] = ()
) -> None:
    """Refuse modules that share weights with a part of the model which is sharded otherwise, or not at all.

    Args:
        model: With all of them.
        modules_to_shard: Each by itself.
        whole: Parameters that are not sharded wherever they are, which anybody may share.

    Raises:
        ValueError: If a module outside of those to be sharded has one of their weights.
    """
    names = {id(module): name for name, module in model.named_modules()}
    spared = set(map(id, whole))
    owner = {id(p): module for module in modules_to_shard for p in module.parameters() if id(p) not in spared}
    listed = {id(module) for module in modules_to_shard}
    for module in _outside(model, listed, set()):
        for parameter in module.parameters(recurse=False):
            if id(parameter) in owner:
                raise ValueError(
                    f"Parameter sharing detected between modules to be sharded and module "
                    f"{names.get(id(module), '')!r}: {names.get(id(owner[id(parameter)]), '')!r} has the same weights. "
                    f"Shard the module that holds both instead, or keep weights of its own for each."
                )


@contextmanager
def check_param_tying(model: nn.Module) -> Iterator[None]:
    """Refuse to let anything inside the context tie weights or tear tied ones apart.

    Raises:
        RuntimeError: On leaving, if the groups of names that belong to one parameter are others than before.
    """
    before = _name_groups(model)
    yield
    after = _name_groups(model)
    if before != after:
        changed = sorted(", ".join(sorted(names)) for names in before ^ after if len(names) > 1)
        raise RuntimeError(
            f"Parameter tying relationship changed during the context: of {'; '.join(changed)}. Assign the shared "
            f"weight to all its names again where it is made anew."
        )


def resolve_ties(
    model: nn.Module, units: Sequence[Unit], policy: str, whole: Collection[nn.Parameter] = ()
) -> list[Unit]:
    """Return units of which no two share weights, each after those inside it.

    Args:
        model: Whose units they are.
        units: As they were chosen.
        policy: What becomes of units that do: `'error'`, or `'group'` to make them one.
        whole: Parameters that are not sharded wherever they are, which anybody may share.

    Raises:
        ValueError: If units share weights and may not be made one, or if they share them with what is no unit.
    """
    resolved, spared = list(units), set(map(id, whole))
    inner = {id(unit.module): {id(m) for m in unit.module.modules()} for unit in resolved}
    for unit in units:
        for other in units:
            nested = id(other.module) in inner[id(unit.module)] or id(unit.module) in inner[id(other.module)]
            if nested or unit not in resolved or other not in resolved or not _share(unit, other, spared):
                continue
            if policy != "group" or unit.is_root or other.is_root:
                raise ValueError(
                    f"Detected tied parameters between modules designated for FSDP wrapping: {unit.name!r} and "
                    f"{other.name!r} have the same weights. Shard the module that holds both instead, or set "
                    f"tie_policy='group' to shard the two together."
                )
            kept = replace(unit, partners=(*unit.partners, other.module, *other.partners))
            resolved = [kept if entry is unit else entry for entry in resolved if entry is not other]
            inner[id(kept.module)] |= inner[id(other.module)]
            unit = kept
    for root in [unit for unit in resolved if unit.is_root]:
        below = [m for u in resolved if not u.is_root and id(u.module) in inner[id(root.module)] for m in _modules(u)]
        _refuse_ties_outwards(root.module, below, whole)
    legalize_param_sharing_between_modules(model, [m for u in resolved if u.is_root for m in _modules(u)], whole)
    return resolved


def _modules(unit: Unit) -> tuple[nn.Module, ...]:
    return (unit.module, *unit.partners)


def _share(unit: Unit, other: Unit, spared: set[int]) -> bool:
    own = {id(p) for module in _modules(unit) for p in module.parameters()} - spared
    return unit is not other and any(id(p) in own for module in _modules(other) for p in module.parameters())


def _refuse_ties_outwards(root: nn.Module, below: Sequence[nn.Module], whole: Collection[nn.Parameter]) -> None:
    """Refuse units that share weights with a part of the root's own unit, at any depth of units."""
    legalize_param_sharing_between_modules(root, below, whole)
    for module in below:
        inside = {id(m) for m in module.modules()} - {id(module)}
        deeper = [other for other in below if id(other) in inside]
        if deeper:
            legalize_param_sharing_between_modules(module, deeper, whole)


def _outside(module: nn.Module, listed: set[int], seen: set[int]) -> Iterator[nn.Module]:
    """Yield a module and its descendants, without entering those that are listed."""
    if id(module) in seen or id(module) in listed:
        return
    seen.add(id(module))
    yield module
    for child in module.children():
        yield from _outside(child, listed, seen)


def _name_groups(model: nn.Module) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(canonical_name(name))
    return {frozenset(names) for names in groups.values()}

"""What a replacement takes over from the module whose place it takes."""

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["TiedParameters", "adopt", "hand_over_hooks", "twin"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

MARK_PREFIX = "_already_"
"""How attributes begin that say what was done to a module, so that it is not done again to what takes its place."""

# nn.Module has no public way to hand over hooks. These are its dicts of them, from a handle's id to the hook.
_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def adopt(old: nn.Module, new: nn.Module, default_device: torch.device | None) -> None:
    """Give a replacement the device, dtype, memory format, mode, frozenness, marks and hooks of the old module.

    Modules of the old one that the new one contains stay as they are. The dtype changes only for tensors in torch's
    default dtype: another one was chosen on purpose.
    """
    kept = set(old.modules())
    tensors = [*old.parameters(), *old.buffers()]
    device = tensors[0].device if tensors else default_device
    _convert(new, kept, device, _only_dtype(old.parameters()), _memory_format(old.parameters()))
    marks = {name: value for name, value in vars(old).items() if name.startswith(MARK_PREFIX)}
    for module in new.modules():
        if module not in kept:
            module.training = old.training
            module.__dict__.update(marks)
    _freeze_alike(old, new)
    if old not in new.modules():  # otherwise they still fire where they are
        hand_over_hooks(old, new)


def twin(module: ModuleT) -> ModuleT:
    """Copy a module with its parameters, buffers and submodules, but not the hooks.

    Hooks may belong to objects of any size, which `copy.deepcopy` would copy with them.
    """
    other = type(module).__new__(type(module))  # copy.copy refuses modules with parametrizations
    other.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        setattr(other, name, copy.deepcopy(getattr(module, name)))
    for name in _HOOK_DICTS:
        setattr(other, name, type(getattr(module, name))())
    return other


class TiedParameters:
    """Keep parameters that several modules share shared, while modules are replaced.

    Args:
        root: The model that owns all of them.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in root.modules():
            self._add_owner(module)

    def follow(self, path: str, old: nn.Module, old_params: Mapping[str, Tensor], new: nn.Module) -> None:
        """Point other owners of the old module's parameters to those that took their place.

        Call it while the old module is still in the tree.

        Raises:
            ValueError: If the new module has no parameter to take the place of a shared one.
        """
        new_params = dict(new.named_parameters())
        kept = {id(tensor) for tensor in new_params.values()}
        for name, tensor in old_params.items():
            if id(tensor) in kept or len(self._owners.get(id(tensor), ())) < 2:
                continue
            inside = set(old.modules())
            live = {module for module in self._root.modules() if module not in inside}
            others = [
                (module, key)
                for module, key in self._owners[id(tensor)]
                if module in live and module._parameters.get(key) is tensor
            ]
            if others:
                successor = _successor(path, name, tensor, new_params)
                for module, key in others:
                    setattr(module, key, successor)
                self._owners.setdefault(id(successor), []).extend(others)
        for module in new.modules():
            self._add_owner(module)

    def _add_owner(self, module: nn.Module) -> None:
        for name, tensor in module.named_parameters(recurse=False):
            owners = self._owners.setdefault(id(tensor), [])
            if not any(owner is module and key == name for owner, key in owners):
                owners.append((module, name))


def _successor(path: str, name: str, tensor: Tensor, new_params: Mapping[str, Tensor]) -> Tensor:
    alike = [
        one for new_name, one in new_params.items() if one.shape == tensor.shape and f".{new_name}".endswith(f".{name}")
    ]
    if len(alike) != 1:
        raise ValueError(
            f"the module {path!r} shares its parameter {name!r} of shape {tuple(tensor.shape)} with another module, "
            f"and its replacement has {len(alike)} parameters of that name and shape to share: leave this module as "
            f"it is (let the policy return None), or untie the two first."
        )
    return alike[0]


def _only_dtype(tensors: Iterable[Tensor]) -> torch.dtype | None:
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _memory_format(tensors: Iterable[Tensor]) -> torch.memory_format | None:
    for tensor in tensors:
        if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
            return torch.channels_last
    return None


def _convert(
    new: nn.Module,
    kept: Collection[nn.Module],
    device: torch.device | None,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None,
) -> None:
    shared = {id(tensor) for module in kept for tensor in module.parameters(recurse=False)}

    def converted(tensor: Tensor) -> Tensor:
        if id(tensor) in shared:
            return tensor
        options: dict[str, Any] = {"device": device}
        if dtype is not None and tensor.dtype == torch.get_default_dtype():
            options["dtype"] = dtype
        if memory_format is not None and tensor.ndim == 4:
            options["memory_format"] = memory_format
        return tensor.to(**options)

    for module in new.modules():
        if module not in kept:
            # The method behind `Module.to`, which has no way to leave out submodules.
            module._apply(converted, recurse=False)


def _freeze_alike(old: nn.Module, new: nn.Module) -> None:
    old_params = dict(old.named_parameters())
    if not old_params or all(tensor.requires_grad for tensor in old_params.values()):
        return
    own = {id(tensor) for tensor in old_params.values()}
    for name, tensor in new.named_parameters():
        if id(tensor) in own:
            continue
        leaf = name.rpartition(".")[2]
        alike = [one for key, one in old_params.items() if key.rpartition(".")[2] == leaf]
        tensor.requires_grad_(any(one.requires_grad for one in alike or old_params.values()))


def hand_over_hooks(old: nn.Module, new: nn.Module) -> None:
    """Let the hooks of one module fire for another; their handles remove them from both."""
    for name in _HOOK_DICTS:
        hooks, own = getattr(old, name), getattr(new, name)
        if hooks and hooks is not own:
            # The dict itself, because that is what the handles remove their hook from.
            hooks.update(own)
            setattr(new, name, hooks)
    if old._is_full_backward_hook is not None and new._is_full_backward_hook is None:
        new._is_full_backward_hook = old._is_full_backward_hook

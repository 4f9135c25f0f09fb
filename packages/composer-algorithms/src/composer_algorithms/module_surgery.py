"""Module surgery: replace modules of a model and update devices, shared parameters and optimizers to match."""

import copy
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_algorithms._optimizer_surgery import (
    Replacement,
    as_optimizers,
    follow_replacements,
    update_params_in_optimizer,
)
from composer_dist.wrapping import canonical_name, is_model_deepspeed, unwrap_model
from composer_events.arguments import loaded

__all__ = ["ReplacementFunction", "count_module_instances", "replace_module_classes", "update_params_in_optimizer"]

_log = logging.getLogger("composer.algorithms.module_surgery")

ModuleT = TypeVar("ModuleT", bound=nn.Module)

MARK_PREFIX = "_already_"
"""Prefix of attributes that record a change of a module. Replacements inherit them, so no change is made twice."""

# nn.Module has no public way to move hooks. These are its dicts from the id of a handle to the hook.
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
    """Transfer device, dtype, memory format, mode, `requires_grad`, marks and hooks from a module to its replacement.

    Submodules of the old module that the new one contains are not changed. Only tensors in torch's default dtype change
    dtype: any other was chosen on purpose.
    """
    kept = set(old.modules())
    tensors = [*old.parameters(), *old.buffers()]
    # With several dtypes, the one for a new tensor would be ambiguous.
    dtypes = {tensor.dtype for tensor in old.parameters() if tensor.is_floating_point()}
    is_channels_last = any(map(_is_channels_last, old.parameters()))
    shared = {id(tensor) for module in kept for tensor in module.parameters(recurse=False)}

    def converted(tensor: Tensor) -> Tensor:
        if id(tensor) in shared:
            return tensor
        options: dict[str, Any] = {"device": tensors[0].device if tensors else default_device}
        if len(dtypes) == 1 and tensor.dtype == torch.get_default_dtype():
            options["dtype"] = next(iter(dtypes))
        if is_channels_last and tensor.ndim == 4:
            options["memory_format"] = torch.channels_last
        return tensor.to(**options)

    marks = {name: value for name, value in vars(old).items() if name.startswith(MARK_PREFIX)}
    for module in new.modules():
        if module not in kept:
            # `Module.to` is built on this method, but cannot exclude submodules.
            module._apply(converted, recurse=False)
            module.training = old.training
            module.__dict__.update(marks)
    _freeze_alike(old, new)
    if old not in new.modules():  # otherwise the hooks still fire for the old module
        transfer_hooks(old, new)


def twin(module: ModuleT) -> ModuleT:
    """Copy a module with its parameters, buffers and submodules, but without its hooks.

    `copy.deepcopy` would also copy the objects that hooks refer to, which may be large.
    """
    other = type(module).__new__(type(module))  # copy.copy refuses modules with parametrizations
    other.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        setattr(other, name, copy.deepcopy(getattr(module, name)))
    for name in _HOOK_DICTS:
        setattr(other, name, type(getattr(module, name))())
    return other


class TiedParameters:
    """Parameters shared by several modules, which stay shared while modules are replaced."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in root.modules():
            self._add_owner(module)

    def follow(self, path: str, old: nn.Module, old_params: Mapping[str, Tensor], new: nn.Module) -> None:
        """Set the replacements of the old module's parameters in their other owners, while it is still in the tree."""
        new_params = dict(new.named_parameters())
        kept = {id(tensor) for tensor in new_params.values()}
        for name, tensor in old_params.items():
            if id(tensor) in kept or len(self._owners.get(id(tensor), ())) < 2:
                continue
            inside = set(old.modules())
            # Owners may have been replaced themselves since they were recorded.
            live = {module for module in self._root.modules() if module not in inside}
            others = [
                (module, key)
                for module, key in self._owners[id(tensor)]
                if module in live and module._parameters.get(key) is tensor
            ]
            if others:
                # By the end of the name, as a replacement often wraps the old layer: `weight` becomes `conv.weight`.
                alike = [
                    one
                    for new_name, one in new_params.items()
                    if one.shape == tensor.shape and f".{new_name}".endswith(f".{name}")
                ]
                if len(alike) != 1:
                    raise ValueError(
                        f"the module {path!r} shares its parameter {name!r} of shape {tuple(tensor.shape)} with "
                        f"another module, and its replacement has {len(alike)} parameters of that name and shape to "
                        f"share: leave this module as it is (let the policy return None), or untie the two first."
                    )
                (successor,) = alike
                for module, key in others:
                    setattr(module, key, successor)
                # A later replacement of `new` must find the same owners.
                self._owners.setdefault(id(successor), []).extend(others)
        for module in new.modules():
            self._add_owner(module)

    def _add_owner(self, module: nn.Module) -> None:
        for name, tensor in module.named_parameters(recurse=False):
            owners = self._owners.setdefault(id(tensor), [])
            if not any(owner is module and key == name for owner, key in owners):
                owners.append((module, name))


def _is_channels_last(tensor: Tensor) -> bool:
    # Filters of 1x1 are contiguous in both formats, so they do not determine the format of the model.
    is_contiguous = tensor.is_contiguous()
    return tensor.ndim == 4 and not is_contiguous and tensor.is_contiguous(memory_format=torch.channels_last)


def _freeze_alike(old: nn.Module, new: nn.Module) -> None:
    old_params = dict(old.named_parameters())
    # The common case: new parameters train by default.
    if not old_params or all(tensor.requires_grad for tensor in old_params.values()):
        return
    own = {id(tensor) for tensor in old_params.values()}
    for name, tensor in new.named_parameters():
        if id(tensor) in own:
            continue
        leaf = name.rpartition(".")[2]
        # A parameter with a new name, such as a bias that did not exist, is trained if any old one was.
        alike = [one for key, one in old_params.items() if key.rpartition(".")[2] == leaf]
        tensor.requires_grad_(any(one.requires_grad for one in alike or old_params.values()))


def transfer_hooks(old: nn.Module, new: nn.Module) -> None:
    """Make the hooks of one module fire for another; their handles remove them from both."""
    for name in _HOOK_DICTS:
        hooks, own = getattr(old, name), getattr(new, name)
        if hooks and hooks is not own:
            # Share the dict itself: a handle removes its hook from the dict it was registered in.
            hooks.update(own)
            setattr(new, name, hooks)
    # By this flag torch calls the backward hooks as full or as legacy ones.
    if old._is_full_backward_hook is not None and new._is_full_backward_hook is None:
        new._is_full_backward_hook = old._is_full_backward_hook


class ReplacementFunction(Protocol):
    """Policy that returns the replacement of a module, the module itself changed in place, or `None` for no change.

    The second argument is the number of modules of the policy's class that were visited before this one.
    """

    def __call__(self, module: Any, module_index: int, /) -> nn.Module | None:
        """Return the replacement of one module."""
        ...


@dataclass(slots=True)
class _Site:
    """Module of the model, and all of its parents with the name it has in each."""

    module: nn.Module
    path: str
    parents: list[tuple[nn.Module, str]] = field(default_factory=list)


def replace_module_classes(
    module: nn.Module,
    policies: Mapping[type[nn.Module], ReplacementFunction],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    recurse_on_replacements: bool = False,
    indices: MutableMapping[type[nn.Module], int] | None = None,
    *,
    include_root: bool = False,
) -> dict[nn.Module, nn.Module]:
    """Replace modules by their class.

    Each module below `module` is visited once, parents before their children, in the order of registration; children of
    replaced modules are visited, too. A replacement is set in all parents of the old module. It gets the old module's
    device, dtype (unless created in a dtype other than torch's default), memory format, training mode and hooks, and is
    frozen if the old module was. Parameters shared with other modules stay shared. Copying weights is up to the
    policies.

    Args:
        module: The model; changed in place.
        policies: Function to call for instances of each class, including subclasses.
        optimizers: Optimizers to update: new parameters join the groups of the old ones, whose state is dropped.
            Optimizers that are created later need not be passed.
        recurse_on_replacements: Also visit replacements and their submodules. This never ends if a policy always
            returns an instance of its own class.
        indices: First `module_index` of each policy's class. Changed in place.
        include_root: Also call the policies for `module` itself, which they may only change in place.

    Returns:
        Result of the policy for each module where it is not `None`, in the order of the visits.

    Raises:
        TypeError: If `module` is a `DistributedDataParallel`, `optimizers` contains another object,
            or a policy returns a new module for the root.
        ValueError: If a replaced parameter is shared, and the replacement has no matching parameter.
        RuntimeError: If two policies replace the same module, or no parameter group fits a new parameter.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> _ = replace_module_classes(model, {torch.nn.ReLU: lambda module, index: torch.nn.GELU()})
        >>> model[1]
        GELU(approximate='none')
    """
    if isinstance(module, DistributedDataParallel):
        raise TypeError(
            "the model is wrapped by DistributedDataParallel, which has registered the parameters that a replacement "
            "would remove: replace modules first and wrap the changed model."
        )
    optimizers = as_optimizers(optimizers)  # raises before the model is changed
    queue = deque(_sites(module))
    if include_root:
        queue.appendleft(_Site(module, ""))
    counts = dict.fromkeys(policies, 0) if indices is None else indices
    ties = TiedParameters(module)
    replaced: dict[nn.Module, nn.Module] = {}
    replacements: list[Replacement] = []
    while queue:
        site = queue.popleft()
        # Before the policy is called, which may change the module in place.
        old_params = dict(site.module.named_parameters()) if isinstance(site.module, tuple(policies)) else {}
        new = _ask(site, policies, counts)
        if new is None:
            continue
        replaced[site.module] = new
        replacements.append(Replacement(site.path, old_params, new))
        if new is not site.module:
            _hang(site, new, old_params, ties, module)
            if recurse_on_replacements:
                queue.append(_Site(new, site.path, site.parents))
                queue.extend(_sites(new, site.path))
    if replacements and optimizers:
        # Once at the end, when the names of all parameters in the model are final.
        follow_replacements(replacements, module, optimizers)
    elif replacements:
        _log.info(
            "%d modules were replaced, and no optimizer was passed: one that was built before does not train the new "
            "parameters.",
            len(replacements),
        )
    return replaced


def count_module_instances(module: nn.Module, module_class: type[nn.Module] | tuple[type[nn.Module], ...]) -> int:
    """Count the submodules of a class, each once, excluding the module itself.

    Args:
        module: The model.
        module_class: A class or a tuple of classes.

    Example:
        >>> count_module_instances(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(1, 1)), torch.nn.ReLU)
        1
    """
    return sum(isinstance(one, module_class) for one in module.modules() if one is not module)


def _sites(root: nn.Module, prefix: str = "") -> list[_Site]:
    """List the submodules of the root, each once, with all of its parents."""
    found: dict[nn.Module, _Site] = {}

    def visit(parent: nn.Module, path: str) -> None:
        for name, child in parent._modules.items():  # named_children skips the second name of a child
            if child is None:
                continue
            child_path = f"{path}.{name}" if path else name
            is_new = child not in found and child is not root
            site = found.setdefault(child, _Site(child, child_path)) if child is not root else None
            if site is not None:
                site.parents.append((parent, name))
            if is_new:
                visit(child, child_path)

    visit(root, prefix)
    return list(found.values())


def _ask(
    site: _Site, policies: Mapping[type[nn.Module], ReplacementFunction], counts: MutableMapping[type[nn.Module], int]
) -> nn.Module | None:
    answer: nn.Module | None = None
    # All matching policies are called, so that each one's index counts every instance of its class.
    for module_class, policy in policies.items():
        if not isinstance(site.module, module_class):
            continue
        index = counts.setdefault(module_class, 0)
        counts[module_class] = index + 1
        try:
            new = policy(site.module, index)
        except Exception as error:
            error.add_note(f"raised for the module {site.path!r}, a {type(site.module).__qualname__}")
            raise
        if new is not None and answer is not None:
            raise RuntimeError(
                f"two policies replace the module {site.path!r}, a {type(site.module).__qualname__}: one by a "
                f"{type(answer).__qualname__}, one by a {type(new).__qualname__}. Let one of them return None."
            )
        answer = new if new is not None else answer
    return answer


def _hang(site: _Site, new: nn.Module, old_params: Mapping[str, Tensor], ties: TiedParameters, root: nn.Module) -> None:
    if not site.parents:
        raise TypeError(
            f"the model itself, a {type(site.module).__qualname__}, cannot be replaced, since it has no parent: a "
            f"policy returned a new {type(new).__qualname__}. Put the model into an nn.Sequential first."
        )
    first = next(itertools.chain(root.parameters(), root.buffers()), None)
    # Before `follow` records the new parameters: a conversion may replace Parameter objects.
    adopt(site.module, new, None if first is None else first.device)
    ties.follow(site.path, site.module, old_params, new)  # needs the old module in the tree
    for parent, name in site.parents:
        setattr(parent, name, new)


def canonical_parameters(model: nn.Module, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return the model's parameters by canonical name, tied ones once or under each of their names.

    For a DeepSpeed engine, these are the whole parameters that its optimizer updates. They may be copies, so write
    changes back with `write_parameters`. Every rank must call this.
    """
    named = unwrap_model(model).named_parameters(remove_duplicate=remove_duplicate)
    if is_model_deepspeed(model):
        from composer_dist.deepspeed_state import gather_weights  # most runs do not need it

        weights = gather_weights(model)
        named = [(name, weights[name].requires_grad_(parameter.requires_grad)) for name, parameter in named]
    return {canonical_name(name): tensor for name, tensor in named}


def write_parameters(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write changed tensors of `canonical_parameters` back to a DeepSpeed engine, for which they may be copies."""
    if is_model_deepspeed(model):
        from composer_dist.deepspeed_state import scatter_weights

        names = {canonical_name(name): name for name in unwrap_model(model).state_dict()}
        scatter_weights(model, {names[name]: value for name, value in values.items()}, strict=False)


def canonical_buffers(model: nn.Module, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return the model's buffers by canonical name, including non-persistent ones."""
    named = unwrap_model(model).named_buffers(remove_duplicate=remove_duplicate)
    return {canonical_name(name): tensor for name, tensor in named}


@contextmanager
def get_model_context_manager(model: nn.Module) -> Iterator[None]:
    """Make the parameters of a sharded model readable and writable.

    For FSDP2 (`fully_shard`), reshard parameters that forward left gathered, so that they are DTensors. For FSDP1,
    gather the whole parameters and scatter them at the end. Every rank must enter the context. For other models, do
    nothing.
    """
    for module in _sharded_modules(model, "FSDPModule"):
        module.reshard()
    if not has_flat_parameters(model):
        yield
        return
    from torch.distributed.fsdp import FullyShardedDataParallel  # already loaded, since the model is one

    with FullyShardedDataParallel.summon_full_params(model):
        yield


def has_flat_parameters(model: nn.Module) -> bool:
    """Return whether FSDP1 keeps parameters of the model as slices of flat tensors."""
    return bool(_sharded_modules(model, "FullyShardedDataParallel"))


def _sharded_modules(model: nn.Module, kind: str) -> list[Any]:
    fsdp = loaded("torch.distributed.fsdp")  # slow to import; unloaded, it cannot have sharded the model
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, getattr(fsdp, kind))]


def is_dtensor(tensor: Any) -> bool:
    """Return whether the tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")  # its class is slow to import


def place_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor on the device of `like`, and distributed in the same way.

    If only one of the two is a DTensor, every rank must call this.
    """
    if is_dtensor(like) and not is_dtensor(tensor):
        from torch.distributed.tensor import distribute_tensor  # already loaded, as `like` is a DTensor

        # Every rank has the whole tensor and takes its shard from it, so no data is sent.
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's
    if is_dtensor(tensor) and not is_dtensor(like):
        return tensor.full_tensor().to(like.device)  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's
    return tensor.to(like.device)

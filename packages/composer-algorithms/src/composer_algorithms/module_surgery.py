"""Replace modules in a model, and keep devices, shared parameters and optimizers in step."""

import itertools
import logging
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_algorithms._adoption import TiedParameters, adopt
from composer_algorithms._modules import check_is_module
from composer_algorithms._optimizer_surgery import (
    Replacement,
    as_optimizers,
    follow_replacements,
    update_params_in_optimizer,
)

__all__ = ["ReplacementFunction", "count_module_instances", "replace_module_classes", "update_params_in_optimizer"]

_log = logging.getLogger("composer.algorithms.module_surgery")


class ReplacementFunction(Protocol):
    """Answer what takes the place of a module: another module, the same one changed in place, or `None` for no change.

    The second argument counts the modules of the policy's class that were asked about before this one.
    """

    def __call__(self, module: Any, module_index: int, /) -> nn.Module | None:
        """Answer about one module."""
        ...


@dataclass(slots=True)
class _Site:
    """A module of the model and everywhere that it hangs."""

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

    Each module below `module` is visited once, parents before their children, in the order of registration; a child is
    visited also when its parent was replaced. A replacement hangs wherever the old module hung. It gets the old
    module's device, dtype (unless it was made in another one than torch's default), memory format, training mode and
    hooks, is frozen if the old one was, and parameters that another module shares stay shared. Weights are not copied:
    that is up to the policies.

    Args:
        module: The model; changed in place.
        policies: From a class to the function that is asked about its instances, those of subclasses included.
        optimizers: Get the new parameters in the groups of the old ones, whose state is dropped. An optimizer that is
            built afterwards need not be passed.
        recurse_on_replacements: Visit replacements and what they contain, too. A policy that always answers with its
            own class then never ends.
        indices: From each policy's class to the count that its `module_index` begins with. Changed in place.
        include_root: Ask the policies about `module` itself, too. They may change it in place only.

    Returns:
        From each module that a policy answered about to that answer, in the order of the visits.

    Raises:
        TypeError: If `module` is no module or a `DistributedDataParallel`, `optimizers` has something else in it, or
            a policy answers with a new module for the root.
        ValueError: If a replaced parameter is shared and the replacement has none to take its place.
        RuntimeError: If two policies replace one module, or no parameter group fits a new parameter.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> _ = replace_module_classes(model, {torch.nn.ReLU: lambda module, index: torch.nn.GELU()})
        >>> model[1]
        GELU(approximate='none')
    """
    check_is_module(module, "modules to replace")
    if isinstance(module, DistributedDataParallel):
        raise TypeError(
            "the model is wrapped by DistributedDataParallel, which has registered the parameters that a replacement "
            "would remove: replace modules first and wrap the changed model."
        )
    optimizers = as_optimizers(optimizers)  # before anything is changed
    queue = deque(_sites(module))
    if include_root:
        queue.appendleft(_Site(module, ""))
    counts = dict.fromkeys(policies, 0) if indices is None else indices
    ties = TiedParameters(module)
    replaced: dict[nn.Module, nn.Module] = {}
    replacements: list[Replacement] = []
    while queue:
        site = queue.popleft()
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
    _finish(module, replacements, optimizers)
    return replaced


def count_module_instances(module: nn.Module, module_class: type[nn.Module] | tuple[type[nn.Module], ...]) -> int:
    """Count the modules of a class below a module, each once and the module itself not.

    Args:
        module: The model.
        module_class: The class, or several as a tuple.

    Example:
        >>> count_module_instances(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(1, 1)), torch.nn.ReLU)
        1
    """
    return sum(isinstance(one, module_class) for one in module.modules() if one is not module)


def _sites(root: nn.Module, prefix: str = "") -> list[_Site]:
    """Find everything below the root, each module once, with all places where it hangs."""
    found: dict[nn.Module, _Site] = {}

    def visit(parent: nn.Module, path: str) -> None:
        for name, child in parent._modules.items():  # named_children leaves out the second name of a child
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
    for module_class, policy in policies.items():
        if not isinstance(site.module, module_class):
            continue
        index = counts.setdefault(module_class, 0)
        counts[module_class] = index + 1
        try:
            new = policy(site.module, index)
        except Exception as error:
            error.add_note(f"raised about the module {site.path!r}, a {type(site.module).__qualname__}")
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
            f"the model itself is a {type(site.module).__qualname__}, in whose place nothing can be put: a policy "
            f"answered with a new {type(new).__qualname__}. Put the model into an nn.Sequential first."
        )
    adopt(site.module, new, _first_device(root))
    ties.follow(site.path, site.module, old_params, new)
    for parent, name in site.parents:
        setattr(parent, name, new)


def _first_device(root: nn.Module) -> torch.device | None:
    for tensor in itertools.chain(root.parameters(), root.buffers()):
        return tensor.device
    return None


def _finish(
    root: nn.Module, replacements: Sequence[Replacement], optimizers: Optimizer | Sequence[Optimizer] | None
) -> None:
    if not replacements:
        return
    if optimizers:
        follow_replacements(replacements, root, optimizers)
    else:
        _log.info(
            "%d modules were replaced, and no optimizer was passed: one that was built before does not train the new "
            "parameters.",
            len(replacements),
        )

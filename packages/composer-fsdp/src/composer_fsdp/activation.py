"""Activation checkpointing and activation offloading.

`module._activation_checkpointing` takes precedence, then `activation_checkpointing_fn(module)` of the model's direct
child, or of the model if the child does not define it. Modules that neither selects are left unchanged.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["apply_ac", "chosen_for_checkpointing", "warn_of_none_chosen", "contexts_that_keep_products"]


def apply_ac(
    model: nn.Module,
    activation_checkpointing: bool | str,
    activation_cpu_offload: bool,
    check_fn: Callable[[nn.Module], bool] | None = None,
    *,
    reentrant: bool = False,
    checkpoint_fn: Callable[..., Any] | None = None,
) -> dict[nn.Module, nn.Module]:
    """Wrap the selected modules of a model in place, but never the model itself.

    State dict names do not change.

    Args:
        model: The model whose descendants are wrapped.
        activation_checkpointing: Whether to recompute activations in the backward pass; `'selective'` still saves the
            results of matrix products and attention.
        activation_cpu_offload: Whether to keep saved activations on the host.
        check_fn: Selects the modules. By default the rules above apply.
        reentrant: Whether to use PyTorch's reentrant implementation, which computes no gradients for a module whose
            inputs do not require them.
        checkpoint_fn: Replaces PyTorch's checkpoint function.

    Returns:
        The wrapper of each wrapped module.

    Raises:
        ValueError: If the settings are incompatible.
        TypeError: If `activation_checkpointing_fn` is not callable.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> wrapped = apply_ac(model, True, False, lambda module: isinstance(module, nn.Linear))
        >>> list(model.state_dict())
        ['0.weight', '0.bias']
    """
    if not activation_checkpointing and not activation_cpu_offload:
        return {}
    if activation_checkpointing == "selective" and reentrant:
        raise ValueError(
            "activation_checkpointing='selective' needs the newer implementation. Leave out "
            "activation_checkpointing_reentrant=True."
        )
    chosen = chosen_for_checkpointing(model, check_fn)
    wrap = _wrapper(activation_checkpointing, activation_cpu_offload, reentrant, checkpoint_fn)
    replaced = {module: wrap(module) for module in chosen}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # `named_children` skips a child's second name
            # The child of a wrapper is the wrapped module: replacing it would make the wrapper contain itself.
            if child in replaced and replaced[child] is not parent and not _is_wrapper(parent):
                parent._modules[name] = replaced[child]
    return replaced


def chosen_for_checkpointing(model: nn.Module, check_fn: Callable[[nn.Module], bool] | None = None) -> list[nn.Module]:
    """Return the selected modules that are not wrapped yet, without duplicates.

    Raises:
        TypeError: If `activation_checkpointing_fn` is not callable.
    """
    chosen: dict[nn.Module, None] = {}
    done = {module for wrapper in model.modules() if _is_wrapper(wrapper) for module in (wrapper, *wrapper.children())}
    own_function = getattr(model, "activation_checkpointing_fn", None)  # a plain module is its own root
    for child in model.children():
        function = check_fn or getattr(child, "activation_checkpointing_fn", own_function)
        if function is not None and not callable(function):
            raise TypeError(
                f"activation_checkpointing_fn={function!r} is not a function. Give one that returns True for the "
                f"modules whose activations are recomputed, and False for others."
            )
        for module in child.modules():
            if module in done:
                continue
            own = getattr(module, "_activation_checkpointing", None)
            if own if own is not None else (function is not None and function(module)):
                chosen[module] = None
    return list(chosen)


def warn_of_none_chosen(model: nn.Module, stacklevel: int) -> None:
    """Warn that checkpointing or offloading is enabled but selects no module, unless a module is wrapped already."""
    if any(_is_wrapper(module) for module in model.modules()):
        return
    warnings.warn(
        "activation_checkpointing or activation_cpu_offload is on, and no module is chosen for it, so that it does "
        "nothing. Define activation_checkpointing_fn(module) on the model or its child to choose modules, or set "
        "_activation_checkpointing = True on them.",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def _wrapper(
    checkpointing: bool | str, offload: bool, reentrant: bool, checkpoint_fn: Callable[..., Any] | None
) -> Callable[[nn.Module], nn.Module]:
    settings: dict[str, Any] = {
        "checkpoint_impl": CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    }
    if checkpoint_fn is not None:
        settings["checkpoint_fn"] = checkpoint_fn

    def wrap(module: nn.Module) -> nn.Module:
        own = dict(settings)
        if checkpointing == "selective":
            own["context_fn"] = _contexts
        wrapped = checkpoint_wrapper(module, **own) if checkpointing else module
        return offload_wrapper(wrapped) if offload else wrapped

    return wrap


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, CheckpointWrapper | OffloadWrapper)


_Contexts: TypeAlias = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]

# Expensive to recompute: matrix products and attention.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def contexts_that_keep_products() -> Callable[[], _Contexts]:
    """Return the `context_fn` of `torch.utils.checkpoint.checkpoint` that saves the results of matrix products.

    The backward pass raises if such a result was changed in place after it was saved.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> weight = torch.ones(2, 2, requires_grad=True)
        >>> contexts = contexts_that_keep_products()
        >>> checkpoint(lambda: (weight @ weight).exp(), use_reentrant=False, context_fn=contexts).sum().backward()
    """
    return _contexts  # a plain function: torch.compile accepts no callable object here


def _contexts() -> _Contexts:
    return create_selective_checkpoint_contexts(_KeepProducts())


class _KeepProducts:
    """Policy that saves products; called in the forward pass, and in older PyTorch versions also on recomputation."""

    def __init__(self) -> None:
        self._is_after_product: dict[bool, bool] = {}  # by whether it is a recomputation

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = operation in _KEPT
        # Also the view that matmul returns in place of its product: it does not share the counter of changes with the
        # product, so PyTorch would not notice a change through the view.
        keeps = is_product or (operation is _UNSAFE_VIEW and self._is_after_product.get(context.is_recompute, False))
        self._is_after_product[context.is_recompute] = is_product
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

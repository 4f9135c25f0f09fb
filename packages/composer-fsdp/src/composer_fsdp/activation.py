"""Which activations are computed again in the backward pass, or wait for it on the host.

`module._activation_checkpointing` decides; without it `activation_checkpointing_fn(module)` of the model's direct
child, or of the model itself where the child has none. What neither chooses stays as it is.
"""

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # torch has no public name for them
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)

from composer_fsdp.selective import contexts_that_keep_products

__all__ = ["apply_ac", "chosen_for_checkpointing", "warn_of_none_chosen"]


def apply_ac(
    model: nn.Module,
    activation_checkpointing: bool | str,
    activation_cpu_offload: bool,
    check_fn: Callable[[nn.Module], bool] | None = None,
    *,
    reentrant: bool = False,
    checkpoint_fn: Callable[..., Any] | None = None,
) -> dict[nn.Module, nn.Module]:
    """Wrap the chosen modules inside a model, in place; the model itself is never wrapped.

    Names in state dicts stay as they were.

    Args:
        model: Whose descendants are wrapped.
        activation_checkpointing: Whether they compute their activations again in the backward pass; `'selective'`
            keeps the results of matrix products and attention all the same.
        activation_cpu_offload: Whether what they keep waits on the host.
        check_fn: Chooses the modules. By default the rules of this module.
        reentrant: Which of torch's implementations; the reentrant one gives no gradients to a module whose inputs need
            none.
        checkpoint_fn: What computes again, in place of torch's own.

    Returns:
        From each module that was wrapped to what stands in its place.

    Raises:
        ValueError: If the settings exclude each other.
        TypeError: If what chooses the modules is no function.

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
        for name, child in parent._modules.items():  # `named_children` gives one that has two names only once
            # A wrapper's own child is the module that it wraps.
            if child in replaced and replaced[child] is not parent and not _is_wrapper(parent):
                parent._modules[name] = replaced[child]
    return replaced


def chosen_for_checkpointing(model: nn.Module, check_fn: Callable[[nn.Module], bool] | None = None) -> list[nn.Module]:
    """Return the modules that the rules choose, each once, without those that are wrapped already.

    Raises:
        TypeError: If what shall choose them is no function.
    """
    chosen: dict[nn.Module, None] = {}
    done = {module for wrapper in model.modules() if _is_wrapper(wrapper) for module in (wrapper, *wrapper.children())}
    own_function = getattr(model, "activation_checkpointing_fn", None)  # a plain module is its own root
    for child in model.children():
        function = check_fn or getattr(child, "activation_checkpointing_fn", own_function)
        if function is not None and not callable(function):
            raise TypeError(
                f"activation_checkpointing_fn={function!r} is no function. Give one that says True of the modules "
                f"whose activations are computed again, and False of others."
            )
        for module in child.modules():
            if module in done:
                continue
            own = getattr(module, "_activation_checkpointing", None)
            if own if own is not None else (function is not None and function(module)):
                chosen[module] = None
    return list(chosen)


def warn_of_none_chosen(model: nn.Module, stacklevel: int) -> None:
    """Warn that activations are to be computed again, or to wait on the host, and those of no module.

    A model that is wrapped already does so.
    """
    if any(_is_wrapper(module) for module in model.modules()):
        return
    warnings.warn(
        "activation_checkpointing or activation_cpu_offload is on, and no module is chosen for it, so that it does "
        "nothing. Define activation_checkpointing_fn(module) on the model or its child, which says which modules, or "
        "set _activation_checkpointing = True on them.",
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
            own["context_fn"] = contexts_that_keep_products()  # each module's own, since it remembers what was changed
        wrapped = checkpoint_wrapper(module, **own) if checkpointing else module
        return offload_wrapper(wrapped) if offload else wrapped

    return wrap


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, CheckpointWrapper | OffloadWrapper)

"""Activation checkpointing and activation offloading.

`module._activation_checkpointing` takes precedence, then `activation_checkpointing_fn(module)` of the model's direct
child, or of the model if the child does not define it. Modules that neither selects are left unchanged.
"""

import contextlib
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

# In torch 2.11, `torch.compiler.is_compiling` is not True everywhere during compilation.
from torch._guards import detect_fake_mode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils._python_dispatch import TorchDispatchMode  # torch has no public name for it
from torch.utils._pytree import tree_leaves  # the public equivalent, `optree`, is a separate package
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
    """Return the selected modules that are not wrapped yet, without duplicates."""
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
            own["context_fn"] = contexts_that_keep_products()  # one per module: it remembers in-place changes
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
    """Return the `context_fn` of `torch.utils.checkpoint.checkpoint` for one module.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> weight = torch.ones(2, 2, requires_grad=True)
        >>> contexts = contexts_that_keep_products()
        >>> checkpoint(lambda: (weight @ weight).exp(), use_reentrant=False, context_fn=contexts).sum().backward()
    """
    return functools.partial(_contexts, _Seen())  # torch.compile accepts no callable object here


@dataclasses.dataclass
class _Seen:
    """Products that must be recomputed, by number, as found in the first pass of a module."""

    changed: set[int] | None = None


def _contexts(seen: _Seen) -> _Contexts:
    if detect_fake_mode() is not None:  # fake tensors have no addresses to watch
        return create_selective_checkpoint_contexts(_Policy(set()))
    if not torch.is_grad_enabled():
        return contextlib.nullcontext(), contextlib.nullcontext()
    if seen.changed is None:
        return _Watch(seen), contextlib.nullcontext()
    keep, reuse = create_selective_checkpoint_contexts(_Policy(seen.changed))
    return keep, _explained(reuse)


@dataclasses.dataclass
class _Progress:
    """Progress of one pass through a module."""

    num_products: int = 0
    is_after_product: bool = False


class _Policy:
    """Policy that saves products; called in the forward pass, and in older PyTorch versions also on recomputation."""

    def __init__(self, changed: set[int]) -> None:
        self.changed = changed
        self.forward, self.again = _Progress(), _Progress()

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        progress = self.again if context.is_recompute else self.forward
        is_product = operation in _KEPT
        # Save the view that matmul returns along with its product, so that PyTorch detects changes through either.
        is_of_product = is_product or (operation is _UNSAFE_VIEW and progress.is_after_product)
        progress.num_products += is_product
        progress.is_after_product = is_product
        if is_of_product and progress.num_products - 1 not in self.changed:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


class _Watch(TorchDispatchMode):
    """Records which savable results are later changed in place or outlive the pass."""

    supports_higher_order_operators = True  # PyTorch rejects these operators in other modes

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen
        self.num_products = 0
        self.numbers: dict[int, int] = {}  # by the address of a product
        self.aliases: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        self.held: list[torch.Tensor] = []  # keeps addresses from being reused
        self.changed: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # keep compiled regions compiled, as PyTorch's own modes do

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            self.changed |= {self.numbers[address] for address in _addresses(tensor) if address in self.numbers}
        result = func(*args, **kwargs)
        # Every alias is followed, since a view of a product may be changed or kept in its place.
        tensors = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        if func in _KEPT:
            self.numbers |= {address: self.num_products for tensor in tensors for address in _addresses(tensor)}
            self.num_products += 1
            self.held += [tensor.detach() for tensor in tensors]
        for tensor in tensors:
            numbers = {self.numbers[address] for address in _addresses(tensor) if address in self.numbers}
            self.aliases += [(number, weakref.ref(tensor)) for number in numbers]
        return result

    def __exit__(self, exception_type: Any, exception: Any, traceback: Any) -> None:
        super().__exit__(exception_type, exception, traceback)
        if exception is None:
            # What outlives the pass may be changed in place later, where this mode no longer sees it.
            outliving = {number for number, tensor in self.aliases if tensor() is not None}
            self.seen.changed = self.changed | outliving
        self.held.clear()


@contextlib.contextmanager
def _explained(context: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Add advice to PyTorch's error about a saved result that was changed."""
    try:
        with context:
            yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise RuntimeError(
            "activation_checkpointing='selective' kept the result of a matrix product, and it was changed in place "
            "after that, outside the checkpointed module or differently from the module's first pass. Create a new "
            "tensor instead (`y = y + x` for `y += x`), or use activation_checkpointing=True."
        ) from error


def _written(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    schema = getattr(operation, "_schema", None)  # higher-order operators have none
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    changing = [item.name for item in schema.arguments if item.alias_info is not None and item.alias_info.is_write]
    return tree_leaves([given.get(name) for name in changing])


def _addresses(value: Any) -> set[int]:
    """Return the storage addresses of a tensor, or those of the inner tensors of a wrapper subclass."""
    if not isinstance(value, torch.Tensor):
        return set()
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        return {address for name in names for address in _addresses(getattr(value, name))}
    try:
        return {value.untyped_storage().data_ptr()}
    except (NotImplementedError, RuntimeError):  # sparse and opaque tensors, which are never saved products
        return set()

"""Activations that are computed again but for the results of matrix products and attention, which are kept.

torch keeps such a result by reference. Where it is then changed in place (`scores += bias`), the backward pass would
go on from the changed one: torch notices that, except behind `matmul` of more than two dimensions, whose last step
gives the result a second version counter. So the first pass of a module keeps nothing and notes which of its results
are changed, or returned and so at the mercy of others; from then on the rest is kept. Under `torch.compile` nothing is
in place any more, and all are kept.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

# `torch.compiler.is_compiling` is not True in every place of torch 2.11 where something is compiled.
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode  # torch has no public name for it
from torch.utils._pytree import tree_leaves  # its public face, `optree`, is another package
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["contexts_that_keep_products"]

_Contexts: TypeAlias = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]

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
    return functools.partial(_contexts, _Seen())  # torch.compile takes a function here, and no object that is called


@dataclasses.dataclass
class _Seen:
    """What the first pass of a module showed: which products, by number, are not to be kept."""

    changed: set[int] | None = None


def _contexts(seen: _Seen) -> _Contexts:
    if detect_fake_mode() is not None:
        return create_selective_checkpoint_contexts(_Policy(set()))
    if not torch.is_grad_enabled():
        return contextlib.nullcontext(), contextlib.nullcontext()
    if seen.changed is None:
        return _Watch(seen), contextlib.nullcontext()
    keep, reuse = create_selective_checkpoint_contexts(_Policy(seen.changed))
    return keep, _Explained(reuse)


@dataclasses.dataclass
class _Progress:
    """How far one pass of a module is."""

    num_products: int = 0
    is_after_product: bool = False


class _Policy:
    """Which results of one pass are kept; torch asks in the forward pass, and older versions in the backward, too."""

    def __init__(self, changed: set[int]) -> None:
        self.changed = changed
        self.forward, self.again = _Progress(), _Progress()

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        progress = self.again if context.is_recompute else self.forward
        is_product = operation in _KEPT
        # What matmul makes of its product is kept with it, so that torch sees changes through either.
        is_of_product = is_product or (operation is _UNSAFE_VIEW and progress.is_after_product)
        progress.num_products += is_product
        progress.is_after_product = is_product
        if is_of_product and progress.num_products - 1 not in self.changed:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


class _Watch(TorchDispatchMode):
    """Notes which of the results that could be kept are changed in place by what follows, or outlive the pass."""

    supports_higher_order_operators = True

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen
        self.num_products = 0
        self.numbers: dict[int, int] = {}  # by the address of a product
        self.aliases: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        self.held: list[torch.Tensor] = []  # so that no other tensor gets their memory
        self.changed: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # parts that are compiled stay so, as under torch's own modes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            self.changed |= {self.numbers[address] for address in _addresses(tensor) if address in self.numbers}
        result = func(*args, **kwargs)
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
            outliving = {number for number, tensor in self.aliases if tensor() is not None}
            self.seen.changed = self.changed | outliving
        self.held.clear()


class _Explained:
    """Says what to do where torch finds that a result which it kept was changed."""

    def __init__(self, context: contextlib.AbstractContextManager[Any]) -> None:
        self.context = context

    def __enter__(self) -> Any:
        return self.context.__enter__()

    def __exit__(self, exception_type: Any, exception: Any, traceback: Any) -> Any:
        done = self.context.__exit__(exception_type, exception, traceback)
        if isinstance(exception, RuntimeError) and "has been mutated" in str(exception):
            raise RuntimeError(
                "activation_checkpointing='selective' kept the result of a matrix product, and it was changed in place "
                "after that, outside of the module that computes its activations again or otherwise than in the "
                "module's first pass. Write a new tensor in place of changing it (`y = y + x` for `y += x`), or use "
                "activation_checkpointing=True."
            ) from exception
        return done


def _written(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    schema = getattr(operation, "_schema", None)  # operations of higher order have none
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    changing = [item.name for item in schema.arguments if item.alias_info is not None and item.alias_info.is_write]
    return tree_leaves([given.get(name) for name in changing])


def _addresses(value: Any) -> set[int]:
    """Return where the memory of a tensor begins; of one made of several, as sharded ones are, that of each."""
    if not isinstance(value, torch.Tensor):
        return set()
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        return {address for name in names for address in _addresses(getattr(value, name))}
    try:
        return {value.untyped_storage().data_ptr()}
    except (NotImplementedError, RuntimeError):  # of sparse and opaque tensors, which are no products that are kept
        return set()

"""Models that `torch.compile` has wrapped, which run compiled without the wrapper, under their own names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

__all__ = ["as_written", "compile_calls", "is_wrapped", "take_out"]

_INNER: Final = "_orig_mod"

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def take_out(model: Any) -> tuple[Any, Compiler | None]:
    """Return the model inside of what `torch.compile` returns, and what compiles a call of it in the same way.

    Any other model is returned as it is, with `None`.
    """
    if not is_wrapped(model):
        return model, None
    return model.get_submodule(_INNER), vars(model)["dynamo_ctx"]


def is_wrapped(model: Any) -> bool:
    """Say whether a model is what `torch.compile` returns."""
    # Not by `hasattr`: peft's models answer with the attributes of those inside.
    return isinstance(model, nn.Module) and _INNER in dict(model.named_children())


def compile_calls(model: nn.Module, compiler: Compiler) -> None:
    """Let a model run compiled from its next call on, as `Module.compile` does.

    PyTorch has no public way to do so with the settings of a wrapper; this is the attribute that `Module.compile` sets.
    """
    vars(model)["_compiled_call_impl"] = compiler(model._call_impl)


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Let a model run uncompiled for a while, as the `generate` of a wrapper does.

    Each length of text would be one more graph to compile, and the training step would lose its own to the limit of
    how many are kept.
    """
    compiled = vars(model).pop("_compiled_call_impl", None)
    try:
        yield
    finally:
        if compiled is not None:
            vars(model)["_compiled_call_impl"] = compiled

"""Registry of the modules that support ALiBi, with GPT-2, BERT and RoBERTa if transformers is installed."""

import inspect
import typing
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol, TypeVar

from torch import nn

__all__ = ["AlibiReplacementFunction", "PolicyRegistry", "policy_registry"]


class AlibiReplacementFunction(Protocol):
    """Function that adds ALiBi to a module in place and returns it, or returns `None` to leave it unchanged.

    The name of the third parameter is fixed. `module_index` counts the previous modules of the class.
    """

    def __call__(self, module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module | None:
        """Add ALiBi to one module."""
        ...


FunctionT = TypeVar("FunctionT", bound=Callable[..., nn.Module | None])


class PolicyRegistry(dict[type[nn.Module], AlibiReplacementFunction]):
    """Mapping from module classes to the functions that add ALiBi to their instances, read at each application.

    Example:
        >>> registry = PolicyRegistry()
        >>> @registry.register(nn.MultiheadAttention)
        ... def leave_alone(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module | None:
        ...     return None
        >>> list(registry) == [nn.MultiheadAttention]
        True
    """

    def register(self, *modules: type[nn.Module]) -> Callable[[FunctionT], FunctionT]:
        """Return a decorator that registers a function for classes.

        Args:
            *modules: Classes. The function is called for instances of subclasses, too.

        Raises:
            ValueError: If no class is given, one is already registered, or the function does not take 3 parameters.
            TypeError: If a class is not a module class, or the annotations of the parameters differ from those of
                `AlibiReplacementFunction`.
            NameError: If the third parameter is not called `max_sequence_length`.
        """
        if not modules:
            raise ValueError("register() was called without a class: name those that the function is for.")

        def register_function(function: FunctionT) -> FunctionT:
            _check_signature(function)  # here, since a wrong function would otherwise fail only when ALiBi is applied
            for module in modules:
                if not (isinstance(module, type) and issubclass(module, nn.Module)):
                    raise TypeError(f"{module!r} is not a subclass of torch.nn.Module: only modules can be replaced.")
                if module in self:
                    raise ValueError(
                        f"{module.__qualname__} is registered with {self[module]!r} already: remove that first (del)."
                    )
            self.update(dict.fromkeys(modules, typing.cast("AlibiReplacementFunction", function)))
            return function

        return register_function


def _check_signature(function: Callable[..., object]) -> None:
    name = getattr(function, "__qualname__", repr(function))
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) != 3:
        raise ValueError(
            f"{name} takes {len(parameters)} parameters ({', '.join(parameters)}), and not the three that it is called "
            f"with: module: torch.nn.Module, module_index: int, max_sequence_length: int."
        )
    hints = typing.get_type_hints(function)  # also resolves annotations that are strings
    kinds = [hints.get(parameter) for parameter in parameters]
    if kinds != [nn.Module, int, int]:
        raise TypeError(f"{name} annotates its parameters with {kinds}, but they must be torch.nn.Module, int and int.")
    if parameters[2] != "max_sequence_length":
        raise NameError(f"{name} calls its third parameter {parameters[2]!r}: call it 'max_sequence_length'.")


policy_registry = PolicyRegistry()
"""Maps module classes to the functions that add ALiBi to their instances."""

if find_spec("transformers") is not None:
    from composer_algorithms.alibi._transformers import register_policies

    register_policies(policy_registry)

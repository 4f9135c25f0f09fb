"""Which modules of transformers can be given ALiBi, and how."""

import inspect
import typing
from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import nn

__all__ = ["AlibiReplacementFunction", "PolicyRegistry"]


class AlibiReplacementFunction(Protocol):
    """Give a module ALiBi in place and return it, or return `None` to leave it as it is.

    The third parameter must have this name. `module_index` counts the modules of the class before this one.
    """

    def __call__(self, module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module | None:
        """Change one module."""
        ...


FunctionT = TypeVar("FunctionT", bound=Callable[..., nn.Module | None])


class PolicyRegistry(dict[type[nn.Module], AlibiReplacementFunction]):
    """From classes of modules to the functions that give their instances ALiBi. Looked up whenever ALiBi is applied.

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
            *modules: The classes; the function is asked about instances of subclasses, too.

        Raises:
            ValueError: If no class is given, one is registered already, or the function does not take 3 parameters.
            TypeError: If a class is no module class, or the parameters are not annotated as `AlibiReplacementFunction`
                says.
            NameError: If the third parameter is not called `max_sequence_length`.
        """
        if not modules:
            raise ValueError("register() was called without a class: name those that the function is for.")

        def register_function(function: FunctionT) -> FunctionT:
            _check_signature(function)
            for module in modules:
                if not (isinstance(module, type) and issubclass(module, nn.Module)):
                    raise TypeError(f"{module!r} is no subclass of torch.nn.Module: only modules can be replaced.")
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
    hints = typing.get_type_hints(function)  # also where annotations are strings
    kinds = [hints.get(parameter) for parameter in parameters]
    if kinds != [nn.Module, int, int]:
        raise TypeError(
            f"{name} annotates its parameters with {kinds}, not with torch.nn.Module, int and int, which is what they "
            f"are."
        )
    if parameters[2] != "max_sequence_length":
        raise NameError(f"{name} calls its third parameter {parameters[2]!r}: call it 'max_sequence_length'.")

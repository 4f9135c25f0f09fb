"""A block of code that runs with a model in eval mode."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["model_eval_mode"]


@contextmanager
def model_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in eval mode inside a `with` block and give every module its own mode back afterwards.

    The root goes back through `model.train(mode)`, so that a model with its own `train` is told. Submodules that
    were in another mode than the root, such as frozen batch norms, are then set back one by one.

    Args:
        model: The model, changed in place.

    Yields:
        Nothing.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Dropout())
        >>> with model_eval_mode(model):
        ...     model.training
        False
        >>> model.training
        True
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        # The root comes first in modules().
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode

"""What is passed as a model is one."""

from torch import nn

__all__ = ["check_is_module"]


def check_is_module(model: object, lacks: str) -> None:
    """Refuse what is no module, and say what it lacks (`'filters to convert'`)."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model!r} is no torch.nn.Module, so it has no {lacks}: pass the model.")

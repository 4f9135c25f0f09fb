"""Whether a model is wrapped for training on several ranks."""

__all__ = ["is_model_ddp"]


def is_model_ddp(model: object) -> bool:
    """Answer whether the model is a `DistributedDataParallel`.

    Only the outermost wrapper counts: a model that was compiled after it was wrapped is not one.

    Example:
        >>> import torch
        >>> is_model_ddp(torch.nn.Linear(2, 1))
        False
    """
    from torch.nn.parallel import DistributedDataParallel  # slow: torch, which the rest of the module does not need

    return isinstance(model, DistributedDataParallel)

"""Classification targets as class indices or with one value per class."""

import warnings
from typing import Literal

import torch
from torch import Tensor

__all__ = ["IGNORED", "infer_target_type", "ensure_targets_one_hot", "check_for_index_targets", "can_read_values"]

IGNORED = -100  # the default `ignore_index` of torch's losses and of transformers

_INDEX_DTYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def infer_target_type(input: Tensor, targets: Tensor) -> Literal["indices", "one_hot"]:
    """Infer from the shapes whether targets are class indices or have one value per class.

    Args:
        input: Logits of shape `(batch, classes, ...)`.
        targets: Shape `(batch, ...)` for class indices, or the shape of `input`.

    Returns:
        `'one_hot'` if both have the same shape, which includes smoothed and mixed targets; `'indices'` if `targets` has
        one dimension less.

    Raises:
        RuntimeError: If the shapes fit neither form.

    Example:
        >>> infer_target_type(torch.zeros(4, 10), torch.zeros(4, dtype=torch.long))
        'indices'
    """
    if input.shape == targets.shape:
        return "one_hot"
    if input.ndim == targets.ndim + 1:
        return "indices"
    raise RuntimeError(
        f"targets of shape {tuple(targets.shape)} do not fit an input of shape {tuple(input.shape)}: class indices "
        f"have the input's shape without dim 1, targets with one value for each class have the input's shape."
    )


def ensure_targets_one_hot(input: Tensor, targets: Tensor, num_classes: int | None = None) -> Tensor:
    """Convert targets to one value per class, along dim 1 like the logits.

    Args:
        input: Logits of shape `(batch, classes, ...)`.
        targets: Class indices, or targets with the shape of `input`. Negative indices are ignored labels: their rows
            become all zero.
        num_classes: The number of classes. `input.shape[1]` if `None`.

    Returns:
        float32 of shape `(batch, num_classes, ...)`.

    Raises:
        RuntimeError: If the shape of `targets` does not fit `input`.
        ValueError: If an index is `num_classes` or larger (checked only if the targets are on the CPU).

    Example:
        >>> ensure_targets_one_hot(torch.zeros(2, 3), torch.tensor([2, 0]))
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """
    if infer_target_type(input, targets) == "one_hot":
        return targets.float()
    classes = input.shape[1] if num_classes is None else num_classes
    if not check_for_index_targets(targets):
        raise ValueError(
            f"labels have dtype {targets.dtype}, which cannot be encoded one-hot: pass integer class indices."
        )
    # On other devices reading the labels would synchronize: there one that is too large is an error in the kernel.
    if can_read_values(targets) and targets.numel():
        smallest, largest = (int(extreme) for extreme in torch.aminmax(targets))
        if smallest < 0:
            warnings.warn(
                "Negative label indices are being ignored in conversion to one-hot labels", UserWarning, stacklevel=2
            )
        if largest >= classes:
            raise ValueError(
                f"num_classes={classes} is too few for the label {largest}: labels count from 0, so at least "
                f"{largest + 1} classes are needed. Labels to ignore must be negative here, such as -100."
            )
    index = targets.long().unsqueeze(1)
    encoded = torch.zeros(index.shape[0], classes, *index.shape[2:], dtype=torch.float32, device=targets.device)
    # Negative labels write 0 into class 0, so one kernel handles both kinds of labels.
    return encoded.scatter_(1, index.clamp(min=0), (index >= 0).float())


def check_for_index_targets(targets: Tensor) -> bool:
    """Return whether targets have an integer dtype, as class indices do.

    Args:
        targets: Targets of any shape.

    Returns:
        True for uint8, int8, int16, int32 and int64.

    Example:
        >>> check_for_index_targets(torch.tensor([1, 2])), check_for_index_targets(torch.tensor([0.5]))
        (True, False)
    """
    return targets.dtype in _INDEX_DTYPES


def can_read_values(tensor: Tensor) -> bool:
    """Return whether reading a tensor's values is free: no device synchronization, no graph break when compiling."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()

"""Tensors out of a batch of any form, or an error that names the key."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

    from composer_events.state import State


class UnsupportedBatchError(TypeError, NotImplementedError):
    """The batch, the model's output or the loss is not of a kind that the algorithm can work on.

    A `TypeError`; also a `NotImplementedError`, which is what scripts written for Composer catch.
    """


def batch_tensor(state: "State", key: Any, argument: str) -> Tensor:
    """Return the tensor that `key` picks from `state.batch`; `argument` is what the user calls that key.

    A batch that is a tensor itself has no parts to replace: an index would pick an example, and replacing that would
    write into the caller's data. Functions as the key may do with it what they like.
    """
    if isinstance(state.batch, Tensor) and not _is_getter_and_setter(key):
        raise UnsupportedBatchError(
            f"{argument}={key!r} would pick single values from the batch, which is one tensor of shape "
            f"{tuple(state.batch.shape)}: let the dataloader give (inputs, targets) or a dict, or pass a (getter, "
            f"setter) pair of functions as {argument}."
        )
    try:
        value = state.batch_get_item(key)
    except (LookupError, AttributeError, TypeError) as error:
        raise UnsupportedBatchError(
            f"{argument}={key!r} picks nothing from a batch of type {type(state.batch).__qualname__}: pass the index, "
            f"the key, or a (getter, setter) pair under which your batches hold it."
        ) from error
    return require_tensor(value, f"what {argument}={key!r} picks from the batch")


def _is_getter_and_setter(key: Any) -> bool:
    return isinstance(key, Sequence) and len(key) == 2 and all(map(callable, key))


def require_tensor(value: object, what: str) -> Tensor:
    """Return `value` if it is a tensor; `what` says in the error where it came from."""
    if isinstance(value, Tensor):
        return value
    raise UnsupportedBatchError(
        f"{what} is a {type(value).__qualname__}, but this algorithm works on one tensor: choose the tensor by the "
        f"algorithm's keys, or leave the algorithm out for this model."
    )


def is_pil(value: object) -> "TypeGuard[Image]":
    """Answer whether the value is a PIL image."""
    pil = sys.modules.get("PIL.Image")  # a process that has not imported it has no such image
    return pil is not None and isinstance(value, pil.Image)


def image_size(image: "Tensor | Image") -> tuple[int, int]:
    """Return height and width.

    Raises:
        TypeError: If the value is neither a tensor nor a PIL image.
        ValueError: If a tensor has less than three dims.
    """
    if is_pil(image):
        return image.height, image.width
    if not isinstance(image, Tensor):
        raise TypeError(f"{type(image).__qualname__} is no image: pass a tensor or a PIL image.")
    if image.ndim < 3:
        raise ValueError(
            f"a tensor of shape {tuple(image.shape)} is no image: pass (channels, height, width), or a batch of those."
        )
    return image.shape[-2], image.shape[-1]


def to_pixels(image: Tensor) -> Tensor:
    """Return an image's values as the whole numbers from 0 to 255 that PIL works on; floating point has 0 to 1."""
    if image.dtype == torch.uint8:
        return image
    if image.is_floating_point():
        return (image.float() * 255).round_().clamp_(0, 255).to(torch.uint8)
    raise TypeError(f"an image of dtype {image.dtype} cannot be a PIL image: pass uint8, or floating point in [0, 1].")


def from_pixels(pixels: Tensor, like: Tensor) -> Tensor:
    """Return whole numbers from 0 to 255 in the dtype, the range and on the device of another image."""
    pixels = pixels.to(like.device)
    return pixels if like.dtype == torch.uint8 else pixels.to(like.dtype).div_(255)

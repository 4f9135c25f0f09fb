"""Access to the tensors in batches of any form, with errors that name the key."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from PIL.Image import Image
from torch import Tensor

from composer_events import State


class UnsupportedBatchError(TypeError, NotImplementedError):
    """Error for a batch, a model output or a loss of a kind that the algorithm does not support.

    A `TypeError`, and also a `NotImplementedError`, which scripts written for Composer catch.
    """


def batch_tensor(state: State, key: Any, argument: str) -> Tensor:
    """Return the tensor at `key` in `state.batch`; `argument` is the name of the key's argument, for errors.

    A batch that is itself a tensor is rejected unless the key is a pair of functions: an index would select an example,
    and replacing it would write into the caller's data.
    """
    is_pair = isinstance(key, Sequence) and len(key) == 2 and all(map(callable, key))  # a getter and a setter
    if isinstance(state.batch, Tensor) and not is_pair:
        raise UnsupportedBatchError(
            f"{argument}={key!r} would select single values from the batch, which is one tensor of shape "
            f"{tuple(state.batch.shape)}: let the dataloader return (inputs, targets) or a dict, or pass a (getter, "
            f"setter) pair of functions as {argument}."
        )
    try:
        value = state.batch_get_item(key)
    except (LookupError, AttributeError, TypeError) as error:
        raise UnsupportedBatchError(
            f"{argument}={key!r} selects nothing in a batch of type {type(state.batch).__qualname__}: pass the index, "
            f"the key, or a (getter, setter) pair of that item in your batches."
        ) from error
    return require_tensor(value, f"batch item {argument}={key!r}")


def require_tensor(value: object, what: str) -> Tensor:
    """Return `value` if it is a tensor; `what` names its origin in the error."""
    if isinstance(value, Tensor):
        return value
    raise UnsupportedBatchError(
        f"{what} is a {type(value).__qualname__}, but this algorithm works on one tensor: choose the tensor by the "
        f"algorithm's keys, or leave the algorithm out for this model."
    )


def is_pil(value: object) -> TypeGuard[Image]:
    """Return whether the value is a PIL image."""
    return isinstance(value, Image)


def image_size(image: object) -> tuple[int, int]:
    """Return the height and width of an image."""
    if is_pil(image):
        return image.height, image.width
    if not isinstance(image, Tensor):
        raise TypeError(f"{type(image).__qualname__} is not an image: pass a tensor or a PIL image.")
    if image.ndim < 3:
        raise ValueError(
            f"a tensor of shape {tuple(image.shape)} is not an image: pass (channels, height, width), or a batch."
        )
    return image.shape[-2], image.shape[-1]


def to_pixels(image: Tensor) -> Tensor:
    """Return the values of an image as uint8, as PIL needs them; floating point values are taken to be in [0, 1]."""
    if image.dtype == torch.uint8:
        return image
    if image.is_floating_point():
        # In float32: half precision cannot represent all steps of 1/255.
        return (image.float() * 255).round_().clamp_(0, 255).to(torch.uint8)
    raise TypeError(f"an image of dtype {image.dtype} cannot be a PIL image: pass uint8, or floating point in [0, 1].")


def from_pixels(pixels: Tensor, like: Tensor) -> Tensor:
    """Convert uint8 pixels to the dtype, value range and device of another image."""
    pixels = pixels.to(like.device)
    return pixels if like.dtype == torch.uint8 else pixels.to(like.dtype).div_(255)


def add_term(loss: Any, name: str, term: Tensor) -> Any:
    """Add a term to a loss, to the `total` of several losses, or as one more of them."""
    if isinstance(loss, Mapping):
        return {**loss, "total": loss["total"] + term} if "total" in loss else {**loss, name: term}
    return [*loss, term] if isinstance(loss, Sequence) else loss + term

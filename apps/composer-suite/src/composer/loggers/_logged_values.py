"""Copies of logged values and images, which are read later without blocking training."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from composer_events.logger_destination import detached_copy, format_log_data_value, map_values

__all__ = ["LoggedImages", "PixelsAndMasks", "to_8_bits", "Snapshot", "as_number"]

PixelsAndMasks: TypeAlias = "Iterator[tuple[NDArray[np.uint8], dict[str, NDArray[Any]]]]"


class LoggedImages:
    """Copy of images at the time of logging. Shapes are checked immediately, pixels are read later.

    Args:
        images: One image, a stack of images, or a sequence of images.
        channels_last: Whether channels are the last axis, not the first.
        masks: Segmentation masks by name, one per image.

    Raises:
        ValueError: If an axis is empty, an image has more than three or fewer than two axes, or the number or the axes
            of the masks do not match the images.
    """

    def __init__(self, images: Any, channels_last: bool = False, masks: Mapping[str, Any] | None = None) -> None:
        self._snapshot = Snapshot({"images": images, "masks": dict(masks or {})})
        images = _one_by_one(self._snapshot.values["images"], 3)
        self._images = [_to_hwc(image, channels_last) for image in images]
        self._masks = {
            name: _to_masks(name, stack, len(images)) for name, stack in self._snapshot.values["masks"].items()
        }

    @property
    def size_bytes(self) -> int:
        """The approximate memory of the copies, in bytes."""
        return self._snapshot.size_bytes

    def read(self) -> PixelsAndMasks:
        """Wait for the copies, and yield each image, with values from 0 to 255, and its masks."""
        self._snapshot.wait()
        for index, image in enumerate(self._images):
            yield to_8_bits(_to_numpy(image)), {name: _to_numpy(masks[index]) for name, masks in self._masks.items()}


def to_8_bits(image: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert an image to values from 0 to 255: booleans and floats in [0, 1] are scaled, others are clipped."""
    # The range of floats is not part of their type: images in [0, 1] and in [0, 255] are both common.
    if image.dtype == bool or (np.issubdtype(image.dtype, np.floating) and image.min() >= 0 and image.max() <= 1):
        image = np.round(image * 255.0)
    return image.clip(0, 255).astype(np.uint8)


def _one_by_one(images: Any, max_axes: int) -> list[torch.Tensor]:
    if isinstance(images, Sequence):
        return [torch.as_tensor(image) for image in images]
    stack = torch.as_tensor(images)
    return [stack] if stack.ndim <= max_axes else list(stack)


def _to_hwc(image: torch.Tensor, channels_last: bool) -> torch.Tensor:
    squeezed = image.squeeze()
    if image.numel() == 0 or image.ndim < 2 or squeezed.ndim > 3:
        raise ValueError(
            f"an image of shape {tuple(image.shape)} cannot be shown. An image has a height, a width and perhaps "
            f"channels, none of them 0; several images go into a list, or into one array along its first axis."
        )
    if squeezed.ndim < 3:
        return squeezed.reshape(*squeezed.shape, *[1] * (3 - squeezed.ndim))
    return squeezed if channels_last else squeezed.movedim(0, -1)


def _to_masks(name: str, stack: Any, num_images: int) -> list[torch.Tensor]:
    masks = [mask.squeeze() for mask in _one_by_one(stack, 2)]
    if len(masks) != num_images:
        raise ValueError(f"masks[{name!r}] has {len(masks)} masks for {num_images} images. Give one for each image.")
    for mask in masks:
        if mask.ndim != 2:
            raise ValueError(
                f"masks[{name!r}] has a mask of shape {tuple(mask.shape)}. A mask must have the axes height and width, "
                f"with the class index of each pixel."
            )
    return masks


def _to_numpy(values: torch.Tensor) -> NDArray[Any]:
    # NumPy has no bfloat16, and half precision is too coarse for scaling.
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()


_BYTES_OF_A_NUMBER = 128  # approximate size of a name and a number in Python


class Snapshot:
    """Copy of values by name.

    Tensors on an accelerator are copied asynchronously: the copy is queued after the work that computes them, and only
    reading synchronizes.

    Args:
        values: Numbers, tensors, arrays, text, or containers of these. Later changes to them do not affect the copy.

    Attributes:
        values: The copies. Types and shapes are valid immediately, the contents of tensors only after `wait`.
        size_bytes: Approximate memory of the copies, in bytes.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._arrivals: dict[torch.device, torch.Event] = {}
        self.size_bytes = 0
        self.values: dict[str, Any] = {name: map_values(self._take, value) for name, value in values.items()}
        for device, arrival in self._arrivals.items():
            # One event for all copies of a device, since a stream runs them in order.
            arrival.record(torch.accelerator.current_stream(device))

    def is_ready(self) -> bool:
        """Return whether `read` does not wait: all copies have arrived, or the device has failed and it raises."""
        try:
            return all(arrival.query() for arrival in self._arrivals.values())
        except RuntimeError:  # the device has failed
            return True

    def wait(self) -> None:
        """Wait until the values are on the host."""
        for arrival in self._arrivals.values():
            arrival.synchronize()

    def read(self) -> dict[str, Any]:
        """Wait, and return the values, with one-element tensors as numbers."""
        self.wait()
        return {name: map_values(_to_number, value) for name, value in self.values.items()}

    def _take(self, value: Any) -> Any:
        self.size_bytes += _BYTES_OF_A_NUMBER + _size_bytes(value)
        if isinstance(value, torch.Tensor) and value.is_meta:
            return format_log_data_value(value)  # meta tensors have no data
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return detached_copy(value)
        self._arrivals.setdefault(value.device, torch.Event(value.device))
        return value.detach().to("cpu", non_blocking=True)  # to pinned memory, so the host does not wait


def _size_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return int(value.element_size() * value.numel())  # an upper bound for sparse tensors
    return int(getattr(value, "nbytes", 0))


def _to_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def as_number(value: Any) -> float | None:
    """Return a value as a float for a curve, or `None` if it is not a number."""
    if isinstance(value, str):
        return None
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except Exception:  # arrays, tensors and foreign objects raise various errors
        return None

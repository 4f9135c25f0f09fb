"""Channels last: images and filters with adjacent channels in memory."""

import logging
from typing import Any

import torch
from torch import nn

from composer_algorithms._method import Method, log_no_effect
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, State

__all__ = ["ChannelsLast", "apply_channels_last", "METADATA"]

METADATA = METHODS["channels_last"]

_log = logging.getLogger("composer.algorithms.channels_last")
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def apply_channels_last(model: nn.Module) -> None:
    """Convert the parameters and buffers of convolutions to the channels-last memory format.

    Values, shapes and `Parameter` objects stay. The first convolution converts its input.

    Args:
        model: Changed in place: tensors with 4 dims, and with 5 dims for 3-D convolutions.

    Example:
        >>> conv = nn.Conv2d(3, 8, 3)
        >>> apply_channels_last(conv)
        >>> conv.weight.is_contiguous(memory_format=torch.channels_last)
        True

    Reference:
        "Channels Last Memory Format in PyTorch", tutorial.
    """
    num_converted = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.ndim in _FORMATS:
            # Through .data the Parameter stays the same object, which optimizers hold.
            tensor.data = tensor.data.contiguous(memory_format=_FORMATS[tensor.ndim])
            num_converted += 1
    if not num_converted:
        log_no_effect(_log, "ChannelsLast", model, "it has no tensor with 4 or 5 dims")


class ChannelsLast(Method):
    """Convert `state.model` to the channels-last memory format on `INIT`, in place.

    It acts after all algorithms that create or replace convolutions. It has no state, and checkpoints of models with
    and without it are the same. With FSDP or DeepSpeed, which support no other format, the parameters keep theirs;
    each convolution converts its input instead, which determines the format of its output as well.

    Example:
        >>> ChannelsLast()
        ChannelsLast()

    Reference:
        "Channels Last Memory Format in PyTorch", tutorial.
    """

    surgery_rank = 6  # after everything that creates convolutions
    acts_on = frozenset({Event.INIT})

    def __init__(self) -> None:
        pass  # the base accepts any arguments; this class has none

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Convert the model."""
        if state.fsdp_config is not None or state.deepspeed_enabled:
            for module in state.model.modules():
                is_conv = isinstance(module, (nn.Conv2d, nn.Conv3d))
                if is_conv and _channels_last not in module._forward_pre_hooks.values():
                    # A hook leaves the class and the parameters of the convolution to FSDP and DeepSpeed.
                    module.register_forward_pre_hook(_channels_last)
        else:
            apply_channels_last(state.model)


def _channels_last(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    input = args[0]
    # Unbatched inputs have no such format.
    memory_format = _FORMATS.get(input.ndim) if input.ndim == module.weight.ndim else None
    return args if memory_format is None else (input.contiguous(memory_format=memory_format), *args[1:])

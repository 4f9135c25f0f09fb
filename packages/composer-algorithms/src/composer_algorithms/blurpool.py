"""BlurPool: blur before downsampling, so that small shifts of the image change the features less."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from composer_algorithms._arguments import check_interval
from composer_algorithms._method import ModelSurgery, report
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import ReplacementFunction, count_module_instances, replace_module_classes, twin
from composer_events import Event, Logger, NoEffectWarning, State

__all__ = [
    "BlurPool",
    "apply_blurpool",
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool2d",
    "blur_2d",
    "blurmax_pool2d",
    "METADATA",
]

METADATA = METHODS["blurpool"]

_log = logging.getLogger("composer.algorithms.blurpool")

_Size = int | tuple[int, int]


def blur_2d(input: Tensor, channels: int = -1, stride: _Size = 1, filter: Tensor | None = None) -> Tensor:
    """Convolve each channel with a blur filter, padded so that stride 1 keeps the size.

    Args:
        input: Shape `(batch, channels, height, width)`. Not changed.
        channels: Number of channels, if known: the computation then does not depend on the input's shape, as tracing
            requires. Below 1 it is read from the input, and images without pixels are returned unchanged.
        stride: Stride of the convolution: one number, or one each for height and width.
        filter: Shape `(1, 1, h, w)`, or `(channels, 1, h, w)` with one for each channel; `h` and `w` odd. The outer
            product of `[1, 2, 1] / 4` with itself when `None`.

    Returns:
        The blurred images, in the input's dtype.

    Raises:
        IndexError: If the filter has an even side, and so no center.

    Example:
        >>> blur_2d(torch.ones(1, 1, 3, 3))[0, 0, 1]
        tensor([0.7500, 1.0000, 0.7500])

    Reference:
        Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019, arXiv:1904.11486, section 3.
    """
    if filter is None:
        filter = _default_2d_filter().to(input.device)
    height, width = filter.shape[2], filter.shape[3]
    if height % 2 == 0 or width % 2 == 0:
        raise IndexError(
            f"the filter is {height} by {width}: an even side has no center. Pass a filter with odd sides, such as "
            f"3 by 3."
        )
    if channels < 1:
        if input.shape[-2] == 0 or input.shape[-1] == 0:
            return input
        return _blur_any(input, filter, _pair(stride))
    return _blur(input, filter.expand(channels, -1, -1, -1), _pair(stride), channels)


def _blur(input: Tensor, filter: Tensor, stride: tuple[int, int], channels: int) -> Tensor:
    # Positional arguments: fx quantization does not find the arguments of conv2d by name.
    return F.conv2d(input, filter, None, stride, (filter.shape[2] // 2, filter.shape[3] // 2), (1, 1), channels)


@torch.fx.wrap  # a single node in traces, where channels and dtype of the input are unknown
def _blur_any(input: Tensor, filter: Tensor, stride: tuple[int, int]) -> Tensor:
    channels = input.shape[-3]  # counted from the end, to accept unbatched images as max pooling does
    return _blur(input, filter.expand(channels, -1, -1, -1).to(input.dtype), stride, channels)


def blurmax_pool2d(
    input: Tensor,
    kernel_size: _Size | None = None,
    stride: _Size = 2,
    padding: _Size = 0,
    dilation: _Size = 1,
    ceil_mode: bool = False,
    filter: Tensor | None = None,
) -> Tensor:
    """Take the maximum around each pixel, then blur and downsample.

    The output shape is that of `torch.nn.functional.max_pool2d` with the same arguments.

    Args:
        input: Shape `(batch, channels, height, width)`. Not changed.
        kernel_size: Window of the maximum. `(2, 2)` when `None`.
        stride: Stride of the blur; the maximum is taken at every pixel.
        padding: Padding of the maximum.
        dilation: Dilation of the maximum.
        ceil_mode: Whether incomplete windows at the end produce an output.
        filter: As in `blur_2d`.

    Returns:
        The pooled images.

    Example:
        >>> blurmax_pool2d(torch.rand(1, 3, 8, 8)).shape
        torch.Size([1, 3, 4, 4])

    Reference:
        Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019, arXiv:1904.11486, section 3.2.
    """
    kernel_size = (2, 2) if kernel_size is None else kernel_size
    if filter is None:
        filter = _default_2d_filter().to(input.device)
    return _blurred_maxima(input, _pair(kernel_size), _pair(stride), _pair(padding), _pair(dilation), ceil_mode, filter)


# Sizes are pairs throughout and written out, because TorchScript compiles the functions that the layers call.
def _blurred_maxima(
    input: Tensor,
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    ceil_mode: bool,
    filter: Tensor,
) -> Tensor:
    # Stride 1: the maximum itself does not alias, only the downsampling after it, which the blur precedes.
    maxima = F.max_pool2d(input, kernel_size, (1, 1), padding, dilation)
    if ceil_mode:
        maxima = _extended(maxima, input, stride, padding)
    return _blur_any(maxima, filter, stride)


def _extended(maxima: Tensor, input: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """Repeat the last row and column as often as the last windows of ceil_mode need."""
    extra = [0, 0]
    for i in range(2):
        last = maxima.shape[i - 2] - 1
        steps = (last + stride[i] - 1) // stride[i]
        if steps * stride[i] >= input.shape[i - 2] + padding[i]:  # torch's rule: windows start inside the input
            steps -= 1
        extra[i] = max(0, steps * stride[i] - last)
    return F.pad(maxima, [0, extra[1], 0, extra[0]], mode="replicate")


class BlurMaxPool2d(nn.Module):
    """Max pooling that blurs before downsampling, a replacement for `torch.nn.MaxPool2d`.

    Args:
        kernel_size: Window of the maximum.
        stride: Downsampling factor. The kernel size when `None`.
        padding: Padding of the maximum.
        dilation: Dilation of the maximum.
        ceil_mode: Whether incomplete windows at the end produce an output.

    Example:
        >>> BlurMaxPool2d(3, stride=2, padding=1)(torch.rand(1, 3, 8, 8)).shape
        torch.Size([1, 3, 4, 4])

    Reference:
        Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019, arXiv:1904.11486, section 3.2.
    """

    filt2d: Tensor

    def __init__(
        self,
        kernel_size: _Size,
        stride: _Size | None = None,
        padding: _Size = 0,
        dilation: _Size = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size = _pair(kernel_size)
        self.stride = self.kernel_size if stride is None else _pair(stride)
        self.padding = _pair(padding)
        self.dilation = _pair(dilation)
        self.ceil_mode = ceil_mode
        self.register_buffer("filt2d", _default_2d_filter())

    def reset_parameters(self) -> None:
        """Write the filter; needed for layers created on the meta device."""
        self.filt2d.copy_(_default_2d_filter())

    def forward(self, input: Tensor) -> Tensor:
        """Pool a batch of images."""
        return _blurred_maxima(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.filt2d
        )

    @staticmethod
    def from_maxpool2d(module: nn.MaxPool2d, module_index: int = -1) -> "BlurMaxPool2d":
        """Create a blurring layer from a max pooling layer; `module_index` is not used."""
        return BlurMaxPool2d(module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)

    def extra_repr(self) -> str:
        """Return the settings in the format of `torch.nn.MaxPool2d`."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class BlurConv2d(nn.Module):
    """A strided convolution with a blur before or after it, a replacement for `torch.nn.Conv2d`.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Kernel size of the convolution.
        stride: Downsampling factor. With `blur_first=False`, the kernel size when `None`.
        padding: Padding of the convolution.
        dilation: Dilation of the convolution.
        groups: Groups of the convolution.
        bias: Whether the convolution has a bias.
        blur_first: Blur the input and convolve with the stride. Otherwise convolve at every pixel and downsample the
            blurred result, which multiplies the cost by the number of pixels per output.

    Raises:
        ValueError: If `blur_first` is true and `stride` is `None`.

    Example:
        >>> BlurConv2d(3, 16, kernel_size=3, stride=2, padding=1)(torch.rand(1, 3, 8, 8)).shape
        torch.Size([1, 16, 4, 4])

    Reference:
        Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019, arXiv:1904.11486. The paper blurs
        after the nonlinearity; this layer blurs directly before or after the convolution.
    """

    blur_filter: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Size,
        stride: _Size | None = None,
        padding: _Size | str = 0,
        dilation: _Size = 1,
        groups: int = 1,
        bias: bool = True,
        blur_first: bool = True,
    ) -> None:
        super().__init__()
        if stride is None:
            if blur_first:
                raise ValueError(
                    "stride=None requires blur_first=False, where it means the kernel size: pass the stride of "
                    "the convolution."
                )
            stride = kernel_size
        conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride if blur_first else 1,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
        )
        self._set_up(conv, stride, blur_first)

    def _set_up(self, conv: nn.Conv2d, stride: _Size, blur_first: bool) -> None:
        self.blur_first = blur_first
        self.blur_stride = (1, 1) if blur_first else _pair(stride)
        self.blur_nchannels = conv.in_channels if blur_first else conv.out_channels
        self.conv = conv
        self.conv._already_blurpooled = True  # pyright: ignore[reportArgumentType]  # a mark, not a submodule
        weight = conv.weight
        filter = _default_2d_filter().to(weight.device, weight.dtype)
        self.register_buffer("blur_filter", filter.repeat(self.blur_nchannels, 1, 1, 1))

    def reset_parameters(self) -> None:
        """Write the filter; needed for layers created on the meta device. The convolution resets itself."""
        self.blur_filter.copy_(_default_2d_filter().expand_as(self.blur_filter))

    def forward(self, input: Tensor) -> Tensor:
        """Blur and convolve a batch of images."""
        if self.blur_first:
            return self.conv(_blur(input, self.blur_filter, self.blur_stride, self.blur_nchannels))
        return _blur(self.conv(input), self.blur_filter, self.blur_stride, self.blur_nchannels)

    @staticmethod
    def from_conv2d(module: nn.Conv2d, module_index: int = -1, blur_first: bool = True) -> "BlurConv2d":
        """Create a blurring layer from a convolution, with copies of its parameters; `module_index` is not used."""
        conv = twin(module)
        stride = cast("tuple[int, int]", module.stride)
        if not blur_first:
            conv.stride = (1, 1)
        blurring = BlurConv2d.__new__(BlurConv2d)  # __init__ would draw weights, and change the random state
        nn.Module.__init__(blurring)
        blurring._set_up(conv, stride, blur_first)
        return blurring


class BlurPool2d(nn.Module):
    """Blur and downsampling without a maximum.

    Args:
        channels: Channels of the input. Below 1: any number.
        stride: Downsampling factor.
        padding: Not used: the blur is padded so that stride 1 keeps the size.

    Example:
        >>> BlurPool2d(channels=3)(torch.rand(1, 3, 8, 8)).shape
        torch.Size([1, 3, 4, 4])

    Reference:
        Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019, arXiv:1904.11486, section 3.2.
    """

    blur_filter: Tensor

    def __init__(self, channels: int = 0, stride: _Size = 2, padding: _Size = 1) -> None:
        super().__init__()
        self.channels = channels
        self.stride = stride
        self.padding = padding
        self.register_buffer("blur_filter", _default_2d_filter().repeat(max(channels, 1), 1, 1, 1))

    def reset_parameters(self) -> None:
        """Write the filter; needed for layers created on the meta device."""
        self.blur_filter.copy_(_default_2d_filter().expand_as(self.blur_filter))

    def forward(self, input: Tensor) -> Tensor:
        """Blur a batch of images."""
        return blur_2d(input, channels=self.channels, stride=self.stride, filter=self.blur_filter)


def _default_2d_filter() -> Tensor:
    # Written out instead of torch.outer: exact in every floating dtype, independent of the default device.
    rows = [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]
    return torch.tensor([[rows]]) / 16


def _pair(value: _Size) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> None:
    """Replace strided convolutions and max pooling in a model with layers that blur before downsampling.

    New convolutions have copies of the weights. A second call changes nothing.

    Args:
        model: Changed in place.
        replace_convs: Replace each `torch.nn.Conv2d` that has a stride above 1 with a `BlurConv2d`.
        replace_maxpools: Replace each `torch.nn.MaxPool2d` with a `BlurMaxPool2d`, unless it also returns indices.
        blur_first: Blur before the convolution; see `BlurConv2d`.
        min_channels: Keep convolutions with fewer input channels, such as the first one of most networks.
        optimizers: Existing optimizers of the model, which get the new parameters.

    Raises:
        ValueError: If a hook computes the weight of such a convolution, as with `torch.nn.utils.weight_norm`.

    Warns:
        NoEffectWarning: If the model has no such layers.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2), nn.MaxPool2d(2))
        >>> apply_blurpool(model)
        >>> [type(layer).__name__ for layer in model]
        ['BlurConv2d', 'BlurMaxPool2d']

    Reference:
        Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019, arXiv:1904.11486.
    """
    check_interval("[-inf, inf]", min_channels=min_channels)

    def blurred_maxpool(module: nn.MaxPool2d, module_index: int) -> BlurMaxPool2d | None:
        # With indices nothing changes: a blurred value does not come from a single pixel.
        return None if module.return_indices else BlurMaxPool2d.from_maxpool2d(module, module_index)

    def blurred_conv(module: nn.Conv2d, module_index: int) -> BlurConv2d | None:
        is_candidate = max(module.stride) > 1 and module.in_channels >= min_channels
        # With blur_first the convolution inside a BlurConv2d keeps its stride; the mark stops a second replacement.
        if not is_candidate or hasattr(module, "_already_blurpooled"):
            return None
        if module._parameters.get("weight") is None and not parametrize.is_parametrized(module, "weight"):
            raise ValueError(
                f"module={module!r} has a weight that a hook computes, which the blurring layer cannot keep: use the "
                f"parametrization instead, such as torch.nn.utils.parametrizations.weight_norm."
            )
        return BlurConv2d.from_conv2d(module, module_index, blur_first)

    policies: dict[type[nn.Module], ReplacementFunction] = {}
    if replace_maxpools:
        policies[nn.MaxPool2d] = blurred_maxpool
    if replace_convs:
        policies[nn.Conv2d] = blurred_conv
    replace_module_classes(model, policies, optimizers)
    if not count_module_instances(model, (BlurConv2d, BlurMaxPool2d)):
        warnings.warn(
            f"BlurPool has no effect on this {type(model).__qualname__}: below it there is no MaxPool2d and no Conv2d "
            f"with a stride above 1 and min_channels={min_channels!r} or more input channels. Lower min_channels, or "
            f"leave BlurPool out.",
            NoEffectWarning,
            stacklevel=2,
        )


@dataclass(repr=False, eq=False)
class BlurPool(ModelSurgery):
    """Replace strided convolutions and max pooling in `state.model` on `INIT`, so that they blur before downsampling.

    The optimizers' parameter groups are updated. It acts after algorithms that replace whole operators, and before
    those that wrap convolutions or change their weights. A checkpoint of the changed model loads only into a model with
    BlurPool, so loading one applies the algorithm automatically.

    Args:
        replace_convs: Replace each `torch.nn.Conv2d` that has a stride above 1.
        replace_maxpools: Replace each `torch.nn.MaxPool2d`.
        blur_first: Blur before the convolution. Blurring after it costs more and may be more accurate.
        min_channels: Keep convolutions with fewer input channels.

    Raises:
        ValueError: If neither convolutions nor max pooling are to be replaced.

    Example:
        >>> BlurPool(min_channels=32)
        BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=32)

    Reference:
        Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019, arXiv:1904.11486. The paper blurs
        after the nonlinearity; here the blur is next to the convolution, so no other module has to be found.
    """

    surgery_rank = 2  # after replacements of whole operators, before wrappers of convolutions

    replace_convs: bool = True
    replace_maxpools: bool = True
    blur_first: bool = True
    min_channels: int = 16

    def __post_init__(self) -> None:
        check_interval("[-inf, inf]", min_channels=self.min_channels)
        if not (self.replace_convs or self.replace_maxpools):
            raise ValueError(
                "replace_convs=False and replace_maxpools=False leave nothing to replace: set one of them, or leave "
                "BlurPool out."
            )

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Replace the layers and log their numbers."""
        apply_blurpool(state.model, **self.arguments(), optimizers=state.optimizers)
        counts = {
            "blurpool/num_blurpool_layers": count_module_instances(state.model, BlurMaxPool2d),
            "blurpool/num_blurconv_layers": count_module_instances(state.model, BlurConv2d),
        }
        report(_log, logger, counts)

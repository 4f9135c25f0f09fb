"""Factorization: replacement of large matrices in a network with products of two smaller ones."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer

from composer_algorithms._arguments import check_interval
from composer_algorithms._method import ModelSurgery, log_no_effect, report
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import count_module_instances, replace_module_classes
from composer_events import Event, Logger, State

__all__ = [
    "Factorize",
    "apply_factorization",
    "FactorizedConv2d",
    "FactorizedLinear",
    "factorizing_could_speedup",
    "LowRankSolution",
    "factorize_conv2d",
    "factorize_matrix",
    "LOG_NUM_CONV2D_REPLACEMENTS_KEY",
    "LOG_NUM_LINEAR_REPLACEMENTS_KEY",
    "METADATA",
]

METADATA = METHODS["factorize"]

_log = logging.getLogger("composer.algorithms.factorize")


@dataclass(slots=True)
class LowRankSolution:
    """Result of a factorization.

    Args:
        Wa: First factor, or the whole matrix.
        Wb: Second factor; `None` if there is only one matrix.
        bias: Bias of the product.
        rank: Number of columns between the factors; -1 if there was no new factorization.
        nmse: Mean squared error on the data, divided by the variance of the targets.
    """

    Wa: Tensor | None = None
    Wb: Tensor | None = None
    bias: Tensor | None = None
    rank: int = -1
    nmse: float = 0.0


def factorize_matrix(
    X: Tensor,
    Y: Tensor,
    Wa: Tensor,
    Wb: Tensor | None = None,
    bias: Tensor | None = None,
    rank: int | float = 0.25,
    n_iters: int = 3,
) -> LowRankSolution:
    """Approximate `X @ Wa (@ Wb) + bias = Y` by a product of rank `rank`.

    The factors start as the truncated singular value decomposition of the weights. Then each is solved for in turn, in
    double precision.

    Args:
        X: Data of shape `(num_examples, in)`.
        Y: Targets of shape `(num_examples, out)`.
        Wa: Shape `(in, out)`, or `(in, old_rank)` with `Wb`.
        Wb: Shape `(old_rank, out)`, if the weights are already factorized.
        bias: Shape `(out,)`.
        rank: Columns between the factors, or below 1 a fraction of `in`, but at most the number of columns of `Wa`.
        n_iters: Number of times that both factors are solved for.

    Returns:
        The factors, in the dtype of `Wa`. If the rank would reach `in` or `out`, one matrix that solves the problem
        without a rank constraint; if it would reach that of `Wa` and `Wb`, these unchanged.

    Raises:
        ValueError: If `rank` is not above 0 or `n_iters` is negative.

    Example:
        >>> X, W = torch.rand(64, 8), torch.rand(8, 8)
        >>> solution = factorize_matrix(X, X @ W, W, rank=2)
        >>> solution.Wa.shape, solution.Wb.shape, solution.nmse < 1
        (torch.Size([8, 2]), torch.Size([2, 8]), True)

    Reference:
        Zhang et al., "Accelerating Very Deep Convolutional Networks for Classification and Detection", TPAMI 2016,
        arXiv:1505.06798, section 3.1.
    """
    if not rank > 0 or n_iters < 0:
        raise ValueError(f"rank={rank!r} and n_iters={n_iters!r}: the rank must be above 0, the iterations 0 or more.")
    in_features, out_features = X.shape[1], Y.shape[1]
    k = max(1, min(int(rank * in_features), Wa.shape[1])) if rank < 1 else int(rank)
    # The pseudoinverse is sensitive to rounding where the data is nearly rank deficient.
    x, y, first = X.detach().double(), Y.detach().double(), Wa.detach().double()
    second = None if Wb is None else Wb.detach().double()
    offset = torch.zeros(out_features, dtype=torch.double, device=y.device) if bias is None else bias.detach().double()
    is_new = True
    # A rank this high constrains nothing, so solve for a single matrix.
    if k >= min(in_features, out_features):
        first, second, k = _solve(x, y - offset), None, -1
    elif k >= first.shape[1]:
        k, is_new = -1, False
    else:
        first, second = _truncated(first if second is None else first @ second, k)
        unconstrained = _solve(x, y - offset)
        for _ in range(n_iters):
            second = _solve(x @ first, y - offset)
            # For a given `second`, the best `first` is the unconstrained solution times the pseudoinverse of `second`.
            first = _solve(second.t(), unconstrained.t()).t()
    product = x @ first if second is None else x @ first @ second
    # The best bias for the new factors is the mean of what they leave over.
    if bias is not None and is_new:
        offset = offset + (y - offset - product).mean(dim=0)
    # Constant targets have no variance, and an error of 0 must not become 0 / 0.
    variance = y.var(unbiased=False).clamp_min(torch.finfo(torch.double).tiny)
    nmse = float((product + offset - y).square().mean() / variance)
    return LowRankSolution(
        Wa=first.to(Wa.dtype),
        Wb=None if second is None else second.to(Wa.dtype),
        bias=None if bias is None else offset.to(bias.dtype),
        rank=k,
        nmse=nmse,
    )


def factorize_conv2d(
    X: Tensor,
    Wa: Tensor,
    Wb: Tensor | None = None,
    rank: int | float = 0.25,
    biasA: Tensor | None = None,
    biasB: Tensor | None = None,
    n_iters: int = 3,
    **conv2d_kwargs: Any,
) -> LowRankSolution:
    """Approximate a convolution by one with few output channels followed by a 1x1 convolution.

    Args:
        X: Images of shape `(batch, in, height, width)`.
        Wa: Shape `(out, in, h, w)`, or `(old_rank, in, h, w)` with `Wb`.
        Wb: Shape `(out, old_rank, 1, 1)`, if the convolution is already factorized.
        rank: Channels between the two, or below 1 a fraction of `in * h * w`, but at most those of `Wa`.
        biasA: Bias of the first convolution.
        biasB: Bias of the second convolution.
        n_iters: Number of times that both are solved for.
        **conv2d_kwargs: Arguments of `torch.nn.functional.conv2d`. Only `padding` may differ from the default.

    Returns:
        Both weights in the shapes of convolutions, and the bias of the second one.

    Raises:
        NotImplementedError: If stride, dilation or number of groups is not 1.
        RuntimeError: If `biasB` is given without `Wb`.

    Example:
        >>> solution = factorize_conv2d(torch.rand(4, 8, 6, 6), torch.rand(16, 8, 3, 3), rank=4, padding=1)
        >>> solution.Wa.shape, solution.Wb.shape
        (torch.Size([4, 8, 3, 3]), torch.Size([16, 4, 1, 1]))

    Reference:
        Zhang et al., "Accelerating Very Deep Convolutional Networks for Classification and Detection", TPAMI 2016,
        arXiv:1505.06798.
    """
    for name in ("stride", "dilation", "groups"):
        value = conv2d_kwargs.get(name, 1)
        if set(value if isinstance(value, (tuple, list)) else (value,)) != {1}:
            raise NotImplementedError(f"{name}={value!r}: only convolutions with {name}=1 can be factorized on data.")
    if biasB is not None and Wb is None:
        raise RuntimeError("biasB is the bias of a second convolution, which does not exist with Wb=None.")
    out_channels, kernel_size = (Wa if Wb is None else Wb).shape[0], Wa.shape[2:]
    padding: Any = conv2d_kwargs.get("padding", 0)
    # On its patches a convolution is a matrix product, to which factorize_matrix applies.
    patches = F.unfold(_padded(X, padding, kernel_size), tuple(kernel_size))
    x = patches.transpose(1, 2).flatten(0, 1)
    first = Wa.flatten(1).t()
    second = None if Wb is None else Wb.flatten(1).t()
    bias = biasA if second is None else biasB
    if second is not None and biasA is not None:
        # The second layer maps the bias of the first one to a constant, which the second bias absorbs.
        bias = biasA @ second if biasB is None else biasA @ second + biasB
    y = x @ first if second is None else x @ first @ second
    if bias is not None:
        y = y + bias
    solution = factorize_matrix(x, y, first, second, bias=bias, rank=rank, n_iters=n_iters)
    first_matrix: Any = solution.Wa  # always set by factorize_matrix
    solution.Wa = first_matrix.t().reshape(-1, *Wa.shape[1:])
    if solution.Wb is not None:
        solution.Wb = solution.Wb.t().reshape(out_channels, -1, 1, 1)
    return solution


def _padded(images: Tensor, padding: Any, kernel_size: torch.Size) -> Tensor:
    if padding == "valid":
        return images
    if padding == "same":  # the odd pixel goes right and bottom, as in conv2d
        sides = [side for size in reversed(kernel_size) for side in ((size - 1) // 2, size // 2)]
        return F.pad(images, sides)
    height, width = (padding, padding) if isinstance(padding, int) else padding
    return F.pad(images, [width, width, height, height])


def _truncated(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    # Half of each singular value per factor keeps the two at the same scale.
    root = values[:rank].sqrt()
    return left[:, :rank] * root, root[:, None] * right[:rank]


def _solve(a: Tensor, b: Tensor) -> Tensor:
    # By the pseudoinverse: on GPUs lstsq requires full rank, which the data may lack.
    return torch.linalg.pinv(a) @ b


def factorizing_could_speedup(module: nn.Module, latent_size: int | float) -> bool:
    """Return whether a layer does less work when factorized with a given latent size.

    Args:
        module: A linear layer or a convolution, factorized or not. Any other module returns false.
        latent_size: Latent channels or features, or below 1 a fraction of the smaller of input and output.

    Example:
        >>> factorizing_could_speedup(nn.Linear(512, 512), 0.25), factorizing_could_speedup(nn.Linear(512, 512), 0.5)
        (True, False)
    """
    if isinstance(module, (FactorizedConv2d, nn.Conv2d)):
        sizes, pixels = (module.in_channels, module.out_channels), math.prod(module.kernel_size)
    elif isinstance(module, (FactorizedLinear, nn.Linear)):
        sizes, pixels = (module.in_features, module.out_features), 1
    else:
        return False
    if isinstance(module, _Factorized):
        return _latent_size(latent_size, *sizes) < module._latent_size
    is_grouped = isinstance(module, nn.Conv2d) and module.groups != 1
    return not is_grouped and _latent_size(latent_size, *sizes) <= _max_rank(sizes[0] * pixels, sizes[1])


class _Factorized(nn.Module):
    """Two consecutive layers, `module0` and `module1`, whose rank can be lowered to approximate the same function."""

    def __init__(self, module0: nn.Module, module1: nn.Module, latent_size: int) -> None:
        super().__init__()
        self.module0: Any = module0
        self.module1: Any = module1
        self._latent_size = latent_size

    def forward(self, input: Tensor) -> Tensor:
        """Apply both layers."""
        return self.module1(self.module0(input))

    def reset_parameters(self) -> None:
        """Draw new weights for both layers."""
        self.module0.reset_parameters()
        self.module1.reset_parameters()

    def set_rank(self, input: Tensor, rank: int) -> None:
        """Lower the latent size, with new weights that change the outputs for `input` as little as possible.

        The new weights are new parameters, unknown to optimizers.

        Args:
            input: Typical inputs of the layer, many more than the rank.
            rank: New latent size.

        Raises:
            ValueError: If `rank` is higher than the current one, or not above 0.
        """
        if not 0 < rank <= self._latent_size:
            raise ValueError(
                f"rank={rank!r} is out of range: the layer has the latent size {self._latent_size}, which can only be "
                f"lowered. Pass a number from 1 to {self._latent_size}."
            )
        if rank < self._latent_size:
            self.apply_solution(self.solution_for_rank(input, rank))

    def solution_for_rank(self, input: Tensor, rank: int) -> LowRankSolution:
        """Return the weights that `set_rank` would set."""
        raise NotImplementedError

    @torch.no_grad()
    def apply_solution(self, solution: LowRankSolution) -> None:
        """Set weights found by `solution_for_rank`."""
        assert solution.Wa is not None  # rank < latent size <= input and output
        assert solution.Wb is not None
        self._latent_size = solution.rank
        self.module0.weight = nn.Parameter(self._to_weight(solution.Wa))
        self.module1.weight = nn.Parameter(self._to_weight(solution.Wb))
        if solution.bias is not None:
            self.module1.bias = nn.Parameter(solution.bias)
        self._set_latent_attributes()

    def _to_weight(self, matrix: Tensor) -> Tensor:
        return matrix.contiguous()

    def _set_latent_attributes(self) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def _copy_from(self, weight: Tensor, bias: Tensor | None) -> None:
        """Copy the best approximation of a weight of shape `(out, ...)`, its truncated singular value decomposition."""
        if not weight.is_meta:
            # In float32, since svd has no 16-bit kernels.
            left, values, right = torch.linalg.svd(weight.flatten(1).float(), full_matrices=False)
            root, k = values[: self._latent_size].sqrt(), self._latent_size
            self.module0.weight.copy_((root[:, None] * right[:k]).reshape(self.module0.weight.shape))
            self.module1.weight.copy_((left[:, :k] * root).reshape(self.module1.weight.shape))
        if bias is not None:
            self.module1.bias.copy_(bias)
        elif self.module1.bias is not None:
            self.module1.bias.zero_()


class FactorizedConv2d(_Factorized):
    """A convolution with few output channels, followed by a 1x1 convolution with a bias.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Kernel size of the first convolution.
        latent_channels: Latent channels, or below 1 a fraction of the smaller of input and output.
        **kwargs: Arguments of the first `torch.nn.Conv2d`, which has no bias; `bias` is accepted and not used.

    Raises:
        ValueError: If so many latent channels would take more work than one convolution.
        NotImplementedError: If there is more than one group.

    Example:
        >>> FactorizedConv2d(16, 32, kernel_size=3, latent_channels=4)(torch.rand(1, 16, 8, 8)).shape
        torch.Size([1, 32, 6, 6])

    Reference:
        Zhang et al., "Accelerating Very Deep Convolutional Networks for Classification and Detection", TPAMI 2016,
        arXiv:1505.06798.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        latent_channels: int | float = 0.25,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("groups", 1) != 1:
            raise NotImplementedError(
                f"groups={kwargs['groups']!r}: a grouped convolution is factorized already. Use groups=1."
            )
        most = self.max_rank(in_channels, out_channels, kernel_size)
        latent = _latent_size(latent_channels, in_channels, out_channels, most)
        placement = {name: kwargs[name] for name in ("device", "dtype") if name in kwargs}
        kwargs.pop("bias", None)
        first = nn.Conv2d(in_channels, latent, kernel_size, bias=False, **kwargs)
        super().__init__(first, nn.Conv2d(latent, out_channels, 1, bias=True, **placement), latent)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = first.kernel_size

    @property
    def latent_channels(self) -> int:
        """Latent channels."""
        return self._latent_size

    @torch.no_grad()
    def solution_for_rank(self, input: Tensor, rank: int) -> LowRankSolution:
        """Return the weights that `set_rank` would set.

        Args:
            input: Images of shape `(batch, in_channels, height, width)`.
            rank: New number of latent channels.

        Raises:
            NotImplementedError: If the convolution is dilated.
        """
        first = self.module0
        return factorize_conv2d(
            input,
            first.weight,
            self.module1.weight,
            rank=rank,
            biasB=self.module1.bias,
            padding=first.padding,
            dilation=first.dilation,  # no stride: it only selects among the fitted positions
        )

    @staticmethod
    def max_rank(in_channels: int, out_channels: int, kernel_size: int | tuple[int, int]) -> int:
        """Return the largest number of latent channels that saves work."""
        pixels = kernel_size**2 if isinstance(kernel_size, int) else math.prod(kernel_size)
        return _max_rank(in_channels * pixels, out_channels)

    # Composer's names of the method.
    max_allowed_latent_channels = max_rank
    max_allowed_latent_features = max_rank

    @staticmethod
    def from_conv2d(
        module: nn.Conv2d, module_index: int = -1, latent_channels: int | float = 0.25
    ) -> "FactorizedConv2d":
        """Create the best approximation of a convolution; `module_index` is not used."""
        factorized = FactorizedConv2d(
            module.in_channels,
            module.out_channels,
            (module.kernel_size[0], module.kernel_size[1]),
            latent_channels,
            stride=module.stride,
            padding=module.padding,
            dilation=module.dilation,
            groups=module.groups,
            padding_mode=module.padding_mode,
            device=module.weight.device,
            dtype=module.weight.dtype,
        )
        factorized._copy_from(module.weight, module.bias)
        return factorized

    def _set_latent_attributes(self) -> None:
        self.module0.out_channels = self.module1.in_channels = self._latent_size


class FactorizedLinear(_Factorized):
    """Two consecutive linear layers, the first one with few outputs and no bias.

    Args:
        in_features: Features of the input.
        out_features: Features of the output.
        bias: Whether the second layer has a bias.
        latent_features: Latent features, or below 1 a fraction of the smaller of input and output.
        device: Device of both layers.
        dtype: Dtype of both layers.

    Raises:
        ValueError: If so many latent features would take more work than one layer.

    Example:
        >>> FactorizedLinear(64, 32, latent_features=8)(torch.rand(2, 64)).shape
        torch.Size([2, 32])

    Reference:
        Denton et al., "Exploiting Linear Structure Within Convolutional Networks for Efficient Evaluation", NeurIPS
        2014, arXiv:1404.0736.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        latent_features: int | float = 0.25,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        latent = _latent_size(latent_features, in_features, out_features, self.max_rank(in_features, out_features))
        super().__init__(
            nn.Linear(in_features, latent, bias=False, device=device, dtype=dtype),
            nn.Linear(latent, out_features, bias=bias, device=device, dtype=dtype),
            latent,
        )
        self.in_features, self.out_features = in_features, out_features

    @property
    def latent_features(self) -> int:
        """Latent features."""
        return self._latent_size

    @property
    def weight(self) -> Tensor:
        """Product of both weights, for modules that read it, such as `torch.nn.TransformerEncoderLayer` in inference.

        To change it, change the weights of `module0` and `module1`.
        """
        return self.module1.weight @ self.module0.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the second layer."""
        return self.module1.bias

    @torch.no_grad()
    def solution_for_rank(self, input: Tensor, rank: int) -> LowRankSolution:
        """Return the weights that `set_rank` would set.

        Args:
            input: Inputs of shape `(..., in_features)`.
            rank: New number of latent features.
        """
        x = input.flatten(0, -2)
        return factorize_matrix(
            x, self(x), self.module0.weight.t(), self.module1.weight.t(), self.module1.bias, rank=rank
        )

    @staticmethod
    def max_rank(in_features: int, out_features: int) -> int:
        """Return the largest number of latent features that saves work."""
        return _max_rank(in_features, out_features)

    max_allowed_latent_channels = max_rank
    max_allowed_latent_features = max_rank

    @staticmethod
    def from_linear(
        module: nn.Linear, module_index: int = -1, latent_features: int | float = 0.25
    ) -> "FactorizedLinear":
        """Create the best approximation of a linear layer; `module_index` is not used."""
        weight, bias = module.weight, module.bias
        factorized = FactorizedLinear(
            module.in_features,
            module.out_features,
            bias is not None,
            latent_features,
            device=weight.device,
            dtype=weight.dtype,
        )
        factorized._copy_from(weight, bias)
        return factorized

    def _to_weight(self, matrix: Tensor) -> Tensor:
        return matrix.t().contiguous()

    def _set_latent_attributes(self) -> None:
        self.module0.out_features = self.module1.in_features = self._latent_size


def _latent_size(latent: int | float, num_in: int, num_out: int, most: float = math.inf) -> int:
    size = max(1, int(latent * min(num_in, num_out))) if latent < 1 else int(latent)
    if size > most:
        raise ValueError(
            f"a latent size of {latent!r} means {size}, and two such layers do more work than one: pass {most} or less."
        )
    return size


def _max_rank(fan_in: int, fan_out: int) -> int:
    # One layer takes fan_in * fan_out multiplications, two layers with latent size k take k * (fan_in + fan_out). The
    # largest integer below a quotient x is ceil(x - 1), also if x is an integer.
    return math.ceil(fan_in * fan_out / (fan_in + fan_out) - 1)


LOG_NUM_CONV2D_REPLACEMENTS_KEY = "factorize/num_conv2d_replacements"
LOG_NUM_LINEAR_REPLACEMENTS_KEY = "factorize/num_linear_replacements"


def apply_factorization(
    model: nn.Module,
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 512,
    latent_channels: int | float = 0.25,
    min_features: int = 512,
    latent_features: int | float = 0.25,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> None:
    """Replace each large convolution and linear layer in a model with two smaller ones.

    The new weights are the best approximation of the old ones. Not replaced are layers that would not do less work,
    grouped convolutions, subclasses with a `forward` of their own, layers whose weight is shared with another module or
    parametrized, and the output of `torch.nn.MultiheadAttention`, which is not called as a module. A second call with
    the same arguments changes nothing.

    Args:
        model: Changed in place.
        factorize_convs: Replace each large enough `torch.nn.Conv2d` with a `FactorizedConv2d`.
        factorize_linears: Replace each large enough `torch.nn.Linear` with a `FactorizedLinear`.
        min_channels: Minimum number of input and output channels of replaced convolutions.
        latent_channels: Latent channels, or below 1 a fraction of the smaller of input and output.
        min_features: Minimum number of input and output features of replaced linear layers.
        latent_features: Latent features, or below 1 a fraction of the smaller of input and output.
        optimizers: Existing optimizers of the model, which get the new parameters.

    Raises:
        ValueError: If a latent size is not above 0.

    Example:
        >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())
        >>> apply_factorization(model, latent_features=64)
        >>> model[0].latent_features
        64

    Reference:
        Zhang et al., "Accelerating Very Deep Convolutional Networks for Classification and Detection", TPAMI 2016,
        arXiv:1505.06798; Jaderberg et al., 2014, arXiv:1405.3866.
    """
    check_interval("[-inf, inf]", min_channels=min_channels, min_features=min_features)
    check_interval("(0, inf)", latent_channels=latent_channels, latent_features=latent_features)
    # Counted before any replacement: a shared weight has to stay one tensor, which no two factors can be.
    uses = Counter(id(tensor) for module in model.modules() for tensor in module.parameters(recurse=False))

    def can_be_replaced(module: nn.Conv2d | nn.Linear, kind: type[nn.Module], latent_size: int | float) -> bool:
        is_plain = type(module).forward is kind.forward and uses[id(module.weight)] == 1
        return is_plain and factorizing_could_speedup(module, latent_size)

    def factorize_conv(module: nn.Conv2d, module_index: int) -> nn.Module | None:
        is_large = min(module.in_channels, module.out_channels) >= min_channels
        if is_large and can_be_replaced(module, nn.Conv2d, latent_channels):
            return FactorizedConv2d.from_conv2d(module, module_index, latent_channels)
        return None

    def factorize_linear(module: nn.Linear, module_index: int) -> nn.Module | None:
        if isinstance(module, NonDynamicallyQuantizableLinear):  # MultiheadAttention reads the weight of its output
            return None
        is_large = min(module.in_features, module.out_features) >= min_features
        if is_large and can_be_replaced(module, nn.Linear, latent_features):
            return FactorizedLinear.from_linear(module, module_index, latent_features)
        return None

    if factorize_convs:
        replace_module_classes(model, {nn.Conv2d: factorize_conv}, optimizers)
    if factorize_linears:
        replace_module_classes(model, {nn.Linear: factorize_linear}, optimizers)
    if not count_module_instances(model, (FactorizedConv2d, FactorizedLinear)):
        log_no_effect(
            _log,
            "Factorize",
            model,
            f"below it there is no Conv2d of {min_channels=} and no Linear of {min_features=} or more that would do "
            f"less work with {latent_channels=} and {latent_features=}",
        )


@dataclass(repr=False, eq=False)
class Factorize(ModelSurgery):
    """Replace each large convolution and linear layer in `state.model` with two smaller ones on `INIT`.

    The optimizers' parameter groups are updated. It acts before algorithms that wrap modules. Loading a checkpoint of
    the changed model applies the algorithm.

    Args:
        factorize_convs: Replace each large enough `torch.nn.Conv2d`.
        factorize_linears: Replace each large enough `torch.nn.Linear`.
        min_channels: Minimum number of input and output channels of replaced convolutions.
        latent_channels: Latent channels, or below 1 a fraction of the smaller of input and output.
        min_features: Minimum number of input and output features of replaced linear layers.
        latent_features: Latent features, or below 1 a fraction of the smaller of input and output.

    Raises:
        ValueError: If a latent size is not above 0.

    Example:
        >>> Factorize(factorize_convs=False).latent_features
        128

    Reference:
        Zhang et al., "Accelerating Very Deep Convolutional Networks for Classification and Detection", TPAMI 2016,
        arXiv:1505.06798. The paper fits the factors to responses on data; here they are fitted to the weights, and to
        data only in `FactorizedConv2d.set_rank` and `FactorizedLinear.set_rank`.
    """

    surgery_rank = 1  # before wrappers of modules

    # These defaults differ from those of the function, as in Composer.
    factorize_convs: bool = True
    factorize_linears: bool = True
    min_channels: int = 256
    latent_channels: int | float = 0.25
    min_features: int = 256
    latent_features: int | float = 128

    def __post_init__(self) -> None:
        check_interval("[-inf, inf]", min_channels=self.min_channels, min_features=self.min_features)
        check_interval("(0, inf)", latent_channels=self.latent_channels, latent_features=self.latent_features)

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Replace the layers, and log the number of factorized layers of each enabled kind."""
        apply_factorization(state.model, **self.arguments(), optimizers=state.optimizers)
        for is_enabled, key, layer in (
            (self.factorize_convs, LOG_NUM_CONV2D_REPLACEMENTS_KEY, FactorizedConv2d),
            (self.factorize_linears, LOG_NUM_LINEAR_REPLACEMENTS_KEY, FactorizedLinear),
        ):
            if is_enabled:
                report(_log, logger, {key: count_module_instances(state.model, layer)})

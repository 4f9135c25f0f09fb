"""Find two small matrices whose product does what a large one does, on given data."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LowRankSolution", "factorize_conv2d", "factorize_matrix"]


@dataclass(slots=True)
class LowRankSolution:
    """The factors that were found.

    Args:
        Wa: The first factor, or the whole matrix.
        Wb: The second factor; `None` if there is only one matrix.
        bias: What is added to the product.
        rank: The number of columns between the factors; -1 if nothing was factorized anew.
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

    Starts from the truncated singular value decomposition of the weights and then solves for one factor at a time,
    in double precision.

    Args:
        X: Data of shape `(num_examples, in)`.
        Y: Targets of shape `(num_examples, out)`.
        Wa: Shape `(in, out)`, or `(in, old_rank)` with `Wb`.
        Wb: Shape `(old_rank, out)`, if the weights are factorized already.
        bias: Shape `(out,)`.
        rank: Columns between the factors, or below 1 a share of `in`, but no more than `Wa` has columns.
        n_iters: How often both factors are solved for.

    Returns:
        The factors, in the dtype of `Wa`. Where the rank would be `in` or `out` or more, one matrix that solves the
        problem without a constraint; where it would be no less than that of `Wa` and `Wb`, these as they are.

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
    x, y, first = X.detach().double(), Y.detach().double(), Wa.detach().double()
    second = None if Wb is None else Wb.detach().double()
    offset = torch.zeros(out_features, dtype=torch.double, device=y.device) if bias is None else bias.detach().double()
    is_new = True
    if k >= min(in_features, out_features):
        first, second, k = _solve(x, y - offset), None, -1
    elif k >= first.shape[1]:
        k, is_new = -1, False
    else:
        first, second = _truncated(first if second is None else first @ second, k)
        first, second = _alternate(x, y - offset, first, second, n_iters)
    product = x @ first if second is None else x @ first @ second
    if bias is not None and is_new:
        offset = offset + (y - offset - product).mean(dim=0)
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
    """Approximate a convolution by one with few output channels and a 1x1 convolution behind it.

    Args:
        X: Images of shape `(batch, in, height, width)`.
        Wa: Shape `(out, in, h, w)`, or `(old_rank, in, h, w)` with `Wb`.
        Wb: Shape `(out, old_rank, 1, 1)`, if the convolution is factorized already.
        rank: Channels between the two, or below 1 a share of `in * h * w`, but no more than `Wa` has.
        biasA: Bias of the first convolution.
        biasB: Bias of the second one.
        n_iters: How often both are solved for.
        **conv2d_kwargs: Of `torch.nn.functional.conv2d`. Only `padding` may have another value than the default.

    Returns:
        Both weights in the shapes of convolutions, and the bias behind the second.

    Raises:
        NotImplementedError: If a stride, dilation or number of groups other than 1 is given.
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
        if any(one != 1 for one in (value if isinstance(value, (tuple, list)) else (value,))):
            raise NotImplementedError(f"{name}={value!r}: only convolutions with {name}=1 can be factorized on data.")
    if biasB is not None and Wb is None:
        raise RuntimeError("biasB is the bias of a second convolution, and Wb=None means that there is none.")
    out_channels, kernel_size = (Wa if Wb is None else Wb).shape[0], Wa.shape[2:]
    padding: Any = conv2d_kwargs.get("padding", 0)
    patches = F.unfold(_padded(X, padding, kernel_size), tuple(kernel_size))
    x = patches.transpose(1, 2).flatten(0, 1)
    first = Wa.flatten(1).t()
    second = None if Wb is None else Wb.flatten(1).t()
    bias = _joint_bias(second, biasA, biasB)
    y = x @ first if second is None else x @ first @ second
    if bias is not None:
        y = y + bias
    solution = factorize_matrix(x, y, first, second, bias=bias, rank=rank, n_iters=n_iters)
    assert solution.Wa is not None  # it always finds one
    solution.Wa = solution.Wa.t().reshape(-1, *Wa.shape[1:])
    if solution.Wb is not None:
        solution.Wb = solution.Wb.t().reshape(out_channels, -1, 1, 1)
    return solution


def _joint_bias(second: Tensor | None, bias_a: Tensor | None, bias_b: Tensor | None) -> Tensor | None:
    if second is None or bias_a is None:
        return bias_a if second is None else bias_b
    return bias_a @ second if bias_b is None else bias_a @ second + bias_b


def _padded(images: Tensor, padding: Any, kernel_size: torch.Size) -> Tensor:
    if padding == "valid":
        return images
    if padding == "same":  # the odd pixel goes to the right and to the bottom, as in conv2d
        sides = [side for size in reversed(kernel_size) for side in ((size - 1) // 2, size // 2)]
        return F.pad(images, sides)
    height, width = (padding, padding) if isinstance(padding, int) else padding
    return F.pad(images, [width, width, height, height])


def _truncated(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    root = values[:rank].sqrt()
    return left[:, :rank] * root, root[:, None] * right[:rank]


def _alternate(x: Tensor, y: Tensor, first: Tensor, second: Tensor, n_iters: int) -> tuple[Tensor, Tensor]:
    unconstrained = _solve(x, y) if n_iters else None
    for _ in range(n_iters):
        second = _solve(x @ first, y)
        assert unconstrained is not None
        first = _solve(second.t(), unconstrained.t()).t()
    return first, second


def _solve(a: Tensor, b: Tensor) -> Tensor:
    # By the pseudoinverse: on GPUs lstsq needs full rank, which data need not have.
    return torch.linalg.pinv(a) @ b

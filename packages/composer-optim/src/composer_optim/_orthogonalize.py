"""Newton-Schulz iterations, which replace the singular values of matrices by values near 1."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from composer_optim.schedulers import as_finite

Polynomial: TypeAlias = tuple[float, float, float]

# Each step maps every singular value `s` to `a*s + b*s**3 + c*s**5`. The last polynomial is repeated.
_JORDAN: tuple[Polynomial, ...] = ((3.4445, -4.7750, 2.0315),)
# Optimal for singular values in [1e-3, 1]. Amsel et al., arXiv:2505.16932, section 4.
_POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Polar Express diverges beyond 1, so its polynomials are stretched by the 1 % that bfloat16 may round up.
_SAFETY = 1.01
COEFFICIENTS: dict[str, tuple[Polynomial, ...]] = {
    "jordan": _JORDAN,
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]),
        _POLAR_EXPRESS[-1],
    ),
}

_MAX_BATCH = 2**26  # elements of one batch, above which batching saves nothing and costs memory
_SMALL = 64 * 64  # elements
_EPS = 1e-7  # as in torch.optim.Muon; matrices of a smaller norm keep part of their smallness


def polynomials(coefficients: Any, steps: int) -> list[Polynomial]:
    """Return the polynomial of each step.

    Raises:
        ValueError: If `coefficients` is neither a name nor one or several triples of finite numbers.
    """
    if isinstance(coefficients, str):
        known: Any = COEFFICIENTS.get(coefficients)
    else:
        nested = isinstance(coefficients, Sequence) and coefficients and isinstance(coefficients[0], Sequence)
        known = [*coefficients] if nested else [coefficients]
        if any(not isinstance(each, Sequence) or len(each) != 3 for each in known):
            known = None
    if known is None:
        raise ValueError(
            f"ns_coefficients={coefficients!r} must be one of {sorted(COEFFICIENTS)}, three numbers, or a list of "
            "three numbers for each step. Use 'jordan' if in doubt."
        )
    for each in known:
        for number in each:
            as_finite("ns_coefficients", number)
    triples = [(a, b, c) for a, b, c in known]
    return [triples[min(step, len(triples) - 1)] for step in range(steps)]


def orthogonalize(
    matrices: Sequence[Tensor],
    steps: Sequence[Polynomial],
    dtype: torch.dtype,
    finish: Callable[[Tensor, list[int]], Tensor] | None = None,
    *,
    overwrites: bool = False,
) -> list[Tensor]:
    """Return the matrices with singular values near 1, computed in batches of equal shapes.

    Args:
        matrices: Tensors with two or more dims. Dims after the first are flattened.
        steps: The polynomial of each step.
        dtype: The dtype of the iteration and of the results.
        finish: Called with each batch of shape `(batch, rows, columns)` and the positions of its matrices in the list;
            returns the batch to use instead.
        overwrites: Whether the memory of the matrices may be used for the iteration.
    """
    by_shape: dict[tuple[torch.device, int, int], list[int]] = defaultdict(list)
    flat = [matrix.flatten(1) for matrix in matrices]
    for position, matrix in enumerate(flat):
        by_shape[matrix.device, matrix.shape[0], matrix.shape[1]].append(position)
    results: list[Tensor] = list(matrices)
    for (_, rows, columns), positions in by_shape.items():
        # On CPUs a product of a batch takes longer than the products of its matrices, unless these are small.
        is_single = matrices[positions[0]].device.type == "cpu" and rows * columns > _SMALL
        length = 1 if is_single else max(1, _MAX_BATCH // max(1, rows * columns))
        scratch: list[Tensor] = []
        for start in range(0, len(positions), length):
            chosen = positions[start : start + length]
            if len(chosen) == 1:
                whole = flat[chosen[0]].to(dtype, copy=not overwrites, memory_format=torch.contiguous_format)
                batch = (_iterate(whole, steps, scratch),)
            else:
                whole = flat[chosen[0]].new_empty(len(chosen), rows, columns, dtype=dtype)
                # Converts and stacks in one pass.
                torch._foreach_copy_(whole.unbind(), [flat[position] for position in chosen])  # pyright: ignore[reportPrivateImportUsage]
                batch = _iterate(whole, steps, scratch).unbind()
            if finish is not None:
                batch = finish(torch.stack(batch), chosen).unbind()
            for position, result in zip(chosen, batch, strict=True):
                results[position] = result.view(matrices[position].shape)
    return results


def _iterate(x: Tensor, steps: Sequence[Polynomial], scratch: list[Tensor]) -> Tensor:
    """Run the iteration on a matrix, or on a batch of shape `(batch, rows, columns)`, and return it in its memory.

    `scratch` is memory to use, which is empty before the first call, because fresh memory costs a CPU about as much as
    the additions of a small matrix.
    """
    if not scratch or scratch[0].shape != x.shape:
        size = min(x.shape[-2:])
        scratch[:] = torch.empty_like(x), *x.new_empty(2, *x.shape[:-2], size, size)
    result, (other, gram, polynomial) = x, scratch
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    is_tall = x.shape[-2] > x.shape[-1]
    # The Frobenius norm is at least the largest singular value, which must not exceed 1.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=_EPS)
    if len(steps) % 2:  # the last step must write to the memory of the result
        x, other = torch.div(x, norm, out=other), x
    else:
        x.div_(norm)
    for a, b, c in steps:
        # The smaller of the two products. Not of `x.mT`: the result has the strides of a weight, for fast additions.
        torch.matmul(*((x.mT, x) if is_tall else (x, x.mT)), out=gram)
        multiply_add(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        multiply_add(x, *((x, polynomial) if is_tall else (polynomial, x)), beta=a, out=other)
        x, other = other, x
    return result

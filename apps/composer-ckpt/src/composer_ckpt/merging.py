"""The command `composer-ckpt merge`, which averages the weights of several checkpoints."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from composer_checkpoint import UnfittingWeightsError
from composer_checkpoint.tensors import StoredTensor, TensorSource, refuse_quantized, refuse_sparse
from composer_ckpt.convert import write_converted
from composer_ckpt.dtypes import BLOCK_NUMEL, refuse_without_numbers
from composer_ckpt.options import Accept, ConvertOptions
from composer_ckpt.output import Result, UsageError, first_few
from composer_ckpt.selection import select
from composer_ckpt.sources import opened

_KEPT = ("integrations", "metadata")


def merge(arguments: argparse.Namespace) -> Result:
    """Run `composer-ckpt merge`."""
    names: list[str] = arguments.sources
    if len(names) < 2:
        raise UsageError(f"merge needs two checkpoints or more before DST, and has {', '.join(names)} alone.")
    shares: list[float] = arguments.weights or [1 / len(names)] * len(names)
    if len(shares) != len(names):
        raise UsageError(f"--weights has {len(shares)} numbers for {len(names)} checkpoints. Give one for each.")
    arguments.source = names[0]
    options = ConvertOptions.parse(arguments)

    def open_merged(stack: ExitStack, accept: Accept) -> TensorSource:
        # The first one describes the model.
        accepts = [accept, *[None] * (len(names) - 1)]
        sources = [
            stack.enter_context(opened(name, **options.opening, accept=own))
            for name, own in zip(names, accepts, strict=True)
        ]
        return _merged(sources, names, shares, options)

    result = write_converted(options, names, open_merged)
    told = ", ".join(f"{share:.4g} of {name}" for share, name in zip(shares, names, strict=True))
    listed = [{"source": name, "weight": share} for share, name in zip(shares, names, strict=True)]
    return Result(f"average: {told}\n{result.text}", {**result.data, "sources": listed}, result.code)


def _merged(
    sources: Sequence[TensorSource], names: Sequence[str], shares: Sequence[float], options: ConvertOptions
) -> TensorSource:
    first = sources[0]
    weights = [dict(source.weights) for source in sources]
    for name, own in zip(names[1:], weights[1:], strict=True):
        _check_alike(weights[0], own, names[0], name)
    # Integers, such as step counters, come from the first source.
    averaged = {name for name, t in weights[0].items() if t.dtype.is_floating_point or t.dtype.is_complex}
    for own in weights:
        chosen = select(own, options.include, options.exclude)
        refuse_sparse(chosen, "merge")
        refuse_quantized(chosen, "merge")
        for name in sorted(chosen.keys() & averaged):
            instead = "Leave it out with --exclude, or take it from one of the checkpoints with extract."
            refuse_without_numbers(name, chosen[name].dtype, "an average", instead)
    averages = {
        name: _average([own[name] for own in weights], shares) if name in averaged else tensor
        for name, tensor in weights[0].items()
    }
    # Timestamps and the like would be wrong for an average.
    beside = {key: value for key, value in first.state.items() if key in _KEPT}
    tree = {"state": {"model": averages, **beside}} if first.state else averages
    return TensorSource(first.format, tree, first.size_bytes, missing=first.missing, files=first.files, path=first.path)


def _average(tensors: Sequence[StoredTensor], shares: Sequence[float]) -> StoredTensor:
    """Return the average, accumulated in a wider dtype and rounded once."""
    first = tensors[0]
    is_wide = first.dtype.itemsize > (4 if first.dtype.is_complex else 2)
    wider = torch.float64 if is_wide else torch.float32
    wider = wider.to_complex() if first.dtype.is_complex else wider

    def fetch() -> torch.Tensor:
        total = torch.zeros(first.numel, dtype=wider)
        for tensor, share in zip(tensors, shares, strict=True):
            if share:  # 0 * inf would be NaN
                _add(total, tensor.read().reshape(-1), share)
        return total.to(first.dtype).reshape(first.shape)

    # Averages of tied weights stay tied.
    tied = tuple(tensor.storage for tensor in tensors)
    return StoredTensor(first.dtype, first.shape, fetch, None if None in tied else ("average", tied))


def _add(total: torch.Tensor, tensor: torch.Tensor, share: float) -> None:
    # A function of its own, so that the tensor is freed before the next one is read. In pieces, since a conversion of
    # the whole would need more memory.
    for piece, part in zip(total.split(BLOCK_NUMEL), tensor.split(BLOCK_NUMEL), strict=True):
        piece.add_(part.to(total.dtype), alpha=share)


def _check_alike(a: dict[str, StoredTensor], b: dict[str, StoredTensor], name_a: str, name_b: str) -> None:
    lists = (
        (f"only in {name_a}", [name for name in a if name not in b]),
        (f"only in {name_b}", [name for name in b if name not in a]),
        ("of other shapes", [name for name in a if name in b and a[name].shape != b[name].shape]),
    )
    told = "; ".join(f"{len(found)} {what}: {first_few(found)}" for what, found in lists if found)
    if told:
        raise UnfittingWeightsError(
            f"{name_a} and {name_b} are not of one model. Weights {told}. Convert them to one format first if only the "
            f"names differ."
        )

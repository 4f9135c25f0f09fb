"""The command `composer-ckpt merge`, which averages the weights of several checkpoints."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from composer_checkpoint import UnfittingWeightsError
from composer_checkpoint.tensors import StoredTensor, TensorSource, refuse_quantized, refuse_sparse
from composer_ckpt.convert import write_converted
from composer_ckpt.dtypes import refuse_without_numbers
from composer_ckpt.output import Result, UsageError
from composer_ckpt.selection import select
from composer_ckpt.sources import Accept, opened

__all__ = ["merge"]

_MAX_NAMES = 5
_BLOCK_NUMEL = 1 << 20
_KEPT = ("integrations", "metadata")
# Options of `convert` that `merge` does not offer, at their defaults.
_PLAIN = {
    "peft": "auto",
    "base_model": None,
    "optimizer": False,
    "resumption": False,
    "push_to_hub": None,
    "private": False,
    "test_uploaded_model": False,
    "trust": False,
    "deepspeed_weights": "fp32",
}


def merge(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt merge`."""
    names: list[str] = options.sources
    if len(names) < 2:
        raise UsageError(f"merge needs two checkpoints or more before DST, and has {', '.join(names)} alone.")
    shares: list[float] = options.weights or [1 / len(names)] * len(names)
    if len(shares) != len(names):
        raise UsageError(f"--weights has {len(shares)} numbers for {len(names)} checkpoints. Give one for each.")
    vars(options).update(_PLAIN, source=names[0])

    def open_merged(stack: ExitStack, accept: Accept) -> TensorSource:
        sources = [
            stack.enter_context(
                opened(
                    name,
                    options.kind,
                    tmp_dir=options.tmp_dir,
                    jobs=options.jobs,
                    verify=not (options.no_verify or options.dry_run),
                    accept=None if number else accept,  # the first one describes the model
                )
            )
            for number, name in enumerate(names)
        ]
        return _merged(sources, names, shares, options)

    result = write_converted(options, names, open_merged)
    told = ", ".join(f"{share:.4g} of {name}" for share, name in zip(shares, names, strict=True))
    listed = [{"source": name, "weight": share} for share, name in zip(shares, names, strict=True)]
    return Result(f"average: {told}\n{result.text}", {**result.data, "sources": listed}, result.code)


def _merged(
    sources: Sequence[TensorSource], names: Sequence[str], shares: Sequence[float], options: argparse.Namespace
) -> TensorSource:
    """Return the first source, with its weights replaced by the average of all sources."""
    first = sources[0]
    weights = [dict(source.weights) for source in sources]
    for name, own in zip(names[1:], weights[1:], strict=True):
        _check_alike(weights[0], own, names[0], name)
    for chosen in (select(own, options.include, options.exclude) for own in weights):
        _refuse_without_average(chosen, weights[0])
    averages = {
        name: _average([own[name] for own in weights], shares)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex
        else tensor  # integers, such as step counters, come from the first source
        for name, tensor in weights[0].items()
    }
    # Timestamps and the like would be wrong for an average.
    beside = {key: value for key, value in first.state.items() if key in _KEPT}
    tree = {"state": {"model": averages, **beside}} if first.state else averages
    return TensorSource(first.format, tree, first.size_bytes, missing=first.missing, files=first.files, path=first.path)


def _refuse_without_average(weights: dict[str, StoredTensor], first: dict[str, StoredTensor]) -> None:
    refuse_sparse(weights, "merge")
    refuse_quantized(weights, "merge")
    for name, tensor in weights.items():
        if first[name].dtype.is_floating_point or first[name].dtype.is_complex:
            instead = "Leave it out with --exclude, or take it from one of the checkpoints with extract."
            refuse_without_numbers(name, tensor.dtype, "an average", instead)


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
    """Add a share of a tensor piece by piece, since a conversion of the whole would need more memory."""
    for piece, part in zip(total.split(_BLOCK_NUMEL), tensor.split(_BLOCK_NUMEL), strict=True):
        piece.add_(part.to(total.dtype), alpha=share)


def _check_alike(a: dict[str, StoredTensor], b: dict[str, StoredTensor], name_a: str, name_b: str) -> None:
    lists = (
        (f"only in {name_a}", [name for name in a if name not in b]),
        (f"only in {name_b}", [name for name in b if name not in a]),
        ("of other shapes", [name for name in a if name in b and a[name].shape != b[name].shape]),
    )
    told = "; ".join(f"{len(found)} {what}: {', '.join(found[:_MAX_NAMES])}" for what, found in lists if found)
    if told:
        raise UnfittingWeightsError(
            f"{name_a} and {name_b} are not of one model. Weights {told}. Convert them to one format first if only the "
            f"names differ."
        )

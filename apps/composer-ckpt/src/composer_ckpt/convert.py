"""The commands `composer-ckpt convert` and `composer-ckpt merge`."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from composer_checkpoint import CheckpointConflictError, UnfittingWeightsError
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.tensors import StoredTensor, TensorSource, refuse_quantized, refuse_sparse
from composer_ckpt.options import ConvertOptions
from composer_ckpt.output import Result, UsageError, counted, first_few, format_size, progress_bar
from composer_ckpt.sources import opened
from composer_ckpt.targets import clear_leftovers, may_replace, publish, written_to
from composer_ckpt.to_checkpoint import plan_checkpoint
from composer_ckpt.to_hugging_face import plan_folder
from composer_ckpt.weights import BLOCK_NUMEL, differences, refuse_without_numbers, select


def convert(arguments: argparse.Namespace) -> Result:
    """Run `composer-ckpt convert`."""
    _take_old_spellings(arguments)
    options = ConvertOptions.parse(arguments)

    def open_source(stack: ExitStack) -> TensorSource:
        more = {"trust": options.trust, "zero_weights": options.deepspeed_weights}
        return stack.enter_context(opened(options.source, **options.opening, **more))

    return write_converted(options, [options.source, options.base_model], open_source)


def write_converted(
    options: ConvertOptions, sources: Iterable[str | None], open_source: Callable[[ExitStack], TensorSource]
) -> Result:
    """Write a checkpoint in the format that the options select."""
    conflicts: list[str] = []
    with ExitStack() as stack:
        local = stack.enter_context(written_to(options))
        writing = replace(options, target=local)
        try:
            read = (*sources, options.config, options.tokenizer)
            overwrite = may_replace(
                local, read, overwrite=options.overwrite, is_folder=options.is_folder, world_size=options.world_size
            )
            writing = replace(writing, overwrite=overwrite)
        except CheckpointConflictError as error:
            if not options.dry_run:
                raise  # a dry run reports the conflict and shows the rest of the plan
            conflicts.append(str(error))
        source = open_source(stack)
        options.check_source(source.format)
        plan = plan_folder(source, writing, stack) if options.to == "hf" else plan_checkpoint(source, writing)
        plan.target = options.target  # for the report; `local` may be a temporary path
        plan.warnings += conflicts
        if not options.dry_run:
            clear_leftovers(local, options.world_size)  # of a run that was killed
            with progress_bar("writing", plan.size_bytes, quiet=options.quiet) as progress:
                plan.write(progress)
            if options.push_to_hub is not None:
                plan.warnings.append(f"published as {publish(local, options.push_to_hub, options)}")
            if nan := list(plan.names_with_nan):
                plan.warnings.append(f"NaN in {counted(len(nan), 'tensor')}, written as it is: {first_few(nan)}")
    done = "nothing was written (--dry-run)"
    if not options.dry_run:
        read_back = "not read back" if options.no_verify else "read back, every tensor as it was written"
        names = ", ".join(list(plan.files)[:3]) + (", ..." if len(plan.files) > 3 else "")
        done = f"wrote {names} ({format_size(plan.size_bytes)}) to {plan.target}; {read_back}"
    return Result("\n".join([*plan.lines(), done]), {**plan.to_dict(), "written": not options.dry_run})


def _take_old_spellings(arguments: argparse.Namespace) -> None:
    """Accept the arguments of Composer's original conversion script."""
    for name, old in (("source", arguments.old_source), ("target", arguments.old_target)):
        typed = getattr(arguments, name)
        if old is not None and typed is not None:
            raise UsageError(f"{typed!r} and {old!r} are both given as {name}. Leave one out.")
        setattr(arguments, name, typed if old is None else old)
    if arguments.source is None or arguments.target is None:
        raise UsageError("convert needs SRC and DST, such as: composer-ckpt convert latest-rank0.pt ./out")
    kept = arguments.local_checkpoint_save_location
    if kept is not None and not arguments.dry_run:
        get_file(arguments.source, kept, progress_bar=False)
        arguments.source = kept


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

    def open_merged(stack: ExitStack) -> TensorSource:
        sources = [stack.enter_context(opened(name, **options.opening)) for name in names]
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
        if told := differences(weights[0], own, f"only in {names[0]}", f"only in {name}"):
            raise UnfittingWeightsError(
                f"{names[0]} and {name} are not of one model. Weights {told}. Convert them to one format first if only "
                f"the names differ."
            )
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

"""The command `composer-ckpt convert`, which converts checkpoints between all formats."""

import argparse
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace

from composer_checkpoint import CheckpointConflictError
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.tensors import TensorSource
from composer_ckpt.options import Accept, ConvertOptions, reaching_stores
from composer_ckpt.output import Result, UsageError, counted, first_few, format_size, progress_bar
from composer_ckpt.plans import Plan
from composer_ckpt.sources import opened
from composer_ckpt.targets import clear_leftovers, may_replace, publish, written_to


def convert(arguments: argparse.Namespace) -> Result:
    """Run `composer-ckpt convert`."""
    _take_old_spellings(arguments)
    options = ConvertOptions.parse(arguments)

    def open_source(stack: ExitStack, accept: Accept) -> TensorSource:
        more = {"trust": options.trust, "accept": accept, "zero_weights": options.deepspeed_weights}
        return stack.enter_context(opened(options.source, **options.opening, **more))

    return write_converted(options, [options.source, options.base_model], open_source)


def write_converted(
    options: ConvertOptions, sources: Iterable[str | None], open_source: Callable[[ExitStack, Accept], TensorSource]
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
        plan = _plan(open_source(stack, options.check_source), writing, stack)
        plan.target = options.target  # for the report; `local` may be a temporary path
        plan.warnings += conflicts
        if plan.check is not None:
            plan.check()
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


def _plan(source: TensorSource, options: ConvertOptions, stack: ExitStack) -> Plan:
    # Imported late: only Hugging Face folders need transformers, and only other targets the code that writes them.
    if options.to == "hf":
        from composer_ckpt.to_hugging_face import plan_folder

        return plan_folder(source, options, stack)
    from composer_ckpt.to_checkpoint import plan_checkpoint

    return plan_checkpoint(source, options)


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
        with reaching_stores(arguments.source):
            get_file(arguments.source, kept, progress_bar=False)
        arguments.source = kept

"""`composer-ckpt convert`: a checkpoint of any format as one of another."""

import argparse
from contextlib import ExitStack

from composer_checkpoint.commit import refuse_existing
from composer_ckpt.outcomes import Result, UsageError
from composer_ckpt.plans import Plan
from composer_ckpt.progress import progress_bar
from composer_ckpt.sizes import format_size
from composer_ckpt.sources import absolute, opened

__all__ = ["convert"]

_SUFFIXES = {".pt": "pt", ".pth": "pt", ".safetensors": "safetensors"}


def convert(options: argparse.Namespace) -> Result:
    """Run the command."""
    _take_old_spellings(options)
    target = _target_format(options)
    if not options.dry_run:
        refuse_existing(absolute(options.target), options.overwrite)
    with ExitStack() as stack:
        source = stack.enter_context(opened(options.source, options.kind, zero_weights=options.deepspeed_weights))
        # Here, since only these need transformers, or all that writes.
        if target == "hf":
            from composer_ckpt.to_hugging_face import plan_folder

            plan: Plan = plan_folder(source, options, stack)
        else:
            from composer_ckpt.to_checkpoint import plan_checkpoint

            plan = plan_checkpoint(source, target, options)
        if not options.dry_run:
            if plan.check is not None:
                plan.check()
            with progress_bar("writing", plan.size_bytes, quiet=options.quiet) as progress:
                plan.write(progress)
    done = "nothing was written (--dry-run)" if options.dry_run else _done(plan, options)
    return Result("\n".join([*plan.lines(), done]), {**plan.to_dict(), "written": not options.dry_run})


def _done(plan: Plan, options: argparse.Namespace) -> str:
    read_back = "not read back" if options.no_verify else "read back, every tensor as it was written"
    names = ", ".join(list(plan.files)[:3]) + (", ..." if len(plan.files) > 3 else "")
    return f"wrote {names} ({format_size(plan.size_bytes)}) to {options.target}; {read_back}"


def _take_old_spellings(options: argparse.Namespace) -> None:
    """Take the arguments of Composer's own script for those of this one."""
    for name, old in (("source", options.old_source), ("target", options.old_target)):
        if old is not None and getattr(options, name) is None:
            setattr(options, name, old)
    if options.source is None or options.target is None:
        raise UsageError("convert needs SRC and DST, such as: composer-ckpt convert latest-rank0.pt ./out")


def _target_format(options: argparse.Namespace) -> str:
    suffix = next((kind for end, kind in _SUFFIXES.items() if options.target.endswith(end)), None)
    found = options.to or suffix or "hf"
    if suffix is not None and found in ("hf", "dcp"):
        raise UsageError(f"DST={options.target!r} is a file's name, and --to {found} writes a folder. Name a folder.")
    if found in ("hf", "safetensors") and (options.optimizer or options.resumption):
        raise UsageError(f"--optimizer and --resumption need --to pt or dcp: {found} holds weights alone.")
    if found != "hf":
        only_hf = {
            "--peft": options.peft != "auto",
            "--base-model": options.base_model,
            "--format": options.format != "safetensors",
        }
        if given := [name for name, value in only_hf.items() if value]:
            raise UsageError(f"{', '.join(given)} is of Hugging Face folders, and this writes {found}. Leave it out.")
    return found

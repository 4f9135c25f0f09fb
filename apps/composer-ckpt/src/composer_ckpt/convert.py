"""The command `composer-ckpt convert`, which converts checkpoints between all formats."""

import argparse
import os
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import cast

from composer_checkpoint import CheckpointConflictError
from composer_checkpoint.remote.fetch import get_file, is_uri
from composer_checkpoint.tensors import Target, TensorSource
from composer_ckpt.output import Result, UsageError, format_size, progress_bar
from composer_ckpt.plans import Plan
from composer_ckpt.sources import Accept, check_request, opened, publish, reaching_stores
from composer_ckpt.targets import clear_leftovers, may_replace, refuse_for_source, refuse_for_target, written_to
from composer_ckpt.weights import notes_on_nan

__all__ = ["convert", "write_converted"]

_SUFFIXES = {".pt": "pt", ".pth": "pt", ".safetensors": "safetensors"}
# A folder with such a name would look like the file that was meant.
_UNKNOWN_ENDING = re.compile(r".*[^/.](\.[A-Za-z][A-Za-z0-9]*)")  # not a version, as in llama-3.1-8b
_OTHER_FILE = re.compile(r".*(\.(bin|ckpt|gguf|json|npz|onnx|pkl|tar|tgz|zip)|\.(pt|pth|tar)\.[a-z0-9]+)")


def convert(options: argparse.Namespace) -> Result:
    """Run `composer-ckpt convert`."""
    _take_old_spellings(options)
    check_request(options, _target_format(options))

    def open_source(stack: ExitStack, accept: Accept) -> TensorSource:
        return stack.enter_context(
            opened(
                options.source,
                options.kind,
                tmp_dir=options.tmp_dir,
                jobs=options.jobs,
                verify=not (options.no_verify or options.dry_run),
                trust=options.trust,
                accept=accept,
                zero_weights=options.deepspeed_weights,
            )
        )

    return write_converted(options, [options.source, options.base_model], open_source)


def write_converted(
    options: argparse.Namespace,
    sources: Iterable[str | None],
    open_source: Callable[[ExitStack, Accept], TensorSource],
) -> Result:
    """Write a checkpoint in the format that the options select.

    Args:
        options: Options of `convert`.
        sources: Paths or URIs to be read, as given on the command line.
        open_source: Opens the source after the target was checked; the stack closes it. Calls its second argument with
            the kind of the source before anything is read.

    Raises:
        UsageError: If the options contradict each other.
        CheckpointConflictError: If the target exists and must not be replaced.
    """
    target, typed = _target_format(options), options.target
    options.replaces_repo = options.overwrite  # `overwrite` is about the local target from here on
    is_folder, notes = target in ("hf", "dcp"), list[str]()

    def accept(kind: str) -> None:
        refuse_for_source(options, kind, target)

    with ExitStack() as stack:
        options.target = stack.enter_context(
            written_to(
                typed,
                overwrite=options.overwrite,
                is_folder=is_folder,
                tmp_dir=options.tmp_dir,
                jobs=options.jobs,
                dry_run=options.dry_run,
            )
        )
        read = (*sources, options.config, options.tokenizer)
        try:
            options.overwrite = may_replace(
                options.target, read, overwrite=options.overwrite, is_folder=is_folder, world_size=options.world_size
            )
        except CheckpointConflictError as error:
            if not options.dry_run:
                raise  # a dry run reports the conflict and shows the rest of the plan
            notes.append(str(error))
        plan = _plan(target, open_source(stack, accept), options, stack)
        plan.target = typed
        plan.warnings += notes
        if plan.check is not None:
            plan.check()
        if not options.dry_run:
            _write(plan, options)
            plan.warnings += notes_on_nan(options)
    done = "nothing was written (--dry-run)" if options.dry_run else _done(plan, options)
    return Result("\n".join([*plan.lines(), done]), {**plan.to_dict(), "written": not options.dry_run})


def _plan(target: str, source: TensorSource, options: argparse.Namespace, stack: ExitStack) -> Plan:
    # Imported late: only Hugging Face folders need transformers, and only other targets the code that writes them.
    if target == "hf":
        from composer_ckpt.to_hugging_face import plan_folder

        return plan_folder(source, options, stack)
    from composer_ckpt.to_checkpoint import plan_checkpoint

    return plan_checkpoint(source, cast(Target, target), options)


def _write(plan: Plan, options: argparse.Namespace) -> None:
    clear_leftovers(options.target, options.world_size)  # of a run that was killed
    with progress_bar("writing", plan.size_bytes, quiet=options.quiet) as progress:
        plan.write(progress)
    if options.push_to_hub is not None:
        plan.warnings.append(f"published as {publish(options.target, options)}")


def _done(plan: Plan, options: argparse.Namespace) -> str:
    read_back = "not read back" if options.no_verify else "read back, every tensor as it was written"
    names = ", ".join(list(plan.files)[:3]) + (", ..." if len(plan.files) > 3 else "")
    return f"wrote {names} ({format_size(plan.size_bytes)}) to {plan.target}; {read_back}"


def _take_old_spellings(options: argparse.Namespace) -> None:
    """Accept the arguments of Composer's original conversion script."""
    for name, old in (("source", options.old_source), ("target", options.old_target)):
        typed = getattr(options, name)
        if old is not None and typed is not None:
            raise UsageError(f"{typed!r} and {old!r} are both given as {name}. Leave one out.")
        if old is not None:
            setattr(options, name, old)
    if options.source is None or options.target is None:
        raise UsageError("convert needs SRC and DST, such as: composer-ckpt convert latest-rank0.pt ./out")
    kept = options.local_checkpoint_save_location
    if kept is not None and not options.dry_run:
        with reaching_stores(options.source):
            get_file(options.source, kept, progress_bar=False)
        options.source = kept


def _target_format(options: argparse.Namespace) -> str:
    suffix = next((kind for end, kind in _SUFFIXES.items() if options.target.endswith(end)), None)
    if suffix is None and _OTHER_FILE.fullmatch(options.target):
        raise UsageError(
            f"DST={options.target!r} is the name of a file, of none of the kinds that are written: "
            f"{', '.join(_SUFFIXES)}. Choose one of these endings, or name a folder."
        )
    is_local = "{rank}" in options.target
    ending = None if suffix or options.to or is_local else _UNKNOWN_ENDING.fullmatch(options.target)
    if ending is not None and not os.path.isdir(options.target):
        raise UsageError(
            f"DST={options.target!r} ends in {ending[1]!r}, which is not a known target. Known are "
            f"{', '.join(_SUFFIXES)} for files, and for a Hugging Face folder a name without an ending; "
            f"with --to pt, safetensors, dcp, local or hf, other names can be given."
        )
    # An explicit `--to` wins over the name of the target.
    found = options.to or ("local" if is_local else suffix) or "hf"
    if (found == "local") != (is_local and suffix == "pt"):
        raise UsageError(
            f"DST={options.target!r} and --to {found}: per-rank files, and only they, have {{rank}} in their name, "
            f"which ends in .pt, as ba2_rank{{rank}}.pt."
        )
    if found == "local" and is_uri(options.target):
        raise UsageError(f"DST={options.target!r} is in a store, and per-rank files are written on this machine.")
    if options.world_size is not None and options.world_size < 1:
        raise UsageError(f"--world-size {options.world_size} is not a number of ranks. Give 1 or more.")
    if options.world_size is None and found == "local":
        raise UsageError("--to local needs --world-size N, for how many ranks.")
    if options.world_size is not None and found not in ("local", "dcp"):
        raise UsageError(
            f"--world-size is of per-rank files and sharded folders, and this writes {found}. Leave it out."
        )
    if suffix is not None and found in ("hf", "dcp"):
        raise UsageError(f"DST={options.target!r} is a file's name, and --to {found} writes a folder. Name a folder.")
    if found in ("hf", "safetensors") and (options.optimizer or options.resumption):
        raise UsageError(f"--optimizer and --resumption need --to pt, dcp or local: {found} holds weights alone.")
    refuse_for_target(options, found)
    return found

"""The commands `composer-ckpt convert` and `composer-ckpt merge`, and the writing of Composer checkpoints."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from composer_checkpoint import UnfittingWeightsError, verify, write_atomically
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.tensors import (
    StoredTensor,
    Target,
    TensorSource,
    aliases_of,
    refuse_quantized,
    refuse_sparse,
    refuse_unfit,
    stream_local,
    stream_pt,
    stream_safetensors,
    stream_sharded,
    tensors_in,
)
from composer_ckpt.folders import saved_description
from composer_ckpt.options import ConvertOptions, Plan, Progress
from composer_ckpt.output import Result, UsageError, counted, first_few, format_size, progress_bar
from composer_ckpt.places import clear_leftovers, may_replace, opened, publish, written_to
from composer_ckpt.to_hugging_face import (
    in_memory_weights,
    plan_folder,
    read_back,
    trained_beside_adapter,
    with_adapter,
)
from composer_ckpt.weights import (
    BLOCK_NUMEL,
    Weights,
    choose_weights,
    differences,
    notes_on_the_rest,
    refuse_without_numbers,
    renamed_by,
    select,
)
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import meta_model


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
    with ExitStack() as stack:
        local = stack.enter_context(written_to(options))
        read = (*sources, options.config, options.tokenizer)
        overwrite = may_replace(
            local, read, overwrite=options.overwrite, is_folder=options.is_folder, world_size=options.world_size
        )
        writing = replace(options, target=local, overwrite=overwrite)
        source = open_source(stack)
        options.check_source(source.format)
        plan = plan_folder(source, writing, stack) if options.to == "hf" else plan_checkpoint(source, writing)
        plan.target = options.target  # for the report; `local` may be a temporary path
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


def merge(arguments: argparse.Namespace) -> Result:
    """Run `composer-ckpt merge`."""
    names: list[str] = arguments.sources
    if len(names) < 2:
        raise UsageError(f"two checkpoints or more must come before DST; got {', '.join(names)} alone.")
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
    beside = {key: value for key, value in first.state.items() if key in _ALWAYS}
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


_PREFIX = "model."
_ALWAYS = ("integrations", "metadata")  # kept with weights alone


def plan_checkpoint(source: TensorSource, options: ConvertOptions) -> Plan:
    """Plan a checkpoint of the format `options.to`."""
    nan: dict[str, None] = {}
    chosen, renamed, changes = choose_weights(source, options, nan)
    notes = notes_on_the_rest(source)
    target = cast(Target, options.to)
    tree = _tree(source, options, chosen, notes)
    if target == "dcp" and (changed := list(_keys_that_are_no_strings(tree, ""))):
        notes.append(f"keys that are not strings become strings: {first_few(changed)}")
    weights: Weights = tree["state"]["model"]
    aliases = aliases_of(weights)
    own = {name: tensor for name, tensor in weights.items() if name not in aliases}
    content = own if target == "safetensors" else tree
    refuse_unfit(content, target, options.target, what=f"--to {target}", aliases=aliases)
    written = own
    if target != "safetensors":
        # With the optimizer's state; tensors that share storage are written once.
        every = tensors_in(tree)
        repeated = aliases_of(every)
        written = {name: tensor for name, tensor in every.items() if name not in repeated}
    info = {} if source.manifest is None else dict(source.manifest.info)
    # These describe how the source's file was written.
    info = {key: value for key, value in info.items() if key not in ("encoded", "aliases", "layout", "save_id")}
    return Plan(
        source=options.source,
        target=options.target,
        formats=(source.format, target),
        files={Path(options.target).name: written},
        write=lambda progress: _write(tree, own, aliases, info, options, progress),
        largest_source=max((tensor.size_bytes for tensor in source.tensors.values()), default=0),
        cast=changes,
        renamed=renamed,
        warnings=notes,
        names_with_nan=nan,
    )


def _tree(source: TensorSource, options: ConvertOptions, weights: Weights, notes: list[str]) -> dict[str, Any]:
    state: dict[str, Any] = {"model": weights}
    if source.format == "hf":
        saved = saved_description(source, trust_remote_code=options.trust_remote_code)
        if saved is None:
            notes.append("there is no config.json, so the checkpoint does not identify its model")
            state["model"] = {f"{_PREFIX}{name}": tensor for name, tensor in weights.items()}
        else:
            state["integrations"] = {"huggingface": saved}
            state["model"] = _named_as_in_composer(weights, saved, options, notes)
        state["metadata"] = {"torch_version": str(torch.__version__)}
        return {"state": state}
    left_out = []
    for key, value in source.state.items():
        is_kept = options.optimizer if key == "optimizers" else options.resumption or key in _ALWAYS
        if key != "model" and is_kept:
            state[key] = value
        elif key != "model":
            left_out.append(key)
    tree: dict[str, Any] = {"state": state}
    if options.resumption and isinstance(source.tree, dict) and "rng" in source.tree:
        tree["rng"] = source.tree["rng"]
    if left_out:
        notes.append(f"left out: {', '.join(left_out)} (kept by --optimizer and --resumption)")
    return tree


def _named_as_in_composer(
    weights: Weights, saved: Mapping[str, Any], options: ConvertOptions, notes: list[str]
) -> Weights:
    """Return a folder's weights as named in memory by the installed transformers, below `model.`."""

    metadata = HuggingFaceMetadata.from_saved(saved, options.source)
    if (peft_config := metadata.peft_config) is not None:
        named = renamed_by(weights, lambda name: f"{_PREFIX}{with_adapter(name, peft_config)}")
        saved["model"]["trained_beside_adapter"] = trained_beside_adapter(named)
        return named
    if not metadata.model_class or options.include or options.exclude:
        notes.append("the weights were not compared with those that the model needs")
        return {f"{_PREFIX}{name}": tensor for name, tensor in weights.items()}
    model = meta_model(metadata, trust_remote_code=options.trust_remote_code)
    return {f"{_PREFIX}{name}": tensor for name, tensor in in_memory_weights(weights, model).items()}


def _write(
    tree: dict[str, Any],
    own: Weights,
    aliases: Mapping[str, str],
    info: Mapping[str, Any],
    options: ConvertOptions,
    progress: Progress,
) -> None:
    if options.to == "local":
        _write_local(tree, info, options, progress)
        return
    need = sum(tensor.size_bytes for tensor in own.values())
    settings: dict[str, Any] = {"overwrite": options.overwrite, "folder": options.is_folder, "keep_others": True}
    with write_atomically(options.target, need_bytes=need, **settings) as unfinished:
        if options.to == "pt":
            stream_pt(tree, unfinished, info=info, progress=progress)
        elif options.to == "dcp":
            unfinished.rmdir()  # `stream_sharded` creates the folder itself
            stream_sharded(tree, unfinished, num_files=options.world_size or 1, info=info, progress=progress)
        else:
            stream_safetensors(own, unfinished, info={**info, "layout": "composer"}, aliases=aliases, progress=progress)
        if not options.no_verify:
            read_back(unfinished, verify)


def _write_local(tree: dict[str, Any], info: Mapping[str, Any], options: ConvertOptions, progress: Progress) -> None:
    assert options.world_size is not None  # checked with the options
    settings: dict[str, Any] = {"info": info, "overwrite": options.overwrite, "progress": progress}
    stream_local(tree, options.target, world_size=options.world_size, **settings)
    files = [Path(options.target.replace("{rank}", str(rank))) for rank in range(options.world_size)]
    try:
        for path in files if not options.no_verify else ():
            read_back(path, verify)
    except BaseException:
        for path in files:  # the files have their final names already, so they must not stay
            path.unlink(missing_ok=True)
        raise


def _keys_that_are_no_strings(value: Any, place: str) -> Iterator[str]:
    """Yield the places of such keys, as old optimizer states have: loading would not find their parameters' state."""
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        name = f"{place}/{key}" if place else str(key)
        if isinstance(value, Mapping) and not isinstance(key, str):
            yield name
        if isinstance(item, Mapping | list):
            yield from _keys_that_are_no_strings(item, name)

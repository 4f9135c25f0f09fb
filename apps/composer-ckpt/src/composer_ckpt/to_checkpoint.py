"""Planning of a Composer checkpoint: a `.pt`, per-rank files, a sharded folder, or weights alone as `.safetensors`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from composer_checkpoint import verify, write_atomically
from composer_checkpoint.tensors import (
    Target,
    TensorSource,
    aliases_of,
    refuse_unfit,
    stream_local,
    stream_pt,
    stream_safetensors,
    stream_sharded,
    tensors_in,
)
from composer_ckpt.folders import saved_description
from composer_ckpt.options import ConvertOptions, Plan, Progress
from composer_ckpt.output import first_few
from composer_ckpt.to_hugging_face import in_memory_weights, read_back, trained_beside_adapter, with_adapter
from composer_ckpt.weights import Weights, choose_weights, notes_on_the_rest, renamed_by
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import meta_model

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
    return Plan(
        source=options.source,
        target=options.target,
        formats=(source.format, target),
        files={Path(options.target).name: written},
        write=lambda progress: _write(tree, own, aliases, _info(source), options, progress),
        largest_source=max((tensor.size_bytes for tensor in source.tensors.values()), default=0),
        cast=changes,
        renamed=renamed,
        names_with_nan=nan,
        warnings=notes,
    )


def _keys_that_are_no_strings(value: Any, place: str) -> Iterator[str]:
    """Yield the places of such keys, as old optimizer states have: loading would not find their parameters' state."""
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        name = f"{place}/{key}" if place else str(key)
        if isinstance(value, Mapping) and not isinstance(key, str):
            yield name
        if isinstance(item, Mapping | list):
            yield from _keys_that_are_no_strings(item, name)


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


def _info(source: TensorSource) -> dict[str, Any]:
    info = {} if source.manifest is None else dict(source.manifest.info)
    # These describe how the source's file was written.
    return {key: value for key, value in info.items() if key not in ("encoded", "aliases", "layout", "save_id")}


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

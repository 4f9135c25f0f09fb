"""Tensor-by-tensor reader of DeepSpeed's ZeRO checkpoints, which needs no DeepSpeed and runs none of the pickles.

The optimizer file of a rank has its part of all parameters of a group as one flat float32 tensor. At stages 1 and 2 the
ranks' parts are concatenated, and the whole has the parameters in the order of `param_shapes`. At stage 3 each
parameter is cut into as many equal pieces as there are ranks, and a rank's part is the concatenation of its pieces.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from composer_checkpoint.errors import CorruptCheckpointError, NoCheckpointError, UnsafeCheckpointError
from composer_checkpoint.formats.pt import open_pt_source
from composer_checkpoint.formats.tensor_source import StoredTensor, TensorSource

Weights = Literal["fp32", "16bit"]

_LATEST = "latest"
_FLAT = "fp32_flat_groups"  # key of stage 3
_PARTITION = "single_partition_of_fp32_groups"  # key of stages 1 and 2
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# Globals in the pickles other than data: classes and functions of DeepSpeed, all unrelated to the weights.
# None of them is imported; an inert object replaces each.
_INERT = re.compile(r"deepspeed\..*")


def find_zero_folder(folder: str | os.PathLike[str]) -> Path | None:
    """Return the folder with DeepSpeed's files: this one or the one that `latest` names. `None` if neither has any."""
    root = Path(folder)
    if any(_MODEL.fullmatch(path.name) for path in root.glob("*_model_states.pt")):
        return root
    latest = root / _LATEST
    if not latest.is_file() or latest.stat().st_size > 4096:  # a tag is short; anything larger is another file
        return None
    tag = latest.read_text(errors="replace").strip()
    if Path(tag).name != tag or tag in ("", ".", ".."):
        raise UnsafeCheckpointError(f"{latest} names {tag!r:.200}, outside its folder; nothing was read.")
    below = root / tag
    return below if any(below.glob("*_model_states.pt")) else None


def open_zero_source(folder: str | os.PathLike[str], *, weights: Weights = "fp32") -> TensorSource:
    """Open the checkpoint of a DeepSpeed engine, of any ZeRO stage and any number of ranks.

    `'fp32'` takes the master weights of the optimizer, and `'16bit'` the weights that the model computes with, which
    stages 0 to 2 store whole.
    """
    found = find_zero_folder(folder)
    if found is None:
        raise NoCheckpointError(
            f"{os.fspath(folder)!r} has no files of DeepSpeed's such as mp_rank_00_model_states.pt."
        )
    with ExitStack() as opened:
        ranks = _Ranks(found, _open_all(found, _MODEL, opened), _open_all(found, _OPTIMIZER, opened))
        tree = {"module": _weights(ranks, weights), **ranks.rest()}
        files = {path.name: path.stat().st_size for path in sorted(found.iterdir()) if path.is_file()}
        return TensorSource("deepspeed", tree, sum(files.values()), files=files).on_close(opened.pop_all())


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Opened files: one model file or one per rank, and no optimizer file or one per rank."""

    folder: Path
    models: Sequence[TensorSource]
    optimizers: Sequence[TensorSource]

    @property
    def stage(self) -> int:
        """Return the ZeRO stage, where 1 also stands for 2."""
        # The files name the stage by an enumeration of DeepSpeed, which is not loaded, so it follows from their keys.
        if not self.optimizers or self.model().get("param_shapes") is None:
            return 0
        return 3 if _FLAT in self.partitions(0) else 1

    def partitions(self, rank: int) -> Mapping[str, Any]:
        """Return the optimizer state dict in a rank's file."""
        state = self.optimizers[rank].tree.get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise self.error(f"the optimizer's file of rank {rank} has no optimizer_state_dict")
        return state

    def model(self, rank: int = 0) -> Mapping[str, Any]:
        """Return the content of a rank's model file."""
        return self.models[rank].tree

    def rest(self) -> dict[str, Any]:
        """Return the entries other than weights."""
        keep = ("ds_version", "ds_config", "dp_world_size", "global_steps", "global_samples", "skipped_steps")
        model = self.model()
        rest = {key: model[key] for key in keep if key in model}
        # Composer's DeepSpeed integration, among others, stores a client state of its own in the engine's file.
        if isinstance(model.get("state"), dict):
            rest["state"] = {key: value for key, value in model["state"].items() if key != "model"}
        return {**rest, "zero_stage": self.stage}

    def error(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.folder}: {what}. Load another checkpoint.")


def _open_all(folder: Path, pattern: re.Pattern[str], opened: ExitStack) -> list[TensorSource]:
    ranks: dict[int, Path] = {}
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise CorruptCheckpointError(
                f"{path} is of a model that is spread by tensor parallelism, whose parts DeepSpeed does not describe. "
                f"Gather it with the program that spread it."
            )
        ranks[int(match[1] or 0)] = path
    if sorted(ranks) != list(range(len(ranks))):
        missing = sorted({*range(max(ranks) + 1)} - ranks.keys())
        raise NoCheckpointError(f"{folder} lacks the files of ranks {missing}. Bring all ranks' files together.")
    sources: list[TensorSource] = []
    for rank in sorted(ranks):
        source = open_pt_source(os.fspath(ranks[rank]), record_unknown=True, drop_attributes=True)
        sources.append(opened.enter_context(source))
        wanted = [name for name in source.unsafe_globals if not _INERT.fullmatch(name)]
        if wanted:
            raise UnsafeCheckpointError(
                f"{ranks[rank]} asks for {', '.join(wanted[:8])}, which is neither data nor DeepSpeed's; nothing of it "
                f"was run."
            )
        if not isinstance(source.tree, dict):
            raise CorruptCheckpointError(f"{ranks[rank]} does not hold a dict, as DeepSpeed's files do.")
    return sources


def _weights(ranks: _Ranks, weights: Weights) -> dict[str, StoredTensor]:
    model = ranks.model()
    module = model.get("module")
    whole = {key: value for key, value in (module or {}).items() if isinstance(value, StoredTensor)}
    if weights == "16bit" and ranks.stage == 3:
        raise CorruptCheckpointError(
            f"{ranks.folder} is of stage 3, which has no whole 16-bit weights. Take the fp32 ones, and cast them."
        )
    if ranks.stage == 0 or weights == "16bit":
        return whole
    found = _master_weights(ranks, whole)
    # In the module's order, as in its own state dict.
    return {name: found[name] for name in [*(key for key in module or () if key in found), *found]}


def _master_weights(ranks: _Ranks, whole: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    model = ranks.model()
    found = {name: _in_fp32(whole[name]) for name in model.get("buffer_names") or () if name in whole}
    found |= _frozen(ranks)
    found |= _of_stage_3(ranks) if ranks.stage == 3 else _of_stage_1(ranks)
    for alias, name in dict(model.get("shared_params") or {}).items():
        if name in found:
            found[alias] = found[name]
    # Parameters that are not trained are missing from the stage 1 partitions, and whole in the module.
    if ranks.stage < 3:
        found |= {name: _in_fp32(tensor) for name, tensor in whole.items() if name not in found}
    return found


def _in_fp32(tensor: StoredTensor) -> StoredTensor:
    return tensor.to(torch.float32) if tensor.dtype.is_floating_point else tensor


def _shapes(ranks: _Ranks) -> list[dict[str, tuple[int, ...]]]:
    raw = ranks.model().get("param_shapes")
    groups = raw if isinstance(raw, list) else [raw]
    if not all(isinstance(group, dict) for group in groups):
        raise ranks.error("the model's file has no param_shapes")
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups if group is not None]


def _of_stage_1(ranks: _Ranks) -> dict[str, StoredTensor]:
    """Map each parameter of stages 1 and 2 to its range of the concatenated parts."""
    groups = _flat(ranks, _PARTITION)
    paddings = ranks.partitions(0).get("param_alignment_paddings")
    found: dict[str, StoredTensor] = {}
    for index, shapes in enumerate(_shapes(ranks)):
        if index >= min(map(len, groups)):
            raise ranks.error(f"there are more groups of parameters than the {index} that a rank's file has")
        parts = [of_rank[index] for of_rank in groups]
        position = 0
        for order, (name, shape) in enumerate(shapes.items()):
            numel = math.prod(shape)
            found[name] = _cut(ranks, name, parts, [(position, numel)], shape)
            # DeepSpeed may pad each parameter for alignment.
            position += numel + (int(paddings[index][order]) if paddings is not None else 0)
    return found


def _of_stage_3(ranks: _Ranks) -> dict[str, StoredTensor]:
    """Map each parameter of stage 3 to its pieces, one in the part of each rank."""
    parts = _flat(ranks, _FLAT)
    lengths = [sum(part.numel for part in of_rank) for of_rank in parts]
    starts = [sum(lengths[:rank]) for rank in range(len(parts))]
    # One sequence of all ranks' groups. Within a rank, `position` continues from one group to the next.
    flat = [part for of_rank in parts for part in of_rank]
    found: dict[str, StoredTensor] = {}
    position = 0
    for shapes in _shapes(ranks):
        for name, shape in shapes.items():
            numel = math.prod(shape)
            piece = -(-numel // len(parts))  # rounded up, as DeepSpeed does; the last piece is padded
            stretches = [
                (start + position, min(piece, numel - rank * piece))
                for rank, start in enumerate(starts)
                if rank * piece < numel
            ]
            found[name] = _cut(ranks, name, flat, stretches, shape)
            position += piece
    return found


def _frozen(ranks: _Ranks) -> dict[str, StoredTensor]:
    """Return the frozen parameters, which are whole up to stage 2 and cut into pieces at stage 3."""
    shapes = ranks.model().get("frozen_param_shapes") or {}
    holders = range(len(ranks.models)) if ranks.stage == 3 else (0,)
    fragments = [ranks.model(rank).get("frozen_param_fragments") or {} for rank in holders]
    found: dict[str, StoredTensor] = {}
    for name, shape in shapes.items():
        parts = [of_rank[name] for of_rank in fragments if isinstance(of_rank.get(name), StoredTensor)]
        if len(parts) < len(fragments):
            raise ranks.error(f"the frozen parameter {name!r:.200} is not in the files of all ranks")
        # Padding comes after the last element, so the parameter is the beginning of the concatenated pieces.
        found[name] = _cut(ranks, name, parts, [(0, math.prod(shape))], tuple(shape))
    return found


def _flat(ranks: _Ranks, key: str) -> list[list[StoredTensor]]:
    """Return each rank's flat tensors, one for each group of parameters."""
    count = ranks.partitions(0).get("partition_count")
    # One count for all groups, or a list with one for each.
    count = max(count) if isinstance(count, list) else count
    if count != len(ranks.optimizers):
        raise NoCheckpointError(
            f"{ranks.folder} has the optimizer's files of {len(ranks.optimizers)} ranks, and {count} ranks saved it. "
            f"Bring all ranks' files together."
        )
    parts: list[list[StoredTensor]] = []
    for rank in range(len(ranks.optimizers)):
        raw = ranks.partitions(rank).get(key)
        listed: list[Any] = raw if isinstance(raw, list) else [raw]
        parts.append([part for part in listed if isinstance(part, StoredTensor)])
        if not parts[-1] or len(parts[-1]) < len(listed):
            raise ranks.error(f"the optimizer's file of rank {rank} has no {key}")
    return parts


def _cut(
    ranks: _Ranks,
    name: str,
    parts: Sequence[StoredTensor],
    stretches: Sequence[tuple[int, int]],
    shape: tuple[int, ...],
) -> StoredTensor:
    """Return the parameter whose elements are ranges of the concatenation of flat tensors."""
    available, numel, dtype = sum(part.numel for part in parts), math.prod(shape), parts[0].dtype
    if sum(length for _, length in stretches) != numel or any(
        start + length > available for start, length in stretches
    ):
        raise ranks.error(f"{name!r:.200} of shape {shape} reaches beyond the {available} elements that are stored")

    def fetch() -> torch.Tensor:
        flat = torch.empty(numel, dtype=dtype)
        filled = 0
        for start, length in stretches:
            position = 0
            for part in parts:
                first, last = max(start, position), min(start + length, position + part.numel)
                if first < last:
                    flat[filled : filled + last - first] = part.read_range(first - position, last - first)
                    filled += last - first
                position += part.numel
        return flat.view(shape)

    return StoredTensor(dtype, shape, fetch, (id(parts[0]), tuple(stretches)))

"""Settings for saving and loading modular checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.device_mesh import DeviceMesh


@dataclass
class CheckpointSaveOptions:
    """Settings of `save_checkpoint_to_disk`.

    `save_frequency` and `num_checkpoints_to_keep` are for the training loop that calls it, which decides when to save
    and what to delete; the function itself writes one checkpoint.

    Args:
        save_frequency: Interval of the loop's saves, as a length of training.
        dir_prefix: Name of the checkpoint's folder, with the placeholders of `format_name_with_dist_and_time`.
        overwrite: Whether to replace an existing checkpoint of this name.
        save_model: Whether to save the weights.
        save_optimizer: Whether to save the optimizer, of which there must be one.
        save_resumption_state: Whether to save everything else that resuming needs.
        num_checkpoints_to_keep: Number of checkpoints that the loop keeps; -1 for all.
        save_format: `'pt'`, or `'safetensors'` for the weights (the rest is `'pt'`).
        sharded_checkpoint: Whether each rank writes its own shards.
        precision: Dtype that floating point values are converted to: `'fp32'`, `'fp16'`, `'bf16'` or a dtype.
        include_keys: Patterns of the names of the weights to save.
        ignore_keys: Patterns of the names of the weights to leave out.
    """

    save_frequency: Any = "1ep"
    dir_prefix: str = "ep{epoch}-ba{batch}"
    overwrite: bool = False
    save_model: bool = True
    save_optimizer: bool = True
    save_resumption_state: bool = True
    num_checkpoints_to_keep: int = -1
    save_format: str = "pt"
    sharded_checkpoint: bool = False
    precision: "str | torch.dtype" = "fp32"
    include_keys: str | Sequence[str] | None = None
    ignore_keys: str | Sequence[str] | None = None


@dataclass
class CheckpointLoadOptions:
    """Settings of `load_checkpoint`.

    Args:
        load_model: Whether to load the weights.
        load_optimizer: Whether to load the optimizer.
        load_resumption_state: Whether to load everything else, which needs a `State`.
        include_keys: Patterns of the names of the weights to load; all others are left unchanged.
        ignore_keys: Patterns of the names of the weights to leave unchanged. Both kinds of patterns turn `strict` off.
        sharded_checkpoint: Whether the checkpoint was written by all ranks. The model must be sharded if true, and must
            not be if false. When `None`, the kind is detected, and any checkpoint loads into any model.
        shard_as_needed_during_load: Whether to shard a model that is not sharded yet, with torch's `fully_shard`, and
            whether a checkpoint of one file may be loaded into a sharded model.
        strict: Whether missing or unexpected names are an error. Shapes that differ are always an error.
        precision: Dtype that saved floating point values are converted to first. The model keeps its dtypes.
        cpu_offload: Whether values that cannot be read directly into the model are buffered on the CPU.
        load_planner: A planner of `torch.distributed.checkpoint` for sharded checkpoints.
        fsdp_config: Arguments of `fully_shard`: a mapping of keywords, or an object with some of them as attributes.
        device_mesh: Mesh over which to shard the model. When `None`, that of `fsdp_config`, or else all ranks.
        seed: Seed for weights that have no memory yet (on the device `meta`) and are not in the checkpoint.
    """

    load_model: bool = True
    load_optimizer: bool = False
    load_resumption_state: bool = False
    include_keys: str | Sequence[str] | None = None
    ignore_keys: str | Sequence[str] | None = None
    sharded_checkpoint: bool | None = False
    shard_as_needed_during_load: bool = False
    strict: bool = True
    precision: "str | torch.dtype" = "fp32"
    cpu_offload: bool = True
    load_planner: "LoadPlanner | None" = None
    fsdp_config: Any = None
    device_mesh: "DeviceMesh | None" = None
    seed: int = 42

    def __post_init__(self) -> None:
        if self.include_keys is not None and self.ignore_keys is not None:
            raise ValueError(both_key_filters(self.include_keys, self.ignore_keys))
        # With a selection of names, the others are missing intentionally.
        if self.include_keys is not None or self.ignore_keys is not None:
            self.strict = False


def both_key_filters(include_keys: object, ignore_keys: object) -> str:
    """Return the error for two filters that exclude each other."""
    return (
        f"Only one of include_keys or ignore_keys can be specified. Got include_keys={include_keys!r} and "
        f"ignore_keys={ignore_keys!r}."
    )

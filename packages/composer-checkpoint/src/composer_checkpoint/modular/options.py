"""The settings of a modular checkpoint: what is saved, and how it is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CheckpointLoadOptions", "CheckpointSaveOptions"]


@dataclass
class CheckpointSaveOptions:
    """What `save_checkpoint_to_disk` writes.

    `save_frequency` and `num_checkpoints_to_keep` are for the loop that calls it, which decides when to save and what
    to delete; the function itself writes one checkpoint.

    Args:
        save_frequency: How often the loop saves, as a length of training.
        dir_prefix: The checkpoint's folder, with the placeholders of `format_name_with_dist_and_time`.
        overwrite: Whether a checkpoint of this name may be replaced.
        save_model: Whether the weights are saved.
        save_optimizer: Whether the optimizer is saved, and of several the first.
        save_resumption_state: Whether all else that a run needs to go on is saved.
        num_checkpoints_to_keep: How many checkpoints the loop keeps; -1 for all.
        save_format: `'pt'`, or `'safetensors'` for the weights (the rest is `'pt'`).
        sharded_checkpoint: Whether each rank writes its own shards.
        precision: What floating point values are converted to: `'fp32'`, `'fp16'`, `'bf16'` or a dtype.
        include_keys: Patterns of the names of the weights to save; all others are left out.
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
    """What `load_checkpoint` reads, and into what.

    Args:
        load_model: Whether the weights are loaded.
        load_optimizer: Whether the optimizer is loaded.
        load_resumption_state: Whether all else is loaded; it needs a `State`.
        include_keys: Patterns of the names of the weights to load; all others stay as they are.
        ignore_keys: Patterns of the names of the weights that stay as they are. Either of the two turns `strict` off.
        sharded_checkpoint: Whether the checkpoint was written by all ranks. Then the model must be sharded, too, and
            otherwise it must not be. With `None` this is found out, and any checkpoint goes into any model.
        shard_as_needed_during_load: Whether a model that is not sharded yet is, with torch's `fully_shard`, and whether
            a checkpoint of one file may go into a sharded model.
        strict: Whether names that are missing or too many are an error. Shapes that differ always are.
        precision: What floating point values are converted to on their way. The model keeps its dtypes.
        cpu_offload: Whether values wait in the host's memory if they cannot be read right into the model.
        load_planner: A planner of `torch.distributed.checkpoint` for sharded checkpoints.
        fsdp_config: How `fully_shard` is called: its keywords in a mapping, or an object that has some of them as
            attributes.
        device_mesh: What the model is sharded over. That of `fsdp_config`, else all ranks, when `None`.
        seed: For weights that are neither in memory yet (on the device `meta`) nor in the checkpoint.
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
        if self.include_keys is not None or self.ignore_keys is not None:
            self.strict = False


def both_key_filters(include_keys: object, ignore_keys: object) -> str:
    """Say that one filter excludes the other."""
    return (
        f"Only one of include_keys or ignore_keys can be specified. Got include_keys={include_keys!r} and "
        f"ignore_keys={ignore_keys!r}."
    )

"""Validation of the sharding settings."""

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib.util import find_spec
from logging import getLogger
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp.config import FILLS_UP, FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig

log = getLogger(__name__)

HYBRID_STRATEGIES = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID_STRATEGIES)
ALLOWED: dict[str, tuple[Any, ...]] = {
    "sharding_strategy": STRATEGIES,
    "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NONE"),
    "tie_policy": ("error", "group"),
    "activation_checkpointing": (False, True, "selective"),
    "state_dict_type": ("full", "sharded", "local"),
    "grad_sync": ("group", "world"),
    "cpu_offload": (True, False),
}
"""The accepted values of settings with a closed set of them, including settings of a single unit."""
_STRICT_VARIABLE = "COMPOSER_STRICT_COMPAT"
_MORE_THAN_FLAGS = ("activation_checkpointing", "reshard_after_forward")


def check_values(config: FSDPConfig | FSDP2Config) -> None:
    """Validate each setting by itself."""
    for entry in fields(config):
        name, value = entry.name, getattr(config, entry.name)
        # Flags are compared by equality, so that 0 and 1 are accepted too, and the string 'false' is not.
        is_flag = isinstance(entry.default, bool) and name not in _MORE_THAN_FLAGS
        if is_flag and value not in (True, False, None):
            raise ValueError(f"{name}={value!r} is neither True nor False. Give one of them, without quotes.")
        if not (name == "state_dict_type" and value is None):
            check_value(name, value)


def check_value(name: str, value: object) -> None:
    """Raise a `ValueError` for a setting with a closed set of values, or a number of modules, that is not valid."""
    if name in ALLOWED and value not in ALLOWED[name]:
        hint = "fsdp_state_dict_type must be one of" if name == "state_dict_type" else "Use one of"
        raise ValueError(f"{name}={value!r} is not a valid value. {hint} {', '.join(map(repr, ALLOWED[name]))}.")
    # `bool` is a subclass of `int`.
    if name.endswith("_limit") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r} is not a number of modules: it has to be 1 or more.")


def check_fsdp(config: FSDPConfig) -> None:
    """Validate combinations of sharding settings, planners and `ignored_modules`."""
    if config.activation_cpu_offload and not config.use_orig_params:
        raise ValueError(
            "activation_cpu_offload=True is not supported with use_orig_params=False. Use use_orig_params=True, which "
            "is the default, or leave activation_cpu_offload out."
        )
    if config.load_monolith_rank0_only and not config.sync_module_states and config.auto_wrap:
        raise ValueError(
            "load_monolith_rank0_only=True needs sync_module_states=True: only rank 0 reads the checkpoint, and the "
            "other ranks have to receive its weights. Set both, on every rank."
        )
    if config.load_planner is not None or config.save_planner is not None:
        from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner  # rarely needed

        for name, kind in (("load_planner", LoadPlanner), ("save_planner", SavePlanner)):
            if not isinstance(planner := getattr(config, name), kind | None):
                raise ValueError(
                    f"{name}={planner!r} must be a {kind.__name__} of torch.distributed.checkpoint. Give one, such as "
                    f"Default{kind.__name__}(), or leave it out."
                )
    config.ignored_modules = _modules_in(config.ignored_modules or ())  # stored back: this exhausts an iterator
    if config.cpu_offload:
        if os.environ.get(_STRICT_VARIABLE) == "1":  # Composer refuses the setting
            raise ValueError(
                f"FSDP CPU Offload not supported yet. cpu_offload=True was given, and {_STRICT_VARIABLE}=1 rejects "
                f"settings that Composer does not support. Leave one of them out."
            )
        log.info("cpu_offload=True: weights, gradients and optimizer state stay on the host between uses.")


def _modules_in(ignored: Any) -> tuple[torch.nn.Module, ...]:
    if not isinstance(ignored, Iterable) or isinstance(ignored, torch.nn.Module):
        raise ValueError(f"ignored_modules={ignored!r} is not a list. Give a list of modules of the model.")
    modules = tuple(ignored)
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"ignored_modules has {module!r}, which is not a torch.nn.Module of the model.")
    return modules


def number_of_parameters(value: Any) -> float | None:
    """Return the parameter threshold of the size rule, or `None` if the rule is off."""
    try:
        number = float(value or 0)
    except (TypeError, ValueError):
        number = -1.0
    if not number >= 0:  # rejects NaN too
        raise ValueError(f"min_params={value!r} is not a number of parameters. Give one such as 1e8.")
    return number or None


def warn_ignored_options(config: FSDPConfig, stacklevel: int) -> None:
    """Warn about settings that have no effect."""
    if config.keep_low_precision_grads:
        warn(
            "keep_low_precision_grads=True does nothing: gradients have the dtype of the weights once they are "
            "reduced. Leave it out.",
            stacklevel + 1,
            DeprecationWarning,
        )
    if not config.limit_all_gathers:
        warn(
            "limit_all_gathers=False does nothing: FSDP2 always limits them. Leave it out.",
            stacklevel + 1,
            DeprecationWarning,
        )
    for name in ("te_checkpoint_wrapper", "te_shard_fp8_weight"):
        if getattr(config, name) and find_spec("transformer_engine") is None:
            raise ModuleNotFoundError(
                f"{name}=True needs the package 'transformer_engine', which is not installed. Run "
                f"`pip install 'transformer-engine[pytorch]'`, or leave the setting out.",
                name="transformer_engine",
            )
    if config.te_shard_fp8_weight:
        warn(
            "te_shard_fp8_weight=True does nothing: FSDP2 gathers weights in the dtype of mixed_precision. Leave it "
            "out.",
            stacklevel + 1,
        )


def check_mesh(mesh: Any, world_size: int) -> None:
    """Validate a device mesh for sharding."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise ValueError(
            f"device_mesh={mesh!r} must be a DeviceMesh with one axis to shard over, or two of which the first "
            f"replicates. Make one with torch.distributed.device_mesh.init_device_mesh, or leave it out for all ranks."
        )
    # Several equal meshes may partition the ranks, each rank having its own.
    if world_size % mesh.size():
        raise ValueError(
            f"device_mesh={mesh!r} has {mesh.size()} ranks, which does not divide the {world_size} ranks of this run. "
            f"Give a mesh of all ranks, or of a divisor of their number on each."
        )
    if mesh.get_coordinate() is None:  # on ranks outside the mesh
        raise ValueError(
            f"device_mesh={mesh!r} has the ranks {mesh.mesh.flatten().tolist()}, and this rank is not among them. Give "
            f"each rank the mesh that it is in."
        )


def split_settings(config: object) -> tuple[FSDPConfig | FSDP2Config, TPConfig | None]:
    """Return the only settings of sharding, and those of tensor parallelism, which need the former."""
    if isinstance(config, FSDPConfig | FSDP2Config):
        return config, None
    if not isinstance(config, ParallelismConfig):
        raise TypeError(
            f"the settings are {config!r}, a {type(config).__name__}. Give an FSDPConfig, an FSDP2Config or a "
            f"ParallelismConfig; FSDPConfig(**settings) makes one of a dict."
        )
    if config.fsdp is not None and config.fsdp2 is not None:
        raise ValueError(
            "ParallelismConfig has settings of sharding under fsdp and under fsdp2, and a model is sharded once. Give "
            "one of them; FSDPConfig has more settings."
        )
    own = config.fsdp2 if config.fsdp2 is not None else config.fsdp
    if own is None:
        raise ValueError(
            f"Tensor parallelism (TP) currently requires FSDP to be enabled. There are tp={config.tp!r} and no FSDP "
            f"settings. Give FSDP settings too ({{}} counts), or leave tp out."
        )
    return own, config.tp


def check_tensor_parallel(tp: TPConfig, own: FSDPConfig | FSDP2Config) -> None:
    """Validate the tensor parallelism settings by themselves and against the sharding settings."""
    if not own.use_orig_params:
        raise ValueError(
            "use_orig_params=False cannot be combined with tensor parallelism (TP), which splits the parameters "
            "themselves. Use use_orig_params=True, which is the default, or leave tp out."
        )
    plan: Any = tp.layer_plan
    if not isinstance(plan, Mapping | None):
        raise ValueError(
            f"layer_plan={plan!r} is a {type(plan).__name__}. Give a dict from patterns of module names to styles, "
            f"such as {{'blocks.*.up': ColwiseParallel()}}."
        )
    mesh, degree = tp.device_mesh, tp.tensor_parallel_degree
    if degree == 1:
        return  # the settings are then dropped
    fits = isinstance(mesh, DeviceMesh) and mesh.ndim == 1 and degree in (mesh.size(), FILLS_UP)
    if mesh is not None and not fits:
        raise ValueError(
            f"the device_mesh of TPConfig is {mesh!r}, and tensor_parallel_degree={degree!r}. Give a mesh with one "
            f"axis of that many ranks, or only the degree."
        )
    if own.load_monolith_rank0_only:
        raise ValueError(
            "load_monolith_rank0_only is not compatible with tensor parallelism (TP). Leave one of the two out."
        )


def warn(message: str, stacklevel: int, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at `stacklevel` counted from the caller of this function."""
    warnings.warn(message, category, stacklevel=stacklevel + 1)

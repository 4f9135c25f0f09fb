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

from composer_fsdp.config import FILLS_UP, FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig, check_degree

__all__ = [
    "HYBRID_STRATEGIES",
    "PREFETCHES",
    "STRATEGIES",
    "check_flags",
    "check_fsdp",
    "check_mesh",
    "check_reshard",
    "check_tensor_parallel",
    "number_of_parameters",
    "one_of",
    "warn_ignored_options",
    "warn",
]

log = getLogger(__name__)

HYBRID_STRATEGIES = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID_STRATEGIES)
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NONE")
_STRICT_VARIABLE = "COMPOSER_STRICT_COMPAT"
_MORE_THAN_FLAGS = ("activation_checkpointing", "reshard_after_forward")


def check_flags(config: FSDPConfig | FSDP2Config) -> None:
    """Validate boolean settings, rejecting values such as the string `'false'`.

    Raises:
        ValueError: If a boolean setting has another value. The message names the setting.
    """
    for entry in fields(config):
        if not isinstance(entry.default, bool) or entry.name in _MORE_THAN_FLAGS:
            continue
        # Compared by equality, so that 0 and 1 are accepted too.
        if (value := getattr(config, entry.name)) not in (True, False, None):
            raise ValueError(f"{entry.name}={value!r} is neither True nor False. Give one of them, without quotes.")


def check_fsdp(config: FSDPConfig) -> None:
    """Validate the values of sharding settings and their combinations.

    Raises:
        ValueError: If a value is invalid or contradicts another one. The message names the setting.
    """
    one_of(config, "sharding_strategy", STRATEGIES)
    one_of(config, "backward_prefetch", PREFETCHES)
    one_of(config, "tie_policy", ("error", "group"))
    for name in ("backward_prefetch_limit", "forward_prefetch_limit"):
        limit = getattr(config, name)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:  # `bool` is a subclass of `int`
            raise ValueError(f"{name}={limit!r} is not a number of modules: it has to be 1 or more.")
    if config.activation_cpu_offload and not config.use_orig_params:
        raise ValueError(
            "activation_cpu_offload=True is not supported with use_orig_params=False. Use use_orig_params=True, which "
            "is the default, or leave the activations where they are."
        )
    if config.load_monolith_rank0_only and not config.sync_module_states and config.auto_wrap:
        raise ValueError(
            "load_monolith_rank0_only=True needs sync_module_states=True: only rank 0 reads the checkpoint, and the "
            "other ranks have to receive its weights. Set both, on every rank."
        )
    _check_planners(config)
    ignored: Any = config.ignored_modules or ()
    if not isinstance(ignored, Iterable) or isinstance(ignored, torch.nn.Module):
        raise ValueError(f"ignored_modules={ignored!r} is no list. Give a list of modules of the model.")
    config.ignored_modules = tuple(ignored)  # an iterator can be read only once
    for module in config.ignored_modules:
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"ignored_modules has {module!r}, which is no torch.nn.Module. Give modules of the model.")
    if config.cpu_offload:
        if os.environ.get(_STRICT_VARIABLE) == "1":  # Composer refuses the setting
            raise ValueError(
                f"FSDP CPU Offload not supported yet. cpu_offload=True was given, and {_STRICT_VARIABLE}=1 asks for "
                f"what Composer does. Leave one of them out."
            )
        log.info("cpu_offload=True: weights, gradients and optimizer state stay on the host between uses.")


def _check_planners(config: FSDPConfig) -> None:
    if config.load_planner is None and config.save_planner is None:
        return
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner  # rarely needed

    for name, kind in (("load_planner", LoadPlanner), ("save_planner", SavePlanner)):
        if not isinstance(planner := getattr(config, name), kind | None):
            raise ValueError(
                f"{name}={planner!r} is no {kind.__name__} of torch.distributed.checkpoint. Give one, such as "
                f"Default{kind.__name__}(), or leave it out."
            )


def check_reshard(reshard: Any, shard_degree: int | None) -> None:
    """Validate `reshard_after_forward`.

    Args:
        reshard: The value to check.
        shard_degree: The number of ranks over which weights are sharded; `None` if not known yet.

    Raises:
        ValueError: If the value is neither a bool nor a positive number of ranks, or does not divide `shard_degree`.
    """
    # `bool` is a subclass of `int`, so that `isinstance` accepts all three forms.
    if not isinstance(reshard, int) or (reshard is not False and reshard < 1):
        raise ValueError(
            f"reshard_after_forward={reshard!r} is neither True nor False nor a number of ranks over which weights "
            f"stay sharded after the forward pass."
        )
    if shard_degree is not None and not isinstance(reshard, bool) and shard_degree % reshard:
        raise ValueError(
            f"reshard_after_forward={reshard!r} does not divide the {shard_degree} ranks over which the weights are "
            f"sharded. Give a divisor of {shard_degree}, True or False."
        )


def warn_ignored_options(config: FSDPConfig, stacklevel: int) -> None:
    """Warn about settings that have no effect.

    Raises:
        ModuleNotFoundError: If TransformerEngine is required but not installed.
    """
    if config.keep_low_precision_grads:
        warn(
            "keep_low_precision_grads=True does nothing: gradients have the format of the weights once they are "
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
        if getattr(config, name):
            _check_transformer_engine(name)
    if config.te_shard_fp8_weight:
        warn(
            "te_shard_fp8_weight=True does nothing: FSDP2 gathers weights in the format of mixed_precision. Leave it "
            "out.",
            stacklevel + 1,
        )


def check_mesh(mesh: Any, world_size: int) -> None:
    """Validate a device mesh for sharding.

    Args:
        mesh: The value to check.
        world_size: The number of ranks.

    Raises:
        ValueError: If it is not a mesh of one or two named axes that contains this rank, or if its size does not divide
            `world_size`.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise ValueError(
            f"device_mesh={mesh!r} is no DeviceMesh with one axis to shard over, or two of which the first replicates. "
            f"Make one by torch.distributed.device_mesh.init_device_mesh, or leave it out for all ranks."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError(
            f"device_mesh={mesh!r} has two axes without names, by which FSDP2 tells them apart. Give it "
            f"mesh_dim_names=('data_parallel_replicate', 'data_parallel_shard')."
        )
    # Several equal meshes may partition the ranks, each rank having its own.
    if world_size % mesh.size():
        raise ValueError(
            f"device_mesh={mesh!r} has {mesh.size()} ranks, in which the {world_size} ranks of this run cannot be "
            f"dealt out. Give a mesh of all ranks, or of a divisor of their number on each."
        )
    if mesh.get_coordinate() is None:  # on ranks outside the mesh
        raise ValueError(
            f"device_mesh={mesh!r} has the ranks {mesh.mesh.flatten().tolist()}, and this rank is none of them. Give "
            f"each rank the mesh that it is in."
        )


def check_tensor_parallel(config: ParallelismConfig) -> None:
    """Validate the tensor parallelism settings against the sharding settings, which they require.

    Raises:
        ValueError: If settings are missing, invalid or incompatible.
        TypeError: If a part of the configuration has the wrong type.
    """
    for name, kind in (("fsdp", FSDPConfig), ("fsdp2", FSDP2Config), ("tp", TPConfig)):
        if not isinstance(part := getattr(config, name), kind | None):
            raise TypeError(
                f"ParallelismConfig has {name}={part!r}, a {type(part).__name__}. Give a {kind.__name__}; "
                f"parse_parallelism makes them of dicts."
            )
    if config.fsdp is not None and config.fsdp2 is not None:
        raise ValueError(
            "ParallelismConfig has settings of sharding under fsdp and under fsdp2, and a model is sharded once. Give "
            "one of them; FSDPConfig has more settings."
        )
    if config.fsdp is None and config.fsdp2 is None:
        if config.tp is None:
            raise ValueError("the parallelism configuration is empty. Give FSDP settings: ParallelismConfig(fsdp=...).")
        raise ValueError(
            f"Tensor parallelism (TP) currently requires FSDP to be enabled. There are tp={config.tp!r} and no FSDP "
            f"settings. Give FSDP settings too ({{}} counts), or leave tp out."
        )
    if config.tp is None:
        return
    own = config.fsdp2 if config.fsdp2 is not None else config.fsdp
    assert own is not None
    if not own.use_orig_params:
        raise ValueError(
            "use_orig_params=False does not go with tensor parallelism (TP), which splits the parameters themselves. "
            "Use use_orig_params=True, which is the default, or leave tp out."
        )
    plan: Any = config.tp.layer_plan
    if not isinstance(plan, Mapping | None):
        raise ValueError(
            f"layer_plan={plan!r} is a {type(plan).__name__}. Give a dict from patterns of module names to styles, "
            f"such as {{'blocks.*.up': ColwiseParallel()}}."
        )
    mesh, degree = config.tp.device_mesh, config.tp.tensor_parallel_degree
    check_degree("tensor_parallel", degree)
    if (
        mesh is not None
        and degree != 1
        and not (isinstance(mesh, DeviceMesh) and mesh.ndim == 1 and degree in (mesh.size(), FILLS_UP))
    ):
        raise ValueError(
            f"the device_mesh of TPConfig is {mesh!r}, and tensor_parallel_degree={degree!r}. Give a mesh with one "
            f"axis of so many ranks, or only the degree."
        )
    if config.tp.tensor_parallel_degree != 1 and own.load_monolith_rank0_only:
        raise ValueError(
            "load_monolith_rank0_only is not compatible with tensor parallelism (TP). Leave one of the two out."
        )


def one_of(config: Any, name: str, values: tuple[Any, ...], *, none: Any = None) -> Any:
    """Return a setting if it is one of the allowed values; `None` becomes `none` if that is given.

    Raises:
        ValueError: If the value is not allowed.
    """
    value = getattr(config, name)
    if value is None and none is not None:
        return none
    if value not in values:
        hint = "fsdp_state_dict_type must be one of" if name == "state_dict_type" else "Use one of"
        raise ValueError(f"{name}={value!r} is none that there is. {hint} {', '.join(map(repr, values))}.")
    return value


def number_of_parameters(value: Any) -> float | None:
    """Return the parameter threshold of the size rule, or `None` if the rule is off.

    Raises:
        ValueError: If the value is not a nonnegative number.
    """
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if number is not None and not number >= 0:  # rejects NaN too
        raise ValueError(
            f"min_params={value!r} is not a number of parameters. Give one such as 1e8, or None to go by names alone."
        )
    return number or None  # 0 turns the rule off


def warn(message: str, stacklevel: int, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at `stacklevel` counted from the caller of this function."""
    warnings.warn(message, category, stacklevel=stacklevel + 1)


def _check_transformer_engine(name: str) -> None:
    if find_spec("transformer_engine") is None:
        raise ModuleNotFoundError(
            f"{name}=True needs the package 'transformer_engine', which is not installed. Run "
            f"`pip install 'transformer-engine[pytorch]'`, or leave the setting out.",
            name="transformer_engine",
        )

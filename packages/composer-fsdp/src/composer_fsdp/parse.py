"""Conversion of a Trainer's arguments on parallelism into a `ParallelismConfig`."""

import copy
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy

from composer_dist import Precision, dist
from composer_fsdp.checks import warn
from composer_fsdp.config import FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig, explain_key
from composer_fsdp.mixed_precision import resolve_dtypes
from composer_fsdp.plan import ShardingPlan, make_plan
from composer_fsdp.tensor_parallel import agreed

__all__ = ["BACKWARD_PREFETCH_MAP", "SHARDING_MAP", "get_mixed_precision", "parse_parallelism"]

_VERSION_VARIABLE = "FSDP_VERSION"
_PARTS = ("fsdp", "fsdp2", "tp")


def parse_parallelism(
    parallelism_config: Mapping[str, Any] | ParallelismConfig | None = None,
    *,
    fsdp_config: Mapping[str, Any] | FSDPConfig | FSDP2Config | None = None,
    fsdp_auto_wrap: bool | None = None,
    load_fsdp_monolith_rank0_only: bool | None = None,
    stacklevel: int = 1,
) -> ParallelismConfig | None:
    """Return the parallelism settings of a Trainer's arguments, or `None` without any.

    Args:
        parallelism_config: A `ParallelismConfig`, or a dict with the keys `fsdp`, `fsdp2` and `tp`, each a
            configuration or a dict of its settings. A dict under `fsdp` is an `FSDPConfig`, or with `FSDP_VERSION=2` in
            the environment an `FSDP2Config`.
        fsdp_config: Older form of `parallelism_config={'fsdp': ...}`.
        fsdp_auto_wrap: Older form of `fsdp_config['auto_wrap']`.
        load_fsdp_monolith_rank0_only: Older form of `fsdp_config['load_monolith_rank0_only']`.
        stacklevel: Stack level of warnings; 1 is the caller's line.

    Raises:
        ValueError: If settings are given twice, or `FSDP_VERSION` is neither 1 nor 2.
        TypeError: If a value has the wrong type or an unknown key.

    Example:
        >>> parse_parallelism({"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}).fsdp.sharding_strategy
        'SHARD_GRAD_OP'
        >>> parse_parallelism({"fsdp": None}) is None
        True
    """
    if fsdp_config is not None:
        if parallelism_config is not None:
            raise ValueError(
                f"fsdp_config={fsdp_config!r} and parallelism_config={parallelism_config!r} were both given. Give "
                f"parallelism_config={{'fsdp': ...}} alone; fsdp_config is its older spelling."
            )
        parallelism_config = {"fsdp": fsdp_config}
    flags = {"auto_wrap": fsdp_auto_wrap, "load_monolith_rank0_only": load_fsdp_monolith_rank0_only}
    given = {key: value for key, value in flags.items() if value is not None}
    parts = _parts(parallelism_config)
    if not parts:
        return None
    fsdp = _fsdp_of(parts.get("fsdp"), given, stacklevel + 1)
    fsdp2 = _instance("fsdp2", parts.get("fsdp2"), FSDP2Config)
    if fsdp is not None and fsdp2 is not None:
        raise ValueError(
            "parallelism_config has settings of sharding under 'fsdp' and under 'fsdp2', and a model is sharded once. "
            "Give one of them; an FSDPConfig has more settings."
        )
    if isinstance(fsdp, FSDP2Config):
        fsdp, fsdp2 = None, fsdp
    tp = _instance("tp", parts.get("tp"), TPConfig)
    # Copies, since a run stores its mesh in them, which the next run with the same settings must not find.
    return ParallelismConfig(fsdp=copy.copy(fsdp), fsdp2=copy.copy(fsdp2), tp=copy.copy(tp))


def _parts(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        for key in config:
            if key not in _PARTS:
                raise ValueError(
                    f"parallelism_config has the key {key!r}, which is unknown. {explain_key(key, _PARTS)} Settings of "
                    f"sharding go below 'fsdp': {{'fsdp': {{'state_dict_type': 'full'}}}}."
                )
        parts = dict(config)
    # Any object with these attributes, such as a Composer `ParallelismConfig`, which may lack `fsdp2`.
    elif all(hasattr(config, part) for part in ("fsdp", "tp")):
        parts = {part: getattr(config, part, None) for part in _PARTS}
    else:
        raise TypeError(
            f"parallelism_config={config!r} is a {type(config).__name__}. Give a ParallelismConfig, or a dict with the "
            f"keys {', '.join(_PARTS)}."
        )
    return {key: value for key, value in parts.items() if value is not None}


def _fsdp_of(given: Any, flags: dict[str, Any], stacklevel: int) -> FSDPConfig | FSDP2Config | None:
    if given is None:
        return None
    if isinstance(given, FSDPConfig | FSDP2Config):
        for name, value in flags.items():
            if getattr(given, name, value) != value:
                raise ValueError(
                    f"the Trainer's argument for {name!r} is {value!r}, and the {type(given).__name__} has "
                    f"{name}={getattr(given, name)!r}. Leave the argument out."
                )
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"the FSDP settings are {given!r}, a {type(given).__name__}. Give a dict of settings, an FSDPConfig or an "
            f"FSDP2Config."
        )
    settings = dict(given)
    for name, value in flags.items():
        if settings.setdefault(name, value) != value:
            raise ValueError(
                f"fsdp_config[{name!r}]={settings[name]!r} contradicts the Trainer's older argument for the same, "
                f"{value!r}. Leave the argument out."
            )
    version = os.environ.get(_VERSION_VARIABLE, "1")
    if version == "2":
        return FSDP2Config.from_compatible_attrs(settings)
    if version != "1":
        raise ValueError(
            f"the environment variable {_VERSION_VARIABLE}={version!r} must be 1 or 2, the version of FSDP settings. "
            f"Set it to one of them, or leave it out."
        )
    return FSDPConfig.from_dict(settings, stacklevel=stacklevel + 1)


def _instance(part: str, given: Any, cls: Any) -> Any:
    if given is None or isinstance(given, cls):
        return given
    if isinstance(given, Mapping):
        return cls(**given)
    raise TypeError(
        f"parallelism_config[{part!r}]={given!r} is a {type(given).__name__}. Give a {cls.__name__} or a dict of its "
        f"settings."
    )


def configure_state(state: Any, config: Any) -> None:
    """Validate the settings of a training state, and set its `tp_config` and `device_mesh`.

    `State` finds this function through the entry point `parallelism`. Every rank must call it.
    """
    parts = {part: getattr(config, part, None) for part in _PARTS}
    is_own = any(isinstance(part, FSDPConfig | FSDP2Config | TPConfig) for part in parts.values())
    if not is_own and (not isinstance(config, ParallelismConfig) or config == ParallelismConfig()):
        return
    config, tp = ParallelismConfig(**parts), parts["tp"]
    # Stack levels: this function, two of the state, the user's line.
    if tp is not None:
        warn("Tensor parallelism (TP) is experimental and may change in future versions.", 4, FutureWarning)

    plan = agreed(
        lambda: _plan_for(state, config),
        lambda plan: {"parallelism_config": plan.facts(), "save_metrics": state.save_metrics},
    )
    if tp is not None and plan.layer_plan is None:
        warn(
            "Received tensor_parallel_degree of 1, which is a no-op. Tensor parallelism will not be used. Give 2 or "
            "more, or leave tp out.",
            4,
        )
        tp = None
    mesh = plan.device_mesh
    if mesh is None and plan.degrees and dist.is_initialized():
        device = torch.device(getattr(state.device, "torch_device", state.device or "cpu"))
        mesh = init_device_mesh(device.type, tuple(plan.degrees.values()), mesh_dim_names=tuple(plan.degrees))
    state.tp_config, state.device_mesh = tp, mesh


def _plan_for(state: Any, config: ParallelismConfig) -> ShardingPlan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the strategy makes its plan from the same settings, and warns
        plan = make_plan(config, world_size=dist.get_world_size())
    if plan.state_dict_type == "sharded" and state.save_metrics:
        raise ValueError(
            "save_metrics=True cannot be combined with state_dict_type='sharded', since metrics are not sharded. Use "
            "save_metrics=False, or state_dict_type='full'."
        )
    loads_alone = plan.version == 1 and state.load_monolith_rank0_only and dist.get_global_rank() == 0
    if loads_alone and any(parameter.is_meta for parameter in getattr(state.model, "parameters", tuple)()):
        raise ValueError(
            "load_monolith_rank0_only=True needs real weights on rank 0, where the checkpoint is loaded, and the "
            "model has parameters on the meta device there. Build it on the CPU on rank 0, and on meta on the "
            "others only."
        )
    return plan


SHARDING_MAP: dict[str, ShardingStrategy] = dict(ShardingStrategy.__members__)
"""The strategies of PyTorch's FSDP1 by name."""
BACKWARD_PREFETCH_MAP: dict[str, BackwardPrefetch | None] = {"NONE": None, **BackwardPrefetch.__members__}
"""The prefetching modes of PyTorch's FSDP1 by name."""


def get_mixed_precision(
    precision: str | Precision,
    mixed_precision: str | Mapping[str, Any] = "DEFAULT",
    keep_low_precision_grads: bool = False,
) -> tuple[MixedPrecision, torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of a `mixed_precision` setting; see `composer_fsdp.mixed_precision`.

    Args:
        precision: Precision of the run.
        mixed_precision: `'FULL'`, `'DEFAULT'`, `'PURE'`, or a dict.
        keep_low_precision_grads: Only passed on; gradients are in float32 after their reduction.

    Returns:
        PyTorch's `MixedPrecision`, and the dtypes of weights, reductions and buffers.

    Raises:
        ValueError: If the setting or a dtype is unknown.

    Example:
        >>> get_mixed_precision("amp_bf16", "PURE")[1:]
        (torch.bfloat16, torch.bfloat16, torch.bfloat16)
    """
    dtypes = resolve_dtypes(mixed_precision, precision)
    setting = MixedPrecision(
        param_dtype=dtypes.param,
        reduce_dtype=dtypes.reduce,
        buffer_dtype=dtypes.buffer,
        keep_low_precision_grads=keep_low_precision_grads,
    )
    return setting, dtypes.param, dtypes.reduce, dtypes.buffer

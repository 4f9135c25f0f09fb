"""`ShardingPlan`: all settings in one form, validated before sharding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import nn

from composer_dist import Precision, dist
from composer_fsdp.checks import (
    HYBRID_STRATEGIES,
    check_fsdp,
    check_mesh,
    check_tensor_parallel,
    check_value,
    check_values,
    number_of_parameters,
    split_settings,
    warn,
    warn_ignored_options,
)
from composer_fsdp.config import (
    AXES,
    FSDP2Config,
    FSDPConfig,
    ParallelismConfig,
    TPConfig,
    by_name,
    explain_key,
    fill_degrees,
)
from composer_fsdp.groups import check_group, is_pair
from composer_fsdp.mixed_precision import Dtypes, resolve_dtypes

_ON_TWO_AXES = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2"}
_ON_ONE_AXIS = {after: before for before, after in _ON_TWO_AXES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """All settings of a sharding, checked against each other by `make_plan`.

    Attributes:
        version: 1 for an `FSDPConfig`, 2 for an `FSDP2Config`.
        sharding_strategy: One of `STRATEGIES`, adapted to the number of axes.
        reshard_after_forward: Whether weights are freed after a forward pass; a number keeps them sharded over that
            many ranks.
        degrees: Degrees of replication, sharding and tensor parallelism by axis. Empty if groups determine them.
        process_group: Ranks that share the weights, if no degrees are given.
        dtypes: Dtypes of computation, reduction and buffers.
        tp_device_mesh: The user's mesh of tensor parallelism.
        layer_plan: Styles of tensor parallelism by pattern of module names.

    The others are as in `FSDPConfig`.
    """

    version: int = 1
    sharding_strategy: str = "FULL_SHARD"
    reshard_after_forward: bool | int = True
    degrees: Mapping[str, int] = field(default_factory=dict)
    process_group: Any = None
    device_mesh: Any = None
    mixed_precision: Any = "DEFAULT"
    precision: str = "fp32"
    dtypes: Dtypes = field(default_factory=Dtypes)
    cpu_offload: bool = False
    backward_prefetch: str = "BACKWARD_POST"
    backward_prefetch_limit: int = 1
    forward_prefetch: bool = False
    forward_prefetch_limit: int = 1
    activation_checkpointing: bool | str = False
    activation_checkpointing_reentrant: bool = False
    activation_cpu_offload: bool = False
    te_checkpoint_wrapper: bool = False
    auto_wrap: bool = True
    min_params: float | None = None
    ignored_modules: tuple[torch.nn.Module, ...] = ()
    tie_policy: str = "error"
    sync_module_states: bool = False
    load_monolith_rank0_only: bool = False
    state_dict_type: str = "full"
    use_orig_params: bool = True
    grad_sync_every_microbatch: bool = True
    verbose: bool = False
    tensor_parallel_degree: int = 1
    layer_plan: Mapping[str, Any] | None = None
    tp_device_mesh: Any = None

    @property
    def replicates(self) -> bool:
        """Return whether there are several copies of the sharded model."""
        return self.sharding_strategy in _ON_ONE_AXIS

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that all ranks must have in common, as JSON values.

        Plans with equal dicts shard a model in the same way.
        """
        left_out = {"version", "verbose", "mixed_precision", "dtypes", "ignored_modules", "tp_device_mesh"}
        settings = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in left_out}
        settings |= {
            "param_dtype": _short(self.dtypes.param),
            "reduce_dtype": _short(self.dtypes.reduce),
            "buffer_dtype": _short(self.dtypes.buffer),
            "ignored_modules": len(self.ignored_modules),
            "degrees": dict(self.degrees),
            "device_mesh": None if self.device_mesh is None else self.device_mesh.mesh.tolist(),
            "process_group": _describe_group(self.process_group),
            "layer_plan": None
            if self.layer_plan is None
            else {pattern: type(style).__name__ for pattern, style in self.layer_plan.items()},
        }
        return settings

    def facts(self) -> dict[str, Any]:
        """Return the settings to compare between ranks, without values that differ between ranks of one run."""
        facts = self.to_dict()
        # Ranks may belong to different parts of one mesh or give different lists of ranks, which are compared later.
        if self.device_mesh is not None:
            facts["device_mesh"] = (self.device_mesh.mesh_dim_names, tuple(self.device_mesh.shape))
        if not isinstance(self.process_group, str | None):
            facts["process_group"] = type(self.process_group).__name__
        return facts

    def describe(self) -> str:
        """Return a text with one line per setting, `FSDP: Using <key>=<value>`."""
        settings = self.to_dict()
        first = ("sharding_strategy", "cpu_offload", "param_dtype", "reduce_dtype", "buffer_dtype")
        lines = {"sharding_strategy": self.sharding_strategy, "cpu_offload": self.cpu_offload}
        lines["mixed_precision"] = self.mixed_precision
        lines |= {name: settings[name] for name in first} | settings
        return "\n".join(f"FSDP: Using {name}={value}" for name, value in lines.items())


def make_plan(
    config: ParallelismConfig | FSDPConfig | FSDP2Config,
    *,
    precision: str | Precision | torch.dtype = "fp32",
    world_size: int,
    stacklevel: int = 1,
) -> ShardingPlan:
    """Validate settings and convert them into a plan, without communication.

    Args:
        config: The settings.
        precision: Precision of the run.
        world_size: Number of ranks.
        stacklevel: Stack level of warnings; 1 is the caller's line.

    Raises:
        ValueError: If a setting is invalid or contradicts another.
        TypeError: If the settings have the wrong type, such as a dict.
        ModuleNotFoundError: If TransformerEngine is requested but not installed.

    Example:
        >>> config = FSDPConfig(sharding_strategy="HYBRID_SHARD", data_parallel_replicate_degree=2)
        >>> plan = make_plan(config, world_size=8)
        >>> plan.sharding_strategy, dict(plan.degrees)
        ('HYBRID_SHARD', {'data_parallel_replicate': 2, 'data_parallel_shard': 4})
    """
    own, tp = split_settings(config)
    if tp is not None:
        check_tensor_parallel(tp, own)
    if tp is not None and tp.tensor_parallel_degree == 1:
        tp = None  # nothing to split, and an axis of one rank would override a process group
    check_values(own)
    known = {entry.name for entry in fields(own)}
    settings: dict[str, Any] = {
        # Flags may be given as numbers or None.
        entry.name: bool(getattr(own, entry.name)) if isinstance(entry.default, bool) else getattr(own, entry.name)
        for entry in fields(ShardingPlan)
        if entry.name in known
    }
    settings |= {
        "activation_checkpointing": own.activation_checkpointing,  # a flag or 'selective'
        "state_dict_type": own.state_dict_type or "full",
        "precision": str(precision.value if isinstance(precision, Precision) else precision),
        "dtypes": resolve_dtypes(own.mixed_precision, precision),
        "layer_plan": None if tp is None else (tp.layer_plan or {}),
        "tp_device_mesh": None if tp is None else tp.device_mesh,
    }
    if isinstance(own, FSDP2Config):
        settings |= {"version": 2, **_mesh_settings(own, tp, world_size, stacklevel + 1)}
    else:
        check_fsdp(own)
        warn_ignored_options(own, stacklevel + 1)
        settings |= {
            **_group_settings(own, tp, world_size, stacklevel + 1),
            "activation_checkpointing_reentrant": own.asks_for_reentrant,
            "min_params": number_of_parameters(own.min_params),
            "ignored_modules": tuple(own.ignored_modules or ()),
        }
    if tp is not None:  # fill_degrees has replaced a degree of -1
        settings["tensor_parallel_degree"] = settings["degrees"].get(AXES[2], tp.tensor_parallel_degree)
    return ShardingPlan(**settings)


def _mesh_settings(config: FSDP2Config, tp: TPConfig | None, world_size: int, stacklevel: int) -> dict[str, Any]:
    mesh, reshard = config.device_mesh, config.reshard_after_forward
    if mesh is not None:
        check_mesh(mesh, world_size)
    if mesh is not None and tp is not None:
        if tp.device_mesh is None:
            raise ValueError(
                f"FSDP2Config has device_mesh={mesh!r}, and TPConfig has none. Give both the parts of one mesh, such "
                f"as mesh['data_parallel_shard'] and mesh['tensor_parallel'], or neither."
            )
        if mesh.size() * tp.tensor_parallel_degree != world_size:
            raise ValueError(
                f"device_mesh={mesh!r} has {mesh.size()} ranks, and tensor_parallel_degree="
                f"{tp.tensor_parallel_degree}, which do not multiply to the world size {world_size}. Give two parts of "
                f"one mesh of all ranks."
            )
    elif mesh is not None and mesh.size() < world_size:
        warn(
            f"device_mesh={mesh!r} has {mesh.size()} of the {world_size} ranks, so that the ranks of each such mesh "
            f"train a model of their own, unless they hold its tensors or its layers together. Leave it out to share "
            f"one model among all ranks.",
            stacklevel + 1,
        )
    strategy = "FULL_SHARD" if reshard else "SHARD_GRAD_OP"
    return {
        "sharding_strategy": _ON_TWO_AXES[strategy] if mesh is not None and mesh.ndim == 2 else strategy,
        "reshard_after_forward": reshard,
        "device_mesh": mesh,
        "degrees": {} if mesh is not None else fill_degrees(config, tp, world_size),
    }


def _group_settings(config: FSDPConfig, tp: TPConfig | None, world_size: int, stacklevel: int) -> dict[str, Any]:
    has_degrees = config.data_parallel_shard_degree != -1 or config.data_parallel_replicate_degree is not None
    group = config.process_group
    if group is not None and (has_degrees or tp is not None):
        warn(
            f"process_group={group!r} is ignored, since the degrees of parallelism determine the groups of ranks. "
            f"Give one of the two.",
            stacklevel + 1,
        )
        group = None
    if group is not None and check_group(group, world_size) and config.sharding_strategy == "NO_SHARD":
        raise ValueError(
            f"process_group={group!r} is a pair, and sharding_strategy='NO_SHARD' shares nothing. Give the one group "
            f"that replicates, or another strategy."
        )
    if config.sharding_strategy == "NO_SHARD" and tp is not None:
        raise ValueError(
            "sharding_strategy='NO_SHARD' cannot be combined with tensor parallelism. Use 'FULL_SHARD' with "
            "data_parallel_shard_degree=1 instead."
        )
    strategy = _strategy_that_fits(config, group, has_degrees or tp is not None, stacklevel + 1)
    by_degrees = has_degrees or tp is not None or (group is None and strategy in _ON_TWO_AXES)
    return {
        "sharding_strategy": strategy,
        "reshard_after_forward": strategy in ("FULL_SHARD", "HYBRID_SHARD"),
        "degrees": fill_degrees(config, tp, world_size) if by_degrees else {},
        "process_group": group,
    }


def _strategy_that_fits(config: FSDPConfig, group: Any, has_degrees: bool, stacklevel: int) -> str:
    strategy = config.sharding_strategy
    if strategy == "NO_SHARD" or (group is None and not has_degrees):
        return strategy
    is_pair_of_axes = is_pair(group) if group is not None else config.data_parallel_replicate_degree is not None
    other = (_ON_TWO_AXES if is_pair_of_axes else _ON_ONE_AXIS).get(strategy)
    if other is None:
        return strategy
    axes = 2 if is_pair_of_axes else 1
    warn(f"{strategy} is not supported with {axes}D device mesh. Using {other} instead.", stacklevel + 1)
    return other


def _describe_group(group: Any) -> Any:
    if group is None or isinstance(group, str | int):
        return group
    if isinstance(group, list | tuple):
        return [_describe_group(part) for part in group]
    return type(group).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


WrapFunction = Callable[[nn.Module], bool | Mapping[str, Any]]

_KEYS = (
    "sharding_strategy",
    "process_group",
    "mixed_precision",
    "backward_prefetch",
    "cpu_offload",
    "reshard_after_forward",
    "forward_prefetch_limit",
    "shard_placement_fn",
    "grad_sync",
)
_NARROW_KEYS_OF_A_UNIT = ("reshard_after_forward", "mixed_precision", "device_mesh")


def function_of(name: str, root: nn.Module) -> WrapFunction | None:
    """Return a root's `fsdp_wrap_fn`, or `None`."""
    function: Any = getattr(root, "fsdp_wrap_fn", None)
    if function is not None and not callable(function):
        raise TypeError(
            f"{name or 'the model'}.fsdp_wrap_fn={function!r} is not a function. Define fsdp_wrap_fn(self, module), "
            f"which returns True, False or a dict of settings."
        )
    return cast("WrapFunction | None", function)


def answer_of(function: WrapFunction | None, name: str, module: nn.Module) -> bool | Mapping[str, Any]:
    """Return the result of a wrap function for a module; `None` counts as `False`."""
    answer: Any = None if function is None else function(module)
    if answer is None:
        return False
    if isinstance(answer, Mapping):
        options = {key: by_name(value) for key, value in answer.items()}
        for key in ("sharding_strategy", "backward_prefetch"):
            if isinstance(options.get(key), str):
                options[key] = options[key].upper()
        if options.get("backward_prefetch", "") is None:  # PyTorch's FSDP1 uses None for no prefetching
            options["backward_prefetch"] = "NONE"
        return options
    if isinstance(answer, bool):
        return answer
    raise TypeError(
        f"fsdp_wrap_fn returned {answer!r}, a {type(answer).__name__}, for {name!r}. Return True to shard the module "
        f"as a unit of its own, False not to, or a dict of settings such as {{'mixed_precision': 'FULL'}}."
    )


def check_options(name: str, options: Mapping[str, Any], plan: ShardingPlan) -> None:
    """Raise for settings that a single unit cannot have."""
    allowed = FSDP2Config.settable_attrs() if plan.version == 2 else _KEYS
    for key in options:
        if key not in allowed and plan.version == 2:
            # Composer's text, whose beginning users compare.
            raise KeyError(
                f"Invalid FSDP2 config keys in wrap_fn return value. Valid keys are: {allowed}. The dict for {name!r} "
                f"has {key!r}. {explain_key(key, allowed)}"
            )
        if key not in allowed:
            raise ValueError(
                f"fsdp_wrap_fn returned the setting {key!r} for {name!r}, which a single module does not have. "
                f"{explain_key(key, _KEYS)} Valid keys are: {', '.join(_KEYS)}."
            )
        if plan.version == 2 and key not in _NARROW_KEYS_OF_A_UNIT:
            warn(  # without the unit's name, so that Python shows it only once
                f"fsdp_wrap_fn returned {key}={options[key]!r}, which does nothing: it is a setting of the whole "
                f"model. Set it in the FSDP2Config; a unit has {', '.join(_NARROW_KEYS_OF_A_UNIT)}.",
                stacklevel=2,
            )
    try:
        _check_unit_values(options, plan)
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"fsdp_wrap_fn returned {dict(options)!r} for {name!r}: {error}") from None


def _check_unit_values(options: Mapping[str, Any], plan: ShardingPlan) -> None:
    for key, value in options.items():
        check_value(key, value)
    if not callable(options.get("shard_placement_fn", len)):  # `len` stands for any function
        raise ValueError(f"shard_placement_fn={options['shard_placement_fn']!r} is not a function of a parameter.")
    strategy = options.get("sharding_strategy")
    if strategy in ("NO_SHARD", *HYBRID_STRATEGIES) and plan.tensor_parallel_degree > 1:
        raise ValueError(
            f"sharding_strategy={strategy!r} of a single module cannot be combined with tensor parallelism. Use "
            "'FULL_SHARD' or 'SHARD_GRAD_OP', or leave it out."
        )
    if options.get("device_mesh") is not None:
        check_mesh(options["device_mesh"], dist.get_world_size())
    if options.get("process_group") is not None:
        check_group(options["process_group"], dist.get_world_size())
    if "mixed_precision" in options:
        resolve_dtypes(options["mixed_precision"], plan.precision)

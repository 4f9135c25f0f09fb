"""Settings of parallelism: `FSDPConfig`, `FSDP2Config`, `TPConfig` and `ParallelismConfig`.

This module does not import torch. `composer_fsdp.plan` checks the settings against each other.
"""

import difflib
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Self

__all__ = [
    "format_bytes",
    "parse_bytes",
    "FSDP2Config",
    "FSDPConfig",
    "ParallelismConfig",
    "TPConfig",
    "AXES",
    "FILLS_UP",
    "fill_degrees",
    "by_name",
    "explain_key",
    "take_legacy_keys",
]

_PREFIX_DIR = "ep{epoch}-ba{batch}"


class _Checked:
    """Rejects unknown keywords with a hint, before the dataclass raises a plain TypeError."""

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        known = _names(cls)
        for key in settings:
            if key not in known:
                hint = explain_key(key, known)
                raise TypeError(f"{cls.__name__} got an unexpected keyword argument {key!r}. {hint}")
        return super().__new__(cls)


@dataclass
class FSDPConfig(_Checked):
    """All settings of FSDP, including those of older releases.

    Case does not matter in strings. Instead of `'FULL_SHARD'` and the like, torch's own `ShardingStrategy.FULL_SHARD`
    is accepted as well.

    Args:
        activation_checkpointing: Whether to recompute the activations of the chosen modules in the backward pass
            instead of keeping them. `'selective'` keeps the results of matrix products, unless they are changed in
            place. `composer_fsdp.activation` describes the choice of modules.
        activation_checkpointing_reentrant: Whether to use torch's reentrant implementation; only an explicit `True`
            does. It computes no gradients for a module whose inputs need none.
        activation_cpu_offload: Whether to keep the activations of the chosen modules on the host.
        auto_wrap: Whether to shard the model; `False` if it is sharded already.
        te_checkpoint_wrapper: Whether to checkpoint activations with TransformerEngine.
        te_shard_fp8_weight: Whether to gather TransformerEngine's weights in float8.
        backward_prefetch: When to gather the next module's weights in the backward pass: `'BACKWARD_PRE'` before or
            `'BACKWARD_POST'` after the current module's computation, `'NONE'` or `None` not ahead of time.
        backward_prefetch_limit: Number of modules to prefetch.
        cpu_offload: Whether to keep weights, gradients and optimizer state on the host between uses.
        data_parallel_shard_degree: Number of ranks that share the weights; -1 for all that the other degrees leave.
        data_parallel_replicate_degree: Number of copies of the sharded model.
        forward_prefetch: Whether to prefetch in the forward pass, too.
        forward_prefetch_limit: Number of modules to prefetch there.
        ignored_modules: Modules that are not sharded. Their gradients are averaged nevertheless.
        keep_low_precision_grads: No effect; gradients are in float32 after their reduction.
        limit_all_gathers: No effect; gathers are always limited.
        load_monolith_rank0_only: Whether only rank 0 reads a checkpoint and broadcasts the weights.
        load_planner: A `LoadPlanner` of `torch.distributed.checkpoint` for sharded checkpoints. `None` selects one that
            rejects the checkpoint of another model.
        save_planner: A `SavePlanner` of `torch.distributed.checkpoint` for sharded checkpoints.
        mixed_precision: `'FULL'`, `'DEFAULT'`, `'PURE'`, or a dict of `param_dtype`, `reduce_dtype` and
            `buffer_dtype`; see `composer_fsdp.mixed_precision`. Torch's own `MixedPrecision` is accepted, too.
        process_group: Ranks that share the weights, if not all: `'self'`, `'node'`, `'local_rank_across_nodes'`,
            `'setK'`, `'modK'`, a list of ranks, a group, or a pair of these for sharding and for replication.
        sharded_ckpt_prefix_dir: Name of the folder of a sharded checkpoint.
        sharding_strategy: `'FULL_SHARD'`, `'SHARD_GRAD_OP'`, `'NO_SHARD'`, `'HYBRID_SHARD'` or `'_HYBRID_SHARD_ZERO2'`.
        state_dict_type: Format of checkpoints: `'full'`, `'sharded'` or `'local'`.
        sync_module_states: Whether all ranks start with rank 0's weights.
        use_orig_params: Whether an optimizer may have several groups, or only some of the parameters.
        verbose: Whether to print the model and the settings after sharding.
        min_params: Number of parameters from which a module is sharded as a unit. `None` or 0 disables this rule.
        tie_policy: Treatment of units that share weights: `'error'`, or `'group'` to shard them together.
        grad_sync_every_microbatch: Whether gradients are reduced after each microbatch, which saves memory, or after
            the last one, which saves communication.

    Raises:
        TypeError: If a setting is unknown; names its replacement, or similar names.
        ValueError: If a device mesh is given, which the degrees determine.

    Example:
        >>> FSDPConfig(sharding_strategy="hybrid_shard", data_parallel_replicate_degree=2).sharding_strategy
        'HYBRID_SHARD'
    """

    fsdp_version: ClassVar[int] = 1
    activation_checkpointing: bool | str = False
    activation_checkpointing_reentrant: bool = True
    activation_cpu_offload: bool = False
    auto_wrap: bool = True
    te_checkpoint_wrapper: bool = False
    te_shard_fp8_weight: bool = False
    backward_prefetch: str = "BACKWARD_POST"
    backward_prefetch_limit: int = 1
    cpu_offload: bool = False
    data_parallel_shard_degree: int = -1
    data_parallel_replicate_degree: int | None = None
    forward_prefetch: bool = False
    forward_prefetch_limit: int = 1
    ignored_modules: Iterable[Any] | None = None
    keep_low_precision_grads: bool = False
    limit_all_gathers: bool = True
    load_monolith_rank0_only: bool = False
    load_planner: Any = None
    save_planner: Any = None
    mixed_precision: str | dict[str, Any] = "DEFAULT"
    process_group: Any = None
    sharded_ckpt_prefix_dir: str = _PREFIX_DIR
    sharding_strategy: str = "FULL_SHARD"
    state_dict_type: str = "full"
    sync_module_states: bool = False
    use_orig_params: bool = True
    verbose: bool = False
    min_params: float | str | None = 1e8
    tie_policy: str = "error"
    grad_sync_every_microbatch: bool = True
    _device_mesh: Any = field(default=None, init=False, repr=False, compare=False)
    # Composer documents True as the default, but the newer implementation is better unless the user chose otherwise.
    _asks_for_reentrant: bool = field(init=False, repr=False, compare=False)

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Reject a device mesh, and record an explicit choice of the reentrant implementation."""
        for key in ("device_mesh", "_device_mesh"):
            if key in settings:
                raise ValueError(
                    f"Directly specifying device mesh for FSDP was deprecated: {key}={settings[key]!r}. Give "
                    f"data_parallel_shard_degree and data_parallel_replicate_degree, from which the mesh is made, or "
                    f"an FSDP2Config(device_mesh=...)."
                )
        config = super().__new__(cls, **settings)
        # Only `__new__` sees which settings were passed: in the dataclass's `__init__` the default looks the same.
        config._asks_for_reentrant = bool(settings.get("activation_checkpointing_reentrant", False))
        return config

    def __post_init__(self) -> None:
        for name in ("sharding_strategy", "backward_prefetch", "mixed_precision"):
            setattr(self, name, _in_case(getattr(self, name), str.upper))
        if self.backward_prefetch is None:  # PyTorch's FSDP1 uses None for no prefetching
            self.backward_prefetch = "NONE"
        for name in ("state_dict_type", "tie_policy", "activation_checkpointing"):
            setattr(self, name, _in_case(getattr(self, name), str.lower))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], *, stacklevel: int = 1) -> Self:
        """Build a configuration from a dict, which may have keys of older releases.

        Args:
            settings: Fields of this class, and `flatten_parameters`, `min_params` and `load_fsdp_monolith_rank0_only`,
                each with a `DeprecationWarning`.
            stacklevel: Stack level of the warnings; 1 is the caller's line.

        Raises:
            TypeError, ValueError: See the constructor.
        """
        return cls(**take_legacy_keys(settings, stacklevel=stacklevel + 1))

    @property
    def asks_for_reentrant(self) -> bool:
        """Return whether the reentrant implementation of activation checkpointing was set explicitly."""
        return self._asks_for_reentrant

    @property
    def device_mesh(self) -> Any:
        """The mesh of ranks that shard and replicate the weights, once the model is sharded."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, mesh: Any) -> None:
        self._device_mesh = mesh


def _read_only(name: str, value: Any) -> property:
    def answer(_: object) -> Any:
        return value

    answer.__name__ = name
    return property(answer, doc=f"Always {value!r}; set it with an `FSDPConfig`.")


@dataclass
class FSDP2Config(_Checked):
    """Settings of FSDP in the few terms of torch's `fully_shard`.

    Args:
        device_mesh: The ranks: 1-D shards over all of them, 2-D replicates over the first axis. All ranks when `None`.
        reshard_after_forward: Whether to free weights after the forward pass; a number keeps them sharded over groups
            of that many ranks.
        activation_checkpointing: See `FSDPConfig`.
        activation_cpu_offload: See `FSDPConfig`.
        state_dict_type: See `FSDPConfig`.
        load_monolith_rank0_only: See `FSDPConfig`.
        mixed_precision: See `FSDPConfig`.
        verbose: Whether to log the model and the settings after sharding.

    Raises:
        TypeError: If a setting is unknown; names its replacement, or similar names.
    """

    fsdp_version: ClassVar[int] = 2
    device_mesh: Any = None
    reshard_after_forward: bool | int = True
    activation_checkpointing: bool | str = False
    activation_cpu_offload: bool = False
    state_dict_type: str = "sharded"
    load_monolith_rank0_only: bool = False
    mixed_precision: str | dict[str, Any] = "DEFAULT"
    verbose: bool = False
    _sync_module_states: bool = field(default=False, init=False, repr=False)

    load_planner = _read_only("load_planner", None)
    save_planner = _read_only("save_planner", None)
    sharded_ckpt_prefix_dir = _read_only("sharded_ckpt_prefix_dir", _PREFIX_DIR)
    data_parallel_shard_degree = _read_only("data_parallel_shard_degree", -1)
    data_parallel_replicate_degree = _read_only("data_parallel_replicate_degree", None)
    use_orig_params = _read_only("use_orig_params", True)

    def __post_init__(self) -> None:
        self.mixed_precision = _in_case(self.mixed_precision, str.upper)
        for name in ("state_dict_type", "activation_checkpointing"):
            setattr(self, name, _in_case(getattr(self, name), str.lower))
        # Composer's text, which users' warning filters match. The dataclass's own `__init__` is one more stack level.
        warnings.warn("FSDP2 Config/APIs are experimental and subject to heavy changes", UserWarning, stacklevel=3)

    @property
    def sync_module_states(self) -> bool:
        """Return whether the other ranks have received the weights of rank 0. Set when the model is sharded."""
        return self._sync_module_states

    @sync_module_states.setter
    def sync_module_states(self, sync: bool) -> None:
        self._sync_module_states = sync

    @classmethod
    def settable_attrs(cls) -> set[str]:
        """Return the names of all settings."""
        return _names(cls)

    @classmethod
    def from_compatible_attrs(cls, attrs: Mapping[str, Any]) -> Self:
        """Build a configuration from a dict, ignoring settings of `FSDPConfig` with a `UserWarning` each."""
        known = cls.settable_attrs()
        for name, value in attrs.items():
            if name not in known:
                hint = "" if name in _names(FSDPConfig) else f". {explain_key(name, known | _names(FSDPConfig))}"
                warnings.warn(
                    f"Attribute '{name}: {value}' is not a settable attribute of FSDP2Config and will be ignored{hint}",
                    UserWarning,
                    stacklevel=2,
                )
        return cls(**{name: value for name, value in attrs.items() if name in known})


@dataclass
class TPConfig(_Checked):
    """Settings of tensor parallelism.

    Args:
        device_mesh: The ranks that share each tensor. Built from the degree when `None`.
        tensor_parallel_degree: Number of ranks that share each tensor.
        layer_plan: A torch `ParallelStyle` by pattern of module names, such as
            `{'blocks.*.up': ColwiseParallel(), 'blocks.*.down': RowwiseParallel()}`. Without it only tensors that
            the model has split itself are, with a `UserWarning` if there are none.

    Raises:
        TypeError: If a setting is unknown; names similar ones.
    """

    device_mesh: Any = None
    tensor_parallel_degree: int = 1
    layer_plan: Mapping[str, Any] | None = None


@dataclass
class ParallelismConfig(_Checked):
    """Settings of data and tensor parallelism.

    Args:
        fsdp: Settings of sharding.
        tp: Settings of tensor parallelism, which needs one of the other two.
        fsdp2: Settings of sharding in their shorter form.

    Raises:
        TypeError: If a key is unknown; names similar ones.
    """

    fsdp: FSDPConfig | None = None
    tp: TPConfig | None = None
    fsdp2: FSDP2Config | None = None


def _names(cls: type) -> set[str]:
    return {entry.name for entry in fields(cls) if not entry.name.startswith("_")}  # pyright: ignore[reportArgumentType]  # each caller is a dataclass


def _in_case(value: Any, change: Any) -> Any:
    value = by_name(value)
    return change(value) if isinstance(value, str) else value


_UNITS = {
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_BY_NAME = {name.lower(): size for name, size in _UNITS.items()}


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes in a text such as `'80GiB'`. `'80G'` means gibibytes, as in the names of devices.

    Example:
        >>> parse_bytes("1.5KiB"), parse_bytes("2 kB"), parse_bytes("1k")
        (1536, 2000, 1024)
    """
    match = _WRITTEN.fullmatch(str(text))
    unit = "" if match is None else match[2].lower()
    factor = _BY_NAME.get(f"{unit}ib" if len(unit) == 1 and unit in "kmgt" else unit or "b")
    size = 0 if match is None or factor is None else int(float(match[1]) * factor)
    if size <= 0:
        raise ValueError(
            f"{text!r} is not an amount of memory. Give a number above 0 and one of {', '.join(_UNITS)}, "
            f"such as '80GiB'."
        )
    return size


def format_bytes(size: float) -> str:
    """Format a number of bytes in the largest binary unit that is not larger than it.

    Example:
        >>> format_bytes(1536), format_bytes(80 * 2**30)
        ('1.5 KiB', '80.0 GiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} B"


AXES = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
"""The names of a mesh's axes, in order."""

FILLS_UP = -1
"""The degree of the axis that takes the remaining ranks."""


def fill_degrees(config: FSDPConfig | FSDP2Config, tp: TPConfig | None, world_size: int) -> dict[str, int]:
    """Return the length of each axis, with a degree of -1 replaced by the remaining ranks.

    Example:
        >>> fill_degrees(FSDPConfig(data_parallel_replicate_degree=2), None, world_size=8)
        {'data_parallel_replicate': 2, 'data_parallel_shard': 4}
    """
    given: dict[str, Any] = {AXES[0]: config.data_parallel_replicate_degree, AXES[1]: config.data_parallel_shard_degree}
    if given[AXES[0]] is None:  # leaves the axis out
        del given[AXES[0]]
    if tp is not None:
        given[AXES[2]] = tp.tensor_parallel_degree
    degrees = {axis: _number_of_ranks(axis, degree) for axis, degree in given.items()}
    open_axes = [axis for axis, degree in degrees.items() if degree == FILLS_UP]
    if len(open_axes) > 1:
        raise ValueError(
            f"Found multiple parallelism dimensions with -1: {_listed(dict.fromkeys(open_axes, FILLS_UP))}. Only one "
            f"of them can take the ranks that the others leave; give the others a degree of 1 or more."
        )
    fixed = math.prod(degree for degree in degrees.values() if degree != FILLS_UP)
    if fixed > world_size:
        problem = "is less than"
    elif open_axes:
        problem = "is not divisible by" if world_size % fixed else ""
    else:
        problem = "does not equal" if world_size != fixed else ""
    if problem:
        raise ValueError(
            f"World size {world_size} {problem} the product of the specified parallelism degrees, {fixed}, of "
            f"{_listed(degrees)}. Change the degrees or the number of processes; one degree of -1 takes all the ranks "
            f"that the others leave."
        )
    return {axis: world_size // fixed if degree == FILLS_UP else degree for axis, degree in degrees.items()}


def _number_of_ranks(axis: str, degree: object) -> int:
    if isinstance(degree, int) and not isinstance(degree, bool) and (degree >= 1 or degree == FILLS_UP):
        return degree
    raise ValueError(
        f"{axis}_degree={degree!r} is not a number of ranks: it has to be 1 or more, or -1 for all ranks that the "
        f"other degrees leave."
    )


def _listed(degrees: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}_degree={degree}" for axis, degree in degrees.items())


_RENAMED = {
    "auto_wrap_policy": "define fsdp_wrap_fn(module) on the model, or set module._fsdp_wrap = True",
    "param_init_fn": "define param_init_fn(module) on the model",
    "device_id": "pass device= to the Trainer",
    "ignored_states": "use 'ignored_modules'",
    "ignored_parameters": "use 'ignored_modules'",
    "mesh": "use 'data_parallel_shard_degree' and 'data_parallel_replicate_degree'",
    "mp_policy": "use 'mixed_precision'",
    "offload_policy": "use 'cpu_offload'",
    "reshard_after_forward": "use 'sharding_strategy' ('FULL_SHARD' frees weights after the forward pass, "
    "'SHARD_GRAD_OP' keeps them), or an FSDP2Config, which has it",
    "fsdp_config": "use 'fsdp'",
    "fsdp_auto_wrap": "use 'auto_wrap'",
    "tensor_parallel": "use 'tp'",
    "tp_config": "use 'tp'",
}
_UNDERSTOOD_LATER = {
    "flatten_parameters": "has no effect any more: FSDP2 never flattens parameters. Leave it out",
    "min_params": "is of older releases and still works. Define fsdp_wrap_fn(module) on the model, which selects units "
    "by name instead of by size",
    "load_fsdp_monolith_rank0_only": "is now called 'load_monolith_rank0_only'",
}


def by_name(value: Any) -> Any:
    """Return an enumeration member's name, such as for torch's `ShardingStrategy.FULL_SHARD`; else the value itself."""
    return value.name if isinstance(value, Enum) else value


def explain_key(key: object, known: Iterable[str]) -> str:
    """Return a hint about an unknown key: its replacement, or similar keys."""
    known = frozenset(known)
    if key in _RENAMED and key not in known:
        return f"Instead of it, {_RENAMED[str(key)]}."
    names = sorted(known)
    near = difflib.get_close_matches(str(key), names, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(repr(name) for name in near)}?"
    return f"The keys are {', '.join(names)}."


def take_legacy_keys(settings: Mapping[str, Any], *, stacklevel: int) -> dict[str, Any]:
    """Return FSDP settings under their current names, with a `DeprecationWarning` for each older name."""
    taken = dict(settings)
    for key, advice in _UNDERSTOOD_LATER.items():
        if key in taken:
            warnings.warn(f"fsdp_config[{key!r}] {advice}.", DeprecationWarning, stacklevel=stacklevel + 1)
    taken.pop("flatten_parameters", None)
    if "load_fsdp_monolith_rank0_only" in taken:
        older = taken.pop("load_fsdp_monolith_rank0_only")
        if taken.setdefault("load_monolith_rank0_only", older) != older:
            raise ValueError(
                f"fsdp_config has load_fsdp_monolith_rank0_only={older!r} and "
                f"load_monolith_rank0_only={taken['load_monolith_rank0_only']!r}, which mean the same. Give the latter."
            )
    return taken

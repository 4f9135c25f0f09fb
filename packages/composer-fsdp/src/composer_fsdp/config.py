"""The settings as users write them: `FSDPConfig`, `FSDP2Config`, `TPConfig` and `ParallelismConfig`.

Nothing here needs torch. What the settings mean together is in `composer_fsdp.plan`.
"""

import difflib
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Self

__all__ = [
    "format_bytes",
    "parse_bytes",
    "FSDP2Config",
    "FSDPConfig",
    "ParallelismConfig",
    "TPConfig",
    "AXES",
    "FILLS_UP",
    "check_degree",
    "fill_degrees",
    "by_name",
    "check_keys",
    "explain_key",
    "take_legacy_keys",
]

_PREFIX_DIR = "ep{epoch}-ba{batch}"


class _Checked:
    """Refuses keywords that are no fields before the dataclass does, which would not say what was meant."""

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        check_keys(cls.__name__, settings, _names(cls))
        return super().__new__(cls)


@dataclass
class FSDPConfig(_Checked):
    """How a model is sharded: all settings, those of older releases among them.

    Strings may be in any case. In the place of `'FULL_SHARD'` and the like, torch's own `ShardingStrategy.FULL_SHARD`
    will do.

    Args:
        activation_checkpointing: Compute again in the backward pass what the chosen modules computed in the forward
            pass, instead of keeping it; `'selective'` keeps the results of matrix products all the same, if
            nothing changes them in place. Which modules: see `composer_fsdp.activation`.
        activation_checkpointing_reentrant: Which of torch's implementations does it: `True`, if said so, the reentrant
            one, which gives no gradients to a module whose inputs need none.
        activation_cpu_offload: Keep the activations of the chosen modules on the host.
        auto_wrap: Whether to shard the model; `False` if it is sharded already.
        te_checkpoint_wrapper: Checkpoint activations by way of TransformerEngine.
        te_shard_fp8_weight: Gather TransformerEngine's weights in float8.
        backward_prefetch: When the next module's weights are gathered in the backward pass: `'BACKWARD_PRE'` or
            `'BACKWARD_POST'` its turn, or `'NONE'` ahead, for which `None` will do.
        backward_prefetch_limit: How many modules ahead.
        cpu_offload: Keep weights, gradients and optimizer state on the host between uses.
        data_parallel_shard_degree: Over how many ranks the weights are sharded; -1 for all that the others leave.
        data_parallel_replicate_degree: How many copies of the sharded model there are.
        forward_prefetch: Gather the next module's weights ahead in the forward pass, too.
        forward_prefetch_limit: How many modules ahead.
        ignored_modules: Modules that stay whole on each rank. Their gradients are averaged all the same.
        keep_low_precision_grads: Without effect; gradients are in float32 once they are reduced.
        limit_all_gathers: Without effect; gathers are always limited.
        load_monolith_rank0_only: Whether only rank 0 reads a checkpoint, and hands the weights on.
        load_planner: A `LoadPlanner` of `torch.distributed.checkpoint`, for whoever loads a sharded checkpoint. `None`
            lets it choose one that refuses the checkpoint of another model.
        save_planner: A `SavePlanner`, for whoever saves one.
        mixed_precision: `'FULL'`, `'DEFAULT'`, `'PURE'`, or a dict of `param_dtype`, `reduce_dtype` and
            `buffer_dtype`; see `composer_fsdp.mixed_precision`. Torch's own `MixedPrecision` will do, too.
        process_group: Which ranks share the weights, if not all: `'self'`, `'node'`, `'local_rank_across_nodes'`,
            `'setK'`, `'modK'`, a list of ranks, a group, or a pair of these that share and that replicate.
        sharded_ckpt_prefix_dir: What the folder of a sharded checkpoint is called.
        sharding_strategy: `'FULL_SHARD'`, `'SHARD_GRAD_OP'`, `'NO_SHARD'`, `'HYBRID_SHARD'` or `'_HYBRID_SHARD_ZERO2'`.
        state_dict_type: How checkpoints are saved: `'full'`, `'sharded'` or `'local'`.
        sync_module_states: Whether all ranks begin with rank 0's weights.
        use_orig_params: Whether an optimizer may have several groups, or a part of the parameters.
        verbose: Print the model and the settings, once it is sharded.
        min_params: From how many parameters on a module is sharded by itself. `None` or 0 for none.
        tie_policy: What becomes of modules that are to be sharded separately and share weights: `'error'`, or
            `'group'` to shard them together.
        grad_sync_every_microbatch: Whether gradients are reduced after each microbatch, which saves memory, or after
            the last one, which saves communication.

    Raises:
        TypeError: If there is no such setting: with what replaced it, or the nearest names.
        ValueError: If a device mesh is given, which follows from the degrees.

    Example:
        >>> FSDPConfig(sharding_strategy="hybrid_shard", data_parallel_replicate_degree=2).sharding_strategy
        'HYBRID_SHARD'
    """

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
    # The default that Composer documents is not what it is good to do: who did not ask gets the newer implementation.
    _asks_for_reentrant: bool = field(init=False, repr=False, compare=False)

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuse a mesh before anything else."""
        for key in ("device_mesh", "_device_mesh"):
            if key in settings:
                raise ValueError(
                    f"Directly specifying device mesh for FSDP was deprecated: {key}={settings[key]!r}. Give "
                    f"data_parallel_shard_degree and data_parallel_replicate_degree, from which the mesh is made, or "
                    f"an FSDP2Config(device_mesh=...)."
                )
        config = super().__new__(cls, **settings)
        config._asks_for_reentrant = bool(settings.get("activation_checkpointing_reentrant", False))
        return config

    def __post_init__(self) -> None:
        for name in ("sharding_strategy", "backward_prefetch", "mixed_precision"):
            setattr(self, name, _in_case(getattr(self, name), str.upper))
        if self.backward_prefetch is None:  # as PyTorch's first version of FSDP says it
            self.backward_prefetch = "NONE"
        for name in ("state_dict_type", "tie_policy", "activation_checkpointing"):
            setattr(self, name, _in_case(getattr(self, name), str.lower))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], *, stacklevel: int = 1) -> Self:
        """Build a configuration from a dict, which may have keys of older releases.

        Args:
            settings: Fields of this class, and `flatten_parameters`, `min_params` and `load_fsdp_monolith_rank0_only`,
                each with a `DeprecationWarning`.
            stacklevel: To whose line the warnings point; 1 is the caller's.

        Raises:
            TypeError, ValueError: As the constructor.
        """
        return cls(**take_legacy_keys(settings, stacklevel=stacklevel + 1))

    @property
    def asks_for_reentrant(self) -> bool:
        """Whether somebody chose the reentrant implementation of activation checkpointing."""
        return self._asks_for_reentrant

    @property
    def device_mesh(self) -> Any:
        """The ranks that share and replicate the weights, once the model is sharded."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, mesh: Any) -> None:
        self._device_mesh = mesh


def _read_only(name: str, value: Any) -> property:
    def answer(_: object) -> Any:
        return value

    answer.__name__ = name
    return property(answer, doc=f"Always {value!r}; an `FSDPConfig` lets one choose.")


@dataclass
class FSDP2Config(_Checked):
    """How a model is sharded, in the few settings of FSDP2's own function.

    Args:
        device_mesh: The ranks: 1-D shards over all of them, 2-D replicates over the first axis. All ranks when `None`.
        reshard_after_forward: Whether weights are freed after the forward pass; a number keeps them sharded over
            groups of so many ranks.
        activation_checkpointing: As in `FSDPConfig`.
        activation_cpu_offload: As in `FSDPConfig`.
        state_dict_type: As in `FSDPConfig`.
        load_monolith_rank0_only: As in `FSDPConfig`.
        mixed_precision: As in `FSDPConfig`.
        verbose: Log the model and the settings, once it is sharded.

    Raises:
        TypeError: If there is no such setting: with what replaced it, or the nearest names.
    """

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
        # The text is Composer's, whose users filter it.
        warnings.warn("FSDP2 Config/APIs are experimental and subject to heavy changes", UserWarning, stacklevel=3)

    @property
    def sync_module_states(self) -> bool:
        """Whether the ranks were given rank 0's weights; set when the model is sharded."""
        return self._sync_module_states

    @sync_module_states.setter
    def sync_module_states(self, sync: bool) -> None:
        self._sync_module_states = sync

    @classmethod
    def settable_attrs(cls) -> set[str]:
        """Return the names of the settings."""
        return _names(cls)

    @classmethod
    def from_compatible_attrs(cls, attrs: Mapping[str, Any]) -> Self:
        """Build a configuration from a dict that may have settings of `FSDPConfig`, too, which are passed over.

        Each of those gives a `UserWarning`.
        """
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
    """How single tensors are split over ranks.

    Args:
        device_mesh: The ranks that hold one tensor together. Made from the degree when `None`.
        tensor_parallel_degree: How many ranks hold one tensor together.
        layer_plan: From patterns of module names to torch's `ParallelStyle`, such as
            `{'blocks.*.up': ColwiseParallel(), 'blocks.*.down': RowwiseParallel()}`. Without one no tensor is split,
            unless the model comes with tensors that are, and there is a `UserWarning`.

    Raises:
        TypeError: If there is no such setting: with the nearest names.
    """

    device_mesh: Any = None
    tensor_parallel_degree: int = 1
    layer_plan: Mapping[str, Any] | None = None


@dataclass
class ParallelismConfig(_Checked):
    """How a model is spread over ranks.

    Args:
        fsdp: Settings of sharding.
        tp: Settings of tensor parallelism, which needs one of the other two.
        fsdp2: Settings of sharding, in the narrower form.

    Raises:
        TypeError: If there is no such part: with the nearest names.
    """

    fsdp: FSDPConfig | None = None
    tp: TPConfig | None = None
    fsdp2: FSDP2Config | None = None


def _names(cls: type) -> set[str]:
    """Return the names of a dataclass's public fields."""
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
    """Return how many bytes a text such as `'80GiB'` means. `'80G'` is gibibytes, as the names of devices mean it.

    Raises:
        ValueError: If it is no number with a unit, or not more than 0.

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
            f"{text!r} is no amount of memory. Give a number above 0 and one of {', '.join(_UNITS)}, such as '80GiB'."
        )
    return size


def format_bytes(size: float) -> str:
    """Return a number of bytes in the largest binary unit that it fills.

    Example:
        >>> format_bytes(1536), format_bytes(80 * 2**30)
        ('1.5 KiB', '80.0 GiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} B"


AXES = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
"""The names of a mesh's axes, in their order."""

FILLS_UP = -1
"""The degree of an axis that takes what the others leave."""


def fill_degrees(config: FSDPConfig | FSDP2Config, tp: TPConfig | None, world_size: int) -> dict[str, int]:
    """Return how long each axis is, with the one that takes what the others leave filled in.

    Raises:
        ValueError: If the degrees do not multiply to the number of ranks, or two of them are -1.

    Example:
        >>> fill_degrees(FSDPConfig(data_parallel_replicate_degree=2), None, world_size=8)
        {'data_parallel_replicate': 2, 'data_parallel_shard': 4}
    """
    given: dict[str, Any] = {
        AXES[0]: config.data_parallel_replicate_degree,
        AXES[1]: config.data_parallel_shard_degree,
        AXES[2]: None if tp is None else tp.tensor_parallel_degree,
    }
    degrees = {
        axis: check_degree(axis, degree) for axis, degree in given.items() if degree is not None or axis == AXES[1]
    }
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


def _listed(degrees: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}_degree={degree}" for axis, degree in degrees.items())


def check_degree(axis: str, degree: object) -> int:
    """Return a degree if it is one.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(degree, int) and not isinstance(degree, bool) and (degree >= 1 or degree == FILLS_UP):
        return degree
    raise ValueError(
        f"{axis}_degree={degree!r} is not a number of ranks: it has to be 1 or more, or -1 for all ranks that the "
        f"other degrees leave."
    )


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
    "min_params": "is of older releases and still works. Define fsdp_wrap_fn(module) on the model, which says the same "
    "by name instead of by size",
    "load_fsdp_monolith_rank0_only": "is now called 'load_monolith_rank0_only'",
}


def by_name(value: Any) -> Any:
    """Return the name of an enumeration's member, such as torch's `ShardingStrategy.FULL_SHARD`; else the value."""
    return value.name if isinstance(value, Enum) else value


def explain_key(key: object, known: Iterable[str]) -> str:
    """Return a sentence on an unknown key: what replaced it, or the names that are nearest."""
    known = frozenset(known)
    if key in _RENAMED and key not in known:
        return f"Instead of it, {_RENAMED[str(key)]}."
    names = sorted(known)
    near = difflib.get_close_matches(str(key), names, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(repr(name) for name in near)}?"
    return f"The keys are {', '.join(names)}."


def check_keys(where: str, keys: Iterable[object], known: Iterable[str]) -> None:
    """Refuse keys that are no settings.

    Raises:
        TypeError: With what replaced the key, or the nearest names.
    """
    known = frozenset(known)
    for key in keys:
        if key not in known:
            raise TypeError(f"{where} got an unexpected keyword argument {key!r}. {explain_key(key, known)}")


def take_legacy_keys(settings: Mapping[str, Any], *, stacklevel: int) -> dict[str, Any]:
    """Return FSDP settings under today's names, with a `DeprecationWarning` for each that is not.

    Raises:
        ValueError: If a setting is given under both names.
    """
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

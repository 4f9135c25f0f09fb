"""Parallelism settings: degrees, device mesh, and checks that ranks agree."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

from composer_time import StringEnum

__all__ = ["ParallelismType", "make_device_mesh", "parallelism_degrees"]

_FILLS_UP = -1  # the degree of an axis with all ranks that remain

# Strategies that need one group of all ranks. The others form groups by machine.
_PLAIN_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")


class ParallelismType(StringEnum):
    """Names of the axes of `State.device_mesh`, in their order."""

    DATA_PARALLEL_REPLICATE = "data_parallel_replicate"
    DATA_PARALLEL_SHARD = "data_parallel_shard"
    TENSOR_PARALLEL = "tensor_parallel"


def parallelism_degrees(fsdp_config: Any, tp_config: Any, world_size: int) -> dict[str, int]:
    """Return the size of each axis of the device mesh, by name.

    Args:
        fsdp_config: With `data_parallel_shard_degree` and `data_parallel_replicate_degree`, which has an axis unless
            it is `None`. Missing attributes have defaults: all ranks share the shards.
        tp_config: With `tensor_parallel_degree`, or `None` for no such axis.
        world_size: Number of ranks.

    Raises:
        ValueError: If the product of the degrees, one of which may be -1 for the rest, is not the number of ranks.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(data_parallel_shard_degree=-1, data_parallel_replicate_degree=2)
        >>> parallelism_degrees(config, None, world_size=8)
        {'data_parallel_replicate': 2, 'data_parallel_shard': 4}
    """
    given: dict[ParallelismType, object] = {
        ParallelismType.DATA_PARALLEL_REPLICATE: getattr(fsdp_config, "data_parallel_replicate_degree", None),
        ParallelismType.DATA_PARALLEL_SHARD: getattr(fsdp_config, "data_parallel_shard_degree", _FILLS_UP),
        ParallelismType.TENSOR_PARALLEL: None if tp_config is None else getattr(tp_config, "tensor_parallel_degree", 1),
    }
    degrees: dict[str, int] = {}
    for axis, degree in given.items():
        if degree is None:
            continue
        if type(degree) is not int or (degree < 1 and degree != _FILLS_UP):
            raise ValueError(
                f"{axis.value}_degree={degree!r} is not a number of ranks: it has to be 1 or more, or -1 for all ranks "
                f"that the other degrees leave."
            )
        degrees[axis.value] = degree
    open_axes = [axis for axis, degree in degrees.items() if degree == _FILLS_UP]
    if len(open_axes) > 1:
        raise ValueError(
            f"Found multiple parallelism dimensions with -1: {', '.join(open_axes)}. Only one of them can take the "
            f"ranks that the others leave; give the others a degree of 1 or more."
        )
    fixed = math.prod(degree for degree in degrees.values() if degree != _FILLS_UP)
    fits = world_size % fixed == 0 if open_axes else world_size == fixed
    if not fits:
        relation = "is not divisible by" if open_axes else "does not equal"
        raise ValueError(
            f"World size {world_size} {relation} the product of the specified parallelism degrees, {fixed}, of "
            f"{degrees}. Change the degrees or the number of processes; one degree of -1 takes all the ranks that the "
            f"others leave."
        )
    return {axis: world_size // fixed if degree == _FILLS_UP else degree for axis, degree in degrees.items()}


def make_device_mesh(fsdp_config: Any, tp_config: Any, device: Any) -> Any:
    """Create the device mesh for the settings, with the axes of `ParallelismType`. Every rank must call this.

    Args:
        fsdp_config: See `parallelism_degrees`. Its `device_mesh`, if any, is returned unchanged. If a `process_group`
            or a strategy determines the groups of ranks instead of degrees, no mesh is created.
        tp_config: See `parallelism_degrees`.
        device: The device of the model: a device object, its name, or `None` for the CPU.

    Returns:
        A `torch.distributed.device_mesh.DeviceMesh`, or `None` without settings or without a process group.

    Raises:
        ValueError: As `parallelism_degrees`, and if tensor parallelism would need a mesh that was made without it.
    """
    if fsdp_config is None:
        return None
    ready_made: Any = getattr(fsdp_config, "device_mesh", None)
    if ready_made is not None:
        if tp_config is not None and getattr(tp_config, "device_mesh", None) is None:
            raise ValueError(
                f"The FSDP settings have device_mesh={ready_made!r} and those of tensor parallelism have none, so the "
                f"ranks that share a tensor are unknown. Give both a slice of one mesh, or give degrees and no mesh."
            )
        return ready_made
    if tp_config is None and _is_left_to_groups(fsdp_config):
        return None
    # Before the process group is checked, so that wrong degrees are an error in a single process too.
    degrees = parallelism_degrees(fsdp_config, tp_config, get_world_size())
    distributed: Any = sys.modules.get("torch.distributed")  # a process group requires this import
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.init_device_mesh(_device_type(device), tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def _is_left_to_groups(fsdp_config: Any) -> bool:
    # Explicit degrees take precedence over groups.
    if getattr(fsdp_config, "data_parallel_shard_degree", _FILLS_UP) != _FILLS_UP:
        return False
    if getattr(fsdp_config, "data_parallel_replicate_degree", None) is not None:
        return False
    strategy = str(getattr(fsdp_config, "sharding_strategy", _PLAIN_STRATEGIES[0])).upper()
    return getattr(fsdp_config, "process_group", None) is not None or strategy not in _PLAIN_STRATEGIES


def _device_type(device: Any) -> str:
    import torch  # already imported, because a process group exists

    if hasattr(device, "tensor_to_device"):
        return device.tensor_to_device(torch.empty(0)).device.type
    return "cpu" if device is None else torch.device(device).type


# 'local' is the legacy type, which the checkpoint package still reads.
_STATE_DICT_TYPES: Final = (None, "full", "sharded", "local")


def _check_fsdp_settings(fsdp_config: Any, save_metrics: bool) -> None:
    kind: object = getattr(fsdp_config, "state_dict_type", None)
    if kind not in _STATE_DICT_TYPES:
        raise ValueError(
            f"state_dict_type={kind!r} is not a way to save a sharded model: fsdp_state_dict_type must be one of "
            f"'full', one checkpoint on rank 0, 'sharded', one part on each rank, and None, which means 'full'."
        )
    if kind == "sharded" and save_metrics:
        raise ValueError(
            "save_metrics=True does not go with state_dict_type='sharded', since metrics are not sharded. Use "
            "save_metrics=False, or state_dict_type='full'."
        )
    if getattr(fsdp_config, "activation_cpu_offload", False) and not _uses_original_parameters(fsdp_config):
        raise ValueError(
            "activation_cpu_offload=True is not supported with use_orig_params=False. Use use_orig_params=True, which "
            "is the default, or leave the activations where they are."
        )


def _usable_tp_config(tp_config: Any, fsdp_config: Any) -> Any:
    """Return the tensor parallelism settings, or `None` if their degree is 1."""
    if tp_config is None:
        return None
    _warn("Tensor parallelism (TP) is experimental and may change in future versions.", FutureWarning)
    if fsdp_config is None:
        raise ValueError(
            f"Tensor parallelism (TP) currently requires FSDP to be enabled. The parallelism configuration has "
            f"tp={tp_config!r} and no FSDP settings. Give FSDP settings too, or leave tp out."
        )
    if not _uses_original_parameters(fsdp_config):
        raise ValueError(
            "use_orig_params=False does not go with tensor parallelism (TP), which splits the parameters themselves. "
            "Use use_orig_params=True, which is the default, or leave tp out."
        )
    if getattr(tp_config, "tensor_parallel_degree", 1) != 1:
        return tp_config
    _warn(
        "Received tensor_parallel_degree of 1, which is a no-op. Tensor parallelism will not be used. Give 2 or more, "
        "or leave tp out.",
        UserWarning,
    )
    return None


def _check_loading_on_rank_zero(model: Any, fsdp_config: Any, version: int, tp_config: Any) -> None:
    """Check that weights loaded only on rank 0 can reach the other ranks. Every rank must call this."""
    if tp_config is not None:
        raise ValueError(
            "load_monolith_rank0_only is not compatible with tensor parallelism (TP), where no rank holds whole "
            "parameters to pass on. Leave one of the two out."
        )
    # The settings checked below exist only in FSDP 1.
    if version != 1:
        return
    if not getattr(fsdp_config, "sync_module_states", False):
        raise ValueError(
            "load_monolith_rank0_only=True needs sync_module_states=True: only rank 0 reads the checkpoint, and the "
            "other ranks have to receive its weights when the model is sharded. Set both, on every rank."
        )
    parameters = model.parameters() if hasattr(model, "parameters") else ()
    # Collective, so that the error is raised on all ranks; with an error on rank 0 alone the others would hang.
    if any_rank(get_global_rank() == 0 and any(parameter.is_meta for parameter in parameters)):
        raise ValueError(
            "load_monolith_rank0_only=True needs real weights on rank 0, where the checkpoint is loaded, and the model "
            "has parameters on the meta device there. Build it on the CPU on rank 0, and on meta on the others only."
        )


def _warn(message: str, category: type[Warning]) -> None:
    # The frames of this function, its caller, the mixin and the constructor of State.
    warnings.warn(message, category, stacklevel=5)


def _uses_original_parameters(fsdp_config: Any) -> bool:
    return bool(getattr(fsdp_config, "use_orig_params", True))


_PARTS: Final = ("fsdp", "fsdp2", "tp")
_ACCEPTED: Final = "a ParallelismConfig, an object with the attributes fsdp, fsdp2 and tp, or a dict with these keys"

# Settings that must be equal on all ranks, with their defaults. Others, such as `verbose`, may differ.
_SHARED_BY_RANKS: Final = {
    "state_dict_type": "full",
    "load_monolith_rank0_only": False,
    "sync_module_states": False,
    "auto_wrap": True,
    "use_orig_params": True,
    "activation_cpu_offload": False,
    "data_parallel_shard_degree": -1,
    "data_parallel_replicate_degree": None,
    "sharding_strategy": "FULL_SHARD",
    "tensor_parallel_degree": 1,
}
_OBJECTS: Final = ("device_mesh", "process_group")  # differ by rank, so only their presence is compared


@dataclass(frozen=True)
class ParallelismSettings:
    """Settings of FSDP 1, FSDP 2 and tensor parallelism, each an object with attributes or `None`."""

    fsdp: Any = None
    fsdp2: Any = None
    tp: Any = None

    @classmethod
    def of(cls, config: Any) -> ParallelismSettings:
        if config is None:
            return cls()
        if isinstance(config, Mapping):
            given = cast("Mapping[Any, Any]", config)
            for key in given:
                if key not in _PARTS:
                    raise ValueError(
                        f"parallelism_config has the unknown key {key!r}. Its keys are {', '.join(_PARTS)}, each with "
                        f"settings below it: {{'fsdp': {{'state_dict_type': 'full'}}}}."
                    )
        elif any(hasattr(config, part) for part in _PARTS):
            given = {part: getattr(config, part, None) for part in _PARTS}
        else:
            raise TypeError(
                f"parallelism_config={config!r} is a {type(config).__name__!r} without parallelism settings. Give "
                f"{_ACCEPTED}; an FSDPConfig goes into ParallelismConfig(fsdp=...)."
            )
        return cls(**{part: _as_object(part, given.get(part)) for part in _PARTS})

    def compare_ranks(self, save_metrics: bool) -> None:
        """Check that all ranks have the same settings, since they would deadlock otherwise. Every rank must call this.

        Raises:
            ValueError: On every rank, with the first setting that differs.
        """
        # Gathered whether or not this rank has a setting, because a rank that skips the collective blocks the others.
        settings = gather({**self._described(), "save_metrics": repr(save_metrics)})
        # An ordered set, so that every rank raises about the same setting.
        names = dict.fromkeys(name for own in settings for name in own)
        for name in names:
            values = {rank: own.get(name, "no such settings") for rank, own in enumerate(settings)}
            if len(set(values.values())) > 1:
                raise ValueError(
                    f"The ranks have different settings of parallelism: {name} is {values} by rank. All of them shard "
                    f"and load together, so give every rank the same."
                )

    def _described(self) -> dict[str, str]:
        """Return the settings that must be equal as text, which can be compared without unpickling the classes."""
        described: dict[str, str] = {}
        for part in _PARTS:
            config = getattr(self, part)
            if config is None:
                continue
            for name, default in _SHARED_BY_RANKS.items():
                described[f"{part}.{name}"] = repr(getattr(config, name, default))
            for name in _OBJECTS:
                described[f"{part}.{name}"] = "None" if getattr(config, name, None) is None else "given"
        return described


def _as_object(part: str, config: Any) -> Any:
    """Convert a dict of settings to an object with attributes."""
    if isinstance(config, Mapping):
        settings = cast("Mapping[str, Any]", config)
        return SimpleNamespace(**{str(name): value for name, value in settings.items()})
    if config is None or hasattr(config, "__dict__") or hasattr(config, "__slots__"):
        return config
    raise TypeError(
        f"The {part} settings of parallelism_config are {config!r}, a {type(config).__name__!r}. Give an object with "
        f"the settings as attributes, such as an FSDPConfig or a TPConfig, or a dict of them."
    )


T = TypeVar("T")


def get_global_rank() -> int:
    """Return this process's rank among all processes, 0 in a single process."""
    distributed = _process_group()
    return int(distributed.get_rank()) if distributed is not None else _from_environment("RANK", 0)


def get_world_size() -> int:
    """Return the number of processes that train together."""
    distributed = _process_group()
    return int(distributed.get_world_size()) if distributed is not None else _from_environment("WORLD_SIZE", 1)


def get_local_world_size() -> int:
    """Return the number of processes on this machine, according to the launcher."""
    return _from_environment("LOCAL_WORLD_SIZE", 1)


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank. Every rank must call this."""
    return any(gather(flag))


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in rank order. Every rank must call this."""
    distributed = _process_group()
    if distributed is None or distributed.get_world_size() == 1:
        return [value]
    # The only object collective that chooses a device that the backend supports.
    values: list[Any] = [None] * int(distributed.get_world_size())
    distributed.all_gather_object(values, value)
    return values


def _process_group() -> Any:
    # A process that has not imported torch.distributed cannot have started it.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _from_environment(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"The environment variable {name}={value!r} is not a whole number. The launcher sets it for each process; "
            f"unset it to train in one process."
        ) from None


def is_ddp(model: object) -> bool:
    """Return whether the model is wrapped in `DistributedDataParallel`."""
    parallel = sys.modules.get("torch.nn.parallel")
    return parallel is not None and isinstance(model, parallel.DistributedDataParallel)


def is_wrapper(model: object) -> bool:
    """Return whether the model is a DDP, `DataParallel` or DeepSpeed wrapper, which stores the model as `module`."""
    parallel, deepspeed = sys.modules.get("torch.nn.parallel"), sys.modules.get("deepspeed")
    return (parallel is not None and isinstance(model, (parallel.DistributedDataParallel, parallel.DataParallel))) or (
        deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)
    )


def is_sharded(model: Any) -> bool:
    """Return whether any part of the model is sharded with FSDP 1 or 2."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(model, "modules"):  # sharding a model requires this import
        return False
    return any(isinstance(part, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)) for part in model.modules())


class ShardingAnswers:
    """The part of `State` that holds the parallelism configuration.

    A configuration is any object with the attributes `fsdp`, `fsdp2` and `tp`, or a dict with these keys; each is
    `None`, an object with the settings as attributes, or a dict of them.
    """

    model: Any
    device: Any
    tp_config: Any
    device_mesh: Any
    save_metrics: bool
    _fsdp_config: Any
    _fsdp2_config: Any

    def _set_parallelism(self, parallelism_config: Any, save_metrics: bool) -> None:
        self._fsdp_config = self._fsdp2_config = self.tp_config = self.device_mesh = None
        settings = ParallelismSettings.of(parallelism_config)
        if settings == ParallelismSettings():
            return
        settings.compare_ranks(save_metrics)
        self._fsdp_config, self._fsdp2_config = settings.fsdp, settings.fsdp2
        _check_fsdp_settings(self.fsdp_config, save_metrics)
        self.tp_config = _usable_tp_config(settings.tp, self.fsdp_config)
        if self.load_monolith_rank0_only:
            _check_loading_on_rank_zero(self.model, self.fsdp_config, self.fsdp_config_version, self.tp_config)
        self.device_mesh = make_device_mesh(self.fsdp_config, self.tp_config, self.device)

    @property
    def fsdp_config(self) -> Any:
        """The FSDP settings, those of version 2 first; `None` without sharding.

        An assigned configuration replaces both versions. It is checked and the device mesh is created again, so every
        rank must assign it.

        Raises:
            TypeError: If anything but an `FSDPConfig` or an `FSDP2Config` is assigned.
            ValueError: As when the state is constructed. The previous settings are kept then.
        """
        return self._fsdp_config if self._fsdp2_config is None else self._fsdp2_config

    @fsdp_config.setter
    def fsdp_config(self, fsdp_config: Any) -> None:
        # By class name, because the classes belong to a package that depends on this one.
        names = {base.__name__ for base in type(fsdp_config).__mro__}
        kind = "fsdp2" if "FSDP2Config" in names else "fsdp"
        if not names & {"FSDPConfig", "FSDP2Config"}:
            raise TypeError(
                f"fsdp_config={fsdp_config!r} is a {type(fsdp_config).__name__!r}, neither an FSDPConfig nor an "
                f"FSDP2Config. Build one of them from your settings first."
            )
        # `_set_parallelism` resets all of these before it checks the new settings.
        before = self._fsdp_config, self._fsdp2_config, self.tp_config, self.device_mesh
        try:
            self._set_parallelism({kind: fsdp_config, "tp": self.tp_config}, self.save_metrics)
        except BaseException:
            self._fsdp_config, self._fsdp2_config, self.tp_config, self.device_mesh = before
            raise

    @property
    def fsdp_config_version(self) -> int:
        """The configured version of FSDP, 2 or 1; 0 for none."""
        if self._fsdp2_config is not None:
            return 2
        return 0 if self._fsdp_config is None else 1

    @property
    def fsdp_enabled(self) -> bool:
        """Return whether any part of the model is sharded now."""
        return is_sharded(self.model)

    @property
    def fsdp_device_mesh(self) -> Any:
        """Older name of `device_mesh`."""
        return self.device_mesh

    @property
    def fsdp_state_dict_type(self) -> str | None:
        """Format of saved weights and optimizer state, `'full'` or `'sharded'`; `None` if nothing is sharded."""
        if not self.fsdp_enabled:
            return None
        return getattr(self.fsdp_config, "state_dict_type", None) or "full"

    @property
    def fsdp_sharded_state_dict_enabled(self) -> bool:
        """Return whether every rank saves its own shard."""
        return self.fsdp_config is not None and self.fsdp_state_dict_type == "sharded"

    @property
    def load_monolith_rank0_only(self) -> bool:
        """Return whether only rank 0 reads a checkpoint and the other ranks receive it."""
        config = self.fsdp_config
        if config is None or (getattr(config, "state_dict_type", None) or "full") != "full":
            return False
        if self.fsdp_config_version == 1 and not getattr(config, "auto_wrap", True):
            return False
        return bool(getattr(config, "load_monolith_rank0_only", False))

    @property
    def is_model_ddp(self) -> bool:
        """Return whether the model is wrapped in `DistributedDataParallel`."""
        return is_ddp(self.model)

"""Ranks and parallelism of a training state, without the settings, which belong to composer-fsdp."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, TypeVar

from composer_events.arguments import loaded, provider
from composer_time import StringEnum

__all__ = ["ParallelismType"]


class ParallelismType(StringEnum):
    """Names of the axes of `State.device_mesh`, in their order."""

    DATA_PARALLEL_REPLICATE = "data_parallel_replicate"
    DATA_PARALLEL_SHARD = "data_parallel_shard"
    TENSOR_PARALLEL = "tensor_parallel"


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
    distributed = loaded("torch.distributed")
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
    parallel = loaded("torch.nn.parallel")
    return parallel is not None and isinstance(model, parallel.DistributedDataParallel)


def is_wrapper(model: object) -> bool:
    """Return whether the model is a DDP, `DataParallel` or DeepSpeed wrapper, which stores the model as `module`."""
    parallel, deepspeed = loaded("torch.nn.parallel"), loaded("deepspeed")
    return (parallel is not None and isinstance(model, (parallel.DistributedDataParallel, parallel.DataParallel))) or (
        deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)
    )


def is_sharded(model: Any) -> bool:
    """Return whether any part of the model is sharded with FSDP 1 or 2."""
    fsdp = loaded("torch.distributed.fsdp")
    if fsdp is None or not hasattr(model, "modules"):  # sharding a model requires this import
        return False
    return any(isinstance(part, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)) for part in model.modules())


class ShardingAnswers:
    """The part of `State` that holds the parallelism configuration.

    A configuration is any object with the attributes `fsdp`, `fsdp2` and `tp`, each `None` or an object with the
    settings as attributes. The function that composer-fsdp provides checks its own settings, compares the ranks, and
    sets `tp_config` and `device_mesh` of the state.
    """

    model: Any
    save_metrics: bool
    tp_config: Any
    device_mesh: Any
    _fsdp_config: Any
    _fsdp2_config: Any

    def _set_parallelism(self, config: Any) -> None:
        if config is not None and not any(hasattr(config, part) for part in ("fsdp", "fsdp2", "tp")):
            raise TypeError(
                f"parallelism_config={config!r} is a {type(config).__name__!r} without parallelism settings. Give a "
                f"ParallelismConfig; an FSDPConfig goes into ParallelismConfig(fsdp=...)."
            )
        self._fsdp_config, self._fsdp2_config = getattr(config, "fsdp", None), getattr(config, "fsdp2", None)
        self.tp_config, self.device_mesh = getattr(config, "tp", None), None
        configure = None if config is None else provider("parallelism")
        if configure is not None:
            configure(self, config)

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
        version: int | None = getattr(fsdp_config.__class__, "fsdp_version", None)
        if version is None:
            raise TypeError(
                f"fsdp_config={fsdp_config!r} is a {type(fsdp_config).__name__!r}, neither an FSDPConfig nor an "
                f"FSDP2Config. Build one of them from your settings first."
            )
        before = self._fsdp_config, self._fsdp2_config, self.tp_config, self.device_mesh
        own: dict[str, Any] = {"fsdp": None, "fsdp2": None, "fsdp" if version == 1 else "fsdp2": fsdp_config}
        try:
            self._set_parallelism(SimpleNamespace(**own, tp=self.tp_config))
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

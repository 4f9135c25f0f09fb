"""What `State` answers about how its model is spread over ranks."""

from __future__ import annotations

import sys
from typing import Any

from composer_events._parallelism_checks import check_fsdp_settings, check_loading_on_rank_zero, usable_tp_config
from composer_events._parallelism_settings import ParallelismSettings
from composer_events.parallelism import make_device_mesh

__all__ = ["ShardingAnswers", "is_ddp", "is_sharded", "is_wrapper"]


def is_ddp(model: object) -> bool:
    """Answer whether the model is wrapped in `DistributedDataParallel`."""
    parallel = sys.modules.get("torch.nn.parallel")
    return parallel is not None and isinstance(model, parallel.DistributedDataParallel)


def is_wrapper(model: object) -> bool:
    """Return whether the model is another one's wrapper that trains it on several devices and is no sharded module."""
    parallel, deepspeed = sys.modules.get("torch.nn.parallel"), sys.modules.get("deepspeed")
    return (parallel is not None and isinstance(model, (parallel.DistributedDataParallel, parallel.DataParallel))) or (
        deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)
    )


def is_sharded(model: Any) -> bool:
    """Answer whether any part of the model is sharded with FSDP, either version."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(model, "modules"):  # nobody can have sharded a model without importing it
        return False
    return any(isinstance(part, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)) for part in model.modules())


class ShardingAnswers:
    """The part of `State` that reads the parallelism configuration.

    A configuration is any object with the attributes `fsdp`, `fsdp2` and `tp`, or a dict with these keys; each of them
    is `None`, an object with the settings as attributes, or a dict of them.
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
        if settings.is_none():
            return
        settings.check_all_ranks_agree(save_metrics)
        self._fsdp_config, self._fsdp2_config = settings.fsdp, settings.fsdp2
        check_fsdp_settings(self.fsdp_config, save_metrics)
        self.tp_config = usable_tp_config(settings.tp, self.fsdp_config)
        if self.load_monolith_rank0_only:
            check_loading_on_rank_zero(self.model, self.fsdp_config, self.fsdp_config_version, self.tp_config)
        self.device_mesh = make_device_mesh(self.fsdp_config, self.tp_config, self.device)

    @property
    def fsdp_config(self) -> Any:
        """The FSDP settings, those of version 2 first; `None` without sharding.

        What is assigned takes the place of both versions. It is checked and the device mesh is made anew, so that every
        rank must assign it.

        Raises:
            TypeError: If something else than an `FSDPConfig` or an `FSDP2Config` is assigned.
            ValueError: As when the state was made. Everything is left as it was then.
        """
        return self._fsdp_config if self._fsdp2_config is None else self._fsdp2_config

    @fsdp_config.setter
    def fsdp_config(self, fsdp_config: Any) -> None:
        # By name: the classes belong to a package on a floor above.
        names = {base.__name__ for base in type(fsdp_config).__mro__}
        kind = "fsdp2" if "FSDP2Config" in names else "fsdp"
        if not names & {"FSDPConfig", "FSDP2Config"}:
            raise TypeError(
                f"fsdp_config={fsdp_config!r} is a {type(fsdp_config).__name__!r}, neither an FSDPConfig nor an "
                f"FSDP2Config. Build one of them from your settings first."
            )
        before = self._fsdp_config, self._fsdp2_config, self.tp_config, self.device_mesh
        try:
            self._set_parallelism({kind: fsdp_config, "tp": self.tp_config}, self.save_metrics)
        except BaseException:
            self._fsdp_config, self._fsdp2_config, self.tp_config, self.device_mesh = before
            raise

    @property
    def fsdp_config_version(self) -> int:
        """2 or 1 for the version of FSDP that is configured, 0 for none."""
        if self._fsdp2_config is not None:
            return 2
        return 0 if self._fsdp_config is None else 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether any part of the model is sharded by now."""
        return is_sharded(self.model)

    @property
    def fsdp_device_mesh(self) -> Any:
        """The mesh that the model is spread over, under its older name."""
        return self.device_mesh

    @property
    def fsdp_state_dict_type(self) -> str | None:
        """`'full'` or `'sharded'`: how weights and optimizer state are saved. `None` where nothing is sharded."""
        if not self.fsdp_enabled:
            return None
        return getattr(self.fsdp_config, "state_dict_type", None) or "full"

    @property
    def fsdp_sharded_state_dict_enabled(self) -> bool:
        """Whether every rank saves its own shard."""
        return self.fsdp_config is not None and self.fsdp_state_dict_type == "sharded"

    @property
    def load_monolith_rank0_only(self) -> bool:
        """Whether only rank 0 reads a checkpoint and the other ranks receive it."""
        config = self.fsdp_config
        if config is None or (getattr(config, "state_dict_type", None) or "full") != "full":
            return False
        if self.fsdp_config_version == 1 and not getattr(config, "auto_wrap", True):
            return False
        return bool(getattr(config, "load_monolith_rank0_only", False))

    @property
    def is_model_ddp(self) -> bool:
        """Whether the model is wrapped in `DistributedDataParallel`."""
        return is_ddp(self.model)

"""The settings of parallelism as users give them, and whether all ranks were given the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, cast

from composer_events._ranks import gather

__all__ = ["ParallelismSettings"]

_PARTS: Final = ("fsdp", "fsdp2", "tp")
_ACCEPTED: Final = "a ParallelismConfig, an object with the attributes fsdp, fsdp2 and tp, or a dict with these keys"

# What decides how the ranks go on together, with what it is where nobody says it. Others may differ, as `verbose` may.
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
_OBJECTS: Final = ("device_mesh", "process_group")  # which are another object on every rank


@dataclass(frozen=True)
class ParallelismSettings:
    """Settings of FSDP, version 1 and 2, and of tensor parallelism, each an object with attributes or `None`."""

    fsdp: Any = None
    fsdp2: Any = None
    tp: Any = None

    @classmethod
    def of(cls, config: Any) -> ParallelismSettings:
        """Read what the user gave.

        Raises:
            TypeError: If it is neither a configuration nor a dict, or a part of it is neither.
            ValueError: If a dict has a key that is none.
        """
        if config is None:
            return cls()
        if isinstance(config, Mapping):
            given = cast("Mapping[Any, Any]", config)
            for key in given:
                if key not in _PARTS:
                    raise ValueError(
                        f"parallelism_config has the key {key!r}, which says nothing. Its keys are "
                        f"{', '.join(_PARTS)}, each with settings below it: {{'fsdp': {{'state_dict_type': 'full'}}}}."
                    )
        elif any(hasattr(config, part) for part in _PARTS):
            given = {part: getattr(config, part, None) for part in _PARTS}
        else:
            raise TypeError(
                f"parallelism_config={config!r} is a {type(config).__name__!r} and says nothing of parallelism. Give "
                f"{_ACCEPTED}; an FSDPConfig goes into ParallelismConfig(fsdp=...)."
            )
        return cls(**{part: _as_object(part, given.get(part)) for part in _PARTS})

    def is_none(self) -> bool:
        """Answer whether nothing is asked for."""
        return self.fsdp is None and self.fsdp2 is None and self.tp is None

    def check_all_ranks_agree(self, save_metrics: bool) -> None:
        """Refuse settings that differ between ranks, which would wait for each other. Every rank must call this.

        Raises:
            ValueError: On every rank alike, with the first setting that differs.
        """
        settings = gather({**self._described(), "save_metrics": repr(save_metrics)})
        names = dict.fromkeys(name for own in settings for name in own)
        for name in names:
            values = {rank: own.get(name, "no such settings") for rank, own in enumerate(settings)}
            if len(set(values.values())) > 1:
                raise ValueError(
                    f"The ranks have different settings of parallelism: {name} is {values} by rank. All of them shard "
                    f"and load together, so give every rank the same."
                )

    def _described(self) -> dict[str, str]:
        """Write what has to be the same everywhere as text, for which nobody needs the classes."""
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
    """Turn a dict of settings into an object that has them as attributes."""
    if isinstance(config, Mapping):
        settings = cast("Mapping[str, Any]", config)
        return SimpleNamespace(**{str(name): value for name, value in settings.items()})
    if config is None or hasattr(config, "__dict__") or hasattr(config, "__slots__"):
        return config
    raise TypeError(
        f"The {part} settings of parallelism_config are {config!r}, a {type(config).__name__!r}. Give an object with "
        f"the settings as attributes, such as an FSDPConfig or a TPConfig, or a dict of them."
    )

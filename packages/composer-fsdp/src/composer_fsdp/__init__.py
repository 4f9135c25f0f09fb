"""Sharded training with FSDP2, hybrid sharding and tensor parallelism.

- `config`: `FSDPConfig`, `FSDP2Config`, `TPConfig` and `ParallelismConfig`; `parse` reads a Trainer's arguments.
- `plan`, `checks`: `ShardingPlan`, all settings in one form, checked against each other.
- `strategy`: `FSDP`, for a training loop.
- `sharding`: functions that shard a plain module.
- `wrap_rules`, `unit_selection`, `activation`, `mixed_precision`, `groups`, `meshes`, `meta_init`,
  `tensor_parallel`: the implementation of the settings.
- `summon`, `gradients`, `state_dicts`: temporary access to full parameters, full gradients, and checkpoints.
- `estimation`, `fake_run`, `memory_log`: memory and traffic of a step without a GPU; `cli` is the command
  `composer-fsdp`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_fsdp.activation import apply_ac as apply_ac
    from composer_fsdp.config import FSDP2Config as FSDP2Config
    from composer_fsdp.config import FSDPConfig as FSDPConfig
    from composer_fsdp.config import ParallelismConfig as ParallelismConfig
    from composer_fsdp.config import TPConfig as TPConfig
    from composer_fsdp.estimation import Estimate as Estimate
    from composer_fsdp.estimation import Explanation as Explanation
    from composer_fsdp.estimation import estimate as estimate
    from composer_fsdp.estimation import explain as explain
    from composer_fsdp.fake_run import Workload as Workload
    from composer_fsdp.parse import parse_parallelism as parse_parallelism
    from composer_fsdp.plan import ShardingPlan as ShardingPlan
    from composer_fsdp.plan import make_plan as make_plan
    from composer_fsdp.sharding import parallelize_composer_model as parallelize_composer_model
    from composer_fsdp.sharding import parallelize_model as parallelize_model
    from composer_fsdp.strategy import FSDP as FSDP
    from composer_fsdp.summon import get_summon_params_fn as get_summon_params_fn
    from composer_fsdp.summon import summon_full_params_fsdp2 as summon_full_params_fsdp2

_NAMES = {
    "config": "FSDPConfig FSDP2Config TPConfig ParallelismConfig",
    "parse": "parse_parallelism",
    "plan": "ShardingPlan make_plan",
    "strategy": "FSDP",
    "sharding": "parallelize_model parallelize_composer_model",
    "activation": "apply_ac",
    "summon": "summon_full_params_fsdp2 get_summon_params_fn",
    "estimation": "explain Explanation estimate Estimate",
    "fake_run": "Workload",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]  # declared in the block above

__version__: str


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # slower than the import of this package

        return version("composer-fsdp")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Ranks, devices, collectives and data parallel strategies of a distributed run.

- `env`: rank and world size of this process, without importing torch, and a free TCP port.
- `dist`: the same with collectives, `initialize_dist` and `get_sampler`: Composer's `composer.utils.dist`.
- `devices`, `reproducibility`: devices, precision of a model's computations, and random seeds.
- `strategy`: the interface between a training loop and a distributed model; `ddp` and `deepspeed` implement it.
- `agreement`: checks that all ranks train the same model with the same settings.
- `launch`: the `composer` command, which starts the processes of a run.
- `error_file`: the record of an exception that a rank leaves for its launcher.
- `testing`: functions run in several processes, and a simulated accelerator, for tests.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_dist.agreement import RankDisagreementError as RankDisagreementError
    from composer_dist.agreement import check_agreement as check_agreement
    from composer_dist.agreement import describe_model as describe_model
    from composer_dist.ddp import DDP as DDP
    from composer_dist.ddp import DDPSyncStrategy as DDPSyncStrategy
    from composer_dist.ddp import ddp_sync_context as ddp_sync_context
    from composer_dist.ddp import prepare_ddp_module as prepare_ddp_module
    from composer_dist.deepspeed import DeepSpeed as DeepSpeed
    from composer_dist.deepspeed import parse_deepspeed_config as parse_deepspeed_config
    from composer_dist.devices import STR_TO_DTYPE as STR_TO_DTYPE
    from composer_dist.devices import Device as Device
    from composer_dist.devices import DeviceCPU as DeviceCPU
    from composer_dist.devices import DeviceGPU as DeviceGPU
    from composer_dist.devices import DeviceHPU as DeviceHPU
    from composer_dist.devices import DeviceMPS as DeviceMPS
    from composer_dist.devices import DeviceNeuron as DeviceNeuron
    from composer_dist.devices import DeviceTPU as DeviceTPU
    from composer_dist.devices import Precision as Precision
    from composer_dist.devices import get_device as get_device
    from composer_dist.devices import get_precision_context as get_precision_context
    from composer_dist.devices import is_hpu_installed as is_hpu_installed
    from composer_dist.devices import is_xla_installed as is_xla_installed
    from composer_dist.devices import validate_precision as validate_precision
    from composer_dist.env import MissingEnvironmentError as MissingEnvironmentError
    from composer_dist.env import get_free_tcp_port as get_free_tcp_port
    from composer_dist.env import get_global_rank as get_global_rank
    from composer_dist.env import get_local_rank as get_local_rank
    from composer_dist.env import get_local_world_size as get_local_world_size
    from composer_dist.env import get_node_rank as get_node_rank
    from composer_dist.env import get_world_size as get_world_size
    from composer_dist.initialize import initialize_dist as initialize_dist
    from composer_dist.reproducibility import MAX_SEED as MAX_SEED
    from composer_dist.reproducibility import configure_deterministic_mode as configure_deterministic_mode
    from composer_dist.reproducibility import get_random_seed as get_random_seed
    from composer_dist.reproducibility import get_rng_state as get_rng_state
    from composer_dist.reproducibility import get_sampler as get_sampler
    from composer_dist.reproducibility import load_rng_state as load_rng_state
    from composer_dist.reproducibility import seed_all as seed_all
    from composer_dist.reproducibility import seed_context as seed_context
    from composer_dist.strategy import SingleDevice as SingleDevice
    from composer_dist.strategy import Strategy as Strategy
    from composer_dist.wrapping import is_model_ddp as is_model_ddp
    from composer_dist.wrapping import is_model_deepspeed as is_model_deepspeed
    from composer_dist.wrapping import is_model_fsdp as is_model_fsdp
    from composer_dist.wrapping import is_model_fsdp2 as is_model_fsdp2
    from composer_dist.wrapping import unwrap_model as unwrap_model

_NAMES = {
    "env": (
        "get_world_size get_global_rank get_local_world_size get_local_rank get_node_rank "
        "MissingEnvironmentError get_free_tcp_port"
    ),
    "initialize": "initialize_dist",
    "reproducibility": (
        "get_sampler MAX_SEED get_random_seed seed_all configure_deterministic_mode get_rng_state "
        "load_rng_state seed_context"
    ),
    "devices": (
        "Device DeviceCPU DeviceGPU DeviceMPS DeviceTPU DeviceHPU DeviceNeuron get_device is_xla_installed "
        "is_hpu_installed STR_TO_DTYPE Precision get_precision_context validate_precision"
    ),
    "strategy": "Strategy SingleDevice",
    "ddp": "DDP DDPSyncStrategy ddp_sync_context prepare_ddp_module",
    "deepspeed": "DeepSpeed parse_deepspeed_config",
    "agreement": "RankDisagreementError check_agreement describe_model",
    "wrapping": "is_model_ddp is_model_deepspeed is_model_fsdp is_model_fsdp2 unwrap_model",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]  # declared in the block above

__version__: str


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # reading the metadata costs more than all the rest of this file

        value: object = version("composer-dist")
    elif name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""How a model is spread over ranks, as settings."""

from composer_events.parallelism import ParallelismType
from composer_fsdp.config import FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig

__all__ = ["ParallelismType", "FSDP2Config", "FSDPConfig", "ParallelismConfig", "TPConfig"]

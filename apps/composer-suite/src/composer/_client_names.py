"""Private names of Composer that published projects import, as aliases.

Without them these projects fail at import. Each name is available in the module that it is imported from:

| name | found in | imported by |
|---|---|---|
| `_convert_time` | `composer.optim.scheduler` | llm-foundry, ModernBERT |
| `_raise_if_max_duration_exceeds_t_max` | `composer.optim.scheduler` | ModernBERT |
| `_raise_if_warmup_and_max_incompatible` | `composer.optim.scheduler` | schedulers that extend llm-foundry's |
| `_default_split_batch`, `_split_list` | `composer.core.data_spec` | llm-foundry |
| `RUN_NAME_ENV_VAR` | `composer.loggers.mosaicml_logger` | llm-foundry |
| `_ensure_valid_checkpoint` | `composer.utils.checkpoint` | ModernBERT |

Methods that projects call stay in their classes: `Engine._close` (ModernBERT, MosaicBERT), `State._dataset_of` and
`CheckpointSaver._save_checkpoint` (LLM-Shearing).
"""

from os import PathLike
from typing import Final, TypeVar

from composer_events.data_spec import default_split_batch as _default_split_batch
from composer_events.data_spec import split_list as _split_list
from composer_optim.time_conversion import convert_time as _convert_time
from composer_optim.warmup import raise_if_max_duration_exceeds_t_max as _raise_if_max_duration_exceeds_t_max
from composer_optim.warmup import raise_if_warmup_and_max_incompatible as _raise_if_warmup_and_max_incompatible

__all__ = [
    "RUN_NAME_ENV_VAR",
    "_convert_time",
    "_default_split_batch",
    "_ensure_valid_checkpoint",
    "_raise_if_max_duration_exceeds_t_max",
    "_raise_if_warmup_and_max_incompatible",
    "_split_list",
]

Path = TypeVar("Path", bound=str | PathLike[str])

RUN_NAME_ENV_VAR: Final = "RUN_NAME"


def _ensure_valid_checkpoint(checkpoint_filepath: Path) -> Path:
    """Validate a file with the function named by `CHECKPOINT_VALIDATION_FUNCTION`, if set, and return its path."""
    from composer_checkpoint.files import validate_file  # loads torch

    validate_file(checkpoint_filepath)
    return checkpoint_filepath

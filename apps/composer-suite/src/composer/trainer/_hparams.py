"""What `auto_log_hparams` logs: the arguments of the Trainer, reduced to names and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_dist import get_global_rank
from composer_events.hparams import extract_hparams

if TYPE_CHECKING:
    from composer.trainer._given import Given
    from composer.trainer._parts import Parts
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["log_arguments"]

# Composer's constructor does not have these, and who compares the hyperparameters of runs is not to find more of them
# than there were: they are there where they say something.
_ONLY_IF_USED = frozenset(
    {
        "load_trusted",
        "load_restart_epoch",
        "save_keep",
        "save_async",
        "save_async_policy",
        "on_divergence",
        "activation_checkpointing",
        "ddp_comm_hook",
        "deepspeed_config",
        "grad_accum",
        "save_artifact_name",
        "save_latest_artifact_name",
        "compute_training_metrics",
        "fsdp_config",
        "fsdp_auto_wrap",
        "load_fsdp_monolith_rank0_only",
    }
)


def log_arguments(given: Given, parts: Parts, state: State, logger: Logger) -> dict[str, Any]:
    """Log the arguments, as they are used, as hyperparameters, and return them."""
    arguments = {name: value for name, value in given.items() if not (name in _ONLY_IF_USED and given.is_default(name))}
    hparams = extract_hparams(
        arguments
        | {
            "model": parts.model,
            "algorithms": parts.algorithms,
            "callbacks": [callback for callback in parts.callbacks if callback is not parts.saver],
            "loggers": parts.destinations,
            "optimizers": parts.optimizers[0] if len(parts.optimizers) == 1 else parts.optimizers,
            "device": state.device,
            "precision": state.precision,
            "run_name": state.run_name,
            "seed": state.rank_zero_seed + get_global_rank(),
            "num_optimizers": len(parts.optimizers),
            "rank_zero_seed": state.rank_zero_seed,
            "is_model_compiled": parts.compilation.is_compiled,
            "auto_microbatching": state.auto_microbatching,
            "latest_remote_file_name": None,
            "remote_ud_has_format_string": [False] * len(parts.destinations),
        }
    )
    logger.log_hyperparameters(hparams)
    return hparams

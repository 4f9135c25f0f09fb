"""What a user writes for DeepSpeed, completed by what the training run settles and checked against it.

Nothing here needs the package `deepspeed`.
"""

import copy
import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from composer_dist.precision import Precision

__all__ = ["check_deepspeed_fits", "parse_deepspeed_config"]

# https://www.deepspeed.ai/docs/config-json/; for finding misspelt names only, so that newer ones still pass.
_KNOWN_KEYS = """
    activation_checkpointing aio amp autotuning bf16 check_grad_overflow checkpoint comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    disable_allgather dump_state elasticity flops_profiler fp16 gradient_accumulation_steps gradient_clipping
    gradient_predivide_factor hybrid_engine memory_breakdown monitor_config pipeline prescale_gradients
    seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard
    torch_autocast train_batch_size train_micro_batch_size_per_gpu wall_clock_breakdown wandb
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
_PRECISION_SECTIONS = {"fp16": Precision.AMP_FP16, "bf16": Precision.AMP_BF16, "amp": Precision.AMP_FP16}
_TO_FILL = "auto"  # how configurations written for other trainers leave a value open


def check_deepspeed_fits(
    *, parallelism_config: object, has_train_dataloader: bool, callbacks: Iterable[object] = ()
) -> None:
    """Refuse what cannot go together with a DeepSpeed configuration.

    Args:
        parallelism_config: The configuration of FSDP or tensor parallelism, `None` without one.
        has_train_dataloader: Whether the training data is known already: batch sizes are read from it.
        callbacks: What listens to the run; `OptimizerMonitor` reads gradients that DeepSpeed has taken away.

    Raises:
        ValueError: If one of them does not fit.
    """
    if parallelism_config is not None:
        raise ValueError(
            "deepspeed_config and parallelism_config (or fsdp_config) were both given, and both say how the model is "
            "sharded. Leave one of them out."
        )
    if not has_train_dataloader:
        raise ValueError(
            "deepspeed_config needs the train_dataloader when the Trainer is constructed, since DeepSpeed's batch "
            "sizes are inferred from it. Pass train_dataloader to the constructor and not to fit()."
        )
    # By name: the class belongs to a package on a floor above.
    if any(base.__name__ == "OptimizerMonitor" for callback in callbacks for base in type(callback).__mro__):
        raise ValueError(
            "the callback OptimizerMonitor cannot be used with deepspeed_config: DeepSpeed's engine owns the gradients "
            "and drops them before the callback can read them. Leave the callback out."
        )


def parse_deepspeed_config(
    config: Mapping[str, Any],
    *,
    batch_size: int | None,
    microbatch_size: int | float | str | None,
    world_size: int,
    precision: str | Precision,
    clip: tuple[str, float] | None = None,
) -> dict[str, Any]:
    """Return a copy of a DeepSpeed configuration with what follows from the run filled in.

    Args:
        config: As DeepSpeed documents it; `{}` and `'auto'` for a batch size or the clipping leave it to the run.
        batch_size: Of the training dataloader, on each rank; `None` if the dataloader does not say.
        microbatch_size: How many samples go through the model at a time; `None` for the whole batch.
        world_size: How many ranks train.
        precision: The run's.
        clip: Type and threshold of the run's gradient clipping.

    Returns:
        A configuration with `train_batch_size`, `train_micro_batch_size_per_gpu`, `gradient_accumulation_steps`,
        `zero_allow_untested_optimizer` and, where they apply, a section for the precision and `gradient_clipping`.

    Raises:
        ValueError: If the configuration contradicts the run, if it has a section for the optimizer or the scheduler,
            if a name is misspelt, or if the microbatch size does not divide the batch size.
        RuntimeError: If the dataloader does not say its batch size.
        NotImplementedError: If gradients shall be clipped in another way than by norm.

    Example:
        >>> config = parse_deepspeed_config({}, batch_size=8, microbatch_size=2, world_size=4, precision="fp32")
        >>> config["train_batch_size"], config["gradient_accumulation_steps"]
        (32, 4)
    """
    parsed: dict[str, Any] = copy.deepcopy(dict(config))
    _refuse_names(parsed)
    _fill_batch_sizes(parsed, batch_size, microbatch_size, world_size)
    _fill_precision(parsed, Precision(precision))
    _allow_any_optimizer(parsed)
    if clip is not None:
        _fill_clipping(parsed, *clip)
    elif parsed.get("gradient_clipping") == _TO_FILL:
        del parsed["gradient_clipping"]
    return parsed


def _refuse_names(config: Mapping[str, Any]) -> None:
    for section, argument in (("optimizer", "optimizers"), ("scheduler", "schedulers")):
        if section in config:
            raise ValueError(
                f"deepspeed_config has a section {section!r}: {config[section]!r}. The Trainer makes it known to "
                f"DeepSpeed itself: leave the section out, and pass {argument}= to the Trainer."
            )
    known = _KNOWN_KEYS.split()
    for name in config:
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.85)
        if name not in known and near:
            raise ValueError(
                f"deepspeed_config has {name!r}, which DeepSpeed does not know. Did you mean {' or '.join(near)}?"
            )


def _fill_batch_sizes(
    config: dict[str, Any], batch_size: int | None, microbatch_size: int | float | str | None, world_size: int
) -> None:
    total = config.get("train_batch_size", _TO_FILL)
    if batch_size is None and total != _TO_FILL and total % world_size == 0:
        batch_size = total // world_size
    if batch_size is None:
        raise RuntimeError(
            f"deepspeed_config needs the train_dataloader's batch size, and neither the dataloader nor its "
            f"batch_sampler has an attribute batch_size. Give deepspeed_config['train_batch_size'], the number of "
            f"samples on all {world_size} ranks together, got {total!r}; or use a torch DataLoader."
        )
    if isinstance(microbatch_size, str):
        raise ValueError(
            f"device_train_microbatch_size={microbatch_size!r} (or grad_accum) cannot be used with deepspeed_config: "
            "DeepSpeed has to know the size before it starts. Set it to a number of samples that divides the batch "
            f"size of {batch_size}."
        )
    microbatch_size = batch_size if microbatch_size is None else microbatch_size
    if microbatch_size <= 0 or batch_size % microbatch_size:
        raise ValueError(
            f"device_train_microbatch_size={microbatch_size!r} does not divide the train_dataloader's batch size of "
            f"{batch_size}, as DeepSpeed needs it. Choose a divisor of {batch_size}."
        )
    steps = int(batch_size // microbatch_size)
    _fill(config, "train_batch_size", batch_size * world_size, f"batch size {batch_size} x world size {world_size}")
    _fill(config, "train_micro_batch_size_per_gpu", int(microbatch_size), "device_train_microbatch_size")
    because = f"batch size {batch_size} / device_train_microbatch_size {microbatch_size}"
    _fill(config, "gradient_accumulation_steps", steps, because)


def _fill(config: dict[str, Any], key: str, value: float, because: str) -> None:
    """Set a key that is open, and refuse one that says something else."""
    if config.get(key, _TO_FILL) == _TO_FILL:
        config[key] = value
    elif config[key] != value:
        raise ValueError(
            f"deepspeed_config[{key!r}]={config[key]!r} contradicts the Trainer's arguments, which make it {value!r} "
            f"({because}). Leave the key out, or make the two agree."
        )


def _fill_precision(config: dict[str, Any], precision: Precision) -> None:
    if precision is Precision.AMP_FP8:
        raise ValueError(
            "precision='amp_fp8' cannot be used with deepspeed_config. Choose 'amp_bf16', 'amp_fp16' or 'fp32'."
        )
    for section, theirs in _PRECISION_SECTIONS.items():
        enabled = config[section].get("enabled", False) if section in config else False
        if enabled == _TO_FILL:
            config[section]["enabled"] = enabled = theirs is precision
        if enabled and theirs is not precision:
            raise ValueError(
                f"deepspeed_config[{section!r}] is enabled, which is precision={theirs.value!r}, but the Trainer has "
                f"precision={precision.value!r}. Leave the section out, or pass precision={theirs.value!r}."
            )
        if enabled:
            return
    for section in ("fp16", "bf16"):
        if _PRECISION_SECTIONS[section] is precision:
            config.setdefault(section, {"enabled": True})


def _allow_any_optimizer(config: dict[str, Any]) -> None:
    if config.get("zero_allow_untested_optimizer") is False:
        warnings.warn(
            "deepspeed_config['zero_allow_untested_optimizer']=False was set to True: the Trainer's optimizers are "
            "none of those that DeepSpeed lists as tested. Leave the key out.",
            UserWarning,
            stacklevel=3,
        )
    config["zero_allow_untested_optimizer"] = True


def _fill_clipping(config: dict[str, Any], clipping_type: str, threshold: float) -> None:
    if clipping_type != "norm":
        raise NotImplementedError(
            f"GradientClipping with clipping_type={clipping_type!r} cannot be used with deepspeed_config: DeepSpeed "
            "clips by 'norm' only. Use that, or train without DeepSpeed."
        )
    if threshold <= 0:
        raise ValueError(
            f"GradientClipping with clipping_threshold={threshold!r} cannot be used with deepspeed_config. Choose a "
            "number above 0: DeepSpeed takes 0 for no clipping."
        )
    _fill(config, "gradient_clipping", threshold, "the clipping_threshold of GradientClipping")

"""Choice of the strategy, checks that all ranks agree, compilation and activation checkpointing."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from composer.trainer._arguments import user_stacklevel
from composer.trainer._microbatching import size_of_batches
from composer.trainer._rank_sync import Ranks, agreed_facts, compare
from composer.trainer._sharding import as_fsdp, facts_of, make_strategy
from composer_dist import agreement, dist, get_global_rank, get_world_size, reproducibility
from composer_dist.ddp import DDP
from composer_dist.deepspeed import check_deepspeed_fits, parse_deepspeed_config
from composer_dist.strategy import SingleDevice, Strategy
from composer_events.arguments import overrides
from composer_events.callback import Callback
from composer_models import MissingConditionalImportError
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from composer.trainer._arguments import TrainerArguments
    from composer.trainer._build import ResolvedArguments
    from composer_dist.ddp import DDPSyncStrategy
    from composer_dist.devices import Device, Precision
    from composer_events.algorithm import Algorithm
    from composer_events.callback import Callback
    from composer_events.data_spec import DataSpec
    from composer_events.evaluator import Evaluator
    from composer_events.state import State
    from composer_fsdp import ParallelismConfig, ShardingPlan


# Types whose text is the same in every process.
_PLAIN = (bool, int, float, str, Time, type(None))


def choose_strategy(
    device: Device,
    algorithms: Iterable[Algorithm],
    sync_strategy: str | DDPSyncStrategy | None,
    comm_hook: str | None,
    deepspeed_config: Mapping[str, Any] | None,
    sharding: ShardingPlan | None = None,
) -> Strategy:
    """Return the strategy: DeepSpeed or FSDP if configured, else DDP, or a single device."""
    if sharding is not None:
        return make_strategy(sharding, device, algorithms, sync_strategy, comm_hook)
    find_unused = any(algorithm.find_unused_parameters for algorithm in algorithms)
    if deepspeed_config is not None:
        if sync_strategy is not None or comm_hook is not None:
            raise ValueError(
                f"ddp_sync_strategy={sync_strategy!r} and ddp_comm_hook={comm_hook!r} do not go with deepspeed_config: "
                "DeepSpeed's engine synchronizes the gradients itself. Leave out what you do not need."
            )
        from composer_dist.deepspeed import DeepSpeed  # requires the package deepspeed

        return DeepSpeed(device, deepspeed_config, find_unused_parameters=find_unused)
    is_alone = get_world_size() == 1
    if is_alone and sync_strategy is None and comm_hook is None:
        return SingleDevice(device)
    for algorithm in algorithms:
        if algorithm.backwards_create_graph and not is_alone:
            raise ValueError(
                f"{type(algorithm).__name__} differentiates through the gradients (backwards_create_graph=True), which "
                f"DistributedDataParallel cannot, and WORLD_SIZE is {get_world_size()}. Train in one process, or leave "
                "the algorithm out."
            )
    # Created for a single process as well, so that an unknown name is an error there, too.
    ddp = DDP(device, sync_strategy=sync_strategy, find_unused_parameters=find_unused, comm_hook=comm_hook)
    return SingleDevice(device) if is_alone else ddp


def size_for_deepspeed(config: Any, dataloader: Any) -> int | None:
    """Return the microbatch size from DeepSpeed's configuration, if the dataloader has no batch size."""
    if not isinstance(config, Mapping) or size_of_batches(getattr(dataloader, "dataloader", dataloader)) is not None:
        return None
    settings = cast("Mapping[str, object]", config)
    size, total = settings.get("train_micro_batch_size_per_gpu"), settings.get("train_batch_size")
    if isinstance(size, int):
        return size
    return total // get_world_size() if isinstance(total, int) else None


def complete_deepspeed_config(
    config: object,
    *,
    parallelism_config: object = None,
    data_spec: DataSpec | None,
    microbatch_size: int | float | None,
    precision: Precision,
    algorithms: Iterable[Algorithm],
    callbacks: Iterable[Callback],
) -> dict[str, Any] | None:
    """Complete DeepSpeed's configuration from the other arguments, or return `None` without one."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise TypeError(
            f"deepspeed_config={config!r} must be a dict of DeepSpeed's settings, such as "
            "{'zero_optimization': {'stage': 2}}, or {} for the defaults."
        )
    config = cast("Mapping[str, Any]", config)
    _refuse_methods(config, algorithms)
    if find_spec("deepspeed") is None:
        raise MissingConditionalImportError("deepspeed", "deepspeed", distribution="composer-suite")
    check_deepspeed_fits(
        parallelism_config=parallelism_config, has_train_dataloader=data_spec is not None, callbacks=callbacks
    )
    assert data_spec is not None
    return parse_deepspeed_config(
        config,
        batch_size=size_of_batches(data_spec.dataloader),
        microbatch_size=microbatch_size,
        world_size=get_world_size(),
        precision=precision,
        clip=_clipping(algorithms),
    )


def _refuse_methods(config: Mapping[str, Any], algorithms: Iterable[Algorithm]) -> None:
    """Reject algorithms that need whole weights or gradients, which ZeRO stage 3 does not have."""
    zero = config.get("zero_optimization")
    stage = cast("Mapping[str, object]", zero).get("stage", 0) if isinstance(zero, Mapping) else 0
    if stage != 3:
        return
    from composer_algorithms import EMA, SWA  # a slow import that only stage 3 needs

    for algorithm in algorithms:
        if isinstance(algorithm, EMA | SWA):
            because = "averages whole weights, of which no rank has any"
        elif algorithm.find_unused_parameters:
            because = "leaves weights without a gradient, and they are moved all the same"
        else:
            continue
        raise ValueError(
            f"{type(algorithm).__name__} does not go with deepspeed_config['zero_optimization']['stage']=3: it "
            f"{because}. Use stage 2, train with parallelism_config={{'fsdp': {{}}}} instead of DeepSpeed, or leave "
            "the algorithm out."
        )


def _clipping(algorithms: Iterable[Algorithm]) -> tuple[str, float] | None:
    from composer_algorithms.gradient_clipping import GradientClipping  # the only algorithm that DeepSpeed replaces

    for algorithm in algorithms:
        if isinstance(algorithm, GradientClipping):
            return algorithm.clipping_type, algorithm.clipping_threshold
    return None


def share_seed(seed: int | None) -> int:
    """Return the seed of rank 0, which is random if none was given. Every rank must call this."""
    # Seeds go up to 2**32 - 1.
    drawn = torch.tensor([reproducibility.get_random_seed() if seed is None else seed], dtype=torch.int64)
    dist.broadcast(drawn, src=0)
    return int(drawn)


def seed_rank(rank_zero_seed: int, strategy: Strategy) -> None:
    """Seed this rank, so that dropout and augmentation differ between ranks, unless ranks share a batch."""
    fsdp = as_fsdp(strategy)
    # The ranks of one tensor parallel group share a batch, and therefore a seed.
    batch_rank = get_global_rank() if fsdp is None else fsdp.batch_rank
    # The largest seed wraps around.
    reproducibility.seed_all((rank_zero_seed + batch_rank) % (reproducibility.MAX_SEED + 1))


def share_length(state: State) -> None:
    """Shorten the epoch to the smallest number of batches of any rank. Every rank must call this."""
    if get_world_size() > 1:
        length = state.dataloader_len
        lengths = [own for own in dist.all_gather_object(None if length is None else int(length)) if own is not None]
        if lengths and (length is None or int(length) != min(lengths)):
            if length is not None:
                warnings.warn(
                    f"train_dataloader has {int(length)} batches on global rank {get_global_rank()} and {min(lengths)} "
                    "on another one, so epochs have as many on all ranks; the others are not trained on. A sampler of "
                    "dist.get_sampler(dataset) gives all ranks as many.",
                    stacklevel=user_stacklevel(),
                )
            state.dataloader_len = min(lengths)


def begin_fit(state: State, ranks: Ranks, data_spec: DataSpec, strategy: Strategy) -> None:
    """Compare the state of the ranks, and determine which values they exchange. Every rank must call this."""
    if fsdp := as_fsdp(strategy):
        # FSDP would neither gather nor average a parameter that was added after sharding.
        fsdp.sharded.check_unchanged()
    if get_world_size() > 1:
        agreement.check_agreement(
            {
                "max_duration": str(state.max_duration),
                "batch": state.timestamp.num_batches,
                "epoch": state.timestamp.num_epochs,
                "device_train_microbatch_size": state.device_train_microbatch_size,
                "grad_accum": state.grad_accum,
                "precision": str(state.precision),
                "batches in an epoch": str(state.dataloader_len),
                "schedulers": [type(scheduler).__name__ for scheduler in state.schedulers],
                "train_dataloader": agreed_facts(data_spec.dataloader),
                "eval_dataloader": _evaluator_facts(state.evaluators),
            }
        )
    # An `eval_interval` that is a function may read the clock, on which the ranks must then agree.
    lengths = [getattr(evaluator.eval_interval, "interval", None) for evaluator in state.evaluators]
    follows_clock = any(length is None or length.unit is TimeUnit.SECOND for length in lengths)
    listens = bool(state.callbacks) or follows_clock
    may_stop_late = any(
        overrides(callback, Callback, name) and not hasattr(callback, "is_save_due")  # savers never stop training
        for callback in state.callbacks
        for name in ("batch_checkpoint", "run_event")
    )
    may_stop = listens or bool(state.algorithms)
    # Each fact that holds on no rank saves a collective per batch.
    ranks.begin(data_spec, listens=listens, may_stop=may_stop, may_stop_late=may_stop_late)


# Arguments that must be the same on all ranks, as they were passed.
_SAME_AS_GIVEN = (
    "seed",
    "device_train_microbatch_size",
    "grad_accum",
    "train_subset_num_batches",
    "scale_schedule_ratio",
    "step_schedulers_every_batch",
    "accumulate_train_batch_on_tokens",
    "ddp_sync_strategy",
    "ddp_comm_hook",
    "compile_config",
    "activation_checkpointing",
    "on_divergence",
    "load_path",
    "autoresume",
)


def check_agreement(arguments: TrainerArguments, resolved: ResolvedArguments) -> None:
    """Compare the arguments of all ranks before any of them is used. Every rank must call this.

    Callbacks and loggers may differ, since they are often given to rank 0 alone.

    Raises:
        RankDisagreementError: On every rank, with the differences, or with the error of another rank.
    """
    if get_world_size() == 1:
        return
    values: dict[str, Any] = {
        **{name: getattr(arguments, name) for name in _SAME_AS_GIVEN},
        "max_duration": resolved.duration,
        "precision": resolved.precision,
        "deepspeed_config": resolved.placement.deepspeed_config,
        "parallelism_config": facts_of(resolved.placement.strategy),
        "CheckpointSaver": None if resolved.saver is None else resolved.saver.filename.filename,
    }
    facts: dict[str, Any] = {name: _described(value) for name, value in values.items()}
    facts["model"] = agreement.describe_model(resolved.model)
    facts["optimizers"] = {type(optimizer).__name__: _settings(optimizer) for optimizer in resolved.optimizers}
    facts["algorithms"] = [_name(algorithm) for algorithm in resolved.algorithms]
    facts["schedulers"] = [_name(scheduler) for scheduler in resolved.schedule.schedulers]
    facts["eval_dataloader"] = _evaluator_facts(resolved.evaluators)
    facts["train_dataloader"] = None if resolved.data_spec is None else agreed_facts(resolved.data_spec.dataloader)
    compare(facts)


def _described(value: object) -> str | dict[Any, str]:
    if isinstance(value, Mapping):
        return {key: str(part) for key, part in cast("Mapping[Any, object]", value).items()}
    return str(value)


def _evaluator_facts(evaluators: Iterable[Evaluator]) -> dict[str, Any]:
    return {
        str(index): {
            "label": evaluator.label,
            "eval_interval": str(getattr(evaluator.eval_interval, "interval", None)),
            "subset_num_batches": evaluator.subset_num_batches,
            **agreed_facts(evaluator.dataloader.dataloader),
        }
        for index, evaluator in enumerate(evaluators)
    }


def _name(member: object) -> str:
    """Return a description of an object that is the same in every process."""
    said = repr(member)
    # The default repr has an address; simple attributes identify the object instead.
    if " at 0x" not in said:
        return said
    values: list[tuple[str, object]] = sorted(vars(member).items())
    settings = {name: str(cast(object, value)) for name, value in values if isinstance(value, _PLAIN)}
    return f"{type(member).__name__}({settings})"


def _settings(optimizer: Optimizer) -> dict[str, str]:
    return {
        f"group {index}, {name}": str(value)
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }


# The logger that `python_log_level` of a Trainer configures.
_log = logging.getLogger("composer.trainer.trainer")


@dataclass(frozen=True, slots=True)
class Compilation:
    """A model, and the arguments with which it is compiled.

    A module is compiled in place: its class, attributes and state dict keys do not change.

    Attributes:
        model: The model, without the wrapper of `torch.compile` if there is one.
        config: Arguments of `torch.compile`; `None` for a model that is not to be compiled, or is compiled already.
    """

    model: Any
    config: dict[str, Any] | None
    is_compiled: bool

    @classmethod
    def of(cls, config: Mapping[str, Any] | None, model: Any) -> Compilation:
        """Check the arguments, and unwrap a model that is already compiled."""
        if config is not None:
            _check(config)
        inner = getattr(model, "_orig_mod", None)  # the module inside a wrapper of `torch.compile`
        if not (isinstance(model, nn.Module) and isinstance(inner, nn.Module)):
            return cls(model, None if config is None else dict(config), is_compiled=config is not None)
        if config is not None:
            _log.warning("`model` is already compiled with `torch.compile`; compile_config=%r is ignored.", config)
        else:
            _log.warning("`model` is already compiled with `torch.compile`; it trains as it was compiled.")
        # PyTorch has no public way to run a module in place through an existing wrapper. `Module.compile` itself uses
        # these two attributes.
        untyped = cast(Any, inner)
        untyped._compiled_call_impl = vars(model)["dynamo_ctx"](untyped._call_impl)
        return cls(inner, None, is_compiled=True)

    def apply(self, model: nn.Module) -> None:
        """Compile a model in place, which may be wrapped for several ranks."""
        if self.config is not None:
            cast(Any, model).compile(**self.config)


def _check(config: Any) -> None:
    if not isinstance(config, Mapping):
        raise TypeError(
            f"compile_config={config!r} must be a dict of arguments of torch.compile, such as "
            "{'mode': 'reduce-overhead'}, or {} for the defaults."
        )
    settings = dict(cast("Mapping[str, Any]", config))
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise TypeError(
            f"compile_config has {unknown[0]!r}, which torch.compile does not accept. Use {', '.join(known)}."
        )
    try:
        # This checks the backend and all options at once; compilation itself would only start at the first call.
        torch.compile(lambda: None, **settings)
    except Exception as error:
        raise ValueError(
            f"compile_config={settings!r} is rejected by torch.compile: {error} Available backends are "
            f"{', '.join(cast(Any, torch.compiler).list_backends())}; {{}} takes the defaults."
        ) from error


_SELECTIVE = "selective"


def check_recomputation(setting: Any, parallelism_config: ParallelismConfig | None) -> bool | str:
    """Check the argument `activation_checkpointing`."""
    if not isinstance(setting, bool) and setting != _SELECTIVE:
        raise ValueError(
            f"activation_checkpointing={setting!r} is unknown. Use True, False or {_SELECTIVE!r}, which "
            "keeps the results of matrix products."
        )
    if setting and parallelism_config is not None:
        raise ValueError(
            f"activation_checkpointing={setting!r} is for models that are not sharded. Write it into the settings of "
            f"sharding: parallelism_config={{'fsdp': {{'activation_checkpointing': {setting!r}}}}}."
        )
    return setting


def recompute_activations(model: nn.Module, setting: bool | str) -> None:
    """Apply activation checkpointing to the modules that the model selects, in place."""
    if not setting:
        return
    from composer_fsdp.activation import apply_ac, warn_of_none_chosen  # a slow import that few runs need

    if not apply_ac(model, setting, False):
        warn_of_none_chosen(model, stacklevel=user_stacklevel())

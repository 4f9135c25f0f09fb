"""Choice of the strategy, checks that all ranks agree, compilation and activation checkpointing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from inspect import getclosurevars
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from composer.loggers._text_output import is_progress_bar
from composer.trainer._arguments import user_stacklevel
from composer.trainer._microbatching import Microbatching
from composer.trainer._rank_sync import Ranks, agreed_facts, compare
from composer_dist import agreement, dist, get_global_rank, get_world_size, reproducibility
from composer_dist.ddp import DDP
from composer_dist.deepspeed import check_deepspeed_fits, parse_deepspeed_config
from composer_dist.strategy import SingleDevice, Strategy
from composer_events.data_spec import size_of_batches
from composer_events.state import numbered
from composer_models import MissingConditionalImportError
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from composer.trainer._arguments import TrainerArguments
    from composer.trainer._build import ResolvedArguments
    from composer_dist.devices import Precision
    from composer_events.algorithm import Algorithm
    from composer_events.data_spec import DataSpec
    from composer_events.evaluator import Evaluator
    from composer_events.state import State
    from composer_fsdp import FSDP, ParallelismConfig, ShardingPlan


# Types whose text is the same in every process.
_PLAIN = (bool, int, float, str, Time, type(None))


def as_fsdp(strategy: Strategy) -> FSDP | None:
    """Return a strategy that shards the model, and `None` for any other, without importing the class."""
    return cast("FSDP", strategy) if hasattr(strategy, "plan") else None


def read_parallelism(arguments: TrainerArguments) -> ParallelismConfig | None:
    if arguments.parallelism_config is None and arguments.fsdp_config is None:
        return None
    from composer_fsdp.parse import parse_parallelism  # a slow import that only sharded runs need

    return parse_parallelism(
        arguments.parallelism_config,
        fsdp_config=arguments.fsdp_config,
        fsdp_auto_wrap=arguments.fsdp_auto_wrap,
        load_fsdp_monolith_rank0_only=arguments.load_fsdp_monolith_rank0_only,
        stacklevel=user_stacklevel(),
    )


def choose_strategy(arguments: TrainerArguments, resolved: ResolvedArguments) -> Strategy:
    """Return the strategy: FSDP or DeepSpeed if configured, else DDP, or a single device."""
    _refuse_settings(arguments, resolved)
    device, find_unused = resolved.device, any(algorithm.find_unused_parameters for algorithm in resolved.algorithms)
    sync, hook, is_alone = arguments.ddp_sync_strategy, arguments.ddp_comm_hook, get_world_size() == 1
    if resolved.parallelism_config is not None:
        plan = plan_sharding(resolved.parallelism_config, resolved.precision, is_auto=resolved.microbatching.is_auto)
        from composer_fsdp.strategy import FSDP  # here, because it imports torch's sharding

        return FSDP(device, plan)
    if resolved.deepspeed_config is not None:
        from composer_dist.deepspeed import DeepSpeed  # requires the package deepspeed

        return DeepSpeed(device, resolved.deepspeed_config, find_unused_parameters=find_unused)
    if is_alone and sync is None and hook is None:
        return SingleDevice(device)
    # Created for a single process as well, so that an unknown name is an error there, too.
    ddp = DDP(device, sync_strategy=sync, find_unused_parameters=find_unused, comm_hook=hook)
    return SingleDevice(device) if is_alone else ddp


def _refuse_settings(arguments: TrainerArguments, resolved: ResolvedArguments) -> None:
    """Reject settings of DDP for another strategy, and algorithms that the strategy cannot train."""
    sync, hook = arguments.ddp_sync_strategy, arguments.ddp_comm_hook
    is_sharded, is_deepspeed = resolved.parallelism_config is not None, resolved.deepspeed_config is not None
    if (is_sharded or is_deepspeed) and (sync is not None or hook is not None):
        owner, which = ("parallelism_config", "FSDP") if is_sharded else ("deepspeed_config", "DeepSpeed's engine")
        raise ValueError(
            f"ddp_sync_strategy={sync!r} and ddp_comm_hook={hook!r} cannot be combined with {owner}: {which} "
            "synchronizes the gradients itself. Leave out what you do not need."
        )
    creates_graph = next((each for each in resolved.algorithms if each.backwards_create_graph), None)
    if creates_graph is not None and (is_sharded or (get_world_size() > 1 and not is_deepspeed)):
        which = "FSDP" if is_sharded else f"DistributedDataParallel (WORLD_SIZE is {get_world_size()})"
        raise ValueError(
            f"{type(creates_graph).__name__} differentiates through the gradients (backwards_create_graph=True), which "
            f"{which} cannot. Train in one process without parallelism_config, or leave the algorithm out."
        )


def plan_sharding(config: ParallelismConfig, precision: Precision, *, is_auto: bool) -> ShardingPlan:
    if is_auto and config.fsdp2 is not None:
        raise ValueError(
            "Auto microbatching is not supported outside of FSDP1: device_train_microbatch_size='auto' does not go "
            "with an FSDP2Config. Give the size as a number, or an FSDPConfig."
        )
    from composer_fsdp.plan import make_plan

    return make_plan(config, precision=precision, world_size=get_world_size(), stacklevel=user_stacklevel())


def refuse_unrepeatable(microbatching: Microbatching, strategy: Strategy, *, is_deepspeed: bool = False) -> None:
    """Reject `'auto'` if a step cannot be repeated."""
    if not microbatching.is_auto:
        return
    if isinstance(strategy, DDP) and strategy.comm_hook is not None:
        raise ValueError(
            f"device_train_microbatch_size='auto' cannot be combined with ddp_comm_hook={strategy.comm_hook!r}: "
            "gradients are averaged after the backward pass, without the hook. Leave the hook out, or give the size "
            "as a number."
        )
    if fsdp := as_fsdp(strategy):
        fsdp.check_repeatable()
    if is_deepspeed:
        raise ValueError(
            "device_train_microbatch_size='auto' cannot be combined with deepspeed_config: DeepSpeed's engine cannot "
            "repeat a step. Give the size as a number."
        )


def share_mesh(strategy: Strategy, state: State) -> None:
    """Make the strategy and the state use the same device mesh."""
    fsdp = as_fsdp(strategy)
    if fsdp is None:
        return
    fsdp.seed = state.rank_zero_seed
    if state.device_mesh is not None:
        fsdp.mesh = state.device_mesh
    if fsdp.is_prepared:
        state.device_mesh = fsdp.mesh
        meshes = fsdp.sharded.meshes
        state.fsdp_config.device_mesh = meshes.data
        if state.tp_config is not None:
            state.tp_config.device_mesh = meshes.tensor


def size_for_deepspeed(config: Any, dataloader: Any) -> int | None:
    """Return the microbatch size from DeepSpeed's configuration, if the dataloader has no batch size."""
    if not isinstance(config, Mapping) or size_of_batches(getattr(dataloader, "dataloader", dataloader)) is not None:
        return None
    settings = cast("Mapping[str, object]", config)
    size, total = settings.get("train_micro_batch_size_per_gpu"), settings.get("train_batch_size")
    if isinstance(size, int):
        return size
    return total // get_world_size() if isinstance(total, int) else None


def complete_deepspeed_config(config: Any, resolved: ResolvedArguments) -> dict[str, Any] | None:
    """Complete DeepSpeed's configuration from the other arguments, or return `None` without one."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise TypeError(
            f"deepspeed_config={config!r} must be a dict of DeepSpeed's settings, such as "
            "{'zero_optimization': {'stage': 2}}, or {} for the defaults."
        )
    config = cast("Mapping[str, Any]", config)
    _refuse_methods(config, resolved.algorithms)
    _refuse_optimizers(resolved.optimizers)
    if find_spec("deepspeed") is None:
        raise MissingConditionalImportError("deepspeed", "deepspeed", distribution="composer-suite")
    data_spec = resolved.data_spec
    check_deepspeed_fits(
        parallelism_config=resolved.parallelism_config,
        has_train_dataloader=data_spec is not None,
        callbacks=resolved.callbacks,
    )
    from composer_algorithms.gradient_clipping import GradientClipping  # the only algorithm that DeepSpeed replaces

    assert data_spec is not None
    clippings = (each for each in resolved.algorithms if isinstance(each, GradientClipping))
    batch_size = size_of_batches(data_spec.dataloader)
    return parse_deepspeed_config(
        config,
        batch_size=batch_size,
        microbatch_size=resolved.microbatching.of_one_size(batch_size),
        world_size=get_world_size(),
        precision=resolved.precision,
        clip=next(((each.clipping_type, each.clipping_threshold) for each in clippings), None),
    )


def take_optimizers(strategy: Strategy, state: State, optimizers: Sequence[Optimizer]) -> None:
    """Check new optimizers for the prepared model, and place them."""
    # DeepSpeed's optimizer and SAM's share the groups of the one that they wrap, and nothing would wrap the new ones.
    wrappers = [each for each in state.optimizers if hasattr(each, "base_optimizer")]
    if wrappers or state.deepspeed_enabled:
        name = type((wrappers or state.optimizers)[0]).__name__
        raise ValueError(
            f"fit(optimizers=...) cannot replace {name}, which wraps the optimizer of the constructor. Make another "
            "Trainer with the new optimizers."
        )
    fsdp = as_fsdp(strategy)
    if fsdp is not None:
        fsdp.take_optimizers(optimizers)
    else:
        for optimizer in optimizers:
            state.device.optimizer_to_device(optimizer)


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
            f"{type(algorithm).__name__} cannot be combined with deepspeed_config['zero_optimization']['stage']=3: it "
            f"{because}. Use stage 2, train with parallelism_config={{'fsdp': {{}}}} instead of DeepSpeed, or leave "
            "the algorithm out."
        )


def refuse_second_average(optimizers: Sequence[Optimizer], algorithms: Iterable[Algorithm]) -> None:
    """Reject algorithms that exchange the model's weights next to an optimizer that does, such as schedule-free ones.

    The optimizer would compute its average from weights that are not its own.
    """
    names = [type(each).__name__ for each in optimizers if hasattr(each, "train")]
    if not names:
        return
    from composer_algorithms import EMA, SWA  # a slow import that few runs need

    for algorithm in algorithms:
        if isinstance(algorithm, EMA | SWA):
            raise ValueError(
                f"{type(algorithm).__name__} cannot be combined with {names[0]}: both exchange the weights of the "
                f"model for an average, and neither accounts for the other. Leave {type(algorithm).__name__} out."
            )


def _refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Reject several optimizers, and those that exchange the model's weights, of which DeepSpeed keeps flat copies."""
    if len(optimizers) != 1:
        raise ValueError(
            f"optimizers={[type(each).__name__ for each in optimizers]} cannot be combined with deepspeed_config: "
            "DeepSpeed's engine steps exactly one. Give one optimizer with several parameter groups, or train with "
            "DDP or FSDP."
        )
    if hasattr(optimizers[0], "train"):
        raise ValueError(
            f"{type(optimizers[0]).__name__} cannot be combined with deepspeed_config: its train() and eval() exchange "
            "the weights of the model, of which DeepSpeed's engine keeps copies. Train with DDP or FSDP."
        )


def share_seed(seed: int | None) -> int:
    """Return the seed of rank 0, which is random if none was given. Every rank must call this."""
    # Seeds go up to 2**32 - 1.
    drawn = torch.tensor([reproducibility.get_random_seed() if seed is None else seed], dtype=torch.int64)
    dist.broadcast(drawn, src=0)
    return int(drawn)


def seed_rank(rank_zero_seed: int, strategy: Strategy) -> None:
    """Seed this rank, so that dropout and augmentation differ between ranks, unless ranks share a batch."""
    # The ranks of one tensor parallel group share a batch, and therefore a seed.
    batch_rank, _ = share_of_data(strategy) or (get_global_rank(), 0)
    # The largest seed wraps around.
    reproducibility.seed_all((rank_zero_seed + batch_rank) % (reproducibility.MAX_SEED + 1))


def share_of_data(strategy: Strategy) -> tuple[int, int] | None:
    """Return the number of this rank's share of the data and of all shares, if ranks that split tensors share it."""
    fsdp = as_fsdp(strategy)
    return None if fsdp is None or fsdp.world_size == get_world_size() else (fsdp.batch_rank, fsdp.world_size)


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
    # Loggers and algorithms of ours neither stop the training nor act by the clock.
    others = [type(each).__module__ for each in (*state.callbacks, *state.algorithms)]
    may_stop = follows_clock or not all(
        name.startswith(("composer.loggers.", "composer_algorithms.")) for name in others
    )
    # Each fact that holds on no rank saves a collective per batch.
    ranks.begin(
        data_spec,
        listens=bool(state.callbacks) or follows_clock,
        reads_each_batch=may_stop or not all(map(is_progress_bar, state.callbacks)),
        may_stop=may_stop,
    )


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
        "deepspeed_config": resolved.deepspeed_config,
        "parallelism_config": None if (fsdp := as_fsdp(resolved.strategy)) is None else fsdp.plan.facts(),
        "CheckpointSaver": None if resolved.saver is None else resolved.saver.filename.filename,
    }
    facts: dict[str, Any] = {
        name: {key: str(part) for key, part in cast("Mapping[str, object]", value).items()}
        if isinstance(value, Mapping)
        else str(value)
        for name, value in values.items()
    }
    facts["model"] = agreement.describe_model(resolved.model)
    names = numbered([type(each).__name__ for each in resolved.optimizers])
    facts["optimizers"] = dict(zip(names, map(_settings, resolved.optimizers), strict=True))
    facts["algorithms"] = [_name(algorithm) for algorithm in resolved.algorithms]
    facts["schedulers"] = [_name(scheduler) for scheduler in resolved.schedule.schedulers]
    facts["eval_dataloader"] = _evaluator_facts(resolved.evaluators)
    facts["train_dataloader"] = None if resolved.data_spec is None else agreed_facts(resolved.data_spec.dataloader)
    compare(facts)


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


def unwrap_compiled(config: Mapping[str, Any] | None, model: Any) -> tuple[Any, Mapping[str, Any] | None, bool]:
    """Check the arguments of `torch.compile`, and unwrap a model that is already compiled.

    Returns:
        The model without its wrapper, the arguments to compile it in place with, or `None`, and whether it is compiled
        in either way.
    """
    if config is not None:
        try:
            # Checks the backend and all options at once; compilation itself would only start at the first call.
            torch.compile(lambda: None, **config)
        except Exception as error:
            raise (TypeError if isinstance(error, TypeError) else ValueError)(
                f"compile_config={config!r} is rejected by torch.compile: {error} Available backends are "
                f"{', '.join(cast(Any, torch.compiler).list_backends())}; {{}} takes the defaults."
            ) from error
    inner = getattr(model, "_orig_mod", None)  # the module inside a wrapper of `torch.compile`
    if not (isinstance(model, nn.Module) and isinstance(inner, nn.Module)):
        return model, config, config is not None
    ignored = "it trains as it was compiled" if config is None else f"compile_config={config!r} is ignored"
    _log.warning("`model` is already compiled with `torch.compile`; %s.", ignored)
    # PyTorch has no public way to run a module in place through an existing wrapper. `Module.compile` itself uses these
    # two attributes.
    untyped = cast(Any, inner)
    untyped._compiled_call_impl = vars(model)["dynamo_ctx"](untyped._call_impl)
    return inner, None, True


def uses_cuda_graphs(config: Mapping[str, Any] | None, model: Any) -> bool:
    """Return whether a part of a model runs in CUDA graphs, whose outputs and gradients each replay overwrites."""
    compiled: list[Any] = [*model.modules()] if isinstance(model, nn.Module) else []
    compiled += [] if config is None else [torch.compile(nn.Identity(), **config)]
    return any(map(_runs_in_cuda_graphs, compiled))


def _runs_in_cuda_graphs(module: Any) -> bool:
    """Return whether the backend of a compiled module makes CUDA graphs, for which PyTorch has no public name."""
    in_place = getattr(getattr(module, "_compiled_call_impl", None), "get_compiler_config", None)  # `module.compile()`
    context = getattr(module, "dynamo_ctx", None) or (in_place and getclosurevars(in_place).nonlocals.get("self"))
    backend: Any = getattr(context, "callback", None)
    while (backend := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        if getattr(backend, "__name__", "") == "cudagraphs":
            return True
    settings: Any = getattr(context, "compiler_config", None)  # of Inductor
    return bool(settings and settings.get("triton.cudagraphs"))


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

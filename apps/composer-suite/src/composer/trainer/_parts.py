"""What a Trainer is made of: its arguments, each checked and turned into the one form that is used inside.

Nothing is written, loaded or asked of other ranks before all of them have been checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer.trainer._argument_kinds import check_kinds, refuse_twice
from composer.trainer._arguments import (
    check_dist_timeout,
    check_members,
    check_model,
    check_seed,
    check_subset,
    choose_optimizers,
    choose_precision,
    choose_run_name,
)
from composer.trainer._checkpoints import Loading, Saving, check_uploaders, choose_saver
from composer.trainer._compilation import Compilation
from composer.trainer._destinations import choose_destinations
from composer.trainer._distributed import (
    check_same_on_ranks,
    choose_strategy,
    complete_deepspeed_config,
    share_run_name,
    size_for_deepspeed,
)
from composer.trainer._evaluators import make_evaluators
from composer.trainer._loss_scaling import make_scaler
from composer.trainer._microbatching import Microbatching, refuse_unrepeatable, size_of_batches
from composer.trainer._plan import check_data
from composer.trainer._profiling import bind_profiler, check_profiler
from composer.trainer._python_log import check_log_level
from composer.trainer._recomputation import check_recomputation
from composer.trainer._refusals import share_refusal
from composer.trainer._schedules import Schedule, check_optimizers_of, to_duration
from composer.trainer._sharding import facts_of, plan_sharding, read_parallelism, share_mesh
from composer.trainer.divergence import OnDivergence, to_policy
from composer_dist.devices import get_device
from composer_events.algorithm import Algorithm
from composer_events.batches import ensure_tuple
from composer_events.callback import Callback
from composer_events.state import State

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

    from composer.trainer._given import Given
    from composer_checkpoint.saver import CheckpointSaver
    from composer_dist.devices import Device, Precision
    from composer_dist.strategy import Strategy
    from composer_events.data_spec import DataSpec
    from composer_events.evaluator import Evaluator
    from composer_events.logger_destination import LoggerDestination
    from composer_fsdp import ParallelismConfig
    from composer_models import ComposerModel
    from composer_time import Time

__all__ = ["Parts", "check", "check_agreement", "clip_by_strategy", "make_state"]


@dataclass(frozen=True, slots=True)
class Spread:
    """How the model is spread over ranks, and what the settings of that are."""

    strategy: Strategy
    deepspeed_config: dict[str, Any] | None
    parallelism_config: ParallelismConfig | None
    recomputes: bool | str


@dataclass(frozen=True, slots=True)
class Parts:
    """The arguments after they have been checked."""

    model: ComposerModel
    compilation: Compilation
    device: Device
    precision: Precision
    spread: Spread
    scaler: GradScaler | None
    optimizers: list[Optimizer]
    algorithms: list[Algorithm]
    callbacks: list[Callback]
    destinations: list[LoggerDestination]
    microbatching: Microbatching
    data_spec: DataSpec | None
    evaluators: list[Evaluator]
    duration: Time[int] | None
    schedule: Schedule
    saver: CheckpointSaver | None
    loading: Loading
    run_name: str | None
    on_divergence: OnDivergence | None


def check(given: Given) -> Parts:
    """Return what the Trainer is made of. Every rank must call this, and `check_agreement` then.

    Raises:
        ValueError, TypeError, NotImplementedError: If an argument cannot be used, or contradicts another.
        RankDisagreementError: If so, and other ranks do not find the same.
    """
    try:
        return _check_alone(given)
    except Exception as refusal:
        share_refusal(refusal, given)
        raise


def _check_alone(given: Given) -> Parts:
    """Return what the Trainer is made of, as far as this rank knows."""
    check_log_level(given.python_log_level)
    check_kinds(given)
    compilation = Compilation.of(given.compile_config, given.model)
    model = check_model(compilation.model)
    device = get_device(given.device)
    precision = choose_precision(given.precision, device)
    schedule = Schedule.of(given.schedulers, given.scale_schedule_ratio, given.step_schedulers_every_batch)
    duration = to_duration(given.max_duration, "max_duration")
    schedule.scale(duration)  # which refuses to leave nothing of it
    algorithms = check_members("algorithms", given.algorithms, Algorithm)
    callbacks = check_members("callbacks", given.callbacks, Callback)
    destinations = choose_destinations(given)
    refuse_twice(loggers=destinations, callbacks=callbacks)
    refuse_twice(algorithms=algorithms)
    evaluators = make_evaluators(
        given.eval_dataloader, model, given.eval_interval, given.eval_subset_num_batches, device
    )
    check_subset("train_subset_num_batches", given.train_subset_num_batches)
    check_profiler(given.profiler, destinations)
    size = given.device_train_microbatch_size
    if size is None and given.grad_accum is None and given.train_dataloader is not None:
        size = size_for_deepspeed(given.deepspeed_config, given.train_dataloader)
    microbatching = Microbatching.of(size, given.grad_accum, device, profiler=given.profiler)
    data_spec = None if given.train_dataloader is None else check_data(given.train_dataloader, microbatching)
    check_seed(given.seed)
    check_dist_timeout(given.dist_timeout)
    on_divergence = to_policy(given.on_divergence, is_deepspeed=given.deepspeed_config is not None)
    optimizers = choose_optimizers(given.optimizers, model)
    check_optimizers_of(schedule.schedulers, optimizers)
    spread = _choose_spread(given, device, precision, microbatching, data_spec, algorithms, callbacks)
    scaler = None if spread.strategy.has_own_precision else make_scaler(precision, device, optimizers)
    run_name = choose_run_name(given.run_name)
    loading = Loading.of(given)
    # Last, since a saver for an address makes a folder for what it is going to send there.
    saver = _add_saver(given, loading, run_name, callbacks, destinations)
    return Parts(
        model=model,
        compilation=compilation,
        device=device,
        precision=precision,
        spread=spread,
        scaler=scaler,
        optimizers=optimizers,
        algorithms=algorithms,
        callbacks=callbacks,
        destinations=destinations,
        microbatching=microbatching,
        data_spec=data_spec,
        evaluators=evaluators,
        duration=duration,
        schedule=schedule,
        saver=saver,
        loading=loading,
        run_name=run_name,
        on_divergence=on_divergence,
    )


def _choose_spread(
    given: Given,
    device: Device,
    precision: Precision,
    microbatching: Microbatching,
    data_spec: DataSpec | None,
    algorithms: list[Algorithm],
    callbacks: list[Callback],
) -> Spread:
    """Return how the model is spread, by a strategy that can do what the other arguments ask for."""
    parallelism_config = read_parallelism(given)
    recomputes = check_recomputation(given.activation_checkpointing, parallelism_config)
    deepspeed_config = complete_deepspeed_config(
        given.deepspeed_config,
        parallelism_config=parallelism_config,
        data_spec=data_spec,
        microbatch_size=microbatching.of_one_size(size_of_batches(getattr(data_spec, "dataloader", None))),
        precision=precision,
        algorithms=algorithms,
        callbacks=callbacks,
    )
    strategy = choose_strategy(
        device,
        algorithms,
        given.ddp_sync_strategy,
        given.ddp_comm_hook,
        deepspeed_config,
        plan_sharding(parallelism_config, precision, is_auto=microbatching.is_auto),
    )
    refuse_unrepeatable(microbatching, strategy)
    return Spread(strategy, deepspeed_config, parallelism_config, recomputes)


def _add_saver(
    given: Given,
    loading: Loading,
    run_name: str | None,
    callbacks: list[Callback],
    destinations: Iterable[LoggerDestination],
) -> CheckpointSaver | None:
    """Return what saves checkpoints, if anything does, and see to it that it is among the callbacks."""
    saving = Saving.of(given)
    check_uploaders(saving, loading, [*destinations, *callbacks])
    saver = choose_saver(saving, loading, callbacks, run_name)
    if saver is not None and saver not in callbacks:
        callbacks.append(saver)
    return saver


def check_agreement(given: Given, parts: Parts) -> None:
    """Compare what every rank was given, before any of it is used. Every rank must call this.

    Raises:
        ValueError: On every rank, with what differs and where, or with what another rank refuses.
    """
    as_given = (
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
    check_same_on_ranks(
        parts.model,
        parts.optimizers,
        parts.algorithms,
        parts.schedule.schedulers,
        parts.evaluators,
        None if parts.data_spec is None else parts.data_spec.dataloader,
        {
            **{name: getattr(given, name) for name in as_given},
            "max_duration": parts.duration,
            "precision": parts.precision,
            "deepspeed_config": parts.spread.deepspeed_config,
            "parallelism_config": facts_of(parts.spread.strategy),
            "CheckpointSaver": None if parts.saver is None else parts.saver.filename.filename,
        },
    )


def clip_by_strategy(algorithms: Iterable[Algorithm], strategy: Strategy) -> None:
    """Let algorithms that clip the norm of the gradients do it as the strategy does, which has them in its parts."""
    for algorithm in algorithms:
        if hasattr(algorithm, "clip_grad_norm"):
            vars(algorithm)["clip_grad_norm"] = strategy.clip_grad_norm


def make_state(given: Given, parts: Parts, rank_zero_seed: int) -> State:
    """Return the state of a training that has not begun. Every rank must call this."""
    state = State(
        parts.model,
        rank_zero_seed=rank_zero_seed,
        run_name=parts.run_name,
        device=parts.device,
        device_train_microbatch_size=parts.microbatching.size,
        auto_microbatching=parts.microbatching.is_auto,
        grad_accum=parts.microbatching.count,
        precision=parts.precision,
        precision_config=given.precision_config,
        optimizers=parts.optimizers,
        scaler=parts.scaler,
        save_metrics=given.save_metrics,
        deepspeed_config=parts.spread.deepspeed_config,
        parallelism_config=parts.spread.parallelism_config,
        algorithms=parts.algorithms,
        callbacks=[*parts.destinations, *parts.callbacks],
    )
    bind_profiler(given.profiler, state, None if parts.saver in ensure_tuple(given.callbacks) else parts.saver)
    state.run_name = share_run_name(state.run_name)
    vars(state)["strategy"] = parts.spread.strategy  # for whoever saves: it has the whole weights
    share_mesh(parts.spread.strategy, state)
    return state

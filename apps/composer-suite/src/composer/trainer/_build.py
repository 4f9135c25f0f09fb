"""What a Trainer is made of: its arguments, each checked and turned into the one form that is used inside.

Nothing is written, loaded or asked of other ranks before all of them have been checked.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from composer.trainer._arguments import (
    WITHOUT_NEWER_NAME,
    check_dist_timeout,
    check_kinds,
    check_members,
    check_model,
    check_same_precision,
    check_seed,
    check_subset,
    choose_optimizers,
    choose_precision,
    choose_run_name,
    refuse_twice,
    to_plain,
    translate,
)
from composer.trainer._attachments import (
    bind_profiler,
    check_log_level,
    check_profiler,
    choose_destinations,
    log_arguments,
)
from composer.trainer._checkpoints import Loading, Saving, check_load_path, check_uploaders, choose_saver, load_at_start
from composer.trainer._data import Clock
from composer.trainer._divergence_guard import make_guard, takes_none
from composer.trainer._evaluation import Evaluation, check_metrics, make_evaluators, metrics_by_name, metrics_of
from composer.trainer._fit_settings import (
    Plan,
    Schedule,
    SchedulerSteps,
    check_data,
    check_optimizers_of,
    following_load,
    stay_stopped,
    to_duration,
)
from composer.trainer._microbatching import Microbatching, refuse_unrepeatable, size_of_batches
from composer.trainer._oom import AsGiven, UntilItFits
from composer.trainer._prediction import Prediction
from composer.trainer._rank_sync import Ranks, share_refusal
from composer.trainer._report import Report, log_run_facts
from composer.trainer._scaler import ClosureGradScaler, ShardedGradScaler
from composer.trainer._sharding import facts_of, plan_sharding, read_parallelism, share_mesh
from composer.trainer._shutdown import Preemption, take_signals
from composer.trainer._step import BatchTrainer, TrainMetrics, make_autocast, needs_closure
from composer.trainer._strategies import (
    Compilation,
    check_recomputation,
    check_same_on_ranks,
    choose_strategy,
    complete_deepspeed_config,
    recompute_activations,
    seed_rank,
    share_run_name,
    share_seed,
    size_for_deepspeed,
)
from composer.trainer.divergence import OnDivergence, to_policy
from composer.trainer.loop import FitEvaluation, Loop
from composer_checkpoint.data_position import DataPosition
from composer_dist import Precision, reproducibility, seed_context
from composer_dist.devices import Device, get_device
from composer_events.algorithm import Algorithm
from composer_events.batches import ensure_tuple
from composer_events.callback import Callback
from composer_events.engine import Engine
from composer_events.evaluator import Evaluator
from composer_events.event import Event
from composer_events.logger import Logger
from composer_events.state import State
from composer_time import Timestamp

if TYPE_CHECKING:
    from composer.trainer._data import TrainBatches
    from composer.trainer.divergence import Divergence
    from composer_checkpoint.saver import CheckpointSaver
    from composer_dist.strategy import Strategy
    from composer_events.data_spec import DataSpec
    from composer_events.logger_destination import LoggerDestination
    from composer_fsdp import ParallelismConfig
    from composer_models import ComposerModel
    from composer_time import Time

__all__ = [
    "Given",
    "take_fit_arguments",
    "check_scaler",
    "fit_scaler",
    "make_scaler",
    "Parts",
    "check",
    "check_agreement",
    "clip_by_strategy",
    "make_state",
    "Workings",
]


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


class Given(SimpleNamespace):
    """What a user gave to the constructor: each argument is an attribute, as it was typed but for NumPy's numbers.

    Args:
        arguments: What `locals()` says at the constructor's first line. Those in `older_names` are translated, with a
            `DeprecationWarning` each.
        defaults: What the constructor takes where nothing is given.

    Raises:
        TypeError: If `older_names` holds a name that never was one.
        ValueError: If an argument is given under an older and under today's name.
        RankDisagreementError: If so, and other ranks do not find the same.
    """

    def __init__(self, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        own = {name: to_plain(value) for name, value in arguments.items() if name not in ("self", "older_names")}
        super().__init__(**own, **WITHOUT_NEWER_NAME)
        self._defaults = {**defaults, **WITHOUT_NEWER_NAME}
        try:
            translate(self, arguments["older_names"])
        except Exception as refusal:
            share_refusal(refusal, self)
            raise

    def items(self) -> Iterator[tuple[str, Any]]:
        """Return the arguments with their names."""
        return ((name, value) for name, value in vars(self).items() if not name.startswith("_"))

    def is_default(self, name: str) -> bool:
        """Say whether an argument is what it is where nobody gives it."""
        return name in self._defaults and _is_same(getattr(self, name), self._defaults[name])


def _is_same(value: Any, default: Any) -> bool:
    # All defaults are plain; what is not plain, such as an array, may not compare at all.
    return value is default or (
        type(value) is type(default) and isinstance(value, (int, float, str)) and value == default
    )


def take_fit_arguments(workings: Workings, asked: SimpleNamespace) -> TrainBatches:
    """Check the arguments of `fit`, make them count, and return what is trained on.

    Args:
        workings: What they change. If one of them is refused, nothing is changed.
        asked: The arguments, by name.

    Raises:
        ValueError, TypeError: If one cannot be used, something needed is missing, or no time is left to train.
    """
    state, plan = workings.state, workings.plan
    if not state.optimizers:
        raise ValueError(
            "No optimizer was specified when constructing the Trainer, and the model has no parameters to train."
        )
    check_kinds(asked)
    longer = to_duration(asked.duration, "duration")
    schedule = Schedule.of(asked.schedulers, asked.scale_schedule_ratio, asked.step_schedulers_every_batch)
    evaluators = make_evaluators(
        asked.eval_dataloader,
        workings.model,
        asked.eval_interval,
        asked.eval_subset_num_batches,
        state.device,
        present=state.evaluators,
    )
    new_precision = choose_precision(asked.precision or state.precision, state.device)
    if workings.strategy.has_own_precision:
        check_same_precision(new_precision, state.precision)
    scaler = make_scaler(new_precision, state.device, state.optimizers)
    microbatching = None
    if asked.device_train_microbatch_size is not None or asked.grad_accum is not None:
        microbatching = Microbatching.of(
            asked.device_train_microbatch_size, asked.grad_accum, state.device, profiler=state.profiler
        )
        refuse_unrepeatable(microbatching, workings.strategy, is_deepspeed=state.deepspeed_enabled)
    stopped = None if longer is not None or asked.reset_time else state.stopped_duration
    with plan.undone_if_refused():
        if microbatching is not None:
            plan.microbatching = microbatching
        batches = plan.choose_batches(
            asked.train_dataloader, asked.train_dataloader_label, asked.train_subset_num_batches
        )
        if asked.reset_time:
            state.timestamp = Timestamp()
        if longer is not None:
            state.max_duration = state.timestamp.get(longer.unit) + longer
        plan.set_schedule(schedule, begins_now=True)
    stay_stopped(state, stopped)
    if asked.reset_time:
        plan.begin_again(batches)
    if asked.spin_dataloaders is not None:
        workings.position.spin = asked.spin_dataloaders
    if asked.eval_dataloader is not None:
        workings.set_evaluators(evaluators)
    if new_precision is not state.precision:
        state.precision, state.scaler = new_precision, scaler
    return batches


def make_scaler(precision: Precision, device: Device, optimizers: Iterable[Optimizer]) -> GradScaler | None:
    """Return what keeps small gradients from vanishing in 16-bit floating point; no other precision needs it.

    Raises:
        ValueError: If an optimizer evaluates the loss itself, which does not go together with the scaling.
    """
    if precision is not Precision.AMP_FP16:
        return None
    for optimizer in optimizers:
        if needs_closure(optimizer) and not takes_none(optimizer):
            raise ValueError(
                f"precision='amp_fp16' scales the loss, and {type(optimizer).__name__} evaluates it itself. Use "
                "precision='amp_bf16' or 'fp32', or another optimizer."
            )
    closures = any(needs_closure(optimizer) for optimizer in optimizers)
    return (ClosureGradScaler if closures else ShardedGradScaler)(device.torch_device.type)


def fit_scaler(scaler: GradScaler | None, optimizers: Iterable[Optimizer], device: Device) -> GradScaler | None:
    """Return a scaler, or one for closures in its place if an algorithm has put in an optimizer that calls them."""
    if type(scaler) in (GradScaler, ShardedGradScaler) and any(map(needs_closure, optimizers)):
        return ClosureGradScaler(device.torch_device.type)
    return scaler


def check_scaler(scaler: GradScaler | None, precision: Precision) -> None:
    """Refuse to train in 16-bit floating point without what keeps small gradients from vanishing.

    Raises:
        RuntimeError: If the scaler has been taken from the state, or disabled.
    """
    if precision is Precision.AMP_FP16 and (scaler is None or not scaler.is_enabled()):
        raise RuntimeError(
            f"Attempting to use grad scaling with precision={precision.value!r}, but scaler is not enabled: "
            f"state.scaler={scaler!r}. Leave the one that the Trainer made, or give precision='amp_bf16', which needs "
            "none."
        )


class Workings:
    """The objects of one Trainer, and what they are put together to.

    Every rank must make one.

    Args:
        given: The arguments.
        parts: The same, checked.

    Attributes:
        model: The user's model; `state.model` may wrap it.
        saver: What saves checkpoints, if anything does.
        state: Where training stands.
        engine: Runs the events.
        logger: Hands values to the loggers.
        strategy: How the model is spread.
        ranks: What the ranks tell each other.
        position: Where in the training data a checkpoint was written.
        plan: What is trained on, and how long.
        preemption: What is done about signals.
        until_it_fits: What `'auto'` microbatching has come to.
        divergences: The batches that `on_divergence` had to do something about.
        local_hparams: What `auto_log_hparams` logged.
    """

    def __init__(self, given: Given, parts: Parts) -> None:
        self.saver = parts.saver
        self._compilation = parts.compilation
        self._recomputes = parts.spread.recomputes
        self._eval_settings = given.eval_interval, given.eval_subset_num_batches
        self._by_tokens = given.accumulate_train_batch_on_tokens
        self._on_divergence = parts.on_divergence
        self.divergences: list[Divergence] = []
        self.strategy = parts.spread.strategy
        clip_by_strategy(parts.algorithms, self.strategy)
        self.ranks = Ranks(self.strategy)
        rank_zero_seed = share_seed(given.seed)
        if given.deterministic_mode:
            reproducibility.configure_deterministic_mode()
        seed_rank(rank_zero_seed, self.strategy)
        self.strategy.place(parts.model, parts.optimizers)
        self.state = make_state(given, parts, rank_zero_seed)
        check_load_path(parts.loading, self.state)
        self.position = DataPosition.attach(self.state, given.spin_dataloaders)
        self.logger = Logger(self.state, parts.destinations)
        self.engine = Engine(self.state, self.logger, given.algorithm_passes)
        take_signals(self.engine)
        self._take_model(parts.model)
        self.preemption = Preemption(self.state, self.logger, self.saver)
        self._clock = Clock()
        self.plan = Plan(self.state, self.engine, self.ranks, self.position, parts.microbatching)
        self.until_it_fits = UntilItFits(self.state, self.strategy)
        self.local_hparams: dict[str, Any] = {}

    def begin(self, given: Given, parts: Parts) -> None:
        """Go through the events from INIT to AFTER_LOAD, with what each of them finds ready."""
        state = self.state
        with self._drawing_alike():
            self.engine.run_event(Event.INIT)
        self._take_model(state.model)  # an algorithm may have put another in its place
        if given.auto_log_hparams:
            self.local_hparams = log_arguments(given, parts, state, self.logger)
        log_run_facts(state, self.logger)
        self._make_metrics(given, parts)
        if parts.data_spec is not None:
            self.plan.set_data(parts.data_spec, given.train_dataloader_label, given.train_subset_num_batches)
        state.max_duration = parts.duration
        self.plan.set_schedule(parts.schedule)
        if self.strategy.prepares_before_load:
            self._prepare_model()
        self.engine.run_event(Event.BEFORE_LOAD)
        state.scaler = fit_scaler(state.scaler, state.optimizers, state.device)
        with following_load(state):
            load_at_start(parts.loading, self.saver, state, self.logger, self.engine)
        self.engine.run_event(Event.AFTER_LOAD)
        state.scaler = fit_scaler(state.scaler, state.optimizers, state.device)
        if not self.strategy.prepares_before_load:
            if state.model is not self.model:  # an algorithm that the checkpoint names has put it there
                self._take_model(state.model)
                self._make_metrics(given, parts)
            self._prepare_model()
        self._compilation.apply(state.model)
        # Whatever algorithms drew so far, training draws the same numbers.
        seed_rank(state.rank_zero_seed, self.strategy)

    def _take_model(self, model: ComposerModel) -> None:
        self.model = model
        model.logger = self.logger
        self._train_metrics = TrainMetrics(self.state, model)
        self._report = Report(self.state, self.logger, self._train_metrics, self.ranks)

    def _make_metrics(self, given: Given, parts: Parts) -> None:
        state = self.state
        metrics = copy.deepcopy(metrics_by_name(self.model, is_train=True)) if given.compute_training_metrics else {}
        check_metrics(metrics)
        state.train_metrics = {name: state.device.module_to_device(metric) for name, metric in metrics.items()}
        self.set_evaluators(parts.evaluators)

    def _drawing_alike(self) -> AbstractContextManager[None]:
        """Return a context in which each rank draws the same, where no rank's layers are going to be handed to all."""
        return seed_context(self.state.rank_zero_seed) if self.strategy.prepares_before_load else nullcontext()

    def _prepare_model(self) -> None:
        state = self.state
        recompute_activations(state.model, self._recomputes)
        state.model, state.optimizers = self.strategy.prepare(state.model, list(state.optimizers))
        share_mesh(self.strategy, state)

    def set_evaluators(self, evaluators: Sequence[Evaluator]) -> None:
        """Evaluate with these from now on."""
        self.state.eval_metrics = {}
        self.add_metrics(evaluators)
        self.state.evaluators = list(evaluators)

    def add_metrics(self, evaluators: Iterable[Evaluator]) -> None:
        """Make the metrics of evaluators ready."""
        for evaluator in evaluators:
            self.state.eval_metrics[evaluator.label] = metrics_of(evaluator, self.model)

    def take_evaluators(self) -> None:
        """Make those ready that somebody has put into `state.evaluators`."""
        evaluators: list[Any] = self.state.evaluators
        for place, item in enumerate(evaluators):
            is_one = isinstance(item, Evaluator)
            if is_one and item.eval_interval is not None and item.label in self.state.eval_metrics:
                continue
            (made,) = make_evaluators(item, self.model, *self._eval_settings, self.state.device)
            if is_one:  # which stays the same object for who has put it there
                vars(item).update(vars(made))
            else:
                evaluators[place] = made
            self.add_metrics([made])

    def make_loop(self, batches: TrainBatches) -> Loop:
        """Return what trains on the batches."""
        state = self.state
        if not self.strategy.has_own_precision:
            check_scaler(state.scaler, state.precision)
        train_batch = BatchTrainer(
            state,
            self.engine,
            self.strategy,
            model=self.model,
            data_spec=batches.data_spec,
            autocast=make_autocast(self.state, self.strategy),
            metrics=self._train_metrics,
            create_graph=any(algorithm.backwards_create_graph for algorithm in state.algorithms),
            ranks=self.ranks,
            by_tokens=self._by_tokens,
            guard=make_guard(self._on_divergence, state, self.strategy, self.divergences),
            fitting=self.until_it_fits if state.auto_microbatching else AsGiven(state),
        )
        if self.saver is not None:
            self.saver.before_save = train_batch.check_weights
        return Loop(
            state=state,
            engine=self.engine,
            batches=batches,
            train_batch=train_batch,
            schedulers=SchedulerSteps(state, self.plan.steps_every_batch),
            evaluate=FitEvaluation(state, self.engine, self.make_evaluation(), self._clock, self.take_evaluators),
            report=self._report,
            clock=self._clock,
            ranks=self.ranks,
            preemption=self.preemption,
        )

    def make_evaluation(self) -> Evaluation:
        """Return what evaluates, in the precision of now."""
        return Evaluation(
            self.state,
            self.engine,
            self.logger,
            self.strategy,
            model=self.model,
            autocast=make_autocast(self.state, self.strategy),
        )

    def make_prediction(self) -> Prediction:
        """Return what runs the model over batches."""
        return Prediction(self.state, self.engine, self.strategy, make_autocast(self.state, self.strategy))

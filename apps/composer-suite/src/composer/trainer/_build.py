"""Construction of a Trainer: check the arguments, then create the objects that training needs.

Nothing is written, loaded or communicated before all arguments have been checked.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from composer.trainer import _attachments as attachments
from composer.trainer import _error_context as error_context
from composer.trainer import _strategies as strategies
from composer.trainer._arguments import (
    FitArguments,
    TrainerArguments,
    check_kinds,
    check_members,
    check_model,
    check_subset,
    choose_optimizers,
    choose_precision,
    choose_run_name,
    refuse_twice,
    refuse_unscalable,
)
from composer.trainer._divergence_guard import DivergenceGuard, takes_none
from composer.trainer._evaluation import (
    Evaluation,
    Prediction,
    check_metrics,
    complete_evaluator,
    make_evaluators,
    metrics_by_name,
)
from composer.trainer._fit_settings import (
    FitPlan,
    NothingLeftError,
    Schedule,
    SchedulerSteps,
    check_optimizers_of,
    following_load,
    log_nothing_left,
    stay_stopped,
    to_duration,
)
from composer.trainer._microbatching import HalveOnOom, Microbatching
from composer.trainer._progress import Clock, Progress, make_engine
from composer.trainer._rank_sync import Ranks, broadcast_error
from composer.trainer._regions import RecompilationMonitor, compile_model, split_config
from composer.trainer._report import Report, TrainMetrics, log_run_facts
from composer.trainer._scaler import ClosureGradScaler, ShardedGradScaler
from composer.trainer._shutdown import Preemption, close_engine, postponed, take_signals
from composer.trainer._step import BatchTrainer, make_autocast, needs_closure, takes_closure
from composer.trainer.divergence import to_policy
from composer.trainer.loop import FitEvaluation, Loop
from composer_dist import Precision, dist, get_world_size, reproducibility, seed_context
from composer_dist.devices import Device, get_device
from composer_dist.env import check_environment
from composer_events.algorithm import Algorithm
from composer_events.arguments import check_seconds
from composer_events.batches import ensure_tuple
from composer_events.callback import Callback
from composer_events.data_position import DataPosition
from composer_events.data_spec import ensure_data_spec
from composer_events.evaluator import Evaluator
from composer_events.event import Event
from composer_events.logger import Logger
from composer_events.state import State
from composer_time import Timestamp

if TYPE_CHECKING:
    from composer.trainer._data import TrainBatches
    from composer.trainer.divergence import Divergence
    from composer_algorithms.gradient_clipping import GradientClipping
    from composer_models import ComposerModel


class ResolvedArguments:
    """The arguments of this rank after validation, each in the form that is used internally."""

    def __init__(self, arguments: TrainerArguments) -> None:
        attachments.set_log_level(arguments.python_log_level)
        check_kinds(arguments)
        config, self.regions = arguments.compile_config, None
        if isinstance(config, Mapping):  # anything else is refused below
            self.regions, config = split_config(config)
        given, self.compile_config, self.is_compiled = strategies.unwrap_compiled(config, arguments.model)
        self.has_cuda_graphs = strategies.uses_cuda_graphs(self.compile_config, arguments.model)
        self.model = model = check_model(given)
        self.device = device = get_device(arguments.device)
        has_deepspeed = arguments.deepspeed_config is not None
        self.precision = choose_precision(arguments.precision, device, model, has_deepspeed=has_deepspeed)
        self.schedule = Schedule.of(
            arguments.schedulers, arguments.scale_schedule_ratio, arguments.step_schedulers_every_batch
        )
        self.duration = to_duration(arguments.max_duration, "max_duration")
        self.schedule.scale(self.duration)  # raises if the scaled duration is 0
        self.algorithms: list[Algorithm] = check_members("algorithms", arguments.algorithms, Algorithm)
        self.callbacks: list[Callback] = check_members("callbacks", arguments.callbacks, Callback)
        self.destinations = attachments.choose_destinations(arguments)
        refuse_twice(loggers=self.destinations, callbacks=self.callbacks)
        refuse_twice(algorithms=self.algorithms)
        self.evaluators = make_evaluators(
            arguments.eval_dataloader, model, arguments.eval_interval, arguments.eval_subset_num_batches, device
        )
        check_subset("train_subset_num_batches", arguments.train_subset_num_batches)
        attachments.check_profiler(arguments.profiler, self.destinations)
        size = arguments.device_train_microbatch_size
        if size is None and arguments.grad_accum is None and arguments.train_dataloader is not None:
            size = strategies.size_for_deepspeed(arguments.deepspeed_config, arguments.train_dataloader)
        self.microbatching = Microbatching.of(size, arguments.grad_accum, device, profiler=arguments.profiler)
        self.data_spec = None
        if arguments.train_dataloader is not None:
            self.data_spec = ensure_data_spec(arguments.train_dataloader)
            self.microbatching.resolve(self.data_spec)
        check_seconds(dist_timeout=arguments.dist_timeout)
        self.on_divergence = to_policy(arguments.on_divergence, is_deepspeed=has_deepspeed)
        self.optimizers = choose_optimizers(arguments.optimizers, model)
        check_optimizers_of(self.schedule.schedulers, self.optimizers)
        takes_closure(self.optimizers)  # raises if one of several does
        strategies.refuse_second_average(self.optimizers, self.algorithms)
        self.parallelism_config = strategies.read_parallelism(arguments)
        self.recomputes = strategies.check_recomputation(arguments.activation_checkpointing, self.parallelism_config)
        self.deepspeed_config = strategies.complete_deepspeed_config(arguments.deepspeed_config, self)
        self.strategy = strategies.choose_strategy(arguments, self)
        strategies.refuse_unrepeatable(self.microbatching, self.strategy)
        # DeepSpeed scales the loss itself.
        own = self.strategy.has_own_precision
        self.scaler = None if own else make_scaler(self.precision, device, self.optimizers)
        if self.scaler is not None and self.data_spec is not None:  # others may only evaluate
            refuse_unscalable(self.optimizers)
        self.run_name = choose_run_name(arguments.run_name)
        attachments.check_uploaders(arguments, [*self.destinations, *self.callbacks])
        # Last, since a saver for a URI creates a local folder for its uploads.
        self.saver = attachments.choose_saver(arguments, self.callbacks, self.run_name)
        if self.saver is not None and self.saver not in self.callbacks:
            self.callbacks.append(self.saver)


def build(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Runtime:
    """Check the arguments, and create all objects that training needs. Every rank must call this."""
    try:
        arguments = TrainerArguments.of(given, defaults)
        resolved = ResolvedArguments(arguments)
    except Exception as refusal:
        broadcast_error(refusal, given["device"], given["dist_timeout"])
        raise
    check_environment(os.environ)
    if get_world_size() > 1 or resolved.strategy.prepares_before_load:  # sharding needs a group in any case
        dist.initialize_dist(resolved.device, arguments.dist_timeout)  # all ranks block here for each other
    strategies.check_agreement(arguments, resolved)
    runtime = Runtime(arguments, resolved)
    try:
        runtime.begin(arguments, resolved)
    except BaseException:
        close_engine(runtime.engine)  # there will be no Trainer that a user could close
        raise
    return runtime


def make_state(arguments: TrainerArguments, resolved: ResolvedArguments, rank_zero_seed: int) -> State:
    """Return the state before training. Every rank must call this."""
    state = State(
        resolved.model,
        rank_zero_seed=rank_zero_seed,
        run_name=resolved.run_name,
        device=resolved.device,
        device_train_microbatch_size=resolved.microbatching.size,
        auto_microbatching=resolved.microbatching.is_auto,
        grad_accum=resolved.microbatching.count,
        precision=resolved.precision,
        precision_config=arguments.precision_config,
        optimizers=resolved.optimizers,
        scaler=resolved.scaler,
        save_metrics=arguments.save_metrics,
        deepspeed_config=resolved.deepspeed_config,
        parallelism_config=resolved.parallelism_config,
        algorithms=resolved.algorithms,
        callbacks=[*resolved.destinations, *resolved.callbacks],
    )
    attachments.bind_profiler(
        arguments.profiler, state, None if resolved.saver in ensure_tuple(arguments.callbacks) else resolved.saver
    )
    # A generated name is random, so all ranks take that of rank 0.
    names = [state.run_name]
    dist.broadcast_object_list(names, src=0)
    state.run_name = names[0]
    state.strategy = resolved.strategy  # checkpoints get the whole weights from the strategy
    strategies.share_mesh(resolved.strategy, state)  # the state and its checkpoints must use the mesh of the strategy
    return state


def take_fit_arguments(runtime: Runtime, asked: FitArguments) -> TrainBatches:
    """Check and apply the arguments of `fit`, and return the batches to train on."""
    state, plan = runtime.state, runtime.plan
    optimizers = _optimizers_of_fit(runtime, asked)
    check_kinds(asked)
    longer = to_duration(asked.duration, "duration")
    schedule = Schedule.of(asked.schedulers, asked.scale_schedule_ratio, asked.step_schedulers_every_batch)
    evaluators = make_evaluators(
        asked.eval_dataloader, runtime.model, asked.eval_interval, asked.eval_subset_num_batches, state.device
    )
    new_precision, scaler = _precision_of_fit(runtime, asked, optimizers)
    size, count = asked.device_train_microbatch_size, asked.grad_accum
    microbatching = plan.settings.microbatching
    if (size, count) != (None, None):
        microbatching = Microbatching.of(size, count, state.device, profiler=state.profiler)
        strategies.refuse_unrepeatable(microbatching, runtime.strategy, is_deepspeed=state.deepspeed_enabled)
    # A loaded run that was stopped stays stopped unless this call gives it a new length. Read first: an assignment to
    # `max_duration` resets it.
    stopped = None if longer is not None or asked.reset_time else state.stopped_duration
    with plan.unchanged_on_error():
        plan.settings = replace(plan.settings, microbatching=microbatching)
        batches = plan.choose_batches(
            asked.train_dataloader, asked.train_dataloader_label, asked.train_subset_num_batches
        )
        if asked.reset_time:
            state.timestamp = Timestamp()
        if longer is not None:
            state.max_duration = state.timestamp.get(longer.unit) + longer
        if asked.optimizers is not None:
            plan.set_optimizers(optimizers, schedule)
        plan.set_schedule(schedule, begins_now=True)
    stay_stopped(state, stopped)
    if asked.reset_time:
        # Not undone by the context above, so it must follow everything that can fail.
        batches.restart()
        runtime.position.forget()
    if asked.spin_dataloaders is not None:
        runtime.position.spin = asked.spin_dataloaders
    if asked.eval_dataloader is not None:
        runtime.set_evaluators(evaluators)
    if new_precision is not state.precision:
        state.precision, state.scaler = new_precision, scaler
    runtime.fit_scaler()
    return batches


def _optimizers_of_fit(runtime: Runtime, asked: FitArguments) -> Sequence[Optimizer]:
    state = runtime.state
    if asked.optimizers is not None:
        optimizers = choose_optimizers(asked.optimizers, runtime.model)
        takes_closure(optimizers)  # raises if one of several does
        strategies.refuse_second_average(optimizers, state.algorithms)
        strategies.take_optimizers(runtime.strategy, state, optimizers)
        return optimizers
    if not state.optimizers:
        raise ValueError(
            "No optimizer was specified when constructing the Trainer, and the model has no parameters to train."
        )
    return state.optimizers


def _precision_of_fit(
    runtime: Runtime, asked: FitArguments, optimizers: Sequence[Optimizer]
) -> tuple[Precision, GradScaler | None]:
    state, has_own = runtime.state, runtime.strategy.has_own_precision
    precision = state.precision
    if asked.precision is not None:
        precision = choose_precision(asked.precision, state.device, runtime.model, has_deepspeed=has_own)
    if has_own and precision is not state.precision:
        raise ValueError(
            f"precision={precision.value!r} cannot be set by fit(): DeepSpeed's engine was made for "
            f"{state.precision.value!r}. Give it to the constructor."
        )
    scaler = make_scaler(precision, state.device, optimizers)
    if scaler is not None and not has_own:
        refuse_unscalable(optimizers)
    return precision, scaler


def make_scaler(precision: Precision, device: Device, optimizers: Sequence[Optimizer]) -> GradScaler | None:
    if precision is not Precision.AMP_FP16:
        return None
    for optimizer in optimizers:
        if needs_closure(optimizer) and not takes_none(optimizer):
            raise ValueError(
                f"precision='amp_fp16' scales the loss, and {type(optimizer).__name__} evaluates it itself. Use "
                "precision='amp_bf16' or 'fp32', or another optimizer."
            )
    return (ClosureGradScaler if takes_closure(optimizers) else ShardedGradScaler)(device.torch_device.type)


class Runtime:
    """The objects of one Trainer. Every rank must create one.

    Attributes:
        model: The user's model; `state.model` may wrap it.
        saver: The checkpoint saver, if any.
        position: The position in the training data, which checkpoints store.
        halve_on_oom: The state of `'auto'` microbatching, from the first fit with it on.
        divergences: The batches for which `on_divergence` acted.
        local_hparams: The hyperparameters that `auto_log_hparams` logged.
        has_failed: Whether this rank has raised an error, so that it must not wait for other ranks.
    """

    def __init__(self, arguments: TrainerArguments, resolved: ResolvedArguments) -> None:
        self.saver = resolved.saver
        self._compile_config, self._regions = resolved.compile_config, resolved.regions
        self._has_cuda_graphs = resolved.has_cuda_graphs
        self._recomputes = resolved.recomputes
        self._eval_settings = arguments.eval_interval, arguments.eval_subset_num_batches
        self._by_tokens = arguments.accumulate_train_batch_on_tokens
        self._on_divergence = resolved.on_divergence
        self.divergences: list[Divergence] = []
        self.strategy = resolved.strategy
        for algorithm in resolved.algorithms:
            if hasattr(algorithm, "clip_grad_norm"):  # the strategy's function handles sharded gradients
                cast("GradientClipping", algorithm).clip_grad_norm = self.strategy.clip_grad_norm
        self.ranks = Ranks(self.strategy)
        rank_zero_seed = strategies.share_seed(arguments.seed)
        if arguments.deterministic_mode:
            reproducibility.configure_deterministic_mode()
        strategies.seed_rank(rank_zero_seed, self.strategy)
        self.strategy.place(resolved.model, resolved.optimizers)
        self.state = make_state(arguments, resolved, rank_zero_seed)
        if arguments.load_path is not None and arguments.load_object_store is None and not arguments.autoresume:
            from composer_checkpoint.loader import check_local_path  # a slow import that not every run needs

            check_local_path(os.fspath(arguments.load_path), self.state)
        self.position = DataPosition.attach(self.state, arguments.spin_dataloaders)
        self.position.share = strategies.share_of_data(self.strategy)
        self.logger = Logger(self.state, resolved.destinations)
        self.engine = make_engine(self.state, self.logger, arguments.algorithm_passes)
        take_signals(self.engine)
        self._take_model(resolved.model)
        self.preemption = Preemption(self.state, self.logger, self.saver)
        self.plan = FitPlan(self.state, self.engine, self.ranks, self.position, resolved.microbatching)
        self.halve_on_oom: HalveOnOom | None = None
        self.local_hparams: dict[str, Any] = {}
        self.has_failed = False

    def begin(self, arguments: TrainerArguments, resolved: ResolvedArguments) -> None:
        """Run the events from INIT to AFTER_LOAD, and prepare what each of them needs."""
        state = self.state
        # The same seed on all ranks, if the weights of rank 0 are not broadcast later.
        with seed_context(state.rank_zero_seed) if self.strategy.prepares_before_load else nullcontext():
            self.engine.run_event(Event.INIT)
        self._take_model(state.model)  # an algorithm may have replaced it
        if arguments.auto_log_hparams:
            self.local_hparams = attachments.log_arguments(arguments, resolved, state, self.logger)
        log_run_facts(state, self.logger)
        self._make_metrics(arguments, resolved)
        if resolved.data_spec is not None:
            self.plan.set_data(resolved.data_spec, arguments.train_dataloader_label, arguments.train_subset_num_batches)
        state.max_duration = resolved.duration
        self.plan.set_schedule(resolved.schedule)
        if self.strategy.prepares_before_load:
            self._prepare_model()
        self.engine.run_event(Event.BEFORE_LOAD)
        # Before and after the load: an algorithm may have replaced the optimizer on an event or while loading, and the
        # scaler must have its final class before its saved state is loaded.
        self.fit_scaler()
        self.position.change_batch_size = self.plan.change_batch_size
        with following_load(state):
            attachments.load_at_start(arguments, self.saver, state, self.logger, self.engine)
        self.position.change_batch_size = None  # later, batches may have been read
        self.engine.run_event(Event.AFTER_LOAD)
        self.fit_scaler()
        if not self.strategy.prepares_before_load:
            if state.model is not self.model:  # replaced by an algorithm that the checkpoint required
                self._take_model(state.model)
                self._make_metrics(arguments, resolved)
            self._prepare_model()
        # Last: algorithms, the load and the strategy may still have replaced the model or its modules.
        if self._compile_config is not None:
            # Compiled code does not check that a module has no hooks: code of an earlier model of the same class would
            # run without the hooks of this one.
            if any(module._forward_hooks or module._forward_pre_hooks for module in state.model.modules()):  # pyright: ignore[reportPrivateUsage]
                torch.compiler.reset()
            compile_model(state.model, self._regions, self._compile_config)
        # Training must not depend on how many random numbers algorithms have drawn so far.
        strategies.seed_rank(state.rank_zero_seed, self.strategy)

    def fit_scaler(self) -> None:
        state = self.state
        # By exact type, so that a scaler class of the user is kept.
        if takes_closure(state.optimizers) and type(state.scaler) in (GradScaler, ShardedGradScaler):
            state.scaler = ClosureGradScaler(state.device.torch_device.type)

    def _take_model(self, model: ComposerModel) -> None:
        self.model = model
        model.logger = self.logger
        self._train_metrics = TrainMetrics(self.state, model)
        recompilations = None if self._compile_config is None else RecompilationMonitor()
        self._report = Report(self.state, self.logger, self._train_metrics, self.ranks, recompilations)

    def _make_metrics(self, arguments: TrainerArguments, resolved: ResolvedArguments) -> None:
        state = self.state
        metrics: Mapping[str, Any] = {}
        if arguments.compute_training_metrics:
            # A copy, because get_metrics may return the same objects for training and evaluation.
            metrics = copy.deepcopy(metrics_by_name(self.model, is_train=True))
        check_metrics(metrics)
        state.train_metrics = {name: state.device.module_to_device(metric) for name, metric in metrics.items()}
        self.set_evaluators(resolved.evaluators)

    def _prepare_model(self) -> None:
        state = self.state
        strategies.recompute_activations(state.model, self._recomputes)
        state.model, state.optimizers = self.strategy.prepare(state.model, list(state.optimizers))
        strategies.share_mesh(self.strategy, state)

    def set_evaluators(self, evaluators: Sequence[Evaluator]) -> None:
        self.state.eval_metrics = {}
        self.add_metrics(evaluators)
        self.state.evaluators = list(evaluators)

    def add_metrics(self, evaluators: Iterable[Evaluator]) -> None:
        for evaluator in evaluators:
            selected = evaluator.select_metrics(metrics_by_name(self.model, is_train=False))
            self.state.eval_metrics[evaluator.label] = copy.deepcopy(selected)

    def take_evaluators(self) -> None:
        """Prepare evaluators that a user or callback has added to `state.evaluators`."""
        evaluators = cast("list[Any]", self.state.evaluators)  # users may append plain dataloaders
        for place, item in enumerate(evaluators):
            is_one = isinstance(item, Evaluator)
            if is_one and item.eval_interval is not None and item.label in self.state.eval_metrics:
                continue
            if is_one:  # changed in place, because the caller may hold a reference
                complete_evaluator(item, self.model, *self._eval_settings, self.state.device)
            else:
                (evaluators[place],) = make_evaluators(item, self.model, *self._eval_settings, self.state.device)
            self.add_metrics([evaluators[place]])

    def fit(self, arguments: FitArguments) -> None:
        """Train; see `Trainer.fit`. Every rank must call this."""
        try:
            batches = take_fit_arguments(self, arguments)
        except NothingLeftError:
            if self.saver is None or not self.saver.resumes:
                raise
            log_nothing_left(self.state)  # a finished run that was started again
            return
        # The failure is recorded before a signal ends the process: the launcher sends one when a rank fails.
        with self.preemption.watched(), self.recording_failure():
            strategies.begin_fit(self.state, self.ranks, batches.data_spec, self.strategy)
            self.make_loop(batches).fit()
        # The gradients of the last batch would occupy memory until the next fit.
        for optimizer in self.state.optimizers:
            self.strategy.zero_grad(optimizer)
        attachments.show_end(self.state)

    @contextmanager
    def recording_failure(self) -> Generator[None]:
        """Return a context that names the stage in an error, records it, and remembers that this rank has failed."""
        error_context.forget_failures()
        collects_garbage = gc.isenabled()
        try:
            yield
        except BaseException as error:
            if collects_garbage:  # a callback may have turned it off for the fit that ends here
                gc.enable()
            with postponed():  # a second signal must not interrupt the record
                self.has_failed = True
                error_context.name_stage(error, self.state)
                attachments.record_failure(error, self.state)
            raise

    def close(self) -> None:
        """Close every callback and logger. The ranks wait for each other, unless this one has failed."""
        try:
            close_engine(self.engine)
        finally:
            self.plan.close()
        if not self.has_failed:
            dist.barrier()

    def make_loop(self, batches: TrainBatches) -> Loop:
        state = self.state
        scaler, is_scaled = state.scaler, state.precision is Precision.AMP_FP16 and not self.strategy.has_own_precision
        if is_scaled and (scaler is None or not scaler.is_enabled()):  # removed from the state, or disabled
            raise RuntimeError(
                f"Attempting to use grad scaling with precision={state.precision.value!r}, but scaler is not enabled: "
                f"state.scaler={scaler!r}. Leave the one that the Trainer made, or give precision='amp_bf16', which "
                "needs none."
            )
        if state.auto_microbatching and self.halve_on_oom is None:
            self.halve_on_oom = HalveOnOom(state, self.strategy)
        policy = self._on_divergence
        guard = None
        if policy is not None:
            closure = takes_closure(state.optimizers)
            guard = DivergenceGuard(policy, state, self.strategy, self.divergences, evaluates_loss=closure)
        state.pending_steps = guard.settle if guard is not None and guard.must_settle else None
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
            guard=guard,
            has_cuda_graphs=self._has_cuda_graphs,
            oom=self.halve_on_oom if state.auto_microbatching else None,
        )
        if self.saver is not None:
            # Assigned for each fit, because the guard of an earlier one refers to its scaler and results.
            self.saver.before_save = None if guard is None else guard.check_weights
        clock = Clock()
        return Loop(
            state=state,
            engine=self.engine,
            batches=batches,
            train_batch=train_batch,
            schedulers=SchedulerSteps(state, self.plan.settings.steps_every_batch),
            evaluate=FitEvaluation(state, self.engine, self.make_evaluation(), clock, self.take_evaluators),
            report=self._report,
            progress=Progress(state, self.engine, self.ranks, clock),
            preemption=self.preemption,
        )

    def make_evaluation(self) -> Evaluation:
        return Evaluation(
            self.state,
            self.engine,
            self.logger,
            self.strategy,
            model=self.model,
            autocast=make_autocast(self.state, self.strategy),
        )

    def make_prediction(self) -> Prediction:
        return Prediction(self.state, self.engine, self.strategy, make_autocast(self.state, self.strategy))

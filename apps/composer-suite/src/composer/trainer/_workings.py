"""What a Trainer works with: made of its arguments, and put together anew for each call."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from composer.trainer._autocast import make_autocast
from composer.trainer._batch import BatchTrainer
from composer.trainer._checkpoints import check_load_path, load
from composer.trainer._clock import Clock
from composer.trainer._distributed import seed_rank, share_seed
from composer.trainer._divergence_guard import make_guard
from composer.trainer._evaluation import Evaluation
from composer.trainer._evaluators import check_metrics, make_evaluators, metrics_by_name, metrics_of
from composer.trainer._fit_evaluation import FitEvaluation
from composer.trainer._fitting import AsGiven, UntilItFits
from composer.trainer._hparams import log_arguments
from composer.trainer._loss_scaling import check_scaler, fit_scaler
from composer.trainer._parts import clip_by_strategy, make_state
from composer.trainer._plan import Plan
from composer.trainer._prediction import Prediction
from composer.trainer._preemption import Preemption
from composer.trainer._ranks import Ranks
from composer.trainer._recomputation import recompute_activations
from composer.trainer._report import Report, log_run_facts
from composer.trainer._schedules import SchedulerSteps, following_load
from composer.trainer._sharding import share_mesh
from composer.trainer._termination import take_signals
from composer.trainer._train_metrics import TrainMetrics
from composer.trainer.loop import Loop
from composer_checkpoint.data_position import DataPosition
from composer_dist import reproducibility, seed_context
from composer_events.engine import Engine
from composer_events.evaluator import Evaluator
from composer_events.event import Event
from composer_events.logger import Logger

if TYPE_CHECKING:
    from composer.trainer._data import TrainBatches
    from composer.trainer._given import Given
    from composer.trainer._parts import Parts
    from composer.trainer.divergence import Divergence
    from composer_models import ComposerModel

__all__ = ["Workings"]


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
            load(parts.loading, self.saver, state, self.logger, self.engine)
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

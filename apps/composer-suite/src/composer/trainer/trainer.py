"""The Trainer: model, data, algorithms, callbacks and loggers in; a trained and evaluated model out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TextIO

from composer.trainer import _arguments as arguments
from composer.trainer import _checkpoints as checkpoints
from composer.trainer import _distributed as distributed
from composer.trainer import _schedules as schedules
from composer.trainer._autocast import make_autocast
from composer.trainer._batch import BatchTrainer
from composer.trainer._clock import Clock
from composer.trainer._evaluation import Evaluation, FitEvaluation
from composer.trainer._evaluators import make_evaluators, metrics_of, warn_of_known_labels
from composer.trainer._plan import Plan, check_data
from composer.trainer._ranks import Ranks
from composer.trainer._report import Report, log_run_facts
from composer.trainer._schedules import Schedule
from composer.trainer._train_metrics import TrainMetrics
from composer.trainer.loop import Loop
from composer.utils import checkpoint
from composer_checkpoint.data_position import DataPosition
from composer_dist import dist, reproducibility
from composer_dist.devices import get_device
from composer_dist.initialize import DEFAULT_TIMEOUT_S
from composer_events.algorithm import Algorithm
from composer_events.callback import Callback
from composer_events.engine import Engine
from composer_events.event import Event
from composer_events.logger import Logger
from composer_events.state import State
from composer_time import Timestamp

if TYPE_CHECKING:
    from os import PathLike
    from types import TracebackType

    from torch.optim import Optimizer

    from composer.trainer._data import TrainBatches
    from composer_checkpoint.ignore_keys import IgnoreKeys
    from composer_dist.ddp import DDPSyncStrategy
    from composer_dist.devices import Device
    from composer_dist.precision import Precision
    from composer_events.evaluator import Evaluator
    from composer_events.logger_destination import LoggerDestination
    from composer_models import ComposerModel
    from composer_time import Time


class Trainer:
    """Trains and evaluates a model.

    Everything that happens is an event that `algorithms` may act on and `callbacks` may watch; the loop itself is in
    `composer.trainer.loop`. Use it as a context manager, or call `close` at the end, so that loggers can finish.

    Args:
        model: What is trained; any `nn.Module` becomes one through `ComposerModel.from_module(module, loss_fn)`.
        train_dataloader: Batches to train on: any iterable, a `DataSpec`, or a dict of a DataSpec's arguments. It may
            be given to `fit` instead.
        train_dataloader_label: Names the training metrics in the log.
        train_subset_num_batches: At most so many batches an epoch; -1 for all.
        spin_dataloaders: After loading a checkpoint from the middle of an epoch, whether to read and drop what was
            trained on, so that the very same batches follow.
        max_duration: How long to train: `'10ep'`, `'500ba'`, `Time(...)`; a bare number counts epochs.
        eval_dataloader: Batches to evaluate on: as `train_dataloader`, an `Evaluator`, or several of one kind.
        eval_interval: How often evaluators that do not say so themselves run during `fit`; 0 for never.
        eval_subset_num_batches: At most so many batches an evaluation; -1 for all.
        algorithms: One or several methods that change the training.
        algorithm_passes: Own rules for the order of algorithms; see `Engine`.
        optimizers: One optimizer. Without it `DecoupledSGDW(model.parameters(), lr=0.1)`, with a warning.
        schedulers: PyTorch schedulers, Composer schedulers, or functions of the state.
        scale_schedule_ratio: Stretches `max_duration` and all schedules; 0.5 trains half as long.
        step_schedulers_every_batch: By default every epoch if one of them is PyTorch's, else every batch.
        callbacks: One or several listeners.
        loggers: One or several destinations of the log.
        run_name: Names the run; made up by default, also from `COMPOSER_RUN_NAME` or `RUN_NAME`.
        progress_bar: Whether to show one.
        console_stream: Where to: `'stderr'`, `'stdout'` or a text stream.
        load_path: A checkpoint to go on from: a path or an address, in which `{run_name}` and `{rank}` are filled in.
        load_object_store: Where `load_path` is: an `ObjectStore`, or a logger that can download.
        load_weights_only: Load the model, and nothing else.
        load_strict_model_weights: Whether weights that are missing or too many are an error, with `load_weights_only`
            or a sharded checkpoint.
        load_progress_bar: Whether to show the progress of a download.
        load_ignore_keys: Patterns of what not to load, such as `'state/optimizers/*'`, or a function that deletes from
            the checkpoint's dict.
        load_exclude_algorithms: Class names of algorithms not to apply, although the saved weights depend on them.
        load_trusted: Let the checkpoint run code of its own while it is loaded. Only for files of old releases, from
            whom you trust.
        save_folder: Where to save checkpoints; a path or an address. `None` saves none, unless a `CheckpointSaver` is
            among the callbacks, which comes before all arguments that begin with `save_`.
        save_filename: What each is called there, with placeholders for run, ranks and time.
        save_latest_filename: What the link to the latest is called; `None` for no link.
        save_overwrite: Whether to replace later checkpoints of another run.
        save_interval: How often: epochs, a time, or a function of the state and the event. Also at the end.
        save_weights_only: Save only the model and what describes it.
        save_ignore_keys: What to leave out, as `load_ignore_keys`.
        save_num_checkpoints_to_keep: How many of the newest stay on the disk; -1 for all.
        save_keep: What else stays: `{'last': 3, 'every': '10ep', 'best': ('metrics/eval/MulticlassAccuracy', 'max',
            2)}`, or some of these.
        save_metrics: Whether checkpoints have the metrics, too.
        save_async: Whether training goes on while a checkpoint is written.
        save_async_policy: What a save does while the one before is being written: `'wait'` for it, or `'skip'`.
        autoresume: Go on from the newest whole checkpoint in `save_folder`, if there is any, whatever `load_path` says.
            Needs a `run_name`.
        device: `'cpu'`, `'gpu'`, ... or a `Device`; by default the best of this machine.
        precision: `'fp32'`, `'amp_bf16'` or `'amp_fp16'`.
        precision_config: Settings of an 8-bit precision.
        device_train_microbatch_size: How many samples go through the model at once; gradients add up over the rest
            of the batch. By default the dataloader's `batch_size`.
        accumulate_train_batch_on_tokens: Whether a microbatch counts by the tokens that enter its loss instead of its
            samples.
        seed: Seeds Python, NumPy and PyTorch, in [0, 2**32). Drawn by default. Rank r goes on with `seed + r`.
        deterministic_mode: Whether PyTorch must compute the same numbers every time, at the price of speed.
        dist_timeout: Seconds until a rank gives up waiting for another.
        ddp_sync_strategy: When the ranks average the gradients of several microbatches; see `DDPSyncStrategy`.
        ddp_comm_hook: How gradients travel between the ranks: `'bf16_compress'`, `'fp16_compress'` or `'powersgd'`. As
            they are by default.
        deepspeed_config: Settings of DeepSpeed, which then trains the model. What follows from the other arguments
            may be left out; `{}` leaves out everything.
        **older_names: Arguments of older releases: `load_strict`, `load_chunk_size`, `save_artifact_name` and
            `save_latest_artifact_name`.

    Attributes:
        state: Where training stands; what algorithms and callbacks see.
        engine: Runs the events.
        logger: Hands values to the loggers.
        strategy: How the model is spread over ranks; it has the whole weights, whatever a rank keeps of them.

    Raises:
        ValueError, TypeError: If an argument cannot be used; before anything is written.

    Example:
        >>> import torch
        >>> from composer.models import ComposerModel
        >>> data = [(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))]
        >>> model = ComposerModel.from_module(torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy)
        >>> with Trainer(
        ...     model=model, train_dataloader=data, device_train_microbatch_size=4, max_duration='3ba', device='cpu',
        ...     optimizers=torch.optim.SGD(model.parameters(), lr=0.1), progress_bar=False,
        ... ) as trainer:
        ...     trainer.fit()
        ...     print(trainer.state.timestamp.batch)
        3ba
    """

    def __init__(
        self,
        model: ComposerModel,
        *,
        train_dataloader: Any = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int = -1,
        spin_dataloaders: bool = True,
        max_duration: int | str | Time[int] | None = None,
        eval_dataloader: Any = None,
        eval_interval: Any = 1,
        eval_subset_num_batches: int = -1,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        algorithm_passes: Any = None,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        loggers: LoggerDestination | Sequence[LoggerDestination] | None = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        console_stream: str | TextIO = "stderr",
        load_path: str | PathLike[str] | None = None,
        load_object_store: Any = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_progress_bar: bool = True,
        load_ignore_keys: IgnoreKeys | None = None,
        load_exclude_algorithms: Sequence[str] | None = None,
        load_trusted: bool = False,
        save_folder: str | PathLike[str] | None = None,
        save_filename: str = "ep{epoch}-ba{batch}-rank{rank}.pt",
        save_latest_filename: str | None = "latest-rank{rank}.pt",
        save_overwrite: bool = False,
        save_interval: int | str | Time[int] | Callable[[State, Event], bool] = "1ep",
        save_weights_only: bool = False,
        save_ignore_keys: IgnoreKeys | None = None,
        save_num_checkpoints_to_keep: int = -1,
        save_keep: Mapping[str, Any] | None = None,
        save_metrics: bool = False,
        save_async: bool = False,
        save_async_policy: Literal["wait", "skip"] = "wait",
        autoresume: bool = False,
        device: str | Device | None = None,
        precision: str | Precision | None = None,
        precision_config: dict[str, Any] | None = None,
        device_train_microbatch_size: int | float | None = None,
        accumulate_train_batch_on_tokens: bool = False,
        seed: int | None = None,
        deterministic_mode: bool = False,
        dist_timeout: float = DEFAULT_TIMEOUT_S,
        ddp_sync_strategy: str | DDPSyncStrategy | None = None,
        ddp_comm_hook: str | None = None,
        deepspeed_config: dict[str, Any] | None = None,
        **older_names: Any,
    ) -> None:
        saving = checkpoints.Saving(
            folder=save_folder,
            filename=save_filename,
            latest_filename=save_latest_filename,
            overwrite=save_overwrite,
            interval=save_interval,
            weights_only=save_weights_only,
            ignore_keys=save_ignore_keys,
            num_checkpoints_to_keep=save_num_checkpoints_to_keep,
            keep=save_keep,
            is_async=save_async,
            async_policy=save_async_policy,
        )
        loading = checkpoints.Loading(
            path=load_path,
            object_store=load_object_store,
            weights_only=load_weights_only,
            is_strict=load_strict_model_weights,
            progress_bar=load_progress_bar,
            ignore_keys=load_ignore_keys,
            exclude_algorithms=load_exclude_algorithms,
            is_trusted=load_trusted,
            autoresume=autoresume,
        )
        saving, loading = checkpoints.take_older_names(saving, loading, older_names)
        self._model = arguments.check_model(model)
        device = get_device(device)
        precision = arguments.choose_precision(precision, device)
        schedule = Schedule.of(schedulers, scale_schedule_ratio, step_schedulers_every_batch)
        duration = schedules.to_duration(max_duration, "max_duration")
        algorithms = arguments.check_members("algorithms", algorithms, Algorithm)
        callbacks = arguments.check_members("callbacks", callbacks, Callback)
        run_name = arguments.choose_run_name(run_name)
        self._saver = checkpoints.choose_saver(saving, loading, callbacks, run_name)
        if self._saver is not None and self._saver not in callbacks:
            callbacks.append(self._saver)
        destinations = arguments.choose_destinations(loggers, progress_bar, console_stream)
        evaluators = make_evaluators(eval_dataloader, self._model, eval_interval, eval_subset_num_batches)
        self._by_tokens = accumulate_train_batch_on_tokens
        arguments.check_subset("train_subset_num_batches", train_subset_num_batches)
        data_spec = None if train_dataloader is None else check_data(train_dataloader, device_train_microbatch_size)
        arguments.check_seed(seed)
        optimizers = arguments.choose_optimizers(optimizers, self._model)
        deepspeed_config = distributed.complete_deepspeed_config(
            deepspeed_config,
            data_spec=data_spec,
            microbatch_size=device_train_microbatch_size,
            precision=precision,
            algorithms=algorithms,
            callbacks=callbacks,
        )
        self.strategy = distributed.choose_strategy(
            device, algorithms, ddp_sync_strategy, ddp_comm_hook, deepspeed_config
        )
        scaler = None if self.strategy.has_own_precision else arguments.make_scaler(precision, device, optimizers)

        distributed.join(device, dist_timeout, is_needed=deepspeed_config is not None)
        distributed.check_agreement(
            self._model,
            optimizers,
            algorithms,
            schedule.schedulers,
            evaluators,
            None if data_spec is None else data_spec.dataloader,
            {
                "seed": seed,
                "max_duration": duration,
                "precision": precision,
                "device_train_microbatch_size": device_train_microbatch_size,
                "train_subset_num_batches": train_subset_num_batches,
                "scale_schedule_ratio": scale_schedule_ratio,
                "step_schedulers_every_batch": step_schedulers_every_batch,
                "accumulate_train_batch_on_tokens": accumulate_train_batch_on_tokens,
                "ddp_sync_strategy": ddp_sync_strategy,
                "ddp_comm_hook": ddp_comm_hook,
                "deepspeed_config": deepspeed_config,
                "load_path": load_path,
                "autoresume": autoresume,
                "CheckpointSaver": None if self._saver is None else self._saver.filename.filename,
            },
        )
        self._ranks = Ranks(self.strategy)
        if deterministic_mode:
            reproducibility.configure_deterministic_mode()
        rank_zero_seed = distributed.share_seed(seed)
        distributed.seed_rank(rank_zero_seed)
        self.strategy.place(self._model, optimizers)
        self.state = State(
            self._model,
            rank_zero_seed=rank_zero_seed,
            run_name=run_name,
            device=device,
            device_train_microbatch_size=device_train_microbatch_size,
            precision=precision,
            precision_config=precision_config,
            optimizers=optimizers,
            scaler=scaler,
            save_metrics=save_metrics,
            deepspeed_config=deepspeed_config,
            algorithms=algorithms,
            callbacks=[*destinations, *callbacks],
        )
        self.state.run_name = distributed.share_run_name(self.state.run_name)
        vars(self.state)["strategy"] = self.strategy  # for whoever saves: it has the whole weights
        self._position = DataPosition.attach(self.state, spin_dataloaders)
        self.logger = Logger(self.state, destinations)
        self.engine = Engine(self.state, self.logger, algorithm_passes)
        self._model.logger = self.logger
        self._train_metrics = TrainMetrics(self.state, self._model)
        self._report = Report(self.state, self.logger, self._train_metrics, self.strategy, self._ranks)
        self._clock = Clock()
        self._has_failed = False
        self._plan = Plan(self.state, self.engine, self._ranks, self._position, device_train_microbatch_size)

        try:
            self.engine.run_event(Event.INIT)
            log_run_facts(self.state, self.logger, arguments.version())
            metrics = copy.deepcopy(self._model.get_metrics(is_train=True))
            self.state.train_metrics = {name: device.module_to_device(metric) for name, metric in metrics.items()}
            self._set_evaluators(evaluators)
            if data_spec is not None:
                self._plan.set_data(data_spec, train_dataloader_label, train_subset_num_batches)
            self.state.max_duration = duration
            self._plan.set_schedule(schedule)
            if self.strategy.prepares_before_load:
                self._prepare_model()
            self.engine.run_event(Event.BEFORE_LOAD)
            checkpoints.load(loading, self._saver, self.state, self.logger, self.engine)
            self.engine.run_event(Event.AFTER_LOAD)
            if not self.strategy.prepares_before_load:
                self._prepare_model()
        except BaseException:
            self.engine.close()  # nobody else can: there will be no Trainer to close
            raise
        # Whatever algorithms drew so far, training draws the same numbers.
        distributed.seed_rank(self.state.rank_zero_seed)

    def fit(
        self,
        *,
        train_dataloader: Any = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int | None = None,
        spin_dataloaders: bool | None = None,
        duration: int | str | Time[int] | None = None,
        reset_time: bool = False,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Any = None,
        eval_subset_num_batches: int = -1,
        eval_interval: Any = 1,
        device_train_microbatch_size: int | float | None = None,
        precision: str | Precision | None = None,
    ) -> None:
        """Train until `max_duration`, or for another `duration`.

        Arguments named as in the constructor replace what was given there.

        Args:
            train_dataloader: See the constructor.
            train_dataloader_label: See the constructor.
            train_subset_num_batches: See the constructor.
            spin_dataloaders: See the constructor.
            duration: Train so much longer, counted from now, whatever `max_duration` was.
            reset_time: Set all counters to 0 first; weights, optimizer and PyTorch schedulers stay as they are.
            schedulers: See the constructor.
            scale_schedule_ratio: See the constructor.
            step_schedulers_every_batch: See the constructor.
            eval_dataloader: See the constructor.
            eval_subset_num_batches: See the constructor.
            eval_interval: See the constructor.
            device_train_microbatch_size: See the constructor.
            precision: See the constructor.

        Raises:
            ValueError: If something needed is missing (optimizer, data, duration), or no time is left to train.
        """
        state = self.state
        if not state.optimizers:
            raise ValueError(
                "No optimizer was specified when constructing the Trainer, and the model has no parameters to train."
            )
        longer = schedules.to_duration(duration, "duration")
        schedule = Schedule.of(schedulers, scale_schedule_ratio, step_schedulers_every_batch)
        evaluators = make_evaluators(eval_dataloader, self._model, eval_interval, eval_subset_num_batches)
        new_precision = arguments.choose_precision(precision or state.precision, state.device)
        if self.strategy.has_own_precision:
            arguments.check_same_precision(new_precision, state.precision)
        scaler = arguments.make_scaler(new_precision, state.device, state.optimizers)
        with self._plan.undone_if_refused():
            if device_train_microbatch_size is not None:
                self._plan.microbatch_size = device_train_microbatch_size
            batches = self._plan.choose_batches(train_dataloader, train_dataloader_label, train_subset_num_batches)
            if reset_time:
                state.timestamp = Timestamp()
            if longer is not None:
                state.max_duration = state.timestamp.get(longer.unit) + longer
            self._plan.set_schedule(schedule)
            schedules.check_time_left(state)
        if reset_time:
            self._plan.begin_again(batches)
        if spin_dataloaders is not None:
            self._position.spin = spin_dataloaders
        if eval_dataloader is not None:
            self._set_evaluators(evaluators)
        if new_precision is not state.precision:
            state.precision, state.scaler = new_precision, scaler
        with self._failing_alone():
            distributed.begin_fit(state, self._ranks, batches.data_spec)
            self._make_loop(batches).fit()
        for optimizer in state.optimizers:
            self.strategy.zero_grad(optimizer)

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate now; the results are on `state.eval_metrics` and in the log.

        Args:
            eval_dataloader: What to evaluate on, as in the constructor, for this call only. By default all of the
                Trainer's evaluators.
            subset_num_batches: At most so many batches; -1 for what each evaluator says itself.

        Raises:
            ValueError: If there is nothing to evaluate on.
        """
        state = self.state
        evaluators: list[Evaluator] = list(state.evaluators)
        if eval_dataloader is not None:
            evaluators = make_evaluators(eval_dataloader, self._model, 1, subset_num_batches)
            warn_of_known_labels(evaluators, state.evaluators)
            self._add_metrics(evaluators)
        if not evaluators:
            raise ValueError("eval_dataloader must be provided to either Trainer init() or eval().")
        self.engine.run_event(Event.EVAL_STANDALONE_START)
        state.evaluators = [*state.evaluators, *(e for e in evaluators if e not in state.evaluators)]
        try:
            evaluation = self._make_evaluation()
            with self._failing_alone():
                for evaluator in evaluators:
                    subset = evaluator.subset_num_batches if subset_num_batches == -1 else subset_num_batches
                    evaluation.run(evaluator, state.eval_metrics[evaluator.label], -1 if subset is None else subset)
        finally:
            if eval_dataloader is not None:
                state.evaluators = [e for e in state.evaluators if e not in evaluators]
        self.engine.run_event(Event.EVAL_STANDALONE_END)

    @property
    def saved_checkpoints(self) -> list[str]:
        """The paths of the checkpoints that this run has saved and not deleted, oldest first."""
        return [] if self._saver is None else self._saver.saved_checkpoints

    def save_checkpoint(
        self, name: str = "ep{epoch}-ba{batch}-rank{rank}", *, weights_only: bool = False
    ) -> str | None:
        """Save a checkpoint now. Every rank must call this.

        Args:
            name: Where to, with the placeholders of `save_filename`.
            weights_only: Save only the model and what describes it.

        Returns:
            The path, on the ranks that wrote.
        """
        return checkpoint.save_checkpoint(state=self.state, filename=name, weights_only=weights_only)

    def save_checkpoint_to_save_folder(self) -> None:
        """Save a checkpoint now as those that are saved at intervals. Every rank must call this.

        Raises:
            ValueError: If there is no `save_folder` and no `CheckpointSaver`.
        """
        if self._saver is None:
            raise ValueError(
                "There is no folder to save to: the Trainer has neither a save_folder nor a CheckpointSaver. Give "
                "save_folder, or call save_checkpoint(name)."
            )
        self._saver.save(self.state, self.logger)

    def close(self) -> None:
        """Let every callback and logger finish; afterwards the Trainer cannot be used.

        The ranks wait for each other, unless this one has failed and leaves the others behind.
        """
        self.engine.close()
        if not self._has_failed:
            dist.barrier()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_failed |= error is not None
        self.close()

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Remember that this rank has failed, so that it does not wait for others that may wait for it."""
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise

    def _prepare_model(self) -> None:
        state = self.state
        state.model, state.optimizers = self.strategy.prepare(state.model, list(state.optimizers))

    def _set_evaluators(self, evaluators: Sequence[Evaluator]) -> None:
        self.state.eval_metrics = {}
        self._add_metrics(evaluators)
        self.state.evaluators = list(evaluators)

    def _add_metrics(self, evaluators: Iterable[Evaluator]) -> None:
        for evaluator in evaluators:
            self.state.eval_metrics[evaluator.label] = metrics_of(evaluator, self._model)

    def _make_loop(self, batches: TrainBatches) -> Loop:
        state = self.state
        train_batch = BatchTrainer(
            state,
            self.engine,
            self.strategy,
            model=self._model,
            data_spec=batches.data_spec,
            autocast=make_autocast(self.state, self.strategy),
            metrics=self._train_metrics,
            create_graph=any(algorithm.backwards_create_graph for algorithm in state.algorithms),
            ranks=self._ranks,
            by_tokens=self._by_tokens,
        )
        return Loop(
            state=state,
            engine=self.engine,
            batches=batches,
            train_batch=train_batch,
            schedulers=schedules.SchedulerSteps(state, self._plan.steps_every_batch),
            evaluate=FitEvaluation(state, self.engine, self._make_evaluation(), self._clock),
            report=self._report,
            clock=self._clock,
            ranks=self._ranks,
        )

    def _make_evaluation(self) -> Evaluation:
        return Evaluation(
            self.state,
            self.engine,
            self.logger,
            self.strategy,
            model=self._model,
            autocast=make_autocast(self.state, self.strategy),
        )

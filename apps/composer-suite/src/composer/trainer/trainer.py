"""The Trainer: model, data, algorithms, callbacks and loggers in; a trained and evaluated model out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from torch.optim import Optimizer

from composer.trainer._arguments import FitArguments, TrainerArguments, naming_unknown
from composer.trainer._build import build
from composer.trainer._evaluation import evaluate_alone
from composer.trainer._prediction import check_prediction, export_model
from composer.trainer.divergence import OnDivergence
from composer.utils import checkpoint
from composer_checkpoint.ignore_keys import IgnoreKeys
from composer_dist.ddp import DDPSyncStrategy
from composer_dist.devices import Device, Precision
from composer_dist.initialize import DEFAULT_TIMEOUT_S
from composer_events.algorithm import Algorithm
from composer_events.callback import Callback
from composer_events.event import Event
from composer_events.logger_destination import LoggerDestination
from composer_events.state import State
from composer_fsdp import ParallelismConfig
from composer_models import ComposerModel
from composer_time import Time

if TYPE_CHECKING:
    from composer.profiler.profiler import Profiler
    from composer.utils.inference import ExportFormat, Transform
else:  # for typing.get_type_hints: few profile or export
    ExportFormat = Profiler = Transform = Any


class Trainer:
    """Trains and evaluates a model.

    Everything that happens is an event that `algorithms` may act on and `callbacks` may watch; the loop itself is in
    `composer.trainer.loop`. Use it as a context manager, or call `close` at the end, so that loggers can finish.

    Args:
        model: What is trained; any `nn.Module` becomes one through `ComposerModel.from_module(module, loss_fn)`.
        train_dataloader: Batches to train on: any iterable, a `DataSpec`, or a dict of a DataSpec's arguments. It may
            be given to `fit` instead.
        train_dataloader_label: What `state.dataloader_label` is during training, and progress bars show. Training
            metrics are logged as `metrics/train/...` in any case; stoppers watch them only where it is `'train'`.
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
        log_to_console: Whether to write metrics as lines of text, which suits a file better than a bar does. `None`
            where there is no progress bar.
        console_stream: Where to: `'stderr'`, `'stdout'` or a text stream.
        console_log_interval: How often: epochs (`'1ep'`) or batches (`'10ba'`).
        log_traces: Whether bar and console show, too, which algorithms acted.
        auto_log_hparams: Whether to log these arguments, reduced to names and numbers, as hyperparameters.
        profiler: Records where the time goes; see `composer.profiler.Profiler`.
        python_log_level: From which level on Python's logging shows what Composer's loggers say, such as `'info'`. By
            default it is left as the application has it.
        load_path: A checkpoint to go on from: a path or an address, in which `{run_name}` and `{rank}` are filled in.
        load_object_store: Where `load_path` is: an `ObjectStore`, or a logger that can download.
        load_weights_only: Load the model, and nothing else.
        load_strict_model_weights: Whether weights that are missing or too many are an error, with `load_weights_only`
            or a sharded checkpoint.
        load_progress_bar: Whether to show the progress of a download.
        load_ignore_keys: Patterns of what not to load, such as `'state/optimizers/*'`, or a function that deletes from
            the checkpoint's dict. With a weight, what optimizers and algorithms keep of it is left
            out. An optimizer keeps its own values of what is left out of it, such as `'state/optimizers/*/lr'`.
        load_exclude_algorithms: Class names of algorithms not to apply, although the saved weights depend on them.
        load_trusted: Let the checkpoint run code of its own while it is loaded. Only for files of old releases, from
            whom you trust.
        load_restart_epoch: Begin the epoch again inside which the checkpoint was saved, with whatever data there is
            now. Without it, the middle of an epoch of other data is refused.
        save_folder: Where to save checkpoints; a path or an address. `None` saves none, unless a `CheckpointSaver` is
            among the callbacks, which comes before all arguments that begin with `save_`.
        save_filename: What each is called there, with placeholders for run, ranks and time.
        save_latest_filename: What the link to the latest is called; `None` for no link.
        save_overwrite: Whether to replace later checkpoints of another run.
        save_interval: How often, and at the end: epochs, a time, or a function of the state and the event; 0 for never.
        save_weights_only: Save only the model and what describes it.
        save_ignore_keys: What to leave out, as `load_ignore_keys`.
        save_num_checkpoints_to_keep: How many of the newest stay on the disk; -1 for all.
        save_keep: What else stays: `{'last': 3, 'every': '10ep', 'best': ('metrics/eval/MulticlassAccuracy', 'max',
            2)}`, or some of these; see `composer_checkpoint.RetentionPolicy.from_setting`.
        save_metrics: Whether checkpoints have the metrics, too.
        save_async: Whether training goes on while a checkpoint is written.
        save_async_policy: What a save does while the one before is being written: `'wait'` for it, or `'skip'`.
        autoresume: Go on from the newest whole checkpoint in `save_folder`, if there is any, whatever `load_path` says.
            Needs a `run_name`. Of a run that was stopped, as by `EarlyStopper`, `fit` trains no more, unless
            `max_duration` is another one.
        device: `'cpu'`, `'gpu'`, ... or a `Device`; by default the best of this machine.
        precision: `'fp32'`, `'amp_bf16'` or `'amp_fp16'`.
        precision_config: Settings of an 8-bit precision.
        device_train_microbatch_size: How many samples go through the model at once; gradients add up over the rest
            of the batch. By default the dataloader's `batch_size`. `'auto'` begins with that, and halves it on all
            ranks whenever a GPU runs out of memory, for the same batch and all that follow.
        grad_accum: The older way to say so: into how many microbatches each batch is cut, or `'auto'`.
        accumulate_train_batch_on_tokens: Whether a microbatch counts by the tokens that enter its loss instead of its
            samples. Where that is not all of them, a `DataSpec` has to count the `loss_generating` ones.
        seed: Seeds Python, NumPy and PyTorch, in [0, 2**32). Drawn by default. Rank r goes on with `seed + r`.
        deterministic_mode: Whether PyTorch must compute the same numbers every time, at the price of speed.
        dist_timeout: Seconds until a rank gives up waiting for another.
        ddp_sync_strategy: When the ranks average the gradients of several microbatches; see `DDPSyncStrategy`.
        ddp_comm_hook: How gradients travel between the ranks: `'bf16_compress'`, `'fp16_compress'` or `'powersgd'`. As
            they are by default.
        deepspeed_config: Settings of DeepSpeed, which then trains the model. What follows from the other arguments
            may be left out; `{}` leaves out everything.
        parallelism_config: How the model is sharded over the ranks: `{'fsdp': {...}}` with the settings of
            `composer.utils.FSDPConfig`, and with `'tp'` beside it those of tensor parallelism.
        compile_config: Arguments of `torch.compile`, by which the model then runs; `{}` for the defaults. The names of
            its weights stay what they are. A model that `torch.compile` returned is taken as it is.
        activation_checkpointing: Whether modules compute their activations again in the backward pass instead of
            keeping them; `'selective'` keeps the results of matrix products that nothing changes in place. Which
            modules, the `activation_checkpointing_fn(module)` of the model's child says, or their
            `_activation_checkpointing`. For a model that is sharded it is a setting of `parallelism_config`.
        on_divergence: What to do about a batch whose loss or gradient is not finite, before the optimizer steps and on
            all ranks alike: `'raise'` a `DivergenceError`, `'skip'` the step, `'rollback'` to a copy of the weights in
            memory, an `OnDivergence` for more (also about losses that jump), or `None` for nothing.
        **older_names: Arguments as older releases called them, each with a `DeprecationWarning` that says what to
            write today: `load_strict`, `load_chunk_size`, `save_artifact_name`, `save_latest_artifact_name`,
            `grad_clip_norm`, `compute_training_metrics`, `console_log_level`, `fsdp_config`, `fsdp_auto_wrap` and
            `load_fsdp_monolith_rank0_only`.

    Attributes:
        state: Where training stands; what algorithms and callbacks see.
        engine: Runs the events.
        logger: Hands values to the loggers.
        divergences: The batches that `on_divergence` had to do something about.
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
        log_to_console: bool | None = False,
        console_stream: str | TextIO = "stderr",
        console_log_interval: int | str | Time[int] = "1ba",
        log_traces: bool = False,
        auto_log_hparams: bool = False,
        profiler: Profiler | None = None,
        python_log_level: str | None = None,
        load_path: str | PathLike[str] | None = None,
        load_object_store: Any = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_progress_bar: bool = True,
        load_ignore_keys: IgnoreKeys | None = None,
        load_exclude_algorithms: Sequence[str] | None = None,
        load_trusted: bool = False,
        load_restart_epoch: bool = False,
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
        device_train_microbatch_size: int | float | Literal["auto"] | None = None,
        grad_accum: int | Literal["auto"] | None = None,
        accumulate_train_batch_on_tokens: bool = False,
        seed: int | None = None,
        deterministic_mode: bool = False,
        dist_timeout: float = DEFAULT_TIMEOUT_S,
        ddp_sync_strategy: str | DDPSyncStrategy | None = None,
        ddp_comm_hook: str | None = None,
        deepspeed_config: dict[str, Any] | None = None,
        parallelism_config: Mapping[str, Any] | ParallelismConfig | None = None,
        compile_config: dict[str, Any] | None = None,
        activation_checkpointing: bool | Literal["selective"] = False,
        on_divergence: str | OnDivergence | None = "raise",
        **older_names: Any,
    ) -> None:
        arguments = TrainerArguments.of(locals(), Trainer.__init__.__kwdefaults__ or {})
        self._runtime = build(arguments)
        self.state = self._runtime.state
        self.engine = self._runtime.engine
        self.logger = self._runtime.logger
        self.strategy = self._runtime.strategy
        self.divergences = self._runtime.divergences
        self.python_log_level = arguments.python_log_level
        self.auto_log_hparams = arguments.auto_log_hparams
        if arguments.auto_log_hparams:
            self.local_hparams = self._runtime.local_hparams

    @naming_unknown(
        max_duration="It is for the constructor; fit(duration=...) trains so much longer, counted from now.",
        grad_clip_norm="Give the constructor algorithms=GradientClipping('norm', ...).",
    )
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
        device_train_microbatch_size: int | float | Literal["auto"] | None = None,
        precision: str | Precision | None = None,
        grad_accum: int | Literal["auto"] | None = None,
    ) -> None:
        """Train until `max_duration`, or for another `duration`. Every rank must call this.

        Arguments named as in the constructor replace what was given there.

        SIGTERM, SIGUSR1 and SIGINT, sent to any rank, end the training on all ranks after the same batch, with a
        checkpoint if there is a `save_folder`. Handlers of before are called too, and are back afterwards; a second
        SIGINT is a `KeyboardInterrupt` at once.

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
            grad_accum: See the constructor.

        Raises:
            ValueError: If something needed is missing (optimizer, data, duration), or no time is left to train.
            SystemExit: After a signal: with status 130 for SIGINT, else 143.
        """
        self._runtime.fit(FitArguments.of(locals()))

    @naming_unknown()
    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate now; the results are on `state.eval_metrics` and in the log.

        Args:
            eval_dataloader: What to evaluate on, as in the constructor, for this call only. By default all of the
                Trainer's evaluators.
            subset_num_batches: At most so many batches; -1 for what each evaluator says itself.

        Raises:
            ValueError: If there is nothing to evaluate on.
        """
        with self._runtime.recording_failure():
            evaluate_alone(self._runtime, eval_dataloader, subset_num_batches)

    @naming_unknown()
    def predict(
        self,
        dataloader: Any,
        subset_num_batches: int = -1,
        *,
        return_outputs: bool = True,
        device_predict_microbatch_size: int | None = None,
    ) -> list[Any]:
        """Run the model over batches, in evaluation mode and without gradients. Every rank must call this.

        Where the ranks have unequally many batches, prediction ends with the shortest.

        Args:
            dataloader: Any iterable of batches, a `DataSpec`, or a dict of a DataSpec's arguments.
            subset_num_batches: At most so many batches; -1 for all.
            return_outputs: Whether to keep the outputs. Without, a callback can take them from `state.outputs`.
            device_predict_microbatch_size: How many samples go through the model at once. By default whole batches.

        Returns:
            What the model returned for each batch of this rank, on the CPU; nothing without `return_outputs`. What a
            DistributedSampler repeats, so that every rank has as many samples, is left out, with the batch that holds
            nothing else.

        Raises:
            ValueError, TypeError: If an argument cannot be used.
        """
        data_spec = check_prediction(dataloader, subset_num_batches, device_predict_microbatch_size, return_outputs)
        prediction = self._runtime.make_prediction()
        with self._runtime.recording_failure():
            return prediction.run(data_spec, subset_num_batches, device_predict_microbatch_size, return_outputs)

    def export_for_inference(
        self,
        save_format: str | ExportFormat,
        save_path: str,
        save_object_store: Any = None,
        sample_input: Any = None,
        transforms: Transform | Sequence[Transform] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        """Write the model so that it can be run elsewhere; the model itself stays as it is. Rank 0 writes.

        Args:
            save_format: `'torchscript'`, `'onnx'`, `'export'` (a `.pt2` archive of `torch.export`) or `'safetensors'`
                (the weights alone).
            save_path: A path or an address; a name in `save_object_store`, or in the logger that keeps files, if there
                is one.
            save_object_store: An `ObjectStore`.
            sample_input: A batch. By default the latest one, where the format needs one.
            transforms: Functions that change the copy that is written, such as `quantize_dynamic`.
            input_names: For `'onnx'`. By default the keys of a dict, else `input`.
            output_names: For `'onnx'`. By default `output`.

        Raises:
            ValueError: If the model is sharded, or a sample is needed and there is none.
            RuntimeError: If the model cannot be written in this format.
        """
        export_model(
            self.state,
            self.logger,
            save_format,
            save_path,
            save_object_store=save_object_store,
            sample_input=sample_input,
            transforms=transforms,
            input_names=input_names,
            output_names=output_names,
        )

    @property
    def cumulative_alloc_retries(self) -> int:
        """How often the GPU's memory had to be tidied up for room, with microbatches of a size that is found out."""
        return self._runtime.until_it_fits.cumulative_alloc_retries

    @property
    def num_consecutive_thrashes(self) -> int:
        """In how many of the latest batches in a row it had to be, on any rank."""
        return self._runtime.until_it_fits.num_consecutive_thrashes

    @property
    def num_consecutive_non_OOM_batches(self) -> int:  # Composer's name
        """How many batches have fitted into memory since the latest that did not."""
        return self._runtime.until_it_fits.num_consecutive_non_oom_batches

    @property
    def saved_checkpoints(self) -> list[str]:
        """The paths of the checkpoints that this run has saved and not deleted, oldest first."""
        return [] if self._runtime.saver is None else self._runtime.saver.saved_checkpoints

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
        if self._runtime.saver is None:
            raise ValueError(
                "There is no folder to save to: the Trainer has neither a save_folder nor a CheckpointSaver. Give "
                "save_folder, or call save_checkpoint(name)."
            )
        self._runtime.saver.save(self.state, self.logger)

    def close(self) -> None:
        """Let every callback and logger finish; afterwards the Trainer cannot be used.

        The ranks wait for each other, unless this one has failed and leaves the others behind.
        """
        self._runtime.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runtime.has_failed |= error is not None
        self.close()

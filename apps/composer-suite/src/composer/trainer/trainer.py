"""The Trainer, which trains and evaluates a model with algorithms, callbacks and loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from torch.optim import Optimizer

from composer.trainer._arguments import FitArguments
from composer.trainer._build import build
from composer.trainer._evaluation import check_prediction, evaluate_alone
from composer.trainer.divergence import OnDivergence
from composer.utils import checkpoint
from composer_checkpoint.ignore_keys import IgnoreKeys
from composer_dist.ddp import DDPSyncStrategy
from composer_dist.devices import Device, Precision
from composer_dist.initialize import DEFAULT_TIMEOUT_S
from composer_dist.wrapping import unwrap_model
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
else:  # for typing.get_type_hints; the imports are slow, and few runs profile or export
    ExportFormat = Profiler = Transform = Any


class Trainer:
    """Trains and evaluates a model.

    The training loop in `composer.trainer.loop` runs events, on which `algorithms` act and `callbacks` run. Use the
    Trainer as a context manager, or call `close` at the end, so that loggers can finish.

    Args: Model and data
        model: The model to train. `ComposerModel.from_module(module, loss_fn)` wraps any `nn.Module`.
        train_dataloader: Batches to train on: an iterable, a `DataSpec`, or a dict of the arguments of a `DataSpec`.
            May be passed to `fit` instead.
        train_dataloader_label: The `state.dataloader_label` during training, which progress bars show. Training metrics
            are always logged as `metrics/train/...`, but early stopping monitors them only if the label is `'train'`.
        train_subset_num_batches: The maximum number of batches per epoch; -1 for all.
        spin_dataloaders: When resuming in the middle of an epoch, whether to read and drop the batches that were
            already trained on, so that the same batches follow.

    Args: Duration and evaluation
        max_duration: The length of training: `'10ep'`, `'500ba'`, `Time(...)`. A plain number counts epochs.
        eval_dataloader: Batches to evaluate on: like `train_dataloader`, an `Evaluator`, or a list of either.
        eval_interval: The interval of evaluations during `fit`, for evaluators without their own; 0 for never.
        eval_subset_num_batches: The maximum number of batches per evaluation; -1 for all.

    Args: Optimizers, schedules and methods
        optimizers: One optimizer, or several that divide the trained parameters among them and step in this order.
            Without it `DecoupledSGDW(model.parameters(), lr=0.1)`, with a warning.
        schedulers: PyTorch schedulers, Composer schedulers, or functions of the state. The latter two apply to all
            optimizers.
        scale_schedule_ratio: Factor for `max_duration` and all schedules; 0.5 trains half as long.
        step_schedulers_every_batch: Default: every epoch if one of them is a PyTorch scheduler, else every batch.
        algorithms: One or several training methods.
        algorithm_passes: Additional rules for the order of algorithms; see `Engine`.
        callbacks: One or several callbacks.

    Args: Run name, logging and profiling
        run_name: The name of the run. Default: `COMPOSER_RUN_NAME` or `RUN_NAME`, or else a generated name.
        loggers: One or several loggers.
        progress_bar: Whether to show a progress bar.
        log_to_console: Whether to write metrics as lines of text, which suits a file better than a progress bar.
            `None` does so if `progress_bar` is False.
        console_stream: The stream for both: `'stderr'`, `'stdout'` or a text stream.
        console_log_interval: The interval of these lines, in epochs (`'1ep'`) or batches (`'10ba'`). Also that of a
            progress bar whose stream is not a terminal; with the default, it writes a line at the end of each epoch,
            and in an epoch one every 10 seconds at most.
        log_traces: Whether progress bar and console also show which algorithms acted.
        auto_log_hparams: Whether to log these arguments as hyperparameters, reduced to names and numbers.
        profiler: A `composer.profiler.Profiler`, which measures where time is spent.
        python_log_level: The level of Composer's Python loggers, such as `'info'`. Default: the application's setting
            is left unchanged.

    Args: Saving checkpoints
        save_folder: The folder for checkpoints: a path or URI. `None` saves nothing, unless the callbacks include a
            `CheckpointSaver`, which takes precedence over all arguments that begin with `save_`.
        save_filename: The name of each file, with placeholders for run, ranks and time.
        save_latest_filename: The name of the link to the latest checkpoint; `None` for no link.
        save_overwrite: Whether to overwrite later checkpoints of another run.
        save_interval: The interval of saves, in addition to one at the end: epochs, a time, or a function of state
            and event; 0 for never.
        save_weights_only: Save only the model and its description.
        save_ignore_keys: Keys not to save, in the form of `load_ignore_keys`.
        save_num_checkpoints_to_keep: The number of newest checkpoints to keep on disk; -1 for all.
        save_keep: Other checkpoints to keep: any of `{'last': 3, 'every': '10ep', 'best':
            ('metrics/eval/MulticlassAccuracy', 'max', 2)}`; see `composer_checkpoint.RetentionPolicy.from_setting`.
        save_metrics: Whether checkpoints include the metrics.
        save_async: Whether training continues while a checkpoint is written.
        save_async_policy: If the previous save is still being written: `'wait'` for it, or `'skip'` this one.

    Args: Loading checkpoints and resuming
        autoresume: Resume from the newest complete checkpoint in `save_folder`, if any, regardless of `load_path`.
            Needs a `run_name`. If the run has finished, `fit` only logs that. If it was stopped, for example by
            `EarlyStopper`, `fit` does not train unless `max_duration` has changed.
        load_path: The checkpoint to load: a path or URI, in which `{run_name}` and `{rank}` are replaced.
        load_object_store: The location of `load_path`: an `ObjectStore`, or a logger that can download.
        load_weights_only: Load only the model.
        load_strict_model_weights: Whether missing or unexpected weights are an error, with `load_weights_only` or a
            sharded checkpoint.
        load_progress_bar: Whether to show a progress bar for a download.
        load_ignore_keys: Patterns of keys not to load, such as `'state/optimizers/*'`, or a function that deletes from
            the checkpoint's dict. The optimizer and algorithm state of an ignored weight is not loaded either. An
            optimizer keeps its own values for ignored parts, such as `'state/optimizers/*/lr'`.
        load_exclude_algorithms: Class names of algorithms not to apply although the saved weights depend on them.
        load_trusted: Allow the checkpoint to run code while it is loaded. Only for files of old releases from a source
            that you trust.
        load_restart_epoch: Restart the epoch in which the checkpoint was saved, with the data of this run. Without it,
            resuming in the middle of an epoch of different data is an error.

    Args: Device, precision and batch size
        device: `'cpu'`, `'gpu'`, ... or a `Device`. Default: the best available.
        precision: `'fp32'`, `'amp_bf16'` or `'amp_fp16'`.
        precision_config: Settings of 8-bit precision.
        device_train_microbatch_size: The number of samples per forward pass, with gradient accumulation over the
            batch. Default: the dataloader's `batch_size`. `'auto'` starts with that, and halves it on all ranks
            whenever a GPU runs out of memory, for the same batch and all later ones.
        grad_accum: The older form of it: the number of microbatches per batch, or `'auto'`.
        accumulate_train_batch_on_tokens: Whether microbatches are weighted by the tokens that enter the loss, not by
            samples. If that is not all tokens, a `DataSpec` must count the `loss_generating` ones.
        compile_config: Arguments of `torch.compile`; `{}` for its defaults. The names of weights do not change. A model
            that is already compiled is used as it is. The repeated blocks of a model, such as the layers of a
            transformer, are compiled in place of the whole model, with one graph for all of them. The entry `regions`
            changes that: `False` for the whole model, or a list of the classes of modules to compile.
        activation_checkpointing: Whether to recompute activations in the backward pass instead of storing them;
            `'selective'` stores the results of matrix products that are not changed in place. The modules are selected
            by `activation_checkpointing_fn(module)` of the model's child, or by their `_activation_checkpointing`.
            For a sharded model, use the setting of `parallelism_config`.

    Args: Distributed training
        dist_timeout: The timeout of collectives in seconds.
        ddp_sync_strategy: When the ranks average the gradients of several microbatches; see `DDPSyncStrategy`.
        ddp_comm_hook: Compression of gradients between ranks: `'bf16_compress'`, `'fp16_compress'` or `'powersgd'`.
            None by default.
        deepspeed_config: Settings of DeepSpeed, which then trains the model. Settings that follow from the other
            arguments may be omitted; `{}` omits all.
        parallelism_config: Sharding of the model over ranks: `{'fsdp': {...}}` with the settings of
            `composer.utils.FSDPConfig`, and optionally `'tp'` with those of tensor parallelism.

    Args: Reproducibility and errors
        seed: The seed of Python, NumPy and PyTorch, in [0, 2**32). Random by default. Rank r uses `seed + r`.
        deterministic_mode: Whether PyTorch uses deterministic algorithms only, which is slower.
        on_divergence: The action for a batch with gradients that are not finite, before the optimizer step and on all
            ranks alike: `'raise'` a `DivergenceError`, `'skip'` the step, `'rollback'` to a copy of the weights in
            memory, an `OnDivergence` for more options (also for loss spikes), or `None` for no action.

    Args: Arguments of older releases
        **older_names: Arguments of older releases, each with a `DeprecationWarning` that names the current one:
            `load_strict`, `load_chunk_size`, `save_artifact_name`, `save_latest_artifact_name`, `grad_clip_norm`,
            `compute_training_metrics`, `console_log_level`, `fsdp_config`, `fsdp_auto_wrap` and
            `load_fsdp_monolith_rank0_only`.

    Attributes:
        state: The state of training, which algorithms and callbacks read and change.
        engine: Runs the events.
        logger: Passes values to the loggers.
        divergences: The batches for which `on_divergence` acted.
        strategy: The distributed strategy. It can return whole weights, also of a sharded model.

    Raises:
        ValueError, TypeError: If an argument is invalid, before anything is written.

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
        # The first statement, because `locals()` must contain only the arguments.
        self._runtime = build(locals(), Trainer.__init__.__kwdefaults__ or {})
        self.state = self._runtime.state
        self.engine = self._runtime.engine
        self.logger = self._runtime.logger
        self.strategy = self._runtime.strategy
        self.divergences = self._runtime.divergences
        self.python_log_level = python_log_level
        self.auto_log_hparams = auto_log_hparams
        if auto_log_hparams:  # as in Composer, the attribute exists only then
            self.local_hparams = self._runtime.local_hparams

    def fit(
        self,
        *,
        train_dataloader: Any = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int | None = None,
        spin_dataloaders: bool | None = None,
        duration: int | str | Time[int] | None = None,
        reset_time: bool = False,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
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
        """Train until `max_duration`, or for `duration` from now. Every rank must call this.

        Arguments with the name of a constructor argument replace it.

        SIGTERM, SIGUSR1 and SIGINT, sent to any rank, end training on all ranks after the same batch, with a checkpoint
        if there is a `save_folder`. Previous signal handlers are also called, and are restored afterwards. A second
        SIGINT raises `KeyboardInterrupt` at once.

        Args:
            train_dataloader: See the constructor.
            train_dataloader_label: See the constructor.
            train_subset_num_batches: See the constructor.
            spin_dataloaders: See the constructor.
            duration: The length of training from now, regardless of `max_duration`.
            reset_time: Set all counters to 0 first. Weights, optimizer and PyTorch schedulers are not reset.
            optimizers: See the constructor. Composer schedulers go on with them; PyTorch's belong to the optimizer that
                they were made from, so new ones must be given. A checkpoint is loaded before, by the constructor, so
                that the state of these optimizers is not restored.
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
            ValueError: If optimizer, data or duration is missing, or `max_duration` has been reached, except by the
                checkpoint that `autoresume` has loaded.
            SystemExit: After a signal: with status 130 for SIGINT, else 143.
        """
        self._runtime.fit(FitArguments.of(locals()))

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate now. The results are in `state.eval_metrics` and in the log.

        Args:
            eval_dataloader: Batches to evaluate on in this call, as in the constructor. Default: all evaluators of
                the Trainer.
            subset_num_batches: The maximum number of batches; -1 for the setting of each evaluator.

        Raises:
            ValueError: If there is nothing to evaluate on.
        """
        with self._runtime.recording_failure():
            evaluate_alone(self._runtime, eval_dataloader, subset_num_batches)

    def predict(
        self,
        dataloader: Any,
        subset_num_batches: int = -1,
        *,
        return_outputs: bool = True,
        device_predict_microbatch_size: int | None = None,
    ) -> list[Any]:
        """Run the model over batches, in evaluation mode and without gradients. Every rank must call this.

        If the ranks have different numbers of batches, prediction ends with the smallest number.

        Args:
            dataloader: Any iterable of batches, a `DataSpec`, or a dict of a DataSpec's arguments.
            subset_num_batches: The maximum number of batches; -1 for all.
            return_outputs: Whether to keep the outputs. If not, a callback can read them from `state.outputs`.
            device_predict_microbatch_size: The number of samples per forward pass. Default: whole batches.

        Returns:
            The outputs of the model for each batch of this rank, on the CPU, or an empty list without
            `return_outputs`. Samples that a `DistributedSampler` repeats to give every rank the same number are left
            out, as are batches that contain nothing else.

        Raises:
            ValueError, TypeError: If an argument is invalid.
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
        """Export the model for inference. Rank 0 writes; the model itself does not change.

        Args:
            save_format: `'torchscript'`, `'onnx'`, `'export'` (a `.pt2` archive of `torch.export`) or `'safetensors'`
                (the weights alone).
            save_path: A path or URI, or a name in `save_object_store` or in a logger that stores files.
            save_object_store: An `ObjectStore`.
            sample_input: A batch, if the format needs one. Default: the latest batch.
            transforms: Functions that change the exported copy, such as `quantize_dynamic`.
            input_names: For `'onnx'`. By default the keys of a dict, else `input`.
            output_names: For `'onnx'`. By default `output`.

        Raises:
            ValueError: If the model is sharded, or a sample input is needed and missing.
            RuntimeError: If the model cannot be exported in this format.
        """
        from composer.utils import inference  # a slow import that only exports need

        formats = inference.ExportFormat
        # TorchScript scripts the model without a sample; only a sample that the user passes allows tracing instead.
        if sample_input is None and formats(save_format) in (formats.ONNX, formats.EXPORT):
            sample_input = self.state.batch
        self.state.optimizers.eval()
        inference.export_with_logger(
            model=unwrap_model(self.state.model),
            save_format=save_format,
            save_path=save_path,
            logger=self.logger,
            save_object_store=save_object_store,
            sample_input=(sample_input, {}),
            transforms=transforms,
            input_names=input_names,
            output_names=output_names,
        )

    @property
    def cumulative_alloc_retries(self) -> int:
        """Number of allocation retries of the GPU's allocator, with `device_train_microbatch_size='auto'`."""
        oom = self._runtime.halve_on_oom
        return 0 if oom is None else oom.cumulative_alloc_retries

    @property
    def num_consecutive_thrashes(self) -> int:
        """Number of latest consecutive batches in which the allocator of any rank retried."""
        oom = self._runtime.halve_on_oom
        return 0 if oom is None else oom.num_consecutive_thrashes

    @property
    def num_consecutive_non_OOM_batches(self) -> int:  # Composer's name
        """Number of batches since the latest out-of-memory error."""
        oom = self._runtime.halve_on_oom
        return 0 if oom is None else oom.num_consecutive_non_oom_batches

    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the checkpoints that this run has saved and not deleted, oldest first."""
        return [] if self._runtime.saver is None else self._runtime.saver.saved_checkpoints

    def save_checkpoint(
        self, name: str = "ep{epoch}-ba{batch}-rank{rank}", *, weights_only: bool = False
    ) -> str | None:
        """Save a checkpoint now. Every rank must call this.

        Args:
            name: The path, with the placeholders of `save_filename`.
            weights_only: Save only the model and its description.

        Returns:
            The path, on the ranks that wrote.
        """
        return checkpoint.save_checkpoint(state=self.state, filename=name, weights_only=weights_only)

    def save_checkpoint_to_save_folder(self) -> None:
        """Save a checkpoint now, like those at intervals. Every rank must call this.

        Raises:
            ValueError: If there is no `save_folder` and no `CheckpointSaver`.
        """
        if self._runtime.saver is None:
            raise ValueError(
                "The Trainer has no folder to save to, neither a save_folder nor a CheckpointSaver. Give "
                "save_folder, or call save_checkpoint(name)."
            )
        self._runtime.saver.save(self.state, self.logger)

    def close(self) -> None:
        """Close all callbacks and loggers. The Trainer cannot be used afterwards.

        The ranks wait for each other, unless this one has failed.
        """
        self._runtime.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An error outside the Trainer may be on this rank alone; `close` must then not wait for the others.
        self._runtime.has_failed |= error is not None
        self.close()

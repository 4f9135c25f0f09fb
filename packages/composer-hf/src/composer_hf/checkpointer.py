"""A callback that writes Hugging Face folders at intervals during training."""

import os
import posixpath
import tempfile
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_checkpoint import CheckpointConflictError, PartialFilePath, RemoteUploader
from composer_checkpoint.names import OF_FOLDER, OF_SAVE
from composer_checkpoint.stores.base import is_uri, parse_uri
from composer_checkpoint.tensors import as_stored
from composer_dist import dist
from composer_dist.wrapping import unwrap_model
from composer_events import Callback, Event, Logger, State, create_interval_scheduler
from composer_events.arguments import to_interval
from composer_events.formatting import check_placeholders
from composer_hf.adapters import is_adapter_weight
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model import HuggingFaceModel
from composer_hf.published_weights import plan_weights, published_name
from composer_hf.publishing import as_dtype, write_pretrained
from composer_hf.registering import ModelRegistry, find_registry, in_background, register_folder, wait_on_all_ranks
from composer_hf.weight_files import FORMATS, Format, parse_size
from composer_time import Time

__all__ = ["HuggingFaceCheckpointer", "gather_weights"]

log = getLogger(__name__)

_SIZE_VARIABLE: Final = "LLM_FOUNDRY_SAVE_FOLDER_HF_MAX_SHARD_SIZE"
_SUBFOLDER: Final = "huggingface"
_READY_S: Final = 3600  # limit of MLflow's own wait until a new model version is ready
_LAST_UPLOADED: Final = ("config.json", "adapter_config.json")  # an upload that lacks them is not a loadable folder


class HuggingFaceCheckpointer(Callback):
    """Write the model as a folder that `from_pretrained` reads, at intervals and at the end of training.

    The weights are gathered one at a time, converted and copied to host memory of rank 0. Training then
    continues while a thread writes a temporary folder, flushes it and renames it, so a folder is complete or absent.
    Errors in writing are logged at once, and raised on all ranks at the next save and at the end of `fit`. For a model
    with an adapter, the adapter is written.

    With `mlflow_registered_model_name`, the model becomes a version of a registered model at the end of `fit`, through
    the `MLFlowLogger` among the loggers.

    Args:
        save_folder: Destination, with `{run_name}` and the placeholders of ranks; a path or a URI such as
            `'s3://bucket/run'`. Folders are written to `<save_folder>/huggingface/`.
        save_interval: How often: epochs, a timestring, a `Time`, or a function of the state and the event.
        huggingface_folder_name: Name of each folder, with placeholders for time.
        precision: Dtype of the floating point weights: `'float32'`, `'float16'` or `'bfloat16'`.
        overwrite: Whether to replace a folder of the same name.
        max_shard_size: Maximum size of a weight file. Default: the environment variable
            `LLM_FOUNDRY_SAVE_FOLDER_HF_MAX_SHARD_SIZE`, or `'1GB'`.
        save_format: `'safetensors'`, `'bin'` for `pytorch_model.bin`, or `'both'`.
        async_save: Whether training continues while the folder is written.
        num_concurrent_uploads: Number of files uploaded at a time.
        mlflow_registered_model_name: The registered model in MLflow that the last folder becomes a version of.
        mlflow_logging_config: Arguments of `mlflow.transformers.save_model`. The `task` is `'llm/v1/completions'` by
            default. For an adapter, `metadata` may have a `pretrained_model_name`, the base that the folder names.
        final_register_only: Whether to write no folders, and only register the model at the end.
        register_wait_seconds: Maximum time that the end of `fit` waits for the registry, in seconds.

    Raises:
        ValueError: If a name, an interval or a size is invalid.

    Example:
        >>> checkpointer = HuggingFaceCheckpointer("runs/plum", save_interval="1000ba", precision="bfloat16")
    """

    def __init__(
        self,
        save_folder: str,
        save_interval: Time[Any] | str | int | Callable[[State, Event], bool],
        huggingface_folder_name: str = "ba{batch}",
        precision: str | torch.dtype = "float32",
        overwrite: bool = True,
        *,
        max_shard_size: int | str | None = None,
        save_format: Format = "safetensors",
        async_save: bool = True,
        num_concurrent_uploads: int = 4,
        mlflow_registered_model_name: str | None = None,
        mlflow_logging_config: Mapping[str, Any] | None = None,
        final_register_only: bool = False,
        register_wait_seconds: float = 7200,
    ) -> None:
        if save_format not in FORMATS:
            raise ValueError(f"save_format={save_format!r} must be one of {', '.join(map(repr, FORMATS))}.")
        if final_register_only and mlflow_registered_model_name is None:
            warnings.warn(
                "final_register_only=True has no effect, since there is no mlflow_registered_model_name: folders "
                "are written. Give the name.",
                UserWarning,
                stacklevel=2,
            )
            final_register_only = False
        folder = str(save_folder)
        check_placeholders(OF_FOLDER, save_folder=folder)
        check_placeholders(OF_SAVE, huggingface_folder_name=huggingface_folder_name)
        self.mlflow_registered_model_name = mlflow_registered_model_name
        self.mlflow_logging_config = dict(mlflow_logging_config or {})
        self.final_register_only, self.register_wait_seconds = final_register_only, register_wait_seconds
        self._registry: ModelRegistry | None = None
        self.overwrite = overwrite
        self.precision = as_dtype(precision)
        self.save_format: Format = save_format
        self.async_save = async_save
        self.max_shard_bytes = parse_size(max_shard_size or os.environ.get(_SIZE_VARIABLE) or "1GB")
        interval = to_interval("save_interval", save_interval)
        self.save_interval: Callable[[State, Event], bool] = (
            interval if callable(interval) else create_interval_scheduler(interval)
        )
        self.remote_uploader: RemoteUploader | None = None
        if is_uri(folder):
            self.remote_uploader = RemoteUploader(folder, num_concurrent_uploads=num_concurrent_uploads)
            folder = parse_uri(folder).path
        self._name = PartialFilePath(huggingface_folder_name, posixpath.join(folder, _SUBFOLDER))
        self.last_checkpoint_batch: Time[int] | None = None
        self.saved_folders: list[str] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="huggingface-checkpoint")  # one: saves stay in order
        self._writing: Future[None] | None = None
        self._metadata: HuggingFaceMetadata | None = None  # of the newest folder, on rank 0

    def init(self, state: State, logger: Logger) -> None:
        """Validate the model and its parallelism, and check that the object store is writable.

        Raises:
            ValueError: If the model is not a `HuggingFaceModel`, or DeepSpeed shards its weights; or if it is to be
                registered without a tokenizer, or without a logger that registers models.
            StorageError: If the object store is not writable.
        """
        model = _model_of(state)
        zero: Any = (state.deepspeed_config or {}).get("zero_optimization") or {}
        if state.deepspeed_enabled and int(zero.get("stage", 0)) == 3:
            raise ValueError(
                "`HuggingFaceCheckpointer` needs whole weights, and stage 3 of DeepSpeed keeps them in parts. Save "
                "checkpoints, and convert them with `composer-ckpt convert`; or use FSDP, or stage 2."
            )
        if self.mlflow_registered_model_name is not None:
            self._registry = find_registry(logger)
            if self._registry is None or (model.tokenizer is None and not model.using_peft):
                lacks = "an MLFlowLogger among the loggers" if self._registry is None else "a tokenizer for the model"
                raise ValueError(
                    f"mlflow_registered_model_name={self.mlflow_registered_model_name!r} needs {lacks}. Pass "
                    f"loggers=MLFlowLogger(...) to the Trainer and tokenizer=... to HuggingFaceModel."
                )
        if self.remote_uploader is not None and not self.final_register_only:
            self.remote_uploader.init()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check that a folder can describe the model, which algorithms have changed by now.

        Raises:
            CheckpointError: On all ranks, if it has other weights than its configuration says.
        """
        failure: list[BaseException | None] = [None]
        model = _model_of(state)
        if dist.get_global_rank() == 0 and not model.using_peft:
            try:
                metadata = self.transform_metadata(HuggingFaceMetadata.from_saved(model.get_metadata()))
                plan_weights(model.state_dict(), metadata, trust_remote_code=True)
            except Exception as error:  # of any kind, or the other ranks would wait
                failure = [error]
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise failure[0]

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save, if a save is due."""
        self._save_if_due(Event.BATCH_CHECKPOINT, state, logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save, if a save is due."""
        self._save_if_due(Event.EPOCH_CHECKPOINT, state, logger)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Save, if a save is due."""
        self._save_if_due(Event.ITERATION_CHECKPOINT, state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait for the pending folder, register it if requested, and raise its errors on all ranks.

        Raises:
            TimeoutError: If registration takes longer than `register_wait_seconds`.
        """
        self._wait()
        is_saved = self.last_checkpoint_batch == state.timestamp.batch
        if self._registry is not None and (is_saved or self.final_register_only):
            self._register(self._registry, state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Wait for the pending folder and uploads. Errors were logged already."""
        self._thread.shutdown()
        if self.remote_uploader is not None:
            self.remote_uploader.wait_and_close()

    def save(self, state: State, logger: Logger) -> None:
        """Gather the model's weights and start writing them. Every rank must call this.

        Raises:
            CheckpointError: On all ranks, if writing the previous folder failed, or if the folder exists and must not
                be replaced.
        """
        self._wait()  # at most one copy of the weights in host memory
        state.settle()
        path = self._name.format(state)
        model = _model_of(state)
        if not self.overwrite and self.remote_uploader is None:
            found = [os.path.lexists(path)]  # rank 0 writes, so its file system decides
            dist.broadcast_object_list(found, src=0)
            if found[0]:  # on all ranks, before the expensive gathering
                raise CheckpointConflictError(
                    f"{path} exists, and overwrite=False. Choose another save_folder or huggingface_folder_name, or "
                    f"pass overwrite=True to replace it."
                )
        self.last_checkpoint_batch = state.timestamp.batch
        weights, metadata = self._snapshot(model)
        if metadata is None:
            return
        self._metadata = metadata
        self._writing = self._thread.submit(self._write, path, weights, metadata, state, logger)
        if not self.async_save:
            self._writing.exception()  # only waits; `_wait` raises it on all ranks

    def transform_metadata(self, metadata: HuggingFaceMetadata) -> HuggingFaceMetadata:
        """Return the metadata to write. Subclasses may override this; called on rank 0."""
        return metadata

    def save_additional_contents(self, state: State, logger: Logger, folder: Path) -> None:
        """Write more files before the folder is renamed. Subclasses may override this; called in a thread of rank 0."""

    def pre_register_edit(self, folder: Path) -> None:
        """Edit the folder in MLflow's format before it is registered. Override as `save_additional_contents`."""

    def _save_if_due(self, event: Event, state: State, logger: Logger) -> None:
        if self.final_register_only:
            return
        if self.save_interval(state, event) and self.last_checkpoint_batch != state.timestamp.batch:
            self.save(state, logger)
            if not self.async_save:
                self._wait()

    def _snapshot(self, model: HuggingFaceModel) -> tuple[dict[str, Tensor], HuggingFaceMetadata | None]:
        """Return, on rank 0, copies of the weights and their metadata. Every rank must call this."""
        is_writer = dist.get_global_rank() == 0
        weights = gather_weights(model, self.precision, keep=is_writer)
        if not is_writer:
            return weights, None
        metadata = HuggingFaceMetadata.from_saved(model.get_metadata())
        base = (self.mlflow_logging_config.get("metadata") or {}).get("pretrained_model_name")
        if base is not None and metadata.peft_config is not None:
            metadata = replace(metadata, peft_config={**metadata.peft_config, "base_model_name_or_path": base})
        return weights, self.transform_metadata(metadata)

    def _register(self, registry: ModelRegistry, state: State, logger: Logger) -> None:
        # After an upload, the local folder is gone.
        is_here = not self.final_register_only and self.remote_uploader is None
        weights, metadata = ({}, self._metadata) if is_here else self._snapshot(_model_of(state))

        def register() -> None:
            assert metadata is not None
            with tempfile.TemporaryDirectory(prefix="composer-hf-") as place:
                folder = Path(self.saved_folders[-1] if is_here else os.path.join(place, "model"))
                if not is_here:
                    self._write_folder(os.fspath(folder), weights, metadata, state, logger)
                register_folder(
                    registry,
                    folder,
                    str(self.mlflow_registered_model_name),
                    metadata,
                    self.mlflow_logging_config,
                    edit=self.pre_register_edit,
                    timeout_s=min(self.register_wait_seconds, _READY_S),
                )

        # Only rank 0 has metadata, so only rank 0 registers.
        wait_on_all_ranks(None if metadata is None else in_background(register), self.register_wait_seconds)

    def _write(
        self, path: str, weights: dict[str, Tensor], metadata: HuggingFaceMetadata, state: State, logger: Logger
    ) -> None:
        try:
            if self.remote_uploader is None:
                self._write_folder(path, weights, metadata, state, logger)
            else:
                with tempfile.TemporaryDirectory(prefix="composer-hf-") as folder:
                    local = os.path.join(folder, posixpath.basename(path))
                    self._write_folder(local, weights, metadata, state, logger)
                    self._upload(self.remote_uploader, Path(local), path)
        except BaseException:
            log.exception("%s could not be written.", path)
            raise
        self.saved_folders.append(path)
        log.info("Wrote %s.", path)

    def _write_folder(
        self, path: str, weights: dict[str, Tensor], metadata: HuggingFaceMetadata, state: State, logger: Logger
    ) -> None:
        write_pretrained(
            path,
            {name: as_stored(weight) for name, weight in weights.items()},
            metadata,
            max_shard_bytes=self.max_shard_bytes,
            format=self.save_format,
            overwrite=self.overwrite,
            # The class comes from the model in this process, not from a foreign checkpoint, so it may be imported.
            trust_remote_code=True,
            add_contents=lambda folder: self.save_additional_contents(state, logger, folder),
        )

    def _upload(self, uploader: RemoteUploader, folder: Path, remote: str) -> None:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        names = {file: posixpath.join(remote, file.relative_to(folder).as_posix()) for file in files}
        last = [file for file in files if file.name in _LAST_UPLOADED]
        # A reader that finds a configuration must find the weights as well.
        for group in ([file for file in files if file not in last], last):
            # All uploads of a group are submitted before the first wait, so that they run concurrently.
            uploads = [uploader.upload_file_async(names[file], file, self.overwrite, copy=False) for file in group]
            for upload in uploads:
                upload.result()

    def _wait(self) -> None:
        """Wait for the pending folder, and raise its error on all ranks."""
        writing, self._writing = self._writing, None
        failure: list[BaseException | None] = [None if writing is None else writing.exception()]
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise failure[0]


def _model_of(state: State) -> HuggingFaceModel:
    model: Any = unwrap_model(state.model)
    if not isinstance(model, HuggingFaceModel):
        raise ValueError(
            f"`HuggingFaceCheckpointer` is only compatible with `HuggingFaceModel`s, and the model is a "
            f"{type(model).__name__}. Wrap the model of transformers in a HuggingFaceModel, or leave the callback out."
        )
    return model


def gather_weights(model: HuggingFaceModel, dtype: torch.dtype | None, *, keep: bool) -> dict[str, Tensor]:
    """Return copies of the weights, gathered one at a time. Every rank must call this.

    Args:
        model: The model without its parallel wrappers. With an adapter, only trained weights are returned.
        dtype: Dtype to convert floating point weights to.
        keep: Whether this rank keeps them; other ranks return an empty dict.
    """
    seen: dict[int, Tensor | None] = {}
    weights: dict[str, Tensor] = {}
    beside = model.names_trained_beside_adapter()
    for name, value in model.state_dict(keep_vars=True).items():
        plain = published_name(name)
        if model.using_peft and not is_adapter_weight(plain) and plain not in beside:
            continue
        if id(value) not in seen:  # tied weights are gathered once, and stay tied
            # `full_tensor` is a collective: all ranks call it, in the same order, whether they keep the result or not.
            whole: Tensor = value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
            target = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
            seen[id(value)] = whole.to("cpu", target, copy=True) if keep else None
        if (copied := seen[id(value)]) is not None:
            weights[name] = copied
    return weights

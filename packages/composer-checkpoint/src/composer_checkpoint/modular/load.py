"""Load a model, an optimizer and the rest of a run from separate files."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from composer_checkpoint._ranks import Ranks
from composer_checkpoint._spread import is_sharded, parameters_by_name
from composer_checkpoint.errors import IncompatibleCheckpointError
from composer_checkpoint.modular import _restore as restore
from composer_checkpoint.modular.options import CheckpointLoadOptions
from composer_dist.reproducibility import load_rng_state
from composer_events.state import State

PathLike = str | os.PathLike[str]


def load_checkpoint(
    load_path: PathLike,
    load_options: CheckpointLoadOptions | Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    optim: torch.optim.Optimizer | None = None,
    state: State | None = None,
    model_child_path: str | None = None,
    optim_child_path: str | None = None,
    resumption_filename: str = "resumption.pkl",
    *,
    trusted: bool = False,
) -> None:
    """Load a checkpoint of `save_checkpoint_to_disk`, or parts of it. Every rank must call this.

    Model and optimizer are located before anything is changed. Then the resumption state, the model and the optimizer
    are loaded, in this order. Hashes are compared, and no file can run code unless `trusted` is set.

    Args:
        load_path: Path of the checkpoint's folder, or its URI in a store.
        load_options: Settings for loading.
        model: The model; the state's model when `None`.
        optim: The optimizer; the state's optimizer when `None`.
        state: State of the run, which the resumption state needs.
        model_child_path: Path of the model in the folder; `model/model.pt`, or `model` if sharded, when `None`.
        optim_child_path: Path of the optimizer in the folder; `optim/optim.pt`, or `optim` if sharded, when `None`.
        resumption_filename: Name of the file with the resumption state.
        trusted: Whether files may run code of their own while they are loaded, which is logged as a warning. It does
            not apply to sharded checkpoints.

    Raises:
        ValueError: If a required model, optimizer or state is missing, or the options exclude this kind of checkpoint.
        NoCheckpointError: If a file is missing; a `FileNotFoundError`.
        CheckpointError: If a file is damaged, unsafe, or of another model.
    """
    options = _as_options(load_options)
    model, optim = _targets(options, model, optim, state)
    # Found before anything is changed, so that a missing file does not leave the run half loaded.
    sources = {
        part: restore.find_source(os.path.join(load_path, child or part), part, options.sharded_checkpoint)
        for part, child, wanted in (
            ("model", model_child_path, options.load_model),
            ("optim", optim_child_path, options.load_optimizer),
        )
        if wanted
    }
    if state is not None and options.load_resumption_state:
        load_resumption_checkpoint(state, os.path.join(load_path, resumption_filename), trusted=trusted)
    if model is not None and options.load_model:
        _shard_as_needed(model, optim, options, options.seed)
        _refuse_other_kind(model, sources["model"], options)
        restore.load_weights(model, sources["model"], options, trusted=trusted)
    if model is not None and optim is not None and options.load_optimizer:
        _refuse_other_kind(model, sources["optim"], options, is_optimizer=True)
        restore.load_optimizer(model, optim, sources["optim"], options, trusted=trusted)


def load_model_checkpoint(
    model: nn.Module,
    load_path: PathLike,
    load_options: CheckpointLoadOptions | Mapping[str, Any] | None = None,
    seed: int = 42,
    *,
    trusted: bool = False,
) -> None:
    """Load weights. Every rank must call this.

    Weights are changed only after all of them were found to be intact and of the right shape. If this call shards the
    model, build the optimizer afterwards; `load_checkpoint` updates the optimizer that is passed to it.

    Args:
        model: A plain model, one in `DistributedDataParallel`, or a compiled, FSDP2 or tensor parallel one.
        load_path: Local path or URI of a file or of the folder of a sharded checkpoint. From a full training state,
            the model is loaded.
        load_options: Settings of the load.
        seed: Seed for weights that have no memory yet (on the device `meta`) and are not in the checkpoint.
        trusted: As for `load_checkpoint`.

    Raises:
        ValueError: If the kind of checkpoint does not fit the options.
        NoCheckpointError: If the checkpoint does not exist; a `FileNotFoundError`.
        RuntimeError: If the weights do not fit the model.
        CheckpointError: If the checkpoint is damaged or unsafe.

    Example:
        >>> import tempfile
        >>> from composer_checkpoint.modular import save_model_to_disk
        >>> path = save_model_to_disk(nn.Linear(2, 1), tempfile.mkdtemp())
        >>> load_model_checkpoint(nn.Linear(2, 1), path)
    """
    options = _as_options(load_options)
    source = restore.find_source(load_path, "model", options.sharded_checkpoint)
    _shard_as_needed(model, None, options, seed)
    _refuse_other_kind(model, source, options)
    restore.load_weights(model, source, options, trusted=trusted)


def load_optim_checkpoint(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    load_path: PathLike,
    load_options: CheckpointLoadOptions | Mapping[str, Any] | None = None,
    *,
    trusted: bool = False,
) -> None:
    """Load an optimizer's state. Every rank must call this.

    Args:
        model: The model, which has the parameters' names.
        optim: The optimizer. It need not have stepped. Its groups get the saved settings of their parameters.
        load_path: Local path or URI of a file or of the folder of a sharded checkpoint. From a full training state,
            the optimizer of the same class is loaded.
        load_options: Settings of the load.
        trusted: As for `load_checkpoint`.

    Raises:
        ValueError: If the kind of checkpoint does not fit the options.
        NoCheckpointError: If the checkpoint does not exist; a `FileNotFoundError`.
        CheckpointError: If the checkpoint is damaged, unsafe or of an optimizer of other parameters.
    """
    options = _as_options(load_options)
    source = restore.find_source(load_path, "optim", options.sharded_checkpoint)
    _refuse_other_kind(model, source, options, is_optimizer=True)
    restore.load_optimizer(model, optim, source, options, trusted=trusted)


def load_resumption_checkpoint(state: State, path: PathLike, *, trusted: bool = False) -> None:
    """Load the state that resuming needs besides weights and optimizers. Every rank must call this; rank 0 reads.

    It consists of the state of the dataset, timestamp, schedulers, algorithms, callbacks and scaler, the seed, the run
    name, and each rank's RNG state.

    Args:
        state: State of the run.
        path: Path of the file, if it ends in `.pkl`; otherwise of the folder with `resumption.pkl`.
        trusted: As for `load_checkpoint`.

    Raises:
        NoCheckpointError: If the file does not exist.
        CheckpointError: If it is damaged, or has more than data.
    """
    text = os.fspath(path)
    file = text if text.endswith(".pkl") else os.path.join(text, "resumption.pkl")
    with restore.read_on_rank_zero(file, lambda content: _as_state(content, file), trusted=trusted) as content:
        saved = Ranks().from_first(lambda: content)
    rng = saved.pop("rng", None)
    state.load_state_dict(saved)
    # Last, since loading the rest may draw random numbers.
    if rng is not None:
        load_rng_state(rng)


def _targets(
    options: CheckpointLoadOptions, model: nn.Module | None, optim: torch.optim.Optimizer | None, state: State | None
) -> tuple[nn.Module | None, torch.optim.Optimizer | None]:
    for wanted, given, what in ((options.load_model, model, "Model"), (options.load_optimizer, optim, "Optimizer")):
        if wanted and given is None and state is None:
            raise ValueError(f"{what} or state must be provided if loading {what.lower()} checkpoint.")
    if options.load_resumption_state and state is None:
        raise ValueError("State must be provided if loading resumption state.")
    if state is not None:
        # Arguments take precedence over the state.
        model = state.model if model is None else model
        optim = state.optimizers[0] if optim is None and len(state.optimizers) == 1 else optim
    if options.load_optimizer and (model is None or optim is None):
        raise ValueError(
            "Optimizer and model, or a state with one of each, must be provided if loading optimizer checkpoint: the "
            "model owns the parameters' names."
        )
    return model, optim


def _shard_as_needed(
    model: nn.Module, optim: torch.optim.Optimizer | None, options: CheckpointLoadOptions, seed: int
) -> None:
    if not options.shard_as_needed_during_load or is_sharded(model):
        return
    # Collected first, since sharding replaces the parameters.
    before = parameters_by_name(model)
    # Optimizer state has the shapes of the unsharded parameters.
    if optim is not None and optim.state:
        raise ValueError(
            "the optimizer has stepped, and its state would not fit the model that shard_as_needed_during_load=True "
            "shards. Pass a new optimizer, or shard the model before the optimizer is made."
        )
    restore.shard_model(model, options, seed)
    if optim is not None:
        restore.follow_parameters(optim, model, before)


def _refuse_other_kind(
    model: nn.Module, source: restore.Source, options: CheckpointLoadOptions, *, is_optimizer: bool = False
) -> None:
    sharded, wanted = is_sharded(model), options.sharded_checkpoint
    what = "the model of the optimizer" if is_optimizer else "the model"
    if is_optimizer and options.shard_as_needed_during_load and not sharded:
        raise ValueError(
            "shard_as_needed_during_load=True, and the model is not sharded: an optimizer is not sharded by itself. "
            "Load the model at the same time, or shard it first."
        )
    if source.is_sharded and not sharded and wanted:
        raise ValueError(
            f"{source.path} is a sharded checkpoint, and {what} is not sharded. Shard it first, pass "
            f"shard_as_needed_during_load=True with the model, or sharded_checkpoint=None to load it as it is."
        )
    if not source.is_sharded and sharded and wanted is False and not options.shard_as_needed_during_load:
        raise ValueError(
            f"{source.path} is not a sharded checkpoint, and {what} is sharded. Pass shard_as_needed_during_load=True "
            f"or sharded_checkpoint=None, and each rank gets its shards of it."
        )


def _as_options(options: CheckpointLoadOptions | Mapping[str, Any] | None) -> CheckpointLoadOptions:
    if isinstance(options, CheckpointLoadOptions):
        return replace(options)  # repeats the checks, since attributes may have been set after construction
    return CheckpointLoadOptions(**(options or {}))


def _as_state(content: Any, path: str) -> dict[str, Any]:
    """Return resumption state in the layout of `State.state_dict`."""
    if not isinstance(content, dict):
        raise IncompatibleCheckpointError(
            f"{path} holds a {type(content).__name__}, and no resumption state. Name the resumption.pkl of a "
            f"checkpoint."
        )
    saved = dict(content)
    if "timestamp" in saved:
        stopped = {name: saved.pop(name) for name in ("stopped_duration",) if name in saved}
        # `State` loads both from one entry.
        saved["timestamp"] = {"Timestamp": saved["timestamp"], **stopped}
    return saved

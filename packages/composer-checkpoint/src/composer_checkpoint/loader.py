"""Loading a checkpoint into a training state."""

import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer_checkpoint._compatibility import advice_for_hugging_face, refuse_another_model, refuse_unfitting_state
from composer_checkpoint._ranks import Ranks, fetch_together, not_here, of_first_rank_of_node
from composer_checkpoint.commit import read_pointer
from composer_checkpoint.errors import IncompatibleCheckpointError, NoCheckpointError, shown
from composer_checkpoint.files import load_file, read_manifest, safe_torch_load
from composer_checkpoint.ignore_keys import IgnoreKeys, check_ignore_keys, without_keys
from composer_checkpoint.lock import complete_interrupted_sets
from composer_checkpoint.manifest import LAYOUT_KEY
from composer_checkpoint.state import (
    PARTS,
    TRAIN_DATA_KEY,
    Layout,
    as_sharded,
    as_whole,
    describe_train_data,
    layout_of,
    load_parts,
    other_number_of_ranks,
    owner_of,
    read_sharded,
    to_dtensors,
)
from composer_dist import dist
from composer_dist.reproducibility import load_rng_state
from composer_dist.wrapping import unwrap_model
from composer_events.arguments import check_flags, check_places
from composer_events.batches import ensure_tuple
from composer_events.callback import Callback
from composer_events.data_position import DataPosition, leave_epoch
from composer_events.event import Event
from composer_events.formatting import format_name_with_dist, partial_format
from composer_events.logger import Logger
from composer_events.state import State

if TYPE_CHECKING:
    from composer_checkpoint._ignored_optimizer_state import KeptOptimizers

log = getLogger(__name__)

_ADDRESS = re.compile("[^:]*://|dbfs:")  # as `is_uri`, which would import the stores


def load_checkpoint(
    path: str | os.PathLike[str],
    state: State,
    logger: Logger | None,
    object_store: Any = None,
    load_weights_only: bool = False,
    strict_model_weights: bool = True,
    progress_bar: bool = True,
    ignore_keys: IgnoreKeys | None = None,
    exclude_algorithms: Sequence[str] | None = None,
    algorithm_passes: Sequence[Any] | None = None,
    *,
    verify: bool = True,
    trusted: bool = False,
    restart_epoch: bool = False,
) -> list[dict[str, Any]] | None:
    """Load a checkpoint into a training state. Every rank must call this.

    The hashes of the file are verified before the state is changed. Algorithms that changed the saved model are applied
    to this model before the weights are loaded.

    Args:
        path: A file, the folder of a sharded checkpoint, or an address; `{run_name}` is filled in. `{rank}` is 0 for a
            checkpoint in one file, and each rank's own for per-rank files.
        state: The state to change.
        logger: Passed to algorithms that are applied.
        object_store: Holds `path`: an `ObjectStore`, or a logger destination that can download.
        load_weights_only: Load the model, and nothing else.
        strict_model_weights: Whether missing and unexpected weights are an error with `load_weights_only` or a sharded
            checkpoint; otherwise they are logged. Weights of another shape, or integers in place of floating point
            numbers, are always an error, except that they are left out with `load_weights_only` and without this.
        progress_bar: Whether to show the progress of a download.
        ignore_keys: Patterns of entries to leave out, such as `'state/optimizers/*'`, or a function that deletes from
            the checkpoint's dict. Leaving out a weight also leaves out its state in optimizers and algorithms. An
            optimizer keeps its own values for entries that are left out, such as `'state/optimizers/*/lr'`.
        exclude_algorithms: Class names of algorithms not to apply.
        algorithm_passes: The engine's passes, which order those algorithms.
        verify: Whether hashes are compared.
        trusted: Allow the file to run code while it is loaded, and log a warning with its hash.
        restart_epoch: Restart the epoch inside which the checkpoint was saved, with the current data.

    Returns:
        Each rank's random numbers for `composer_dist.reproducibility.load_rng_state`, or `None` if there are none or
        only the model is loaded.

    Raises:
        NoCheckpointError: If the checkpoint does not exist; it is a `FileNotFoundError`.
        CheckpointError: On all ranks, if it is damaged, unsafe, of another model, or from inside an epoch of another
            dataset.
        UnfittingWeightsError: If weights do not fit the model, which is a `RuntimeError`; nothing was changed.
        RuntimeError: If the ranks have loaded different checkpoints.
        UnfittingOptimizerError: If the optimizer and the saved one have different parameters, which is a `KeyError`;
            nothing was changed. An optimizer of another class only causes a warning, and is reinitialized.
    """
    run_name, path = state.run_name, os.fspath(path)
    if ignore_keys is not None:
        check_ignore_keys("load_ignore_keys", ignore_keys)
    with (
        _fetched(path, state, object_store, progress_bar) as local_path,
        # A file holds the whole state, in any layout of this run.
        as_whole(state) if os.path.isfile(local_path) else nullcontext(),
    ):
        content = _read(local_path, state, load_weights_only, verify=verify, trusted=trusted)
        if not load_weights_only:
            _warn_of_missing_parts(state, content["state"])
        content, kept = _without_ignored(content, state, ignore_keys, load_weights_only)
        saved: dict[str, Any] = content["state"]
        # When a whole run is resumed from one file, missing and unexpected weights are only logged.
        strict = strict_model_weights and (load_weights_only or layout_of(state) is not Layout.MONOLITHIC)
        leaves_out = load_weights_only and not strict_model_weights
        # Together, since only rank 0 may have read the file.
        Ranks().together(lambda: refuse_another_model(state, saved, local_path, strict=strict, leaves_out=leaves_out))
        if not load_weights_only:
            _prepare(state, saved, local_path, restart_epoch)
        _put_into(state, saved, load_weights_only, logger, strict, exclude_algorithms, algorithm_passes)
        if _is_mapped(state) and not load_weights_only:
            _leave_mapped_memory(state)
        if kept is not None:
            kept.put_back()
    # Loading the state has set the name of the saved run.
    state.run_name, state.load_path = run_name, path
    batches = dist.all_gather_object(int(state.timestamp.batch))
    if len(set(batches)) > 1:
        raise RuntimeError(
            f"Timestamp mismatch error: the ranks have loaded checkpoints of different batches, "
            f"{dict(enumerate(batches))}. load_path must name the same checkpoint on every rank."
        )
    log.info("Loaded %s.", path)
    if load_weights_only:
        return None
    # Before the position is resumed, since leaving the epoch discards the saved position in it.
    _adapt_batches(state, saved)
    rng: list[dict[str, Any]] | None = content.get("rng") or None
    if (position := DataPosition.of(state)) is not None:
        position.resume(rng, state, load_rng_state)
    return rng


def _without_ignored(
    content: dict[str, Any], state: State, ignore_keys: IgnoreKeys | None, load_weights_only: bool
) -> "tuple[dict[str, Any], KeptOptimizers | None]":
    if ignore_keys is None:
        return content, None
    before = content["state"]
    content = without_keys(content, ignore_keys, "load_ignore_key")
    if load_weights_only:
        return content, None
    from composer_checkpoint._ignored_optimizer_state import KeptOptimizers, leave_out_their_state

    kept = KeptOptimizers(state, before, content["state"])
    # After that, which would otherwise keep the optimizer's own state for the entries removed here.
    if isinstance(before.get("model"), Mapping):
        leave_out_their_state(state, before["model"], content["state"])
    return content, kept


def _prepare(state: State, saved: dict[str, Any], path: str, restart_epoch: bool) -> None:
    """Convert a training state for loading, and refuse one that does not fit, before anything is changed."""
    if restart_epoch:
        _begin_epoch_again(saved)
    ranks = Ranks()
    ranks.together(lambda: _refuse_other_data(saved, state, path) if ranks.rank == 0 else None)
    _restore_clocks(saved)
    ranks.together(lambda: refuse_unfitting_state(state, saved, path))


def _begin_epoch_again(saved: dict[str, Any]) -> None:
    """Reset a checkpoint from inside an epoch to the start of that epoch."""
    saved.pop("dataset_state", None)
    timestamps = saved.get("timestamp") or {}
    timestamp = timestamps.get("Timestamp", timestamps)
    for name in timestamp:
        if name.endswith("_in_epoch"):
            timestamp[name] = 0
        elif name in ("epoch_wct", "batch_wct"):
            timestamp[name] = timedelta()


def _refuse_other_data(saved: Mapping[str, Any], state: State, path: str) -> None:
    """Refuse a checkpoint from inside an epoch of other data, since its remaining batches are unknown."""
    metadata, timestamps = saved.get("metadata"), saved.get("timestamp")
    if not isinstance(metadata, Mapping) or not isinstance(timestamps, Mapping):
        return
    before, now = metadata.get(TRAIN_DATA_KEY), describe_train_data(state)
    timestamp = timestamps.get("Timestamp", timestamps)
    if not isinstance(before, Mapping) or not isinstance(timestamp, Mapping) or not timestamp.get("batch_in_epoch"):
        return
    differing = [name for name, value in now.items() if name in before and before[name] != value]
    if differing:
        told = " and ".join(f"{name}={shown(before[name])} (now {now[name]!r})" for name in differing)
        raise IncompatibleCheckpointError(
            f"{path} was saved inside epoch {shown(timestamp.get('epoch'))}, after "
            f"{shown(timestamp['batch_in_epoch'])} batches of a train dataset with {told}, so the remaining samples of "
            f"the epoch are unknown. Train on the same data, load a checkpoint from the end of an epoch, restart the "
            f"epoch with load_restart_epoch=True of the Trainer or restart_epoch=True of load_checkpoint(), or skip "
            f"as many batches of the current data with load_ignore_keys=['state/metadata/{TRAIN_DATA_KEY}/*']."
        )


def load_sharded_checkpoint(
    source_path: str | os.PathLike[str],
    state: State,
    logger: Logger | None,
    object_store: Any = None,
    *arguments: Any,
    **settings: Any,
) -> list[dict[str, Any]] | None:
    """Load the folder of a sharded checkpoint into a training state with any sharding.

    The other arguments, the result and the errors are those of `load_checkpoint`. Every rank must call this.

    Raises:
        ValueError: If `source_path` is a file.
    """
    own = path_on_this_rank(os.fspath(source_path), state)
    if object_store is None and os.path.isfile(read_pointer(own) or own):
        raise ValueError(
            f"source_path={os.fspath(source_path)!r} is a file, and a sharded checkpoint is a folder. Name the folder, "
            f"or load the file with load_checkpoint()."
        )
    return load_checkpoint(source_path, state, logger, object_store, *arguments, **settings)


def _put_into(
    state: State, saved: dict[str, Any], load_weights_only: bool, logger: Logger | None, strict: bool, *algorithms: Any
) -> None:
    strategy = owner_of(state)
    # The strategy loads its parts itself; the state loads the rest.
    if strategy is not None:
        parts = {name: saved[name] for name in (PARTS[:1] if load_weights_only else PARTS) if name in saved}
        load_parts(state, strategy, parts, strict=strict)
        saved = {name: value for name, value in saved.items() if name not in PARTS}
    with as_sharded(state):
        if not load_weights_only:
            state.load_state_dict(saved, logger, strict, *algorithms)
        elif "model" in saved:
            state.load_model_state(saved, logger, strict, *algorithms)


@contextmanager
def _fetched(path: str, state: State, object_store: Any, progress_bar: bool) -> Iterator[str]:
    """Yield the path at which this rank can open a checkpoint, which is downloaded first if it is remote."""
    is_local_layout = layout_of(state) is Layout.LOCAL
    own = path_on_this_rank(path, state)
    folder: str | None = None
    if object_store is None and layout_of(state) is Layout.SHARDED and _ADDRESS.match(own):
        folder = Ranks().from_first(lambda: _follow_to_folder(own))
    if object_store is None and (not _ADDRESS.match(own) or folder is not None):
        if is_local_layout:
            # A save that was killed between two renames is completed first: its files would be mixed with older ones.
            saved_to = os.path.dirname(own)
            Ranks().together(lambda: complete_interrupted_sets(saved_to) if dist.get_global_rank() == 0 else None)
        yield folder or _existing(own, path, state)
        return
    # Here, so that local checkpoints do not load the stores.
    from composer_checkpoint.remote.fetch import get_file_and_shards

    with tempfile.TemporaryDirectory(prefix="composer-load-") as folder:
        # The ranks of a node share the files that its first rank downloads.
        shared = folder if is_local_layout else of_first_rank_of_node(folder)
        # A pointer is followed to its target, and the format of the target follows from the name.
        destination = os.path.join(shared, os.path.basename(own).removesuffix(".symlink"))
        fetches = is_local_layout or dist.get_local_rank() == 0
        fetch = partial(get_file_and_shards, own, destination, object_store, progress_bar)
        try:
            fetch_together(fetch if fetches else lambda: None)
        except Exception:  # raised on all ranks
            if is_local_layout:
                _refuse_other_number_of_ranks(destination)
            raise
        yield destination
        dist.barrier()  # the rank that downloaded deletes the folder


def check_local_path(path: str, state: State) -> None:
    """Raise on all ranks if a local checkpoint does not exist for all of them. Every rank must call this."""
    own = path_on_this_rank(path, state)
    if not _ADDRESS.match(own):
        _existing(own, path, state)


def path_on_this_rank(path: str, state: State) -> str:
    """Fill in the run name and the ranks: this rank for per-rank files, else rank 0."""
    if layout_of(state) is Layout.LOCAL:
        if "{rank}" not in path and dist.get_world_size() > 1:
            if any(dist.all_gather_object(os.path.isdir(path))):
                return path  # a folder is shared by all ranks
            raise ValueError(
                f"load_path={path!r} is one file for {dist.get_world_size()} ranks, and with state_dict_type='local' "
                f"each loads its own. Put {{rank}} into it, as in 'checkpoints/ba2_rank{{rank}}.pt'."
            )
        return format_name_with_dist(path, state.run_name)
    return format_name_with_dist(partial_format(path, rank=0, local_rank=0, node_rank=0), state.run_name)


def _follow_to_folder(path: str) -> str | None:
    """Return the address of the folder that an address or a pointer names, or `None` if it names a file."""
    # Here, so that local checkpoints do not load the stores.
    from composer_checkpoint.remote.fetch import extract_path_from_symlink
    from composer_checkpoint.remote.publish import SYMLINK_SUFFIX
    from composer_checkpoint.save_folder import is_name_of_file
    from composer_checkpoint.sharded._storage import store_of
    from composer_checkpoint.stores.base import has_object

    store, name = store_of(path, {})
    if not name.endswith(SYMLINK_SUFFIX) and is_name_of_file(name) and has_object(store, name):
        return None
    try:
        target = extract_path_from_symlink(name.removesuffix(SYMLINK_SUFFIX) + SYMLINK_SUFFIX, store)
    except FileNotFoundError:
        return path
    is_file = is_name_of_file(target) and has_object(store, target)
    return None if is_file else path.rstrip("/").removesuffix(name) + target


def _existing(own: str, path: str, state: State) -> str:
    """Return the target of a local path, and raise on all ranks if any of them does not see it."""
    own = os.fspath(read_pointer(own) or own)
    # Compared first, so that all ranks raise. A rank that raised by itself would leave the others in a collective.
    have_it = dist.all_gather_object(os.path.exists(own))
    if all(have_it):
        return own
    if not have_it[0]:
        if dist.get_global_rank() == 0:
            raise NoCheckpointError(f"Local path {own} does not exist (load_path={path!r}). {_sharded_beside(own)}")
        raise NoCheckpointError(not_here(own, 0, "it has no such file"))
    if layout_of(state) is Layout.LOCAL:
        _refuse_other_number_of_ranks(own)
    missing = [rank for rank, has_it in enumerate(have_it) if not has_it]
    raise NoCheckpointError(
        f"{own} exists on rank 0, and not on ranks {missing}: No such file or directory there. Save to a disk that all "
        f"nodes share, or to a store."
    )


def _sharded_beside(path: str) -> str:
    """Return advice for a missing file, for which there is often the folder of a sharded checkpoint."""
    found = {place.parent for pattern in (".metadata", "*/.metadata") for place in Path(path).parent.glob(pattern)}
    if not found:
        return "Check the path."
    # The best match first, such as ep1-ba2 for ep1-ba2-rank0.pt, then the newest.
    name = os.path.basename(path)
    best = sorted(found, key=lambda folder: (not name.startswith(folder.name), -folder.stat().st_mtime))
    return f"Sharded checkpoints are folders, which are loaded by their names: {', '.join(map(str, best[:3]))}."


def _refuse_other_number_of_ranks(own: str) -> None:
    """Raise if the manifest of rank 0's file names fewer ranks than there are now. Every rank must call this."""
    ranks = Ranks()

    def saved_by() -> int | None:
        manifest = read_manifest(own) if os.path.isfile(own) else None
        return None if manifest is None else manifest.info.get("world_size")

    saved = ranks.from_first(saved_by)
    if saved is not None and saved < ranks.world_size:
        raise other_number_of_ranks(own, saved)


def _read(path: str, state: State, load_weights_only: bool, *, verify: bool, trusted: bool) -> dict[str, Any]:
    """Return a checkpoint's content after verifying its hashes, without changing the state."""
    if _ADDRESS.match(path) or os.path.isdir(path):
        try:
            return read_sharded(path, state, load_weights_only, verify=verify)
        except NoCheckpointError as error:
            if advice := advice_for_hugging_face(path):
                raise IncompatibleCheckpointError(f"{error}{advice}") from error
            raise
    if state.load_monolith_rank0_only:
        content = safe_torch_load(path, load_monolith_rank0_only=True, verify=verify, trusted=trusted)
    else:
        # On CPU the file is not memory-mapped: the optimizer would keep working on the mapped memory.
        content = Ranks().together(lambda: load_file(path, mmap=_is_mapped(state), verify=verify, trusted=trusted))
    if isinstance(content, dict) and isinstance(content.get("state"), dict):
        if LAYOUT_KEY not in content:
            return content
        # Every rank would otherwise load the shards of one rank as its own.
        if layout_of(state) is not Layout.LOCAL and (state.fsdp_enabled or dist.get_world_size() > 1):
            raise ValueError(
                f"load_path={path!r} is one rank's own file of {content[LAYOUT_KEY]['world_size']}, as "
                f"state_dict_type='local' writes them, and without that type a checkpoint is one whole file or a "
                f"folder. Load it with state_dict_type='local' and {{rank}} in its name, or put the files together "
                f"with composer_checkpoint.formats.per_rank.merge_local."
            )
        return to_dtensors(content, state, path)
    if load_weights_only and isinstance(content, dict) and all(map(torch.is_tensor, content.values())):
        return {"state": {"model": content}}  # a model's own state dict
    raise IncompatibleCheckpointError(
        f"{path} has no 'state', so it is not a checkpoint of a training run. Load weights alone with "
        f"load_weights_only=True, or name another checkpoint.{advice_for_hugging_face(path)}"
    )


def _is_mapped(state: State) -> bool:
    return getattr(state.device, "name", "cpu") != "cpu"


def _leave_mapped_memory(state: State) -> None:
    """Copy what an optimizer keeps on the CPU, such as Adam's step counts, out of the file that was loaded.

    The file may be deleted while the optimizer is in use, or truncated, which would end the process.
    """
    for entries in (entries for optimizer in state.optimizers for entries in optimizer.state.values()):
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and value.is_cpu:
                entries[name] = value.clone()


def _warn_of_missing_parts(state: State, saved: Mapping[str, Any]) -> None:
    """Warn of state that training needs and a checkpoint, such as one of weights alone, does not have."""
    # Old releases of Composer saved some parts under private names.
    present = {str(name).removeprefix("_") for name in saved}
    for part in ("optimizers", "schedulers", "scaler", "callbacks", "timestamp"):
        for owner in () if part in present else ensure_tuple(getattr(state, part)):
            warnings.warn(
                f"{type(owner).__qualname__} is not in the state_dict. Its state will not be restored.",
                UserWarning,
                stacklevel=3,
            )


def _restore_clocks(saved: dict[str, Any]) -> None:
    """Convert seconds to timedeltas. Files store seconds, so that they can be loaded with torch alone."""
    timestamps = saved.get("timestamp")
    # The clocks are nested below `Timestamp`, or at the top level.
    for timestamp in [timestamps, *timestamps.values()] if isinstance(timestamps, dict) else []:
        if isinstance(timestamp, dict):
            for name, value in timestamp.items():
                if str(name).endswith("_wct") and isinstance(value, int | float):
                    with suppress(OverflowError, ValueError):  # an impossible length, which is refused later
                        timestamp[name] = timedelta(seconds=value)


def _adapt_batches(state: State, saved: dict[str, Any]) -> None:
    """Keep the global batch size on another number of ranks, or move on to the next epoch if it has changed.

    With another global batch size, the batch count of an epoch does not apply.
    """
    metadata: Any = saved.get("metadata")
    batch_size = getattr(state.train_dataloader, "batch_size", None)
    if not isinstance(metadata, dict) or not isinstance(batch_size, int):
        return
    saved_size, saved_ranks = metadata.get("train_dataloader_batch_size"), metadata.get("world_size")
    saved_ranks = metadata.get("num_data_shares", saved_ranks)  # fewer if ranks split tensors
    position = DataPosition.of(state)
    num_shares = dist.get_world_size() if position is None else position.num_shares
    if not isinstance(saved_size, int) or not isinstance(saved_ranks, int):
        return
    before, now = saved_size * saved_ranks, batch_size * num_shares
    asked = os.environ.get(_POLICY_VARIABLE, "")
    if before == now or (saved_ranks != num_shares and _keep_global(position, before, batch_size, num_shares, asked)):
        return
    if state.timestamp.batch_in_epoch > 0:
        leave_epoch(state, saved.get("dataset_state"))
        warnings.warn(
            f"The checkpoint was saved inside an epoch of batches of {saved_size} samples on {saved_ranks} ranks, "
            f"{before} in all, and now a batch has {now}. Training goes on with the next epoch, number "
            f"{int(state.timestamp.epoch)}. To finish the saved epoch, make batch_size times the ranks {before}.",
            UserWarning,
            stacklevel=3,
        )


_POLICY_VARIABLE = "COMPOSER_ELASTIC_BATCH"  # set by `composer --elastic-batch`
_KEEP_GLOBAL, _KEEP_PER_DEVICE = "keep-global", "keep-per-device"


def _keep_global(position: DataPosition | None, before: int, batch_size: int, num_shares: int, asked: str) -> bool:
    """Change the batch size of each rank so that the global one stays, and return whether that was done."""
    if asked not in ("", _KEEP_GLOBAL, _KEEP_PER_DEVICE):
        raise ValueError(f"{_POLICY_VARIABLE}={asked!r} must be {_KEEP_GLOBAL!r} or {_KEEP_PER_DEVICE!r}.")
    if asked != _KEEP_GLOBAL:
        return False
    change = None if position is None else position.change_batch_size
    if before % num_shares == 0 and change is not None and change(before // num_shares):
        warnings.warn(
            f"The global batch size stays {before}, as in the checkpoint: each of {num_shares} ranks reads "
            f"{before // num_shares} samples per batch instead of {batch_size}, with gradient accumulation if these "
            "are more.",
            UserWarning,
            stacklevel=4,
        )
        return True
    raise ValueError(
        f"{_POLICY_VARIABLE}={asked!r} needs a torch DataLoader with a batch_size over a map-style dataset, no "
        f"DeepSpeed, and a number of ranks that divides the global batch size {before} of the checkpoint; got "
        f"{num_shares}. Start another number of ranks, or make the DataLoader with {before} samples over all ranks."
    )


class LoadCheckpoint(Callback):
    """Load a checkpoint at an event, in addition to `load_path` and independently of `autoresume`.

    Args:
        load_path: As in `load_checkpoint`.
        load_weights_only: Load the model, and nothing else.
        strict_model_weights: Whether missing and unexpected weights are an error, with `load_weights_only`.
        ignore_keys: Patterns of entries to leave out, or a function.
        event: The event to load at. By default, before the checkpoint of the run is searched for.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `load_path` is empty, or the event is unknown.
    """

    def __init__(
        self,
        load_path: str | os.PathLike[str],
        load_weights_only: bool = False,
        strict_model_weights: bool = True,
        ignore_keys: IgnoreKeys | None = None,
        event: str | Event = Event.BEFORE_LOAD,
    ) -> None:
        check_places(load_path=load_path)
        check_flags(may_be_none=True, load_weights_only=load_weights_only, strict_model_weights=strict_model_weights)
        check_ignore_keys("ignore_keys", ignore_keys)
        self.load_path = os.fspath(load_path)
        if not self.load_path:
            raise ValueError("load_path='' names no checkpoint. Pass a path or an address.")
        if not isinstance(event, str | Event):
            raise TypeError(f"event={event!r} is not an event. Pass one such as Event.BEFORE_LOAD, or its name.")
        self.load_weights_only = load_weights_only
        self.strict_model_weights = strict_model_weights
        self.ignore_keys = ignore_keys
        self.event = Event(event)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Load the checkpoint at the chosen event."""
        if event is self.event:
            self._load(state, logger)

    def _load(self, state: State, logger: Logger) -> None:
        # A model that saves its adapter alone must still load a checkpoint from before the adapter in full.
        model: Any = unwrap_model(state.model)
        saves_adapter_alone = getattr(model, "should_save_peft_only", None)
        load_path = state.load_path
        if saves_adapter_alone is not None:
            model.should_save_peft_only = False
        try:
            load_checkpoint(
                path=self.load_path,
                state=state,
                logger=logger,
                load_weights_only=self.load_weights_only,
                strict_model_weights=self.strict_model_weights,
                ignore_keys=self.ignore_keys,
            )
        finally:
            # This checkpoint is not the one that the run was resumed from.
            state.load_path = load_path
            if saves_adapter_alone is not None:
                model.should_save_peft_only = saves_adapter_alone

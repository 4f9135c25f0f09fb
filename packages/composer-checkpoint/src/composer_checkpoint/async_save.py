"""Background saves: the state is copied, and another thread writes the copy while training continues."""

import copy
import io
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from logging import getLogger
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as tdist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from composer_checkpoint._ranks import Ranks
from composer_checkpoint._staging import Snapshot, StagingArea, storage_key
from composer_checkpoint._tree import named_leaves
from composer_checkpoint.commit import refuse_existing, write_on_rank_zero
from composer_checkpoint.files import save_file
from composer_checkpoint.formats.per_rank import local_content, own_path, write_together
from composer_checkpoint.formats.pt import refuse_what_is_elsewhere
from composer_checkpoint.sharded._metadata import part_name
from composer_checkpoint.sharded._storage import is_remote
from composer_checkpoint.sharded.save import plan_save, write_planned
from composer_checkpoint.sharded.writer import VerifiedWriter
from composer_dist.collectives import is_initialized

log = getLogger(__name__)

Job = Callable[[], object]


class AsyncSaver:
    """Save one checkpoint at a time in the background.

    `save` copies the state and returns; later training steps do not change the checkpoint. A thread writes, hashes and
    flushes the copy, and communicates with other ranks in a gloo group of its own. The checkpoint does not exist until
    all of it is on disk.

    In the training loop:

        saver.save(state_dict, "runs/ep1", sharded=True, stable_until_step=parameters_and_optimizer_state)
        ...                         # forward and backward
        saver.wait_for_staging()    # right before the optimizer's step
        saver.check()               # once a step: raises errors of the background thread, on all ranks
        ...
        saver.wait()                # at the end of training, and after an exception in it

    Every rank of the group must create one, and call `save`, `check`, `wait` and `close` in the same order.

    Args:
        process_group: The ranks that save. All of them when `None`.
        policy: What `save` does while the previous checkpoint is being written: `'wait'` for it, or `'skip'` this one.
        timeout_s: Time limit in seconds for the write of each rank. The save fails if a rank does not respond within
            three times as long. `None` sets no limit.

    Raises:
        ValueError: If `policy` is not one of these.

    Example:
        >>> import tempfile
        >>> weight = torch.zeros(2)
        >>> with AsyncSaver() as saver:
        ...     path = tempfile.mkdtemp() + "/ep1.pt"
        ...     saved = saver.save({"w": weight}, path)
        ...     weight += 1  # training continues
        >>> torch.load(path)
        {'w': tensor([0., 0.])}
    """

    def __init__(
        self,
        *,
        process_group: "ProcessGroup | None" = None,
        policy: Literal["wait", "skip"] = "wait",
        timeout_s: float | None = None,
    ) -> None:
        if policy not in ("wait", "skip"):
            raise ValueError(f"policy={policy!r} is not known. Use 'wait' or 'skip'.")
        self._policy = policy
        # Two groups: while the background thread waits for other ranks in one, training polls in the other. Collectives
        # of two threads in one group would be mixed up.
        self._groups = _two_groups(process_group)
        ours, its = self._groups or (None, None)
        self._ranks, self._background_ranks = Ranks(ours), Ranks(its, timeout_s=timeout_s)
        self._staging = StagingArea()
        # One thread: `save` never begins a write before the previous one has ended on all ranks.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._snapshot: Snapshot | None = None
        self._writing: Future[None] | None = None

    @property
    def is_saving(self) -> bool:
        """Return whether a save has begun that `check` or `wait` has not yet seen end; the same on all ranks."""
        return self._writing is not None

    def save(
        self,
        state_dict: Mapping[str, Any],
        path: str | os.PathLike[str],
        *,
        sharded: bool = False,
        local: bool = False,
        info: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        stable_until_step: Iterable[torch.Tensor] = (),
        then: Callable[[], None] | None = None,
        planner: SavePlanner | None = None,
    ) -> bool:
        """Copy the state and begin to write it. Every rank must call this.

        Args:
            state_dict: The state to save. For a single file, rank 0's is written, and those of other ranks should be
                empty.
            path: The file; the folder if `sharded`; a path with `{rank}` in it if `local`.
            sharded: Whether each rank writes its own shards into one folder, as `save_sharded` does.
            local: Whether each rank writes its own shards to a separate file, as `save_local` does.
            info: Entries of the manifest about the run.
            overwrite: Whether a checkpoint of this name may be replaced.
            storage_options: For fsspec, if the folder of a sharded checkpoint is a URI.
            stable_until_step: Tensors that nothing changes before `wait_for_staging`, such as parameters and optimizer
                state, but not buffers that the forward pass changes. They are copied in the background of training; all
                others are copied before this returns. A change that comes too early fails the save if autograd counts
                it; changes through `.data` are not detected.
            then: Called by each rank's background thread once the checkpoint exists, for example to move a pointer to
                it.
            planner: If sharded, the planner that assigns the writes to ranks, as in `save_sharded`.

        Returns:
            Whether the save was begun; false if it was skipped.

        Raises:
            CheckpointError: If the previous save failed, or this one cannot be begun.
            TypeError: If a tensor is on the meta device, where it has no elements, or a DTensor in a single file.
            ValueError: If a single file is to be written to a URI; or if `local` is set for several ranks without
                `{rank}` in the path, or together with `sharded`.
        """
        if sharded and local:
            raise ValueError("sharded=True and local=True contradict each other: one folder, or a file for each rank.")
        if not sharded and is_remote(path):
            raise ValueError(f"path={path!r} is a URI, and a single file is saved locally. Upload it by `then`.")
        self.check()
        if self.is_saving:
            if self._policy == "skip":
                log.warning("%s is skipped: the previous checkpoint is still being written.", path)
                return False
            self.wait()
        stable = {storage_key(t.to_local() if isinstance(t, DTensor) else t) for t in stable_until_step}

        def may_wait(tensor: torch.Tensor) -> bool:
            return storage_key(tensor) in stable

        if sharded:
            writer = VerifiedWriter(path, info=info, overwrite=overwrite, storage_options=storage_options)
            write = self._prepare_sharded(state_dict, writer, planner, may_wait)
        else:
            write = self._prepare_file(state_dict, path, info, overwrite, may_wait, is_local=local)
        snapshot = self._snapshot

        def write_and_then() -> None:
            try:
                write()
            finally:
                # After an error before the copies were made, `wait_for_staging` would block forever.
                if snapshot is not None:
                    snapshot.release()
            if then is not None:
                then()

        self._writing = self._thread.submit(write_and_then)
        return True

    def wait_for_staging(self) -> None:
        """Wait until parameters and optimizer state may be changed. Call this right before each optimizer step."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None

    def check(self) -> None:
        """Finish a save that has ended on all ranks, without waiting for one that has not. Every rank must call this.

        The ranks communicate only while a save is in progress.

        Raises:
            CheckpointError: On all ranks, if it failed on any.
        """
        if self._writing is not None and self._ranks.all(self._writing.done()):
            self.wait()

    def wait(self) -> None:
        """Wait until the save has ended. Every rank must call this.

        Raises:
            CheckpointError: On all ranks, if it failed on any.
        """
        self.wait_for_staging()
        writing, self._writing = self._writing, None
        if writing is not None:
            self._ranks.together(writing.result)

    def drain(self) -> None:
        """Wait until this rank's part of the save has ended, without other ranks. A failure is logged.

        Meant for the cleanup after an exception on this rank, when the others do not take part.
        """
        writing, self._writing, self._snapshot = self._writing, None, None
        if writing is not None and (error := writing.exception()):
            log.error("The checkpoint that was being written when training stopped failed: %s", error)

    def close(self) -> None:
        """Wait for the save, and release memory, thread and groups. Every rank must call this.

        Raises:
            CheckpointError: On all ranks, if the save failed on any.
        """
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.drain()
            # Other ranks may not have left, so nothing here may need them.
            self._release()

    def _release(self) -> None:
        self._thread.shutdown()
        self._staging.close()
        groups, self._groups = self._groups, ()
        for group in groups:
            tdist.destroy_process_group(group)

    def _prepare_sharded(
        self,
        state_dict: Mapping[str, Any],
        writer: VerifiedWriter,
        planner: SavePlanner | None,
        may_wait: Callable[[torch.Tensor], bool],
    ) -> Job:
        # Every rank plans in this thread, so that training cannot change the tensors before they are staged.
        planned = plan_save(state_dict, writer, self._ranks, planner)
        pickled: dict[str, io.BytesIO] = {}

        def stage() -> Snapshot:
            data = {_name(item): planned.planner.resolve_data(item) for item in planned.plan.items}
            pickled.update((name, value) for name, value in data.items() if not isinstance(value, torch.Tensor))
            tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
            self._snapshot = self._staging.snapshot(tensors, may_wait)
            return self._snapshot

        try:
            snapshot = self._ranks.together(stage)
        except BaseException as error:
            writer.abort(error)
            raise
        data = _SnapshotPlanner(snapshot, pickled)
        return lambda: write_planned(planned, data, writer, self._background_ranks, snapshot.confirm)

    def _prepare_file(
        self,
        state_dict: Mapping[str, Any],
        path: str | os.PathLike[str],
        info: Mapping[str, Any] | None,
        overwrite: bool,
        may_wait: Callable[[torch.Tensor], bool],
        *,
        is_local: bool,
    ) -> Job:
        final, ranks = Path(os.path.abspath(path)), self._background_ranks
        if is_local:
            final = own_path(path, self._ranks)
            state_dict, info = local_content(state_dict, info, self._ranks)

        def stage() -> Callable[[Path], object] | None:
            if ranks.rank and not is_local:
                return None
            refuse_existing(final, overwrite)
            return self._stage_content(state_dict, info, may_wait)

        job = self._ranks.together(stage) or (lambda unfinished: None)
        if is_local:
            return lambda: write_together(final, job, ranks, overwrite)
        return lambda: write_on_rank_zero(final, job, ranks, overwrite=overwrite)

    def _stage_content(
        self, state_dict: Mapping[str, Any], info: Mapping[str, Any] | None, may_wait: Callable[[torch.Tensor], bool]
    ) -> Callable[[Path], None]:
        leaves = dict(named_leaves(state_dict, torch.Tensor))
        refuse_what_is_elsewhere(leaves)  # `save_file` checks this too, but only later in the background
        # Only tensors whose copy can be an ordinary tensor of the same shape and dtype.
        tensors = {
            name: leaf for name, leaf in leaves.items() if leaf.layout == torch.strided and not leaf.is_quantized
        }
        # Tensors that share their elements, such as tied weights, are copied once and stay shared in the file.
        first_names: dict[Hashable, str] = {}
        for name, tensor in tensors.items():
            first_names.setdefault(storage_key(tensor), name)
        snapshot = self._staging.snapshot({name: tensors[name] for name in first_names.values()}, may_wait)
        copies = {id(t): snapshot.copies[first_names[storage_key(t)]] for t in tensors.values()}
        # Others, such as sparse tensors, have no buffers, and not all of them support deepcopy.
        copies |= {id(t): t.detach().clone() for name, t in leaves.items() if name not in tensors}
        # The memo makes deepcopy take these copies for copies that it has made itself.
        copied = copy.deepcopy(dict(state_dict), copies)
        self._snapshot = snapshot

        def write(path: Path) -> None:
            snapshot.complete()
            save_file(copied, path, info=info)
            snapshot.confirm()

        return write


class _SnapshotPlanner(DefaultSavePlanner):
    def __init__(self, snapshot: Snapshot, pickled: Mapping[str, io.BytesIO]) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._pickled = pickled

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self._snapshot.complete()
        name = _name(write_item)
        return self._pickled[name] if name in self._pickled else self._snapshot.copies[name]


def _name(item: WriteItem) -> str:
    described = item.tensor_data
    return item.index.fqn if described is None else part_name(item.index.fqn, described.chunk, described.size)


def _two_groups(group: "ProcessGroup | None") -> tuple["ProcessGroup", ...]:
    """Return two new gloo groups of the same ranks; none where there is only this one."""
    if not is_initialized() or tdist.get_world_size(group) < 2:
        return ()
    # `use_local_synchronization`: only the ranks of a subgroup call this, and the others must not be waited for.
    ranks = tdist.get_process_group_ranks(group)
    made = [tdist.new_group(ranks, backend="gloo", use_local_synchronization=group is not None) for _ in range(2)]
    # Torch returns a number for groups of other ranks.
    return tuple(group for group in made if not isinstance(group, int))

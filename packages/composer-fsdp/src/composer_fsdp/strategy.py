"""Training strategy for FSDP2, in which every rank holds a shard of the weights."""

import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from logging import getLogger
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as tdist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves  # the public equivalent, `optree`, is a separate package

from composer_dist import dist, seed_context
from composer_dist.ddp import average_gradients, average_values, sum_counts
from composer_dist.devices import Device
from composer_dist.strategy import SingleDevice, TNumber
from composer_fsdp import state_dicts
from composer_fsdp.gradients import ReductionWatch, clip_grad_norm, watch_reductions
from composer_fsdp.plan import ShardingPlan
from composer_fsdp.sharding import ShardedModel, shard_model

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["guarded_collectives", "FSDP", "TensorParallelBatchCheck"]

log = getLogger(__name__)
# Parts of the errors of a DTensor for an operation that it does not have.
_OF_DTENSORS = ("DTensor", "sharding strategy", "placement changes")
_NOTHING = nullcontext()  # reentrant and without state, so one serves every microbatch


class FSDP(SingleDevice):
    """Strategy for fully sharded data parallelism with FSDP2.

    Every rank computes on a part of the batch and holds a shard of the weights, gradients and optimizer state. Weights
    are gathered unit by unit when needed. Unsharded parameters, such as those of modules with `_fsdp_wrap = False`, are
    whole on each rank, and their gradients are averaged after the last microbatch.

    Args:
        device: The device of this rank.
        plan: The sharding plan.
        seed: The seed for weights on the meta device. Must be the same on every rank.
        mesh: An existing device mesh of all axes. By default `prepare` creates it.

    Attributes:
        plan: The sharding plan.
        mesh: The device mesh; `None` before `prepare` if it was not given.
    """

    prepares_before_load = True
    meets_in_forward = True

    def __init__(self, device: Device, plan: ShardingPlan, *, seed: int = 0, mesh: DeviceMesh | None = None) -> None:
        super().__init__(device)
        self.plan = plan
        self.seed = seed
        self.mesh = mesh
        self._sharded: ShardedModel | None = None
        self._postpones = False  # whether averaging is deferred to the end of an attempt
        # Only with tensor parallelism, where the ranks of a group must read the same batches.
        self._first_batch: TensorParallelBatchCheck | None = None
        self._watch: ReductionWatch | None = None  # set by `watch_reductions`

    @property
    def world_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # constant by then
        """Return the number of data-parallel ranks, over which gradients are averaged."""
        return dist.get_world_size() // self.plan.tensor_parallel_degree

    @property
    def batch_rank(self) -> int:
        """Return the number of this rank's part of the batch, the same for all ranks of a tensor-parallel group."""
        given = self.plan.tp_device_mesh
        if given is not None:  # a user's mesh may have groups such as 0, 2 and 1, 3
            first, second, *_ = sorted(tdist.get_process_group_ranks(given.get_group()))
            return first if second - first == self.world_size else first // self.plan.tensor_parallel_degree
        return dist.get_global_rank() // self.plan.tensor_parallel_degree

    @property
    def is_prepared(self) -> bool:
        """Return whether `prepare` has sharded a model."""
        return self._sharded is not None

    @property
    def sharded(self) -> ShardedModel:
        """Return the sharded model with its meshes and units.

        Raises:
            RuntimeError: If `prepare` has not been called.
        """
        if self._sharded is None:
            raise RuntimeError("there is no sharded model yet. Call prepare(model, [optimizer]) first.")
        return self._sharded

    def place(self, model: "Module", optimizers: Sequence[Optimizer]) -> None:
        """Leave the model on its current device, since only a shard of it has to fit on this rank's device."""

    def prepare(self, model: "Module", optimizers: Sequence[Optimizer]) -> "tuple[Module, Sequence[Optimizer]]":
        """Shard the model and point the optimizers to the shards, in place. Every rank must call this.

        Raises:
            ValueError, KeyError, NotImplementedError, RuntimeError: If model, optimizers and plan are incompatible.
                Checks that need only one rank run before any collective.
        """
        with seed_context(self.seed):  # every rank must draw the same weights, of which it keeps its shard
            self._sharded = shard_model(
                model, self.plan, device=self.device.torch_device, optimizers=optimizers, mesh=self.mesh
            )
        self.mesh = self._sharded.meshes.whole or self._sharded.meshes.data
        if self._sharded.meshes.tensor is not None:
            self._first_batch = TensorParallelBatchCheck(self._sharded.meshes.tensor)
        self._place_optimizers(optimizers)
        if self.plan.verbose and dist.get_global_rank() == 0:
            text = f"{self._sharded.model}\n{self.plan.describe()}"
            if self.plan.version == 2:
                log.info("%s", text)
            else:
                sys.stdout.write(text + "\n")
        return model, optimizers

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Validate and place further optimizers, made of the parameters of the sharded model.

        Raises:
            ValueError, RuntimeError: If optimizers and plan are incompatible.
        """
        names = state_dicts.names_of_parameters(self.sharded.model)
        splits = self.plan.layer_plan is not None
        state_dicts.check_optimizers(
            optimizers, names, use_orig_params=self.plan.use_orig_params, splits_tensors=splits
        )
        state_dicts.separate_kinds(optimizers)
        self._place_optimizers(optimizers)

    def _place_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            if not self.plan.cpu_offload:  # otherwise the optimizer runs on the host
                self.device.optimizer_to_device(optimizer)

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch unchanged.

        The first batch is compared within each tensor-parallel group, with a warning if it differs.
        """
        if self._first_batch is not None:
            self._first_batch.see(batch)
            if not self._postpones:  # no collective within an attempt, which another rank may abort
                self._first_batch.compare()
        return batch

    def microbatch(self, *, is_last: bool, sync: bool = True, is_aligned: bool = True) -> AbstractContextManager[Any]:
        """Return the context in which one microbatch runs forward and backward.

        `sync` is ignored: gradients are always averaged, since no rank holds whole ones.

        Raises:
            ValueError: If the ranks have different numbers of microbatches, since each one gathers weights.
        """
        if not is_aligned:
            raise ValueError(
                "the ranks split this batch into different numbers of microbatches, but sharded weights are gathered "
                "from all ranks in each. Give every rank's dataloader batches of the same size (drop_last=True), or "
                "train without sharding."
            )
        if not self.sharded.whole and self.plan.grad_sync_every_microbatch:
            return _NOTHING
        return self._microbatch(is_last)

    @contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        if not self.plan.grad_sync_every_microbatch:
            for root in self.sharded.roots:
                # Until the last microbatch, FSDP2 accumulates unsharded gradients: more memory, one reduction per step.
                root.set_is_last_backward(is_last)
                root.set_requires_gradient_sync(is_last)
        yield
        if is_last and self.sharded.whole and not self._postpones:
            average_gradients(self.sharded.whole)

    def check_repeatable(self) -> None:
        """Validate that a step can be aborted and repeated.

        Raises:
            ValueError: If this PyTorch version cannot reset FSDP2 after an aborted pass.
        """
        if not hasattr(FSDPModule, "reset_iter_state"):
            raise ValueError(
                f"a step of sharded weights cannot be repeated with torch {torch.__version__}, which has no "
                f"FSDPModule.reset_iter_state. Use a newer torch, or give the size of a microbatch as a number."
            )

    @contextmanager
    def attempt(self, check: Callable[[], None], *, sync: bool = True) -> Iterator[None]:
        """Return the context around the microbatches of a step that all ranks repeat if any rank aborts it.

        `check` is called before each gathering of weights and each reduction of gradients. Failures between these
        points, such as running out of memory, are recoverable; after a failure inside a collective other ranks hang.

        Raises:
            ValueError: If this PyTorch version cannot reset FSDP2 after an aborted pass.
        """
        self.check_repeatable()
        self._postpones = True
        if self._first_batch is not None:
            self._first_batch.forget()  # an aborted attempt may have used another microbatch size
        try:
            with guarded_collectives(self.sharded.roots, check):
                yield
                check()
        finally:
            self._postpones = False
        if self._first_batch is not None:
            self._first_batch.compare()
        if self.sharded.whole and torch.is_grad_enabled():
            average_gradients(self.sharded.whole)

    def watch_reductions(self) -> ReductionWatch | None:
        """Detect non-finite gradients during their reduction from now on. Every rank must call this.

        Returns:
            The detector, valid for all sharded gradients after each backward pass and reset by `zero_grad`, or `None`
            if reductions do not reach all ranks.
        """
        self._watch = watch_reductions(self.sharded.model, self.device.torch_device)
        return self._watch

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, scaler: GradScaler | None = None
    ) -> Any:
        """Take an optimizer step.

        Raises:
            ValueError: If the optimizer computes with whole weights, of which each rank has a shard.
        """
        try:
            return super().step(optimizer, closure, scaler=scaler)
        except (RuntimeError, NotImplementedError) as error:
            if not any(text in str(error) for text in _OF_DTENSORS):
                raise
            raise ValueError(
                f"{type(optimizer).__name__} cannot step sharded weights: its step needs operations that torch's "
                f"DTensor does not have. Use an elementwise optimizer such as AdamW, or train without sharding. "
                f"({error})"
            ) from error

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Reset the gradients of an optimizer's parameters, and the detector of non-finite gradients."""
        super().zero_grad(optimizer)
        if self._watch is not None:
            self._watch.begin()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients in place to a total norm of at most `max_norm`, and return the norm before clipping.

        The norm covers the shards of all ranks and all meshes. Every rank must call this.
        """
        return clip_grad_norm(parameters, max_norm, norm_type=norm_type, local_meshes=self.sharded.local_meshes)

    def sum(self, values: Sequence[TNumber]) -> Sequence[TNumber]:
        """Return the sum of each count, below 2**53, over the data-parallel ranks. Every rank must call this."""
        tensor_mesh = None if self._sharded is None else self._sharded.meshes.tensor
        if tensor_mesh is None:
            return sum_counts(values)
        # Each tensor-parallel group counts once, since its ranks read the same batches.
        of_ranks = dist.all_gather_object((list(values), tdist.get_process_group_ranks(tensor_mesh.get_group())))
        teams = dict.fromkeys(tuple(ranks) for _, ranks in of_ranks)
        columns = zip(*teams, strict=True)  # the first rank of each group, the second of each, and so on
        totals = [[sum(column) for column in zip(*(of_ranks[r][0] for r in ranks), strict=True)] for ranks in columns]
        # The maximum also covers values that only one rank of a group has, such as the clock of rank 0.
        return [max(of_columns) for of_columns in zip(*totals, strict=True)]

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the mean of each value over all ranks, using one collective without a device synchronization."""
        # Tensor-parallel groups are of one size, so that counting each of their ranks does not change the mean.
        return average_values(values)

    def model_state_dict(self, model: "Module") -> dict[str, Any]:
        """Return the full model state dict as copies on the host of every rank. Every rank must call this."""
        return state_dicts.get_model(model)

    def load_model_state_dict(
        self, model: "Module", state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load a full model state dict, and return the missing and the unexpected names."""
        return state_dicts.set_model(model, state_dict, strict=strict)

    def optimizer_state_dict(self, model: "Module", optimizer: Optimizer) -> dict[str, Any]:
        """Return the full optimizer state dict, as for an unsharded model. Every rank must call this."""
        return state_dicts.get_optimizer(optimizer)

    def load_optimizer_state_dict(self, model: "Module", optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load a full optimizer state dict in place; each rank takes its part."""
        state_dicts.set_optimizer(optimizer, state_dict)


@contextmanager
def guarded_collectives(roots: Sequence[FSDPModule], check: Callable[[], None]) -> Iterator[None]:
    """Return a context in which sharded modules call `check` before each collective.

    The collectives gather weights before a unit's forward and backward pass, and reduce gradients after its backward
    pass. After an error the state of FSDP2 is reset, so that the modules can run again.
    """
    handles: list[Any] = []
    begun: set[nn.Module] = set()
    for root in roots:
        assert isinstance(root, nn.Module)
        handles.append(root.register_forward_pre_hook(lambda module, _: begun.add(module)))
        for module in root.modules():
            if isinstance(module, FSDPModule):
                handles += _watch(module, check, is_root=module is root)
    try:
        yield
    except BaseException:
        for root in roots:
            if root in begun:  # `reset_iter_state` fails on a root that has never run
                root.reset_iter_state()
        raise
    finally:
        for handle in handles:
            handle.remove()


def _watch(module: nn.Module, check: Callable[[], None], *, is_root: bool) -> list[Any]:
    def before_gathering(_: nn.Module, args: Any) -> None:
        check()

    def before_reducing(_: nn.Module, args: Any, kwargs: Any) -> None:
        # FSDP2's pre-hook, which has run by now, gives the inputs a grad_fn whose backward reduces the gradients.
        for tensor in _with_gradient((args, kwargs)):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: check())
                return

    def before_gathering_again(_: nn.Module, __: Any, outputs: Any) -> None:
        is_done = False

        def run_once(_: torch.Tensor) -> None:  # on the first of several gradients
            nonlocal is_done
            if is_done:
                return
            is_done = True
            if is_root:
                # At the end of the backward pass the root reduces units whose inputs need no gradients. Callbacks run
                # in the order of queueing, and this one is queued first. PyTorch has no public way to queue one.
                Variable._execution_engine.queue_callback(check)  # pyright: ignore[reportAttributeAccessIssue]
            check()

        for tensor in _with_gradient(outputs):
            tensor.register_hook(run_once)

    return [
        module.register_forward_pre_hook(before_gathering, prepend=True),
        module.register_forward_pre_hook(before_reducing, with_kwargs=True),
        module.register_forward_hook(before_gathering_again, prepend=True),
    ]


def _with_gradient(values: Any) -> Iterator[torch.Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            yield value


class TensorParallelBatchCheck:
    """Comparison of the first batch within a tensor-parallel group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._ranks = tdist.get_process_group_ranks(mesh.get_group())
        self._seen: int | None = None
        self._is_compared = False

    def see(self, batch: Any) -> None:
        """Record the fingerprint of the first batch, which synchronizes with the device once."""
        if self._seen is not None or self._is_compared:
            return
        checksum = 0
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                # As bytes, since NumPy has no bfloat16, and flat, since a 0-dim tensor has no view as bytes.
                leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            checksum = zlib.crc32(leaf if isinstance(leaf, bytes) else repr(leaf).encode(), checksum)
        self._seen = checksum

    def forget(self) -> None:
        """Discard the recorded batch, so that the next one is recorded in its place."""
        self._seen = None

    def compare(self) -> None:
        """Warn if the first batches of the group differ. Every rank must call this, after `see`."""
        if self._is_compared:
            return
        self._is_compared = True
        seen, self._seen = dist.all_gather_object(self._seen), None
        if len({seen[rank] for rank in self._ranks}) > 1:
            degree, world_size = len(self._ranks), len(seen)
            warnings.warn(
                f"The ranks {self._ranks} compute tensors in parallel, and their first batches differ, so that the "
                f"results are wrong. Give the ranks of each {degree} the same samples: dist.get_sampler("
                f"dataset, num_replicas={world_size // degree}, rank=dist.get_global_rank() // {degree}).",
                UserWarning,
                stacklevel=2,
            )

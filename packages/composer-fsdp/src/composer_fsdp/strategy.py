"""FSDP2 as a strategy of a training loop: every rank holds a part of the weights."""

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
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves  # its public face, `optree`, is another package

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

__all__ = ["checked_meetings", "FSDP", "FirstBatch"]

log = getLogger(__name__)
_NOTHING = nullcontext()  # reentrant and without state, so one serves every microbatch


class FSDP(SingleDevice):
    """Every rank computes on a part of the batch, and holds a part of weights, gradients and optimizer state.

    Weights are gathered unit by unit where they are needed. What is not sharded, such as modules with
    `_fsdp_wrap = False`, is whole on each rank, and its gradients are averaged after the last microbatch.

    Args:
        device: This rank's.
        plan: How the model is sharded.
        seed: With which weights are drawn that are on the meta device. The same on every rank.
        mesh: The ranks by their axes, if somebody has made the mesh; else `prepare` makes it.

    Attributes:
        plan: How the model is sharded.
        mesh: The ranks by their axes; `None` where groups of ranks say it.
    """

    prepares_before_load = True
    meets_in_forward = True

    def __init__(self, device: Device, plan: ShardingPlan, *, seed: int = 0, mesh: DeviceMesh | None = None) -> None:
        super().__init__(device)
        self.plan = plan
        self.seed = seed
        self.mesh = mesh
        self._sharded: ShardedModel | None = None
        self._postpones = False  # whether gradients wait for the end of an attempt
        self._first_batch: FirstBatch | None = None  # where several ranks must read the same
        self._watch: ReductionWatch | None = None  # if somebody asked for it

    @property
    def world_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # constant by then
        """Over how many ranks the gradients are a mean: those that have batches of their own."""
        return dist.get_world_size() // self.plan.tensor_parallel_degree

    @property
    def batch_rank(self) -> int:
        """Which part of a step's batch this rank reads. Ranks that hold one tensor together read the same part."""
        given = self.plan.tp_device_mesh
        if given is not None:
            return min(tdist.get_process_group_ranks(given.get_group()))
        return dist.get_global_rank() // self.plan.tensor_parallel_degree

    @property
    def is_prepared(self) -> bool:
        """Whether there is a sharded model."""
        return self._sharded is not None

    @property
    def sharded(self) -> ShardedModel:
        """What became of the model.

        Raises:
            RuntimeError: Before `prepare`.
        """
        if self._sharded is None:
            raise RuntimeError("there is no sharded model yet. Call prepare(model, [optimizer]) first.")
        return self._sharded

    def place(self, model: "Module", optimizers: Sequence[Optimizer]) -> None:
        """Leave the model where it is: only a rank's part of it has to fit on the device."""

    def prepare(self, model: "Module", optimizers: Sequence[Optimizer]) -> "tuple[Module, Sequence[Optimizer]]":
        """Shard the model and let the optimizers own the shards, all in place. Every rank must call this.

        Raises:
            ValueError, KeyError, NotImplementedError, RuntimeError: If model, optimizers and plan do not go together.
                What one rank can know by itself is refused before any rank waits for another.
        """
        with seed_context(self.seed):
            self._sharded = shard_model(
                model, self.plan, device=self.device.torch_device, optimizers=optimizers, mesh=self.mesh
            )
        self.mesh = self._sharded.meshes.whole or self._sharded.meshes.data
        if self._sharded.meshes.tensor is not None:
            self._first_batch = FirstBatch(self._sharded.meshes.tensor)
        for optimizer in optimizers:
            if not self.plan.cpu_offload:
                self.device.optimizer_to_device(optimizer)
        self._tell()
        return model, optimizers

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch as it is.

        The first one is compared among the ranks that hold one tensor together, which are warned if theirs differ.
        """
        if self._first_batch is not None:
            self._first_batch.see(batch)
            if not self._postpones:
                self._first_batch.compare()
        return batch

    def microbatch(self, *, is_last: bool, sync: bool = True, is_aligned: bool = True) -> AbstractContextManager[Any]:
        """Return the context in which one microbatch runs forward and backward.

        Without `sync` the gradients are averaged all the same: no rank has whole ones of its own.

        Raises:
            ValueError: If the ranks have unequally many microbatches, in each of which they gather weights.
        """
        if not is_aligned:
            raise ValueError(
                "the ranks cut this batch into unequally many microbatches, but sharded weights are gathered from all "
                "ranks in each. Give every rank's dataloader batches of the same size (drop_last=True), or train "
                "without sharding."
            )
        if not self.sharded.whole and self.plan.grad_sync_every_microbatch:
            return _NOTHING
        return self._microbatch(is_last)

    @contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        if not self.plan.grad_sync_every_microbatch:
            for root in self.sharded.roots:
                root.set_is_last_backward(is_last)
                root.set_requires_gradient_sync(is_last)
        yield
        if is_last and self.sharded.whole and not self._postpones:
            average_gradients(self.sharded.whole)

    def check_repeatable(self) -> None:
        """Refuse to give up a step and repeat it, if it is known that this cannot be done.

        Raises:
            ValueError: If torch is too old to forget a pass that was broken off.
        """
        if not hasattr(FSDPModule, "reset_iter_state"):
            raise ValueError(
                f"a step of sharded weights cannot be repeated with torch {torch.__version__}, which has no "
                f"FSDPModule.reset_iter_state. Use a newer torch, or give the size of a microbatch as a number."
            )

    @contextmanager
    def attempt(self, check: Callable[[], None], *, sync: bool = True) -> Iterator[None]:
        """Return the context around the microbatches of a step that any rank may have to give up, and all then repeat.

        The ranks call `check` before they gather weights and before they reduce gradients, each time. What takes
        memory in between may fail; what fails inside of a collective leaves the other ranks waiting.

        Raises:
            ValueError: If torch is too old to forget a pass that was broken off.
        """
        self.check_repeatable()
        self._postpones = True
        if self._first_batch is not None:
            self._first_batch.forget()  # what an attempt saw that was given up may be cut otherwise
        try:
            with checked_meetings(self.sharded.roots, check):
                yield
                check()
        finally:
            self._postpones = False
        if self._first_batch is not None:
            self._first_batch.compare()
        if self.sharded.whole and torch.is_grad_enabled():
            average_gradients(self.sharded.whole)

    def watch_reductions(self) -> ReductionWatch | None:
        """Let the reductions of gradients say, from now on, whether all of them are finite. Every rank must call this.

        Returns:
            Who knows after each backward pass, of all that is sharded, or `None` where reductions cannot tell it to all
            ranks. `zero_grad` lets it begin anew.
        """
        self._watch = watch_reductions(self.sharded.model, self.device.torch_device)
        return self._watch

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters."""
        super().zero_grad(optimizer)
        if self._watch is not None:
            self._watch.begin()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients, in place, to a joint norm of at most `max_norm`, and return the norm before.

        Every rank must call this. The norm is that of all ranks' parts, over however many meshes.
        """
        return clip_grad_norm(parameters, max_norm, norm_type=norm_type, local_meshes=self.sharded.local_meshes)

    def sum(self, values: Sequence[TNumber]) -> Sequence[TNumber]:
        """Return, for each of a few counts below 2**53, its sum over the ranks that have batches of their own.

        Every rank must call this.
        """
        tensor_mesh = None if self._sharded is None else self._sharded.meshes.tensor
        if tensor_mesh is None:
            return sum_counts(values)
        return _sum_without_twins(values, tensor_mesh)

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the mean of each value over all ranks, by way of one collective that nobody waits for."""
        return average_values(values)

    def model_state_dict(self, model: "Module") -> dict[str, Any]:
        """Return the whole weights, as copies on the host of every rank. Every rank must call this."""
        return state_dicts.get_model(model)

    def load_model_state_dict(
        self, model: "Module", state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load whole weights, of which each rank takes its part, and return the names missing and not expected."""
        return state_dicts.set_model(model, state_dict, strict=strict)

    def optimizer_state_dict(self, model: "Module", optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state as the optimizer of a model that is not sharded has it. Every rank must call this."""
        return state_dicts.get_optimizer(optimizer)

    def load_optimizer_state_dict(self, model: "Module", optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load such a whole state, of which each rank takes its part, in place."""
        state_dicts.set_optimizer(optimizer, state_dict)

    def _tell(self) -> None:
        """Say how the model was sharded, if somebody asked for it."""
        if not self.plan.verbose or dist.get_global_rank() != 0:
            return
        text = f"{self.sharded.model}\n{self.plan.describe()}"
        if self.plan.version == 2:
            log.info("%s", text)
        else:
            sys.stdout.write(text + "\n")


def _sum_without_twins(values: Sequence[TNumber], mesh: DeviceMesh) -> list[TNumber]:
    """Return sums in which the ranks that hold one tensor together, and read the same batches, count once."""
    of_ranks = dist.all_gather_object((list(values), tdist.get_process_group_ranks(mesh.get_group())))
    teams = dict.fromkeys(tuple(ranks) for _, ranks in of_ranks)
    columns = zip(*teams, strict=True)
    totals = [[sum(column) for column in zip(*(of_ranks[r][0] for r in ranks), strict=True)] for ranks in columns]
    # What only one of the team knows, such as rank 0's clock, all of them take from it.
    return [max(of_columns) for of_columns in zip(*totals, strict=True)]


@contextmanager
def checked_meetings(roots: Sequence[FSDPModule], check: Callable[[], None]) -> Iterator[None]:
    """Return a context in which sharded modules call a function each time before the ranks meet.

    They meet where weights are gathered, before a unit's forward and backward pass, and where gradients are reduced,
    after its backward pass. After an error everything that was begun is forgotten, so that the modules can run anew.

    Args:
        roots: The outermost sharded modules.
        check: Raises if any rank has failed; called equally often on all ranks until then.
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
            if root in begun:  # one that has never run has nothing to forget, and torch fails on it
                root.reset_iter_state()
        raise
    finally:
        for handle in handles:
            handle.remove()


def _watch(module: nn.Module, check: Callable[[], None], *, is_root: bool) -> list[Any]:
    def before_gathering(_: nn.Module, args: Any) -> None:
        check()

    def before_reducing(_: nn.Module, args: Any, kwargs: Any) -> None:
        # FSDP, whose own hook has run by now, has put a node behind the inputs that reduces in its backward pass.
        for tensor in _with_gradient((args, kwargs)):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: check())
                return

    def before_gathering_again(_: nn.Module, __: Any, outputs: Any) -> None:
        once = _Once(check, is_root)
        for tensor in _with_gradient(outputs):
            tensor.register_hook(once)

    return [
        module.register_forward_pre_hook(before_gathering, prepend=True),
        module.register_forward_pre_hook(before_reducing, with_kwargs=True),
        module.register_forward_hook(before_gathering_again, prepend=True),
    ]


class _Once:
    """Checks when the first of several gradients arrives."""

    def __init__(self, check: Callable[[], None], is_root: bool) -> None:
        self._check = check
        self._is_root = is_root
        self._is_done = False

    def __call__(self, _: torch.Tensor) -> None:
        if self._is_done:
            return
        self._is_done = True
        if self._is_root:
            # At the end of the backward pass a root reduces what has no input to wait for. Its callback comes after
            # this one, in the order in which they are queued; torch has no public way to queue one.
            Variable._execution_engine.queue_callback(self._check)  # pyright: ignore[reportAttributeAccessIssue]
        self._check()


def _with_gradient(values: Any) -> Iterator[torch.Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            yield value


class FirstBatch:
    """Compares the first batch of the ranks of a mesh, once.

    Args:
        mesh: The ranks that hold one tensor together.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._ranks = tdist.get_process_group_ranks(mesh.get_group())
        self._seen: str | None = None
        self._is_compared = False

    def see(self, batch: Any) -> None:
        """Remember a batch, if it is the first. It waits for the batch's device that once."""
        if self._seen is None and not self._is_compared:
            self._seen = _fingerprint(batch)

    def forget(self) -> None:
        """Take the next batch for the first, unless one was compared."""
        self._seen = None

    def compare(self) -> None:
        """Warn if the others saw another batch. Every rank must call this once it has seen one."""
        if self._is_compared:
            return
        self._is_compared = True
        seen, self._seen = dist.all_gather_object(self._seen), None
        if len({seen[rank] for rank in self._ranks}) > 1:
            degree, world_size = len(self._ranks), len(seen)
            warnings.warn(
                f"The ranks {self._ranks} hold tensors together, and their first batches differ, so that what they "
                f"compute belongs to neither. Give the ranks of each {degree} the same samples: dist.get_sampler("
                f"dataset, num_replicas={world_size // degree}, rank=dist.get_global_rank() // {degree}).",
                UserWarning,
                stacklevel=2,
            )


def _fingerprint(batch: Any) -> str:
    """Return what tells a batch from another one: a checksum of its tensors."""
    checksum = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        checksum = zlib.crc32(leaf if isinstance(leaf, bytes) else repr(leaf).encode(), checksum)
    return f"{checksum:08x}"

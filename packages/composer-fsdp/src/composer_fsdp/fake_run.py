"""Simulated training steps of a sharded model, run on fake tensors."""

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as tdist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only  # PyTorch has no public name for these

from composer_dist import dist
from composer_dist.ddp import average_gradients
from composer_fsdp.activation import chosen_for_checkpointing
from composer_fsdp.config import AXES
from composer_fsdp.groups import ranks_of
from composer_fsdp.memory_log import MemoryLog
from composer_fsdp.meshes import Meshes
from composer_fsdp.meta_init import materialize
from composer_fsdp.mixed_precision import to_dtype
from composer_fsdp.plan import ShardingPlan
from composer_fsdp.sharding import Sharder, prefetch_ahead, wrap_activations
from composer_fsdp.tensor_parallel import check_layer_plan
from composer_fsdp.unit_selection import units_of
from composer_fsdp.wrap_rules import Stage, Unit

_STEPS = 2  # the first step begins without optimizer state
_MAX_SAID = 300  # characters of an error raised by the model
_DEVICE = torch.device("cpu")  # the device of fake tensors; always available

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeLoss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """Work of one rank in a training step.

    Attributes:
        batch: A microbatch of one rank, as the dataloader yields it. Its tensors may be on the meta device.
        batch_size: The number of examples per microbatch, that is, the first dim of its tensors; that of `batch` when
            `None`.
        microbatches: The number of microbatches per step.
        optimizer: Creates an optimizer from parameters.
        loss: Computes the loss from `(outputs, batch)`. By default the model's `loss`, the loss in its outputs, or the
            mean of the outputs.
        on_gpu: Whether to use foreach optimizers and float16 autocast, as on a GPU.
    """

    batch: Any
    batch_size: int | None = None
    microbatches: int = 1
    optimizer: MakeOptimizer = AdamW
    loss: MakeLoss | None = None
    on_gpu: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "microbatches"):
            number = getattr(self, name)
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ValueError(f"{name}={number!r} is not a number of them: it has to be 1 or more.")
        if not any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in tree_leaves(self.batch)):
            raise ValueError(
                f"batch={self.batch!r} has no tensor with a first dim of examples. Give a batch as the dataloader "
                f"yields it, such as torch.zeros((8, 1024), dtype=torch.long, device='meta')."
            )


def is_composer_model(model: nn.Module) -> bool:
    """Return whether a model has the methods of a ComposerModel, whose children are sharded."""
    return callable(getattr(model, "loss", None)) and callable(getattr(model, "eval_forward", None))


def simulate_steps(model: nn.Module, plan: ShardingPlan, work: Workload) -> MemoryLog:
    """Shard a copy of a model and train it for two steps on fake tensors. Must be called inside `fake_world`.

    Returns:
        The log of memory, and of the communication of the second step.
    """
    stage = Stage()
    no_values = FakeTensorMode(allow_non_fake_inputs=True)  # the ranks of a mesh are real tensors
    log = MemoryLog(stage.place, no_values)
    units = units_of(model, plan, wraps_itself=not is_composer_model(model))
    if plan.layer_plan is not None:
        check_layer_plan(model, plan.layer_plan)
    # Shard outside the fake mode: building meshes reads the values of tensors of ranks.
    replica = _shard_copy(model, plan, units, log, stage, no_values)
    with _explained_failures(), no_values:
        materialize(replica, _DEVICE)
        batch = tree_map_only(torch.Tensor, lambda tensor: _like(tensor, _DEVICE, work.batch_size), work.batch)
        step = _Step(replica, batch, plan, work, stage, log)
        with log:
            for _ in range(_STEPS):
                log.begin()
                step.run()
    return log


class _Step:
    """Training step that marks its tensors by kind in the memory log."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        plan: ShardingPlan,
        work: Workload,
        stage: Stage,
        log: MemoryLog,
    ) -> None:
        self._model, self._batch = model, batch
        self._plan, self._work, self._stage, self._log = plan, work, stage, log
        self._is_composer = is_composer_model(model)
        # Optimize local shards: DTensor would propagate each operation on whole fake weights, which would be counted.
        self._shards = {p: nn.Parameter(_local(p), p.requires_grad) for p in model.parameters() if p.requires_grad}
        self._optimizer = _make_optimizer(work, list(self._shards.values()))

    def run(self) -> None:
        """Train for one step, keeping the gradients until the next one as a training loop does."""
        log, on_host = self._log, self._plan.cpu_offload
        log.mark(self._model.parameters(), "parameters", on_host=on_host)
        log.mark(self._model.buffers(), "buffers")
        log.mark((leaf for leaf in tree_leaves(self._batch) if isinstance(leaf, torch.Tensor)), "batch")
        self._model.zero_grad()
        for _ in range(self._work.microbatches):
            self._stage.enter("forward")
            with self._autocast():
                loss = self._loss()
            self._stage.enter("backward")
            loss.backward()
            del loss  # frees it before the next microbatch
            gradients = (p.grad for p in self._model.parameters() if p.grad is not None)
            log.mark(gradients, "gradients", on_host=on_host)
        whole = [p for p in self._shards if not isinstance(p, DTensor)]
        if self._is_composer and whole:  # as the strategy does after the last microbatch
            self._stage.enter("averaging the gradients of unsharded parameters")
            average_gradients(whole)
        self._stage.enter("the optimizer's step")
        for parameter, shard in self._shards.items():
            shard.grad = None if parameter.grad is None else _local(parameter.grad)
        log.works_on_host = on_host  # with CPU offloading the optimizer runs on the host
        self._optimizer.step()
        self._optimizer.zero_grad()
        log.works_on_host = False
        states = (leaf for leaf in tree_leaves(list(self._optimizer.state.values())) if isinstance(leaf, torch.Tensor))
        log.mark(states, "optimizer state", on_host=on_host)
        self._stage.enter("between two steps")

    def _loss(self) -> torch.Tensor:
        model, batch = self._model, self._batch
        if self._is_composer:
            outputs = model(batch)
        elif isinstance(batch, Mapping):
            outputs = model(**batch)
        else:
            outputs = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        if self._work.loss is not None:
            return _one_loss(self._work.loss(outputs, batch))
        if self._is_composer:
            return _one_loss(model.loss(outputs, batch))  # pyright: ignore[reportCallIssue]  # checked to be a method
        own: Any = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        return _one_loss(own if isinstance(own, torch.Tensor) else outputs)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context that a Trainer would use; a custom loop gets none."""
        dtype = to_dtype(self._plan.precision) if self._is_composer else torch.float32
        uses_it = dtype == torch.bfloat16 or (dtype == torch.float16 and self._work.on_gpu)
        return torch.autocast(_DEVICE.type, dtype=dtype) if uses_it else nullcontext()


def _one_loss(losses: Any) -> torch.Tensor:
    tensors = [t for t in tree_leaves(losses) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not tensors:
        raise ValueError(
            f"the loss is {losses!r}, in which no tensor needs gradients, so that there is no backward pass. Give a "
            f"loss, a function of outputs and batch that uses the weights."
        )
    if len(tensors) == 1 and tensors[0].ndim == 0:
        return tensors[0]
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


def _shard_copy(
    model: nn.Module,
    plan: ShardingPlan,
    units: Sequence[Unit],
    log: MemoryLog,
    stage: Stage,
    no_values: FakeTensorMode,
) -> nn.Module:
    meshes = FakeMeshes(plan, _DEVICE.type)
    checkpointed = chosen_for_checkpointing(model)
    # Apply the rules to the original model: user functions in them may compare modules by identity.
    replica, twin_of = _copy_to_meta(model, no_values)
    ignored = tuple(twin_of(module) for module in plan.ignored_modules)
    # Offloading is imitated below: on the one device of all fake tensors, PyTorch's wrapper would have no effect.
    offloads, plan = plan.activation_cpu_offload, replace(plan, ignored_modules=ignored, activation_cpu_offload=False)
    units = [replace(u, module=twin_of(u.module), partners=tuple(map(twin_of, u.partners))) for u in units]
    chosen = {twin_of(module) for module in checkpointed}
    if plan.layer_plan is not None and meshes.tensor is not None:
        parallelize_module(replica, meshes.tensor, dict(plan.layer_plan))
    units = wrap_activations(replica, plan, units, chosen.__contains__)
    if offloads:
        # Offload outside of checkpointing, in the order of the wrappers of a real run.
        wrappers = {getattr(m, "_checkpoint_wrapped_module", None): m for m in replica.modules()}
        for module in chosen:
            _offload_activations(wrappers.get(module, module), log)
    sharder = Sharder(plan, meshes, _DEVICE)
    for unit in units:
        sharder.shard(unit)
    stage.watch(units)
    prefetch_ahead(units, plan)
    return replica


def _copy_to_meta(model: nn.Module, no_values: FakeTensorMode) -> tuple[nn.Module, Callable[[nn.Module], nn.Module]]:
    twins: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in twins:
                twins[id(parameter)] = nn.Parameter(_like(parameter, "meta"), parameter.requires_grad)
        for buffer in module._buffers.values():
            if buffer is not None:
                twins[id(buffer)] = _like(buffer, "meta")
        with no_values:  # `materialize` moves no tensors that are plain attributes, so make them on the device
            own = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
            twins |= {id(tensor): _like(tensor, _DEVICE) for tensor in own}
    # As the memo, `twins` supplies the tensors, so that none is copied, and then also maps modules to their copies.
    replica = copy.deepcopy(model, twins)
    return replica, lambda module: twins[id(module)]


def _like(tensor: torch.Tensor, device: torch.device | str, first_dim: int | None = None) -> torch.Tensor:
    shape = list(tensor.shape)
    if first_dim is not None and shape:
        shape[0] = first_dim
    return torch.empty(shape, dtype=tensor.dtype, device=device)


def _offload_activations(module: nn.Module, log: MemoryLog) -> None:
    """Count the tensors that a module saves for backward as host memory, although all fake tensors share a device."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().clone()
        log.mark([moved], "activations", on_host=True)
        return moved

    contexts: list[saved_tensors_hooks] = []

    def begin(*_: Any) -> None:
        contexts.append(saved_tensors_hooks(pack, torch.clone))
        contexts[-1].__enter__()

    module.register_forward_pre_hook(begin)
    # Also after an error, or the hooks on saved tensors would stay active.
    module.register_forward_hook(lambda *_: contexts.pop().__exit__(), always_call=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _make_optimizer(work: Workload, parameters: list[nn.Parameter]) -> Optimizer:
    if not parameters:
        raise ValueError(
            "no parameter of the model needs gradients, so that there is nothing to train. Give a model with "
            "requires_grad=True for some."
        )
    optimizer = work.optimizer(parameters)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={work.optimizer!r} made {optimizer!r}, which is not a torch.optim.Optimizer.")
    for group in optimizer.param_groups:
        if work.on_gpu and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True  # PyTorch's default on a GPU; it needs temporary lists
    return optimizer


@contextmanager
def _explained_failures() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a real run will issue them
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RuntimeError(
            f"the model asks for the values of a tensor ({error}), and fake tensors have only shapes. Remove such "
            f"operations, for example .item() and masks as indices, or measure a real step."
        ) from error
    except (ValueError, TypeError):  # raised by our own validation, whose messages are clear
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_SAID]}".rstrip(" .:")
        raise RuntimeError(
            f"a training step of the model fails with {said}. Give a batch, a loss and an optimizer with which it "
            f"trains without sharding."
        ) from error


_RANKS_OF_A_NODE = 8


@contextmanager
def fake_world(world_size: int, local_world_size: int | None = None) -> Iterator[None]:
    """Make this process rank 0 of a simulated run, whose collectives return at once with arbitrary results.

    The environment variables of the launcher are set accordingly inside the context and restored after it.
    """
    local = min(world_size, _RANKS_OF_A_NODE) if local_world_size is None else local_world_size
    for name, number in (("world_size", world_size), ("local_world_size", local)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r} is not a number of ranks: it has to be 1 or more.")
    if world_size % local:
        raise ValueError(
            f"local_world_size={local} does not divide world_size={world_size}, so that the nodes would not have "
            f"equally many ranks. Give the number of ranks of each node."
        )
    if tdist.is_initialized():
        raise RuntimeError(
            f"this process is rank {tdist.get_rank()} of a real run, and cannot simulate one of {world_size} ranks at "
            f"the same time. Run the estimate in a process of its own, for example with the command composer-fsdp."
        )
    variables = {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local, "NODE_RANK": 0}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        # PyTorch's backend for simulations, which communicates nothing.
        tdist.init_process_group("fake", rank=0, world_size=world_size)
        try:
            yield
        finally:
            tdist.destroy_process_group()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class FakeMeshes(Meshes):
    """Device meshes in a simulated run, where the ranks cannot exchange the groups they belong to."""

    def of_groups(self, shard: Any, replicate: Any = None) -> DeviceMesh:
        """Return a mesh of the shape that the groups would give."""
        shape = [_size(group) for group in (replicate, shard) if group is not None]
        key = tuple(shape)
        if key not in self._of_groups:
            ranks = torch.arange(shape[0] * shape[-1] if len(shape) == 2 else shape[0]).view(shape)
            names = AXES[:2] if len(shape) == 2 else AXES[1:2]
            self._of_groups[key] = DeviceMesh(self.device_type, ranks, mesh_dim_names=names)
        return self._of_groups[key]

    def across(self, shard: Any) -> Any:
        """Return a list with one rank per group; only its length matters here."""
        return list(range(dist.get_world_size() // _size(shard)))


def _size(group: Any) -> int:
    if isinstance(group, str):
        return len(ranks_of(group, 0, dist.get_world_size(), dist.get_local_world_size()))
    return group.size() if isinstance(group, tdist.ProcessGroup) else len(group)

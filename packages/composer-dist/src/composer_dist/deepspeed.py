"""DeepSpeed: its engine owns model, gradients and optimizer, and shards them over the ranks (ZeRO)."""

import atexit
import copy
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as tdist
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from composer_dist import deepspeed_state
from composer_dist.averaging import average_values, sum_counts
from composer_dist.deepspeed_unused import UnusedParameters
from composer_dist.devices import Device, DeviceCPU, map_tensors
from composer_dist.initialize import initialize_dist
from composer_dist.strategy import TNumber

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["DeepSpeed"]


class DeepSpeed:
    """ZeRO: every rank computes on a part of the batch, and the engine shards what they would all hold alike.

    Stage 0 shards nothing, 1 the optimizer's state, 2 the gradients too, 3 the weights too. A batch has the same
    weights as on a single device, also if it is cut into fewer or less even microbatches than the configuration says:
    the loop weighs each microbatch's loss and says which is the last, and the engine follows. The engine clips the
    gradients, scales losses in float16 and drops the gradients after a step, all by itself.

    Args:
        device: This rank's device.
        config: What `parse_deepspeed_config` returned. It is copied.
        find_unused_parameters: Whether some parameters may be without gradient in some steps. They then stay as they
            are, as under `DDP`; otherwise momentum and weight decay move them. At stages 1 and 2 every rank must use
            the same parameters. Without effect at stage 3.

    Raises:
        ImportError: If the package `deepspeed` is not installed.
        ValueError: If float16 is asked for on a CPU.

    Reference:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
        arXiv:1910.02054.
    """

    has_own_precision = True
    prepares_before_load = True

    def __init__(self, device: Device, config: Mapping[str, Any], *, find_unused_parameters: bool = False) -> None:
        _check_installed()
        if isinstance(device, DeviceCPU) and config.get("fp16", {}).get("enabled", False):
            raise ValueError(
                f"deepspeed_config['fp16']={config['fp16']!r}: DeepSpeed does not train in float16 on a CPU. Use "
                "precision='amp_bf16' (section 'bf16') or 'fp32' there."
            )
        self.device = device
        # Left out it is 1.0 in DeepSpeed 0.19, and gradients would be clipped that no other strategy clips.
        self._config: dict[str, Any] = {"gradient_clipping": 0.0, **copy.deepcopy(dict(config))}
        self.find_unused_parameters = find_unused_parameters
        self._engine: Any = None
        self._parameters: deepspeed_state.ParameterGroups = []
        self._unused: UnusedParameters | None = None

    @property
    def world_size(self) -> int:
        """Over how many ranks the gradients are a mean."""
        return tdist.get_world_size()

    @property
    def meets_in_forward(self) -> bool:
        """Whether the weights are gathered, layer by layer, in each forward pass: at stage 3."""
        return self._config.get("zero_optimization", {}).get("stage", 0) == 3

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, which `prepare` makes.

        Raises:
            RuntimeError: Before `prepare`.
        """
        if self._engine is None:
            raise RuntimeError("there is no DeepSpeed engine yet. Call prepare(model, [optimizer]) first.")
        return self._engine

    def place(self, model: "Module", optimizers: Sequence[Optimizer]) -> None:
        """Leave the model where it is: the engine moves only what a rank keeps of it."""

    def prepare(self, model: "Module", optimizers: Sequence[Optimizer]) -> "tuple[Module, Sequence[Optimizer]]":
        """Return the engine in place of the model, and the engine's optimizer. Every rank must call this.

        The engine puts the model on the device, converts it to the precision, in place, and gives all ranks the
        weights of rank 0. Its optimizer has the `param_groups` of the one that it wraps, so that schedulers of either
        reach the other.

        Raises:
            ValueError: If there is not exactly one optimizer, or if it evaluates the loss itself.
        """
        optimizer = _the_one(optimizers)
        deepspeed = _start(self.device)
        # Noted down before the engine flattens them.
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        with _without_advice():
            self._engine, wrapped, _, _ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=copy.deepcopy(self._config)
            )
        deepspeed_state.forget_trial_step(self._engine)
        if self.find_unused_parameters and not self.meets_in_forward:
            self._unused = UnusedParameters(self._engine, [each for group in self._parameters for each in group])
        _destroy_group_at_exit()
        return self._engine, [wrapped]

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch with its float32 tensors in the dtype that the engine computes with."""
        dtype = self.engine.get_data_types()[0]
        if dtype is torch.float32:
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor)

    def microbatch(self, *, is_last: bool, sync: bool = True, is_aligned: bool = True) -> AbstractContextManager[Any]:
        """Return the context in which one microbatch runs forward and backward.

        Raises:
            ValueError: If the ranks shall keep their own gradients, which the engine shards, or if they have unequally
                many microbatches.
        """
        if not is_aligned:
            raise ValueError(
                "the ranks cut this batch into unequally many microbatches, but DeepSpeed's engine lets them meet in "
                "each. Give every rank's dataloader batches of the same size (drop_last=True), or train with DDP."
            )
        if not sync:
            raise ValueError(
                "sync=False asks for gradients that differ between the ranks, but DeepSpeed's engine shards them as "
                "their mean. Use DDP for methods that need them, such as SAM."
            )
        return self._microbatch(is_last)

    @contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(is_last)
        yield
        if not is_last:
            self.engine.step()  # moves no weights here; the engine counts the microbatches

    def attempt(self, check: Callable[[], None], *, sync: bool = True) -> AbstractContextManager[Any]:
        """Refuse: the engine counts the microbatches of a step, and cannot go back to its begin.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "DeepSpeed's engine cannot repeat a step with smaller microbatches, whose size its configuration must "
            "say. Give the size of a microbatch as a number, or train with DDP or FSDP."
        )

    def backward(self, loss: torch.Tensor, *, create_graph: bool = False) -> None:
        """Add the gradients of a loss, which already has its weight within the batch, to the engine's.

        Raises:
            ValueError: If the graph of the gradients shall be kept.
        """
        if create_graph:
            raise ValueError(
                "create_graph=True keeps the graph of the gradients, which DeepSpeed's engine cannot. Leave out the "
                "algorithm that needs it (its backwards_create_graph is True), or train without DeepSpeed."
            )
        # The weight is in the loss, so the engine does not divide by its number of microbatches once more.
        self.engine.backward(loss, scale_wrt_gas=False)

    def has_finite_gradients(self) -> bool:
        """Return whether the gradients of a batch are finite, before its step. Every rank must call this.

        It gathers one whole gradient after another, so call it only where there is a reason to.
        """
        get = _start(self.device).utils.safe_get_full_grad
        parameters = (parameter for group in self._parameters for parameter in group if parameter.requires_grad)
        gradients = (get(parameter) for parameter in parameters)
        bad = [gradient is not None and not bool(torch.isfinite(gradient).all()) for gradient in gradients]
        return not any(bad)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, *, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Refuse: the engine clips inside its step, by the configuration's `gradient_clipping`.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"clip_grad_norm(max_norm={max_norm!r}) cannot reach the gradients, which DeepSpeed's engine shards. Set "
            "deepspeed_config['gradient_clipping'], and the engine clips them in its step."
        )

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, *, scaler: GradScaler | None = None
    ) -> Any:
        """Let the engine move the weights and drop the gradients; a closure is called once, before.

        Raises:
            ValueError: If a scaler is given: the engine scales by itself.
        """
        if scaler is not None:
            raise ValueError("scaler was given, but DeepSpeed's engine scales losses itself. Leave the scaler out.")
        result = None if closure is None else closure()
        if self._unused is None:
            self.engine.step()
        else:
            self._unused.begin_step()
            self.engine.step()
            self._unused.end_step()
        return result

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Leave the gradients to the engine, which drops them in each step."""

    def sum(self, values: Sequence[TNumber]) -> Sequence[TNumber]:
        """Return, for each of a few counts below 2**53, its sum over all ranks. Every rank calls this."""
        return sum_counts(values)

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the mean of each value over all ranks, by way of one collective that nobody waits for."""
        return average_values(values)

    def model_state_dict(self, model: "Module") -> dict[str, Any]:
        """Return the whole weights, in float32 where the engine keeps them so. Every rank must call this.

        At stage 3 they are gathered one after the other, as copies on the host.
        """
        return deepspeed_state.gather_weights(self.engine)

    def load_model_state_dict(
        self, model: "Module", state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load whole weights, in place, and return the names that were missing and those that were not expected.

        Every rank must call this with the same weights.
        """
        return deepspeed_state.scatter_weights(self.engine, state_dict, strict=strict)

    def parameter_names(self, model: "Module") -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups, in the order that it got them."""
        names = {id(parameter): name for name, parameter in self.engine.module.named_parameters()}
        return [[names.get(id(parameter), "") for parameter in group] for group in self._parameters]

    def optimizer_state_dict(self, model: "Module", optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state as the optimizer before `prepare` would have it. Every rank must call this."""
        return deepspeed_state.gather_optimizer(self.engine, self._parameters)

    def load_optimizer_state_dict(self, model: "Module", optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load such a whole state, in place. Every rank must call this with the same state."""
        deepspeed_state.scatter_optimizer(self.engine, self._parameters, state_dict)


def _check_installed() -> None:
    if find_spec("deepspeed") is None:
        raise ImportError(
            "deepspeed_config was given, but the package 'deepspeed' is not installed. It comes with the extra "
            "'deepspeed': run `pip install 'composer-dist[deepspeed]'`.",
            name="deepspeed",
        )


def _the_one(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return the only optimizer, of those kinds that take the gradients as they find them."""
    if len(optimizers) != 1:
        raise ValueError(
            f"{len(optimizers)} optimizers were given, and DeepSpeed's engine takes exactly one. Give one optimizer "
            "with several parameter groups instead."
        )
    step = inspect.signature(type(optimizers[0]).step).parameters.get("closure")
    if step is not None and step.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizers[0]).__name__} evaluates the loss itself, several times in a step, which DeepSpeed's "
            "engine cannot do. Choose an optimizer whose step() needs no closure, or train without DeepSpeed."
        )
    return optimizers[0]


def _start(device: Device) -> Any:
    """Import the package, and let it use the process group that there is."""
    if isinstance(device, DeviceCPU):
        # Read at its import; on a machine with GPUs it would choose one.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed: Any = importlib.import_module("deepspeed")  # takes a second, and few ask for it
    if isinstance(device, DeviceCPU):
        # A collective for inference that it would compile now, which takes a minute and a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    initialize_dist(device)
    deepspeed.init_distributed(dist_backend=device.dist_backend or "gloo", verbose=False)
    return deepspeed


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep DeepSpeed from warning of every optimizer that is not its own, which the configuration has allowed."""
    logger = logging.getLogger("DeepSpeed")

    def is_not_advice(record: logging.LogRecord) -> bool:
        return "untested optimizer" not in record.getMessage()

    logger.addFilter(is_not_advice)
    try:
        yield
    finally:
        logger.removeFilter(is_not_advice)


@cache
def _destroy_group_at_exit() -> None:
    """Destroy the process group when the interpreter ends, whoever made it: runs on a CPU hang or abort otherwise."""
    atexit.register(_destroy_group)


def _destroy_group() -> None:
    if tdist.is_initialized():
        tdist.destroy_process_group()

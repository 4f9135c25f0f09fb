"""Algorithms in a custom training loop with Accelerate."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_algorithms.bridges._loop_events import needs_closure
from composer_algorithms.bridges.loop import AlgorithmLoop, LoopBatch
from composer_events import Algorithm, Callback
from composer_events.parallelism import is_sharded
from composer_time import Time

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        f"{error}: composer_algorithms.bridges.accelerate needs Accelerate. Install it with "
        "`pip install 'composer-algorithms[accelerate]'`."
    ) from error

__all__ = ["AcceleratedLoop", "LoopBatch"]

_PRECISIONS = {"no": "fp32", "bf16": "amp_bf16", "fp16": "amp_fp16", "fp8": "amp_fp8"}
# Names, since some members of the enum do not exist in older versions of Accelerate.
_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA")


class AcceleratedLoop(AlgorithmLoop):
    """An `AlgorithmLoop` that prepares its objects and runs the backward pass with an `Accelerator`.

    Algorithms change the bare model and optimizer, which are then prepared together with the dataloader. Use
    `loop.model` in the loop. Precision and gradient accumulation are those of the accelerator: the blocks need no
    `accelerator.accumulate`.

    Args:
        accelerator: Accelerator of the loop.
        model: The model, not prepared.
        optimizer: Optimizer of the model, or several, not prepared.
        algorithms: One or several.
        dataloader: Training data.
        max_duration: As for `AlgorithmLoop`.
        seed: As for `AlgorithmLoop`.
        callbacks: As for `AlgorithmLoop`.

    Attributes:
        model: The prepared model.
        dataloader: The prepared dataloader.

    Raises:
        ValueError: If the model is already prepared, is to be trained with DeepSpeed, FSDP or Megatron, or arguments
            are incompatible with an algorithm.

    Example:
        >>> import torch
        >>> from composer_algorithms import LabelSmoothing
        >>> data = torch.utils.data.TensorDataset(torch.rand(8, 4), torch.arange(8) % 2)
        >>> loader, model = torch.utils.data.DataLoader(data, batch_size=4), nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accelerator = Accelerator(cpu=True)
        >>> loop = AcceleratedLoop(
        ...     accelerator, model, optimizer, LabelSmoothing(0.1), dataloader=loader, max_duration="1ep"
        ... )
        >>> for x, y in loop.epoch():
        ...     with loop.batch(x, y) as b:
        ...         b.outputs = loop.model(b.inputs)
        ...         b.loss = nn.functional.cross_entropy(b.outputs, b.targets)
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        algorithms: Algorithm | Iterable[Algorithm] = (),
        *,
        dataloader: Iterable[Any],
        max_duration: int | str | Time[Any],
        seed: int | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
    ) -> None:
        kind = accelerator.distributed_type.name
        if kind not in _PLAIN or is_sharded(model):
            raise ValueError(
                f"the Accelerator trains with {kind}, which shards or replaces weights and optimizers: this "
                f"loop supports one device or DistributedDataParallel. For sharded models use the Trainer of "
                f"composer-suite."
            )
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"model is a {type(model).__name__}, so it is prepared already, and algorithms change the bare model: "
                f"pass model, optimizer and dataloader before accelerator.prepare, and use loop.model afterwards."
            )
        self.accelerator = accelerator
        super().__init__(
            model.to(accelerator.device),
            optimizer,
            algorithms,
            dataloader=dataloader,
            max_duration=max_duration,
            num_microbatches=accelerator.gradient_accumulation_steps,
            precision=_PRECISIONS[accelerator.mixed_precision],
            seed=seed,
            callbacks=callbacks,
        )

    def _prepared(self, optimizers: list[Optimizer], dataloader: Iterable[Any]) -> tuple[list[Any], Iterable[Any]]:
        pieces, scaler = self.accelerator.gradient_accumulation_steps, self.accelerator.scaler
        if any(map(needs_closure, optimizers)) and (pieces > 1 or scaler is not None):
            raise ValueError(
                f"{type(optimizers[0]).__name__} evaluates a batch more than once, which works neither with "
                f"gradient_accumulation_steps={pieces!r} nor with mixed_precision='fp16': use 1 step, and compute in "
                f"bfloat16 or in full precision."
            )
        # Only now, since algorithms must change the bare model before DDP wraps it.
        self.model, self.dataloader, *prepared = self.accelerator.prepare(self.state.model, dataloader, *optimizers)
        self.state.model = self.model
        return prepared, self.dataloader

    def _accumulating(self) -> AbstractContextManager[Any]:
        return self.accelerator.accumulate(self.model)

    def _is_whole(self) -> bool:
        # True also for the last step of an epoch, which may have fewer microbatches.
        return self.accelerator.sync_gradients

    def _backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss, create_graph=self._create_graph)  # also divides by the number of microbatches

    def _zero_grad(self, optimizer: Any) -> None:
        optimizer.optimizer.zero_grad()  # the wrapper skips all but the last microbatch

    def _unscale(self) -> None:
        self.accelerator.unscale_gradients()

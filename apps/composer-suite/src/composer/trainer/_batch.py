"""One optimizer step: the batch cut into microbatches, each with its forward, loss and backward pass."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer.trainer._autocast import Autocast
from composer.trainer._train_metrics import TrainMetrics
from composer_dist.strategy import Strategy
from composer_events.data_spec import DataSpec
from composer_events.engine import Engine
from composer_events.event import Event
from composer_events.state import State
from composer_models import ComposerModel


class BatchTrainer:
    """Trains on `state.batch`.

    The gradient of a batch is the mean over its samples, however it is cut: each microbatch's loss counts with its
    share of the samples.

    Args:
        state: Its `batch`, `outputs` and `loss` follow the microbatch at work; the whole batch is back at the end.
        engine: Tells the listeners.
        strategy: How gradients are computed and applied.
        model: The user's model, whose `loss` is called; `state.model` may wrap it.
        data_spec: How a batch is cut, counted and prepared on the device.
        autocast: Makes the precision context of a forward pass and a loss.
        metrics: Sees each microbatch as it was before any algorithm changed it.
        create_graph: Whether an algorithm differentiates through the gradients.
    """

    def __init__(
        self,
        state: State,
        engine: Engine,
        strategy: Strategy,
        *,
        model: ComposerModel,
        data_spec: DataSpec,
        autocast: Autocast,
        metrics: TrainMetrics,
        create_graph: bool,
    ) -> None:
        self._state = state
        self._engine = engine
        self._strategy = strategy
        self._model = model
        self._data_spec = data_spec
        self._autocast = autocast
        self._metrics = metrics
        self._create_graph = create_graph
        self._needs_closure: dict[Optimizer, bool] = {}  # looked up once for each, as algorithms may replace it

    def __call__(self) -> dict[str, Tensor]:
        """Run the step and return the losses to log, as scalars on the device, by their log names."""
        optimizer, scaler = self._state.optimizers[0], self._state.scaler
        if optimizer not in self._needs_closure:
            self._needs_closure[optimizer] = needs_closure(optimizer)
        losses: dict[str, Tensor] = {}
        if self._needs_closure[optimizer]:

            def closure() -> Tensor:
                losses.clear()
                return self._compute_gradients(losses)

            self._strategy.step(optimizer, closure)
        else:
            self._compute_gradients(losses)
            self._strategy.step(optimizer, scaler=scaler)
        if scaler is not None:
            scaler.update()
        return losses

    def _compute_gradients(self, losses: dict[str, Tensor]) -> Tensor:
        state, spec = self._state, self._data_spec
        self._engine.run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in state.optimizers:
            self._strategy.zero_grad(optimizer)
        self._metrics.reset()

        batch = state.batch
        assert state.device_train_microbatch_size is not None, "the Trainer sets it with the dataloader"
        microbatches = cut(batch, spec, state.device_train_microbatch_size)
        sizes = [spec.get_num_samples_in_batch(microbatch) for microbatch in microbatches]
        num_samples = sum(sizes)
        for index, (microbatch, size) in enumerate(zip(microbatches, sizes, strict=True), 1):
            state.batch = spec.microbatch_transforms(state.device.batch_to_device(microbatch))
            with self._strategy.microbatch(is_last=index == len(microbatches)):
                self._train_microbatch(1.0 if size == num_samples else size / num_samples, losses)
        state.batch = batch
        if state.scaler is not None:
            state.scaler.unscale_(state.optimizers[0])  # listeners see the gradients in their true size

        self._engine.run_event(Event.AFTER_TRAIN_BATCH)
        return losses["loss/train/total"]

    def _train_microbatch(self, share: float, losses: dict[str, Tensor]) -> None:
        state, run_event = self._state, self._engine.run_event
        self._metrics.keep(state.batch)

        run_event(Event.BEFORE_FORWARD)
        with self._autocast():
            state.outputs = state.model(state.batch)
        run_event(Event.AFTER_FORWARD)

        run_event(Event.BEFORE_LOSS)
        with self._autocast():
            state.loss = self._model.loss(state.outputs, state.batch)
        run_event(Event.AFTER_LOSS)

        run_event(Event.BEFORE_BACKWARD)
        named = name_losses(state.loss)
        for name, value in named.items():
            weighted = value.detach() if share == 1.0 else value.detach() * share
            losses[name] = losses[name] + weighted if name in losses else weighted
        total = named["loss/train/total"]
        if share != 1.0:
            total = total * share
        if state.scaler is not None:
            total = state.scaler.scale(total)
        self._strategy.backward(total, create_graph=self._create_graph)
        run_event(Event.AFTER_BACKWARD)

        self._metrics.update(state.outputs, self._autocast)


def cut(batch: Any, data_spec: DataSpec, size: int | float | None) -> Sequence[Any]:
    """Return the microbatches of a batch, of `size` samples each.

    Where they are as large as the dataloader's batches, an incomplete last batch is one of its own. It does not go
    through `split_batch`, which would warn that it cannot be cut.
    """
    is_whole = size is not None and size == getattr(data_spec.dataloader, "batch_size", None)
    if is_whole and data_spec.get_num_samples_in_batch(batch) < cast(float, size):
        return [batch]
    return data_spec.split_batch(batch, cast(float, size))  # a split of the user's own may do without a size


def name_losses(loss: Tensor | Mapping[str, Tensor] | Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the parts of what a model's `loss` gave and the total that is minimised, by their log names.

    A dict with a `total` says itself what is minimised; of any other dict or sequence it is the sum.

    Raises:
        TypeError: If the loss is of another kind.
    """
    if isinstance(loss, Tensor):
        return {"loss/train/total": _mean(loss)}
    named: Mapping[str, Any] = {}
    if isinstance(loss, Mapping):
        named = loss
    elif isinstance(loss, Sequence):
        named = {f"loss{index}": part for index, part in enumerate(loss)}
    if not named or not all(isinstance(part, Tensor) for part in named.values()):
        raise TypeError(
            f"The model's loss() returned {loss!r}. It must return a tensor, a sequence of tensors, or a dict of "
            "tensors (optionally with the key 'total')."
        )
    parts = {f"loss/train/{name}": _mean(part) for name, part in named.items()}
    if "loss/train/total" not in parts:
        parts["loss/train/total"] = torch.stack(list(parts.values())).sum()
    return parts


def _mean(loss: Tensor) -> Tensor:
    return loss if loss.ndim == 0 else loss.mean()


def needs_closure(optimizer: Optimizer) -> bool:
    """Say whether an optimizer evaluates the loss itself, as LBFGS and SAM do, once or more in a step."""
    if getattr(optimizer, "_step_supports_amp_closure", False):
        return True
    # Wrapped by PyTorch (hooks, schedulers), the method still shows the signature of the one it wraps.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty

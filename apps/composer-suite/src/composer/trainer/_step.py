"""One optimizer step: split the batch into microbatches, and run forward, loss and backward for each."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer.trainer import _error_context as error_context
from composer.trainer._divergence_guard import DivergenceGuard
from composer.trainer._microbatching import check_token_weights, size_for
from composer.trainer._oom import HalveOnOom
from composer.trainer._rank_sync import TOTAL, Ranks, add_finite, mean_total
from composer_dist import get_precision_context
from composer_dist.devices import Precision
from composer_dist.strategy import Strategy
from composer_events.data_spec import DataSpec
from composer_events.engine import Engine
from composer_events.event import Event
from composer_events.state import State
from composer_models import ComposerModel, model_eval_mode

Autocast = Callable[[], AbstractContextManager[Any]]

_NOTHING = nullcontext()  # reentrant and without state, so one serves every microbatch


def make_autocast(state: State, strategy: Strategy) -> Autocast:
    """Return a factory of the precision context for the current precision, device and surrounding autocast."""
    if strategy.has_own_precision:
        return nullcontext
    # The device type is read once here: the lookup costs more than entering the context.
    device_type = state.device.torch_device.type
    enter = functools.partial(get_precision_context, state.precision, state.precision_config, device_type=device_type)
    if state.precision is Precision.FP32 and not torch.is_autocast_enabled(device_type):
        return _do_nothing  # in full precision only an enclosing autocast would have to be ended
    return enter


def _do_nothing() -> AbstractContextManager[Any]:
    return _NOTHING


class TrainMetrics:
    """Updates of `state.train_metrics` with the microbatches as they were before algorithms changed them."""

    def __init__(self, state: State, model: ComposerModel) -> None:
        self._state = state
        self._model = model
        self._kept: Any = None
        # The default eval_forward returns the outputs unchanged, so switching to eval mode would have no effect.
        self._reuses_outputs = type(model).eval_forward is ComposerModel.eval_forward

    def reset(self) -> None:
        """Reset all metrics for a new batch."""
        if metrics := self._state.train_metrics:
            for metric in metrics.values():
                metric.reset()

    def keep(self, microbatch: Any) -> None:
        """Keep a microbatch for `update`; algorithms may change its containers afterwards."""
        if self._state.train_metrics:
            self._kept = _copy_containers(microbatch)

    @error_context.stage("the metrics of training")
    def update(self, outputs: Any, autocast: Autocast) -> None:
        """Update every metric with the kept microbatch and the model's outputs, under the training precision."""
        metrics = self._state.train_metrics
        if not metrics:
            return
        mode: AbstractContextManager[Any] = nullcontext() if self._reuses_outputs else model_eval_mode(self._model)
        with torch.no_grad(), mode, autocast():
            outputs = self._model.eval_forward(self._kept, outputs)
            for metric in metrics.values():
                self._model.update_metric(self._kept, outputs, metric)
        self._kept = None

    def compute(self) -> dict[str, Any]:
        """Return each metric over the microbatches seen so far, and store the values on the state.

        A run resumed exactly at the end of an epoch has seen none yet.
        """
        values = {
            name: metric.compute()
            for name, metric in (self._state.train_metrics or {}).items()
            if getattr(metric, "update_called", True)  # compute() of torchmetrics warns before the first update
        }
        self._state.train_metric_values.update(values)
        return values


def _copy_containers(batch: Any) -> Any:
    """Copy the dicts, lists and tuples of a batch; the tensors in them stay the same objects."""
    if isinstance(batch, Mapping):
        return {key: _copy_containers(value) for key, value in cast("Mapping[Any, Any]", batch).items()}
    if type(batch) in (list, tuple):
        return type(batch)(_copy_containers(value) for value in batch)
    return batch


@dataclass(slots=True, eq=False)
class BatchTrainer:
    """Training step on `state.batch`.

    The gradient of a batch is the mean over its samples for any microbatch size: the loss of each microbatch is
    weighted by its share of the samples, or of the loss-generating tokens, of all ranks.

    Attributes:
        state: `batch`, `outputs` and `loss` are those of the current microbatch; afterwards `batch` is the whole batch.
        model: The user's model, whose `loss` is called; `state.model` may wrap it.
        metrics: Receives each microbatch as it was before algorithms changed it.
        create_graph: Whether an algorithm differentiates through the gradients.
        by_tokens: Whether microbatches are weighted by their loss-generating tokens instead of their samples.
        guard: Decides whether to take each step; `None` takes all steps.
        oom: Repeats batches that do not fit into memory; `None` if the microbatch size is fixed.
    """

    state: State
    engine: Engine
    strategy: Strategy
    model: ComposerModel
    data_spec: DataSpec
    autocast: Autocast
    metrics: TrainMetrics
    create_graph: bool
    ranks: Ranks
    by_tokens: bool
    guard: DivergenceGuard | None
    oom: HalveOnOom | None
    _optimizers: Sequence[Optimizer] = field(init=False)
    _has_looked_at_tokens: bool = field(default=False, init=False)
    _needs_closure: dict[Optimizer, bool] = field(
        default_factory=dict[Optimizer, bool], init=False
    )  # by optimizer, because an algorithm may replace it during training

    def __post_init__(self) -> None:
        self._optimizers = self.state.optimizers  # the list object never changes, only its items

    def __call__(self) -> dict[str, Tensor]:
        """Run the step and return the losses to log, as scalars on the device, by their log names."""
        optimizer, scaler, guard = self._optimizers[0], self.state.scaler, self.guard
        if optimizer not in self._needs_closure:
            self._needs_closure[optimizer] = needs_closure(optimizer)
        losses: dict[str, Tensor] = {}
        if guard is not None:
            guard.begin_batch()
        if self._needs_closure[optimizer]:
            with nullcontext() if guard is None else guard.closures(optimizer):
                self._step_with_closure(optimizer, losses)
        elif self.oom is None:
            self._compute_gradients(losses)
            if guard is None or guard.admits(optimizer, losses):
                self._step(optimizer)
        else:

            def prepare() -> bool:
                self._compute_gradients(losses)
                return guard is None or guard.admits(optimizer, losses)

            self.oom.step(optimizer, prepare, partial(self._step, optimizer))
        if scaler is not None:
            # Also after a step that the guard has rejected: an overflow must still lower the scale.
            scaler.update()
        return losses

    def finish(self) -> None:
        """Handle the results of the latest steps that have not reached the host yet."""
        if self.guard is not None:
            self.guard.end_fit()

    def _step_with_closure(self, optimizer: Optimizer, losses: dict[str, Tensor]) -> None:
        """Take the step of an optimizer that evaluates the loss itself, once or several times."""

        def closure(*, ddp_sync: bool = True, loss_dict: dict[str, Tensor] | None = None) -> Tensor | None:
            seen = losses if loss_dict is None else loss_dict  # the optimizer chooses which evaluation is logged
            self._compute_gradients(seen, sync=ddp_sync)
            if not ddp_sync:
                return seen[TOTAL]
            loss = mean_total(seen, self.strategy)  # optimizers that branch on the loss must agree on every rank
            return None if self.guard is not None and self.guard.stops_closure(optimizer, seen) else loss

        take = partial(self._step, optimizer, closure)
        if self.oom is None:
            take()
        else:
            self.oom.step(optimizer, None, take)

    @error_context.stage("the optimizer's step")
    def _step(self, optimizer: Optimizer, closure: Any = None) -> None:
        self.strategy.step(optimizer, closure, scaler=self.state.scaler)

    def _compute_gradients(self, losses: dict[str, Tensor], *, sync: bool = True) -> None:
        """Compute the gradients of the batch, and add its losses to `losses`.

        Without `sync`, the gradients are those of this rank's part of the batch.
        """
        if self.oom is not None:
            self.oom.gradients(partial(self._attempt_gradients, losses, sync=sync))
            return
        try:
            self._attempt_gradients(losses, sync=sync)
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"with device_train_microbatch_size={self.state.device_train_microbatch_size}; give a smaller one, "
                "or 'auto' to adapt it automatically"
            )
            raise

    def _attempt_gradients(self, losses: dict[str, Tensor], *, sync: bool) -> None:
        state = self.state
        losses.clear()  # a failed attempt, or an earlier call of the closure, may have added some
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in self._optimizers:
            self.strategy.zero_grad(optimizer)
        self.metrics.reset()

        batch = state.batch
        microbatches = self._cut(batch)
        shares, is_aligned = self._weigh(microbatches)
        # A single microbatch on a single rank is the mean already, which saves the kernels for shares.
        averages = len(microbatches) > 1 or self.ranks.world_size > 1
        with _NOTHING if self.oom is None else self.oom.meeting(sync=sync):
            for index, (microbatch, share) in enumerate(zip(microbatches, shares, strict=True), 1):
                self._move(microbatch)
                is_last = index == len(microbatches)
                with self.strategy.microbatch(is_last=is_last, sync=sync, is_aligned=is_aligned):
                    self._train_microbatch(share, losses, averages=averages)
        state.batch = batch
        if state.scaler is not None:
            # Here, because algorithms such as clipping read the gradients on AFTER_TRAIN_BATCH.
            state.scaler.unscale_(state.optimizers[0])
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)

    @error_context.stage("the cutting into microbatches")
    def _cut(self, batch: Any) -> Sequence[Any]:
        try:
            size = self.state.device_train_microbatch_size
            if size is None or self.state.grad_accum is not None:
                size = size_for(batch, self.data_spec, self.state)
            return cut(batch, self.data_spec, size)
        except Exception as error:
            error_context.name_setters(
                error, self.state, (Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH)
            )
            raise

    @error_context.stage("the preparation of a microbatch")
    def _move(self, microbatch: Any) -> None:
        """Move a microbatch to the device and to the state."""
        on_device = self.state.device.batch_to_device(microbatch)
        self.state.batch = self.strategy.prepare_batch(transform("microbatch_transforms", self.data_spec, on_device))

    def _weigh(self, microbatches: Sequence[Any]) -> tuple[Sequence[float], bool]:
        """Return each microbatch's share in the loss, and whether all ranks have the same number of them.

        The shares of all ranks add up to the number of ranks.
        """
        spec = self.data_spec
        if self.by_tokens:
            weights = [spec.get_num_tokens_in_batch(part, token_type="loss_generating") for part in microbatches]
        else:
            weights = [spec.get_num_samples_in_batch(part) for part in microbatches]
        whole, is_aligned = self.ranks.compare_batch(sum(weights), len(weights), is_count_of_samples=not self.by_tokens)
        # Once per fit, because the check reads all labels of a batch.
        if self.by_tokens and not self._has_looked_at_tokens:
            check_token_weights(whole, microbatches, spec)
            self._has_looked_at_tokens = True
        if len(weights) == 1 and weights[0] == whole and whole:
            return [1.0], is_aligned
        return [weight / whole if whole else 0.0 for weight in weights], is_aligned

    def _train_microbatch(self, share: float, losses: dict[str, Tensor], *, averages: bool) -> None:
        state, run_event = self.state, self.engine.run_event
        self.metrics.keep(state.batch)

        run_event(Event.BEFORE_FORWARD)
        self._forward()
        run_event(Event.AFTER_FORWARD)

        run_event(Event.BEFORE_LOSS)
        self._compute_loss()
        run_event(Event.AFTER_LOSS)

        run_event(Event.BEFORE_BACKWARD)
        total = state.loss
        if not isinstance(total, Tensor):
            named = name_losses(total)
            total = named.pop(TOTAL)
            for name, value in named.items():
                add_finite(losses, name, _weigh(value.detach(), share), share)
        weighted = _weigh(_mean(total), share)
        if averages:
            add_finite(losses, TOTAL, weighted.detach(), share)
        else:
            losses[TOTAL] = weighted.detach()
        self._backward(weighted, share)
        run_event(Event.AFTER_BACKWARD)

        self.metrics.update(state.outputs, self.autocast)

    @error_context.stage("the forward pass")
    def _forward(self) -> None:
        with self.autocast():
            self.state.outputs = self.state.model(self.state.batch)

    @error_context.stage("the loss")
    def _compute_loss(self) -> None:
        with self.autocast():
            self.state.loss = self.model.loss(self.state.outputs, self.state.batch)

    @error_context.stage("the backward pass")
    def _backward(self, loss: Tensor, share: float) -> None:
        # A microbatch of zero weight may have a NaN loss, such as a mean over no tokens, but must join the collectives.
        if not share:
            loss = _zero_over(self.state.outputs)
        elif self.guard is not None:
            loss = self.guard.mark(loss)
        if self.state.scaler is not None:
            loss = self.state.scaler.scale(loss)
        self.strategy.backward(loss, create_graph=self.create_graph)


def cut(batch: Any, data_spec: DataSpec, size: Any) -> Sequence[Any]:
    """Return the microbatches of a batch, of `size` samples each; a custom `split_batch` may accept `None`.

    If `size` is the batch size of the dataloader, an incomplete last batch is one microbatch and bypasses
    `split_batch`, which would warn that it cannot split it.
    """
    of_loader = getattr(data_spec.dataloader, "batch_size", None)
    if of_loader is not None and size == of_loader and data_spec.get_num_samples_in_batch(batch) < size:
        return [batch]
    return split(data_spec, batch, size)


def name_losses(loss: object) -> dict[str, Tensor]:
    """Return the parts of a loss and the total to minimize, by their log names.

    The total is the entry `total` of a dict; for any other dict or sequence it is the sum.
    """
    named: Mapping[str, object] = {}
    if isinstance(loss, Mapping):
        named = cast("Mapping[str, object]", loss)
    elif isinstance(loss, Sequence):
        named = {f"loss{index}": part for index, part in enumerate(cast("Sequence[object]", loss))}
    if not named or not all(isinstance(part, Tensor) for part in named.values()):
        raise TypeError(
            f"The model's loss() returned {loss!r}. It must return a tensor, a sequence of tensors, or a dict of "
            "tensors (optionally with the key 'total')."
        )
    parts = {f"loss/train/{name}": _mean(part) for name, part in named.items() if isinstance(part, Tensor)}
    if TOTAL not in parts:
        parts[TOTAL] = torch.stack(list(parts.values())).sum()
    return parts


def _weigh(loss: Tensor, share: float) -> Tensor:
    if share == 1.0:
        return loss
    # Not a product with 0: the loss of a microbatch without weight may be NaN.
    return loss * share if share else torch.zeros_like(loss)


def _zero_over(outputs: Any) -> Tensor:
    """Return 0 with a gradient of 0 for everything that the outputs depend on, so that all gradient hooks run."""
    if isinstance(outputs, Tensor):
        # NaN * 0 would be NaN again.
        return torch.nan_to_num(outputs).sum() * 0
    parts = cast("Mapping[Any, Any]", outputs).values() if isinstance(outputs, Mapping) else outputs
    return torch.stack([_zero_over(part) for part in parts if isinstance(part, (Tensor, Mapping, list, tuple))]).sum()


def _mean(loss: Tensor) -> Tensor:
    return loss if loss.ndim == 0 else loss.mean()


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer evaluates the loss itself, once or more per step, as LBFGS and SAM do."""
    # SAM sets this; its `step` has an optional closure, so the signature alone does not show it.
    if getattr(optimizer, "_step_supports_amp_closure", False):
        return True
    # PyTorch's wrappers (hooks, schedulers) preserve the signature of the method.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def transform(name: Literal["batch_transforms", "microbatch_transforms"], spec: DataSpec, batch: Any) -> Any:
    """Apply a transform of a DataSpec to a batch."""
    transformed = getattr(spec, name)(batch)
    if transformed is None:
        raise TypeError(
            f"{name}={getattr(spec, name)!r} returned None. It must return the batch, even if it changes it in place."
        )
    return transformed


def split(spec: DataSpec, batch: Any, size: Any) -> Sequence[Any]:
    """Split a batch into microbatches with `split_batch`."""
    microbatches = spec.split_batch(batch, size)
    if not hasattr(microbatches, "__len__") or not len(microbatches):
        raise TypeError(
            f"split_batch={spec.split_batch!r} returned {microbatches!r}. It must return a list of microbatches, with "
            f"one at least."
        )
    return microbatches

"""One optimizer step: split the batch into microbatches, and run forward, loss and backward for each."""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer.trainer import _error_context as error_context
from composer.trainer._divergence_guard import DivergenceGuard
from composer.trainer._microbatching import HalveOnOom, check_token_weights, size_for
from composer.trainer._rank_sync import TOTAL, BatchLosses, Ranks, mean_total, weigh
from composer.trainer._report import TrainMetrics
from composer.trainer._scaler import unscale
from composer_dist import get_precision_context
from composer_dist.ddp import DDPSyncStrategy
from composer_dist.devices import Precision
from composer_dist.strategy import Strategy
from composer_events.data_spec import DataSpec
from composer_events.engine import Engine
from composer_events.event import Event
from composer_events.state import State
from composer_models import ComposerModel

Autocast = Callable[[], AbstractContextManager[Any]]

# With these the numbers of microbatches do not matter.
_ONCE_A_BATCH = (DDPSyncStrategy.SINGLE_AUTO_SYNC, DDPSyncStrategy.FORCED_SYNC)

_NOTHING = nullcontext()  # reentrant and without state, so one serves every microbatch


def make_autocast(state: State, strategy: Strategy) -> Autocast:
    """Return a factory of the precision context for the current precision, device and surrounding autocast."""
    if strategy.has_own_precision:
        return nullcontext
    # The device type is read once here: the lookup costs more than entering the context.
    device_type = state.device.torch_device.type
    enter = functools.partial(get_precision_context, state.precision, state.precision_config, device_type=device_type)
    if state.precision is Precision.FP32 and not torch.is_autocast_enabled(device_type):
        # In full precision only an enclosing autocast would have to be ended. This function costs no Python call.
        return itertools.repeat(_NOTHING).__next__
    return enter


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
        has_cuda_graphs: Whether gradients lie in memory that the next backward pass overwrites.
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
    has_cuda_graphs: bool
    oom: HalveOnOom | None
    _optimizers: Any = field(init=False)  # an `OptimizerList`
    _step: "Step | None" = field(default=None, init=False)
    _has_looked_at_tokens: bool = field(default=False, init=False)
    _needs_alignment: bool = field(init=False)

    def __post_init__(self) -> None:
        self._optimizers = self.state.optimizers  # the list object never changes, only its items
        # Whether the ranks must know before the forward pass that they have equally many microbatches.
        self._needs_alignment = getattr(self.strategy, "sync_strategy", None) not in _ONCE_A_BATCH

    def __call__(self) -> BatchLosses:
        """Run the step and return the losses to log, as scalars on the device."""
        scaler, step = self.state.scaler, self._step
        if step is None or step.optimizers != self._optimizers:  # an algorithm may replace one during training
            step = self._step = (ClosureStep if takes_closure(self._optimizers) else Step)(self._optimizers, self)
        if step.has_modes:
            self._optimizers.train()  # evaluations and saves switch to the other mode
        if self.guard is not None:
            self.guard.begin_batch()
        try:
            losses = step.attempt() if self.oom is None else self.oom.run(step.attempt)
        except torch.OutOfMemoryError as error:
            if self.oom is None:
                size = self.state.device_train_microbatch_size
                error.add_note(f"with device_train_microbatch_size={size}; give a smaller one, or 'auto' to adapt it")
            raise
        if scaler is not None:
            # Also after a step that the guard has rejected: an overflow must still lower the scale.
            scaler.update()
        return losses

    def finish(self) -> None:
        """Handle the results of the latest steps that have not reached the host yet; end with the weights to use."""
        if self.guard is not None:
            self.guard.end_fit()
        self._optimizers.eval()

    def compute_gradients(self, losses: BatchLosses, *, sync: bool = True) -> None:
        """Compute the gradients of the batch, and store its losses in `losses`.

        Without `sync`, the gradients are those of this rank's part of the batch.
        """
        state = self.state
        losses.clear()  # an earlier call of a closure may have added some
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in self._optimizers:
            self.strategy.zero_grad(optimizer)
        self.metrics.reset()

        batch = state.batch
        microbatches = self._cut(batch)
        shares, is_aligned = self._weigh(microbatches)
        with _NOTHING if self.oom is None else self.oom.meeting(sync=sync):
            for index, microbatch in enumerate(microbatches, 1):
                self._move(microbatch)
                is_last = index == len(microbatches)
                with self.strategy.microbatch(is_last=is_last, sync=sync, is_aligned=is_aligned):
                    self._train_microbatch(shares, index - 1, losses)
                if index == 1 and not is_last and self.has_cuda_graphs:
                    self._own_gradients()
        state.batch = batch
        if state.scaler is not None:
            # Here, because algorithms such as clipping read the gradients on AFTER_TRAIN_BATCH.
            unscale(state.scaler, self._optimizers)
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)

    def _own_gradients(self) -> None:
        """Copy the gradients out of the memory of a CUDA graph, so that later microbatches are added to them."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.clone()

    @error_context.stage("the cutting into microbatches")
    def _cut(self, batch: Any) -> Sequence[Any]:
        try:
            size = self.state.device_train_microbatch_size
            if size is None or self.state.grad_accum is not None:
                size = size_for(batch, self.data_spec, self.state)
            position = self.state.data_position
            if position is not None and position.sizes is not None:  # `split_batch` would warn of a small batch
                size = min(size, self.data_spec.get_num_samples_in_batch(batch))
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

    def _weigh(self, microbatches: Sequence[Any]) -> "tuple[Sequence[float] | _LateShares, bool]":
        """Return each microbatch's share in the loss, and whether all ranks have the same number of them.

        The shares of all ranks add up to the number of ranks.
        """
        spec = self.data_spec
        if self.by_tokens:
            weights = [spec.get_num_tokens_in_batch(part, token_type="loss_generating") for part in microbatches]
        else:
            weights = [spec.get_num_samples_in_batch(part) for part in microbatches]
        total = sum(weights)
        compare = self.ranks.start_comparison(total, len(weights), is_count_of_samples=not self.by_tokens)
        looks_at_tokens = self.by_tokens and not self._has_looked_at_tokens
        if compare is not None and not self._needs_alignment and not looks_at_tokens:
            return _LateShares(weights, compare), True
        whole, is_aligned = (total, True) if compare is None else compare()
        if looks_at_tokens:  # once per fit, because the check reads all labels of a batch
            check_token_weights(whole, microbatches, spec)
            self._has_looked_at_tokens = True
        return _shares(weights, whole), is_aligned

    def _train_microbatch(self, shares: "Sequence[float] | _LateShares", index: int, losses: BatchLosses) -> None:
        state, run_event = self.state, self.engine.run_event
        self.metrics.keep(state.batch)

        run_event(Event.BEFORE_FORWARD)
        self._forward()
        run_event(Event.AFTER_FORWARD)

        run_event(Event.BEFORE_LOSS)
        self._compute_loss()
        run_event(Event.AFTER_LOSS)

        share = shares[index]
        run_event(Event.BEFORE_BACKWARD)
        total = state.loss
        if not isinstance(total, Tensor):
            named = name_losses(total)
            total = named.pop(TOTAL)
            for name, value in named.items():
                losses.add(name, value, share)
        total = _mean(total)
        losses.add(TOTAL, total, share)
        self._backward(weigh(total, share), share)
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
        if self.state.scaler is not None:
            loss = self.state.scaler.scale(loss if self.guard is None or not share else self.guard.mark(loss))
        self.strategy.backward(loss, create_graph=self.create_graph)


def _shares(weights: Sequence[float], whole: float) -> Sequence[float]:
    return [weight / whole if whole else 0.0 for weight in weights]


class _LateShares:
    """The shares of microbatches in the loss, for which the ranks compare their batches during the forward pass."""

    def __init__(self, weights: Sequence[float], compare: Callable[[], tuple[float, bool]]) -> None:
        self._weights = weights
        self._compare: Callable[[], tuple[float, bool]] | None = compare

    def __getitem__(self, index: int) -> float:
        if self._compare is not None:
            self._weights, self._compare = _shares(self._weights, self._compare()[0]), None
        return self._weights[index]


class Step:
    """Gradients of a batch, then the step of each optimizer, in order."""

    def __init__(self, optimizers: Any, batch: BatchTrainer) -> None:
        self.optimizers: list[Optimizer] = list(optimizers)
        self.has_modes = bool(optimizers.with_modes())
        self._batch = batch
        self._guard, self._oom = batch.guard, batch.oom

    def attempt(self) -> BatchLosses:
        """Return the losses of the batch, after the step if the batch is good."""
        losses = BatchLosses()
        self._batch.compute_gradients(losses)
        if self._oom is not None:
            self._oom.agree()
        if self._guard is None or self._guard.admits(self.optimizers, losses):
            with _NOTHING if self._oom is None else self._oom.protected_weights(self.optimizers):
                self._take()
        return losses

    @error_context.stage("the optimizer's step")
    def _take(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            self._batch.strategy.step(optimizer, closure, scaler=self._batch.state.scaler)


class ClosureStep(Step):
    """The step of a single optimizer that evaluates the loss itself, once or several times."""

    def attempt(self) -> BatchLosses:
        """Return the losses of the batch, after the step if the batch is good."""
        losses = BatchLosses()

        def closure(*, ddp_sync: bool = True, loss_dict: dict[str, Tensor] | None = None) -> Tensor | None:
            seen = losses if loss_dict is None else BatchLosses()  # the optimizer chooses which evaluation is logged
            self._batch.compute_gradients(seen, sync=ddp_sync)
            if self._oom is not None:
                self._oom.agree()
            if loss_dict is not None:
                loss_dict |= seen.means()
            loss: Tensor | None = seen.total
            if ddp_sync:
                loss = mean_total(seen, self._batch.strategy)  # all ranks must agree, as optimizers branch on the loss
                if self._guard is not None and self._guard.stops_closure(self.optimizers, seen):
                    loss = None
            if self._oom is not None:
                self._oom.may_fail = True  # in what the optimizer does with the gradients
            return loss

        protected = _NOTHING if self._oom is None else self._oom.protected_weights(self.optimizers, on_host=True)
        with _NOTHING if self._guard is None else self._guard.closures(self.optimizers[0]), protected:
            self._take(closure)
        return losses


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


def takes_closure(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether the optimizer evaluates the loss itself.

    Raises:
        ValueError: If one of several does, because it would change the weights between the steps of the others.
    """
    for optimizer in optimizers:
        if needs_closure(optimizer):
            if len(optimizers) > 1:
                names = ", ".join(type(each).__name__ for each in optimizers)
                raise ValueError(
                    f"{type(optimizer).__name__} evaluates the loss itself, which works with one optimizer only; got "
                    f"{len(optimizers)}: {names}. Give it all parameters, or use optimizers that do not."
                )
            return True
    return False


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

"""Finds the batch whose step would ruin the run, before the optimizer takes it, and does what was asked for."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer.trainer._arrivals import LAG, Arrivals
from composer.trainer._finite import is_sharded, names_of_bad, note_infinite_norm, note_non_finite
from composer.trainer._guard import Guard, Unguarded
from composer.trainer._kept_buffers import KeptBuffers
from composer.trainer._loss_means import TOTAL
from composer.trainer._sharding import watch_reductions
from composer.trainer._snapshot import Snapshot
from composer.trainer._spikes import Spikes
from composer.trainer._step_control import has_fused_step, overflow_of, takes_none, tell_device
from composer.trainer._undo import StepUndo
from composer.trainer.divergence import Divergence, DivergenceError, OnDivergence
from composer_dist import get_world_size
from composer_dist.strategy import Strategy
from composer_events.state import State

_log = logging.getLogger(__name__)

_MOST_OVERFLOWS = 32  # a scale of 2**16, halved so often, is too small to be the cause of one more


class _Refused(BaseException):  # an optimizer may catch every Exception of its closure
    """Leaves an optimizer that has called its closure."""


class DivergenceGuard:
    """Looks at the loss and the gradients of each batch before its step, and at the weights before they are saved.

    A loss that is not finite makes its gradients so, and the strategy's mean over the ranks brings these to all of
    them: every rank finds the same without a word more. On a CPU the answer is read at once. On a GPU an optimizer
    with fused kernels is told on the device not to step: the host learns of it two batches later, for which the device
    need not be kept waiting, and until then no further step is made. Any other optimizer waits for the answer.

    Gradients that overflow in float16 are the `GradScaler`'s, which skips the step and lowers its scale; only a loss
    that is not finite, or no end of overflows, is a divergence there.

    Args:
        policy: What to do.
        state: Its model and its scaler; its timestamp names the batch.
        strategy: Takes means over the ranks.
        divergences: Takes a record of each.
    """

    def __init__(self, policy: OnDivergence, state: State, strategy: Strategy, divergences: list[Divergence]) -> None:
        self._policy = policy
        self._state = state
        self._strategy = strategy
        self._divergences = divergences
        self._scaler = state.scaler
        # DeepSpeed's engine keeps the gradients to itself, and those in float16 are the scaler's matter.
        self._sees_gradients = state.scaler is None and not state.deepspeed_enabled
        device = state.device.torch_device
        self._found, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._arrivals = Arrivals(device)
        self._is_on_host = device.type == "cpu"
        # Of sharded gradients it speaks to all ranks, where each sees only its own parts.
        self._reductions = watch_reductions(strategy) if self._sees_gradients else None
        # Where ranks and scaler must see in the gradients what the loss alone shows.
        self._marks = strategy.world_size > 1 or state.scaler is not None
        self._defers = (
            device.type == "cuda"
            and policy.spike_factor is None
            and (state.scaler is not None or has_fused_step(state.optimizers[0]))
        )
        self._buffers = KeptBuffers(state.model, num_batches=LAG + 1 if self._defers else 1)
        self._rolls_back = policy.rolls_back
        self._snapshot: Snapshot | None = None
        self._num_since_snapshot = 0
        self._spikes = None if policy.spike_factor is None else Spikes(policy.spike_factor)
        self._num_in_a_row = 0
        self._num_overflows = 0
        self._refused: Divergence | None = None

    def begin_batch(self) -> None:
        """Act on what has arrived from the device meanwhile, and remember what the batch may ruin."""
        if self._defers:
            self._act_on_arrivals()
            if self._policy.action == "skip":
                self._found.zero_()  # each batch by itself; otherwise none steps until the host knows
        self._buffers.keep()
        if self._rolls_back:
            self._keep_snapshot()

    def mark(self, loss: Tensor) -> Tensor:
        """Return the loss, or NaN times it if it is not finite, so that its gradients are not finite either."""
        if not self._marks:
            return loss
        if self._is_on_host:
            return loss if math.isfinite(loss.item()) else loss * math.nan
        is_good = torch.isfinite(loss.detach()) & (self._found == 0)
        return loss * torch.where(is_good, 1.0, math.nan)

    def see_gradients(self, optimizer: Optimizer) -> None:
        """Look at the gradients before algorithms do, whose clipping may hide that they are not finite."""
        if self._sees_gradients:
            note_infinite_norm(_gradients_of(optimizer), self._found)  # other ranks hear of it before the step

    def admits(self, optimizer: Optimizer, losses: Mapping[str, Tensor]) -> bool:
        """Say whether the optimizer may step, having done about a divergence what was asked for."""
        divergence = self._look(optimizer, losses[TOTAL])
        if divergence is None:
            return True
        self._act(divergence)
        return divergence.action == "log"

    def refuses(self, optimizer: Optimizer, losses: Mapping[str, Tensor]) -> bool:
        """Say whether the closure that has computed these must not be gone on with."""
        self._refused = self._look(optimizer, losses[TOTAL], may_defer=False)
        if self._refused is None or self._refused.action == "log":
            return False
        if not takes_none(optimizer):
            raise _Refused
        return True

    @contextmanager
    def closures(self, optimizer: Optimizer) -> Iterator[None]:
        """Undo what an optimizer that evaluates the loss itself has done so far, should the loss turn out bad.

        One that takes `None` for the value of a closure undoes it itself. Of any other the weights and the state are
        copied before each step.
        """
        self._refused = None
        undo = None if takes_none(optimizer) else StepUndo(optimizer)
        try:
            yield
        except _Refused:
            assert undo is not None
            undo()
        if self._refused is not None:
            self._act(self._refused)

    def check_weights(self) -> None:
        """Wait for what is still on its way, act on it, and refuse weights that a step itself has ruined."""
        self._act_on_arrivals(wait=True)
        found = torch.zeros_like(self._found)
        for optimizer in self._state.optimizers:
            note_non_finite(_tensors_of(optimizer), found, self._one)
        if get_world_size() > 1:  # also where all of them read one batch, each holds its own part
            found = self._strategy.mean({"found": found})["found"]
        if found.item():
            self._refuse_weights()

    def end_fit(self) -> None:
        """Do so a last time."""
        try:
            self.check_weights()
        finally:
            for optimizer in self._state.optimizers:
                tell_device(optimizer, None)

    def _look(self, optimizer: Optimizer, loss: Tensor, *, may_defer: bool = True) -> Divergence | None:
        """Return what is wrong with the batch, if anything is known to be."""
        scaler = self._scaler
        if self._spikes is not None:
            loss = self._strategy.mean({TOTAL: loss})[TOTAL]
        self._look_at(optimizer, loss)
        if self._defers and may_defer:
            tell_device(optimizer, self._found if scaler is None else None)
            self._send(optimizer)
            return None
        has_overflown = scaler is not None and self._counts_overflow(overflow_of(scaler, optimizer).item() > 0)
        if self._found.item() or has_overflown:
            return self._describe(loss.item(), is_spike=False)
        self._num_in_a_row = 0
        if self._spikes is not None and self._spikes.is_spike(value := loss.item()):
            return self._describe(value, is_spike=True)
        return None

    def _look_at(self, optimizer: Optimizer, loss: Tensor) -> None:
        """Set `found` if loss or gradients are not finite, alike on every rank."""
        if not self._sees_gradients:
            note_non_finite([loss], self._found, self._one)
            speaks_of_all = self._strategy.world_size == 1
        else:
            tensors = _gradients_of(optimizer)
            if not self._marks:
                tensors.append(loss)
            if self._knows_of_shards():
                tensors = [tensor for tensor in tensors if not is_sharded(tensor)]
            speaks_of_all = note_non_finite(tensors, self._found, self._one) if tensors else True
        if not speaks_of_all:
            self._agree()

    def _knows_of_shards(self) -> bool:
        """Say whether `found` speaks of all ranks' parts of sharded gradients by now, without a message.

        What algorithms made of them since they were reduced is known to nobody.
        """
        watch = self._reductions
        if watch is None or not watch.speaks_of_all or self._state.algorithms:
            return False
        self._found.logical_or_(watch.found.isnan())
        return True

    def _agree(self) -> None:
        """Let what one rank has found be found on all."""
        self._found.copy_(self._strategy.mean({"found": self._found})["found"])

    def _send(self, optimizer: Optimizer) -> None:
        scaler = self._scaler
        overflow = torch.zeros_like(self._found) if scaler is None else overflow_of(scaler, optimizer)
        self._arrivals.send(self._state.timestamp.num_batches, torch.stack([self._found, overflow]))

    def _act_on_arrivals(self, *, wait: bool = False) -> None:
        for batch, (found, overflow) in self._arrivals.take(wait=wait):
            if found or self._counts_overflow(overflow > 0):
                self._act(self._describe(math.nan, is_spike=False, batch=batch))
            else:
                self._num_in_a_row = 0

    def _counts_overflow(self, has_overflown: bool) -> bool:
        """Count the overflows in a row, and say whether they have no end."""
        self._num_overflows = self._num_overflows + 1 if has_overflown else 0
        return self._num_overflows >= _MOST_OVERFLOWS

    def _keep_snapshot(self) -> None:
        if self._snapshot is None or self._num_since_snapshot >= self._policy.rollback_batches:
            self._act_on_arrivals(wait=True)  # what is copied must be good
            self._snapshot = Snapshot(self._state.model, self._state.optimizers[0])
            self._num_since_snapshot = 0
        self._num_since_snapshot += 1

    def _describe(self, loss: float, *, is_spike: bool, batch: int | None = None) -> Divergence:
        stamp, policy = self._state.timestamp, self._policy
        action = policy.on_spike if is_spike else policy.action
        if action != "log" and self._num_in_a_row + 1 >= policy.max_in_a_row:
            action = "raise"
        return Divergence(stamp.num_batches if batch is None else batch, stamp.num_epochs, loss, is_spike, action)

    def _act(self, divergence: Divergence) -> None:
        """Do what was asked for; the weights are those before the batch."""
        self._divergences.append(divergence)
        if divergence.action == "log":
            _log.warning("%s The step is made all the same.", _sentence(divergence))
            return
        self._num_in_a_row += 1
        self._buffers.restore()
        message = self._explain(divergence)
        self._found.zero_()
        if divergence.action != "skip":
            self._arrivals.forget()
        if divergence.action == "raise":
            for optimizer in self._state.optimizers:
                tell_device(optimizer, None)
            raise DivergenceError(message, divergence)
        if divergence.action == "rollback":
            assert self._snapshot is not None
            self._snapshot.restore()
            went_back = f"Weights and optimizer went back by {self._num_since_snapshot - 1} batches."
            _log.warning("%s The optimizer made no step with it. %s", _sentence(divergence), went_back)
        else:
            _log.warning("%s The optimizer made no step with it.", _sentence(divergence))

    def _explain(self, divergence: Divergence) -> str:
        where = ""
        if not divergence.is_spike and not self._defers:  # the gradients at hand are those of the batch
            parameters = self._state.model.named_parameters()
            gradients = ((name, p.grad) for name, p in parameters if p.grad is not None)
            names = names_of_bad(gradients, may_be_marked=self._reductions is not None)
            where = f" Not finite are the gradients of {names}." if names else ""
        again = f", {self._num_in_a_row} batches in a row" if self._num_in_a_row > 1 else ""
        return (
            f"{_sentence(divergence)}{where} The optimizer made no step with it{again}; the weights are those before "
            "it, on every rank. Lower the learning rate, clip the gradients, or look at the batch; "
            "on_divergence='skip' leaves such batches out and None trains on whatever comes."
        )

    def _refuse_weights(self) -> None:
        """Raise, as there is nothing to go back to."""
        stamp = self._state.timestamp
        divergence = Divergence(max(stamp.num_batches - 1, 0), stamp.num_epochs, math.nan, False, "raise")
        self._divergences.append(divergence)
        names = names_of_bad((name, p.detach()) for name, p in self._state.model.named_parameters())
        raise DivergenceError(
            f"After {stamp.num_batches} batches {f'the weights {names}' if names else 'what the optimizer keeps'} "
            "must be finite and are not, though losses and gradients were: a step itself has made them so, such as by "
            "dividing by 0. They are not saved. Go on from the latest checkpoint with a lower learning rate, or with a "
            "larger eps of the optimizer; on_divergence=None trains on whatever comes.",
            divergence,
        )


def make_guard(policy: OnDivergence | None, state: State, strategy: Strategy, divergences: list[Divergence]) -> Guard:
    """Return what looks at each step as the policy says."""
    return Unguarded() if policy is None else DivergenceGuard(policy, state, strategy, divergences)


def _sentence(divergence: Divergence) -> str:
    what = f"jumped to {divergence.loss:g}" if divergence.is_spike else "or a gradient is not finite"
    if not divergence.is_spike and not math.isnan(divergence.loss):
        what += f" (the loss is {divergence.loss:g})"
    return f"Batch {divergence.batch} of epoch {divergence.epoch}: the loss {what}."


def _gradients_of(optimizer: Optimizer) -> list[Tensor]:
    return [grad for group in optimizer.param_groups for p in group["params"] if (grad := p.grad) is not None]


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the weights that an optimizer moves, and what it keeps for each of their elements."""
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    states = [value for p in weights for value in _values(optimizer.state.get(p, {})) if value.shape == p.shape]
    return [tensor.detach() for tensor in (*weights, *states) if tensor.is_floating_point() or tensor.is_complex()]


def _values(entries: Mapping[str, object]) -> list[Tensor]:
    return [value for value in entries.values() if isinstance(value, Tensor)]

"""Check gradients before each optimizer step, and act on a batch that would make the weights non-finite."""

import logging
import math
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer.trainer._rank_sync import BatchLosses, mean_total
from composer.trainer._restore import KeptBuffers, Snapshot, StepSnapshot, local_part
from composer.trainer._scaler import states_of
from composer.trainer._strategies import as_fsdp
from composer.trainer.divergence import Divergence, DivergenceError, OnDivergence
from composer_dist import get_world_size
from composer_dist.strategy import Strategy
from composer_dist.wrapping import canonical_name
from composer_events.state import State

if TYPE_CHECKING:
    from composer_dist.deepspeed import DeepSpeed
    from composer_fsdp.gradients import ReductionWatch


_log = logging.getLogger(__name__)

_DEFERS_ON = {"cuda", "simgpu"}  # whose results the host reads later; the latter is SimulatedAccelerator

_MOST_OVERFLOWS = 32  # after so many halvings of 2**16 the scale is too small to cause another overflow


class _Refused(BaseException):  # an optimizer may catch every Exception of its closure
    """Exit from an optimizer that has called its closure."""


class DivergenceGuard:
    """Guard that checks the gradients of each batch before its step, and the weights before they are saved.

    The gradients decide, since they enter the weights, unless the optimizer drops them. A loss may be NaN with
    gradients of 0, such as the mean over labels that are all ignored. Such a batch is counted and logged, and training
    continues.

    The strategy averages gradients over the ranks, so all ranks reach the same result without another collective. On
    a CPU the result is read at once. On a GPU the host reads it two batches later, and before weights are saved or
    evaluated. Until then fused optimizer kernels skip each step by a flag on the device, which keeps the weights.
    Other optimizers step, so when the result arrives their weights are not finite either. The host waits for the
    device only to detect a loss that jumps, and, if the optimizer is not fused, to skip its step, or to roll back with
    algorithms, which may average the weights.

    A `GradScaler` skips steps whose float16 gradients overflow and lowers its scale. With one, a divergence is an
    overflow of a batch whose loss is not finite, or 32 overflows in a row. DeepSpeed's engine keeps its gradients
    internal, so they are checked only when a loss is not finite.
    """

    def __init__(
        self,
        policy: OnDivergence,
        state: State,
        strategy: Strategy,
        divergences: list[Divergence],
        *,
        evaluates_loss: bool,
    ) -> None:
        self._policy = policy
        self._state = state
        self._strategy = strategy
        self._divergences = divergences
        self._scaler = state.scaler
        # DeepSpeed's engine keeps its gradients internal, and the scaler checks those in float16.
        self._sees_gradients = state.scaler is None and not state.deepspeed_enabled
        device = state.device.torch_device
        self._found, self._none, self._one = (torch.full((), number, device=device) for number in (0.0, 0.0, 1.0))
        self._arrivals = DelayedReadback(device)
        # With sharded gradients, a reduction carries the result to all ranks; each rank sees only its own shard.
        fsdp = as_fsdp(strategy)
        self._reductions = fsdp.watch_reductions() if fsdp is not None and self._sees_gradients else None
        self._spikes = None if policy.spike_factor is None else Spikes(policy.spike_factor)
        self._gates, self._defers = self._choose_timing(evaluates_loss=evaluates_loss)
        # A deferred result concerns a batch that is LAG batches old, so its buffers must still be there.
        buffers = KeptBuffers(state.model, num_batches=LAG + 1 if self._defers else 1)
        self._buffers = buffers if buffers.owners else None
        self._rolls_back = policy.rolls_back
        self._snapshot: Snapshot | None = None
        self._num_since_snapshot = 0
        self._num_in_a_row = 0
        self._num_overflows = 0
        self._num_bad_losses = 0
        self._latest_bad_loss = -1
        self._refused: Divergence | None = None

    def _choose_timing(self, *, evaluates_loss: bool) -> tuple[bool, bool]:
        """Return whether a flag on the device keeps optimizers from stepping, and whether results are read later."""
        optimizers: list[Optimizer] = list(self._state.optimizers)
        # Fused optimizers have this attribute for GradScaler: their steps read a skip flag on the device.
        unfused = [each for each in optimizers if not getattr(each, "_step_supports_amp_scaling", False)]
        gates = (
            not evaluates_loss
            and (self._scaler is not None or not unfused)
            # A hook may drop bad gradients, which only a step shows; PyTorch has no public way to ask for hooks.
            and not any(getattr(each, "_optimizer_step_pre_hooks", None) for each in optimizers)
        )
        # A spike check reads the loss at every batch anyway, and DeepSpeed's gradients are gone later.
        if self._found.device.type not in _DEFERS_ON or self._spikes is not None or self._state.deepspeed_enabled:
            return gates, False
        # A rollback does not restore what algorithms such as EMA keep of bad weights.
        must_wait = self._policy.action == "skip" or (self._policy.action == "rollback" and self._state.algorithms)
        if gates or (not must_wait and self._scaler is None):
            _advise_fused(unfused, has_scaler=self._scaler is not None)
            return gates, True
        if self._scaler is None:
            _log.warning(
                "on_divergence=%r waits for the device before each step, because %s is not fused. Pass fused=True "
                "to the optimizer, if it has that option, to avoid it.",
                self._policy.action,
                type([*unfused, *optimizers][0]).__name__,
            )
        return gates, False

    @property
    def knows_late(self) -> bool:
        """Return whether weights may be bad until `settle` is called."""
        return self._defers and not self._gates

    def begin_batch(self) -> None:
        """Act on the results that have arrived from the device, and copy the buffers and, if due, the weights."""
        if self._defers:
            self._act_on_arrivals()
            if self._policy.action == "skip":
                self._found.zero_()  # only the bad batch is skipped; other actions block all steps until the host knows
        if self._buffers is not None:
            self._buffers.keep()
        if self._rolls_back:
            self._keep_snapshot()

    def mark(self, loss: Tensor) -> Tensor:
        """Return a loss to scale, times NaN while a divergence has not reached the host.

        The scaler then skips the step on every rank, as the gradients are averaged.
        """
        return loss if not (self._defers and self._gates) else loss * torch.where(self._found == 0, 1.0, math.nan)

    def admits(self, optimizers: Sequence[Optimizer], losses: BatchLosses) -> bool:
        """Return whether the optimizers may step; act on a divergence first.

        Optimizers that leave bad gradients out by themselves have made their step then.
        """
        divergence = self._look(optimizers, losses)
        if divergence is None:
            return True
        if divergence.action == "raise" and not divergence.is_spike and self._steps_unharmed(optimizers):
            return False
        self._act(divergence)
        return divergence.action == "log"

    def _steps_unharmed(self, optimizers: Sequence[Optimizer]) -> bool:
        """Try the step with gradients that are not finite; undo it, and return false, if it does harm.

        A hook of the optimizer, or its `step`, may drop such gradients. All ranks have found them, and call this.
        """
        if not self._sees_gradients:
            return False
        undo = StepSnapshot(optimizers)
        is_harmed = True
        try:
            for optimizer in optimizers:
                self._strategy.step(optimizer, None, scaler=None)
            is_harmed = self._finds_bad_weights(optimizers)
        finally:
            if is_harmed:
                undo()
        if not is_harmed:
            self._found.zero_()
            self._num_in_a_row = 0
        return not is_harmed

    def _finds_bad_weights(self, optimizers: Iterable[Optimizer]) -> bool:
        found = torch.zeros_like(self._found)
        for optimizer in optimizers:
            note_non_finite(_tensors_of(optimizer), found, self._one)
        if get_world_size() > 1:  # even ranks that share a batch hold different shards
            found = self._strategy.mean({"found": found})["found"]
        return bool(found.item())

    def stops_closure(self, optimizers: Sequence[Optimizer], losses: BatchLosses) -> bool:
        """Return whether a closure with these losses must stop; the action follows at the end of `closures`."""
        self._refused = self._look(optimizers, losses)
        if self._refused is None or self._refused.action == "log":
            return False
        if not takes_none(optimizers[0]):
            # Such an optimizer has no way to end its step by a return value.
            raise _Refused
        return True

    @contextmanager
    def closures(self, optimizer: Optimizer) -> Generator[None]:
        """Undo the step of an optimizer that evaluates the loss itself, if the loss turns out bad.

        An optimizer that accepts `None` from its closure undoes it itself. For any other, weights and state are copied
        before each step.
        """
        self._refused = None
        undo = None if self._defers or takes_none(optimizer) else StepSnapshot([optimizer])
        try:
            yield
        except _Refused:
            assert undo is not None
            undo()
        if self._refused is not None:
            self._act(self._refused)

    @property
    def must_settle(self) -> bool:
        """Return whether weights or buffers, such as running means, may be bad until `settle` is called."""
        return self.knows_late or (self._defers and self._buffers is not None)

    def settle(self) -> None:
        """Act on all pending results if weights or buffers may be bad until then. Synchronizes with the device."""
        if self.must_settle:
            self._act_on_arrivals(wait=True)

    def check_weights(self) -> None:
        """Act on all pending results, then raise if a step itself has made weights non-finite."""
        self._act_on_arrivals(wait=True)
        if not self._finds_bad_weights(self._state.optimizers):
            return
        stamp = self._state.timestamp
        # The timestamp counts the batch already.
        divergence = Divergence(max(stamp.num_batches - 1, 0), stamp.num_epochs, math.nan, False, "raise")
        self._divergences.append(divergence)
        names = names_of_bad((name, p.detach()) for name, p in self._state.model.named_parameters())
        raise DivergenceError(
            f"After {stamp.num_batches} batches {f'the weights {names}' if names else 'what the optimizer keeps'} "
            "must be finite and are not, though the gradients were: a step itself has made them so, such as by "
            "dividing by 0. They are not saved. Continue from the latest checkpoint with a lower learning rate, or "
            "with a larger eps of the optimizer; on_divergence=None disables the check.",
            divergence,
        )

    def end_fit(self) -> None:
        """Check the weights a last time, and log how many losses were not finite."""
        try:
            self.check_weights()
        finally:
            if self._num_bad_losses > 1:
                _log.warning("%d batches had a non-finite loss with finite gradients.", self._num_bad_losses)
            self._num_bad_losses = 0
            # A step outside the Trainer must not depend on the flag.
            for optimizer in self._state.optimizers:
                set_found_inf(optimizer, None)

    def _look(self, optimizers: Sequence[Optimizer], losses: BatchLosses) -> Divergence | None:
        """Return the divergence of the batch, if one is known."""
        overflow = self._find(optimizers, losses)
        if not self._defers:
            return self._judge(losses, overflow)
        if self._gates and self._scaler is None:
            for optimizer in optimizers:
                # Fused kernels for weights that FSDP offloads would copy it to the CPU, and read it at once.
                set_found_inf(optimizer, self._found.to(optimizer.param_groups[0]["params"][0].device))
        facts = [self._found, self._none if overflow is None else overflow, _missing(losses)]
        self._arrivals.send(self._state.timestamp.num_batches, torch.stack([fact.float() for fact in facts]))
        return None

    def _find(self, optimizers: Sequence[Optimizer], losses: BatchLosses) -> Tensor | None:
        """Set `found` on the device if the step would be harmful, and return the overflow of a scaler."""
        if self._scaler is None:
            if self._sees_gradients:
                self._look_at_gradients(optimizers)
            else:
                self._look_into_engine(losses)
            return None
        # Of any optimizer, since `unscale` combines what was found in the gradients of all.
        per_device: dict[torch.device, Tensor] = states_of(self._scaler)[id(optimizers[0])]["found_inf_per_device"]
        overflow = torch.stack([found.to(self._found.device) for found in per_device.values()]).sum()
        # An overflow alone is routine: the scaler skips the step and lowers its scale.
        self._found.logical_or_((_missing(losses) != 0) & (overflow > 0))
        return overflow

    def _judge(self, losses: BatchLosses, overflow: Tensor | None) -> Divergence | None:
        """Read what was found, with one wait for the device."""
        facts = [self._found, losses.total, self._none if overflow is None else overflow]
        if self._spikes is not None:
            facts.append(mean_total(losses, self._strategy))
        # On a CPU, to stack them would take longer than to read one by one.
        on_host = facts if self._found.is_cpu else torch.stack([fact.detach().float() for fact in facts]).cpu().unbind()
        found, loss, num_overflows, *means = (fact.item() for fact in on_host)
        # The loss may be bad on one rank only, while the averaged gradients overflow on all.
        if num_overflows > 0 and self._strategy.world_size > 1:
            self._agree()
            found = self._found.item()
        has_bad_loss = not math.isfinite(loss)
        # `_counts_overflow` comes first, because it must count in every batch.
        if (overflow is not None and self._counts_overflow(num_overflows > 0)) or found:
            return self._describe(math.nan if has_bad_loss else loss, is_spike=False)
        if has_bad_loss:
            self._note_bad_loss(self._state.timestamp.num_batches)
        if self._spikes is not None and self._spikes.is_spike(means[0]):
            return self._describe(means[0], is_spike=True)
        self._num_in_a_row = 0
        return None

    def _look_at_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Set `found`, identically on every rank, if gradients are not finite."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        tensors = [grad for group in groups for p in group["params"] if (grad := p.grad) is not None]
        if self._reductions is not None and self._knows_of_shards(self._reductions):
            tensors = [tensor for tensor in tensors if not is_sharded(tensor)]
        # Averaged gradients are the same everywhere; only shards need another collective.
        if tensors and not note_non_finite(tensors, self._found, self._one):
            self._agree()

    def _look_into_engine(self, losses: BatchLosses) -> None:
        """Set `found` if a loss of any rank and DeepSpeed's gradients are not finite."""
        self._found.logical_or_(_missing(losses) != 0)
        if self._strategy.world_size > 1:
            self._agree()
        # Only after a bad loss, because this gathers every gradient.
        if self._found.item() and cast("DeepSpeed", self._strategy).has_finite_gradients():
            self._found.zero_()

    def _knows_of_shards(self, watch: "ReductionWatch") -> bool:
        """Return whether `found` covers the shards of all ranks without another collective.

        It does not if algorithms may have changed the gradients after their reduction.
        """
        if not watch.speaks_of_all or self._state.algorithms:
            return False
        self._found.logical_or_(watch.found.isnan())
        return True

    def _agree(self) -> None:
        """Combine `found` over all ranks. Every rank must call this."""
        self._found.copy_(self._strategy.mean({"found": self._found})["found"])

    def _act_on_arrivals(self, *, wait: bool = False) -> None:
        for batch, (found, overflow, missing) in self._arrivals.take(wait=wait):
            if overflow > 0 and self._strategy.world_size > 1:  # an overflow is on all ranks, a bad loss perhaps on one
                found = self._strategy.sum([found])[0]
            if self._counts_overflow(overflow > 0) or found:
                if (
                    not self._gates
                    and self._policy.action == "raise"
                    and not self._finds_bad_weights(self._state.optimizers)
                ):  # the optimizer has left the bad gradients out by itself
                    self._found.zero_()
                    self._arrivals.forget()  # their steps are among those that the weights have passed
                    return
                self._act(self._describe(math.nan, is_spike=False, batch=batch))
            else:
                self._num_in_a_row = 0
                if missing != 0:  # also if it is NaN
                    self._note_bad_loss(batch)

    def _note_bad_loss(self, batch: int) -> None:
        if batch == self._latest_bad_loss:  # a closure may evaluate the same batch again
            return
        self._latest_bad_loss = batch
        self._num_bad_losses += 1
        if self._num_bad_losses == 1:
            _log.warning(
                "The loss of batch %d is not finite, but its gradients are: training continues, and this loss enters "
                "no average. The likely cause is a microbatch whose labels are all ignored (-100), so that its loss is "
                "0/0. Larger microbatches, or accumulate_train_batch_on_tokens=True, give it no weight.",
                batch,
            )

    def _counts_overflow(self, has_overflown: bool) -> bool:
        """Count the overflows in a row, and return whether there are too many."""
        self._num_overflows = self._num_overflows + 1 if has_overflown else 0
        return self._num_overflows >= _MOST_OVERFLOWS

    def _keep_snapshot(self) -> None:
        if self._snapshot is None or self._num_since_snapshot >= self._policy.rollback_batches:
            self._act_on_arrivals(wait=True)  # a snapshot of non-finite weights would be useless
            self._snapshot = Snapshot(self._state.model, self._state.optimizers)
            self._num_since_snapshot = 0
        self._num_since_snapshot += 1

    def _describe(self, loss: float, *, is_spike: bool, batch: int | None = None) -> Divergence:
        stamp, policy = self._state.timestamp, self._policy
        action = policy.on_spike if is_spike else policy.action
        if action != "log" and self._num_in_a_row + 1 >= policy.max_in_a_row:
            action = "raise"
        return Divergence(stamp.num_batches if batch is None else batch, stamp.num_epochs, loss, is_spike, action)

    def _act(self, divergence: Divergence) -> None:
        """Perform the action of a divergence; the weights are those before the batch."""
        self._divergences.append(divergence)
        if divergence.action == "log":
            _log.warning("%s The optimizer takes the step anyway.", _sentence(divergence))
            self._num_in_a_row = 0
            return
        self._num_in_a_row += 1
        if self._buffers is not None:
            self._buffers.restore()
        # Without the flag on the device, the optimizer has stepped until the host knew.
        has_stepped, went_back = self.knows_late, ""
        if self._snapshot is not None and (has_stepped or divergence.action == "rollback"):
            self._snapshot.restore()
            has_stepped = False
            went_back = f" Weights and optimizer state were rolled back by {self._num_since_snapshot - 1} batches."
        message = self._explain(divergence, went_back, has_stepped=has_stepped)
        self._found.zero_()
        if divergence.action != "skip":
            self._arrivals.forget()  # pending results belong to steps that were blocked or are undone
        if divergence.action == "raise":
            for optimizer in self._state.optimizers:
                set_found_inf(optimizer, None)
            raise DivergenceError(message, divergence)
        if divergence.action == "rollback":
            _log.warning("%s The optimizer did not step.%s", _sentence(divergence), went_back)
        else:
            _log.warning("%s The optimizer did not step.", _sentence(divergence))

    def _explain(self, divergence: Divergence, went_back: str, *, has_stepped: bool) -> str:
        where = went_back
        parameters = list(self._state.model.named_parameters())
        if has_stepped:
            names = names_of_bad((name, p.detach()) for name, p in parameters)
            where = (
                f" The optimizer has stepped {LAG} times or less until this was known, and {names or 'its state'} must "
                "be finite and are not; they are neither saved nor evaluated. Continue from the latest checkpoint. "
                "With fused=True, an optimizer that has this option keeps the weights from before such a batch."
            )
        # When a deferred result arrives, `grad` holds the gradients of a later batch.
        elif not divergence.is_spike and not self._defers:
            gradients = ((name, p.grad) for name, p in parameters if p.grad is not None)
            names = names_of_bad(gradients, may_be_marked=self._reductions is not None)
            where += f" The gradients of {names} are not finite." if names else ""
        if not has_stepped and not went_back:
            again = f", {self._num_in_a_row} batches in a row" if self._num_in_a_row > 1 else ""
            where += f" The optimizer made no step with it{again}; the weights are those before it, on every rank."
        return (
            f"{_sentence(divergence)}{where} Lower the learning rate, clip the gradients, or look at the batch; where "
            "all labels of a microbatch may be ignored, set accumulate_train_batch_on_tokens=True, which gives it no "
            "weight. on_divergence='skip' leaves such batches out, and None disables the check."
        )


def _missing(losses: BatchLosses) -> Tensor:
    """Return 0 if the losses of all microbatches are finite, else NaN, without a wait for the device."""
    return losses.total * 0


def _sentence(divergence: Divergence) -> str:
    what = f"the loss jumped to {divergence.loss:g}" if divergence.is_spike else "a gradient is not finite"
    if not divergence.is_spike and not math.isnan(divergence.loss):
        what += f" (the loss is {divergence.loss:g})"
    return f"Batch {divergence.batch} of epoch {divergence.epoch}: {what}."


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the weights of an optimizer, and its state tensors of the same shape."""
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    # State of another shape is left out: the step counter of Adam may be on the CPU, unlike the weights.
    entries = ((p, value) for p in weights for value in optimizer.state.get(p, {}).values())
    states = [value for p, value in entries if isinstance(value, Tensor) and value.shape == p.shape]
    return [tensor.detach() for tensor in (*weights, *states) if tensor.is_floating_point() or tensor.is_complex()]


LAG = 2  # batches; by then the host reads a finished result without a visible stall


class DelayedReadback:
    """Asynchronous copies of a few numbers per batch to the host, in order.

    All ranks read them after the same number of batches. A rank that acted as soon as they arrive would leave the
    others waiting in their next collective.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[tuple[int, Tensor, torch.Event | None]] = deque()

    def send(self, batch: int, numbers: Tensor) -> None:
        """Start the copy of a batch's numbers, which may change afterwards."""
        if self._device.type == "cpu":
            self._waiting.append((batch, numbers, None))
            return
        # Pinned memory makes the copy asynchronous; the event marks its end.
        on_host = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
        event = torch.Event(self._device)
        event.record()
        self._waiting.append((batch, on_host, event))

    def take(self, *, wait: bool = False) -> Iterator[tuple[int, list[float]]]:
        """Yield the numbers that are due, each with its batch."""
        while len(self._waiting) > (0 if wait else LAG):
            batch, on_host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield batch, cast("list[float]", on_host.tolist())  # pyright: ignore[reportUnknownMemberType]

    def forget(self) -> None:
        self._waiting.clear()


_PLAIN = {Tensor}  # a list with only this type skips the check of each tensor


def note_non_finite(tensors: list[Tensor], found: Tensor, one: Tensor) -> bool:
    """Set `found` to 1 if any of the tensors holds an Inf or a NaN, and leave it unchanged otherwise.

    This does not synchronize with the device.
    """
    is_plain = {*map(type, tensors)} == _PLAIN
    local = tensors if is_plain else [local_part(tensor) for tensor in tensors]
    # On a GPU the kernel below takes neither bfloat16 nor offloaded tensors, and an attempt is slow.
    if local and not found.is_cpu and (local[0].dtype is torch.bfloat16 or local[0].is_cpu):
        _note_by_norms(tensors, found)
    else:
        try:
            # GradScaler's kernel, dividing by 1, checks many tensors at once. A sum of norms, the public alternative,
            # takes five times as long. With DTensors it would reduce over the mesh of the first one, which may not be
            # the mesh of the others, so it gets the local shards.
            torch._amp_foreach_non_finite_check_and_unscale_(local, found, one)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        except (NotImplementedError, RuntimeError):  # sparse, complex, or several kinds
            _note_by_norms(tensors, found)
    return is_plain or not any(is_sharded(tensor) for tensor in tensors)


def _note_by_norms(tensors: list[Tensor], found: Tensor) -> None:
    """Set `found` by norms, with a few kernels per device and dtype."""
    groups: dict[object, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if (values := _plain_values(tensor)).numel():
            groups[values.device, values.dtype].append(values)
    for group in groups.values():
        norms = torch.stack(torch._foreach_norm(group, math.inf))  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        found.logical_or_((~torch.isfinite(norms).all()).to(found.device, non_blocking=True))


def names_of_bad(tensors: Iterable[tuple[str, Tensor]], *, may_be_marked: bool = False) -> str:
    """Return the names of the first tensors that are not finite. This synchronizes with the device."""
    named = list(tensors)
    names = [name for name, tensor in named if not _is_finite(tensor, 1)] if may_be_marked else []
    names = [canonical_name(name) for name in names or (name for name, tensor in named if not _is_finite(tensor))]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _is_finite(tensor: Tensor, num_marks: int = 0) -> bool:
    """Return whether a tensor is finite; `num_marks` leading numbers of each rank's shard are ignored."""
    found = torch.zeros((), device=tensor.device)
    part = local_part(tensor).flatten()[num_marks:] if is_sharded(tensor) else tensor
    note_non_finite([part], found, torch.ones_like(found))
    if is_sharded(tensor):
        from torch.distributed.tensor import DTensor, Partial  # a slow import, already paid for where DTensors exist

        mesh = cast(Any, tensor).device_mesh
        found = DTensor.from_local(found, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    return not found.item()


def _plain_values(tensor: Any) -> Tensor:
    """Return this rank's values of a tensor, as a dense tensor."""
    local = local_part(tensor)
    if local.layout is torch.sparse_coo:
        return local.coalesce().values()
    return local if local.layout is torch.strided else local.values()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without its import, which takes a third as long as that of torch."""
    return hasattr(tensor, "to_local")


_NUM_USUAL = 32  # latest normal losses, whose median is the reference
_FEWEST = 3  # a median of fewer losses is not reliable


class Spikes:
    """Detection of a loss that jumps.

    Args:
        factor: A jump is a loss above this multiple of the median of the latest normal losses.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._usual: deque[float] = deque(maxlen=_NUM_USUAL)

    def is_spike(self, loss: float) -> bool:
        """Return whether a loss jumps; a finite loss that does not is added to the normal ones."""
        # A loss that is not finite is judged by its gradients.
        if not math.isfinite(loss):
            return False
        if len(self._usual) >= _FEWEST and abs(loss) > self._factor * median(self._usual):
            return True
        self._usual.append(abs(loss))
        return False


def takes_none(optimizer: Optimizer) -> bool:
    """Return whether an optimizer undoes its step when a closure returns `None`, as SAM does."""
    return getattr(optimizer, "_step_supports_amp_closure", False)


_advised: WeakSet[Optimizer] = WeakSet()


def _advise_fused(unfused: Iterable[Optimizer], *, has_scaler: bool) -> None:
    """Log once that an optimizer of torch has a fused kernel, if that was neither chosen nor refused."""
    for optimizer in unfused:
        if optimizer in _advised or not _has_open_kernel(optimizer):
            continue
        _advised.add(optimizer)
        _log.log(
            logging.WARNING if has_scaler else logging.INFO,
            "%s steps without its fused kernel. With fused=True steps are faster, and %s.",
            type(optimizer).__name__,
            "amp_fp16 does not wait for the device in each of them"
            if has_scaler
            else "a batch whose gradients are not finite leaves the weights as they were",
        )


def _has_open_kernel(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    if not type(optimizer).__module__.startswith("torch."):
        return False
    if not all(group.get("fused", "") is None and group.get("foreach") is None for group in groups):
        return False
    # DTensor has no rule for the other fused kernels.
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    return is_adam or not any(is_sharded(p) for group in groups for p in group["params"])


def set_found_inf(optimizer: Any, found: Tensor | None) -> None:
    """Make a fused optimizer step only if `found` is 0, by the attributes that GradScaler uses."""
    if found is not None:
        optimizer.grad_scale, optimizer.found_inf = None, found
    elif hasattr(optimizer, "found_inf"):
        del optimizer.grad_scale, optimizer.found_inf

"""Stochastic weight averaging: end training with the mean of earlier weights."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composer_algorithms._arguments import accept_legacy_arguments, check_counts, check_interval
from composer_algorithms._averaging import EMAParameters, compute_ema, counted_time
from composer_algorithms._method import Method, is_reached, parse_time
from composer_algorithms.metadata import METHODS
from composer_dist.wrapping import canonical_name
from composer_events import Event, Logger, State
from composer_time import Time, TimeUnit

__all__ = ["SWA", "METADATA"]

METADATA = METHODS["swa"]

# Composer's logger name, which users' logging configurations refer to.
_log = logging.getLogger("composer.algorithms.swa")

_STRATEGIES = {"linear": "linear", "lin": "linear", "cos": "cos", "cosine": "cos"}
_ENDS = frozenset({Event.BATCH_END, Event.EPOCH_END})


class SWA(Method):
    """Average the weights over the last part of training, and copy the mean into the model at its end.

    From `swa_start` on, each `update_interval` adds the weights to a mean, at the ends of batches or epochs, depending
    on its unit. At the first such event, or end of an epoch, from `swa_end` on, the mean is copied into the model once,
    and training continues with it. Buffers are not averaged: the statistics of batch norms recover in the remaining
    training.

    With `schedule_swa_lr`, while the mean is taken, the learning rate of each parameter group changes from its value at
    the start to `swa_lr` within `anneal_steps` intervals and stays there, which overrides other schedulers.

    Args:
        swa_start: Start of averaging: a fraction of training (`'0.7dur'`) or an epoch (`'7ep'`).
        swa_end: Time to copy the mean into the model, in the same unit.
        update_interval: Time between two updates of the mean, in batches or epochs.
        schedule_swa_lr: Whether to change the learning rate as well.
        anneal_strategy: Shape of the learning rate's way to `swa_lr`: `'linear'` or `'cos'`.
        anneal_steps: Number of intervals that this takes.
        swa_lr: Final learning rate. `None` keeps the initial one of each group.

    Raises:
        ValueError: If a time has an invalid unit, `swa_start` is not before `swa_end`, fractions of training are
            outside [0, 1], `anneal_steps` is less than 1, or `anneal_strategy` is unknown.

    Example:
        >>> SWA(swa_start="0.5dur", swa_end="0.9dur", update_interval="50ba").swa_started
        False

    Reference:
        Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018,
        arXiv:1803.05407, algorithm 1.
    """

    surgery_rank = 7
    acts_on = frozenset({Event.INIT, Event.BATCH_START, *_ENDS})

    @accept_legacy_arguments("SWA", renamed={"anneal_epochs": "anneal_steps"})
    def __init__(
        self,
        swa_start: str | Time[Any] = "0.7dur",
        swa_end: str | Time[Any] = "0.97dur",
        update_interval: str | Time[Any] = "1ep",
        schedule_swa_lr: bool = False,
        anneal_strategy: str = "linear",
        anneal_steps: int = 10,
        swa_lr: float | None = None,
    ) -> None:
        self.swa_start, self.swa_end = _window(swa_start, swa_end)
        self.update_interval = counted_time(update_interval, "update_interval", no_unit=TypeError)
        if str(anneal_strategy).lower() not in _STRATEGIES:
            raise ValueError(f"anneal_strategy={anneal_strategy!r} is unknown: choose 'linear' or 'cos'.")
        check_counts(anneal_steps=anneal_steps)
        if swa_lr is not None:
            check_interval("[0, inf)", swa_lr=swa_lr)
            if not schedule_swa_lr:
                _log.warning("swa_lr=%r has no effect without schedule_swa_lr=True.", swa_lr)
        self.schedule_swa_lr = schedule_swa_lr
        self.anneal_strategy = _STRATEGIES[anneal_strategy.lower()]
        self.anneal_steps = anneal_steps
        self.swa_lr = swa_lr
        self._update_event = Event.BATCH_END if self.update_interval.unit == TimeUnit.BATCH else Event.EPOCH_END
        self._is_loaded = False
        self._reset()

    def match(self, event: Event, state: State) -> bool:
        """Return whether the event is INIT, or updates or ends the mean or the learning rate."""
        if event == Event.INIT:
            return True
        if event == Event.BATCH_START:
            # Schedulers of the run may have stepped since BATCH_END, such as at the end of an epoch.
            return self.schedule_swa_lr and self.swa_started and not self.swa_completed
        if self.swa_completed or event not in _ENDS:
            return False
        if event == self._update_event:
            return self.swa_started or is_reached(self.swa_start, state, "swa_start")
        return self.swa_started and (self.schedule_swa_lr or self._ends_at(event, state))

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Add the weights to the mean, or copy the mean into the model."""
        if event == Event.INIT:
            if not self._is_loaded:
                self._reset()
            self._is_loaded = False
            return
        if event == self._update_event:
            if not self.swa_started:
                self.swa_started = True
                if self.schedule_swa_lr:
                    self._base_lrs = [float(group["lr"]) for group in _groups(state)]
            if self.step_counter % self.update_interval.value == 0:
                self._add(state.model)
            self.step_counter += 1
        if self._ends_at(event, state):
            self._finish(state)
        elif self.schedule_swa_lr:
            self._set_lr(_groups(state))

    def state_dict(self) -> dict[str, Any]:
        """Return the mean, the number of its updates, and the progress of the learning rate."""
        mean = {} if self._mean is None else self._mean.named_parameters_dict
        scheduler = {"base_lrs": list(self._base_lrs), "last_epoch": self._num_averaged}
        return {
            **super().state_dict(),
            # Named as in torch's AveragedModel, which Composer saves. A loaded mean may be saved before its first use.
            "swa_model": {
                "n_averaged": torch.tensor(self._num_averaged),
                **{f"module.{name}": tensor for name, tensor in (self._loaded or mean).items()},
            },
            "swa_completed": self.swa_completed,
            "swa_started": self.swa_started,
            "swa_scheduler": scheduler if self.schedule_swa_lr else None,
            "step_counter": self.step_counter,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with the mean of a checkpoint, including Composer's own checkpoints.

        Args:
            state: Result of `state_dict`. Neither changed nor kept.
        """
        self._reset()
        self._is_loaded = True
        self.swa_completed = bool(state["swa_completed"])
        self.swa_started = bool(state["swa_started"])
        self.step_counter = int(state["step_counter"])
        if not self.swa_started or self.swa_completed:
            return
        saved: Mapping[str, Tensor] = state["swa_model"]
        self._num_averaged = int(saved["n_averaged"])
        self._loaded = {
            canonical_name(name.removeprefix("module.")): tensor.detach().clone()
            for name, tensor in saved.items()
            if name != "n_averaged"
        }
        self._base_lrs = [float(lr) for lr in (state.get("swa_scheduler") or {}).get("base_lrs", ())]

    def _reset(self) -> None:
        self.swa_started = False
        self.swa_completed = False
        self.step_counter = 0
        self._mean: EMAParameters | None = None
        self._num_averaged = 0
        self._base_lrs: list[float] = []
        self._loaded: dict[str, Tensor] = {}  # from a checkpoint, until the model's names are known

    def _ends_at(self, event: Event, state: State) -> bool:
        # A count of epochs advances between the last BATCH_END of an epoch and its EPOCH_END, and at the end of
        # training no batch follows.
        return event in (self._update_event, Event.EPOCH_END) and is_reached(self.swa_end, state, "swa_end")

    def _add(self, model: nn.Module) -> None:
        if self._num_averaged == 0:
            self._mean, self._loaded = _mean_of(model, {}), {}
        else:
            # The mean of n + 1 sets is the mean of n, moved by 1 / (n + 1) of the distance to the new one.
            compute_ema(model, self._current_mean(model), self._num_averaged / (self._num_averaged + 1))
        self._num_averaged += 1

    def _current_mean(self, model: nn.Module) -> EMAParameters:
        if self._loaded:
            self._mean, self._loaded = _mean_of(model, self._loaded), {}
        assert self._mean is not None  # created by the first event of the window
        return self._mean

    def _finish(self, state: State) -> None:
        self._current_mean(state.model).transfer_ema_params(state.model)
        self._mean = None  # frees its memory
        self.swa_completed = True
        elapsed = state.get_elapsed_duration()
        if elapsed is not None and elapsed >= 1:
            _log.warning(
                "SWA put the mean of the weights into the model at the very end of training, so batch norms have "
                "statistics of other weights: set swa_end so that at least one epoch is left."
            )

    def _set_lr(self, groups: Sequence[dict[str, Any]]) -> None:
        # In closed form, unlike torch's SWALR, which starts from the learning rate that it set last: the run's own
        # schedulers have set another one since.
        progress = min(self._num_averaged / self.anneal_steps, 1.0)
        if self.anneal_strategy == "cos":
            progress = (1 - math.cos(math.pi * progress)) / 2
        for group, base_lr in zip(groups, self._base_lrs, strict=True):
            target = base_lr if self.swa_lr is None else self.swa_lr
            lr = target * progress + base_lr * (1 - progress)
            if isinstance(group["lr"], Tensor):  # for compiled optimizers
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def _mean_of(model: nn.Module, saved: Mapping[str, Tensor]) -> EMAParameters:
    """Return the model's parameters, or the saved ones, as a mean."""
    mean = EMAParameters(model)
    # The mean of running statistics would not be the statistics of the mean weights.
    mean.named_buffers_dict = {}
    if not saved:
        return mean
    # All names may start with the "module." of DDP, which may also be part of a model's own names.
    found = {name: saved.get(name, saved.get(f"module.{name}")) for name in mean.named_parameters_dict}
    missing = [name for name, tensor in found.items() if tensor is None]
    told = f"SWA's state in the checkpoint does not have {len(missing)} parameters of the model, such as {missing[:3]}"
    if missing and len(missing) == len(found):
        raise ValueError(f"{told}: load it into the model that it was saved from.")
    if missing:
        _log.warning("%s. Their mean starts from the weights of the model.", told)
    mean.named_parameters_dict.update({name: tensor for name, tensor in found.items() if tensor is not None})
    mean.move_params_to_device(model)
    return mean


def _groups(state: State) -> list[dict[str, Any]]:
    if not state.optimizers:
        raise RuntimeError(
            "schedule_swa_lr=True sets the learning rates of the optimizers, and there are 0: give one, or "
            "schedule_swa_lr=False."
        )
    return [group for optimizer in state.optimizers for group in optimizer.param_groups]


def _window(swa_start: str | Time[Any], swa_end: str | Time[Any]) -> tuple[Time[Any], Time[Any]]:
    start, end = parse_time("swa_start", swa_start), parse_time("swa_end", swa_end)
    for name, time in (("swa_start", start), ("swa_end", end)):
        is_part = time.unit == TimeUnit.DURATION and 0 <= time.value <= 1
        if not (is_part or time.unit == TimeUnit.EPOCH):
            raise ValueError(
                f"{name}={str(time)!r} is not valid: pass a fraction of training from '0dur' to '1dur', or an epoch "
                f"such as '7ep'."
            )
    if start.unit != end.unit:
        raise ValueError(
            f"swa_start={str(start)!r} and swa_end={str(end)!r} are in different units: give both as fractions of "
            f"training ('0.7dur') or both in epochs ('7ep')."
        )
    if start >= end:
        raise ValueError(f"swa_start={str(start)!r} is not before swa_end={str(end)!r}: use an earlier start.")
    if end.unit == TimeUnit.DURATION and end.value == 1:
        _log.warning(
            "swa_end='1dur' leaves no training in which batch norms could update their statistics with the mean of "
            "the weights."
        )
    return start, end

"""Layer freezing: progressively stop training the first layers of a model."""

import logging
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from composer_algorithms._arguments import check_choice, check_interval
from composer_algorithms._method import Method, elapsed_fraction, log_no_effect, parse_time
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, State, create_interval_scheduler
from composer_time import Time, TimeUnit

__all__ = ["LayerFreezing", "freeze_layers", "METADATA"]

METADATA = METHODS["layer_freezing"]

_log = logging.getLogger("composer.algorithms.layer_freezing")

FreezeSchedule = Literal["linear", "cubic"]

_REPORTED: WeakSet[nn.Module] = WeakSet()  # models already reported to have no layer to freeze


def freeze_layers(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    current_duration: float,
    freeze_start: float = 0.5,
    freeze_level: float = 1.0,
    *,
    schedule: FreezeSchedule = "linear",
) -> tuple[int, float]:
    """Freeze the first layers of a model, a fraction that grows with training time.

    Layers are the modules with parameters of their own, in registration order; the last one is never frozen. With the
    linear schedule, nothing is frozen up to `freeze_start`; from there to the end the frozen fraction grows linearly to
    `freeze_level`. With the cubic schedule of FreezeOut, a layer that the linear one freezes at the fraction `t` of
    training is frozen at `t**3`. Frozen parameters require no gradient and have none. They stay in the optimizers,
    which skip parameters without a gradient, so that saved states still fit. If no layer will ever be frozen, that is
    logged once per model. FreezeOut also anneals the learning rate of each layer to 0 until it freezes, which is not
    done here: it would take a param group for each layer.

    Args:
        model: Changed in place.
        optimizers: Optimizers of the model; not changed.
        current_duration: Completed fraction of training, in [0, 1].
        freeze_start: Fraction of training before which nothing is frozen, in [0, 1].
        freeze_level: Fraction of the layers frozen at the end, in [0, 1].
        schedule: `'linear'` or `'cubic'`, which freezes earlier.

    Returns:
        The number of frozen layers, and the requested fraction.

    Raises:
        ValueError: If one of the numbers is outside [0, 1], or `schedule` is unknown.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
        >>> freeze_layers(model, torch.optim.SGD(model.parameters(), lr=0.1), current_duration=0.75)
        (1, 0.5)
        >>> [layer.weight.requires_grad for layer in model]
        [False, True, True]

    Reference:
        Brock et al., "FreezeOut", 2017, arXiv:1706.04983. Raghu et al., "SVCCA", NeurIPS 2017, arXiv:1706.05806.
    """
    del optimizers  # only in Composer's signature
    check_interval("[0, 1]", freeze_start=freeze_start, freeze_level=freeze_level, current_duration=current_duration)
    check_choice(("linear", "cubic"), schedule=schedule)
    if schedule == "cubic":
        current_duration = current_duration ** (1 / 3)
    fraction = 0.0
    if current_duration > freeze_start:
        # Not reached with freeze_start=1, since current_duration is at most 1.
        fraction = freeze_level * (current_duration - freeze_start) / (1 - freeze_start)
    num_freezable = len(_layers(model)[:-1])
    if not int(freeze_level * num_freezable) and model not in _REPORTED:
        _REPORTED.add(model)
        why = f"{freeze_level=} of its {num_freezable} layers before the last, which always trains, rounds down to 0"
        log_no_effect(_log, "LayerFreezing", model, why)
    depth = int(fraction * num_freezable)
    _freeze(model, depth)
    return depth, fraction


class LayerFreezing(Method):
    """Progressively stop training the first layers of the model.

    At the end of each `interval` it applies `freeze_layers` and logs `layer_freezing/layers_frozen` and
    `layer_freezing/percentage_frozen`. Its state holds the number of frozen layers; after a checkpoint was loaded they
    are frozen again on `AFTER_LOAD` or `FIT_START`, whichever comes first. Layers are never unfrozen, and a second
    `fit` starts with those frozen in the first.

    Args:
        freeze_start: Fraction of training before which nothing is frozen, in [0, 1].
        freeze_level: Fraction of the layers frozen at the end, in [0, 1].
        schedule: See `freeze_layers`.
        interval: When to freeze the layers that are due, such as `'1ep'`, `'100ba'` or `'0.1dur'`. `torch.compile`
            compiles the model again at each freeze. If no interval ends between `freeze_start` and the end of training,
            the log says so.

    Raises:
        ValueError: If a number is outside [0, 1], `schedule` is unknown, or `interval` is not positive.

    Example:
        >>> LayerFreezing(freeze_start=0.2)
        LayerFreezing(freeze_start=0.2, freeze_level=1.0, schedule='linear', interval='1ep')

    Reference:
        See `freeze_layers`.
    """

    def __init__(
        self,
        freeze_start: float = 0.5,
        freeze_level: float = 1.0,
        *,
        schedule: FreezeSchedule = "linear",
        interval: str | Time[Any] = "1ep",
    ) -> None:
        check_interval("[0, 1]", freeze_start=freeze_start, freeze_level=freeze_level)
        check_choice(("linear", "cubic"), schedule=schedule)
        self.freeze_start = freeze_start
        self.freeze_level = freeze_level
        self.schedule: FreezeSchedule = schedule
        self.interval = self._interval = parse_time("interval", interval)
        check_interval("(0, inf)", interval=self._interval.value)
        self._is_due = create_interval_scheduler(self._interval, include_end_of_training=False, checkpoint_events=False)
        ends = {TimeUnit.EPOCH: Event.EPOCH_END, TimeUnit.ITERATION: Event.ITERATION_END}
        self._is_each_epoch = self._interval.unit == TimeUnit.EPOCH and self._interval.value == 1
        self._end = ends.get(self._interval.unit, Event.BATCH_END)
        self.acts_on = frozenset({Event.AFTER_LOAD, Event.FIT_START, self._end})
        self._freeze_depth = 0
        self._freeze_fraction = 0.0
        self._is_loaded = False

    @property
    def find_unused_parameters(self) -> bool:
        """Return true: frozen parameters get no gradient."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """Return whether an interval has ended, training starts, or a loaded state has yet to be applied."""
        if event == self._end:
            return self._is_each_epoch or self._is_due(state, event)
        return event == Event.FIT_START or (self._is_loaded and event == Event.AFTER_LOAD)

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Freeze the layers that are due."""
        if event != self._end:
            if self._is_loaded:
                _freeze(state.model, self._freeze_depth)
                self._is_loaded = False
            if event == Event.FIT_START:
                self._warn_if_too_late(state)
            return
        elapsed: Any = elapsed_fraction(state, "LayerFreezing")
        total = _batches(state.max_duration, state)
        if event == Event.BATCH_END and total:  # the number of epochs does not change within an epoch
            elapsed = int(state.timestamp.batch) / total
        depth, fraction = freeze_layers(
            state.model,
            state.optimizers,
            min(float(elapsed), 1.0),
            self.freeze_start,
            self.freeze_level,
            schedule=self.schedule,
        )
        # In a second, longer fit, fewer layers may be due than are frozen already.
        self._freeze_depth, self._freeze_fraction = max(depth, self._freeze_depth), fraction
        if logger is not None:
            logger.log_metrics({"layer_freezing/layers_frozen": depth, "layer_freezing/percentage_frozen": fraction})

    def _warn_if_too_late(self, state: State) -> None:
        total, interval = _batches(state.max_duration, state), _batches(self._interval, state)
        if not total or not interval or self._freeze_depth:
            return
        last = max(math.ceil(total / interval) - 1, 0) * interval / total  # the last time before the end
        if last <= (self.freeze_start**3 if self.schedule == "cubic" else self.freeze_start):
            why = (
                f"with interval={str(self._interval)!r}, layers are last frozen at {last:.0%} of the training of "
                f"{state.max_duration}, and freeze_start={self.freeze_start!r}. Choose a shorter interval, such as "
                f"'0.05dur', or leave it out"
            )
            log_no_effect(_log, "LayerFreezing", state.model, why)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of frozen layers and the requested fraction."""
        return {
            **super().state_dict(),
            "freeze_depth": self._freeze_depth,
            "freeze_fraction": self._freeze_fraction,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the number of frozen layers; the next event freezes them.

        Composer's own checkpoints lack it; the end of the next interval then freezes the layers that are due.
        """
        super().load_state_dict(state)
        self._freeze_depth = int(state.get("freeze_depth", 0))
        self._freeze_fraction = float(state.get("freeze_fraction", 0.0))
        self._is_loaded = self._freeze_depth > 0


def _batches(time: Time[Any] | None, state: State) -> float | None:
    """Return the number of batches in a time, as far as it is known."""
    if time is None:
        return None
    if time.unit == TimeUnit.DURATION:
        whole = _batches(state.max_duration, state)
        return None if whole is None else time.value * whole
    if time.unit == TimeUnit.EPOCH and state.dataloader_len is not None:
        return time.value * state.dataloader_len.value
    return time.value if time.unit == TimeUnit.BATCH else None


def _layers(model: nn.Module) -> list[list[nn.Parameter]]:
    layers = [list(module.parameters(recurse=False)) for module in model.modules()]
    return [parameters for parameters in layers if parameters]


def _freeze(model: nn.Module, depth: int) -> None:
    layers = _layers(model)
    # A weight shared with a later layer, such as that of an embedding and the output layer, keeps training.
    still_trained = {id(parameter) for parameter in chain.from_iterable(layers[depth:])}
    for parameter in chain.from_iterable(layers[:depth]):
        if id(parameter) not in still_trained:
            parameter.requires_grad_(False)
            parameter.grad = None  # with a zero gradient, momentum and weight decay would still change it

"""Layer freezing: progressively stop training the first layers of a model."""

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from composer_algorithms._arguments import check_choice, check_interval
from composer_algorithms._method import Method, elapsed_fraction, log_no_effect
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, State

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

    On `EPOCH_END` it applies `freeze_layers` and logs `layer_freezing/layers_frozen` and
    `layer_freezing/percentage_frozen`. Its state holds the number of frozen layers; after a checkpoint was loaded they
    are frozen again on `AFTER_LOAD` or `FIT_START`, whichever comes first. Layers are never unfrozen, and a second
    `fit` starts with those frozen in the first.

    Args:
        freeze_start: Fraction of training before which nothing is frozen, in [0, 1].
        freeze_level: Fraction of the layers frozen at the end, in [0, 1].
        schedule: See `freeze_layers`.

    Raises:
        ValueError: If a number is outside [0, 1], or `schedule` is unknown.

    Example:
        >>> LayerFreezing(freeze_start=0.2)
        LayerFreezing(freeze_start=0.2, freeze_level=1.0, schedule='linear')

    Reference:
        See `freeze_layers`.
    """

    acts_on = frozenset({Event.AFTER_LOAD, Event.FIT_START, Event.EPOCH_END})

    def __init__(
        self, freeze_start: float = 0.5, freeze_level: float = 1.0, *, schedule: FreezeSchedule = "linear"
    ) -> None:
        check_interval("[0, 1]", freeze_start=freeze_start, freeze_level=freeze_level)
        check_choice(("linear", "cubic"), schedule=schedule)
        self.freeze_start = freeze_start
        self.freeze_level = freeze_level
        self.schedule: FreezeSchedule = schedule
        self._freeze_depth = 0
        self._freeze_fraction = 0.0
        self._is_loaded = False

    @property
    def find_unused_parameters(self) -> bool:
        """Return true: frozen parameters get no gradient."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """Return whether an epoch has ended, or a loaded state has yet to be applied to the model."""
        return event == Event.EPOCH_END or (self._is_loaded and event in (Event.AFTER_LOAD, Event.FIT_START))

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Freeze the layers that are due."""
        if event != Event.EPOCH_END:
            _freeze(state.model, self._freeze_depth)
            self._is_loaded = False
            return
        elapsed = elapsed_fraction(state, "LayerFreezing")
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

    def state_dict(self) -> dict[str, Any]:
        """Return the number of frozen layers and the requested fraction."""
        return {
            **super().state_dict(),
            "freeze_depth": self._freeze_depth,
            "freeze_fraction": self._freeze_fraction,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the number of frozen layers; the next event freezes them.

        Composer's own checkpoints lack it; the next `EPOCH_END` then freezes the layers that are due.
        """
        super().load_state_dict(state)
        self._freeze_depth = int(state.get("freeze_depth", 0))
        self._freeze_fraction = float(state.get("freeze_fraction", 0.0))
        self._is_loaded = self._freeze_depth > 0


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

"""EMA as an Algorithm: when the average is taken, and when the model holds it."""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from composer_algorithms._arguments import warn_deprecated
from composer_algorithms.ema.averaging import EMAParameters, averaging_settings, compute_ema, start_time
from composer_algorithms.gradient_clipping import CHANGES_OF_WEIGHTS, ActiveWeights
from composer_dist.strategy import canonical_name
from composer_events.algorithm import Algorithm
from composer_events.event import Event
from composer_time import Time, TimeUnit

if TYPE_CHECKING:
    from composer_events.logger import Logger
    from composer_events.state import State

__all__ = ["EMA"]

# Between these and the last event before them the model may have been moved, sharded or loaded.
_MODEL_MAY_HAVE_MOVED = frozenset(
    {Event.FIT_START, Event.PREDICT_START, Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START, Event.EVAL_START}
)
# For checkpoints that do not count updates: more than any warm-up reaches to.
_WARMED_UP = 1_000_000


class EMA(Algorithm):
    """Keep an exponential moving average of the weights, and evaluate and save that instead of the weights themselves.

    Once training has reached `ema_start`, the average starts as a copy of the weights at the next end of a batch or
    epoch, whichever `update_interval` counts, and follows them with every interval: `average = smoothing * average +
    (1 - smoothing) * weights`, see `compute_ema`. On INIT it acts after the algorithms that rebuild the model.

    The model holds the average from `EVAL_BEFORE_ALL` (`EVAL_START` where that does not come first) to the end of the
    evaluation, and from a `*_CHECKPOINT` event on which a callback's `save_interval(state, event)` is true to the next
    training event. On all other events it holds the weights being trained, so training does not depend on how often
    it is evaluated or saved. A checkpoint saved by such a callback has the average as the model and the weights being
    trained in the state of EMA; one saved at another moment has them the other way round. Either resumes.
    `PREDICT_START` leaves the model with what it holds: what was loaded, or after `fit` the trained weights. After an
    exception inside an evaluation the model keeps the average until the next training event, which puts the weights
    being trained back.

    Every INIT begins anew, with no average of an earlier run. Only a state that was loaded before the first INIT is
    kept, and fitted to the model then.

    Args:
        half_life: After this time the average has forgotten half of what it knew: batches (`'1000ba'`) or epochs.
        smoothing: The weight in [0, 1] of the average in each update. Goes with `half_life=None` only.
        ema_start: When the average begins: a part of training (`'0.7dur'`), batches or epochs.
        update_interval: The time between updates, in the unit of `half_life`. `None`: one of that unit, or one batch
            with `smoothing`.
        warmup: Use at most `(1 + t) / (10 + t)` as the smoothing of update number `t`, so that the average forgets its
            beginning quickly.
        train_with_ema_weights: Of Composer 0.7. Only `False` is accepted, which does nothing.

    Raises:
        ValueError: If both or neither of `half_life` and `smoothing` are given, a time is in a unit that it cannot be
            in, the units of `half_life` and `update_interval` differ, or `train_with_ema_weights` is true.

    Example:
        >>> algorithm = EMA(half_life="100ba", update_interval="20ba")
        >>> round(algorithm.smoothing, 4)
        0.8706

    Reference:
        TensorFlow's `ExponentialMovingAverage`, where `warmup` is the effect of `num_updates`.
    """

    surgery_rank = 7
    acts_on = frozenset({Event.INIT, *_MODEL_MAY_HAVE_MOVED, *CHANGES_OF_WEIGHTS})
    conflicts_with = MappingProxyType(
        {
            "SWA": "Each keeps an average of the weights as if there were no other. Use one of them.",
            "EMA": "Each exchanges the weights for its average as if there were no other. Use one of them.",
        }
    )

    def __init__(
        self,
        half_life: str | Time[Any] | None = "1000ba",
        smoothing: float | None = None,
        ema_start: str | Time[Any] = "0.0dur",
        update_interval: str | Time[Any] | None = None,
        *,
        warmup: bool = False,
        train_with_ema_weights: bool | None = None,
    ) -> None:
        _check_train_with_ema_weights(train_with_ema_weights)
        self.smoothing, self.update_interval = averaging_settings(half_life, smoothing, update_interval)
        self.half_life = half_life
        self.ema_start = start_time(ema_start)
        self.warmup = warmup
        self._reset()
        self._loaded_before_init = False
        self._update_event = Event.BATCH_END if self.update_interval.unit == TimeUnit.BATCH else Event.EPOCH_END

    @property
    def ema_weights_active(self) -> bool:
        """Whether the model holds the average, and `ema_model` the weights being trained."""
        return self._active.is_average

    def match(self, event: Event, state: "State") -> bool:
        """Answer whether the event is INIT, or the average has begun or begins and the event concerns it."""
        if event == Event.INIT:
            return True
        if event == self._update_event:
            # Only noted: apply takes the copy. Who applies the event without matching it asks for an update.
            self._starts_now = not self.ema_started and self._is_start_reached(state)
            return self._starts_now or (self.ema_started and self._is_update_due(state))
        return self.ema_started and (event in _MODEL_MAY_HAVE_MOVED or self._active.concerned_by(event, state))

    def apply(self, event: Event, state: "State", logger: "Logger | None") -> None:
        """Start or update the average, or put one of the two sets of weights into the model."""
        if event == Event.INIT:
            self._begin_run(state)
        self._loaded_before_init = False
        if self.ema_model is None:
            # Until the average begins, a place for what a checkpoint may hold.
            self.ema_model = EMAParameters(state.model)
        average = self.ema_model
        if event in _MODEL_MAY_HAVE_MOVED:
            average.move_params_to_device(state.model)
        self._active.follow(event, lambda: average.swap_params(state.model))
        if event == self._update_event:
            self._start_or_update(state)

    def get_ema_model(self, model: nn.Module) -> nn.Module:
        """Copy the average into a model.

        Args:
            model: Gets the average; it has the parameters of the model being trained. Changed in place.

        Returns:
            The same model.

        Raises:
            ValueError: If the model being trained holds the average at this moment, or there is none yet.
        """
        if self.ema_weights_active:
            raise ValueError(
                "the average is in the model being trained at this moment (ema_weights_active=True): use that model, "
                "or get_training_model for the weights being trained."
            )
        if not self.ema_started:
            raise ValueError(
                f"there is no average yet (ema_started=False): it begins at the first {self._update_event.value!r} "
                f"event from ema_start={str(self.ema_start)!r} on. Until then use the model itself."
            )
        return self._transfer_to(model)

    def get_training_model(self, model: nn.Module) -> nn.Module:
        """Copy the weights being trained into a model, while the model being trained holds the average.

        Args:
            model: Gets the weights; it has the parameters of the model being trained. Changed in place.

        Returns:
            The same model.

        Raises:
            ValueError: If the model being trained holds its own weights at this moment.
        """
        if not self.ema_weights_active:
            raise ValueError(
                "the weights being trained are in the model at this moment (ema_weights_active=False): use that "
                "model, or get_ema_model for the average."
            )
        return self._transfer_to(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the set of weights that is not in the model, and which of the two that is.

        The tensors are those that later updates change.
        """
        average = self.ema_model or EMAParameters(None)
        return {
            **super().state_dict(),
            "format": FORMAT,
            "ema_model": {
                "named_parameters_dict": dict(average.named_parameters()),
                "named_buffers_dict": dict(average.named_buffers()),
            },
            "ema_weights_active": self.ema_weights_active,
            "ema_started": self.ema_started,
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Go on with the average of a checkpoint, of Composer's own as well.

        Load the model of the same checkpoint too: one of the two sets of weights is there. Before the first INIT there
        is no model to compare names with: INIT then does it, without `strict`.

        Args:
            state: What `state_dict` returned. Not changed, and not kept.
            strict: Raise where the saved names differ from the model's, instead of logging a warning.

        Raises:
            ValueError: If not one parameter of the state is in the model, or with `strict` any name differs.
            RuntimeError: If Composer saved the state before 0.13 and there was no INIT yet.
        """
        before_init = self._loaded_before_init or self.ema_model is None
        self.ema_model = read_parameters(state, self.ema_model, strict)
        self.ema_started = bool(state["ema_started"])
        self._active.is_average = bool(state["ema_weights_active"])
        self.num_updates = int(state.get("num_updates", _WARMED_UP if self.ema_started else 0))
        self._loaded_before_init = before_init

    def __repr__(self) -> str:
        half_life = None if self.half_life is None else str(self.half_life)
        smoothing = self.smoothing if self.half_life is None else None
        return (
            f"EMA(half_life={half_life!r}, smoothing={smoothing!r}, ema_start={str(self.ema_start)!r}, "
            f"update_interval={str(self.update_interval)!r}, warmup={self.warmup!r})"
        )

    def _reset(self) -> None:
        self.ema_model: EMAParameters | None = None
        self.ema_started = False
        self.num_updates = 0
        self._starts_now = False
        self._active = ActiveWeights()

    def _begin_run(self, state: "State") -> None:
        loaded = self.state_dict() if self._loaded_before_init else None
        self._reset()
        self.ema_model = EMAParameters(state.model)
        if loaded is not None:
            self.load_state_dict(loaded)

    def _is_start_reached(self, state: "State") -> bool:
        if self.ema_start.unit != TimeUnit.DURATION:
            return state.timestamp.get(self.ema_start.unit) >= self.ema_start
        if self.ema_start.value == 0:
            return True
        elapsed = state.get_elapsed_duration()
        if elapsed is None:
            raise RuntimeError(
                f"ema_start={str(self.ema_start)!r} is a part of training, whose length is not known (max_duration is "
                f"None): set state.max_duration, or give ema_start in batches ('500ba') or epochs ('2ep')."
            )
        return elapsed >= self.ema_start

    def _is_update_due(self, state: "State") -> bool:
        return state.timestamp.get(self.update_interval.unit).value % self.update_interval.value == 0

    def _start_or_update(self, state: "State") -> None:
        assert self.ema_model is not None  # apply has made it
        if self._starts_now:
            self.ema_model = EMAParameters(state.model)
            self.ema_started, self._starts_now = True, False
            self.num_updates = 0
        elif self._is_update_due(state):
            smoothing = self.smoothing
            if self.warmup:
                smoothing = min(smoothing, (1 + self.num_updates) / (10 + self.num_updates))
            compute_ema(state.model, self.ema_model, smoothing)
            self.ema_started = True  # also where a driver applies the event without asking match for the start
            self.num_updates += 1

    def _transfer_to(self, model: nn.Module) -> nn.Module:
        assert self.ema_model is not None  # the callers have seen that an average began or was loaded
        self.ema_model.transfer_ema_params(model)
        return model


def _check_train_with_ema_weights(train_with_ema_weights: bool | None) -> None:
    if train_with_ema_weights:
        raise ValueError(
            f"train_with_ema_weights={train_with_ema_weights!r} is not supported: the weights being trained are never "
            f"replaced by the average. Leave it out, and evaluate with the average as EMA does by itself."
        )
    if train_with_ema_weights is not None:
        warn_deprecated("EMA(train_with_ema_weights=False) is what EMA always does: leave it out.", stacklevel=3)


FORMAT = 2
"""Format 1 is Composer's: without a number, and with the prefixes of wrappers in the names."""

# Users' log settings know Composer's names of loggers.
_log = logging.getLogger("composer.algorithms.ema")

Tensors = Mapping[str, Tensor]


def read_parameters(state: Mapping[str, Any], current: EMAParameters | None, strict: bool) -> EMAParameters:
    """Return the set of weights that a saved state of EMA holds.

    Args:
        state: What EMA's `state_dict` returned once.
        current: The set taken of the model as it is now; its names say what to look for, and what is missing in the
            state is taken from it.
        strict: Raise where names differ, instead of logging it.
    """
    if (version := state.get("format", 1)) > FORMAT:
        raise ValueError(
            f"the checkpoint has EMA's state in format {version!r}, and this version of composer-algorithms reads up "
            f"to {FORMAT}: update composer-algorithms."
        )
    current = current or EMAParameters(None)
    parameters, buffers = _saved_tensors(state, current)
    loaded = EMAParameters(None)
    loaded.named_parameters_dict = _fitted(parameters, current.named_parameters_dict, "parameters", strict)
    loaded.named_buffers_dict = _fitted(buffers, current.named_buffers_dict, "buffers", strict)
    return loaded


def _saved_tensors(state: Mapping[str, Any], current: EMAParameters) -> tuple[Tensors, Tensors]:
    saved = state["ema_model"]
    if "training_model" in state and state["ema_weights_active"]:
        saved = state["training_model"]  # before 0.13 both sets were kept; ours is the one that is not in the model
    if "named_parameters_dict" in saved:
        return saved["named_parameters_dict"], saved["named_buffers_dict"]
    if not current.named_parameters_dict:
        raise RuntimeError(
            "the checkpoint has EMA's state as Composer saved it before 0.13, which does not tell parameters from "
            "buffers: let EMA act on Event.INIT, where it learns that from the model, and load then."
        )
    names = _names_as_wanted(saved, [*current.named_parameters_dict, *current.named_buffers_dict])
    found = {wanted: saved[name] for name, wanted in names.items()}
    return (
        {name: found[name] for name in current.named_parameters_dict if name in found},
        {name: found[name] for name in current.named_buffers_dict if name in found},
    )


def _fitted(saved: Tensors, current: Tensors, kind: str, strict: bool) -> dict[str, Tensor]:
    # Copies: the average is changed in place, and the caller's state dict must not change with it.
    if not saved:  # the average had not begun, or the model has none of the kind
        return dict(current)
    names = _names_as_wanted(saved, current)
    found = {wanted: saved[name].detach().clone() for name, wanted in names.items()}
    if not current:
        return found
    missing, unexpected = sorted(current.keys() - found.keys()), sorted(found.keys() - current.keys())
    if missing or unexpected:
        kinds = (("are missing", missing), ("are of another model", unexpected))
        told = ", ".join(f"{len(names)} {what} (such as {names[:3]})" for what, names in kinds if names)
        message = f"EMA's state in the checkpoint does not have the {kind} of this model: {told}."
        # Without one name in common it belongs to another model, however lenient one is.
        if strict or (kind == "parameters" and len(missing) == len(current)):
            raise ValueError(f"{message} Load it into the model that it was saved from, or leave EMA's state out.")
        _log.warning("%s What is missing starts from the model's own.", message)
    return {name: found.get(name, tensor) for name, tensor in current.items()}


def _names_as_wanted(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    # Names of Composer's checkpoints carry DDP's "module.", which may also be part of a model's own names: the reading
    # that finds more of the wanted names is right.
    plain = {name: canonical_name(name) for name in saved}
    without_ddp = {name: canonical.removeprefix("module.") for name, canonical in plain.items()}
    sought = set(wanted)
    return max((plain, without_ddp), key=lambda names: len(sought.intersection(names.values())))

"""EMA: evaluate and save an exponential moving average of the weights being trained."""

import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from composer_algorithms._arguments import check_counts, check_interval, warn_deprecated
from composer_algorithms._averaging import EMAParameters, averaging_settings, compute_ema, start_time
from composer_algorithms._method import Method, is_reached
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import get_model_context_manager, is_dtensor
from composer_dist.wrapping import canonical_name
from composer_events import Event, Logger, State
from composer_time import Time, TimeUnit

__all__ = ["EMA", "EMAParameters", "compute_ema", "get_model_context_manager", "post_hoc_ema", "METADATA"]

METADATA = METHODS["ema"]

FORMAT = 2
"""Format of the state. Composer's own states are format 1: no format number, and names with prefixes of wrappers."""

# Composer's logger name, which users' logging configurations refer to.
_log = logging.getLogger("composer.algorithms.ema")

Tensors = Mapping[str, Tensor]

# Since the last event before these, the model may have been moved, sharded or loaded.
_MODEL_MAY_HAVE_MOVED = frozenset(
    {Event.FIT_START, Event.PREDICT_START, Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START, Event.EVAL_START}
)
# Assumed number of updates for checkpoints without one: more than any warm-up lasts.
_WARMED_UP = 1_000_000

_CHECKPOINTS = frozenset({Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT})
_EVALUATIONS_BEGIN = frozenset({Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START})
_EVALUATIONS_END = frozenset({Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END})
# BATCH_START would suffice for the forward pass. But other algorithms act on these events too, and the weights that
# they see must not depend on whether a checkpoint was just saved.
_TRAINING = frozenset(
    {
        *(Event.ITERATION_START, Event.EPOCH_START, Event.BEFORE_DATALOADER, Event.BATCH_START),
        *(Event.BATCH_END, Event.EPOCH_END, Event.ITERATION_END, Event.FIT_END),
    }
)
# Events on which the two sets may have to be exchanged.
_CHANGES_OF_WEIGHTS = frozenset(
    {*_CHECKPOINTS, *_EVALUATIONS_BEGIN, *_EVALUATIONS_END, *_TRAINING, Event.EVAL_START, Event.EVAL_END}
)


class _ActiveWeights:
    """Track which set of weights the model holds, and exchange the sets when an event requires the other one.

    Evaluation and checkpoints get the average, everything else the weights being trained. Between the events that
    enclose several evaluators the average stays in place, so that they cost only two exchanges in total.
    """

    def __init__(self) -> None:
        self.is_average = False
        self._among_evaluators = False

    def concerned_by(self, event: Event, state: State) -> bool:
        """Return whether `follow` would act on this event."""
        # A checkpoint callback is recognized by its interval: its class is in a package that this one cannot import.
        if event in _CHECKPOINTS and not any(
            callable(is_due := getattr(callback, "is_save_due", None) or getattr(callback, "save_interval", None))
            and is_due(state, event)
            for callback in state.callbacks
        ):
            return False
        wanted = self._wanted(event)
        return wanted is not None and wanted != self.is_average

    def follow(self, event: Event, exchange: Callable[[], None]) -> None:
        """Call `exchange` if the event requires the set of weights that the model does not hold."""
        wanted = self._wanted(event)
        if event in _EVALUATIONS_BEGIN:
            self._among_evaluators = True
        elif event in _EVALUATIONS_END or event in _TRAINING:  # a failed evaluation has no end event
            self._among_evaluators = False
        if wanted is not None and wanted != self.is_average:
            exchange()
            self.is_average = wanted

    def _wanted(self, event: Event) -> bool | None:
        if event in _CHECKPOINTS or event in _EVALUATIONS_BEGIN or event == Event.EVAL_START:
            return True
        if event in _TRAINING or event in _EVALUATIONS_END:
            return False
        if event == Event.EVAL_END and not self._among_evaluators:
            return False
        return None


class EMA(Method):
    """Keep an exponential moving average of the weights, and evaluate and save the average instead of the weights.

    Once training has reached `ema_start`, the average starts as a copy of the weights at the next end of a batch or
    epoch, depending on the unit of `update_interval`, and is updated after each interval: `average = smoothing *
    average + (1 - smoothing) * weights`, see `compute_ema`. On INIT it acts after the algorithms that rebuild the
    model.

    The model holds the average during evaluation, and from a `*_CHECKPOINT` event on which a callback's
    `save_interval(state, event)` is true to the next training event; otherwise it holds the weights being trained, so
    training does not depend on how often it is evaluated or saved. A checkpoint saved by such a callback has the
    average as the model and the weights being trained in the state of EMA; one saved at any other time has them the
    other way round. Both can be resumed. Predictions use the loaded weights, or after `fit` the trained ones. Every
    INIT starts without the average of an earlier run, except for a state loaded before the first INIT.

    Args:
        half_life: Time after which old weights count half as much: batches (`'1000ba'`) or epochs.
        smoothing: Weight of the average in each update, in [0, 1]. Requires `half_life=None`.
        ema_start: Start of the average: a fraction of training (`'0.7dur'`), batches or epochs.
        update_interval: Time between updates, in the unit of `half_life`. `None`: one of that unit, or one batch with
            `smoothing`.
        warmup: Use at most `(1 + t) / (10 + t)` as the smoothing of update number `t`, so that the average quickly
            forgets its beginning.
        power: Use `(1 - 1 / t) ** (power + 1)` as the smoothing of update number `t`, from 1 on, 0 or more. The average
            covers the same fraction of training at any time: its weights grow with `t ** power`. It replaces
            the default of `half_life`. `power=16.97` corresponds to a relative standard deviation of 5%, and 6.94 to
            10%. Of two powers, such as `(16.97, 6.94)`, both averages are kept, and the first is evaluated and saved as
            the model; see `snapshots`.
        train_with_ema_weights: Argument of Composer 0.7. Only `False` is accepted, which does nothing.

    Raises:
        ValueError: If not exactly one of `half_life`, `smoothing` and `power` is given, a time has an invalid unit, the
            units of `half_life` and `update_interval` differ, or `train_with_ema_weights` is true.

    Example:
        >>> algorithm = EMA(half_life="100ba", update_interval="20ba")
        >>> round(algorithm.smoothing, 4)
        0.8706

    Reference:
        TensorFlow's `ExponentialMovingAverage`, where `warmup` is the effect of `num_updates`. For `power`: Karras et
        al., "Analyzing and Improving the Training Dynamics of Diffusion Models", CVPR 2024, arXiv:2312.02696.
    """

    surgery_rank = 7  # after the algorithms that rebuild the model
    schedulable = ("half_life", "smoothing")
    acts_on = frozenset({Event.INIT, *_MODEL_MAY_HAVE_MOVED, *_CHANGES_OF_WEIGHTS})
    conflicts_with = MappingProxyType(
        {
            "SWA": "Both keep an average of the weights, and neither accounts for the other. Use one of them.",
            "EMA": "Both exchange the weights for an average, and neither accounts for the other. Use one.",
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
        power: float | tuple[float, float] | None = None,
        train_with_ema_weights: bool | None = None,
    ) -> None:
        if train_with_ema_weights:
            raise ValueError(
                f"train_with_ema_weights={train_with_ema_weights!r} is not supported: the weights being trained are "
                f"never replaced by the average. Leave it out, and evaluate with the average as EMA does by itself."
            )
        if train_with_ema_weights is not None:
            warn_deprecated("EMA(train_with_ema_weights=False) is what EMA always does: leave it out.", stacklevel=2)
        if power is not None:
            self._powers = (power,) if isinstance(power, int | float) else tuple(power)
            if len(self._powers) not in (1, 2):
                raise ValueError(f"power={power!r} must be one number or two.")
            for each in self._powers:
                check_interval("[0, inf)", power=each)
            if half_life not in (None, "1000ba") or smoothing is not None:
                raise ValueError(
                    f"power={power!r} must be used without half_life and smoothing; got half_life={half_life!r} and "
                    f"smoothing={smoothing!r}."
                )
            half_life, smoothing = None, 0.0  # of the first update
        else:
            self._powers = ()
        self.power = power
        self.smoothing, self.update_interval = averaging_settings(half_life, smoothing, update_interval)
        self.half_life = half_life
        self.ema_start = start_time(ema_start)
        self.warmup = warmup
        self._reset()
        self._loaded_before_init = False
        self._update_event = Event.BATCH_END if self.update_interval.unit == TimeUnit.BATCH else Event.EPOCH_END
        # At its other events it decides which weights the model holds; any event around an evaluation serves for that.
        self.needed_events = (Event.INIT, self._update_event)

    @property
    def half_life(self) -> str | Time[Any] | None:
        """Time after which old weights count half as much. An assignment changes `smoothing`."""
        return self._half_life

    @half_life.setter
    def half_life(self, half_life: str | Time[Any] | None) -> None:
        self._half_life = half_life
        if half_life is not None:
            self.smoothing, _ = averaging_settings(half_life, None, self.update_interval)

    @property
    def ema_weights_active(self) -> bool:
        """True while the model holds the average, and `ema_model` the weights being trained."""
        return self._active.is_average

    def match(self, event: Event, state: State) -> bool:
        """Return whether the event is INIT, or starts, updates, moves or exchanges the average."""
        if event == Event.INIT:
            return True
        if event == self._update_event:
            # `apply` takes the copy. A caller of `apply` that does not call `match` requests an update.
            self._starts_now = not self.ema_started and is_reached(self.ema_start, state, "ema_start")
            return self._starts_now or (self.ema_started and self._is_update_due(state))
        return self.ema_started and (event in _MODEL_MAY_HAVE_MOVED or self._active.concerned_by(event, state))

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Start or update the average, or exchange it with the weights in the model."""
        loaded = None
        if event == Event.INIT:
            # Loaded a second time below, since only now can the names be compared with those of the model.
            loaded = self.state_dict() if self._loaded_before_init else None
            self._reset()
        if self.ema_model is None or (self.second_model is None and len(self._powers) > 1):
            # Before the average starts, a placeholder for the tensors that a checkpoint may hold.
            self.ema_model, self.second_model = self._copies(state.model)
        if loaded is not None:
            self.load_state_dict(loaded)
        self._loaded_before_init = False
        average = self.ema_model
        # First, so that an exchange can trade storages instead of copying values.
        if event in _MODEL_MAY_HAVE_MOVED:
            for each in filter(None, (average, self.second_model)):
                each.move_params_to_device(state.model)
        self._active.follow(event, lambda: average.swap_params(state.model))
        if event == self._update_event:
            # After `follow`: the model holds the weights being trained now, not the average.
            self._start_or_update(state)

    def get_ema_model(self, model: nn.Module) -> nn.Module:
        """Copy the average into a model.

        Args:
            model: A model with the parameters of the model being trained. Changed in place.

        Returns:
            The same model.

        Raises:
            ValueError: If the model being trained currently holds the average, or no average exists yet.
        """
        if self.ema_weights_active or self.ema_model is None or not self.ema_started:
            raise ValueError(
                f"{'The model holds the average' if self.ema_weights_active else 'EMA has no average yet'} "
                f"(ema_weights_active={self.ema_weights_active}, ema_started={self.ema_started}): use that model."
            )
        self.ema_model.transfer_ema_params(model)
        return model

    def snapshots(self) -> list[tuple[int, float, dict[str, Tensor]]]:
        """Return copies of the averages of `power`, for `post_hoc_ema`. With shards, every rank must call this.

        Returns:
            Number of updates, power and tensors of each average, whole and on the CPU.

        Raises:
            ValueError: If the model being trained currently holds the average, no average exists yet, or there is no
                `power`.
        """
        if self.ema_weights_active or self.ema_model is None or not self.num_updates or not self._powers:
            raise ValueError(
                f"EMA has no snapshots now (ema_weights_active={self.ema_weights_active}, num_updates="
                f"{self.num_updates}, power={self.power!r}): set power, and take them after an update in training."
            )
        return [
            (self.num_updates, power, {name: _whole(tensor) for name, tensor in tensors.items()})
            for power, average in zip(self._powers, (self.ema_model, self.second_model), strict=False)
            if average is not None
            for tensors in [average.named_parameters_dict | average.named_buffers_dict]
        ]

    def get_training_model(self, model: nn.Module) -> nn.Module:
        """Copy the weights being trained into a model, while the model being trained holds the average.

        Args:
            model: A model with the parameters of the model being trained. Changed in place.

        Returns:
            The same model.

        Raises:
            ValueError: If the model being trained currently holds its own weights.
        """
        if not self.ema_weights_active or self.ema_model is None:
            raise ValueError(
                "the weights being trained are currently in the model (ema_weights_active=False): use that model, or "
                "get_ema_model for the average."
            )
        self.ema_model.transfer_ema_params(model)
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return the set of weights that is not in the model, and a flag for which set that is.

        The tensors are not copies: later updates change them.
        """
        first, second = (
            {"named_parameters_dict": dict(each.named_parameters()), "named_buffers_dict": dict(each.named_buffers())}
            for each in (self.ema_model or EMAParameters(None), self.second_model or EMAParameters(None))
        )
        return {
            **super().state_dict(),
            "format": FORMAT,
            "ema_model": first,
            **({"second_model": second} if len(self._powers) > 1 else {}),
            "ema_weights_active": self.ema_weights_active,
            "ema_started": self.ema_started,
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Resume with the average of a checkpoint, including Composer's own checkpoints.

        Load the model of the same checkpoint too, since it holds the other set of weights. Before the first INIT names
        cannot be compared with those of the model; INIT then compares them, without `strict`.

        Args:
            state: Result of `state_dict`. Neither changed nor kept.
            strict: Raise if the saved names differ from the model's, instead of logging a warning.

        Raises:
            ValueError: If no parameter of the state is in the model, or with `strict` any name differs.
            RuntimeError: If Composer saved the state before 0.13 and INIT has not run yet.
        """
        # Before ema_model is set below.
        before_init = self._loaded_before_init or self.ema_model is None
        if len(self._powers) > 1:
            if "second_model" not in state and state["ema_started"]:
                raise ValueError(
                    f"the checkpoint has one average, and power={self.power!r} needs two: resume with one power."
                )
            second = {**state, "ema_model": state.get("second_model", state["ema_model"])}
            self.second_model = read_parameters(second, self.second_model, strict)
        self.ema_model = read_parameters(state, self.ema_model, strict)
        self.ema_started = bool(state["ema_started"])
        self._active.is_average = bool(state["ema_weights_active"])
        self.num_updates = int(state.get("num_updates", _WARMED_UP if self.ema_started else 0))
        self._loaded_before_init = before_init

    def __repr__(self) -> str:
        half_life = None if self.half_life is None else str(self.half_life)
        smoothing = self.smoothing if self.half_life is None and self.power is None else None
        power = "" if self.power is None else f", power={self.power!r}"
        return (
            f"EMA(half_life={half_life!r}, smoothing={smoothing!r}, ema_start={str(self.ema_start)!r}, "
            f"update_interval={str(self.update_interval)!r}, warmup={self.warmup!r}{power})"
        )

    def _reset(self) -> None:
        self.ema_model: EMAParameters | None = None
        self.second_model: EMAParameters | None = None
        self.ema_started = False
        self.num_updates = 0
        self._starts_now = False
        self._active = _ActiveWeights()

    def _copies(self, model: nn.Module) -> tuple[EMAParameters, EMAParameters | None]:
        return EMAParameters(model), EMAParameters(model) if len(self._powers) > 1 else None

    def _is_update_due(self, state: State) -> bool:
        return state.timestamp.get(self.update_interval.unit).value % self.update_interval.value == 0

    def _start_or_update(self, state: State) -> None:
        assert self.ema_model is not None  # created by `apply`
        if self._starts_now:
            self.ema_model, self.second_model = self._copies(state.model)
            # The set created by `apply` was a placeholder, with the weights of the beginning of the run.
            self.ema_started, self._starts_now = True, False
            self.num_updates = 0
        elif self._is_update_due(state):
            number = self.num_updates
            factors = [(number / (number + 1)) ** (power + 1) for power in self._powers] or [self.smoothing]
            self.smoothing = factors[0]
            for average, smoothing in zip((self.ema_model, self.second_model), factors, strict=False):
                assert average is not None  # there is one for each power
                compute_ema(
                    state.model, average, min(smoothing, (1 + number) / (10 + number)) if self.warmup else smoothing
                )
            self.ema_started = True  # for callers that apply the event without `match`
            self.num_updates += 1


def post_hoc_ema(
    snapshots: Iterable[tuple[int, float, Mapping[str, Tensor]]], power: float, num_updates: int | None = None
) -> dict[str, Tensor]:
    """Reconstruct a power average that was not computed during training.

    The result is the combination of the snapshots whose weights of the training steps are closest to those of the
    average, in the least-squares sense, divided by the sum of its coefficients, so that constant weights stay as they
    are. Take snapshots of two averages at regular intervals; the more there are, the closer the result. Powers between
    those of the two averages are reconstructed best.

    Args:
        snapshots: Number of updates, power and tensors of each average: results of `EMA(power=(16.97, 6.94)).snapshots`
            at several times in training.
        power: That of `EMA(power=...)`, 0 or more.
        num_updates: The number of updates of the average, from that of the first snapshot to that of the last, which is
            the default.

    Returns:
        Tensors by name, computed in float32 at least and rounded to the dtype of the snapshots. Tensors that are not
        floating point are those of the last snapshot.

    Raises:
        ValueError: If `snapshots` is empty, a number is out of range, or the snapshots have different names.

    Example:
        >>> snapshots = [
        ...     (n, p, {"weight": torch.tensor(n * (p + 1) / (p + 2))})  # of weights that grow by 1 with each update
        ...     for n in range(10, 101, 10)
        ...     for p in (3.0, 9.0)
        ... ]
        >>> post_hoc_ema(snapshots, power=6.0)["weight"].round(decimals=1)  # 100 * 7 / 8
        tensor(87.5000)

    Reference:
        Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", CVPR 2024, arXiv:2312.02696,
        section 3.2 and algorithm 3; the division by the sum is that of the authors' code.
    """
    known = sorted(snapshots, key=lambda snapshot: snapshot[0])
    if not known:
        raise ValueError("snapshots must have at least one average; got none. Take them from EMA.snapshots.")
    latest = known[-1][2]
    num_updates = known[-1][0] if num_updates is None else num_updates
    check_interval("[0, inf)", power=power)
    check_counts(1, num_updates=num_updates)
    if not known[0][0] <= num_updates <= known[-1][0]:
        raise ValueError(
            f"num_updates={num_updates!r} must be from {known[0][0]} to {known[-1][0]}, the numbers of updates of the "
            f"first and the last snapshot. Leave it out, or add snapshots of other times."
        )
    if any(tensors.keys() != latest.keys() for _, _, tensors in known):
        raise ValueError("snapshots must all have the same names of tensors. Take them from one model.")
    times = torch.tensor([float(time) for time, _, _ in known] + [float(num_updates)], dtype=torch.float64)
    powers = torch.tensor([each for _, each, _ in known] + [float(power)], dtype=torch.float64)
    products = _inner_products(times, powers)
    # Snapshots in close succession are nearly the same, so the matrix may not have full rank.
    solution = torch.linalg.lstsq(products[:-1, :-1], products[:-1, -1:], driver="gelsd").solution.flatten()
    shares = (solution / solution.sum()).tolist()  # otherwise the result would be shrunk where the fit is poor
    result: dict[str, Tensor] = {}
    for name, last in latest.items():
        if not (last.is_floating_point() or last.is_complex()):
            result[name] = last.clone()
            continue
        total = torch.zeros_like(last, dtype=torch.promote_types(last.dtype, torch.float32))
        for share, (_, _, tensors) in zip(shares, known, strict=True):
            total.add_(tensors[name].to(total), alpha=share)
        result[name] = total.to(last.dtype)
    return result


def _inner_products(times: Tensor, powers: Tensor) -> Tensor:
    """Return the products of all pairs of weights `(power + 1) * t^power / time^(power + 1)` over `0 <= t <= time`."""
    ratio = times[:, None] / times
    exponent = torch.where(ratio < 1, powers, -powers[:, None])
    scale = (powers[:, None] + 1) * (powers + 1) / (powers[:, None] + powers + 1)
    return scale * ratio**exponent / torch.maximum(times[:, None], times)


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor's
    return tensor.to("cpu", copy=True)


def read_parameters(state: Mapping[str, Any], current: EMAParameters | None, strict: bool) -> EMAParameters:
    """Return the set of weights in a saved state of EMA, possibly of an older release.

    `current`, the weights of the current model, has the expected names, and the tensors that the state lacks.
    """
    if (version := state.get("format", 1)) > FORMAT:
        raise ValueError(
            f"the checkpoint has EMA's state in format {version!r}, and this version of composer-algorithms reads up "
            f"to {FORMAT}: update composer-algorithms."
        )
    current = current or EMAParameters(None)
    saved = state["ema_model"]
    if "training_model" in state and state["ema_weights_active"]:
        saved = state["training_model"]  # older states hold both sets; this needs the one not in the model
    if "named_parameters_dict" in saved:
        parameters, buffers = saved["named_parameters_dict"], saved["named_buffers_dict"]
    elif current.named_parameters_dict:
        names = _names_as_wanted(saved, [*current.named_parameters_dict, *current.named_buffers_dict])
        found = {wanted: saved[name] for name, wanted in names.items()}
        parameters, buffers = (
            {name: found[name] for name in wanted if name in found}
            for wanted in (current.named_parameters_dict, current.named_buffers_dict)
        )
    else:
        raise RuntimeError(
            "the checkpoint has EMA's state as Composer saved it before 0.13, which does not distinguish "
            "parameters from buffers: load it after EMA has acted on Event.INIT, where it sees the model."
        )
    loaded = EMAParameters(None)
    loaded.named_parameters_dict = _fitted(parameters, current.named_parameters_dict, "parameters", strict)
    loaded.named_buffers_dict = _fitted(buffers, current.named_buffers_dict, "buffers", strict)
    return loaded


def _fitted(saved: Tensors, current: Tensors, kind: str, strict: bool) -> dict[str, Tensor]:
    # Copies: updates change the average in place, and must not change the caller's state dict.
    if not saved:  # the average had not started, or the model has no tensors of this kind
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
        # Without a common name the state belongs to another model, which is an error even if not strict.
        if strict or (kind == "parameters" and len(missing) == len(current)):
            raise ValueError(f"{message} Load it into the model that it was saved from, or leave EMA's state out.")
        _log.warning("%s Missing tensors start from those of the model.", message)
    return {name: found.get(name, tensor) for name, tensor in current.items()}


def _names_as_wanted(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    # Names in Composer's checkpoints have the "module." of DDP, which may also be part of the model's own names. Use
    # the interpretation that matches more of the wanted names.
    plain = {name: canonical_name(name) for name in saved}
    without_ddp = {name: canonical.removeprefix("module.") for name, canonical in plain.items()}
    sought = set(wanted)
    return max((plain, without_ddp), key=lambda names: len(sought.intersection(names.values())))

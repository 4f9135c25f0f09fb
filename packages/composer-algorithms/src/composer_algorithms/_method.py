"""Common parts of the algorithms: representation, events, surgery on INIT, and times in training."""

import copy
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from composer_dist.wrapping import unwrap_model
from composer_events import Algorithm, Event, Logger, NoEffectWarning, State
from composer_time import Time, TimeUnit


class NamedArguments:
    """Mixin with a `repr` that names the arguments of the constructor, each the value of the attribute of that name."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the constructor by name."""
        names, values = inspect.signature(self._own_class()).parameters, vars(self)
        # A schedule changes the attribute, and keeps the argument under this name.
        return {name: values.get(f"_initial_{name}", getattr(self, name)) for name in names}

    def __repr__(self) -> str:
        plain = {k: str(v) if isinstance(v, Time) else v for k, v in self.arguments().items()}
        arguments = (f"{name}={value!r}" for name, value in plain.items())
        return f"{self._own_class().__name__}({', '.join(arguments)})"

    def _own_class(self) -> type[Any]:
        # Checkpoints record the repr and rebuild the algorithm from it, for which they look only in this package: a
        # subclass defined elsewhere is described as the class of this package that it derives from.
        return next(one for one in type(self).__mro__ if one.__module__.startswith(f"{__package__}."))


class Method(NamedArguments, Algorithm):
    """Base of the algorithms, which act on the events in `acts_on`.

    Attributes:
        computes_losses: Whether the algorithm calls the model and its loss, in addition to the training loop.
        schedulable: The numeric arguments that `composer_optim.Schedule` may change during training.
    """

    computes_losses: ClassVar[bool] = False
    schedulable: Collection[str] = ()

    def match(self, event: Event, state: State) -> bool:
        """Return whether the event is in `acts_on`."""
        return event in (self.acts_on or ())


class ModelSurgery(Method):
    """Base of the algorithms that change the model, and with it the meaning or the names of a checkpoint's weights."""

    acts_on = frozenset({Event.INIT})

    @staticmethod
    def required_on_load() -> bool:
        """Return true: a checkpoint loads only into a model that was changed in the same way."""
        return True


class AppliedFunction(Method):
    """Base of the algorithms that call a function on `INIT`, with their own arguments.

    Attributes:
        function: Changes a model, and the optimizers if it has such a parameter, and returns the number of changes.
        counted: Name of this number in the log.
    """

    acts_on = frozenset({Event.INIT})
    function: ClassVar[Callable[..., int]]
    counted: ClassVar[str]

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Change the model, and log the number of changes."""
        arguments = self.arguments()
        if "optimizers" in inspect.signature(self.function).parameters:
            arguments["optimizers"] = state.optimizers
        log = logging.getLogger(f"composer.algorithms.{self.function.__module__.rpartition('.')[2]}")
        report(log, logger, {self.counted: self.function(state.model, **arguments)})


def log_no_effect(log: logging.Logger, method: str, model: object, why: str) -> None:
    """Log that a method has not found anything to change in a model."""
    log.warning("%s has no effect on this %s: %s.", method, type(model).__qualname__, why)


def count_or_warn(
    method: str,
    model: nn.Module,
    missing: str,
    count: int,
    advice: str = "Use ComposerGPT or a model of transformers such as GPT-2, BERT or Llama",
) -> int:
    """Return how many changes a method has made to a model, and warn if there are none, because of what is missing."""
    if not count:
        warnings.warn(
            f"{method} has no effect on this {type(unwrap_model(model)).__qualname__}: it has no {missing}. {advice}, "
            f"or leave {method} out.",
            NoEffectWarning,
            stacklevel=3,
        )
    return count


def refuse_conflicts(algorithm: Algorithm, state: State) -> None:
    """Refuse the other algorithms of a run that `algorithm.conflicts_with` names, which an engine only reports.

    Raises:
        ValueError: If there is one.
    """
    for one in state.algorithms:
        if one is not algorithm and (reason := algorithm.conflicts_with.get(name := type(one).__name__)):
            other = "another" if type(one) is type(algorithm) else type(algorithm).__name__
            raise ValueError(f"{name} cannot be combined with {other}. {reason}")


def check_initialized(method: str, *weights: Tensor) -> None:
    """Check that weights which a method reads or sets have values.

    Raises:
        ValueError: If one is on the meta device.
    """
    if any(weight.is_meta for weight in weights):
        raise ValueError(f"{method} needs weights, and those of this model are on the meta device. Initialize them.")


def record_in_config(model: nn.Module, name: str, arguments: Mapping[str, Any]) -> None:
    """Record a change that shows in no weight as `composer_<name>` in the configurations of transformers models.

    Saved with the weights, it tells those who load them to call `apply_<name>` with these arguments.
    """
    for config in own_configs(model):
        setattr(config, f"composer_{name}", dict(arguments))


def own_configs(model: nn.Module) -> list[Any]:
    """Return the configurations of the transformers models in a module, which become copies of its own.

    The caller may build other models from the same configuration, without the changes to this one.
    """
    if "transformers.modeling_utils" not in sys.modules:  # a slow import, which a model of transformers has made
        return []
    from transformers import PretrainedConfig, PreTrainedModel

    copied: dict[int, Any] = {}  # shared copies stay shared
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if isinstance(value, PretrainedConfig)}
        for name, config in held.items():
            setattr(module, name, copy.deepcopy(config, copied))
    return [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]


def report(log: logging.Logger, logger: Logger | None, counts: Mapping[str, int]) -> None:
    """Log how many modules an algorithm has changed."""
    for name, count in counts.items():
        log.info("%s: %d", name, count)
    if logger is not None:
        logger.log_hyperparameters(dict(counts))


NO_LENGTH = (
    "{} depends on the completed fraction of training, whose length is not known (max_duration is None): set "
    "state.max_duration."
)


def elapsed_fraction(state: State, owner: str) -> Time[float]:
    """Return the completed fraction of training; `owner` names in the error what needs it."""
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise RuntimeError(NO_LENGTH.format(owner))
    return elapsed


def is_reached(time: Time[Any], state: State, argument: str) -> bool:
    """Return whether training has lasted for a time, which may be a fraction of it."""
    if time.unit == TimeUnit.DURATION:
        # The start of training is known without its length.
        return time.value <= 0 or elapsed_fraction(state, f"{argument}={str(time)!r}") >= time
    return state.timestamp.get(time.unit) >= time


def parse_time(argument: str, value: object, no_unit: type[Exception] = TypeError) -> Time[Any]:
    """Convert a time string; errors name the argument, and `no_unit` is that for any other type."""
    if isinstance(value, Time):
        return value
    if not isinstance(value, str):
        raise no_unit(f"{argument}={value!r} has no unit: pass a time string such as '0.7dur', '10ba' or '7ep'.")
    try:
        return Time.from_timestring(value)
    except ValueError as error:
        raise ValueError(f"{argument}={value!r} is not a time: {error}") from error

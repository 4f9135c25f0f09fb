"""The clock of a training run."""

from __future__ import annotations

import operator
from datetime import timedelta

from composer_time.serializable import Serializable
from composer_time.time import Time, TimeUnit

__all__ = ["Timestamp"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol, TypedDict, TypeVar, Unpack

    T = TypeVar("T")
    T_co = TypeVar("T_co", covariant=True)

    class _Reading(Protocol[T_co]):
        """Read-only property, for type checkers."""

        def __get__(self, instance: Timestamp, owner: type[Timestamp]) -> T_co: ...

    class Fields(TypedDict, total=False):
        """Arguments of the constructor of `Timestamp`, all optional."""

        iteration: int | Time[int] | str | None
        epoch: int | Time[int] | str | None
        batch: int | Time[int] | str | None
        sample: int | Time[int] | str | None
        token: int | Time[int] | str | None
        epoch_in_iteration: int | Time[int] | str | None
        token_in_iteration: int | Time[int] | str | None
        batch_in_epoch: int | Time[int] | str | None
        sample_in_epoch: int | Time[int] | str | None
        token_in_epoch: int | Time[int] | str | None
        total_wct: timedelta | None
        iteration_wct: timedelta | None
        epoch_wct: timedelta | None
        batch_wct: timedelta | None


COUNTERS = {
    "iteration": TimeUnit.ITERATION,
    "epoch": TimeUnit.EPOCH,
    "batch": TimeUnit.BATCH,
    "sample": TimeUnit.SAMPLE,
    "token": TimeUnit.TOKEN,
    "epoch_in_iteration": TimeUnit.EPOCH,
    "token_in_iteration": TimeUnit.TOKEN,
    "batch_in_epoch": TimeUnit.BATCH,
    "sample_in_epoch": TimeUnit.SAMPLE,
    "token_in_epoch": TimeUnit.TOKEN,
}
CLOCKS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
# Old checkpoints lack the counters of iterations and the clocks.
REQUIRED = ("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
NO_TIME = timedelta(0)


def _read(slot: str, kind: type[T], doc: str) -> _Reading[T]:
    """Return a property that reads a slot without executing Python code."""
    del kind  # used only by type checkers
    return property(operator.attrgetter(slot), doc=doc)  # pyright: ignore[reportReturnType]  # its own __get__ has a wider type


def _comparison(compare: Callable[[int, Any], bool]) -> Callable[[Timestamp, Time[Any] | str], bool]:
    def method(self: Any, other: object) -> bool:
        time = _comparable(other)
        return NotImplemented if time is None else compare(self._reading(time.unit), time.value)

    return method


class Timestamp(Serializable):
    """Progress of a training run, in every unit.

    The loop never changes a `Timestamp`: `to_next_batch`, `to_next_epoch` and `to_next_iteration` return new ones. It
    compares with a `Time` or a time string by the counter of that unit, so `timestamp < '10ep'` is true while fewer
    than ten epochs are done. Two timestamps are equal if all counters and clocks are; they have no order and no hash.

    Counters accept an `int`, or a `Time` or time string in their own unit.

    Args:
        iteration: Iterations done.
        epoch: Epochs done.
        batch: Batches done.
        sample: Samples seen.
        token: Tokens seen.
        epoch_in_iteration: Epochs done in this iteration.
        token_in_iteration: Tokens seen in this iteration.
        batch_in_epoch: Batches done in this epoch.
        sample_in_epoch: Samples seen in this epoch.
        token_in_epoch: Tokens seen in this epoch.
        total_wct: Wall-clock time trained.
        iteration_wct: Wall-clock time trained in this iteration.
        epoch_wct: Wall-clock time trained in this epoch.
        batch_wct: Wall-clock time of the last batch.

    Raises:
        ValueError: If a counter has another unit, or is text that is not a time string.
        TypeError: If an argument has the wrong type.

    Example:
        >>> timestamp = Timestamp(epoch=1, batch=100).to_next_batch(samples=32)
        >>> timestamp.batch, timestamp.sample
        (Time(101, TimeUnit.BATCH), Time(32, TimeUnit.SAMPLE))
        >>> timestamp < "2ep"
        True
    """

    # Plain ints and timedeltas: the loop advances and compares a timestamp at every step, and `Time` objects are
    # created only when a counter is read.
    __slots__ = tuple(f"_{name}" for name in (*COUNTERS, *CLOCKS))

    def __init__(
        self,
        iteration: int | Time[int] | str = 0,
        epoch: int | Time[int] | str = 0,
        batch: int | Time[int] | str = 0,
        sample: int | Time[int] | str = 0,
        token: int | Time[int] | str = 0,
        epoch_in_iteration: int | Time[int] | str = 0,
        token_in_iteration: int | Time[int] | str = 0,
        batch_in_epoch: int | Time[int] | str = 0,
        sample_in_epoch: int | Time[int] | str = 0,
        token_in_epoch: int | Time[int] | str = 0,
        total_wct: timedelta = NO_TIME,
        iteration_wct: timedelta = NO_TIME,
        epoch_wct: timedelta = NO_TIME,
        batch_wct: timedelta = NO_TIME,
    ) -> None:
        self._iteration = plain_count("iteration", iteration, TimeUnit.ITERATION)
        self._epoch = plain_count("epoch", epoch, TimeUnit.EPOCH)
        self._batch = plain_count("batch", batch, TimeUnit.BATCH)
        self._sample = plain_count("sample", sample, TimeUnit.SAMPLE)
        self._token = plain_count("token", token, TimeUnit.TOKEN)
        self._epoch_in_iteration = plain_count("epoch_in_iteration", epoch_in_iteration, TimeUnit.EPOCH)
        self._token_in_iteration = plain_count("token_in_iteration", token_in_iteration, TimeUnit.TOKEN)
        self._batch_in_epoch = plain_count("batch_in_epoch", batch_in_epoch, TimeUnit.BATCH)
        self._sample_in_epoch = plain_count("sample_in_epoch", sample_in_epoch, TimeUnit.SAMPLE)
        self._token_in_epoch = plain_count("token_in_epoch", token_in_epoch, TimeUnit.TOKEN)
        self._total_wct = checked_clock("total_wct", total_wct)
        self._iteration_wct = checked_clock("iteration_wct", iteration_wct)
        self._epoch_wct = checked_clock("epoch_wct", epoch_wct)
        self._batch_wct = checked_clock("batch_wct", batch_wct)

    @property
    def iteration(self) -> Time[int]:
        """Iterations done."""
        return Time(self._iteration, TimeUnit.ITERATION)

    @property
    def epoch(self) -> Time[int]:
        """Epochs done."""
        return Time(self._epoch, TimeUnit.EPOCH)

    @property
    def batch(self) -> Time[int]:
        """Batches done."""
        return Time(self._batch, TimeUnit.BATCH)

    @property
    def sample(self) -> Time[int]:
        """Samples seen."""
        return Time(self._sample, TimeUnit.SAMPLE)

    @property
    def token(self) -> Time[int]:
        """Tokens seen."""
        return Time(self._token, TimeUnit.TOKEN)

    @property
    def epoch_in_iteration(self) -> Time[int]:
        """Epochs done in this iteration; the only counter that can be set."""
        return Time(self._epoch_in_iteration, TimeUnit.EPOCH)

    @epoch_in_iteration.setter
    def epoch_in_iteration(self, epoch_in_iteration: int | Time[int] | str) -> None:
        self._epoch_in_iteration = plain_count("epoch_in_iteration", epoch_in_iteration, TimeUnit.EPOCH)

    @property
    def token_in_iteration(self) -> Time[int]:
        """Tokens seen in this iteration."""
        return Time(self._token_in_iteration, TimeUnit.TOKEN)

    @property
    def batch_in_epoch(self) -> Time[int]:
        """Batches done in this epoch."""
        return Time(self._batch_in_epoch, TimeUnit.BATCH)

    @property
    def sample_in_epoch(self) -> Time[int]:
        """Samples seen in this epoch."""
        return Time(self._sample_in_epoch, TimeUnit.SAMPLE)

    @property
    def token_in_epoch(self) -> Time[int]:
        """Tokens seen in this epoch."""
        return Time(self._token_in_epoch, TimeUnit.TOKEN)

    # For code that reads them at every step: no Python code runs, and no `Time` is created for counters.
    num_iterations = _read("_iteration", int, "Iterations done, as an `int`.")
    num_epochs = _read("_epoch", int, "Epochs done, as an `int`.")
    num_batches = _read("_batch", int, "Batches done, as an `int`.")
    num_samples = _read("_sample", int, "Samples seen, as an `int`.")
    num_tokens = _read("_token", int, "Tokens seen, as an `int`.")
    num_batches_in_epoch = _read("_batch_in_epoch", int, "Batches done in this epoch, as an `int`.")
    num_samples_in_epoch = _read("_sample_in_epoch", int, "Samples seen in this epoch, as an `int`.")
    num_tokens_in_epoch = _read("_token_in_epoch", int, "Tokens seen in this epoch, as an `int`.")
    total_wct = _read("_total_wct", timedelta, "Wall-clock time trained.")

    iteration_wct = _read("_iteration_wct", timedelta, "Wall-clock time trained in this iteration.")
    epoch_wct = _read("_epoch_wct", timedelta, "Wall-clock time trained in this epoch.")
    batch_wct = _read("_batch_wct", timedelta, "Wall-clock time of the last batch.")

    def get(self, unit: TimeUnit | str) -> Time[int]:
        """Return the progress of the run in one unit.

        Args:
            unit: A unit or its name. `TimeUnit.SECOND` returns the whole seconds of `total_wct`.

        Raises:
            ValueError: If the unit is `TimeUnit.DURATION` or unknown.
        """
        if type(unit) is not TimeUnit:
            unit = TimeUnit(unit)
        return Time(self._reading(unit), unit)

    def to_next_batch(
        self,
        samples: int | Time[int] | str = 0,
        tokens: int | Time[int] | str = 0,
        duration: timedelta | None = None,
    ) -> Timestamp:
        """Return the timestamp after one more batch.

        Args:
            samples: Number of samples in the batch.
            tokens: Number of tokens in the batch.
            duration: Its wall-clock time; `None` counts as 0.
        """
        # The common case of two plain numbers needs no function call.
        if type(samples) is not int or type(tokens) is not int:
            samples = plain_count("samples", samples, TimeUnit.SAMPLE)
            tokens = plain_count("tokens", tokens, TimeUnit.TOKEN)
        after = self._after(duration)
        after._batch += 1
        after._batch_in_epoch += 1
        after._sample += samples
        after._sample_in_epoch += samples
        after._token += tokens
        after._token_in_epoch += tokens
        after._token_in_iteration += tokens
        return after

    def to_next_epoch(self, duration: timedelta | None = None) -> Timestamp:
        """Return the timestamp after the end of an epoch, with the counters and clocks of the epoch set to zero.

        Args:
            duration: The wall-clock time since the last batch; `None` counts as 0.
        """
        after = self._after(duration)
        after._epoch += 1
        after._epoch_in_iteration += 1
        after._batch_in_epoch = after._sample_in_epoch = after._token_in_epoch = 0
        after._epoch_wct = after._batch_wct = NO_TIME
        return after

    def to_next_iteration(self, duration: timedelta | None = None) -> Timestamp:
        """Return the timestamp after the end of an iteration, with its counters and clocks set to zero.

        Args:
            duration: The wall-clock time since the last batch; `None` counts as 0.
        """
        after = self._after(duration)
        after._iteration += 1
        after._epoch_in_iteration = after._token_in_iteration = 0
        after._batch_in_epoch = after._sample_in_epoch = after._token_in_epoch = 0
        after._iteration_wct = after._epoch_wct = after._batch_wct = NO_TIME
        return after

    def copy(self, **overrides: Unpack[Fields]) -> Timestamp:
        """Return a copy with some counters or clocks replaced.

        Args:
            overrides: Arguments of the constructor; `None` keeps the current value.

        Example:
            >>> Timestamp(epoch=2, batch=30).copy(batch="31ba").batch
            Time(31, TimeUnit.BATCH)
        """
        if not overrides:
            # Much faster than the constructor, which checks every argument.
            same = self._after(None)
            # `_after` sets the time of the last batch to the duration that it adds.
            same._batch_wct = self._batch_wct
            return same
        fields = self.state_dict()
        fields.update((name, value) for name, value in overrides.items() if value is not None)
        return Timestamp(**fields)

    def state_dict(self) -> dict[str, Any]:
        """Return every counter as an `int` and every clock as a `datetime.timedelta`, by constructor name."""
        return {name: getattr(self, f"_{name}") for name in (*COUNTERS, *CLOCKS)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; on an error nothing is changed.

        The clocks and the three counters of iterations may be missing, as in old checkpoints, and then keep their
        values.

        Args:
            state: The dictionary returned by `state_dict`.

        Raises:
            KeyError: If another counter is missing.
            ValueError: If a counter has another unit.
            TypeError: If an entry has the wrong type.
        """
        missing = [name for name in REQUIRED if name not in state]
        if missing:
            raise KeyError(
                f"the state of a Timestamp lacks {', '.join(missing)}; it has {sorted(state)}. Pass what "
                "Timestamp.state_dict() returned."
            )
        # Everything is converted before the first attribute is set, so that an error changes nothing.
        fields: dict[str, object] = {
            **{name: plain_count(name, state[name], unit) for name, unit in COUNTERS.items() if name in state},
            **{name: checked_clock(name, state[name]) for name in CLOCKS if name in state},
        }
        for name, value in fields.items():
            setattr(self, f"_{name}", value)

    def __repr__(self) -> str:
        return f"Timestamp({', '.join(f'{name}={value!r}' for name, value in self.state_dict().items())})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Timestamp):
            return self.state_dict() == other.state_dict()
        time = _comparable(other)
        return NotImplemented if time is None else self._reading(time.unit) == time.value

    # Unhashable, because loading a state changes a timestamp in place.
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # the data model's way to say "unhashable"

    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)

    def _reading(self, unit: TimeUnit) -> int:
        """Return the counter of a unit; composer_optim's loop overrides it to reject units that it does not count."""
        read = _READ.get(unit)
        if read is not None:
            return read(self)
        if unit is TimeUnit.SECOND:
            return int(self._total_wct.total_seconds())
        raise ValueError(
            f"a Timestamp has no counter for {unit.value!r}, a fraction of a whole that it does not know. Multiply "
            "the length of training by the fraction first, as in Time(10, 'ep') * '0.5dur'."
        )

    def _after(self, duration: timedelta | None) -> Timestamp:
        """Return a copy with advanced clocks, without repeating the checks of the constructor."""
        # Attribute by attribute, since a loop over the names would take longer in every training step.
        after = object.__new__(Timestamp)
        after._iteration = self._iteration
        after._epoch = self._epoch
        after._batch = self._batch
        after._sample = self._sample
        after._token = self._token
        after._epoch_in_iteration = self._epoch_in_iteration
        after._token_in_iteration = self._token_in_iteration
        after._batch_in_epoch = self._batch_in_epoch
        after._sample_in_epoch = self._sample_in_epoch
        after._token_in_epoch = self._token_in_epoch
        duration = NO_TIME if duration is None else checked_clock("duration", duration)
        after._total_wct = self._total_wct + duration
        after._iteration_wct = self._iteration_wct + duration
        after._epoch_wct = self._epoch_wct + duration
        after._batch_wct = duration
        return after


_READ = {unit: operator.attrgetter(f"_{name}") for name, unit in COUNTERS.items() if "_in_" not in name}


def _comparable(other: object) -> Time[Any] | None:
    """Convert an operand that a timestamp compares with to a `Time`; return `None` for any other type."""
    if isinstance(other, Time):
        return other  # pyright: ignore[reportUnknownVariableType]  # isinstance cannot say Time[Any]
    return Time.from_input(other) if isinstance(other, str) else None


def plain_count(name: str, count: int | Time[int] | str, unit: TimeUnit) -> int:
    """Convert the value of a counter to a plain number."""
    if type(count) is int:  # the common case; a bool is converted below
        return count
    if not isinstance(count, (int, Time, str)):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
        raise TypeError(
            f"{name}={count!r} is of type {type(count).__name__}. A Timestamp counts with an int, a Time or a time "
            f"string such as '10{unit.value}'. Convert numbers of other kinds with int(...)."
        )
    time = Time.from_input(count, unit)
    if time.unit is not unit:
        raise ValueError(
            f"{name}={count!r} is counted in {time.unit.value!r}, and a Timestamp counts it in {unit.value!r}. Pass "
            f"an int or a length such as '10{unit.value}'."
        )
    return time.value


def checked_clock(name: str, duration: timedelta) -> timedelta:
    """Return the duration if it is a `timedelta`."""
    if not isinstance(duration, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
        raise TypeError(
            f"{name}={duration!r} is of type {type(duration).__name__}, not a datetime.timedelta. Pass one, such as "
            "datetime.timedelta(seconds=1.5)."
        )
    return duration

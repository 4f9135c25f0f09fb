"""Schedules of numbers other than the learning rate: settings of an optimizer, and arguments of algorithms."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

from composer_optim.schedulers import as_finite, check_flag
from composer_time import Time, TimeUnit

__all__ = ["BoundSchedule", "Schedule"]


class Schedule:
    """Schedule of any number that training reads: weight decay, momentum, betas, or an argument of an algorithm.

    Pass it to the Trainer in `schedulers`, next to those of the learning rate, or to `compile_composer_schedulers`. At
    each step the number is set to its initial value times the curve. Schedulers of the learning rate are multiplied by
    a schedule of `'lr'`, which is useful for some of the parameter groups.

    Args:
        target: A setting of the parameter groups (`'weight_decay'`, `'momentum'`, `'betas[1]'`, `'lr'`), the class of
            an algorithm and its argument (`'MixUp.alpha'`, `'EMA.half_life'`), or `'batch_size'`: the samples of a
            batch over all ranks, at most those of the dataloader's batches, which the Trainer divides.
        curve: Any scheduler, or a function of the state.
        groups: The parameter groups: an index, the `'role'` or `'name'` of groups, a pattern such as `'*.bias'` that
            the names of all parameters of a group match, or several of these. `None`: all that have the setting.
        absolute: Whether the curve returns the value itself instead of a factor.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `target` is not a name of this form, or `groups` is given for an algorithm.

    Example:
        >>> from composer_optim import LinearScheduler
        >>> momentum = Schedule("momentum", LinearScheduler(0.85, 0.95, t_max="300ba"), absolute=True)
        >>> blending = Schedule("MixUp.alpha", LinearScheduler(1.0, 0.0))
    """

    def __init__(
        self,
        target: str,
        curve: Callable[..., float],
        *,
        groups: int | str | Sequence[int | str] | None = None,
        absolute: bool = False,
    ) -> None:
        match = re.fullmatch(r"(?:(\w+)\.)?(\w+)(?:\[(\d+)\])?", target) if isinstance(target, str) else None
        if match is None:
            raise ValueError(
                f"target={target!r} must be the name of a setting of the optimizer, such as 'weight_decay' or "
                f"'betas[1]', or of an argument of an algorithm, such as 'MixUp.alpha'."
            )
        check_flag("absolute", absolute)
        self.target = target
        self.curve = curve
        self.groups = (groups,) if isinstance(groups, int | str) else groups if groups is None else tuple(groups)
        self.absolute = absolute
        self._owner, self._name, index = match.groups()
        self._index = None if index is None else int(index)
        if (self._owner is not None or target == "batch_size") and groups is not None:
            raise ValueError(f"groups={groups!r} selects parameter groups, and {target!r} is not a setting of them.")

    def __call__(self, state: Any, *ratio: float) -> float:
        """Return the value of the curve."""
        return self.curve(state, *ratio)

    def __repr__(self) -> str:
        curve = getattr(self.curve, "__name__", f"{type(self.curve).__name__}(...)")
        return f"Schedule({self.target!r}, {curve}, groups={self.groups!r}, absolute={self.absolute!r})"

    def find(self, state: Any) -> "list[tuple[str, Any]]":
        """Return the name and the owner of each number: the index of a parameter group, or an algorithm.

        Raises:
            ValueError: If nothing is found, or it is not a number, or it is 0, which no factor changes.
        """
        found = [self._find_algorithm(state)] if self._owner is not None else self._find_others(state)
        for name, owner in found:
            value = self._initial(_owner_in(owner, state))
            if _number(value) is None:
                raise ValueError(f"{name} is {value!r}, which is not a number or a time, so it cannot be scheduled.")
            # An absolute learning rate is a factor as well, by which the schedulers of all groups multiply.
            if _number(value) == 0 and (not self.absolute or self.target == "lr"):
                way_out = "." if self.target == "lr" else ", or use absolute=True."
                raise ValueError(f"{name} is 0, and remains 0 times any factor. Set it to its largest value{way_out}")
        return found

    def set(self, owner: Any, factor: float, state: Any) -> float:
        """Set the number of an owner by the current value of the curve, and return it."""
        owner = _owner_in(owner, state)
        initial = self._initial(owner)
        base = _number(initial)
        value = as_finite(self.target, factor if self.absolute or base is None else base * factor)
        if not isinstance(owner, dict):
            time = Time.from_timestring(initial) if isinstance(initial, str) else initial
            if isinstance(time, Time):  # only fractions of the training are not whole; a length is 1 or more
                time = Time(value if time.unit is TimeUnit.DURATION else max(1, round(value)), time.unit)
            setattr(owner, self._name, time if isinstance(time, Time) else value)
            if self.target == "batch_size":
                return owner.batch_size  # which has been rounded
        elif self._index is None:
            owner[self._name] = value
        else:
            values = list(owner[self._name])
            values[self._index] = value
            owner[self._name] = tuple(values)
        return value

    def _initial(self, owner: Any) -> Any:
        """Return the number before any schedule has changed it, which is stored next to it."""
        if isinstance(owner, dict):  # as `initial_lr`, and saved with the optimizer as that
            value = owner.setdefault(f"initial_{self._name}", owner[self._name])
            return value if self._index is None else value[self._index]
        return vars(owner).setdefault(f"_initial_{self._name}", getattr(owner, self._name))

    def _find_algorithm(self, state: Any) -> tuple[str, Any]:
        algorithms = list(getattr(state, "algorithms", ()))
        owners = [each for each in algorithms if type(each).__name__ == self._owner]
        if len(owners) != 1:
            present = ", ".join(type(each).__name__ for each in algorithms) or "none"
            raise ValueError(
                f"target={self.target!r} must name the class of exactly one algorithm; the algorithms are: {present}."
            )
        possible = getattr(owners[0], "schedulable", None)  # which arguments are read again at each batch
        if possible is None:
            possible = [name for name in vars(owners[0]) if _number(getattr(owners[0], name)) is not None]
        if self._name not in possible or self._index is not None:
            raise ValueError(
                f"target={self.target!r} is not an argument of {self._owner} that can change during training. Those "
                f"that can: {', '.join(sorted(possible)) or 'none'}."
            )
        return self.target, owners[0]

    def _find_others(self, state: Any) -> "list[tuple[str, Any]]":
        if self.target != "batch_size":
            return self._find_groups(state)
        if getattr(getattr(state, "data_position", None), "sizes", None) is None:
            raise ValueError("target='batch_size' needs a loop that divides batches, as the Trainer does.")
        return [(self.target, None)]

    def _find_groups(self, state: Any) -> "list[tuple[str, Any]]":
        groups = groups_of(state)
        chosen = list(range(len(groups))) if self.groups is None else sorted(self._chosen(groups, state))
        lacking = [index for index in chosen if not self._has_setting(groups[index])]
        if lacking and (self.groups is not None or len(lacking) == len(chosen)):
            numbers = sorted(_settings(groups[lacking[0]]))
            raise ValueError(
                f"target={self.target!r} is not a setting of parameter group {lacking[0]}, which has: "
                f"{', '.join(numbers)}. A target of another form is an argument of an algorithm: 'MixUp.alpha'."
            )
        return [(f"{self.target}/group{index}", index) for index in chosen if index not in lacking]

    def _has_setting(self, group: Mapping[str, Any]) -> bool:
        value = group.get(self._name)
        return value is not None and (self._index is None or (isinstance(value, Sequence) and self._index < len(value)))

    def _chosen(self, groups: Sequence[Mapping[str, Any]], state: Any) -> Iterator[int]:
        names = _names(groups, state)
        for choice in self.groups or ():
            if isinstance(choice, str):
                yield from _matching(choice, groups, names)
            elif 0 <= choice < len(groups):
                yield choice
            else:
                raise ValueError(f"groups={choice!r} must be the index of one of {len(groups)} parameter groups.")


class BoundSchedule:
    """A schedule for one state, with the methods of a PyTorch scheduler that a training loop calls.

    Attributes:
        optimizer: `None`, because the schedule does not set learning rates.
        values: The numbers that the latest step has set, by name.
    """

    optimizer = None

    def __init__(self, schedule: Schedule, ratio: tuple[float, ...], state: Any) -> None:
        self.schedule = schedule
        self._composer_state = state
        self._composer_schedulers = (schedule,)
        self._ratio = ratio
        self._owners = schedule.find(state)
        self.values: dict[str, float] = {}
        self.step()

    def step(self) -> None:
        """Set the numbers for the current time."""
        state = self._composer_state
        factor = self.schedule(state, *self._ratio)
        self.values = {name: self.schedule.set(owner, factor, state) for name, owner in self._owners}

    def state_dict(self) -> dict[str, Any]:
        """Return the target. The numbers are functions of the time, so there is nothing else to save."""
        return {"target": self.schedule.target}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load nothing: the next step sets the numbers."""


def groups_of(state: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimizers."""
    return [group for optimizer in state.optimizers for group in optimizer.param_groups]


def _owner_in(owner: Any, state: Any) -> Any:
    if owner is None:  # the dataloader may be another one in the next fit
        return state.data_position.sizes
    return groups_of(state)[owner] if isinstance(owner, int) else owner  # by index, since a load replaces the groups


def check_targets(schedules: Sequence[Schedule], state: Any) -> None:
    """Raise `ValueError` if two schedules set the same number."""
    seen: dict[str, Schedule] = {}
    for schedule in schedules:
        for name, _ in schedule.find(state):
            if name in seen:
                raise ValueError(
                    f"schedulers holds two schedules of {name}, {seen[name]!r} and {schedule!r}. Each would overwrite "
                    f"the other: keep one of them, or give them different groups."
                )
            seen[name] = schedule


def _matching(choice: str, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> list[int]:
    """Return the groups with a role or name, or otherwise those whose parameters match a pattern."""
    if labeled := [i for i, group in enumerate(groups) if choice in (group.get("role"), group.get("name"))]:
        return labeled
    matches = [[fnmatchcase(name, choice) for name in of_group] for of_group in names]
    partly = [i for i, each in enumerate(matches) if any(each) and not all(each)]
    found = [i for i, each in enumerate(matches) if each and all(each)]
    if partly or not found:
        why = f"only some parameters of group {partly[0]}" if partly else "no parameter group"
        raise ValueError(
            f"groups={choice!r} matches {why}. Create the optimizer with a group for these parameters, or give an "
            f"index, a role or another pattern."
        )
    return found


def _number(value: object) -> float | None:
    """Return the value of a number or of a length of time, and `None` for anything else."""
    if isinstance(value, str):
        try:
            value = Time.from_timestring(value)
        except ValueError:
            return None
    if isinstance(value, Time):
        return float(value.value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def _settings(group: Mapping[str, Any]) -> Iterator[str]:
    for name, value in group.items():
        if _number(value) is not None and not name.startswith("initial_"):
            yield name
        elif name == "betas":
            yield from (f"betas[{index}]" for index in range(len(value)))


def _names(groups: Sequence[Mapping[str, Any]], state: Any) -> list[list[str]]:
    """Return the names of the parameters of each group, as the optimizer or the model has them."""
    model = getattr(state, "model", None)
    names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    return [group.get("param_names") or [names.get(id(each), "") for each in group["params"]] for group in groups]

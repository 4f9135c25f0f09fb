"""Older spellings that the engine understands."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_events.algorithm import Algorithm
    from composer_events.state import State


def adopt_algorithms(state: State, algorithms: Algorithm | Sequence[Algorithm]) -> None:
    """Append what was given to `Engine` as `algorithms` to the state's."""
    warnings.warn(
        "Engine(state, algorithms=...) is an older spelling, kept until 1.0. Put the algorithms in the state instead: "
        "`State(..., algorithms=...)` or `state.algorithms.append(...)`.",
        DeprecationWarning,
        stacklevel=3,
    )
    state.algorithms.extend(algorithms if isinstance(algorithms, Sequence) else [algorithms])

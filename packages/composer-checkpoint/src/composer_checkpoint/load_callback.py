"""Loading one more checkpoint at an event of training."""

import os
from typing import TYPE_CHECKING, Any

from composer_checkpoint.ignore_keys import IgnoreKeys, check_ignore_keys
from composer_checkpoint.loader import load_checkpoint
from composer_dist.strategy import unwrap_model
from composer_events.arguments import check_flags, check_places
from composer_events.callback import Callback
from composer_events.event import Event

if TYPE_CHECKING:
    from composer_events import Logger, State

__all__ = ["LoadCheckpoint"]


class LoadCheckpoint(Callback):
    """Load a checkpoint at an event, whatever else is loaded. Resuming by `autoresume` does not know of it.

    Args:
        load_path: As in `load_checkpoint`.
        load_weights_only: Load the model, and nothing else.
        strict_model_weights: Whether weights that are missing or too many are an error, with `load_weights_only`.
        ignore_keys: What not to load: patterns or a function.
        event: When. Before the checkpoint of the run is looked for, by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `load_path` is empty, or there is no such event.
    """

    def __init__(
        self,
        load_path: str | os.PathLike[str],
        load_weights_only: bool = False,
        strict_model_weights: bool = True,
        ignore_keys: IgnoreKeys | None = None,
        event: str | Event = Event.BEFORE_LOAD,
    ) -> None:
        check_places(load_path=load_path)
        check_flags(may_be_none=True, load_weights_only=load_weights_only, strict_model_weights=strict_model_weights)
        check_ignore_keys("ignore_keys", ignore_keys)
        self.load_path = os.fspath(load_path)
        if not self.load_path:
            raise ValueError("load_path='' names no checkpoint. Pass a path or an address.")
        if not isinstance(event, str | Event):
            raise TypeError(f"event={event!r} is no event. Pass one such as Event.BEFORE_LOAD, or its name.")
        self.load_weights_only = load_weights_only
        self.strict_model_weights = strict_model_weights
        self.ignore_keys = ignore_keys
        self.event = Event(event)

    def run_event(self, event: Event, state: "State", logger: "Logger") -> None:
        """Load, if it is time."""
        if event is self.event:
            self._load(state, logger)

    def _load(self, state: "State", logger: "Logger") -> None:
        # A model that saves its adapter alone is loaded whole from a checkpoint of before the adapter.
        model: Any = unwrap_model(state.model)
        saves_adapter_alone = getattr(model, "should_save_peft_only", None)
        load_path = state.load_path
        if saves_adapter_alone is not None:
            model.should_save_peft_only = False
        try:
            load_checkpoint(
                path=self.load_path,
                state=state,
                logger=logger,
                load_weights_only=self.load_weights_only,
                strict_model_weights=self.strict_model_weights,
                ignore_keys=self.ignore_keys,
            )
        finally:
            state.load_path = load_path
            if saves_adapter_alone is not None:
                model.should_save_peft_only = saves_adapter_alone

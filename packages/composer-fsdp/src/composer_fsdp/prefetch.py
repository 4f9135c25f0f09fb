"""Which units' weights are gathered ahead of their turn."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["Prefetching"]


class Prefetching:
    """Tells each unit which others to gather ahead.

    The order is that of the first forward pass; until then that in which the model lists them.

    Args:
        units: The sharded modules by name, in the order of the model.
        settings: Of each unit by its name: `(backward_prefetch, limit, forward_limit)`, with a limit of 0 for none.

    Attributes:
        backward: Of each unit, the names of those gathered ahead in the backward pass. It is left out where torch's own
            order is kept, one unit after the unit's turn.
        forward: The same for the forward pass.
    """

    def __init__(self, units: Mapping[str, nn.Module], settings: Mapping[str, tuple[str, int, int]]) -> None:
        self.backward: dict[str, list[str]] = {}
        self.forward: dict[str, list[str]] = {}
        self._units = units
        self._settings = settings
        self._order: list[str] = []
        self._hooks: list[Any] = []
        if any(_is_explicit(*setting) for setting in settings.values()):
            self._apply(list(units))
            self._hooks = [
                module.register_forward_pre_hook(partial(self._record, name)) for name, module in units.items()
            ]

    def _record(self, name: str, _: nn.Module, __: Any) -> None:
        if name not in self._order:
            self._order.append(name)
        if len(self._order) == len(self._units):
            for hook in self._hooks:
                hook.remove()
            self._apply(self._order)

    def _apply(self, order: Sequence[str]) -> None:
        for index, name in enumerate(order):
            kind, limit, forward_limit = self._settings[name]
            unit = self._units[name]
            assert isinstance(unit, FSDPModule)
            if kind == "NONE":
                self.backward[name] = []
                # An empty list would mean torch's own order; a unit that is gathered already is not gathered again.
                unit.set_modules_to_backward_prefetch([unit])
            elif kind == "BACKWARD_PRE" or limit > 1:
                self.backward[name] = list(reversed(order[max(0, index - limit) : index]))
                unit.set_modules_to_backward_prefetch(self._modules(self.backward[name]) or [unit])
            if forward_limit:
                self.forward[name] = list(order[index + 1 : index + 1 + forward_limit])
                unit.set_modules_to_forward_prefetch(self._modules(self.forward[name]))

    def _modules(self, names: Sequence[str]) -> list[FSDPModule]:
        return [module for name in names if isinstance(module := self._units[name], FSDPModule)]


def _is_explicit(kind: str, limit: int, forward_limit: int) -> bool:
    return kind != "BACKWARD_POST" or limit > 1 or forward_limit > 0

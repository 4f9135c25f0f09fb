"""What is going on in a training step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves  # torch has no public name for it

from composer_fsdp.wrap_rules import Unit

__all__ = ["Stage"]


class Stage:
    """Knows which phase of a step and which unit runs.

    Attributes:
        phase: `'forward'`, `'backward'`, or words for another one.
    """

    def __init__(self) -> None:
        self.phase = "the beginning"
        self._units: list[str] = []
        self._backward = ""

    def place(self) -> str:
        """Say what is going on, in words that follow `in`."""
        if self.phase == "backward":
            return f"backward of {self._backward or 'the loss'}"
        if self.phase == "forward":
            return f"forward of {self._units[-1]}" if self._units else "the loss"
        return self.phase

    def watch(self, units: Sequence[Unit]) -> None:
        """Follow which unit runs."""
        for unit in units:
            name = unit.name or "the model's outermost unit"
            unit.module.register_forward_pre_hook(lambda *_, name=name: self._units.append(name))
            unit.module.register_forward_hook(lambda _, __, output, name=name: self._leave(name, output))

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase, self._backward = phase, ""
        self._units.clear()

    def _leave(self, name: str, output: Any) -> None:
        self._units.pop()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._go_back(name))

    def _go_back(self, name: str) -> None:
        self._backward = name

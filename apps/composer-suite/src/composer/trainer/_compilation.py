"""Which model is compiled by `torch.compile`, and how."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Compilation"]

# The name that `python_log_level` of a Trainer reaches.
_log = logging.getLogger("composer.trainer.trainer")


@dataclass(frozen=True, slots=True)
class Compilation:
    """The model that was given, and the way in which it runs compiled.

    A module is compiled in place: its class, its attributes and the names in its state dict stay what they are.

    Attributes:
        model: The model itself, also if it was given inside of what `torch.compile` returns.
        config: Arguments of `torch.compile`; `None` for a model that runs as it is written, or is compiled already.
    """

    model: Any
    config: dict[str, Any] | None
    is_compiled: bool

    @classmethod
    def of(cls, config: Mapping[str, Any] | None, model: Any) -> Compilation:
        """Check what the user gave, and take the model out of its compiled wrapper.

        Raises:
            TypeError: If `config` is no dict, or has a key that `torch.compile` does not know.
            ValueError: If `torch.compile` refuses what a key says, such as a backend that is not there.
        """
        if config is not None:
            _check(config)
        inner = getattr(model, "_orig_mod", None)  # where `torch.compile` keeps it
        if not (isinstance(model, nn.Module) and isinstance(inner, nn.Module)):
            return cls(model, None if config is None else dict(config), is_compiled=config is not None)
        if config is not None:
            _log.warning("`model` is already compiled with `torch.compile`; compile_config=%r is ignored.", config)
        else:
            _log.warning("`model` is already compiled with `torch.compile`; it trains as it was compiled.")
        # PyTorch has no public way to run a module in place as its compiled wrapper does. These are the two attributes
        # by which `Module.compile` itself does it.
        vars(inner)["_compiled_call_impl"] = vars(model)["dynamo_ctx"](inner._call_impl)
        return cls(inner, None, is_compiled=True)

    def apply(self, model: nn.Module) -> None:
        """Let a model, perhaps wrapped for several ranks, run compiled from its next call on."""
        if self.config is not None:
            model.compile(**self.config)


def _check(config: Any) -> None:
    if not isinstance(config, Mapping):
        raise TypeError(
            f"compile_config={config!r} is no dict of arguments of torch.compile. Give one, such as "
            "{'mode': 'reduce-overhead'}, or {} for the defaults."
        )
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    unknown = [name for name in config if name not in known]
    if unknown:
        raise TypeError(
            f"compile_config has {unknown[0]!r}, which is no argument of torch.compile. Those are {', '.join(known)}."
        )
    try:
        # It looks the backend and all settings up at once, and compiles at the first call, which never comes.
        torch.compile(lambda: None, **config)
    except Exception as error:
        raise ValueError(
            f"compile_config={dict(config)!r} is refused by torch.compile: {error} Backends here are "
            f"{', '.join(torch.compiler.list_backends())}; {{}} takes the defaults."
        ) from error

"""In which formats sharded weights compute, gradients are reduced and buffers are seen.

| `mixed_precision` | weights compute in | gradients are reduced in | buffers are seen in |
|---|---|---|---|
| `'FULL'` | float32 | float32 | float32 |
| `'DEFAULT'` | the run's precision | float32 | the run's precision |
| `'PURE'` | the run's precision | the run's precision | the run's precision |
| a dict | `param_dtype` | `reduce_dtype` | `buffer_dtype` |

What a dict leaves out is float32. The weights that are stored and optimized keep the format they have.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecision, MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _NormBase  # no public name covers the BatchNorm and InstanceNorm families

from composer_dist import Precision
from composer_fsdp.config import explain_key

__all__ = ["Dtypes", "cast_buffers", "has_running_statistics", "resolve_dtypes", "to_dtype", "Prefetching"]

_NAMES = {
    torch.float32: "float32 torch.float32 fp32 float",
    torch.float16: "float16 torch.float16 half fp16 amp amp_fp16",
    torch.bfloat16: "bfloat16 bfloat torch.bfloat16 bf16 amp_bf16",
}
_FLOAT8 = ["float8", "torch.float8", "fp8", "amp_fp8"]
_DTYPES = {name: dtype for dtype, names in _NAMES.items() for name in names.split()}
_OF_TORCH = frozenset(map(str, _NAMES))  # as a plan writes down the precision of who gave a torch.dtype
_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The three formats.

    Attributes:
        param: What weights and floating-point inputs are cast to for a forward and backward pass.
        reduce: What gradients are cast to while the ranks average them.
        buffer: What buffers are cast to for a forward pass.
    """

    param: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    buffer: torch.dtype = torch.float32

    def policy(self, *, output_dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
        """Return it as `fully_shard` takes it, which knows nothing of buffers."""
        # Said explicitly: what no reduce_dtype means has changed in torch 2.15.
        return MixedPrecisionPolicy(param_dtype=self.param, reduce_dtype=self.reduce, output_dtype=output_dtype)


def to_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a format by any of its names.

    Raises:
        ValueError: If it has no such name, or is no format of real numbers.

    Example:
        >>> to_dtype("bf16")
        torch.bfloat16
    """
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
        return dtype
    name = dtype.lower() if isinstance(dtype, str) else ""
    if name in _FLOAT8 or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        warnings.warn(
            f"{dtype!r}: weights are gathered in bfloat16; layers of TransformerEngine then compute in float8.",
            UserWarning,
            stacklevel=2,
        )
        return torch.bfloat16
    if name not in _DTYPES:
        raise ValueError(
            f"Unable to interpret precision {dtype!r} as a dtype. Use a floating-point torch.dtype or one of "
            f"{', '.join(_DTYPES)}."
        )
    return _DTYPES[name]


def resolve_dtypes(mixed_precision: object, precision: str | Precision | torch.dtype) -> Dtypes:
    """Return the formats that a `mixed_precision` setting means.

    Args:
        mixed_precision: `'FULL'`, `'DEFAULT'`, `'PURE'` in any case, a dict, or torch's own `MixedPrecision` or
            `MixedPrecisionPolicy`.
        precision: In which the run computes.

    Raises:
        ValueError: If it is none of these, or a format has no such name.

    Example:
        >>> resolve_dtypes("DEFAULT", "amp_bf16")
        Dtypes(param=torch.bfloat16, reduce=torch.float32, buffer=torch.bfloat16)
    """
    if isinstance(mixed_precision, Dtypes):
        return mixed_precision
    if isinstance(mixed_precision, MixedPrecisionPolicy):
        full = torch.float32
        return Dtypes(mixed_precision.param_dtype or full, mixed_precision.reduce_dtype or full, full)
    if isinstance(mixed_precision, MixedPrecision):
        full = torch.float32
        param = mixed_precision.param_dtype or full
        # Of this one torch says that gradients are reduced in the weights' format unless they have one of their own.
        return Dtypes(param, mixed_precision.reduce_dtype or param, mixed_precision.buffer_dtype or full)
    if isinstance(mixed_precision, Mapping):
        for key in mixed_precision:
            if key not in _KEYS:
                raise ValueError(
                    f"Unable to interpret mixed_precision={mixed_precision!r}: its key {key!r} is none. "
                    f"{explain_key(key, _KEYS)}"
                )
        given = {
            key.removesuffix("_dtype"): to_dtype(value) for key, value in mixed_precision.items() if value is not None
        }
        return Dtypes(**given)
    name = mixed_precision.upper() if isinstance(mixed_precision, str) else ""
    if name not in ("FULL", "DEFAULT", "PURE"):
        raise ValueError(
            f"Unable to interpret mixed_precision={mixed_precision!r}. Use 'FULL', 'DEFAULT' or 'PURE', or a dict of "
            f"{', '.join(_KEYS)}."
        )
    if name == "FULL":
        return Dtypes()
    if isinstance(precision, str) and precision in _OF_TORCH:
        precision = _DTYPES[precision]
    dtype = to_dtype(precision if isinstance(precision, torch.dtype) else Precision(precision).value)
    return Dtypes(dtype, torch.float32 if name == "DEFAULT" else dtype, dtype)


def has_running_statistics(module: nn.Module) -> bool:
    """Say whether a module is of those that count over many batches, which needs float32: BatchNorm and its kin."""
    return isinstance(module, _NormBase)


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> bool:
    """Let a module see its own floating-point buffers in another format during each forward pass.

    What it writes into them there is kept, in the format of the buffer. Modules with running statistics are left out.

    Returns:
        Whether there is anything to cast.
    """
    names = [
        name
        for name, buffer in module._buffers.items()  # `buffers()` gives no names to assign to
        if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype
    ]
    if not names or has_running_statistics(module):
        return False
    casts = _BufferCasts(names, dtype)
    module.register_forward_pre_hook(casts.before, prepend=True)
    module.register_forward_hook(casts.after, always_call=True)
    return True


class _BufferCasts:
    """Puts copies in the place of buffers, and the buffers back."""

    def __init__(self, names: list[str], dtype: torch.dtype) -> None:
        self._names = names
        self._dtype = dtype
        self._stored: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def before(self, module: nn.Module, _: Any) -> None:
        if self._stored:
            return  # a module that calls itself
        for name in self._names:
            stored = module._buffers[name]
            if stored is not None:
                shadow = stored.to(self._dtype)
                self._stored[name] = (stored, shadow, shadow._version)
                module._buffers[name] = shadow

    def after(self, module: nn.Module, *_: Any) -> None:
        for name, (stored, shadow, version) in self._stored.items():
            now = module._buffers[name]
            if now is not None and (now is not shadow or now._version != version):
                stored = now.to(stored.dtype)
            module._buffers[name] = stored
        self._stored.clear()


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

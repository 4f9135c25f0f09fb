"""Mixed precision, buffer casting and prefetching of sharded models.

| `mixed_precision` | computation | gradient reduction | buffers |
|---|---|---|---|
| `'FULL'` | float32 | float32 | float32 |
| `'DEFAULT'` | the run's precision | float32 | the run's precision |
| `'PURE'` | the run's precision | the run's precision | the run's precision |
| a dict | `param_dtype` | `reduce_dtype` | `buffer_dtype` |

Dtypes missing from a dict are float32. The stored and optimized weights keep their dtype.
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

_NAMES = {
    torch.float32: "float32 torch.float32 fp32 float",
    torch.float16: "float16 torch.float16 half fp16 amp amp_fp16",
    torch.bfloat16: "bfloat16 bfloat torch.bfloat16 bf16 amp_bf16",
}
_FLOAT8 = ["float8", "torch.float8", "fp8", "amp_fp8"]
_DTYPES = {name: dtype for dtype, names in _NAMES.items() for name in names.split()}
_OF_TORCH = frozenset(map(str, _NAMES))  # how a plan records a precision given as torch.dtype
_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Dtypes of computation, gradient reduction and buffers.

    Attributes:
        param: The dtype of weights and floating-point inputs in the forward and backward pass.
        reduce: The dtype in which gradients are averaged across ranks.
        buffer: The dtype of buffers in the forward pass.
    """

    param: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    buffer: torch.dtype = torch.float32

    def policy(self, *, output_dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
        """Return the equivalent policy for `fully_shard`, which has no dtype of buffers."""
        # reduce_dtype is always explicit: the meaning of `None` changed in torch 2.15.
        return MixedPrecisionPolicy(param_dtype=self.param, reduce_dtype=self.reduce, output_dtype=output_dtype)


def to_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype for any of its names; float8 becomes bfloat16 with a warning.

    Example:
        >>> to_dtype("bf16")
        torch.bfloat16
    """
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:  # not float8
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
    """Return the dtypes for a `mixed_precision` setting.

    Example:
        >>> resolve_dtypes("DEFAULT", "amp_bf16")
        Dtypes(param=torch.bfloat16, reduce=torch.float32, buffer=torch.bfloat16)
    """
    if isinstance(mixed_precision, Dtypes):
        return mixed_precision
    if isinstance(mixed_precision, MixedPrecision | MixedPrecisionPolicy):
        return _dtypes_of_torch(mixed_precision)
    if isinstance(mixed_precision, Mapping):
        for key in mixed_precision:
            if key not in _KEYS:
                raise ValueError(
                    f"Unable to interpret mixed_precision={mixed_precision!r}: its key {key!r} is unknown. "
                    f"{explain_key(key, _KEYS)}"
                )
        given = {key.removesuffix("_dtype"): value for key, value in mixed_precision.items() if value is not None}
        return Dtypes(**{name: to_dtype(value) for name, value in given.items()})
    name = mixed_precision.upper() if isinstance(mixed_precision, str) else ""
    if name == "FULL":
        return Dtypes()
    if name not in ("DEFAULT", "PURE"):
        raise ValueError(
            f"Unable to interpret mixed_precision={mixed_precision!r}. Use 'FULL', 'DEFAULT' or 'PURE', or a dict of "
            f"{', '.join(_KEYS)}."
        )
    if isinstance(precision, str) and precision in _OF_TORCH:
        precision = _DTYPES[precision]
    dtype = to_dtype(precision if isinstance(precision, torch.dtype) else Precision(precision).value)
    return Dtypes(dtype, torch.float32 if name == "DEFAULT" else dtype, dtype)


def _dtypes_of_torch(policy: MixedPrecision | MixedPrecisionPolicy) -> Dtypes:
    param = policy.param_dtype or torch.float32
    if isinstance(policy, MixedPrecision):  # of FSDP1, whose reduce_dtype defaults to param_dtype
        return Dtypes(param, policy.reduce_dtype or param, policy.buffer_dtype or torch.float32)
    return Dtypes(param, policy.reduce_dtype or torch.float32)


def has_running_statistics(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm or InstanceNorm, whose running statistics need float32."""
    return isinstance(module, _NormBase)


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> bool:
    """Register hooks that cast a module's own floating-point buffers during each forward pass.

    Writes to the cast buffers are copied back in the stored dtype. Modules with running statistics are skipped.

    Returns:
        Whether any buffer is cast.
    """
    names = [
        name
        for name, buffer in module._buffers.items()  # `buffers()` yields no names to assign to
        if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype
    ]
    if not names or has_running_statistics(module):
        return False
    casts = _BufferCasts(names, dtype)
    module.register_forward_pre_hook(casts.before, prepend=True)
    module.register_forward_hook(casts.after, always_call=True)
    return True


class _BufferCasts:
    """Forward hooks that replace buffers with cast copies and restore them."""

    def __init__(self, names: list[str], dtype: torch.dtype) -> None:
        self._names = names
        self._dtype = dtype
        self._stored: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def before(self, module: nn.Module, _: Any) -> None:
        if self._stored:
            return  # a recursive call: the buffers are cast already
        for name in self._names:
            stored = module._buffers[name]
            if stored is not None:
                shadow = stored.to(self._dtype)
                self._stored[name] = (stored, shadow, shadow._version)
                module._buffers[name] = shadow

    def after(self, module: nn.Module, *_: Any) -> None:
        for name, (stored, shadow, version) in self._stored.items():
            now = module._buffers[name]
            # Copy back only what was replaced or written in place; an unchanged buffer keeps its full precision.
            if now is not None and (now is not shadow or now._version != version):
                stored = now.to(stored.dtype)
            module._buffers[name] = stored
        self._stored.clear()


class Prefetching:
    """Explicit prefetching of the units of a sharded model.

    The order is that of the first forward pass, and until it is complete, the model order.

    Args:
        units: The sharded modules by name, in model order.
        settings: The `(backward_prefetch, limit, forward_limit)` of each unit by name; a forward limit of 0 disables
            explicit forward prefetching.

    Attributes:
        backward: The names of the units that each unit prefetches in the backward pass. A unit is missing if it keeps
            PyTorch's implicit prefetching of one unit.
        forward: The same for the forward pass.
    """

    def __init__(self, units: Mapping[str, nn.Module], settings: Mapping[str, tuple[str, int, int]]) -> None:
        self.backward: dict[str, list[str]] = {}
        self.forward: dict[str, list[str]] = {}
        self._units = units
        self._settings = settings
        self._order: list[str] = []
        self._hooks: list[Any] = []
        if any(kind != "BACKWARD_POST" or limit > 1 or ahead > 0 for kind, limit, ahead in settings.values()):
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
                # An empty list means implicit prefetching; the unit itself is gathered already, so this has no effect.
                unit.set_modules_to_backward_prefetch([unit])
            elif kind == "BACKWARD_PRE" or limit > 1:
                # The backward pass runs the units in reverse order, so the next one to gather is the previous one here.
                self.backward[name] = list(reversed(order[max(0, index - limit) : index]))
                unit.set_modules_to_backward_prefetch(self._modules(self.backward[name]) or [unit])
            if forward_limit:
                self.forward[name] = list(order[index + 1 : index + 1 + forward_limit])
                unit.set_modules_to_forward_prefetch(self._modules(self.forward[name]))

    def _modules(self, names: Sequence[str]) -> list[FSDPModule]:
        return [module for name in names if isinstance(module := self._units[name], FSDPModule)]

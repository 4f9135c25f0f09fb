"""In which floating-point format a model computes."""

import enum
import importlib
import inspect
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from composer_dist.devices import Device, DeviceCPU
from composer_time import StringEnum

__all__ = ["STR_TO_DTYPE", "Precision", "get_precision_context", "validate_precision"]

STR_TO_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Torch's dtypes by the short names that configurations use."""

_LEGACY_NAMES = ("amp", "fp16", "bf16")
_NOTHING = nullcontext()  # reentrant and without state, so one serves every step
_FP8_CAPABILITY = (8, 9)  # Ada and Hopper are the first with float8 matrix units


class Precision(StringEnum):
    """In which format a model computes; its weights stay in the format they have.

    `AMP` and `FP16` are older names of `AMP_FP16`, and `BF16` of `AMP_BF16`. They are no members of their own: neither
    iteration nor `len` counts them, and the strings `'amp'`, `'fp16'` and `'bf16'` give a `DeprecationWarning`.

    Example:
        >>> Precision("amp_bf16")
        <Precision.AMP_BF16: 'amp_bf16'>
        >>> [member.value for member in Precision]
        ['fp32', 'amp_fp16', 'amp_bf16', 'amp_fp8']
    """

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    AMP_FP8 = "amp_fp8"

    AMP = "amp_fp16"
    FP16 = "amp_fp16"
    BF16 = "amp_bf16"

    @classmethod
    def _missing_(cls, value: object) -> StringEnum:
        member = super()._missing_(value)
        if isinstance(value, str) and value.lower() in _LEGACY_NAMES:
            warnings.warn(
                f"precision={value!r} is an older spelling. Write {member.value!r}.",
                DeprecationWarning,
                stacklevel=_level_of_caller(),
            )
        return member


def _level_of_caller() -> int:
    """Return the `stacklevel`, for the function that asks, of the line that named the precision.

    It is the first one outside this file and `enum`: a name comes in through the class or through a function here.
    """
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename in (__file__, enum.__file__):
        level, frame = level + 1, frame.f_back
    return level


def get_precision_context(
    precision: str | Precision,
    precision_config: Mapping[str, Any] | None = None,
    fp8_autocast_enabled: bool = True,
    *,
    device_type: str | None = None,
) -> AbstractContextManager[Any]:
    """Return the context under which a forward pass and a loss compute in this precision.

    | precision | context |
    |---|---|
    | `FP32` | none, or one that switches an autocast around it off |
    | `AMP_FP16` | float16 autocast; none on a CPU, where training refuses it (see `validate_precision`) |
    | `AMP_BF16` | bfloat16 autocast, on CPUs too |
    | `AMP_FP8` | TransformerEngine's `fp8_autocast` with a delayed-scaling recipe |

    Enter it at once, with the `with` statement that asked for it: whether an autocast is around is looked at now.

    Args:
        precision: A member, or a string that names one.
        precision_config: Arguments of the float8 recipe. By default format `HYBRID`, an `amax` history of 16 steps
            and `max` over it.
        fp8_autocast_enabled: Whether layers of TransformerEngine compute in float8, for parts that must not.
        device_type: Where the tensors are, such as `'cuda'` or `'cpu'`. The accelerator in use when `None`, and
            the CPU where there is none. Naming it saves the look-up.

    Raises:
        ValueError: If a string names no precision.
        ImportError: If float8 is asked for and TransformerEngine is not installed.
        RuntimeError: If float8 is asked for and the device cannot compute in it.

    Example:
        >>> with get_precision_context("amp_bf16", device_type="cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    precision = Precision(precision)
    if precision is Precision.AMP_FP8:
        return _fp8_context(precision_config, fp8_autocast_enabled)
    device_type = device_type or _device_type_in_use()
    if precision is Precision.FP32:
        return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _NOTHING
    if precision is Precision.AMP_BF16:
        return torch.autocast(device_type, dtype=torch.bfloat16)
    return _NOTHING if device_type == "cpu" else torch.autocast(device_type, dtype=torch.float16)


def validate_precision(precision: str | Precision, device: Device) -> None:
    """Refuse a precision in which the device cannot train.

    On a CPU these are float16, which needs loss scaling and has no fast kernels there, and float8. bfloat16 is accepted
    there: it needs no loss scaling, and CPUs have kernels for it.

    Raises:
        ValueError: If the device cannot train in this precision, or if a string names none.
        ImportError: If float8 is asked for and TransformerEngine is not installed.
        RuntimeError: If float8 is asked for and the GPU cannot compute in it.
    """
    precision = Precision(precision)
    if isinstance(device, DeviceCPU) and precision not in (Precision.FP32, Precision.AMP_BF16):
        raise ValueError(
            f"precision={precision.value!r} is not supported for CPU training. A CPU trains in 'fp32' or 'amp_bf16'. "
            "Choose one of them, or pass device='gpu' where there is one."
        )
    if precision is Precision.AMP_FP8:
        _require_fp8()


def _device_type_in_use() -> str:
    """Return the type of device that tensors are most likely on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return accelerator.type
    # XLA devices are no torch accelerators, and a loop that uses one has loaded this package.
    return "xla" if "torch_xla" in sys.modules else "cpu"


def _fp8_context(config: Mapping[str, Any] | None, enabled: bool) -> AbstractContextManager[Any]:
    """Return TransformerEngine's context for float8."""
    engine, recipe = _require_fp8()
    defaults = {"fp8_format": recipe.Format.HYBRID, "amax_history_len": 16, "amax_compute_algo": "max"}
    scaling = recipe.DelayedScaling(**(defaults if config is None else config))
    return engine.fp8_autocast(enabled=enabled, fp8_recipe=scaling)


def _require_fp8() -> tuple[Any, Any]:
    """Return TransformerEngine's modules for PyTorch and for recipes, if they and the device can be used."""
    try:
        engine: Any = importlib.import_module("transformer_engine.pytorch")
        recipe: Any = importlib.import_module("transformer_engine.common.recipe")
    except ImportError as error:
        raise ImportError(
            "AMP_FP8 precision is used but TransformerEngine is not installed. Install the package "
            "'transformer-engine' (with its PyTorch part), or choose precision='amp_bf16'."
        ) from error
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < _FP8_CAPABILITY:
        raise RuntimeError(
            f"AMP_FP8 precision is used but current device does not support it: its compute capability is "
            f"{capability}, and float8 needs a CUDA device of {_FP8_CAPABILITY} or later. Choose precision='amp_bf16'."
        )
    return engine, recipe

"""Peak performance of accelerators, for model FLOPs utilization."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from composer_events.state import State

__all__ = ["GPU_AVAILABLE_FLOPS", "get_gpu_flops_available"]


def _peaks(**flops: float) -> dict[str, float]:
    """Return peaks by precision, with those of 16 and 8 bits also under the names of mixed precisions."""
    return flops | {f"amp_{name}": peak for name, peak in flops.items() if name in ("fp16", "bf16", "fp8")}


_HOPPER_SXM: Final = _peaks(
    fp64=67e12, fp32=67e12, tf32=494.5e12, fp16=989.5e12, bf16=989.5e12, fp8=1.979e15, int8=1.979e15
)
_HOPPER_PCIE: Final = _peaks(
    fp64=51e12, fp32=51e12, tf32=378e12, fp16=756.5e12, bf16=756.5e12, fp8=1.513e15, int8=1.513e15
)

GPU_AVAILABLE_FLOPS: Final[dict[str, dict[str, float]]] = {
    "gb300": _peaks(fp32=80e12, tf32=1.25e15, fp16=2.5e15, bf16=2.5e15, fp8=5e15),
    "gb200": _peaks(fp64=40e12, fp32=80e12, tf32=1.25e15, fp16=2.5e15, bf16=2.5e15, fp8=5e15),
    "b300": _peaks(fp32=75e12, tf32=1.1e15, fp16=2.25e15, bf16=2.25e15, fp8=4.5e15),
    "b200": _peaks(fp64=37e12, fp32=75e12, tf32=1.1e15, fp16=2.25e15, bf16=2.25e15, fp8=4.5e15),
    "b100": _peaks(fp64=30e12, fp32=60e12, tf32=0.9e15, fp16=1.75e15, bf16=1.75e15, fp8=3.5e15),
    "gh200": dict(_HOPPER_SXM),
    "h200-sxm": dict(_HOPPER_SXM),
    "h100-sxm": dict(_HOPPER_SXM),
    "h100-pcie": dict(_HOPPER_PCIE),
    "h100-nvl": _peaks(fp64=30e12, fp32=60e12, tf32=417.5e12, fp16=835e12, bf16=835e12, fp8=1.67e15),
    "h800-pcie": _peaks(fp16=756.5e12, bf16=756.5e12, fp8=1.513e15),
    "h800": _peaks(fp16=989.5e12, bf16=989.5e12, fp8=1.979e15),
    "h20": _peaks(fp32=44e12, tf32=74e12, fp16=148e12, bf16=148e12, fp8=296e12),
    "a100": _peaks(fp64=19.5e12, fp32=19.5e12, tf32=156e12, fp16=312e12, bf16=312e12),
    "a800": _peaks(fp32=19.5e12, tf32=156e12, fp16=312e12, bf16=312e12),
    "rtx-pro-6000-max": _peaks(fp16=438.9e12, bf16=438.9e12),
    "rtx-pro-6000": _peaks(fp32=125e12, fp16=503.8e12, bf16=503.8e12),
    "rtx-6000-ada": _peaks(fp32=91.1e12, tf32=182.1e12, fp16=364.2e12, bf16=364.2e12, fp8=728.5e12),
    "rtx-5090": _peaks(fp32=104.8e12, tf32=104.8e12, fp16=209.5e12, bf16=209.5e12, fp8=419e12, int8=838e12),
    "rtx-4090": _peaks(fp32=82.6e12, tf32=82.6e12, fp16=165.2e12, bf16=165.2e12, fp8=330.3e12, int8=660.6e12),
    "a6000": _peaks(fp32=38.7e12, fp16=154.85e12, bf16=154.85e12),
    "a40": _peaks(fp32=37.4e12, fp16=149.7e12, bf16=149.7e12),
    "a30": _peaks(fp64=10.3e12, fp32=10.3e12, tf32=82e12, fp16=165e12, bf16=165e12),
    "a10": _peaks(fp32=31.2e12, tf32=62.5e12, fp16=125e12, bf16=125e12),
    "l40s": _peaks(fp32=91.6e12, tf32=183e12, fp16=362e12, bf16=362e12, fp8=733e12),
    "l40": _peaks(fp32=90.5e12, tf32=90.5e12, fp16=181e12, bf16=181e12, fp8=362e12),
    "l20": _peaks(fp32=59.8e12, fp16=119.5e12, bf16=119.5e12, fp8=239e12),
    "l4": _peaks(fp32=30.3e12, tf32=60e12, fp16=121e12, bf16=121e12, fp8=242e12),
    "v100-sxm": _peaks(fp64=7.8e12, fp32=15.7e12, fp16=125e12),
    "v100-pcie": _peaks(fp64=7e12, fp32=14e12, fp16=112e12),
    "v100s-pcie": _peaks(fp64=8.2e12, fp32=16.4e12, fp16=130e12),
    "t4": _peaks(fp32=8.1e12, fp16=65e12, int8=130e12, int4=260e12),
    "mi355x": _peaks(fp16=2.5e15, bf16=2.5e15, fp8=5e15),
    "mi350x": _peaks(fp16=2.3e15, bf16=2.3e15, fp8=4.6e15),
    "mi325x": _peaks(fp32=163.4e12, fp16=1.3e15, bf16=1.3e15, fp8=2.61e15),
    "mi300x": _peaks(fp32=163.4e12, fp16=1.3e15, bf16=1.3e15, fp8=2.61e15),
    "mi300a": _peaks(fp32=122.6e12, fp16=980.6e12, bf16=980.6e12, fp8=1.96e15),
    "mi250x": _peaks(fp16=191.5e12, bf16=191.5e12),
    "trn1": _peaks(fp32=23.75e12, tf32=23.75e12, fp16=95e12, bf16=95e12, int8=190e12),
}
"""Peak floating point operations per second, without sparsity, by device and precision, as published by the vendors.

A device matches a key whose words are in its name, such as `GPU_AVAILABLE_FLOPS['rtx-3090'] = {'amp_bf16': 7.1e13}`.
"""

# Words in drivers' names that imply the form factor: among H100s, HBM3 implies SXM, and HBM2e implies PCIe.
_ALSO: Final = {"hbm3": "sxm", "hbm2e": "pcie", "h200": "sxm"}


def get_gpu_flops_available(state: State) -> float:
    """Return the peak performance of one device of this run, in floating point operations per second.

    Args:
        state: Determines the precision.

    Returns:
        The peak without sparsity; 0.0 without a GPU, and, with a warning, for a GPU or precision that is not in
        `GPU_AVAILABLE_FLOPS`.
    """
    name = _device_name(state)
    if name is None:
        return 0.0
    precision = str(state.precision.value)
    key = find_device(name)
    if key is None or precision not in GPU_AVAILABLE_FLOPS[key]:
        warnings.warn(
            f"The peak performance of device {name!r} in precision {precision!r} is unknown, so model FLOPs "
            "utilization is not logged. Give SpeedMonitor(gpu_flops_available=...), in floating point operations a "
            "second.",
            stacklevel=2,
        )
        return 0.0
    return GPU_AVAILABLE_FLOPS[key][precision]


def find_device(name: str) -> str | None:
    """Return the key of the device with a driver's name, or `None` if it is unknown.

    >>> find_device("NVIDIA H100 80GB HBM3")
    'h100-sxm'
    """
    said = re.findall(r"[a-z0-9]+", name.lower())
    said += [_ALSO[word] for word in said if word in _ALSO]
    for key in sorted(GPU_AVAILABLE_FLOPS, key=len, reverse=True):  # longest first: "a100" before "a10"
        if all(any(_begins_with(word, part) for word in said) for part in re.split(r"[-\s]", key.lower())):
            return key
    return None


def _begins_with(word: str, part: str) -> bool:
    """Return whether a word is the part or a variant of it: an A10G is an A10, but an A1000 is not."""
    return word.startswith(part) and not (part[-1].isdigit() and word[len(part) :][:1].isdigit())


def _device_name(state: State) -> str | None:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "trn1" if state.device.name == "neuron" else None

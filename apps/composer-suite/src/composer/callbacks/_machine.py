"""What the machine is doing: its processors, memory, disk, network and GPUs."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

from composer_models import MissingConditionalImportError

__all__ = ["GPU_KEYS", "GPUReader", "HostReader"]

GPU_KEYS: Final = ("gpu_percentage", "memory_percentage", "gpu_temperature_C", "gpu_power_usage_W")


class HostReader:
    """Read what the whole computer is doing.

    Raises:
        MissingConditionalImportError: If psutil is not installed.
    """

    def __init__(self) -> None:
        self._psutil = _import("psutil", "psutil")
        self._psutil.cpu_percent()  # the next one is since this one

    def read(self) -> dict[str, float]:
        """Return percentages, and bytes and counts since the computer was started."""
        psutil = self._psutil
        numbers: dict[str, float] = {"cpu_percentage": psutil.cpu_percent()}
        groups = {
            "cpu_memory": psutil.virtual_memory(),
            "disk_memory": psutil.disk_usage(os.sep),
            "network": psutil.net_io_counters(),
        }
        for group, values in groups.items():
            if values is not None:  # a computer without a network
                numbers |= {f"{group}_{name}": value for name, value in values._asdict().items()}
        return numbers


class GPUReader:
    """Read what this rank's GPU is doing, from its driver, which does not wait for what runs on it.

    Raises:
        MissingConditionalImportError: If nvidia-ml-py is not installed.
    """

    def __init__(self) -> None:
        self._nvml: Any = _import("pynvml", "nvidia-ml-py")
        self._nvml.nvmlInit()
        self._handle: Any = None

    def read(self) -> dict[str, float]:
        """Return percentages, degrees Celsius and watts."""
        nvml = self._nvml
        if self._handle is None:
            # By its unique name: numbers are those of the visible devices in torch, and of all of them in the driver.
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        handle = self._handle
        use = nvml.nvmlDeviceGetUtilizationRates(handle)
        return {
            "gpu_percentage": use.gpu,
            "memory_percentage": use.memory,
            "gpu_temperature_C": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power_usage_W": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }


def _import(module: str, package: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingConditionalImportError("system", package) from error

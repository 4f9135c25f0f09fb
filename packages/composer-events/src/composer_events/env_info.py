"""The machine and the versions that a run was made with."""

from __future__ import annotations

import functools
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from composer_events._ranks import get_local_world_size, get_world_size

__all__ = ["get_composer_env_dict"]


def get_composer_env_dict() -> dict[str, Any]:
    """Describe the machine and the versions in values that JSON can hold.

    Nothing is started for it: a CUDA device that the process does not use yet is counted but not named.

    Returns:
        A dict with the keys `composer_version`, `composer_commit_hash`, `cpu_model`, `cpu_count`, `num_nodes`,
        `gpu_model`, `num_gpus_per_node`, `num_gpus` and `cuda_device_count`.
    """
    num_devices, gpu_model = _gpus()
    num_nodes = max(1, get_world_size() // max(1, get_local_world_size()))
    return {
        "composer_version": _composer_version(),
        "composer_commit_hash": None,
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "num_nodes": num_nodes,
        "gpu_model": gpu_model,
        "num_gpus_per_node": num_devices,
        "num_gpus": num_devices * num_nodes,
        "cuda_device_count": num_devices,
    }


def _gpus() -> tuple[int, str]:
    torch = sys.modules.get("torch")
    if torch is None:
        return 0, "N/A"
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    return int(torch.cuda.device_count()), str(torch.cuda.get_device_name()) if in_use else "N/A"


@functools.cache
def _composer_version() -> str:
    for distribution in ("composer-suite", "composer-events"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def _cpu_model() -> str:
    # platform.processor() is empty or only the architecture on Linux.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"

"""What MLPerf asks of a system, in the words of its form."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from typing import Any

import torch

from composer_dist import dist
from composer_events.hparams import get_composer_env_dict

__all__ = ["get_system_description"]

_UNKNOWN = ""


def get_system_description(
    submitter: str,
    division: str,
    status: str,
    system_name: str | None = None,
    host_processors_per_node: int | None = None,
) -> dict[str, Any]:
    """Describe the system as MLPerf asks for it; what the machine does not tell is empty, to be filled in by hand.

    Args:
        submitter: Who submits.
        division: `'open'`.
        status: `'onprem'`, `'cloud'` or `'preview'`.
        system_name: By default `<number of ranks>x<device>_composer`.
        host_processors_per_node: How many CPUs a node has.

    Returns:
        What `systems/<system_name>.json` holds.

    Example:
        >>> get_system_description('Plum', 'open', 'onprem', system_name='shed')['system_name']
        'shed'
    """
    num_nodes = max(dist.get_world_size() // dist.get_local_world_size(), 1)
    if num_nodes > 1:
        warnings.warn(
            f"The description of a system of {num_nodes} nodes is that of this node alone. Check the file before you "
            "submit it.",
            stacklevel=2,
        )
    has_gpu = torch.cuda.is_available()
    accelerator = torch.cuda.get_device_name() if has_gpu else _UNKNOWN
    machine = get_composer_env_dict()
    default_name = f"{dist.get_world_size()}x{(accelerator or machine['cpu_model']).replace(' ', '_')}_composer"
    return {
        "submitter": submitter,
        "division": division,
        "status": status,
        "number_of_nodes": num_nodes,
        **_describe_host(machine["cpu_model"], host_processors_per_node),
        **_describe_accelerator(accelerator),
        "cooling": _UNKNOWN,
        "hw_notes": _UNKNOWN,
        "framework": f"PyTorch v{torch.__version__} and MosaicML composer v{machine['composer_version']}",
        "other_software_stack": {
            "cuda_version": torch.version.cuda or _UNKNOWN,
            "composer_version": machine["composer_version"],
            "python_version": sys.version,
        },
        "operating_system": f"{platform.system()} {platform.release()}",
        "sw_notes": _UNKNOWN,
        "system_name": default_name if system_name is None else system_name,
    }


def _describe_host(model: str, processors_per_node: int | None) -> dict[str, Any]:
    return {
        "host_processors_per_node": _UNKNOWN if processors_per_node is None else processors_per_node,
        "host_processor_model_name": model,
        "host_processor_core_count": _UNKNOWN if (cores := _num_cores()) is None else cores,
        "host_processor_vcpu_count": os.cpu_count(),
        "host_processor_frequency": _UNKNOWN,
        "host_processor_caches": _UNKNOWN,
        "host_processor_interconnect": _UNKNOWN,
        "host_memory_capacity": _memory_capacity(),
        "host_storage_type": _UNKNOWN,
        "host_storage_capacity": _UNKNOWN,
        "host_networking": _UNKNOWN,
        "host_networking_topology": _UNKNOWN,
        "host_memory_configuration": _UNKNOWN,
    }


def _describe_accelerator(name: str) -> dict[str, Any]:
    capacity = f"{torch.cuda.get_device_properties(0).total_memory / 1e9:.0f} GB" if name else _UNKNOWN
    return {
        "accelerators_per_node": dist.get_local_world_size() if name else 0,
        "accelerator_model_name": name,
        "accelerator_host_interconnect": _UNKNOWN,
        "accelerator_frequency": _UNKNOWN,
        "accelerator_on-chip_memories": _UNKNOWN,
        "accelerator_memory_configuration": _UNKNOWN,
        "accelerator_memory_capacity": capacity,
        "accelerator_interconnect": _UNKNOWN,
        "accelerator_interconnect_topology": _UNKNOWN,
    }


def _num_cores() -> int | None:
    """Return how many cores there are, each counted once however many threads it runs; Linux tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            processors = [dict(_fields(text)) for text in file.read().split("\n\n") if text.strip()]
    except OSError:
        return None
    cores = {(each.get("physical id"), each["core id"]) for each in processors if "core id" in each}
    return len(cores) or None


def _fields(text: str) -> list[tuple[str, str]]:
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in text.splitlines())]


def _memory_capacity() -> str:
    try:
        size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return _UNKNOWN
    return f"{size_bytes / 1e9:.0f} GB"

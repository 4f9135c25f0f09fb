"""The CPU as a device."""

from composer_dist.devices import DeviceCPU

__all__ = ["DeviceCPU"]

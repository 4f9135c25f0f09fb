"""A Gaudi processor as a device."""

from composer_dist.devices import DeviceHPU

__all__ = ["DeviceHPU"]

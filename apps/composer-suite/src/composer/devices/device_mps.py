"""Apple's GPU as a device."""

from composer_dist.devices import DeviceMPS

__all__ = ["DeviceMPS"]

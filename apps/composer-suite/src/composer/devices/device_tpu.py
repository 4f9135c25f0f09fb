"""A TPU as a device."""

from composer_dist.devices import DeviceTPU

__all__ = ["DeviceTPU"]

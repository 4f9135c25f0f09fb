"""A Trainium or Inferentia processor as a device."""

from composer_dist.devices import DeviceNeuron

__all__ = ["DeviceNeuron"]

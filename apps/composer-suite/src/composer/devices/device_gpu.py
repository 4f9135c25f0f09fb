"""A CUDA or ROCm GPU as a device."""

from composer_dist.devices import DeviceGPU

__all__ = ["DeviceGPU"]

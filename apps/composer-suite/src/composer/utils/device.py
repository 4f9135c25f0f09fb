"""Finding the device to train on."""

from composer_dist.devices import get_device, is_hpu_installed, is_xla_installed

__all__ = ["get_device", "is_xla_installed", "is_hpu_installed"]

"""What a device does for the training loop."""

from composer_dist.devices import Device

__all__ = ["Device"]

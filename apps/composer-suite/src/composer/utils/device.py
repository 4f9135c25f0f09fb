"""Finding the device to train on."""

from composer._lazy import lazy_face
from composer_dist.devices import get_device, is_hpu_installed, is_xla_installed

__all__ = ["get_device", "is_xla_installed", "is_hpu_installed"]

__getattr__, __dir__ = lazy_face(__name__, {}, renamed={"is_tpu_installed": "composer.utils.is_xla_installed"})

"""What training can run on."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_dist.devices import Device as Device
    from composer_dist.devices import DeviceCPU as DeviceCPU
    from composer_dist.devices import DeviceGPU as DeviceGPU
    from composer_dist.devices import DeviceHPU as DeviceHPU
    from composer_dist.devices import DeviceMPS as DeviceMPS
    from composer_dist.devices import DeviceNeuron as DeviceNeuron
    from composer_dist.devices import DeviceTPU as DeviceTPU

__all__ = ["Device", "DeviceCPU", "DeviceGPU", "DeviceMPS", "DeviceTPU", "DeviceHPU", "DeviceNeuron"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {"composer_dist.devices": __all__},
    submodules=["device", "device_cpu", "device_gpu", "device_mps", "device_tpu", "device_hpu", "device_neuron"],
)

"""Where tensors live and how they get there."""

import importlib
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from composer_dist.env import get_local_rank

__all__ = [
    "Device",
    "DeviceCPU",
    "DeviceGPU",
    "DeviceMPS",
    "DeviceTPU",
    "DeviceHPU",
    "DeviceNeuron",
    "get_device",
    "is_xla_installed",
    "is_hpu_installed",
    "map_tensors",
]

TModule = TypeVar("TModule", bound=torch.nn.Module)
TOptimizer = TypeVar("TOptimizer", bound=Optimizer)


class Device(ABC):
    """A kind of device: what `torch.distributed` calls its backend, and how things are moved to it.

    Attributes:
        name: What `get_device` knows it by.
        dist_backend: The backend of its collectives; empty where there is none of its own.
    """

    name: ClassVar[str] = ""
    dist_backend: ClassVar[str] = ""
    _device: torch.device

    @property
    def torch_device(self) -> torch.device:
        """The device as torch has it."""
        return self._device

    @abstractmethod
    def module_to_device(self, module: TModule) -> TModule:
        """Move a module's parameters and buffers here, in place, and return it."""

    @abstractmethod
    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on this device: the very same one if it is there already."""

    def batch_to_device(self, batch: Any) -> Any:
        """Return the batch with its tensors on this device.

        Mappings become plain dicts, sequences keep their type (named tuples become lists, a `PackedSequence` stays
        one), and what is neither tensor nor collection stays as it is. The collections are new, so that replacing an
        item of the result leaves the original batch alone.
        """
        return map_tensors(batch, self.tensor_to_device)

    def optimizer_to_device(self, optimizer: TOptimizer) -> TOptimizer:
        """Move the tensors of an optimizer's state here, in place, and return it.

        Step counts of optimizers that are neither `capturable` nor `fused` stay where they are: torch keeps them on
        the CPU, because the host reads them at every step.
        """
        counted_by_host = {
            parameter
            for group in optimizer.param_groups
            if not (group.get("capturable") or group.get("fused"))
            for parameter in group["params"]
        }
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not (key == "step" and parameter in counted_by_host):
                    state[key] = self.tensor_to_device(value)
        return optimizer


class _TorchDevice(Device):
    """A device to which torch moves things by itself."""

    def module_to_device(self, module: TModule) -> TModule:
        """Move a module's parameters and buffers here, in place, and return it."""
        return module.to(self._device)

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on this device: the very same one if it is there already."""
        return tensor.to(self._device)


class DeviceCPU(_TorchDevice):
    """The CPU."""

    name = "cpu"
    dist_backend = "gloo"

    def __init__(self) -> None:
        self._device = torch.device("cpu")

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the host: the very same one if it is there already."""
        return tensor if tensor.is_cpu else tensor.cpu()


class DeviceGPU(_TorchDevice):
    """One CUDA (or ROCm) device, which becomes the process's current one.

    Args:
        device_id: Which of the node's devices. The local rank when `None`.
        allow_tf32: Whether matrix products and convolutions of float32 tensors may round to TF32. Process-wide.

    Raises:
        ValueError: If there is no such device.
    """

    name = "gpu"
    dist_backend = "nccl"

    def __init__(self, device_id: int | None = None, *, allow_tf32: bool = True) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                "device='gpu' needs a CUDA device, and torch sees none. Check `nvidia-smi`, CUDA_VISIBLE_DEVICES and "
                "that torch was built for CUDA, or pass device='cpu'."
            )
        index, count = get_local_rank() if device_id is None else device_id, torch.cuda.device_count()
        if not 0 <= index < count:
            raise ValueError(
                f"device_id={index} is not a CUDA device of this node, which has {count}. Start as "
                "many processes as there are devices, or choose one below that number."
            )
        self._device = torch.device("cuda", index)
        torch.accelerator.set_device_index(index)
        # Through the older of torch's two interfaces: the newer one would make reading these flags an error.
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        torch.backends.cudnn.allow_tf32 = allow_tf32

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on this device, copied asynchronously if its memory is pinned."""
        return tensor.to(self._device, non_blocking=True)


class DeviceMPS(_TorchDevice):
    """The GPU of an Apple computer.

    Raises:
        RuntimeError: If torch was not built for it, or this computer has none.
    """

    name = "mps"

    def __init__(self) -> None:
        if not torch.backends.mps.is_available():
            reason = "this computer has no such GPU" if torch.backends.mps.is_built() else "torch was built without it"
            raise RuntimeError(f"device='mps' is not available: {reason}. Pass device='cpu'.")
        self._device = torch.device("mps")


class DeviceTPU(_TorchDevice):
    """A TPU, reached through the package `torch_xla`.

    Raises:
        ImportError: If `torch_xla` is not installed.
    """

    name = "tpu"
    dist_backend = "xla"

    def __init__(self) -> None:
        self._device = _xla_device(self.name)


class DeviceNeuron(_TorchDevice):
    """An AWS Trainium or Inferentia device, reached through the package `torch_xla`.

    Sets `PJRT_DEVICE` and `NEURON_CC_FLAGS` in the environment, which the device's compiler reads.

    Raises:
        ImportError: If `torch_xla` is not installed.
    """

    name = "neuron"
    dist_backend = "xla"

    def __init__(self) -> None:
        _require_xla(self.name)
        os.environ["NEURON_CC_FLAGS"] = "--auto-cast=none"
        os.environ["PJRT_DEVICE"] = "NEURON"
        self._device = _xla_device(self.name)


class DeviceHPU(_TorchDevice):
    """A Habana Gaudi device.

    Raises:
        ImportError: If `habana_frameworks` is not installed.
    """

    name = "hpu"
    dist_backend = "hccl"

    def __init__(self) -> None:
        if not is_hpu_installed():
            raise ImportError(
                "device='hpu' needs the package 'habana_frameworks', which is not installed. Install Habana's "
                "PyTorch packages, or pass device='cpu'."
            )
        importlib.import_module("habana_frameworks.torch")  # registers the device with torch
        self._device = torch.device("hpu")


_DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": DeviceCPU,
    "gpu": DeviceGPU,
    "cuda": DeviceGPU,
    "mps": DeviceMPS,
    "tpu": DeviceTPU,
    "neuron": DeviceNeuron,
    "hpu": DeviceHPU,
}


def get_device(device: str | Device | None = None) -> Device:
    """Return a device for a name, in any case.

    Args:
        device: `'cpu'`, `'gpu'` (or `'cuda'`), `'mps'`, `'tpu'`, `'neuron'` or `'hpu'`. A `Device` is returned as it
            is. `None` means the GPU where there is one, and the CPU elsewhere.

    Raises:
        ValueError: If there is no device of that name, or no GPU.
        RuntimeError: If there is no MPS device.
        ImportError: If the device needs a package that is not installed.

    Example:
        >>> get_device("CPU").torch_device
        device(type='cpu')
    """
    if isinstance(device, Device):
        return device
    if device is None:
        return DeviceGPU() if torch.cuda.is_available() else DeviceCPU()
    kind = _DEVICES.get(device.lower()) if isinstance(device, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]  # users pass what they have
    if kind is None:
        raise ValueError(
            f"device={device!r} is not a device. Use one of {', '.join(map(repr, _DEVICES))}, in any case, or a "
            "Device; None takes the GPU where there is one."
        )
    return kind()


def is_xla_installed() -> bool:
    """Say whether the package `torch_xla` is installed, without importing it."""
    return importlib.util.find_spec("torch_xla") is not None


def is_hpu_installed() -> bool:
    """Say whether the package `habana_frameworks` is installed, without importing it."""
    return importlib.util.find_spec("habana_frameworks") is not None


def _require_xla(name: str) -> None:
    """Raise if the package that reaches XLA devices is missing."""
    if not is_xla_installed():
        raise ImportError(
            f"device={name!r} needs the package 'torch_xla', which is not installed. Install it, or pass device='cpu'."
        )


def _xla_device(name: str) -> torch.device:
    """Return the XLA device of this process."""
    _require_xla(name)
    xla_model: Any = importlib.import_module("torch_xla.core.xla_model")
    return xla_model.xla_device()


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with `function` applied to its tensors, in new collections."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if type(batch) is tuple:  # the usual ones; whether something is a Mapping takes long to find out of what is none
        return tuple([map_tensors(item, function) for item in batch])
    if type(batch) is list:
        return [map_tensors(item, function) for item in batch]
    if isinstance(batch, PackedSequence):
        return _map_packed(batch, function)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        mapped = [map_tensors(item, function) for item in batch]
        if hasattr(batch, "_fields"):  # a named tuple does not take its items as one argument
            return mapped
        kind: Any = type(batch)
        try:
            return kind(mapped)
        except TypeError:
            return mapped
    return batch


def _map_packed(batch: PackedSequence, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedSequence:
    """Return the packed sequence with its data moved; torch keeps the batch sizes on the CPU, where it reads them."""
    indices = (batch.sorted_indices, batch.unsorted_indices)
    moved = [None if index is None else function(index) for index in indices]
    return type(batch)(function(batch.data), batch.batch_sizes, *moved)

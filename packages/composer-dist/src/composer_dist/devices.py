"""Devices, the transfer of batches to them, and the precision of computations."""

import enum
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from composer_dist.env import get_local_rank
from composer_time import StringEnum

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
    "STR_TO_DTYPE",
    "Precision",
    "get_precision_context",
    "validate_precision",
]

TModule = TypeVar("TModule", bound=torch.nn.Module)
TOptimizer = TypeVar("TOptimizer", bound=Optimizer)


class Device(ABC):
    """A kind of device, with its `torch.distributed` backend and the transfer of modules, tensors and batches to it.

    Attributes:
        name: The name that `get_device` accepts.
        dist_backend: The backend of its collectives; empty if it has none of its own.
    """

    name: ClassVar[str] = ""
    dist_backend: ClassVar[str] = ""
    _device: torch.device

    @property
    def torch_device(self) -> torch.device:
        """The corresponding `torch.device`."""
        return self._device

    @abstractmethod
    def module_to_device(self, module: TModule) -> TModule:
        """Move a module's parameters and buffers to this device, in place, and return it."""

    @abstractmethod
    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on this device: the same object if it is there already."""

    def batch_to_device(self, batch: Any) -> Any:
        """Return the batch with its tensors on this device.

        Mappings become plain dicts and sequences keep their type, except that named tuples become lists. A
        `PackedSequence` stays one, and other objects are passed through. The collections are new: replacing an item of
        the result does not change the original batch.
        """
        return map_tensors(batch, self.tensor_to_device)

    def optimizer_to_device(self, optimizer: TOptimizer) -> TOptimizer:
        """Move the tensors of an optimizer's state to this device, in place, and return it.

        Step counts of optimizers that are neither `capturable` nor `fused` stay on the CPU, since the host reads them
        at every step.
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
    """A device that `Tensor.to` and `Module.to` can reach."""

    def module_to_device(self, module: TModule) -> TModule:
        """Move a module's parameters and buffers to this device, in place, and return it."""
        return module.to(self._device)

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on this device: the same object if it is there already."""
        return tensor.to(self._device)


class DeviceCPU(_TorchDevice):
    """The CPU."""

    name = "cpu"
    dist_backend = "gloo"

    def __init__(self) -> None:
        self._device = torch.device("cpu")

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the host: the same object if it is there already."""
        return tensor if tensor.is_cpu else tensor.cpu()


class DeviceGPU(_TorchDevice):
    """A CUDA or ROCm device, made the current device of the process.

    Args:
        device_id: Index of the device on this node. The local rank when `None`.
        allow_tf32: Whether matrix products and convolutions of float32 tensors may round to TF32. Process-wide.

    Raises:
        ValueError: If the device does not exist.
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
        torch.accelerator.set_device_index(index)  # NCCL, and tensors made without an index, use the current device
        # The older of torch's two interfaces: after the newer one, reading these flags raises.
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        torch.backends.cudnn.allow_tf32 = allow_tf32

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on this device, copied asynchronously if its memory is pinned."""
        return tensor.to(self._device, non_blocking=True)


class DeviceMPS(_TorchDevice):
    """The GPU of an Apple computer.

    Raises:
        RuntimeError: If torch was built without MPS, or this computer has no such GPU.
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
        self._device = _xla_device(self.name, NEURON_CC_FLAGS="--auto-cast=none", PJRT_DEVICE="NEURON")


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
    "cuda": DeviceGPU,  # torch's name for it
    "mps": DeviceMPS,
    "tpu": DeviceTPU,
    "neuron": DeviceNeuron,
    "hpu": DeviceHPU,
}


def get_device(device: str | Device | None = None) -> Device:
    """Return the device of a name; case does not matter.

    Args:
        device: `'cpu'`, `'gpu'` (or `'cuda'`), `'mps'`, `'tpu'`, `'neuron'` or `'hpu'`. A `Device` is returned
            unchanged. `None` means the GPU if there is one, and else the CPU.

    Raises:
        ValueError: If the name is unknown, or no GPU is available.
        RuntimeError: If MPS is not available.
        ImportError: If the device needs a package that is not installed.

    Example:
        >>> get_device("CPU").torch_device
        device(type='cpu')
    """
    if isinstance(device, Device):
        return device
    if device is None:
        return DeviceGPU() if torch.cuda.is_available() else DeviceCPU()
    kind = _DEVICES.get(device.lower()) if isinstance(device, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]  # untyped callers pass anything
    if kind is None:
        raise ValueError(
            f"device={device!r} is not a device. Use one of {', '.join(map(repr, _DEVICES))}, in any case, or a "
            "Device; None takes the GPU where there is one."
        )
    return kind()


def is_xla_installed() -> bool:
    """Return whether the package `torch_xla` is installed, without importing it."""
    return importlib.util.find_spec("torch_xla") is not None


def is_hpu_installed() -> bool:
    """Return whether the package `habana_frameworks` is installed, without importing it."""
    return importlib.util.find_spec("habana_frameworks") is not None


def _xla_device(name: str, **environment: str) -> torch.device:
    if not is_xla_installed():
        raise ImportError(
            f"device={name!r} needs the package 'torch_xla', which is not installed. Install it, or pass device='cpu'."
        )
    os.environ.update(environment)  # before the device is opened, when its compiler reads them
    xla_model: Any = importlib.import_module("torch_xla.core.xla_model")
    return xla_model.xla_device()


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with `function` applied to its tensors, in new collections."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if type(batch) is tuple:  # the common types first: isinstance of an ABC is slow
        return tuple([map_tensors(item, function) for item in batch])  # a list: tuple() is slower on a generator
    if type(batch) is list:
        return [map_tensors(item, function) for item in batch]
    if isinstance(batch, PackedSequence):
        return _map_packed(batch, function)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        mapped = [map_tensors(item, function) for item in batch]
        if hasattr(batch, "_fields"):  # a named tuple takes its items as separate arguments
            return mapped
        kind: Any = type(batch)
        try:
            return kind(mapped)
        except TypeError:  # a sequence whose class takes other arguments becomes a list
            return mapped
    return batch


def _map_packed(batch: PackedSequence, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedSequence:
    indices = (batch.sorted_indices, batch.unsorted_indices)
    moved = [None if index is None else function(index) for index in indices]
    return type(batch)(function(batch.data), batch.batch_sizes, *moved)  # torch reads the sizes on the CPU


STR_TO_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Dtypes by their short names in configurations."""

_LEGACY_NAMES = ("amp", "fp16", "bf16")
_NOTHING = nullcontext()  # stateless and reentrant, so one instance serves every step
_FP8_CAPABILITY = (8, 9)  # Ada and Hopper are the first with float8 matrix units


class Precision(StringEnum):
    """The precision of a model's computations; its weights keep their dtype.

    `AMP` and `FP16` are older names of `AMP_FP16`, and `BF16` of `AMP_BF16`. They are aliases, which iteration and
    `len` skip, and the strings `'amp'`, `'fp16'` and `'bf16'` raise a `DeprecationWarning`.

    Example:
        >>> Precision("amp_bf16")
        <Precision.AMP_BF16: 'amp_bf16'>
        >>> [member.value for member in Precision]
        ['fp32', 'amp_fp16', 'amp_bf16', 'amp_fp8']
    """

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    AMP_FP8 = "amp_fp8"

    AMP = "amp_fp16"
    FP16 = "amp_fp16"
    BF16 = "amp_bf16"

    @classmethod
    def _missing_(cls, value: object) -> StringEnum:
        member = super()._missing_(value)
        if isinstance(value, str) and value.lower() in _LEGACY_NAMES:
            warnings.warn(
                f"precision={value!r} is an older spelling. Write {member.value!r}.",
                DeprecationWarning,
                stacklevel=_level_of_caller(),
            )
        return member


def _level_of_caller() -> int:
    """Return the `stacklevel` of the user's line that named the precision.

    That line is the first one outside this file and `enum`: names arrive through the class or a function here.
    """
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename in (__file__, enum.__file__):
        level, frame = level + 1, frame.f_back
    return level


def get_precision_context(
    precision: str | Precision,
    precision_config: Mapping[str, Any] | None = None,
    fp8_autocast_enabled: bool = True,
    *,
    device_type: str | None = None,
) -> AbstractContextManager[Any]:
    """Return the context manager under which a forward pass and its loss run in a precision.

    | precision | context |
    |---|---|
    | `FP32` | none, or one that disables an autocast around it |
    | `AMP_FP16` | float16 autocast; none on a CPU, where training rejects it (see `validate_precision`) |
    | `AMP_BF16` | bfloat16 autocast, on CPUs too |
    | `AMP_FP8` | TransformerEngine's `fp8_autocast` with a delayed-scaling recipe |

    Enter it at once, in a `with` statement: an autocast around it is looked for in this call, not on entering.

    Args:
        precision: A member or its string.
        precision_config: Arguments of the float8 recipe. By default format `HYBRID`, an `amax` history of 16 steps
            and `max` over it.
        fp8_autocast_enabled: Whether layers of TransformerEngine compute in float8; pass `False` for excluded
            parts.
        device_type: Device type of the tensors, such as `'cuda'` or `'cpu'`. When `None`, the current accelerator
            or else the CPU, at the cost of a lookup.

    Raises:
        ValueError: If the string is not a precision.
        ImportError: If float8 is requested and TransformerEngine is not installed.
        RuntimeError: If float8 is requested and the device cannot compute in it.

    Example:
        >>> with get_precision_context("amp_bf16", device_type="cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    precision = Precision(precision)
    if precision is Precision.AMP_FP8:  # before the lookup below, which float8 does not need
        engine, recipe = _require_fp8()
        defaults = {"fp8_format": recipe.Format.HYBRID, "amax_history_len": 16, "amax_compute_algo": "max"}
        scaling = recipe.DelayedScaling(**(defaults if precision_config is None else precision_config))
        return engine.fp8_autocast(enabled=fp8_autocast_enabled, fp8_recipe=scaling)
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        # torch does not count XLA among its accelerators, but a loop on an XLA device has loaded this package.
        without = "xla" if "torch_xla" in sys.modules else "cpu"
        device_type = without if accelerator is None else accelerator.type
    if precision is Precision.FP32:  # a disabled autocast costs time, so only inside an active one
        return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _NOTHING
    if precision is Precision.AMP_BF16:
        return torch.autocast(device_type, dtype=torch.bfloat16)
    # On a CPU float16 would need loss scaling and is slow: see validate_precision.
    return _NOTHING if device_type == "cpu" else torch.autocast(device_type, dtype=torch.float16)


def validate_precision(precision: str | Precision, device: Device) -> None:
    """Validate that the device can train in a precision.

    A CPU rejects float8, and float16, which needs loss scaling and has no fast kernels there. It accepts bfloat16,
    which needs no loss scaling and has CPU kernels.

    Raises:
        ValueError: If the device cannot train in this precision, or if the string is not one.
        ImportError: If float8 is requested and TransformerEngine is not installed.
        RuntimeError: If float8 is requested and the GPU cannot compute in it.
    """
    precision = Precision(precision)
    if isinstance(device, DeviceCPU) and precision not in (Precision.FP32, Precision.AMP_BF16):
        raise ValueError(
            f"precision={precision.value!r} is not supported for CPU training. A CPU trains in 'fp32' or 'amp_bf16'. "
            "Choose one of them, or pass device='gpu' where there is one."
        )
    if precision is Precision.AMP_FP8:  # raises now, not in the first step
        _require_fp8()


def _require_fp8() -> tuple[Any, Any]:
    """Return TransformerEngine's PyTorch and recipe modules; raise if they or the device cannot be used."""
    try:
        engine: Any = importlib.import_module("transformer_engine.pytorch")
        recipe: Any = importlib.import_module("transformer_engine.common.recipe")
    except ImportError as error:
        raise ImportError(
            "AMP_FP8 precision is used but TransformerEngine is not installed. Install the package "
            "'transformer-engine' (with its PyTorch part), or choose precision='amp_bf16'."
        ) from error
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < _FP8_CAPABILITY:
        raise RuntimeError(
            f"AMP_FP8 precision is used but current device does not support it: its compute capability is "
            f"{capability}, and float8 needs a CUDA device of {_FP8_CAPABILITY} or later. Choose precision='amp_bf16'."
        )
    return engine, recipe

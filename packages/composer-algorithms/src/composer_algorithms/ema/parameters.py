"""A second set of a model's parameters and buffers, and its exchange with the set in the model."""

import weakref
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composer_algorithms._wrapping import (
    canonical_buffers,
    canonical_parameters,
    get_model_context_manager,
    has_flat_parameters,
    is_dtensor,
    is_sharded_by_fsdp,
    place_like,
    write_parameters,
)
from composer_algorithms.ema._plan import AveragingPlan, Fingerprint
from composer_dist.strategy import is_model_deepspeed

__all__ = ["EMAParameters"]


class EMAParameters:
    """Hold the tensors of a model that an average is taken of, by the names that the bare model gives them.

    Prefixes of wrappers (`module.`, `_orig_mod.`) are no part of the names, so a set taken from a wrapped model fits
    the bare one and the other way round. Parameters that need no gradient are left out.

    Args:
        model: Its trainable parameters and its buffers are copied. `None` makes an empty set.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> average = EMAParameters(model)
        >>> list(average.named_parameters_dict)
        ['weight', 'bias']
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.named_parameters_dict: dict[str, Tensor] = {}
        self.named_buffers_dict: dict[str, Tensor] = {}
        self._plan: tuple[AveragingPlan, Fingerprint] | tuple[None, None] = (None, None)
        if model is None:
            return
        with get_model_context_manager(model):
            for name, parameter in canonical_parameters(model).items():
                if parameter.requires_grad:
                    self.named_parameters_dict[name] = parameter.detach().clone()
            for name, buffer in canonical_buffers(model).items():
                self.named_buffers_dict[name] = buffer.detach().clone()

    def named_parameters(self) -> ItemsView[str, Tensor]:
        """Return the parameters with their names."""
        return self.named_parameters_dict.items()

    def named_buffers(self) -> ItemsView[str, Tensor]:
        """Return the buffers with their names."""
        return self.named_buffers_dict.items()

    @torch.no_grad()
    def swap_params(self, model: nn.Module) -> None:
        """Exchange this set with the one in `model`.

        Where possible the tensors trade their storages, which copies nothing. Values are copied where a storage is
        shared or managed by somebody else (FSDP shards, DeepSpeed's engine, the flat weights of cuDNN's RNNs) or device
        or dtype differ.
        Expanded buffers, whose elements share memory, are traded like the rest.

        Args:
            model: The model that the set was taken from, wrapped or not. Its parameters stay the same objects, so
                optimizers are not affected.

        Raises:
            ValueError: If a parameter of this set is not in the model.
        """
        with get_model_context_manager(model):
            # FSDP1 and DeepSpeed write back to the storages that they know.
            may_trade = not (has_flat_parameters(model) or is_model_deepspeed(model))
            pairs = list(self._pairs(model))
            for tensors, name, stored, current in pairs:
                if may_trade and _can_trade_storages(stored, current):
                    # Through .data the Parameter stays the same object, which optimizers and DDP hold on to.
                    stored.data, current.data = current.data, stored.data
                else:
                    tensors[name] = current.detach().clone()
                    give_own_memory(current)
                    current.copy_(place_like(stored, current))
            self._write_back(model, pairs)

    @torch.no_grad()
    def transfer_ema_params(self, model: nn.Module) -> None:
        """Copy this set into `model`.

        Args:
            model: A model with the parameters of the one that the set was taken from.

        Raises:
            ValueError: If a parameter of this set is not in the model.
        """
        with get_model_context_manager(model):
            pairs = list(self._pairs(model))
            for _, _, stored, current in pairs:
                give_own_memory(current)
                current.copy_(place_like(stored, current))
            self._write_back(model, pairs)

    @torch.no_grad()
    def move_params_to_device(self, destination_model: nn.Module) -> None:
        """Move each tensor to where the model's own is: its device and, where the model is sharded, its mesh.

        Args:
            destination_model: A model with the parameters of the one that the set was taken from.

        Raises:
            ValueError: If a parameter of this set is not in the model.
        """
        with get_model_context_manager(destination_model):
            for tensors, name, stored, current in self._pairs(destination_model):
                if stored.device != current.device or is_dtensor(stored) != is_dtensor(current):
                    tensors[name] = place_like(stored, current)

    def kept_plan(self, model: nn.Module) -> AveragingPlan | None:
        """Return the plan that was kept for a step towards this model, if neither of the two has been rebuilt since."""
        plan, fingerprint = self._plan
        return plan if fingerprint is not None and fingerprint.is_of(model) else None

    def keep_plan(self, plan: AveragingPlan, model: nn.Module) -> None:
        """Keep a plan for the next steps towards this model, if it will serve them.

        What FSDP shards changes its tensors with every forward pass, what DeepSpeed trains may be gathered as copies,
        and expanded tensors may be traded into the set.
        """
        tensors = (*self.named_parameters_dict.values(), *self.named_buffers_dict.values(), *model.buffers())
        self._plan = (None, None)
        if not (is_sharded_by_fsdp(model) or is_model_deepspeed(model) or any(map(is_expanded, tensors))):
            self._plan = (plan, Fingerprint(model, self.named_parameters_dict, self.named_buffers_dict))
            weakref.finalize(model, _forget_plan, weakref.ref(self)).atexit = False  # it holds the model's tensors

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": (None, None)}

    def _pairs(self, model: nn.Module) -> Iterator[tuple[dict[str, Tensor], str, Tensor, Tensor]]:
        for tensors, current in (
            (self.named_parameters_dict, parameters_in(model, self.named_parameters_dict)),
            (self.named_buffers_dict, canonical_buffers(model, remove_duplicate=False)),
        ):
            for name, stored in tensors.items():
                if name in current:  # a buffer may have gone: some models make them as they need them
                    yield tensors, name, stored, current[name]

    def _write_back(self, model: nn.Module, pairs: Iterable[tuple[dict[str, Tensor], str, Tensor, Tensor]]) -> None:
        own = self.named_parameters_dict
        write_parameters(model, {name: current for tensors, name, _, current in pairs if tensors is own})


def _forget_plan(average: "weakref.ref[EMAParameters]") -> None:
    if (parameters := average()) is not None:
        parameters._plan = (None, None)


def parameters_in(model: nn.Module, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's parameters by canonical name, or raise if one of the wanted names is not among them."""
    current = canonical_parameters(model, remove_duplicate=False)
    if missing := [name for name in wanted if name not in current]:
        raise ValueError(
            f"the average has {len(missing)} parameters that {type(model).__qualname__} does not have, such as "
            f"{missing[:5]}: take it from a model with the same parameters, after the last change to the model."
        )
    return current


def is_expanded(tensor: Tensor) -> bool:
    """Answer whether several elements are one place in memory, as `expand` makes them: nothing can be written there."""
    strides = tensor.stride()
    return 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True))


def give_own_memory(tensor: Tensor) -> None:
    """Make an expanded tensor writable, in place: each of its elements gets memory of its own."""
    if is_expanded(tensor):
        tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


def _can_trade_storages(stored: Tensor, current: Tensor) -> bool:
    return (
        stored.dtype == current.dtype
        and stored.device == current.device
        and all(_owns_whole_storage(tensor) or is_expanded(tensor) for tensor in (stored, current))
    )


def _owns_whole_storage(tensor: Tensor) -> bool:
    # Subclasses that wrap other tensors (DTensor, quantized ones) all have this method; their own storage is empty.
    return not hasattr(tensor, "__tensor_flatten__") and tensor.untyped_storage().nbytes() == tensor.nbytes

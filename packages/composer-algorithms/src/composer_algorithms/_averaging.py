"""Update of an average of a model's weights, and exchange of the two."""

import weakref
from collections import defaultdict
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from composer_algorithms._arguments import check_interval
from composer_algorithms._method import parse_time
from composer_algorithms.module_surgery import (
    canonical_buffers,
    canonical_parameters,
    get_model_context_manager,
    has_flat_parameters,
    is_dtensor,
    place_like,
    write_parameters,
)
from composer_dist.wrapping import canonical_name, is_model_deepspeed, unwrap_model
from composer_events.parallelism import is_sharded
from composer_time import Time, TimeUnit

__all__ = ["compute_ema", "EMAParameters"]

_KIND = attrgetter("dtype", "device")


class AveragingPlan:
    """Pairs of average and model tensors, grouped for multi-tensor kernels."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        # Use one call for all tensors of a kind, since launching a kernel for each costs more than the arithmetic. Only
        # lists of one dtype and device take the fast path of torch.
        groups: defaultdict[tuple[torch.dtype, torch.device, bool], tuple[list[Tensor], list[Tensor]]]
        groups = defaultdict(lambda: ([], []))
        self._copied: list[tuple[Tensor, Tensor]] = []
        self._mixed: list[tuple[Tensor, Tensor]] = []
        for target, source in pairs:
            # torch's multi-tensor functions reject lists that mix DTensors and plain tensors.
            distributed = is_dtensor(target)
            if not (target.is_floating_point() or target.is_complex()):
                self._copied.append((target, source))
            elif _KIND(target) == _KIND(source) and distributed == is_dtensor(source):
                group = groups[target.dtype, target.device, distributed]
                group[0].append(target)
                group[1].append(source)
            else:
                self._mixed.append((target, source))
        self._groups = list(groups.values())

    def step(self, smoothing: float) -> None:
        """Update the average once."""
        average_all = get_ema_multi_avg_fn(smoothing)
        for targets, sources in self._groups:
            average_all(targets, sources, None)  # an EMA does not use the count of earlier updates
        for target, source in self._mixed:
            # In the wider dtype: a small update would be lost in the rounding of a 16-bit average.
            dtype = torch.promote_types(target.dtype, source.dtype)
            source = place_like(source, target).to(device=target.device, dtype=dtype)
            target.copy_(torch.lerp(target.to(dtype), source, 1 - smoothing))
        for target, source in self._copied:
            target.copy_(place_like(source, target))


class Fingerprint:
    """Identities of the objects in a model and an average, which reveal changes much faster than names would.

    The model is referenced weakly, but its parts live as long as the fingerprint.
    """

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        self._model = weakref.ref(model)
        # Entries of these dicts may be replaced. Additions anywhere else have names that the average does not have.
        kinds = ("_modules", "_parameters", "_buffers") if buffers else ("_modules", "_parameters")
        own = (getattr(module, kind) for module in model.modules() for kind in kinds)
        self._dicts: list[dict[str, Any]] = [parameters, buffers, *filter(None, own)]
        self._lengths = list(map(len, self._dicts))
        self._members = list(chain.from_iterable(map(dict.values, self._dicts)))
        # Moving or converting a model keeps its Parameter objects but exchanges their data.
        self._parameters = [member for member in self._members if isinstance(member, nn.Parameter)]
        self._kinds = list(map(_KIND, self._parameters))

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the model and the average are unchanged."""
        return (
            # `map` and `is_` loop in C: this check precedes every update, for all tensors of the model.
            self._model() is model
            and list(map(len, self._dicts)) == self._lengths
            and all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._members))
            and list(map(_KIND, self._parameters)) == self._kinds
        )


class EMAParameters:
    """Tensors of an average, under the names that the bare model gives them.

    Names exclude the prefixes of wrappers (`module.`, `_orig_mod.`), so a set taken from a wrapped model fits the bare
    one and vice versa. Parameters that require no gradient are left out.

    Args:
        model: Its trainable parameters and its buffers are copied. `None` creates an empty set.

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
        """Exchange this set of tensors with the one in `model`.

        If possible the tensors trade their storages, which copies nothing. Values are copied if a storage is shared or
        managed elsewhere (FSDP shards, DeepSpeed's engine, the flat weights of cuDNN's RNNs), or if device or dtype
        differ. Expanded buffers, whose elements share memory, are traded like other tensors.

        Args:
            model: The model that the set was taken from, wrapped or not. Its parameters stay the same objects, so
                optimizers are not affected.

        Raises:
            ValueError: If a parameter of this set is not in the model.
        """
        with get_model_context_manager(model):
            # FSDP1 and DeepSpeed write back to the storages that they have recorded.
            may_trade = not (has_flat_parameters(model) or is_model_deepspeed(model))
            pairs = list(self._pairs(model))
            for tensors, name, stored, current in pairs:
                if may_trade and _can_trade_storages(stored, current):
                    # Through .data the Parameter stays the same object, which optimizers and DDP hold.
                    stored.data, current.data = current.data, stored.data
                else:
                    tensors[name] = current.detach().clone()
                    give_own_memory(current)
                    current.copy_(place_like(stored, current))
            self._write_back(model, pairs)

    @torch.no_grad()
    def transfer_ema_params(self, model: nn.Module) -> None:
        """Copy this set of tensors into `model`.

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
        """Move each tensor to the device, and if the model is sharded to the mesh, of its counterpart in the model.

        Args:
            destination_model: A model with the parameters of the one that the set was taken from.

        Raises:
            ValueError: If a parameter of this set is not in the model.
        """
        with get_model_context_manager(destination_model):
            for tensors, name, stored, current in self._pairs(destination_model):
                if stored.device != current.device or is_dtensor(stored) != is_dtensor(current):
                    tensors[name] = place_like(stored, current)  # invalidates a kept plan: its fingerprint differs

    def keep_plan(self, plan: AveragingPlan, model: nn.Module) -> None:
        """Keep a plan for further updates from this model, if it stays valid.

        It does not with FSDP, where each forward pass exchanges tensors; with DeepSpeed, where tensors may be gathered
        copies; or with expanded tensors, which may be traded into the set.
        """
        tensors = (*self.named_parameters_dict.values(), *self.named_buffers_dict.values(), *model.buffers())
        self._plan = (None, None)
        if not (is_sharded(model) or is_model_deepspeed(model) or any(map(is_expanded, tensors))):
            self._plan = (plan, Fingerprint(model, self.named_parameters_dict, self.named_buffers_dict))
            # The plan and the fingerprint reference the model's parameters, so they must not outlive the model.
            forget = weakref.WeakMethod(self._forget_plan)
            weakref.finalize(model, lambda: (own := forget()) is not None and own()).atexit = False  # not at exit

    def _forget_plan(self) -> None:
        self._plan = (None, None)

    def __getstate__(self) -> dict[str, Any]:
        # A plan refers to the tensors of this process's model, so a copy must build its own.
        return {**self.__dict__, "_plan": (None, None)}

    def _pairs(self, model: nn.Module) -> Iterator[tuple[dict[str, Tensor], str, Tensor, Tensor]]:
        for tensors, current in (
            # The set has one name of a tied tensor, and another copy of the model may list its names in another order.
            (self.named_parameters_dict, parameters_in(model, self.named_parameters_dict)),
            (self.named_buffers_dict, canonical_buffers(model, remove_duplicate=False)),
        ):
            for name, stored in tensors.items():
                if name in current:  # a buffer may be missing: some models create them on demand
                    yield tensors, name, stored, current[name]

    def _write_back(self, model: nn.Module, pairs: Iterable[tuple[dict[str, Tensor], str, Tensor, Tensor]]) -> None:
        own = self.named_parameters_dict
        write_parameters(model, {name: current for tensors, name, _, current in pairs if tensors is own})


def parameters_in(model: nn.Module, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's parameters by canonical name, and raise if a wanted name is missing."""
    current = canonical_parameters(model, remove_duplicate=False)
    if missing := [name for name in wanted if name not in current]:
        raise ValueError(
            f"the average has {len(missing)} parameters that {type(model).__qualname__} does not have, such as "
            f"{missing[:5]}: create it from a model with the same parameters, after the last change to the model."
        )
    return current


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory, as after `expand`; such a tensor cannot be written to."""
    strides = tensor.stride()
    # `0 in strides` is false for almost all tensors, and much faster than the loop.
    return 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True))


def give_own_memory(tensor: Tensor) -> None:
    """Make an expanded tensor writable, in place, by giving each element its own memory."""
    if is_expanded(tensor):
        tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


def _can_trade_storages(stored: Tensor, current: Tensor) -> bool:
    def owns_whole_storage(tensor: Tensor) -> bool:
        # Subclasses that wrap other tensors (DTensor, quantized ones) have this method, and a storage that is empty.
        return not hasattr(tensor, "__tensor_flatten__") and tensor.untyped_storage().nbytes() == tensor.nbytes

    is_alike = _KIND(stored) == _KIND(current)
    return is_alike and all(owns_whole_storage(tensor) or is_expanded(tensor) for tensor in (stored, current))


@torch.no_grad()
def compute_ema(model: nn.Module, ema_model: nn.Module | EMAParameters, smoothing: float = 0.99) -> None:
    """Update a moving average of a model's weights, in place.

    Each tensor of `ema_model` becomes `smoothing * itself + (1 - smoothing) * model's`. Tensors that are not floating
    point, such as counts and position ids, are copied from the model. Tensors are matched by name, whether or not one
    of the models is wrapped by DDP or torch.compile.

    Args:
        model: The model being trained. Not changed.
        ema_model: The average: an `EMAParameters`, or a module, whose tensors in `state_dict` are averaged. It keeps
            its dtypes and devices.
        smoothing: Weight of the previous average, in [0, 1]. 1 leaves the average unchanged, 0 copies the model.

    Raises:
        ValueError: If `smoothing` is outside [0, 1], `ema_model` has another type, or the two do not match.

    Example:
        >>> model, average = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        >>> _ = torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(average.weight)
        >>> compute_ema(model, average, smoothing=0.75)
        >>> average.weight.item()
        0.25
    """
    check_interval("[0, 1]", smoothing=smoothing)
    smoothing = float(smoothing)
    if isinstance(ema_model, EMAParameters):
        plan, fingerprint = ema_model._plan
        if plan is not None and fingerprint is not None and fingerprint.is_of(model):
            # Outside of the context below, which does nothing for the models whose plans are kept.
            plan.step(smoothing)  # matching the tensors by name takes longer than the arithmetic
            return
    with get_model_context_manager(model):
        if isinstance(ema_model, EMAParameters):
            plan = AveragingPlan(_pairs_with_parameters(ema_model, model))
            ema_model.keep_plan(plan, model)
        elif isinstance(ema_model, nn.Module):
            plan = AveragingPlan(_pairs_with_module(ema_model, model))
        else:
            raise ValueError(f"ema_model={ema_model!r} cannot keep an average: pass a module or EMAParameters(model).")
        plan.step(smoothing)


def _pairs_with_parameters(average: EMAParameters, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    parameters = parameters_in(model, average.named_parameters_dict)
    pairs = [
        (tensor, _of_the_same_shape(name, parameters[name], tensor)) for name, tensor in average.named_parameters()
    ]
    buffers = canonical_buffers(model, remove_duplicate=False)
    for name, tensor in average.named_buffers():
        current = buffers.get(name)
        if current is None:
            continue
        if current.shape != tensor.shape:  # a buffer that grew, such as a cache or a position table
            average.named_buffers_dict[name] = current.detach().clone()
        else:
            give_own_memory(tensor)
            pairs.append((tensor, current))
    return pairs


def _pairs_with_module(average: nn.Module, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    current = {
        **canonical_parameters(model, remove_duplicate=False),
        **canonical_buffers(model, remove_duplicate=False),
    }
    # With keep_vars, tied tensors are one object under two names, so that they are updated only once.
    targets = unwrap_model(average).state_dict(keep_vars=True)
    for target in targets.values():
        if isinstance(target, Tensor):
            give_own_memory(target)
    pairs = {
        id(target): (target.detach(), _of_the_same_shape(name, current[canonical_name(name)], target))
        for name, target in targets.items()
        if isinstance(target, Tensor) and canonical_name(name) in current
    }
    if targets and not pairs:
        raise ValueError(
            f"{type(average).__qualname__} (ema_model) and {type(model).__qualname__} (model) have no tensor name in "
            f"common: make ema_model a copy.deepcopy of the model."
        )
    return list(pairs.values())


def _of_the_same_shape(name: str, source: Tensor, target: Tensor) -> Tensor:
    if source.shape != target.shape:
        raise ValueError(
            f"{name} has the shape {tuple(source.shape)} in the model and {tuple(target.shape)} in its average: create "
            f"the average after the last change to the model."
        )
    return source


_COUNTED_UNITS = (TimeUnit.BATCH, TimeUnit.EPOCH)


def averaging_settings(
    half_life: str | Time[Any] | None, smoothing: float | None, update_interval: str | Time[Any] | None
) -> tuple[float, Time[int]]:
    """Return the smoothing of one update and the interval between updates."""
    if (half_life is None) == (smoothing is None):
        raise ValueError(
            f"half_life={half_life!r} and smoothing={smoothing!r}: pass exactly one of the two. "
            f"half_life has a default, so smoothing also needs half_life=None."
        )
    if smoothing is not None:
        check_interval("[0, 1]", smoothing=smoothing)
        return float(smoothing), counted_time("1ba" if update_interval is None else update_interval, "update_interval")
    assert half_life is not None  # exactly one of the two is given
    life = counted_time(half_life, "half_life")
    interval = Time(1, life.unit) if update_interval is None else counted_time(update_interval, "update_interval")
    if interval.unit != life.unit:
        raise ValueError(
            f"update_interval={update_interval!r} and half_life={half_life!r} are in different units: give both in "
            f"batches ('10ba') or both in epochs ('1ep')."
        )
    # `life / interval` updates multiply the weight of old values by `smoothing ** (life / interval) == 1 / 2`.
    return 2 ** -(interval.value / life.value), interval


def start_time(ema_start: str | Time[Any]) -> Time[Any]:
    """Return the start of the average."""
    start = parse_time("ema_start", ema_start, no_unit=ValueError)
    if start.unit not in (*_COUNTED_UNITS, TimeUnit.DURATION) or start.value < 0:
        raise ValueError(
            f"ema_start={ema_start!r} is not a valid start: pass batches ('500ba'), epochs ('2ep') or a part of the "
            f"training's length ('0.7dur')."
        )
    return start


def counted_time(value: object, argument: str, no_unit: type[Exception] = ValueError) -> Time[int]:
    """Return an interval in batches or epochs."""
    time = parse_time(argument, value, no_unit=no_unit)
    if time.unit not in _COUNTED_UNITS or time.value <= 0:
        raise ValueError(f"{argument}={value!r} is not a valid interval: pass batches ('10ba') or epochs ('1ep').")
    return time

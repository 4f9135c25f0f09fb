"""Initialization of models built on the meta device or on rank 0 only."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_dist import dist
from composer_dist.wrapping import canonical_name
from composer_fsdp.groups import own_region
from composer_fsdp.wrap_rules import stays_whole

__all__ = [
    "meta_safe_apply",
    "Beginning",
    "agree_on_beginning",
    "initialize",
    "materialize",
    "state_to_share",
    "take_rank_zero_state",
]


class Beginning(StrEnum):
    """State of the weights before the model is sharded."""

    REAL = "real"
    """Every rank has its own, equal weights."""
    RANK_ZERO = "rank_zero"
    """Rank 0 has the weights and the other ranks receive them."""
    META = "meta"
    """No rank has weights."""


def agree_on_beginning(model: nn.Module, *, sync: bool, follows_weights: bool) -> Beginning:
    """Return the state of the weights, the same on every rank. Every rank must call this.

    Args:
        model: The model, not sharded yet.
        sync: Whether all ranks use rank 0's weights.
        follows_weights: Whether they do so even without `sync` if only rank 0 has weights.
    """
    on_meta = [parameter.is_meta for parameter in model.parameters()]
    # A model without parameters counts as real.
    mine = "meta" if on_meta and all(on_meta) else "mixed" if any(on_meta) else "real"
    kinds = dist.all_gather_object(mine)
    if set(kinds) == {"real"}:
        return Beginning.RANK_ZERO if sync else Beginning.REAL
    if set(kinds) == {"meta"}:
        return Beginning.META
    by_rank = dict(enumerate(kinds))
    if kinds[0] != "real" or set(kinds[1:]) != {"meta"}:
        raise ValueError(
            f"Invalid FSDP2 model initialization detected: the parameters are {by_rank} by rank. Build the model with "
            f"real weights on every rank, on the meta device on every rank, or with real weights on rank 0 and on the "
            f"meta device on all others."
        )
    if not (sync or follows_weights):
        raise ValueError(
            f"Detected mixed initialization: the parameters are {by_rank} by rank, and the other ranks do not receive "
            f"rank 0's weights. Set sync_module_states=True."
        )
    return Beginning.RANK_ZERO


def state_to_share(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights and buffers by name on rank 0, and an empty dict on other ranks. Call it before sharding."""
    if dist.get_global_rank() != 0:
        return {}
    with _whole_state_dicts(model):
        state = model.state_dict()
    return {canonical_name(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def take_rank_zero_state(model: nn.Module, state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Load rank 0's weights and buffers into a sharded model. Every rank must call this."""
    materialize(model, device)  # a state dict cannot be loaded into meta tensors
    given: dict[str, Any] = dict(state)
    with _whole_state_dicts(model):
        set_model_state_dict(
            model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
        )
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name not in persistent:  # caches that no state dict has, such as rotary frequencies
            dist.broadcast(buffer, src=0)


def initialize(model: nn.Module, device: torch.device, default: Callable[[nn.Module], None] | None = None) -> None:
    """Initialize a sharded model on the meta device, with values that do not depend on the number of ranks.

    A module with parameters or buffers of its own is initialized by `param_init_fn(module)` of the module or its
    nearest ancestor that defines it, else by `default`, else by its `reset_parameters()`. Modules are initialized once
    each, children first. The function sees the module's whole tensors: every rank draws them and keeps its shard.

    Args:
        model: A sharded model on the meta device.
        device: The device to move its tensors to.
        default: Called with modules that have no `param_init_fn`.

    Raises:
        ValueError: If a module has neither `param_init_fn` nor `reset_parameters`, and there is no default.
        TypeError: If a `param_init_fn` is not callable.
        AssertionError: If a parameter on the meta device is not sharded although it could be.
    """
    # Find all functions before any tensor moves: errors leave the model unchanged, and nothing is on meta afterwards.
    pending = [
        (module, _init_function(name, module, ancestors, default)) for name, module, ancestors in _to_fill(model)
    ]
    on_meta = [(name, p) for name, p in model.named_parameters() if p.is_meta and not isinstance(p, DTensor)]
    whole = [name for name, parameter in on_meta if not stays_whole(parameter)]
    if whole:
        # They would be recreated with different values on each rank, and lose their ties.
        raise AssertionError(
            f"the parameters {whole[:5]} are on the meta device and are not sharded (_fsdp_wrap=False, "
            f"ignored_modules, or a parameter of the model itself), so that each rank would initialize them "
            f"differently. Build these modules with real weights, or let them be sharded."
        )
    materialize(model, device)
    for module, fill in pending:
        _fill_whole(module, fill, device)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Move meta tensors to a device with uninitialized values, preserving tied parameters."""
    meta_safe_apply(model, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def _to_fill(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """Yield the modules that directly hold meta tensors, children first, each with its name and ancestors."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, ancestors: list[nn.Module]) -> Iterator[tuple[str, nn.Module, Any]]:
        if module in seen:
            return
        seen.add(module)
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child, [*ancestors, module])
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors):
            yield canonical_name(name), module, ancestors

    yield from walk("", model, [])


def _init_function(
    name: str, module: nn.Module, ancestors: list[nn.Module], default: Callable[[nn.Module], None] | None
) -> Callable[[nn.Module], object]:
    for holder in (module, *reversed(ancestors)):
        function = getattr(holder, "param_init_fn", None)
        if callable(function):
            return function
        if function is not None:
            raise TypeError(
                f"param_init_fn={function!r} of a {type(holder).__name__} is not a function. Define "
                f"param_init_fn(self, module), which fills the weights of a module."
            )
    if default is not None:
        return default
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        return lambda _: reset()
    raise ValueError(
        f"the module {name!r} ({type(module).__name__}) is on the meta device and has neither param_init_fn and "
        f"reset_parameters to fill its weights: neither it nor a module that holds it defines param_init_fn(module), "
        f"and it has no reset_parameters(). Define one of them, or build the model with real weights."
    )


def _fill_whole(module: nn.Module, fill: Callable[[nn.Module], object], device: torch.device) -> None:
    """Initialize whole tensors in place of a module's shards, and keep this rank's part of them."""
    sharded = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    for name, shard in sharded.items():
        # One module at a time, so that at most its own full weights are in memory next to the shards.
        whole = torch.empty(shard.shape, dtype=shard.dtype, device=device)
        module._parameters[name] = nn.Parameter(whole, requires_grad=shard.requires_grad)
    try:
        fill(module)
        with torch.no_grad():
            for name, shard in sharded.items():
                filled = module._parameters[name]  # the function may have replaced it
                assert filled is not None
                shard.to_local().copy_(own_region(shard, filled.detach()))
    finally:
        module._parameters.update(sharded)


@contextmanager
def _whole_state_dicts(model: nn.Module) -> Iterator[None]:
    """Make PEFT models use whole state dicts instead of adapter weights only."""
    partial: list[Any] = [module for module in model.modules() if getattr(module, "should_save_peft_only", False)]
    for module in partial:
        module.should_save_peft_only = False
    try:
        yield
    finally:
        for module in partial:
            module.should_save_peft_only = True


@torch.no_grad()
def meta_safe_apply(
    module: nn.Module,
    fn: Callable[[torch.Tensor], torch.Tensor],
    ignored_modules: Collection[str | nn.Module] = (),
    module_name: str = "",
) -> nn.Module:
    """Apply a function to each parameter, gradient and buffer of a module in place, preserving tied tensors.

    A parameter stays the same object, which optimizers refer to, unless it moves to or from the meta device.

    Args:
        module: The module, including its descendants. For a sharded model, the outermost unit.
        fn: Called once with each tensor, such as `lambda tensor: torch.empty_like(tensor, device="cpu")`.
        ignored_modules: Modules to skip with their descendants, or names of modules, parameters and buffers to skip.
        module_name: The prefix of those names if `module` is part of a larger model.

    Returns:
        The module.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> model = meta_safe_apply(model, lambda tensor: torch.zeros_like(tensor, device="cpu"), {"1"})
        >>> [parameter.device.type for parameter in model.parameters()]
        ['cpu', 'cpu', 'meta', 'meta']
    """
    parameters: dict[torch.Tensor, nn.Parameter] = {}
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for name, part in _walk(module, module_name, ignored_modules):
        for key, parameter in part._parameters.items():
            if parameter is None or _join(name, key) in ignored_modules:
                continue
            if parameter not in parameters:
                parameters[parameter] = _applied(parameter, fn)
            part._parameters[key] = parameters[parameter]
        for key, buffer in part._buffers.items():
            if buffer is None or _join(name, key) in ignored_modules:
                continue
            if buffer not in buffers:
                buffers[buffer] = fn(buffer)
            part._buffers[key] = buffers[buffer]
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part._apply(lambda tensor: tensor)  # makes FSDP2 units refresh their references to the shards
    return module


def _walk(module: nn.Module, name: str, ignored: Collection[str | nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in ignored or (name and name in ignored):
        return
    yield name, module
    for child_name, child in module.named_children():
        yield from _walk(child, _join(name, child_name), ignored)


def _applied(parameter: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Parameter:
    applied, grad = fn(parameter), None if parameter.grad is None else fn(parameter.grad)
    if applied is parameter:
        return parameter
    if applied.is_meta == parameter.is_meta:
        parameter.data = applied
    else:  # `.data` cannot change between meta and a real device
        parameter = nn.Parameter(applied, requires_grad=parameter.requires_grad)
    parameter.grad = grad
    return parameter


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key

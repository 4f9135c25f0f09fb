"""Collect and load state dicts of sharded models of Composer's types `'full'`, `'sharded'` and `'local'`.

| type | a rank gets | loads on |
|---|---|---|
| `'full'` | full tensors on the CPU, on rank 0; other ranks an empty dict | any number of ranks |
| `'sharded'` | `DTensor`s | the same mesh |
| `'local'` | this rank's part of the tensors | as many ranks, sharded in the same way |

Tensors that need not be gathered or moved share the memory of the model or the optimizer.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_checkpoint import _spread as spread
from composer_checkpoint._ranks import Ranks
from composer_checkpoint._tree import named_leaves
from composer_checkpoint.errors import first_few
from composer_checkpoint.modular._restore import receive_state
from composer_checkpoint.modular.state_dict import check_type, of_type, own_part, room_for
from composer_dist.wrapping import canonical_name, unwrap_model

_types: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()
"""Type of a module's state dicts in the innermost context; `None` for PyTorch's own."""


@contextmanager
def fsdp_state_dict_type_context(module: nn.Module, state_dict_type: str = "full") -> Iterator[None]:
    """Set the type of a module's `state_dict()` and `load_state_dict()` inside the context.

    Names are those of the model without wrappers. Every rank must call these methods together. A `'full'` state is
    loaded from rank 0 on all ranks; the states of other ranks are ignored.

    Args:
        module: A plain model, one in `DistributedDataParallel`, or a compiled, FSDP2 or tensor parallel one.
        state_dict_type: `'full'`, `'sharded'` or `'local'`, see above.

    Raises:
        ValueError: If the type is unknown; on loading, on every rank, if the state is of another type, or a `'local'`
            state is of another number of ranks.
        TypeError: If the module is wrapped in FSDP1.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> with fsdp_state_dict_type_context(model, "full"):
        ...     weights = model.state_dict()
        ...     model.load_state_dict(weights)
        <All keys matched successfully>
        >>> sorted(weights)
        ['bias', 'weight']
    """
    check_type(state_dict_type)
    spread.refuse_fsdp1(module)
    if _types.get(module) is not None:  # nested: the hooks of the outer context are active already
        with _type_of(module, state_dict_type):
            yield
        return
    hooks = [module.register_state_dict_post_hook(_give), module.register_load_state_dict_pre_hook(_take)]
    try:
        with _type_of(module, state_dict_type):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def fsdp_get_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, state_dict_type: str = "full"
) -> dict[str, Any]:
    """Return an optimizer's state with parameters by name. Every rank must call this.

    Args:
        model: The model, which has the parameters' names.
        optim: The optimizer. It need not have stepped.
        state_dict_type: `'full'`, `'sharded'` or `'local'`, see above. `get_fsdp_sharded_optim_state_dict` converts
            a `'full'` one to what the optimizer loads.

    Raises:
        ValueError: If the type is unknown.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> fsdp_get_optim_state_dict(model, torch.optim.SGD(model.parameters()))["param_groups"][0]["params"]
        ['weight']
    """
    check_type(state_dict_type)
    return of_type(spread.named_optimizer_state(model, optim), state_dict_type)


def get_fsdp_full_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, rank0_only: bool = True
) -> dict[str, Any]:
    """Return an optimizer's full state with parameters by name, on the CPU. Every rank must call this.

    Args:
        model: The model, which has the parameters' names.
        optim: The optimizer. It need not have stepped.
        rank0_only: Whether ranks other than 0 get an empty dict.
    """
    return of_type(spread.named_optimizer_state(model, optim), "full", rank0_only=rank0_only)


def get_fsdp_sharded_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None, model: nn.Module
) -> dict[str, Any]:
    """Shard an optimizer's full state for the optimizer of each rank. Every rank must call this.

    The result numbers the parameters in the order of their names in the state, so that `load_state_dict` of an
    optimizer that was built in the same way accepts it.

    Args:
        full_optim_state_dict: Result of `get_fsdp_full_optim_state_dict`, from rank 0; the other ranks may pass `{}` or
            `None`.
        model: A model with any sharding, or none. The state of a parameter is sharded like the parameter.

    Raises:
        ValueError: On every rank, if the state does not name its parameters, or names some that the model lacks.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> whole = get_fsdp_full_optim_state_dict(model, optimizer)
        >>> optimizer.load_state_dict(get_fsdp_sharded_optim_state_dict(whole, model))
    """
    given = dict(full_optim_state_dict or {})
    _refuse_shards(given)
    saved = receive_state(spread.TensorSender(given), model, cpu_offload=False)
    if "param_groups" not in saved:
        raise ValueError(
            f"full_optim_state_dict has the keys {list(saved)}, and no param_groups, on rank 0. Pass what "
            f"get_fsdp_full_optim_state_dict(model, optim) returned, on rank 0 at least."
        )
    names = [name for group in saved["param_groups"] for name in group["params"]]
    parameters = spread.parameters_by_name(model)
    # Parameters outside the model, such as those of a loss function, are named by their position.
    foreign = [
        n for n in names if not isinstance(n, str) or (n not in parameters and not n.startswith("param_groups."))
    ]
    if foreign:
        raise ValueError(
            f"full_optim_state_dict has {len(foreign)} parameters that the model does not have: "
            f"{first_few(map(repr, foreign))}. Pass the state of an optimizer of this model with names "
            f"for parameters, as get_fsdp_full_optim_state_dict(model, optim) returns it."
        )
    # In the order in which an optimizer numbers them.
    number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    groups = [{**group, "params": [number_of[name] for name in group["params"]]} for group in saved["param_groups"]]
    state = {number_of.get(name, name): entries for name, entries in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


@contextmanager
def _type_of(module: nn.Module, state_dict_type: str | None) -> Iterator[None]:
    before = _types.get(module)
    _types[module] = state_dict_type
    try:
        yield
    finally:
        _types[module] = before


def _give(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Hook of `state_dict`: convert the tensors to the type in effect."""
    wanted = _types.get(module)
    if wanted is None:
        return
    wrapper = _prefix_of_wrappers(module)
    keys = [key for key in state_dict if key.startswith(prefix)]
    own = {canonical_name(key.removeprefix(prefix).removeprefix(wrapper)): state_dict.pop(key) for key in keys}
    state_dict.update({prefix + name: value for name, value in of_type(own, wanted).items()})


def _take(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook of `load_state_dict`: convert the tensors to those that the module itself can load."""
    if _types.get(module) is None:  # a module that was copied inside a context has the hooks too
        return
    given = {key.removeprefix(prefix): state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    wrapper = _prefix_of_wrappers(module)
    with _type_of(module, None):  # so that the hook does not convert the result
        own = module.state_dict()
    names = {canonical_name(name.removeprefix(wrapper)): name for name in own}
    if _types.get(module) == "full":
        loads = _received(given, own, names)
    else:
        loads = Ranks().together(
            lambda: {
                name: own_part(name, own.get(names.get(name, name)), value) if torch.is_tensor(value) else value
                for name, value in given.items()
            }
        )
    state_dict.update({prefix + names.get(name, name): value for name, value in loads.items()})


def _received(given: Mapping[str, Any], own: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return this rank's part of the state passed on rank 0."""
    _refuse_shards(given)
    sender = spread.TensorSender(dict(given))

    def take(name: str, slot: spread.Slot) -> torch.Tensor:
        target = own.get(names.get(name, name))
        if not isinstance(sender.outline.get(name), spread.Slot):  # a tensor nested in a module's extra state
            target = torch.empty(slot.shape)
        if not isinstance(target, torch.Tensor) or target.shape != slot.shape:
            # Without data, so that PyTorch itself raises its error about the shape.
            return torch.empty(slot.shape, dtype=slot.dtype, device="meta")
        room = room_for(target, slot.dtype)
        sender.receive(slot, room)
        return room

    return spread.map_slots(sender.outline, take)


def _refuse_shards(given: Mapping[str, Any]) -> None:
    """Raise on all ranks if any of them has a shard, which could not be sent to the others."""

    def look() -> None:
        for name, _ in named_leaves(given, DTensor):
            raise ValueError(
                f"{name} is a DTensor, and whole tensors are needed: weights of state_dict_type='full', or what "
                f"get_fsdp_full_optim_state_dict() returns. Load other weights in a context of their type."
            )

    Ranks().together(look)


def _prefix_of_wrappers(module: nn.Module) -> str:
    """Return the prefix of the innermost model's names in the state dict of its wrapper."""
    inner = unwrap_model(module)
    name = next(name for name, part in module.named_modules() if part is inner)
    return f"{name}." if name else ""

"""Full weights and optimizer state of a DeepSpeed engine, gathered from and scattered to the ranks.

Contents of each rank by stage:

| stage | weights | optimizer state |
|---|---|---|
| 0 | full | of each parameter, or of its float32 copy in half precision |
| 1, 2 | full | of the rank's slice of a group's concatenated parameters, in float32 |
| 3 | a slice of each parameter | of the rank's slices of a group's concatenated parameters, in float32 |

DeepSpeed's public functions (`deepspeed.utils.safe_get_full_fp32_param` and its siblings) gather and set one parameter
at a time at stages 1 to 3. `_Zero` and `_Whole` bypass them for three things: creating the state before the first
step, the float32 copies of stage 0, and a parameter's position in a flat tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as tdist
from torch.nn import Parameter

ParameterGroups = list[list[Parameter]]
"""The parameters of each of an optimizer's groups, in their original order."""

_PER_PARAMETER = "step"  # a scalar per tensor, even if the tensor is a scalar itself


def gather_weights(engine: Any) -> dict[str, Any]:
    """Return the full weights by name. Every rank must call this.

    Trained weights are in float32 if the engine keeps such a copy. If every rank has a tensor in full and in its own
    dtype, the result shares its memory; weights gathered at stage 3 are on the host.
    """
    masters = _masters(engine)
    gathered: dict[int, torch.Tensor] = {}  # by identity, so that tied weights are gathered once
    weights: dict[str, Any] = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            weights[name] = value
            continue
        if id(value) not in gathered:
            gathered[id(value)] = masters.weight(value)
        weights[name] = gathered[id(value)]
    return weights


def scatter_weights(engine: Any, weights: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
    """Load full weights, in place, and return the missing and the unexpected names.

    Every rank must call this with the same weights.
    """
    module, masters = engine.module, _masters(engine)
    own: dict[str, Any] = module.state_dict(keep_vars=True)
    if masters.are_sliced:
        missing = [name for name in own if name not in weights]
        unexpected = [name for name in weights if name not in own]
        # A parameter's own shape is only that of its slice, so load_state_dict cannot check it.
        _check_names_and_shapes(
            type(module).__name__, own, weights, missing if strict else [], unexpected if strict else []
        )
        # Buffers, which are full on every rank.
        module.load_state_dict({name: weights[name] for name in weights if not _is_parameter(own, name)}, strict=False)
    else:
        keys = module.load_state_dict(dict(weights), strict=strict)
        missing, unexpected = keys.missing_keys, keys.unexpected_keys
    with torch.no_grad():
        for name in weights:
            if _is_parameter(own, name):
                masters.set_weight(own[name], weights[name])
    return missing, unexpected


def gather_optimizer(engine: Any, groups: ParameterGroups) -> dict[str, Any]:
    """Return the state as the original optimizer would have it. Every rank must call this."""
    masters = _masters(engine)
    parameters = [parameter for group in groups for parameter in group]
    state = {
        index: {key: masters.state(parameter, key) for key in masters.keys(parameter)}
        for index, parameter in enumerate(parameters)
    }
    described, start = [], 0
    for options, group in zip(engine.basic_optimizer.param_groups, groups, strict=True):
        indices = list(range(start, start + len(group)))
        described.append({**{key: value for key, value in options.items() if key != "params"}, "params": indices})
        start += len(group)
    return {"state": {index: values for index, values in state.items() if values}, "param_groups": described}


def scatter_optimizer(engine: Any, groups: ParameterGroups, state_dict: Mapping[str, Any]) -> None:
    """Load such a state, in place. Every rank must call this with the same state."""
    sizes, own_sizes = [len(group["params"]) for group in state_dict["param_groups"]], [len(group) for group in groups]
    if sizes != own_sizes:
        raise ValueError(
            f"the optimizer's state has parameter groups of the sizes {sizes}, but the optimizer has {own_sizes}. Load "
            "it into an optimizer that was made for the same parameters."
        )
    for options, saved in zip(engine.basic_optimizer.param_groups, state_dict["param_groups"], strict=True):
        options.update({key: value for key, value in saved.items() if key != "params"})
    parameters = [parameter for group in groups for parameter in group]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    states = {
        parameter: state_dict["state"][index]
        for parameter, index in zip(parameters, indices, strict=True)
        if state_dict["state"].get(index)
    }
    masters = _masters(engine)
    with torch.no_grad():
        masters.make_room(states)  # before the first step the optimizer has no state to set
        for parameter, values in states.items():
            for key, value in values.items():
                if _is_whole(key, value, _shape(parameter)):
                    masters.set_state(parameter, key, value)


def find_in_optimizer(engine: Any, parameters: Iterable[Parameter]) -> Iterator[tuple[Parameter, torch.Tensor, slice]]:
    """Yield each parameter with the tensor that this rank's optimizer updates for it, and its slice of that tensor.

    For stages 0 to 2. Parameters that this rank does not update are left out.
    """
    masters = _masters(engine)
    for parameter in parameters:
        if (place := masters.place(parameter)) is not None:
            yield parameter, *place


def forget_trial_step(engine: Any) -> None:
    """Undo the step without gradients in which a stage 0 engine in half precision creates its optimizer's state.

    In that step weight decay changes the float32 copies and starts the momentum.
    """
    masters = _masters(engine)
    if isinstance(masters, _Whole):
        masters.begin_again()


def _is_parameter(own: Mapping[str, Any], name: str) -> bool:
    return isinstance(own.get(name), Parameter)


def _shape(tensor: torch.Tensor) -> torch.Size:
    return getattr(tensor, "ds_shape", tensor.shape)


def _is_whole(key: str, value: object, shape: torch.Size) -> bool:
    """Return whether an entry of an optimizer's state has one number per element of the parameter."""
    return key != _PER_PARAMETER and isinstance(value, torch.Tensor) and value.shape == shape


def _check_names_and_shapes(
    model: str, own: Mapping[str, Any], weights: Mapping[str, Any], missing: list[str], unexpected: list[str]
) -> None:
    """Raise as torch's `load_state_dict` does, on every rank."""
    faults = [f"Missing key(s) in state_dict: {missing}."] if missing else []
    faults += [f"Unexpected key(s) in state_dict: {unexpected}."] if unexpected else []
    faults += [
        f"size mismatch for {name}: {tuple(weights[name].shape)} was given, the model has {tuple(_shape(own[name]))}."
        for name in own
        if _is_parameter(own, name) and name in weights and weights[name].shape != _shape(own[name])
    ]
    if faults:
        raise RuntimeError("\n".join([f"Error(s) in loading state_dict for {model}:", *faults]))


def _masters(engine: Any) -> "_Whole | _Zero":
    """Return the tensors that the engine's optimizer updates, viewed as one full tensor per parameter."""
    return _Whole(engine) if engine.zero_optimization_stage() == 0 else _Zero(engine)


class _Whole:
    """Stage 0: each rank has everything."""

    are_sliced = False  # whether the parameters of the model are only slices

    def __init__(self, engine: Any) -> None:
        self._optimizer: torch.optim.Optimizer = engine.basic_optimizer
        self._copies: dict[Parameter, torch.Tensor] = {}
        wrapper = engine.optimizer
        if wrapper is self._optimizer:  # float32: the optimizer updates the parameters themselves
            return
        if not hasattr(wrapper, "fp32_groups"):
            raise RuntimeError(
                f"DeepSpeed wraps this optimizer in {type(wrapper).__name__}, whose state cannot be taken apart. Set "
                "deepspeed_config['zero_optimization'] to {'stage': 1}, or use an optimizer of torch."
            )
        for halves, copies in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            self._copies.update(zip(halves, copies, strict=True))

    def _master(self, tensor: Any) -> torch.Tensor:
        copy = self._copies.get(tensor)
        return tensor if copy is None else copy

    def begin_again(self) -> None:
        if self._copies:  # half precision; in float32 the engine takes no such step
            self._optimizer.state.clear()
        for half, copy in self._copies.items():
            copy.data.copy_(half.data)

    def weight(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._master(tensor).detach()

    def set_weight(self, parameter: Parameter, value: torch.Tensor) -> None:
        self._master(parameter).copy_(value)

    def place(self, parameter: Parameter) -> tuple[torch.Tensor, slice] | None:
        return self._master(parameter), slice(None)

    def keys(self, parameter: Parameter) -> list[str]:
        return list(self._optimizer.state.get(self._master(parameter), {}))

    def state(self, parameter: Parameter, key: str) -> Any:
        return self._optimizer.state[self._master(parameter)][key]

    def make_room(self, states: Mapping[Parameter, Mapping[str, Any]]) -> None:
        self._optimizer.state.clear()
        for parameter, values in states.items():
            self._optimizer.state[self._master(parameter)] = {key: _copy(value) for key, value in values.items()}

    def set_state(self, parameter: Parameter, key: str, value: torch.Tensor) -> None:
        master = self._master(parameter)
        self._optimizer.state[master][key] = value.detach().clone().to(master.device)


class _Zero:
    """Stages 1 to 3: the optimizer has one flat tensor per group, with this rank's part."""

    def __init__(self, engine: Any) -> None:
        from deepspeed import utils, zero  # loaded already, since an engine exists

        self._functions: Any = utils
        self._zero: Any = zero
        self._wrapper = engine.optimizer
        self._optimizer: torch.optim.Optimizer = engine.basic_optimizer
        self.are_sliced = engine.zero_optimization_stage() == 3
        self._flats: dict[Parameter, torch.Tensor] = {}
        if not self.are_sliced:
            groups = zip(self._wrapper.bit16_groups, self._wrapper.single_partition_of_fp32_groups, strict=True)
            self._flats = {parameter: flat for group, flat in groups for parameter in group}
        self._link_states()

    def _link_states(self) -> None:
        """Connect each parameter to its state in the flat tensors for DeepSpeed's functions, at stages 1 and 2.

        The engine does so only once, after its optimizer has updated the first group, and misses the others (0.19).
        """
        if not self.are_sliced and self._optimizer.state:
            self._wrapper._hp_optimizer_states_linked = False
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def weight(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Parameter):
            return tensor.detach()
        # Frozen weights have no float32 copy.
        if not self.are_sliced and (tensor.dtype is torch.float32 or not self._is_moved(tensor)):
            return tensor.detach()
        if self._is_moved(tensor):
            whole = self._functions.safe_get_full_fp32_param(tensor)
            # On the host, since the full model may not fit on the device.
            return whole.cpu() if self.are_sliced else whole
        with self._zero.GatheredParameters([tensor]):
            return tensor.detach().cpu().clone()

    def set_weight(self, parameter: Parameter, value: torch.Tensor) -> None:
        if self.are_sliced:
            # Rank 0's value is scattered to all slices on leaving.
            with self._zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)
        if not self._is_moved(parameter):  # frozen: no float32 copy to set
            return
        if self.are_sliced:
            self._functions.safe_set_local_fp32_param(parameter, _slice(parameter, value))
        else:
            self._functions.safe_set_full_fp32_param(parameter, _like(parameter, value))

    def place(self, parameter: Parameter) -> tuple[torch.Tensor, slice] | None:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        address = mapping.get_hp_fragment_address()
        return self._flat(parameter), slice(address.start, address.start + address.numel)

    def keys(self, parameter: Parameter) -> list[str]:
        return list(self._optimizer.state.get(self._flat(parameter), {})) if self._is_moved(parameter) else []

    def state(self, parameter: Parameter, key: str) -> Any:
        flat = self._flat(parameter)
        value = self._optimizer.state[flat][key]
        if not _is_whole(key, value, flat.shape):  # not sliced, such as a step count
            return value
        whole = self._functions.safe_get_full_optimizer_state(parameter, key)
        return whole.cpu() if self.are_sliced else whole

    def make_room(self, states: Mapping[Parameter, Mapping[str, Any]]) -> None:
        self._optimizer.state.clear()
        for parameter, values in states.items():
            flat = self._flat(parameter)
            if flat in self._optimizer.state:  # the parameters of a group share one flat tensor
                continue
            self._optimizer.state[flat] = {
                key: torch.zeros_like(flat) if _is_whole(key, value, _shape(parameter)) else _copy(value)
                for key, value in values.items()
            }
        self._link_states()

    def set_state(self, parameter: Parameter, key: str, value: torch.Tensor) -> None:
        if self.are_sliced:
            self._functions.safe_set_local_optimizer_state(parameter, _slice(parameter, value), key)
        else:
            self._functions.safe_set_full_optimizer_state(parameter, _like(parameter, value), key)

    def _is_moved(self, parameter: Parameter) -> bool:
        """Return whether the optimizer updates the parameter; it may be frozen or not in the optimizer."""
        if self.are_sliced:
            return self._wrapper.get_param_id(parameter) in self._wrapper.grad_position
        return parameter in self._flats

    def _flat(self, parameter: Parameter) -> torch.Tensor:
        if self.are_sliced:
            index = self._wrapper.grad_position[self._wrapper.get_param_id(parameter)][0]
            return self._wrapper.fp32_partitioned_groups_flat[index]
        return self._flats[parameter]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _like(parameter: Parameter, value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(device=parameter.device, dtype=torch.float32)


def _slice(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a full tensor; all slices have equal length, so the last ones are padded.

    DeepSpeed's own function for full tensors fails if they do not divide evenly.
    """
    size, rank = parameter.ds_tensor.numel(), tdist.get_rank(parameter.ds_process_group)
    flat = _like(parameter, value).flatten()[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))

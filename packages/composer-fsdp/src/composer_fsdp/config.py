"""The settings as users write them: `FSDPConfig`, `FSDP2Config`, `TPConfig` and `ParallelismConfig`.

Nothing here needs torch. What the settings mean together is in `composer_fsdp.plan`.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from composer_fsdp.keys import by_name, check_keys, explain_key, take_legacy_keys

__all__ = ["FSDP2Config", "FSDPConfig", "ParallelismConfig", "TPConfig"]

_PREFIX_DIR = "ep{epoch}-ba{batch}"


class _Checked:
    """Refuses keywords that are no fields before the dataclass does, which would not say what was meant."""

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        check_keys(cls.__name__, settings, _names(cls))
        return super().__new__(cls)


@dataclass
class FSDPConfig(_Checked):
    """How a model is sharded: all settings, those of older releases among them.

    Strings may be in any case. In the place of `'FULL_SHARD'` and the like, torch's own `ShardingStrategy.FULL_SHARD`
    will do.

    Args:
        activation_checkpointing: Compute again in the backward pass what the chosen modules computed in the forward
            pass, instead of keeping it; `'selective'` keeps the results of matrix products all the same, if
            nothing changes them in place. Which modules: see `composer_fsdp.activation`.
        activation_checkpointing_reentrant: Which of torch's implementations does it: `True`, if said so, the reentrant
            one, which gives no gradients to a module whose inputs need none.
        activation_cpu_offload: Keep the activations of the chosen modules on the host.
        auto_wrap: Whether to shard the model; `False` if it is sharded already.
        te_checkpoint_wrapper: Checkpoint activations by way of TransformerEngine.
        te_shard_fp8_weight: Gather TransformerEngine's weights in float8.
        backward_prefetch: When the next module's weights are gathered in the backward pass: `'BACKWARD_PRE'` or
            `'BACKWARD_POST'` its turn, or `'NONE'` ahead, for which `None` will do.
        backward_prefetch_limit: How many modules ahead.
        cpu_offload: Keep weights, gradients and optimizer state on the host between uses.
        data_parallel_shard_degree: Over how many ranks the weights are sharded; -1 for all that the others leave.
        data_parallel_replicate_degree: How many copies of the sharded model there are.
        forward_prefetch: Gather the next module's weights ahead in the forward pass, too.
        forward_prefetch_limit: How many modules ahead.
        ignored_modules: Modules that stay whole on each rank. Their gradients are averaged all the same.
        keep_low_precision_grads: Without effect; gradients are in float32 once they are reduced.
        limit_all_gathers: Without effect; gathers are always limited.
        load_monolith_rank0_only: Whether only rank 0 reads a checkpoint, and hands the weights on.
        load_planner: A `LoadPlanner` of `torch.distributed.checkpoint`, for whoever loads a sharded checkpoint. `None`
            lets it choose one that refuses the checkpoint of another model.
        save_planner: A `SavePlanner`, for whoever saves one.
        mixed_precision: `'FULL'`, `'DEFAULT'`, `'PURE'`, or a dict of `param_dtype`, `reduce_dtype` and
            `buffer_dtype`; see `composer_fsdp.mixed_precision`. Torch's own `MixedPrecision` will do, too.
        process_group: Which ranks share the weights, if not all: `'self'`, `'node'`, `'local_rank_across_nodes'`,
            `'setK'`, `'modK'`, a list of ranks, a group, or a pair of these that share and that replicate.
        sharded_ckpt_prefix_dir: What the folder of a sharded checkpoint is called.
        sharding_strategy: `'FULL_SHARD'`, `'SHARD_GRAD_OP'`, `'NO_SHARD'`, `'HYBRID_SHARD'` or `'_HYBRID_SHARD_ZERO2'`.
        state_dict_type: How checkpoints are saved: `'full'`, `'sharded'` or `'local'`.
        sync_module_states: Whether all ranks begin with rank 0's weights.
        use_orig_params: Whether an optimizer may have several groups, or a part of the parameters.
        verbose: Print the model and the settings, once it is sharded.
        min_params: From how many parameters on a module is sharded by itself. `None` or 0 for none.
        tie_policy: What becomes of modules that are to be sharded separately and share weights: `'error'`, or
            `'group'` to shard them together.
        grad_sync_every_microbatch: Whether gradients are reduced after each microbatch, which saves memory, or after
            the last one, which saves communication.

    Raises:
        TypeError: If there is no such setting: with what replaced it, or the nearest names.
        ValueError: If a device mesh is given, which follows from the degrees.

    Example:
        >>> FSDPConfig(sharding_strategy="hybrid_shard", data_parallel_replicate_degree=2).sharding_strategy
        'HYBRID_SHARD'
    """

    activation_checkpointing: bool | str = False
    activation_checkpointing_reentrant: bool = True
    activation_cpu_offload: bool = False
    auto_wrap: bool = True
    te_checkpoint_wrapper: bool = False
    te_shard_fp8_weight: bool = False
    backward_prefetch: str = "BACKWARD_POST"
    backward_prefetch_limit: int = 1
    cpu_offload: bool = False
    data_parallel_shard_degree: int = -1
    data_parallel_replicate_degree: int | None = None
    forward_prefetch: bool = False
    forward_prefetch_limit: int = 1
    ignored_modules: Iterable[Any] | None = None
    keep_low_precision_grads: bool = False
    limit_all_gathers: bool = True
    load_monolith_rank0_only: bool = False
    load_planner: Any = None
    save_planner: Any = None
    mixed_precision: str | dict[str, Any] = "DEFAULT"
    process_group: Any = None
    sharded_ckpt_prefix_dir: str = _PREFIX_DIR
    sharding_strategy: str = "FULL_SHARD"
    state_dict_type: str = "full"
    sync_module_states: bool = False
    use_orig_params: bool = True
    verbose: bool = False
    min_params: float | str | None = 1e8
    tie_policy: str = "error"
    grad_sync_every_microbatch: bool = True
    _device_mesh: Any = field(default=None, init=False, repr=False, compare=False)
    # The default that Composer documents is not what it is good to do: who did not ask gets the newer implementation.
    _asks_for_reentrant: bool = field(init=False, repr=False, compare=False)

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuse a mesh before anything else."""
        for key in ("device_mesh", "_device_mesh"):
            if key in settings:
                raise ValueError(
                    f"Directly specifying device mesh for FSDP was deprecated: {key}={settings[key]!r}. Give "
                    f"data_parallel_shard_degree and data_parallel_replicate_degree, from which the mesh is made, or "
                    f"an FSDP2Config(device_mesh=...)."
                )
        config = super().__new__(cls, **settings)
        config._asks_for_reentrant = bool(settings.get("activation_checkpointing_reentrant", False))
        return config

    def __post_init__(self) -> None:
        for name in ("sharding_strategy", "backward_prefetch", "mixed_precision"):
            setattr(self, name, _in_case(getattr(self, name), str.upper))
        if self.backward_prefetch is None:  # as PyTorch's first version of FSDP says it
            self.backward_prefetch = "NONE"
        for name in ("state_dict_type", "tie_policy", "activation_checkpointing"):
            setattr(self, name, _in_case(getattr(self, name), str.lower))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], *, stacklevel: int = 1) -> Self:
        """Build a configuration from a dict, which may have keys of older releases.

        Args:
            settings: Fields of this class, and `flatten_parameters`, `min_params` and `load_fsdp_monolith_rank0_only`,
                each with a `DeprecationWarning`.
            stacklevel: To whose line the warnings point; 1 is the caller's.

        Raises:
            TypeError, ValueError: As the constructor.
        """
        return cls(**take_legacy_keys(settings, stacklevel=stacklevel + 1))

    @property
    def asks_for_reentrant(self) -> bool:
        """Whether somebody chose the reentrant implementation of activation checkpointing."""
        return self._asks_for_reentrant

    @property
    def device_mesh(self) -> Any:
        """The ranks that share and replicate the weights, once the model is sharded."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, mesh: Any) -> None:
        self._device_mesh = mesh


def _read_only(name: str, value: Any) -> property:
    def answer(_: object) -> Any:
        return value

    answer.__name__ = name
    return property(answer, doc=f"Always {value!r}; an `FSDPConfig` lets one choose.")


@dataclass
class FSDP2Config(_Checked):
    """How a model is sharded, in the few settings of FSDP2's own function.

    Args:
        device_mesh: The ranks: 1-D shards over all of them, 2-D replicates over the first axis. All ranks when `None`.
        reshard_after_forward: Whether weights are freed after the forward pass; a number keeps them sharded over
            groups of so many ranks.
        activation_checkpointing: As in `FSDPConfig`.
        activation_cpu_offload: As in `FSDPConfig`.
        state_dict_type: As in `FSDPConfig`.
        load_monolith_rank0_only: As in `FSDPConfig`.
        mixed_precision: As in `FSDPConfig`.
        verbose: Log the model and the settings, once it is sharded.

    Raises:
        TypeError: If there is no such setting: with what replaced it, or the nearest names.
    """

    device_mesh: Any = None
    reshard_after_forward: bool | int = True
    activation_checkpointing: bool | str = False
    activation_cpu_offload: bool = False
    state_dict_type: str = "sharded"
    load_monolith_rank0_only: bool = False
    mixed_precision: str | dict[str, Any] = "DEFAULT"
    verbose: bool = False
    _sync_module_states: bool = field(default=False, init=False, repr=False)

    load_planner = _read_only("load_planner", None)
    save_planner = _read_only("save_planner", None)
    sharded_ckpt_prefix_dir = _read_only("sharded_ckpt_prefix_dir", _PREFIX_DIR)
    data_parallel_shard_degree = _read_only("data_parallel_shard_degree", -1)
    data_parallel_replicate_degree = _read_only("data_parallel_replicate_degree", None)
    use_orig_params = _read_only("use_orig_params", True)

    def __post_init__(self) -> None:
        self.mixed_precision = _in_case(self.mixed_precision, str.upper)
        for name in ("state_dict_type", "activation_checkpointing"):
            setattr(self, name, _in_case(getattr(self, name), str.lower))
        # The text is Composer's, whose users filter it.
        warnings.warn("FSDP2 Config/APIs are experimental and subject to heavy changes", UserWarning, stacklevel=3)

    @property
    def sync_module_states(self) -> bool:
        """Whether the ranks were given rank 0's weights; set when the model is sharded."""
        return self._sync_module_states

    @sync_module_states.setter
    def sync_module_states(self, sync: bool) -> None:
        self._sync_module_states = sync

    @classmethod
    def settable_attrs(cls) -> set[str]:
        """Return the names of the settings."""
        return _names(cls)

    @classmethod
    def from_compatible_attrs(cls, attrs: Mapping[str, Any]) -> Self:
        """Build a configuration from a dict that may have settings of `FSDPConfig`, too, which are passed over.

        Each of those gives a `UserWarning`.
        """
        known = cls.settable_attrs()
        for name, value in attrs.items():
            if name not in known:
                hint = "" if name in _names(FSDPConfig) else f". {explain_key(name, known | _names(FSDPConfig))}"
                warnings.warn(
                    f"Attribute '{name}: {value}' is not a settable attribute of FSDP2Config and will be ignored{hint}",
                    UserWarning,
                    stacklevel=2,
                )
        return cls(**{name: value for name, value in attrs.items() if name in known})


@dataclass
class TPConfig(_Checked):
    """How single tensors are split over ranks.

    Args:
        device_mesh: The ranks that hold one tensor together. Made from the degree when `None`.
        tensor_parallel_degree: How many ranks hold one tensor together.
        layer_plan: From patterns of module names to torch's `ParallelStyle`, such as
            `{'blocks.*.up': ColwiseParallel(), 'blocks.*.down': RowwiseParallel()}`. Without one no tensor is split,
            unless the model comes with tensors that are, and there is a `UserWarning`.

    Raises:
        TypeError: If there is no such setting: with the nearest names.
    """

    device_mesh: Any = None
    tensor_parallel_degree: int = 1
    layer_plan: Mapping[str, Any] | None = None


@dataclass
class ParallelismConfig(_Checked):
    """How a model is spread over ranks.

    Args:
        fsdp: Settings of sharding.
        tp: Settings of tensor parallelism, which needs one of the other two.
        fsdp2: Settings of sharding, in the narrower form.

    Raises:
        TypeError: If there is no such part: with the nearest names.
    """

    fsdp: FSDPConfig | None = None
    tp: TPConfig | None = None
    fsdp2: FSDP2Config | None = None


def _names(cls: type) -> set[str]:
    """Return the names of a dataclass's public fields."""
    return {entry.name for entry in fields(cls) if not entry.name.startswith("_")}  # pyright: ignore[reportArgumentType]  # each caller is a dataclass


def _in_case(value: Any, change: Any) -> Any:
    value = by_name(value)
    return change(value) if isinstance(value, str) else value

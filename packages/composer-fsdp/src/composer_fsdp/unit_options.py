"""What `fsdp_wrap_fn` may answer: whether a module is a unit of its own, or with which settings it is one."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import dist
from composer_fsdp.checks import HYBRID_STRATEGIES, PREFETCHES, STRATEGIES, check_mesh, check_reshard, warn
from composer_fsdp.config import FSDP2Config
from composer_fsdp.groups import check_group, is_pair, size_of_group
from composer_fsdp.keys import by_name, explain_key
from composer_fsdp.mixed_precision import resolve_dtypes
from composer_fsdp.plan import ShardingPlan

__all__ = ["WrapFunction", "answer_of", "check_options", "function_of"]

WrapFunction = Callable[[nn.Module], bool | Mapping[str, Any]]

_KEYS = (
    "sharding_strategy",
    "process_group",
    "mixed_precision",
    "backward_prefetch",
    "cpu_offload",
    "reshard_after_forward",
    "forward_prefetch_limit",
    "shard_placement_fn",
    "grad_sync",
)
_NARROW_KEYS_OF_A_UNIT = ("reshard_after_forward", "mixed_precision", "device_mesh")


def function_of(name: str, root: nn.Module) -> WrapFunction | None:
    """Return a root's `fsdp_wrap_fn`, if it has one.

    Raises:
        TypeError: If what it has cannot be called.
    """
    function: Any = getattr(root, "fsdp_wrap_fn", None)
    if function is not None and not callable(function):
        raise TypeError(
            f"{name or 'the model'}.fsdp_wrap_fn={function!r} is no function. Define fsdp_wrap_fn(self, module), which "
            f"returns True, False or a dict of settings."
        )
    return cast("WrapFunction | None", function)


def answer_of(function: WrapFunction | None, name: str, module: nn.Module) -> bool | Mapping[str, Any]:
    """Return what a function says of a module; nothing at all is a no.

    Raises:
        TypeError: If the answer is neither yes, no, nor a dict.
    """
    answer: Any = None if function is None else function(module)
    if answer is None:
        return False
    if isinstance(answer, Mapping):
        options = {key: by_name(value) for key, value in answer.items()}
        if options.get("backward_prefetch", "") is None:  # as PyTorch's first version of FSDP says it
            options["backward_prefetch"] = "NONE"
        return options
    if isinstance(answer, bool):
        return answer
    raise TypeError(
        f"fsdp_wrap_fn returned {answer!r}, a {type(answer).__name__}, for {name!r}. Return True to shard the module "
        f"as a unit of its own, False not to, or a dict of settings such as {{'mixed_precision': 'FULL'}}."
    )


def check_options(name: str, options: Mapping[str, Any], plan: ShardingPlan) -> None:
    """Refuse settings that a single unit cannot have.

    Raises:
        ValueError: If there is no such setting, or no such value. A KeyError for the keys of an `FSDP2Config`.
        RuntimeError: If the ranks cannot be dealt out into the process group.
    """
    if plan.version == 2:
        _check_narrow_keys(name, options)
    else:
        for key in options:
            if key not in _KEYS:
                raise ValueError(
                    f"fsdp_wrap_fn returned the setting {key!r} for {name!r}, which is none of a single module. "
                    f"{explain_key(key, _KEYS)} Valid keys are: {', '.join(_KEYS)}."
                )
    try:
        _check_values(options, plan)
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"fsdp_wrap_fn returned {dict(options)!r} for {name!r}: {error}") from None


def _check_narrow_keys(name: str, options: Mapping[str, Any]) -> None:
    allowed = FSDP2Config.settable_attrs()
    if not allowed >= set(options):
        wrong = next(key for key in options if key not in allowed)
        # The text is Composer's; users compare its beginning.
        raise KeyError(
            f"Invalid FSDP2 config keys in wrap_fn return value. Valid keys are: {allowed}. The dict for {name!r} "
            f"has {wrong!r}. {explain_key(wrong, allowed)}"
        )
    for key in options:
        if key not in _NARROW_KEYS_OF_A_UNIT:
            warn(  # without the unit's name, so that it is said once for all of them
                f"fsdp_wrap_fn returned {key}={options[key]!r}, which does nothing: it is a setting of the whole "
                f"model. Set it in the FSDP2Config; a unit has {', '.join(_NARROW_KEYS_OF_A_UNIT)}.",
                stacklevel=2,
            )


def _check_values(options: Mapping[str, Any], plan: ShardingPlan) -> None:
    for key, accepted in (
        ("sharding_strategy", STRATEGIES),
        ("backward_prefetch", PREFETCHES),
        ("grad_sync", ("group", "world")),
        ("cpu_offload", (True, False)),
    ):
        value = options.get(key, accepted[0])
        if (value.upper() if isinstance(value, str) and key != "grad_sync" else value) not in accepted:
            raise ValueError(f"{key}={value!r} is none that there is. Use one of {', '.join(map(repr, accepted))}.")
    limit = options.get("forward_prefetch_limit", 1)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"forward_prefetch_limit={limit!r} is not a number of modules: it has to be 1 or more.")
    if not callable(options.get("shard_placement_fn", len)):
        raise ValueError(f"shard_placement_fn={options['shard_placement_fn']!r} is no function of a parameter.")
    strategy = str(options.get("sharding_strategy")).upper()
    if strategy in ("NO_SHARD", *HYBRID_STRATEGIES) and plan.tensor_parallel_degree > 1:
        raise ValueError(
            f"sharding_strategy={strategy!r} of a single module does not go with tensor parallelism. Use 'FULL_SHARD' "
            f"or 'SHARD_GRAD_OP', or leave it out."
        )
    if options.get("device_mesh") is not None:
        check_mesh(options["device_mesh"], dist.get_world_size())
    if options.get("process_group") is not None:
        check_group(options["process_group"], dist.get_world_size())
    if "mixed_precision" in options:
        resolve_dtypes(options["mixed_precision"], plan.precision)
    check_reshard(options.get("reshard_after_forward", True), _shard_degree(options, plan))


def _shard_degree(options: Mapping[str, Any], plan: ShardingPlan) -> int | None:
    """Return over how many ranks a unit is going to be sharded, as far as no rank has to ask another one."""
    mesh: DeviceMesh | None = options.get("device_mesh", plan.device_mesh)
    group: Any = options.get("process_group")
    strategy = str(options.get("sharding_strategy")).upper()
    if mesh is not None:
        return mesh.shape[-1]
    if group is None and strategy == "NO_SHARD":
        return 1
    if group is None and strategy in HYBRID_STRATEGIES and not plan.replicates:
        group = "node"
    group = plan.process_group if group is None and not plan.degrees else group
    if group is None:
        return plan.shard_degree
    group = group[0] if is_pair(group) else group
    return size_of_group(group, dist.get_world_size(), dist.get_local_world_size())

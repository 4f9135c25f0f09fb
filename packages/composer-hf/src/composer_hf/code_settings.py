"""Settings of a model or an adapter that let transformers or peft import code, such as from the Hub."""

from collections.abc import Mapping
from typing import Any, Final, cast

__all__ = ["without_code"]

# An implementation of attention or of experts may be the name of a kernel on the Hub, which is downloaded and imported.
# transformers saves none: who loads the model chooses it. peft imports `megatron_core` where it has a configuration.
_NAMES: Final = frozenset(
    {
        "auto_map",
        "attribute_map",  # lets one setting mean another; transformers has it on the class
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
        *("megatron_config", "megatron_core"),
    }
)


def without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of somebody else's checkpoint without those that name code, at any depth.

    Args:
        settings: As `config.json` or `adapter_config.json` has them.

    Example:
        >>> without_code({"n_layer": 2, "text_config": {"attn_implementation": "somebody/kernel"}})
        {'n_layer': 2, 'text_config': {}}
    """
    return {name: _cleaned(value) for name, value in settings.items() if name not in _NAMES}


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_code(cast("Mapping[str, Any]", value))
    return [_cleaned(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value

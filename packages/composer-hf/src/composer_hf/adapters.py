"""Weights and configurations of peft adapters, and access to the model that peft wraps."""

import importlib.util
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from composer_dist.wrapping import canonical_name
from composer_events.arguments import loaded

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import Tensor, nn

peft_installed = importlib.util.find_spec("peft") is not None

_DEFAULT: Final = "default"
_BIASES: Final = ("none", "all", "lora_only")
_SAVED_MODULE: Final = "modules_to_save"
_DORA: Final = "lora_magnitude_vector"
_TOKENS: Final = "trainable_tokens_delta"
# Initializations that keep the base weights, or that peft repeats identically from the same base weights.
_BASE_IS_KNOWN: Final = ("gaussian", "eva", "orthogonal", "mica", "pissa", "olora")


def is_peft_model(model: Any) -> bool:
    """Return whether a model is wrapped by peft."""
    peft = loaded("peft")  # a wrapped model implies that peft is imported; avoid importing it here
    return peft is not None and isinstance(model, peft.PeftModel)


def maybe_get_underlying_model(model: "nn.Module") -> Any:
    """Return the transformers model inside a peft wrapper, or the model itself."""
    return model.get_base_model() if is_peft_model(model) else model  # pyright: ignore[reportCallIssue]  # peft's


def adapter_of(peft_model: Any) -> str:
    """Return the name of the active adapter."""
    active = peft_model.active_adapter  # a list if several adapters are active
    return active if isinstance(active, str) else active[0]


def filter_state_dict_peft(
    state_dict: Mapping[str, Any],
    peft_config: "PeftConfig",
    adapter_name: str = _DEFAULT,
    remove_adapter_names: bool = True,
) -> dict[str, Any]:
    """Return the weights that belong to an adapter.

    These are the LoRA weights, the biases that the configuration trains, and the modules that it saves whole.

    Args:
        state_dict: State dict of the wrapped model, or of a module that contains it.
        peft_config: Configuration of the adapter.
        adapter_name: Name of the adapter, if there are several.
        remove_adapter_names: Whether to drop the adapter's name, as `adapter_model.safetensors` does.

    Raises:
        NotImplementedError: If the adapter is not LoRA, or `bias` is not `'none'`, `'all'` or `'lora_only'`.
    """
    kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type)).upper()
    if kind != "LORA":
        raise NotImplementedError(f"Only LoRA PEFT is supported; got peft_type={kind!r}. Use peft.LoraConfig.")
    bias = getattr(peft_config, "bias", "none")
    if bias not in _BIASES:
        raise NotImplementedError(f"bias={bias!r} must be one of {', '.join(map(repr, _BIASES))}.")
    published = published_adapter_names(state_dict, {"bias": bias}, adapter_name)
    return {new if remove_adapter_names else name: state_dict[name] for name, new in published.items()}


def published_adapter_names(
    names: Iterable[str], peft_config: Mapping[str, Any], adapter_name: str = _DEFAULT
) -> dict[str, str]:
    """Map the names of an adapter's weights to their names in `adapter_model.safetensors`.

    Example:
        >>> names = ["base_model.model.h.0.c_attn.lora_A.default.weight", "base_model.model.wte.weight"]
        >>> published_adapter_names(names, {"bias": "none"})
        {'base_model.model.h.0.c_attn.lora_A.default.weight': 'base_model.model.h.0.c_attn.lora_A.weight'}
    """
    names = list(names)
    bias, biases = peft_config.get("bias", "none"), set[str]()
    if bias == "all":
        biases = {name for name in names if name.endswith("bias")}
    elif bias == "lora_only":
        # The biases of adapted layers; peft moves them to `base_layer` when it wraps a layer.
        layers = {name.split("lora_")[0] for name in names if "lora_" in name}
        biases = {f"{layer}{inner}bias" for layer in layers for inner in ("", "base_layer.")}
    return {
        name: _without_adapter(name, adapter_name)
        for name in names
        if name in biases or is_adapter_weight(name, adapter_name)
    }


def is_adapter_weight(name: str, adapter_name: str = _DEFAULT) -> bool:
    """Return whether a weight was added by an adapter."""
    parts = name.split(".")
    own = (_SAVED_MODULE, _TOKENS)
    return adapter_name in parts and any(part.startswith("lora_") or part in own for part in parts)


def trained_beside_adapter(peft_model: Any) -> set[str]:
    """Return the names of trained weights and buffers other than those added by an adapter.

    They are parameters made trainable by hand, buffers such as the statistics of BatchNorm (also non-persistent ones),
    and the base weights that the initialization of the adapter has changed irreversibly. Buffers of quantized models
    are left out, since they hold the weights.
    """
    adapter = adapter_of(peft_model)
    has_own_base = changes_base(peft_model.peft_config[adapter].to_dict())
    names = {
        name
        for name, parameter in peft_model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad or (has_own_base and ".base_layer." in name)
    }
    if not getattr(peft_model.get_base_model(), "is_quantized", False):
        names.update(name for name, _ in peft_model.named_buffers(remove_duplicate=False))
    return {plain for name in names if not is_adapter_weight(plain := canonical_name(name), adapter)}


def changes_base(peft_config: Mapping[str, Any]) -> bool:
    """Return whether the adapter's initialization changes the base weights in a way that cannot be recomputed."""
    how = peft_config.get("init_lora_weights", True)
    return isinstance(how, str) and how.lower() not in _BASE_IS_KNOWN


def base_after_init(weight: "Tensor", *, fan_in_fan_out: bool, **settings: Any) -> "Tensor":
    """Return the base weight of a linear layer after an initialization such as PiSSA has subtracted its part.

    Args:
        weight: Shape `(out, in)`, or `(in, out)` with `fan_in_fan_out`.
        fan_in_fan_out: Whether the layer is a `Conv1D`.
        **settings: Arguments of `peft.LoraConfig` that determine the initialization and its scale.
    """
    import torch  # slow to load, and peft is optional
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    # On the meta device the layer's own weight, which is replaced below, takes no memory.
    with torch.device("meta"):
        sizes = weight.shape[::-1]
        layer: Any = Conv1D(*sizes) if fan_in_fan_out else torch.nn.Linear(*sizes, bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    config = LoraConfig(target_modules=["layer"], fan_in_fan_out=fan_in_fan_out, **settings)
    adapted: Any = inject_adapter_in_model(config, torch.nn.ModuleDict({"layer": layer}))
    return adapted["layer"].get_base_layer().weight.detach().contiguous()


def peft_config_values(peft_config: "PeftConfig") -> dict[str, Any]:
    """Return an adapter's configuration as JSON values."""
    # `runtime_config` describes this process, not the adapter.
    values = {name: value for name, value in peft_config.to_dict().items() if name != "runtime_config"}
    return json.loads(json.dumps(values, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


def _without_adapter(name: str, adapter_name: str) -> str:
    parts = [part for part in name.split(".") if part not in (adapter_name, _SAVED_MODULE)]
    if len(parts) > 1 and parts[-2] == _DORA:
        parts.pop()  # files of peft omit `weight` after the magnitude vector of DoRA
    return ".".join(parts)

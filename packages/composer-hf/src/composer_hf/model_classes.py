"""Lookup of the classes that a checkpoint names, without running code that came with it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from composer_checkpoint import CheckpointError, IncompatibleCheckpointError, UnsafeCheckpointError
from composer_hf.metadata import HuggingFaceMetadata

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_TRUSTED_PACKAGES: Final = ("transformers", "composer", "composer_hf", "peft")
_ENTRY_POINTS: Final = "composer.hf_models"


def build_config(
    metadata: HuggingFaceMetadata,
    overrides: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    allow_network: bool = False,
) -> "PretrainedConfig":
    """Return the configuration of a checkpoint's model as an object of transformers."""
    from transformers import CONFIG_MAPPING, AutoConfig  # slow to load

    values = _config_values(metadata.config if trust_remote_code else without_code(metadata.config), overrides or {})
    model_type = values.pop("model_type", None)
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        values.pop("auto_map", None)  # a built-in class needs no code of the checkpoint
        return AutoConfig.for_model(model_type, **values)
    origin = str(values.get("_name_or_path") or "")
    if origin and (os.path.isdir(origin) or allow_network):
        config = AutoConfig.from_pretrained(origin, trust_remote_code=trust_remote_code)
        for name, value in (overrides or {}).items():
            setattr(config, name, value)
        return config
    import transformers

    raise IncompatibleCheckpointError(
        f"the checkpoint is of a model of the type {model_type!r}, saved with transformers "
        f"{metadata.transformers_version or 'of an unknown release'}, and transformers {transformers.__version__} does "
        f"not know it. Install a release that does; or, if the model's code lies at {origin or 'its origin'!r}, pass "
        f"allow_network=True, and trust_remote_code=True if you trust it."
    )


def _config_values(saved: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = {**saved, **overrides}
    if "num_labels" in overrides and "id2label" not in overrides:
        values.pop("id2label", None)  # it would set the old number of labels again
        values.pop("label2id", None)
    if isinstance(labels := values.get("id2label"), Mapping):
        values["id2label"] = {int(number): label for number, label in labels.items()}  # JSON keys are strings
    return values


def find_class(name: str, *, trust_remote_code: bool = False) -> type:
    """Return the class with a full name."""
    module_name, _, class_name = name.rpartition(".")
    package = module_name.partition(".")[0]
    if not trust_remote_code and package not in _TRUSTED_PACKAGES:
        announced = {point.value.replace(":", "."): point for point in entry_points(group=_ENTRY_POINTS)}
        if name not in announced:
            raise UnsafeCheckpointError(
                f"the checkpoint names the class {name!r:.200}, and importing a module runs its code. By default only "
                f"classes of transformers are trusted. Give model_instantiation_class, or pass trust_remote_code=True "
                f"if you trust that module."
            )
    try:
        found = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"The model class {name!r:.200} could not be imported: {error}. Give model_instantiation_class as a class, "
            f"or install the release that has it."
        ) from error
    if not isinstance(found, type):
        raise ValueError(f"{name!r:.200} is a {type(found).__name__}, and a model class is needed.")
    return found


def build_model(model_class: Any, config: "PretrainedConfig") -> "PreTrainedModel":
    """Return a model with random weights."""
    if hasattr(model_class, "from_config"):  # an auto class
        return model_class.from_config(config)
    if not hasattr(model_class, "config_class"):
        raise AttributeError(
            f"{model_class.__name__} is not a class of a Hugging Face model: it has neither from_config, as "
            f"AutoModelForCausalLM has, nor config_class, as GPT2LMHeadModel has. Give one of those."
        )
    return model_class(config)


def meta_model(metadata: HuggingFaceMetadata, *, trust_remote_code: bool = False) -> "PreTrainedModel":
    """Return a checkpoint's model on the meta device, with names and shapes but without memory for weights."""
    if not metadata.model_class:
        raise IncompatibleCheckpointError(
            "the checkpoint does not name the class of its model. Give a checkpoint that HuggingFaceModel wrote."
        )
    with _telling_what_does_not_fit(metadata):
        config = build_config(metadata, trust_remote_code=trust_remote_code)
    model_class = find_class(metadata.model_class, trust_remote_code=trust_remote_code)
    with _telling_what_does_not_fit(metadata), torch.device("meta"):
        model = build_model(model_class, config)
        model.tie_weights()  # some classes tie only when they load weights
    return model


@contextmanager
def _telling_what_does_not_fit(metadata: HuggingFaceMetadata) -> Iterator[None]:
    """Raise `IncompatibleCheckpointError` for any error in building the model from its configuration."""
    try:
        yield
    except (CheckpointError, ImportError):
        raise
    except Exception as error:  # such as a division by zero, from deep inside the class
        raise IncompatibleCheckpointError(
            f"transformers cannot build {metadata.model_class!r:.200} from the checkpoint's configuration: "
            f"{type(error).__name__}: {str(error).strip().rstrip('.'):.300}. Give the configuration that fits."
        ) from error


# The implementation of attention or experts may name a kernel on the Hub, which would be downloaded and imported.
# transformers never saves it; the caller chooses it at load time. peft imports `megatron_core` if it has its settings.
_NAMES: Final = frozenset(
    {
        "auto_map",
        "attribute_map",  # redirects one setting to another; in transformers it is part of the class
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
        *("megatron_config", "megatron_core"),
    }
)


def without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a foreign checkpoint without those that name code, at any depth.

    Example:
        >>> without_code({"n_layer": 2, "text_config": {"attn_implementation": "user/kernel"}})
        {'n_layer': 2, 'text_config': {}}
    """
    return {name: _cleaned(value) for name, value in settings.items() if name not in _NAMES}


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_code(cast("Mapping[str, Any]", value))
    return [_cleaned(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value

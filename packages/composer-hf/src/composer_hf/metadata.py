"""Metadata of the Hugging Face model in a checkpoint: its class, configuration and tokenizer."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_checkpoint import IncompatibleCheckpointError
from composer_hf.tokenizer_files import decode_files

__all__ = ["HuggingFaceMetadata", "MissingMetadataError"]

_INTEGRATION = "huggingface"


class MissingMetadataError(IncompatibleCheckpointError, RuntimeError):
    """The checkpoint does not identify its Hugging Face model."""


@dataclass(frozen=True, slots=True)
class HuggingFaceMetadata:
    """The Hugging Face part of a checkpoint, read without importing or running any code that it names.

    Attributes:
        config: Configuration of the model, as in `config.json`.
        model_class: Full name of the model's class, such as
            `'transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel'`. Empty if unknown.
        tokenizer_files: Content of each tokenizer file by its base name. Empty without a tokenizer.
        generation_config: As in `generation_config.json`, if the checkpoint has it.
        peft_config: As in `adapter_config.json`, if the model has an adapter.
        peft_class: Full name of the class of `peft_config`.
        trained_beside_adapter: Names, in the model wrapped by peft, of trained weights outside the adapter, such as
            norms that were made trainable by hand.
    """

    config: Mapping[str, Any]
    model_class: str = ""
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    generation_config: Mapping[str, Any] | None = None
    peft_config: Mapping[str, Any] | None = None
    peft_class: str = ""
    trained_beside_adapter: Collection[str] = ()

    @property
    def model_type(self) -> str | None:
        """The name of the architecture in transformers, such as `'gpt2'`."""
        return self.config.get("model_type")

    @property
    def transformers_version(self) -> str | None:
        """The release of transformers that the model was trained with."""
        return self.config.get("transformers_version")

    @classmethod
    def from_checkpoint(cls, content: Any, source: str | os.PathLike[str] = "the checkpoint") -> "HuggingFaceMetadata":
        """Read the Hugging Face part of a loaded checkpoint.

        Args:
            content: Return value of `composer_checkpoint.load_file`.
            source: Name of the checkpoint in error messages.

        Raises:
            MissingMetadataError: If it has no such part. This is also a `RuntimeError`.
            IncompatibleCheckpointError: If the part does not have Composer's layout.
            UnsafeCheckpointError: If the name of a tokenizer file leads out of its folder.

        Example:
            >>> content = {"state": {"integrations": {"huggingface": {"model": {"config": {"content": {
            ...     "model_type": "gpt2", "n_layer": 2}, "class": "transformers.GPT2LMHeadModel"}}, "tokenizer": {}}}}}
            >>> HuggingFaceMetadata.from_checkpoint(content).model_type
            'gpt2'
        """
        state = content.get("state") if isinstance(content, Mapping) else None
        if not isinstance(state, Mapping):
            raise MissingMetadataError(
                f'"state" is not an available key in {source}, so it is not a checkpoint of a training run. Name a '
                f"checkpoint that a Trainer saved."
            )
        integrations = state.get("integrations")
        saved = integrations.get(_INTEGRATION) if isinstance(integrations, Mapping) else None
        if not saved:
            raise MissingMetadataError(
                f"{source} has no state/integrations/{_INTEGRATION}, so its Hugging Face model is unknown. Name a "
                f"checkpoint of a HuggingFaceModel, or give the config yourself."
            )
        return cls.from_saved(saved, source)

    @classmethod
    def from_saved(cls, saved: Any, source: str | os.PathLike[str] = "the checkpoint") -> "HuggingFaceMetadata":
        """Read metadata from `HuggingFaceModel.get_metadata`, or saved by any release of Composer.

        Args:
            saved: The checkpoint's value under `state/integrations/huggingface`.
            source: Name of the checkpoint in error messages.

        Raises:
            IncompatibleCheckpointError: If it does not have Composer's layout.
            UnsafeCheckpointError: If the name of a tokenizer file leads out of its folder.
        """
        model = _mapping(saved, "model", source)
        config = _mapping(model, "config", source)
        generation, peft = model.get("generation_config"), model.get("peft_config")
        tokenizer = _mapping(saved, "tokenizer", source) if saved.get("tokenizer") else {}
        return cls(
            config=_mapping(config, "content", source),
            model_class=_name(config.get("class")),
            tokenizer_files=decode_files(tokenizer),
            generation_config=_mapping(generation, "content", source) if generation else None,
            peft_config=_mapping(peft, "content", source) if peft else None,
            peft_class=_name(peft.get("class")) if peft else "",
            trained_beside_adapter=frozenset(map(str, model.get("trained_beside_adapter") or ())),
        )


def _mapping(outer: Any, key: str, source: Any) -> Mapping[str, Any]:
    value = outer.get(key) if isinstance(outer, Mapping) else None
    if isinstance(value, Mapping):
        return value
    raise IncompatibleCheckpointError(
        f"state/integrations/{_INTEGRATION} of {source} has {type(value).__name__} {value!r:.100} where {key!r} should "
        f"be a dict, so it was not written by Composer. Name another checkpoint, or give the config yourself."
    )


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ""  # checkpoints need not name the class

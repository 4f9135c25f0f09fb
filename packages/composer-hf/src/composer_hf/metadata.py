"""What a checkpoint says of the Hugging Face model in it: its class, its configuration and its tokenizer."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from composer_checkpoint import IncompatibleCheckpointError
from composer_hf.tokenizer_files import decode_files

__all__ = ["HuggingFaceMetadata", "MissingMetadataError"]

_INTEGRATION = "huggingface"


class MissingMetadataError(IncompatibleCheckpointError, RuntimeError):
    """The checkpoint does not say which Hugging Face model it is of."""


@dataclass(frozen=True, slots=True)
class HuggingFaceMetadata:
    """The Hugging Face part of a checkpoint, read without importing or running anything that it names.

    Attributes:
        config: The model's configuration, as `config.json` has it.
        model_class: The full name of the model's class, such as
            `'transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel'`. Empty where a checkpoint does not tell.
        tokenizer_files: The content of each of the tokenizer's files by its plain name. Empty without a tokenizer.
        generation_config: As `generation_config.json` has it, if the checkpoint has one.
        peft_config: As `adapter_config.json` has it, if the model was trained with adapters.
        peft_class: The full name of the class of `peft_config`.
        trained_beside_adapter: The names, as the model wrapped by peft has them, of what training has changed besides
            the adapter, such as norms that were made trainable by hand.
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
        """What transformers calls the architecture, such as `'gpt2'`."""
        return self.config.get("model_type")

    @property
    def transformers_version(self) -> str | None:
        """The release of transformers that the model was trained with."""
        return self.config.get("transformers_version")

    @classmethod
    def from_checkpoint(cls, content: Any, source: str | os.PathLike[str] = "the checkpoint") -> "HuggingFaceMetadata":
        """Read the Hugging Face part of a checkpoint that was loaded.

        Args:
            content: What `composer_checkpoint.load_file` returned.
            source: What messages call the checkpoint.

        Raises:
            MissingMetadataError: If it has no such part, which is a `RuntimeError`.
            IncompatibleCheckpointError: If the part is not laid out as Composer writes it.
            UnsafeCheckpointError: If a file of the tokenizer is named so that it would lie outside its folder.

        Example:
            >>> content = {"state": {"integrations": {"huggingface": {"model": {"config": {"content": {
            ...     "model_type": "gpt2", "n_layer": 2}, "class": "transformers.GPT2LMHeadModel"}}, "tokenizer": {}}}}}
            >>> HuggingFaceMetadata.from_checkpoint(content).model_type
            'gpt2'
        """
        state = content.get("state") if isinstance(content, Mapping) else None
        if not isinstance(state, Mapping):
            raise MissingMetadataError(
                f'"state" is not an available key in {source}, so it is no checkpoint of a training run. Name a '
                f"checkpoint that a Trainer saved."
            )
        integrations = state.get("integrations")
        saved = integrations.get(_INTEGRATION) if isinstance(integrations, Mapping) else None
        if not saved:
            raise MissingMetadataError(
                f"{source} has no state/integrations/{_INTEGRATION}, so it does not say which Hugging Face model it is "
                f"of. Name a checkpoint of a HuggingFaceModel, or give the config yourself."
            )
        return cls.from_saved(saved, source)

    @classmethod
    def from_saved(cls, saved: Any, source: str | os.PathLike[str] = "the checkpoint") -> "HuggingFaceMetadata":
        """Read what `HuggingFaceModel.get_metadata` returned, or any release of Composer saved.

        Args:
            saved: What lies in a checkpoint under `state/integrations/huggingface`.
            source: What messages call the checkpoint.

        Raises:
            IncompatibleCheckpointError: If it is not laid out so.
            UnsafeCheckpointError: If a file of the tokenizer is named so that it would lie outside its folder.
        """
        model = _mapping(saved, "model", source)
        config = _mapping(model, "config", source)
        generation, peft = model.get("generation_config"), model.get("peft_config")
        tokenizer = saved.get("tokenizer") or {}
        if not isinstance(tokenizer, Mapping):
            _refuse(source, "tokenizer", tokenizer)
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
    if not isinstance(value, Mapping):
        _refuse(source, key, value)
    return value


def _refuse(source: Any, key: str, value: Any) -> NoReturn:
    raise IncompatibleCheckpointError(
        f"state/integrations/{_INTEGRATION} of {source} has {type(value).__name__} {value!r:.100} where {key!r} should "
        f"be a dict, so it was not written by Composer. Name another checkpoint, or give the config yourself."
    )


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ""

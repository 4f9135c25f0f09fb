"""Mapping from the weights of a checkpoint to those of a Hugging Face folder.

A checkpoint has the names of the model in memory, below `model.`. A folder has the names that `from_pretrained` reads:
the same for most models, but different where transformers fuses several weights into one, such as the experts of a
mixture. Tied weights are written once. The values of weights are not needed before `PublishedPiece.convert`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from composer_checkpoint import IncompatibleCheckpointError, UnfittingWeightsError
from composer_dist.wrapping import canonical_name
from composer_hf.adapters import changes_base, is_adapter_weight, published_adapter_names
from composer_hf.metadata import HuggingFaceMetadata
from composer_hf.model_classes import meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:  # for typing.get_type_hints, without the import time of transformers
    PreTrainedModel = Any

__all__ = ["PublishedPiece", "adapter_names", "plan_weights", "published_name", "tied_names"]

_PREFIX: Final = "model."
_MAX_NAMES: Final = 10


@dataclass(frozen=True, slots=True)
class PublishedPiece:
    """Weights of a folder that are converted together, usually one.

    Attributes:
        sources: Names in the checkpoint, below `state/model`.
        targets: Tensors on the meta device, with dtype and shape, by their names in the folder.
        copies: Names in `sources` whose weights must equal the first one, since the model ties them.
    """

    sources: tuple[str, ...]
    targets: Mapping[str, Tensor]
    copies: tuple[str, ...] = ()
    _name: str = ""
    _model: "PreTrainedModel | None" = field(default=None, repr=False)

    def convert(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the folder's weights, which share memory with the inputs unless they must be split.

        Args:
            weights: The weights named in `sources`.

        Raises:
            IncompatibleCheckpointError: If tied weights differ.
        """
        for name in self.copies:
            one, other = weights[self.sources[0]], weights[name]
            # Tied weights usually share memory, which saves reading both.
            is_shared = one.dtype == other.dtype and one.data_ptr() == other.data_ptr() and one.shape == other.shape
            if not is_shared and not torch.equal(one, other):
                raise IncompatibleCheckpointError(
                    f"the model's configuration ties {name!r} to {self.sources[0]!r}, and the checkpoint has other "
                    f"values for it. Set tie_word_embeddings=False in the configuration to keep both."
                )
        weight = weights[self.sources[0]]
        if self._model is not None:
            return _revert(self._model, {self._name: weight})
        return dict.fromkeys(self.targets, weight)


def plan_weights(
    weights: Mapping[str, Tensor], metadata: HuggingFaceMetadata, *, trust_remote_code: bool = False
) -> list[PublishedPiece]:
    """Plan the conversion of a checkpoint's weights to those of a folder that `from_pretrained` reads.

    Args:
        weights: The checkpoint's weights below `state/model`, by name; tensors on the meta device suffice.
        metadata: Metadata of the checkpoint. With an adapter, only the adapter is planned.
        trust_remote_code: Whether to import a class outside of transformers.

    Returns:
        The pieces, in the order of the checkpoint.

    Raises:
        UnfittingWeightsError: If weights are missing, or not in the model.
        IncompatibleCheckpointError: If transformers does not know the model, or two weights have the same name without
            the prefixes of wrappers.
        UnsafeCheckpointError: If the model's class is in a module that is not trusted.
    """
    if metadata.peft_config is not None:
        return [
            PublishedPiece((name,), {target: weights[name].to("meta")})
            for name, target in adapter_names(weights, metadata).items()
        ]
    model = meta_model(metadata, trust_remote_code=trust_remote_code)
    # The heads of MultiTokenPrediction are for training only.
    weights = {
        name: each for name, each in weights.items() if not published_name(name).startswith("multi_token_heads.")
    }
    named = _by_published_name(weights)
    in_memory = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    on_disk = _revert(model, in_memory)
    # A checkpoint may already have the names of the folder, such as one converted from there.
    is_published = bool(named.keys() - in_memory.keys()) and not named.keys() - on_disk.keys()
    ties = tied_names(model)
    expected = on_disk if is_published else in_memory
    named = _checked(named, weights, expected, ties, model, metadata)
    reverting = None if is_published or in_memory.keys() == on_disk.keys() else model
    return list(_pieces(named, weights, ties, reverting))


def published_name(name: str) -> str:
    """Return the name of a checkpoint's weight in the transformers model, without the prefixes of wrappers.

    Example:
        >>> published_name("model.transformer.wte.weight")
        'transformer.wte.weight'
    """
    return canonical_name(name).removeprefix("module.").removeprefix(_PREFIX)


def adapter_names(names: Iterable[str], metadata: HuggingFaceMetadata) -> dict[str, str]:
    """Map the names of a checkpoint's adapter weights to their names in `adapter_model.safetensors`.

    Weights trained outside the adapter are included: peft loads every weight in such a file.
    """
    inner, config = _by_published_name(names), metadata.peft_config or {}
    beside = {name: name for name in inner if name in metadata.trained_beside_adapter}
    if changes_base(config) and not any(".base_layer." in name for name in beside):
        raise IncompatibleCheckpointError(
            f"init_lora_weights={config['init_lora_weights']!r} has changed the base, and the checkpoint does not have "
            f"it, so that peft would add the adapter to another one. Export a checkpoint that was saved by this "
            f"release, or one with the whole model by --peft merge."
        )
    published = published_adapter_names(inner, config)
    if not any(is_adapter_weight(name) for name in published):
        raise IncompatibleCheckpointError(
            f"the checkpoint has no weights of an adapter called 'default', the only one that is written, but of "
            f"others: {_listed([name for name in inner if 'lora_' in name])}. Rename them with `composer-ckpt convert "
            f"--rename`, or save the adapter with peft."
        )
    published |= beside
    return {inner[name]: target for name, target in published.items()}


def _by_published_name(names: Iterable[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in names:
        published = published_name(name)
        if published in named:
            raise IncompatibleCheckpointError(
                f"{named[published]} and {name} would both be called {published} in the model of transformers. Give "
                f"one of them another name in the checkpoint, or take it out."
            )
        named[published] = name
    return named


def tied_names(model: "PreTrainedModel") -> dict[str, str]:
    """Map each name that a folder omits to the name under which it has the same weight.

    Parameters of the model are compared, since `_tied_weights_keys` has patterns in transformers 4, a mapping in 5.
    """
    aliases = getattr(model, "_tied_weights_keys", None) or ()
    patterns = [re.compile(str(pattern)) for pattern in aliases]
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    ties: dict[str, str] = {}
    for names in groups.values():
        kept = next((name for name in names if not any(p.search(name) for p in patterns)), names[0])
        ties.update({name: kept for name in names if name != kept})
    return ties


def _pieces(
    named: Mapping[str, str],
    weights: Mapping[str, Tensor],
    ties: Mapping[str, str],
    model: "PreTrainedModel | None",
) -> Iterator[PublishedPiece]:
    groups: dict[str, list[str]] = {}
    for name in named:
        groups.setdefault(ties.get(name, name), []).append(name)
    for kept, names in groups.items():
        names.sort(key=lambda name: name != kept)  # the kept name first, as `PublishedPiece.copies` requires
        sources = tuple(named[name] for name in names)
        own = {kept: weights[sources[0]].to("meta")}
        # A checkpoint may have only one name of a tied weight, and not the one that the folder keeps.
        targets = own if model is None else _revert(model, own)
        if model is not None and targets.keys() == own.keys():
            yield PublishedPiece(sources, own, sources[1:])
        else:
            yield PublishedPiece(sources, targets, sources[1:], kept, model)


def _revert(model: "PreTrainedModel", weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5, names in memory and on disk are the same
        return dict(weights)
    return revert_weight_conversion(model, dict(weights))


def _checked(
    named: Mapping[str, str],
    weights: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    ties: Mapping[str, str],
    model: "PreTrainedModel",
    metadata: HuggingFaceMetadata,
) -> dict[str, str]:
    """Return the names without those that transformers ignores, after comparing them with the model's."""
    present = {ties.get(name, name) for name in named}
    missing = [n for n in expected if ties.get(n, n) not in present and not _ignored(model, "missing", n)]
    surplus = [n for n in named if n not in expected and not _ignored(model, "unexpected", n)]
    other = [
        f"{name} ({tuple(weights[source].shape)} in the checkpoint, {tuple(expected[name].shape)} in the model)"
        for name, source in named.items()
        if name in expected and weights[source].shape != expected[name].shape
    ]
    lists = (("not in the checkpoint", missing), ("not in the model", surplus), ("of another shape", other))
    told = "; ".join(f"{len(names)} {what}: {_listed(names)}" for what, names in lists if names)
    if told:
        import transformers

        changed = (
            " Algorithms that add or replace layers, such as QKNorm and ValueResidual (qk_scale, value_mix), make a "
            "model that a Hugging Face folder cannot describe: leave them out, or save Composer checkpoints only."
            if surplus
            else ""
        )

        raise UnfittingWeightsError(
            f"the weights do not fit the {type(model).__name__} that the checkpoint describes. Weights {told}. It was "
            f"saved with transformers {metadata.transformers_version}, and this is {transformers.__version__}: use "
            f"that release if the names are of another one, or give the configuration that fits.{changed}"
        )
    return {name: source for name, source in named.items() if name in expected}


def _ignored(model: "PreTrainedModel", kind: str, name: str) -> bool:
    patterns: Any = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")

"""Units of Hugging Face models for FSDP and activation checkpointing."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from composer_hf.adapters import maybe_get_underlying_model


@dataclass(frozen=True, slots=True)
class _IsBlock:
    """Predicate for the blocks of a model; an object, since a model with a local function could not be pickled."""

    types: tuple[type[nn.Module], ...]

    def __call__(self, module: nn.Module) -> bool:
        return isinstance(module, self.types)


def prepare_hf_model_for_fsdp(model: Any, init_device: str | None = None) -> None:
    """Make each block of a model a unit of FSDP and of activation checkpointing.

    Args:
        model: A transformers model, possibly wrapped by peft; attributes of it are set.
        init_device: With `'meta'` or `'mixed'`, ranks without weights initialize them by the model's own rules.

    Raises:
        ValueError: If the model has no list of blocks.
    """
    if not block_types(model):
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        raise ValueError(
            f"no blocks were found in {type(model).__name__}: none of its lists of modules ({lists}) holds several "
            f"modules of one class. Give the model a method fsdp_wrap_fn(module) that chooses the modules to shard."
        )
    add_sharding_hints(model)
    if init_device in ("meta", "mixed"):
        model.param_init_fn = maybe_get_underlying_model(model)._init_weights


def add_sharding_hints(model: Any) -> None:
    """Set the hints of `prepare_hf_model_for_fsdp` if the model has blocks, except those it defines itself."""
    types = block_types(model)
    if not types:
        return
    for name in ("fsdp_wrap_fn", "activation_checkpointing_fn"):
        if not hasattr(model, name):
            setattr(model, name, _IsBlock(types))


def block_types(model: Any) -> tuple[type[nn.Module], ...]:
    """Return the classes of a model's blocks, from `_no_split_modules` or from its module lists.

    Classes outside of lists are left out: most models tie their embeddings to the head, and modules that share weights
    cannot be sharded separately.
    """
    inner = maybe_get_underlying_model(model)
    named = frozenset(getattr(inner, "_no_split_modules", None) or ())
    in_lists = tuple(dict.fromkeys(_listed_types(inner)))
    return tuple(kind for kind in in_lists if kind.__name__ in named) or in_lists


def _listed_types(module: nn.Module) -> Iterator[type[nn.Module]]:
    """Yield the classes of modules in the outermost lists; lists inside blocks are skipped."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            # FSDP has nothing to shard in a block without parameters.
            yield from (type(block) for block in child if next(block.parameters(), None) is not None)
        else:
            yield from _listed_types(child)

"""Properties of transformers models: causality, arguments of `forward`, and compilation."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from typing import Any, Final

from torch import nn

log = getLogger(__name__)

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

_INNER: Final = "_orig_mod"  # the module inside a `torch.compile` wrapper


def resolve_shift(model: Any, shift_labels: bool | None) -> bool:
    """Return whether metrics compare each logit with the following label. Default: whether the model is causal."""
    is_causal = _is_causal(model)
    if shift_labels is None:
        return is_causal
    if is_causal and not shift_labels:
        log.warning(
            "The shift_labels argument was set to False but the model is an instance of a HuggingFace Causal LM. This "
            "may lead to incorrect behavior: the logits of each token are compared with the same token."
        )
    return shift_labels


def warn_of_lost_alibi(model: Any) -> None:
    """Log a warning if the configuration of a model mentions ALiBi but its modules lack it."""
    alibi = getattr(getattr(model, "config", None), "composer_alibi", None)
    if not alibi or any(hasattr(module, "alibi_slopes") for module in model.modules()):
        return
    length = alibi.get("max_sequence_length") if isinstance(alibi, Mapping) else "..."
    log.warning(
        "The weights of this %s were trained with ALiBi (composer_alibi=%r in its configuration), and from_pretrained "
        "made it without, so it cannot distinguish positions. Call apply_alibi(model, max_sequence_length=%s), or "
        "train it with the algorithm Alibi(max_sequence_length=%s).",
        *(type(model).__qualname__, alibi, length, length),
    )


def forward_args(model: Any) -> set[str]:
    """Return the names of the arguments of a model's `forward`.

    Raises:
        ValueError: If the model was compiled before peft wrapped it.
    """
    if is_wrapped(model):
        raise ValueError(
            f"the model that peft has wrapped is an {type(model).__name__}, which torch.compile has made, and its "
            f"weights would have other names in checkpoints. Compile the result of get_peft_model, "
            f"or pass the model uncompiled with Trainer(compile_config={{}})."
        )
    # `*args` and `**kwargs` do not show which keys of a batch they accept.
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind not in variable}


def _is_causal(model: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    mapped = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for names in mapped for name in ([names] if isinstance(names, str) else names)}
    # Comparing classes instead of names would import the modules of every architecture.
    return any(base.__name__ in names and base.__module__.startswith("transformers.") for base in type(model).__mro__)


def take_out(model: Any) -> tuple[Any, Compiler | None]:
    """Return the model inside a `torch.compile` wrapper, and a function that compiles calls with the same settings.

    Any other model is returned as it is, with `None`.
    """
    if not is_wrapped(model):
        return model, None
    return model.get_submodule(_INNER), model.dynamo_ctx


def is_wrapped(model: Any) -> bool:
    """Return whether a model is wrapped by `torch.compile`."""
    # Not `hasattr`: peft models forward attribute lookups to the models inside.
    return isinstance(model, nn.Module) and _INNER in dict(model.named_children())


def compile_calls(model: nn.Module, compiler: Compiler) -> None:
    """Compile the calls of a model in place, as `Module.compile` does.

    PyTorch has no public way to do so with the settings of a wrapper; `Module.compile` sets this attribute, too.
    """
    model._compiled_call_impl = compiler(model._call_impl)


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run a model uncompiled within the context.

    In generation, each sequence length would compile another graph, and these would evict the graph of the training
    step once the limit of cached graphs is reached.
    """
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled

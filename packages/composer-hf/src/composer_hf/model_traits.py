"""Properties of transformers models: causality, arguments of `forward`, and compilation."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Final, cast

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


@dataclass(frozen=True)
class Surgery:
    """A change of a model that shows in no weight.

    Attributes:
        method: The algorithm, with its arguments.
        attribute: An attribute of the modules that it changes.
        call: How to apply it to a loaded model; `None` if that would change the weights as well.
    """

    method: str
    attribute: str
    call: str | None


# The algorithm, its attribute and its function, by the name of its arguments in a configuration.
_SURGERY: Final = {
    "composer_alibi": ("Alibi", "alibi_slopes", "apply_alibi"),
    "composer_logit_softcap": ("LogitSoftcap", "logit_softcap", "apply_logit_softcap"),
    "composer_mup": ("MuP", "_mup_base", None),  # which would scale trained weights once more
    "composer_squared_relu": ("SquaredReLU", "is_squared_relu", "apply_squared_relu"),
}


def recorded_surgery(config: Mapping[str, Any]) -> list[Surgery]:
    """Return the changes that a configuration records, which `from_pretrained` does not apply."""
    found: list[Surgery] = []
    for name, (method, attribute, function) in _SURGERY.items():
        if (values := config.get(name)) is None:
            continue
        values = cast("Mapping[str, Any]", values if isinstance(values, Mapping) else {})
        arguments = ", ".join(f"{key}={value!r}" for key, value in values.items())
        call = function and f"{function}({', '.join(filter(None, ('model', arguments)))})"
        found.append(Surgery(f"{method}({arguments})", attribute, call))
    return found


def warn_of_lost_surgery(model: Any) -> None:
    """Log a warning for each change that the configuration of a model records and its modules lack."""
    config = getattr(model, "config", None)
    for surgery in recorded_surgery({} if config is None else vars(config)):
        if not any(hasattr(module, surgery.attribute) for module in model.modules()):
            log.warning(
                "The weights of this %s were trained with %s, and from_pretrained made it without, so it computes "
                "something else. %s.",
                type(model).__qualname__,
                surgery.method,
                f"Call composer.functional.{surgery.call}, or train it with this algorithm"
                if surgery.call
                else "Load the Composer checkpoint instead",
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

"""How a model is written for others to run: one function for each format.

Each takes a model on the CPU in evaluation mode and the name of a file that it writes.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Sample", "write_exported_program", "write_onnx", "write_safetensors", "write_torchscript"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments with which the model can be called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> "Sample | None":
        """Return what was given as PyTorch's exporters take it: a tuple's last item may be a dict of keywords."""
        args = given if isinstance(given, tuple) else (given,)
        kwargs: dict[str, Any] = {}
        if len(args) > 1 and isinstance(args[-1], dict):
            args, kwargs = args[:-1], args[-1]
        return None if all(arg is None for arg in args) and not kwargs else cls(args, kwargs)


def write_torchscript(model: nn.Module, path: str, sample: Sample | None) -> None:
    """Write TorchScript: compiled from the source, or where that fails recorded while the sample runs.

    Raises:
        RuntimeError: If neither is possible.
    """
    with _without_deprecations():
        try:
            scripted = torch.jit.script(model)
        except Exception as error:  # the compiler has no class of errors of its own
            scripted = _trace(model, sample, error)
        torch.jit.save(scripted, path)


def _trace(model: nn.Module, sample: Sample | None, why: Exception) -> Any:
    if sample is None:
        raise RuntimeError(
            f"{type(model).__name__} cannot be scripted: {why}\nGive sample_input, with which it can be traced "
            "instead; or use save_format='export'."
        ) from why
    try:
        return torch.jit.trace(model, example_inputs=_positional(model, sample), strict=False)
    except Exception as error:
        raise RuntimeError(
            f"{type(model).__name__} can be neither scripted nor traced with the sample_input. Scripting: {why}\n"
            f"Tracing: {error}\nUse save_format='export'."
        ) from error


def _positional(model: nn.Module, sample: Sample) -> tuple[Any, ...]:
    bound = inspect.signature(model.forward).bind(*sample.args, **sample.kwargs)
    return (*bound.args, *bound.kwargs.values())


def write_exported_program(model: nn.Module, path: str, sample: Sample, dynamic_shapes: Any) -> None:
    """Write what `torch.export` makes of the model, to be loaded by `torch.export.load`."""
    program = torch.export.export(model, sample.args, sample.kwargs, dynamic_shapes=dynamic_shapes)
    torch.export.save(program, path)


def write_safetensors(model: nn.Module, path: str) -> None:
    """Write the weights alone."""
    from composer_checkpoint.files import save_file  # here, since not every export needs it

    save_file(model.state_dict(), path)


def write_onnx(
    model: nn.Module,
    path: str,
    sample: Sample,
    *,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_axes: Any,
    opset_version: int | None,
) -> None:
    """Write ONNX, with names for inputs and outputs; inputs that the model does not use are left out."""
    if input_names is None:
        first = sample.args[0] if sample.args else sample.kwargs
        input_names = list(first) if isinstance(first, Mapping) else ["input"]
    with _without_deprecations():
        torch.onnx.export(
            model,
            (*sample.args, sample.kwargs),
            path,
            input_names=list(input_names),
            output_names=["output"] if output_names is None else list(output_names),
            dynamic_axes=dynamic_axes,
            opset_version=opset_version,
            # PyTorch's newer exporter keeps inputs that are not used, under names that nobody gave.
            dynamo=False,
        )


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Leave out the advice to use other formats, and what is said of attributes that only the compiler looks at."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        # What a trace takes for constant, it tells of sizes too, of which the outputs are independent in most models.
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # pyright: ignore[reportPrivateImportUsage]  # documented there
        yield

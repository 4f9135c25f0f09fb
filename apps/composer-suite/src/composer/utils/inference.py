"""Export of trained models for inference without this library."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from composer_dist import get_global_rank
from composer_dist.devices import DeviceCPU
from composer_dist.wrapping import is_model_ddp, is_model_fsdp, is_model_fsdp2, unwrap_model
from composer_events.batches import ensure_tuple
from composer_models import MissingConditionalImportError
from composer_time import StringEnum

if TYPE_CHECKING:
    from composer_events.logger import Logger

__all__ = ["ExportFormat", "Transform", "export_for_inference", "export_with_logger", "quantize_dynamic"]

_log = logging.getLogger(__name__)

Transform = Callable[[nn.Module], nn.Module]
"""Function that changes a model before it is written, such as `quantize_dynamic`."""

_SUFFIXES = {"torchscript": ".pt", "onnx": ".onnx", "export": ".pt2", "safetensors": ".safetensors"}


class ExportFormat(StringEnum):
    """Format of an exported model.

    - `TORCHSCRIPT`: for `torch.jit.load`, also from C++.
    - `ONNX`: for other runtimes. Requires a sample input.
    - `EXPORT`: a `.pt2` archive for `torch.export.load`. Requires a sample input.
    - `SAFETENSORS`: only the weights, for runtimes that have their own model definitions.
    """

    TORCHSCRIPT = "torchscript"
    ONNX = "onnx"
    EXPORT = "export"
    SAFETENSORS = "safetensors"


def export_for_inference(
    model: nn.Module,
    save_format: str | ExportFormat,
    save_path: str | os.PathLike[str],
    save_object_store: Any = None,
    sample_input: Any = None,
    dynamic_axes: Any = None,
    surgery_algs: Callable[[nn.Module], nn.Module] | Sequence[Callable[[nn.Module], nn.Module]] | None = None,
    transforms: Transform | Sequence[Transform] | None = None,
    onnx_opset_version: int | None = None,
    load_path: str | None = None,
    load_object_store: Any = None,
    load_strict: bool = False,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Write a copy of a model, on the CPU and in evaluation mode. Rank 0 writes; the other ranks return at once.

    Args:
        model: The model, not wrapped for several ranks.
        save_format: See `ExportFormat`.
        save_path: A path or a URI; with `save_object_store`, a name in that store.
        save_object_store: An `ObjectStore`.
        sample_input: Argument of the model, or a tuple of arguments. A dict at the end of a tuple contains keyword
            arguments, so `(batch, {})` is one argument of any type.
        dynamic_axes: Axes of variable length, in the format of `torch.onnx.export` or, for `EXPORT`, in that of the
            `dynamic_shapes` of `torch.export.export`.
        surgery_algs: Functions that modify the model's layers before weights are loaded.
        transforms: Functions that modify the model before it is written.
        onnx_opset_version: Default: that of PyTorch.
        load_path: A checkpoint whose weights replace those of the model.
        load_object_store: The `ObjectStore` that has `load_path`.
        load_strict: Whether missing and unexpected weights are an error.
        input_names: For `ONNX`. Default: the keys of a dict, otherwise `input`.
        output_names: For `ONNX`. Default: `output`.

    Raises:
        ValueError: If the model is wrapped, the format is unknown, the path is empty, or a required sample is missing.
        MissingConditionalImportError: If the format is ONNX and the package is not installed.
        RuntimeError: If the model cannot be written in this format.
    """
    save_format = ExportFormat(save_format)
    if not os.fspath(save_path):
        raise ValueError("save_path='' names no file. Give a path, such as 'model.pt', or an address.")
    if is_model_ddp(model):
        raise ValueError("model is a DistributedDataParallel. Export what it wraps: model.module.")
    if is_model_fsdp(model) or is_model_fsdp2(model):
        raise ValueError(
            "model is sharded by FSDP, so no rank has all of it. Save a checkpoint with state_dict_type='full', "
            "and export a model that is not sharded with load_path=... ."
        )
    sample = _arguments(DeviceCPU().batch_to_device(copy.deepcopy(sample_input)))
    if sample is None and save_format in (ExportFormat.ONNX, ExportFormat.EXPORT):
        raise ValueError(
            f"sample_input=None, but save_format={save_format.value!r} needs to see the model run. Give an input, such "
            "as one batch."
        )
    if save_format is ExportFormat.ONNX and find_spec("onnx") is None:
        raise MissingConditionalImportError("onnx", "onnx", distribution="composer-suite")
    if get_global_rank() != 0:  # after the checks, so that a wrong argument raises on every rank
        return
    # A copy, since the changes below must not affect the model in training.
    model = copy.deepcopy(unwrap_model(model)).cpu()
    model = _changed(model, surgery_algs)
    if load_path is not None:
        _load(model, load_path, load_object_store, load_strict)
    if hasattr(model, "multi_token_heads"):  # of MultiTokenPrediction, for training only
        del model.multi_token_heads
    model = _changed(model.eval(), transforms)

    onnx = {"input_names": input_names, "output_names": output_names, "opset_version": onnx_opset_version}

    def write(path: str) -> None:
        _write(model, path, save_format, sample, dynamic_axes, onnx)

    with torch.no_grad():
        _deliver(write, save_format, os.fspath(save_path), save_object_store)


def export_with_logger(
    model: nn.Module,
    save_format: str | ExportFormat,
    save_path: str,
    logger: Logger,
    save_object_store: Any = None,
    sample_input: Any = None,
    transforms: Transform | Sequence[Transform] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Write a model like `export_for_inference`, through a logger that keeps files if there is one.

    The other arguments are those of `export_for_inference`. If a logger keeps files and no store is given, `save_path`
    is the name for the logger.

    Args:
        logger: The logger.
    """
    settings: dict[str, Any] = {
        "model": model,
        "save_format": save_format,
        "sample_input": sample_input,
        "transforms": transforms,
        "input_names": input_names,
        "output_names": output_names,
    }
    if save_object_store is not None or not logger.has_file_upload_destination():
        export_for_inference(**settings, save_path=save_path, save_object_store=save_object_store)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.export")
        export_for_inference(**settings, save_path=path)
        if get_global_rank() == 0:
            logger.upload_file(remote_file_name=save_path, file_path=path)


def quantize_dynamic(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose linear layers store their weights in 8 bits.

    Example:
        >>> layers = quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        >>> layers[0].weight().dtype
        torch.qint8
    """
    with warnings.catch_warnings():
        # PyTorch deprecates this function in favor of torchao, which would be another dependency.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", ".*torch.quantize_per_tensor.*", UserWarning)
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def _changed(model: nn.Module, changes: Any) -> nn.Module:
    for change in ensure_tuple(changes):
        changed = change(model)
        model = model if changed is None else changed  # a function that changes the model in place may return None
    return model


def _load(model: nn.Module, path: str, store: Any, strict: bool) -> None:
    from composer_checkpoint.files import load_file
    from composer_checkpoint.remote.fetch import get_file  # here, since few exports load weights

    with tempfile.TemporaryDirectory() as folder:
        local = os.path.join(folder, os.path.basename(path))
        get_file(path, local, store)
        weights = load_file(local)["state"]["model"]
        missing, unexpected = model.load_state_dict(weights, strict=strict)
    for what, names in (("missing in", missing), ("unexpected in", unexpected)):
        if names:
            _log.warning("Weights %s %s: %s.", what, path, ", ".join(names))


def _deliver(write: Callable[[str], None], save_format: ExportFormat, save_path: str, store: Any) -> None:
    """Write to a temporary file, and move or upload it when it is complete."""
    name = save_path
    if store is None:
        from composer_checkpoint.stores.base import parse_uri  # here, since loggers' exports are often local
        from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri

        store, name = maybe_create_object_store_from_uri(save_path), parse_uri(save_path).path
    folder = Path(name).absolute().parent if store is None else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    # In the folder of the final file, so that the move stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as beside:
        # Some writers require the suffix of their format, even if the final file has another one.
        path = os.path.join(beside, f"model{_SUFFIXES[save_format.value]}")
        write(path)
        if store is None:
            os.replace(path, name)
        else:
            store.upload_object(name, path)


_Arguments: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


def _arguments(given: Any) -> _Arguments | None:
    """Return the positional and keyword arguments of a sample, or `None` if there is none."""
    args = given if isinstance(given, tuple) else (given,)
    kwargs: dict[str, Any] = {}
    if len(args) > 1 and isinstance(args[-1], dict):
        args, kwargs = args[:-1], args[-1]
    return None if all(arg is None for arg in args) and not kwargs else (args, kwargs)


def _write(
    model: nn.Module,
    path: str,
    save_format: ExportFormat,
    sample: _Arguments | None,
    dynamic_axes: Any,
    onnx: Mapping[str, Any],
) -> None:
    if save_format is ExportFormat.TORCHSCRIPT:
        _write_torchscript(model, path, sample)
    elif save_format is ExportFormat.SAFETENSORS:
        from composer_checkpoint.files import save_file  # here, since not every export needs it

        save_file(model.state_dict(), path)
    else:
        assert sample is not None, "the other formats need one"
        if save_format is ExportFormat.EXPORT:
            torch.export.save(torch.export.export(model, *sample, dynamic_shapes=dynamic_axes), path)
        else:
            _write_onnx(model, path, sample, dynamic_axes=dynamic_axes, **onnx)


def _write_torchscript(model: nn.Module, path: str, sample: _Arguments | None) -> None:
    """Write TorchScript: compiled from the source or, if that fails, traced with the sample."""
    name = type(model).__name__
    with _without_deprecations():
        try:
            scripted = torch.jit.script(model)
        except Exception as why:  # the compiler raises exceptions of many classes
            if sample is None:
                raise RuntimeError(
                    f"{name} cannot be scripted: {why}\nGive sample_input, with which it can be traced instead; or use "
                    "save_format='export'."
                ) from why
            try:
                bound = inspect.signature(model.forward).bind(*sample[0], **sample[1])
                positional = (*bound.args, *bound.kwargs.values())
                scripted = torch.jit.trace(model, example_inputs=positional, strict=False)
            except Exception as error:
                raise RuntimeError(
                    f"{name} can be neither scripted nor traced with the sample_input. Scripting: {why}\nTracing: "
                    f"{error}\nUse save_format='export'."
                ) from error
        torch.jit.save(scripted, path)


def _write_onnx(
    model: nn.Module,
    path: str,
    sample: _Arguments,
    *,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_axes: Any,
    opset_version: int | None,
) -> None:
    """Write ONNX with named inputs and outputs, without unused inputs."""
    args, kwargs = sample
    if input_names is None:
        first = args[0] if args else kwargs
        input_names = list(first) if isinstance(first, Mapping) else ["input"]
    with _without_deprecations():
        torch.onnx.export(
            model,
            (*args, kwargs),
            path,
            input_names=list(input_names),
            output_names=["output"] if output_names is None else list(output_names),
            dynamic_axes=dynamic_axes,
            opset_version=opset_version,
            # PyTorch's newer exporter keeps unused inputs, with generated names.
            dynamo=False,
        )


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Suppress deprecation warnings of these formats, and warnings about attributes that only the compiler reads."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        # Tracing warns about each size that it treats as a constant, but few models depend on them.
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # pyright: ignore[reportPrivateImportUsage]  # documented there
        yield

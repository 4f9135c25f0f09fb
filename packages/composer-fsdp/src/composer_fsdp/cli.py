"""The command `composer-fsdp`: preview what a configuration does to a model.

PyTorch and the modules that need it are imported after the arguments are parsed, so that `--help` and usage errors are
fast.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]

_DOES_NOT_FIT, _IS_WRONG = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    The code is 0 on success, 1 if an estimate exceeds `--gpu-memory`, and 2 if an input is invalid.
    """
    options = _parser().parse_args(arguments)
    try:
        # Record warnings, to print each as one line without its source location.
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = options.run(options)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, NotImplementedError) as error:
        # `str` of a KeyError is the repr of its message, in quotes.
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        sys.stderr.write(f"composer-fsdp: {text}\n")
        return _IS_WRONG
    # Each suggestion shards the model again and repeats its warnings.
    for message in dict.fromkeys(str(warning.message) for warning in warned):
        sys.stderr.write(f"composer-fsdp: {message}\n")
    sys.stdout.write((json.dumps(result.to_dict(), indent=2) if options.json else str(result)) + "\n")
    return 0 if getattr(result, "fits", True) else _DOES_NOT_FIT  # an explanation has no `fits`


def _explain(options: argparse.Namespace) -> Any:
    from composer_fsdp.estimation import explain
    from composer_fsdp.model_source import load_config, load_model

    model, _ = load_model(options.model)
    return explain(model, load_config(options.config), **_of_run(options))


def _estimate(options: argparse.Namespace) -> Any:
    from composer_fsdp.config import parse_bytes
    from composer_fsdp.estimation import estimate
    from composer_fsdp.fake_run import Workload
    from composer_fsdp.model_source import load_config, load_model, load_named, load_optimizer

    # PyTorch also logs a traceback on a shape mismatch. It sets log levels on import, so override them afterwards.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    gpu_memory = None if options.gpu_memory is None else parse_bytes(options.gpu_memory)
    config = load_config(options.config)
    model, batch = load_model(options.model)
    work = Workload(
        _batch(options, model, batch),
        batch_size=options.batch_size,
        microbatches=options.microbatches,
        optimizer=load_optimizer(options.optimizer),
        loss=None if options.loss is None else load_named(options.loss, "--loss"),
        on_gpu=options.device == "gpu",
    )
    return estimate(model, config, work, gpu_memory=gpu_memory, **_of_run(options))


def _of_run(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "world_size": options.world_size,
        "local_world_size": options.gpus_per_node,
        "precision": options.precision,
    }


def _batch(options: argparse.Namespace, model: Any, made: Any) -> Any:
    from composer_fsdp.fake_run import is_composer_model
    from composer_fsdp.model_source import make_batch

    if options.batch is not None:
        return make_batch(options.batch, options.batch_size)
    if options.input_shape is not None:
        import torch

        dtype = getattr(torch, options.input_dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"--input-dtype={options.input_dtype!r} is not a dtype of torch. Give one such as float32 or int64."
            )
        size = options.batch_size or 1
        inputs = torch.empty((size, *options.input_shape), dtype=dtype, device="meta")
        if not is_composer_model(model):
            return inputs
        # A ComposerModel takes a whole batch, with the targets of its loss.
        if dtype.is_floating_point:
            return inputs, torch.empty(size, dtype=torch.int64, device="meta")
        return {"input_ids": inputs, "labels": inputs}
    if made is None:
        raise ValueError(
            "nothing says what a batch is, without which there are no activations. Give --input-shape 1024 "
            "--input-dtype int64, or --batch file.py:function, or let the function of the model return a pair of the "
            "model and a batch."
        )
    return made


def _shape(text: str) -> tuple[int, ...]:
    sizes = [size.strip() for size in text.replace("x", ",").split(",") if size.strip()]
    if not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: give sizes such as 1024 or 3,224,224")
    return tuple(map(int, sizes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer-fsdp", description="Preview what a configuration does to a model, without doing it."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    explain = commands.add_parser("explain", help="print which modules are sharded as one, and all settings")
    explain.set_defaults(run=_explain)
    _add_common(explain)
    estimate = commands.add_parser("estimate", help="print the memory and the communication of a rank")
    estimate.set_defaults(run=_estimate)
    _add_common(estimate)
    _add_work(estimate)
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "model",
        metavar="MODEL",
        help="file.py:function or module:function, without arguments, that makes the model, or a pair of it and a "
        "batch; it is run with the meta device as default",
    )
    add(
        "--config",
        help="the value of parallelism_config, or of its 'fsdp': JSON, a .json or .toml file, or file.py:name "
        "(default: an FSDPConfig())",
    )
    add("--world-size", type=int, default=8, help="number of ranks (default: 8)")
    add("--gpus-per-node", type=int, help="number of ranks on each node (default: at most 8)")
    add("--precision", default="fp32", help="precision of the run, such as amp_bf16 (default: fp32)")
    add("--json", action="store_true", help="print JSON")


def _add_work(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--gpu-memory", metavar="SIZE", help="memory of a device, such as 80GiB")
    add("--batch-size", type=int, help="number of examples in a rank's microbatch (default: as in the batch)")
    add(
        "--input-shape",
        type=_shape,
        metavar="SIZES",
        help="the shape of one example, such as 1024 or 3,224,224. A ComposerModel gets a pair of inputs and class "
        "indices, or with an integer dtype a mapping with input_ids and labels; for another batch, give --batch",
    )
    add("--input-dtype", default="float32", help="dtype of the input, such as int64 (default: float32)")
    add("--batch", metavar="FUNCTION", help="file.py:function that makes a microbatch, optionally from batch_size")
    add("--loss", metavar="FUNCTION", help="file.py:function of outputs and batch (default: the model's own)")
    add("--optimizer", default="AdamW", help="class of torch.optim, or file.py:function of parameters (default: AdamW)")
    add("--microbatches", type=int, default=1, help="number of microbatches in a step (default: 1)")
    add("--device", choices=("gpu", "cpu"), default="gpu", help="device whose optimizer kernels are assumed")

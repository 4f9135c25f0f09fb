"""The arguments of the Trainer and of `fit`, their checks, and the arguments of earlier releases."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer

from composer_dist import Precision, reproducibility
from composer_dist.devices import Device, DeviceGPU, validate_precision
from composer_events.arguments import check_flags, check_mappings, check_places, check_text_lists, check_texts
from composer_events.batches import ensure_tuple
from composer_models import ComposerModel
from composer_optim import DecoupledSGDW
from composer_time import Time

if TYPE_CHECKING:
    from os import PathLike
    from typing import Literal, TextIO

    from composer.profiler.profiler import Profiler
    from composer.trainer.divergence import OnDivergence
    from composer_checkpoint.ignore_keys import IgnoreKeys
    from composer_dist.ddp import DDPSyncStrategy
    from composer_events.algorithm import Algorithm
    from composer_events.callback import Callback
    from composer_events.event import Event
    from composer_events.logger_destination import LoggerDestination
    from composer_events.state import State
    from composer_fsdp import ParallelismConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArguments:
    """The arguments of `Trainer(...)`, unchecked. Only NumPy numbers are converted to Python numbers.

    Attributes:
        defaults: The value of each argument that was not passed.
    """

    model: ComposerModel
    train_dataloader: Any
    train_dataloader_label: str
    train_subset_num_batches: int
    spin_dataloaders: bool
    max_duration: int | str | Time[int] | None
    eval_dataloader: Any
    eval_interval: Any
    eval_subset_num_batches: int
    algorithms: Algorithm | Sequence[Algorithm] | None
    algorithm_passes: Any
    optimizers: Optimizer | Sequence[Optimizer] | None
    schedulers: Any
    scale_schedule_ratio: float
    step_schedulers_every_batch: bool | None
    callbacks: Callback | Sequence[Callback] | None
    loggers: LoggerDestination | Sequence[LoggerDestination] | None
    run_name: str | None
    progress_bar: bool
    log_to_console: bool | None
    console_stream: str | TextIO
    console_log_interval: int | str | Time[int]
    log_traces: bool
    auto_log_hparams: bool
    profiler: Profiler | None
    python_log_level: str | None
    load_path: str | PathLike[str] | None
    load_object_store: Any
    load_weights_only: bool
    load_strict_model_weights: bool
    load_progress_bar: bool
    load_ignore_keys: IgnoreKeys | None
    load_exclude_algorithms: Sequence[str] | None
    load_trusted: bool
    load_restart_epoch: bool
    save_folder: str | PathLike[str] | None
    save_filename: str
    save_latest_filename: str | None
    save_overwrite: bool
    save_interval: int | str | Time[int] | Callable[[State, Event], bool]
    save_weights_only: bool
    save_ignore_keys: IgnoreKeys | None
    save_num_checkpoints_to_keep: int
    save_keep: Mapping[str, Any] | None
    save_metrics: bool
    save_async: bool
    save_async_policy: Literal["wait", "skip"]
    autoresume: bool
    device: str | Device | None
    precision: str | Precision | None
    precision_config: dict[str, Any] | None
    device_train_microbatch_size: int | float | Literal["auto"] | None
    grad_accum: int | Literal["auto"] | None
    accumulate_train_batch_on_tokens: bool
    seed: int | None
    deterministic_mode: bool
    dist_timeout: float
    ddp_sync_strategy: str | DDPSyncStrategy | None
    ddp_comm_hook: str | None
    deepspeed_config: dict[str, Any] | None
    parallelism_config: Mapping[str, Any] | ParallelismConfig | None
    compile_config: dict[str, Any] | None
    activation_checkpointing: bool | Literal["selective"]
    on_divergence: str | OnDivergence | None
    save_artifact_name: str | None = None
    save_latest_artifact_name: str | None = None
    compute_training_metrics: bool = True
    fsdp_config: dict[str, Any] | None = None
    fsdp_auto_wrap: bool | None = None
    load_fsdp_monolith_rank0_only: bool | None = None
    defaults: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> TrainerArguments:
        defaults = {**defaults, **OLDER_NAMES_ONLY}
        values = {name: to_plain(value) for name, value in arguments.items() if name not in ("self", "older_names")}
        return cls(**translate(values | OLDER_NAMES_ONLY, arguments["older_names"], defaults), defaults=defaults)

    def is_default(self, name: str) -> bool:
        return _is_default(name, getattr(self, name), self.defaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitArguments:
    """The arguments of `Trainer.fit(...)`, unchecked. Only NumPy numbers are converted to Python numbers."""

    train_dataloader: Any
    train_dataloader_label: str
    train_subset_num_batches: int | None
    spin_dataloaders: bool | None
    duration: int | str | Time[int] | None
    reset_time: bool
    optimizers: Optimizer | Sequence[Optimizer] | None
    schedulers: Any
    scale_schedule_ratio: float
    step_schedulers_every_batch: bool | None
    eval_dataloader: Any
    eval_subset_num_batches: int
    eval_interval: Any
    device_train_microbatch_size: int | float | Literal["auto"] | None
    precision: str | Precision | None
    grad_accum: int | Literal["auto"] | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> FitArguments:
        return cls(**{name: to_plain(value) for name, value in arguments.items() if name != "self"})


def _is_default(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    if name not in defaults:
        return False
    default = defaults[name]
    # All defaults are plain. A value that is not plain, such as an array, may not compare at all.
    return value is default or (
        type(value) is type(default) and isinstance(value, (int, float, str)) and value == default
    )


def check_model(model: Any) -> ComposerModel:
    if isinstance(model, ComposerModel):
        return model
    kind = f"the class {model.__name__}; call it" if isinstance(model, type) else f"a {type(model).__name__}"
    raise ValueError(
        f"Provided model must be a subclass of ComposerModel. model is {kind}. Wrap any nn.Module with "
        "ComposerModel.from_module(module, loss_fn), or derive your class from composer.models.ComposerModel "
        "(forward(batch) and loss(outputs, batch)). For a model of transformers or peft there is "
        "composer.models.HuggingFaceModel(model, tokenizer=...), which needs pip install 'composer-suite[hf]'."
    )


_log = logging.getLogger(__name__)


def choose_precision(precision: Any, device: Device, model: ComposerModel, *, has_deepspeed: bool) -> Precision:
    """Return the precision, by default mixed 16-bit precision on a GPU and fp32 elsewhere."""
    if precision is None:
        if not isinstance(device, DeviceGPU):
            return Precision.FP32
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        if torch.bfloat16 in dtypes and torch.float16 not in dtypes and not has_deepspeed:
            _log.info("The model has bfloat16 weights, so precision='amp_bf16' replaces the default of 'amp_fp16'.")
            return Precision.AMP_BF16
        precision = Precision.AMP_FP16
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(
            "always"
        )  # the user's filters apply below, where the warning of an older name is repeated
        chosen = Precision(precision)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=user_stacklevel())
    validate_precision(chosen, device)
    return chosen


def refuse_unscalable(optimizers: Iterable[Optimizer]) -> None:
    """Raise if a GradScaler, which `amp_fp16` needs, cannot unscale the gradients: it accepts only float32 weights."""
    parameters = (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
    dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    has_bf16, has_fp16 = torch.bfloat16 in dtypes, torch.float16 in dtypes
    if has_bf16 or has_fp16:
        raise ValueError(
            f"precision='amp_fp16' needs weights in float32, because its GradScaler unscales only their gradients; the "
            f"model has weights in {'bfloat16' if has_bf16 else 'float16'}. "
            + ("Pass precision='amp_bf16'" if has_bf16 and not has_fp16 else "Convert the model with model.float()")
            + "; weights that are not trained may have any dtype."
        )


def choose_optimizers(optimizers: Any, model: ComposerModel) -> list[Optimizer]:
    """Return the optimizers in a list, by default decoupled SGD over all parameters."""
    given = ensure_tuple(optimizers)
    parameters = list(model.parameters())
    # By id, because `in` would compare tensors elementwise.
    own = {id(parameter) for parameter in parameters}
    for optimizer in given:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizers={optimizer!r} is not a torch.optim.Optimizer. Build one over model.parameters()."
            )
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"None of the parameters of {type(optimizer).__name__} belongs to the model, so nothing would be "
                "trained. Build the optimizer over the parameters of the model that is passed."
            )
    if len(given) > 1:
        _check_division(given, model)
    if given:
        return list(given)
    consequence = (
        ". Training uses DecoupledSGDW(model.parameters(), lr=0.1); pass optimizers=... to choose your own."
        if parameters
        else ", and the model does not have parameters, so it can be evaluated, not trained."
    )
    warnings.warn(f"No optimizer was specified{consequence}", stacklevel=user_stacklevel())
    return [DecoupledSGDW(parameters, lr=0.1)] if parameters else []


def _check_division(optimizers: Sequence[Optimizer], model: ComposerModel) -> None:
    """Raise unless each trained parameter is in exactly one of several optimizers."""
    named = list(model.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    owners = Counter(
        key for one in optimizers for key in {id(each) for group in one.param_groups for each in group["params"]}
    )
    twice = [names.get(key, "a parameter outside the model") for key, count in owners.items() if count > 1]
    none = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in owners]
    for found, where, remedy in (
        (twice, "in more than one of them", "Give each parameter to one optimizer"),
        (none, "in none of them", "Give them to one, or freeze them with requires_grad_(False)"),
    ):
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise ValueError(
                f"optimizers={[type(each).__name__ for each in optimizers]} must divide the trained parameters of the "
                f"model among them; {', '.join(found[:5])}{more} {'are' if len(found) > 1 else 'is'} {where}. {remedy}."
            )


def check_subset(name: str, num_batches: Any) -> None:
    if not is_whole(num_batches) or (num_batches < 1 and num_batches != -1):
        raise ValueError(f"{name}={num_batches!r} must be a whole number of batches from 1, or -1 for all of them.")


def check_members(name: str, given: Any, kind: type) -> list[Any]:
    """Return the algorithms, callbacks or loggers as a list."""
    is_many = isinstance(given, Iterable) and not isinstance(given, str)
    members = list(cast("Iterable[Any]", given)) if is_many else list(ensure_tuple(given))
    for member in members:
        if not isinstance(member, kind):
            hint = f" Call it: {member.__name__}()." if isinstance(member, type) else ""
            raise TypeError(f"{name} holds {member!r}, which is no {kind.__name__}.{hint}")
    return members


def choose_run_name(run_name: str | None) -> str | None:
    """Return the run name, or the one in the environment, or `None` so that the State generates one."""
    name = run_name or os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")
    if name is not None and os.pardir in str(name).replace("\\", "/").split("/"):
        raise ValueError(
            f"run_name={name!r} leads out of the folders that are named after it, such as save_folder='{{run_name}}'. "
            "Give a name without '..'."
        )
    return name


# Checked because a string such as 'no' would count as true.
_FLAGS = (
    "spin_dataloaders",
    "step_schedulers_every_batch",
    "progress_bar",
    "log_to_console",
    "log_traces",
    "auto_log_hparams",
    "load_weights_only",
    "load_strict_model_weights",
    "load_progress_bar",
    "load_trusted",
    "load_restart_epoch",
    "save_overwrite",
    "save_weights_only",
    "save_metrics",
    "save_async",
    "autoresume",
    "accumulate_train_batch_on_tokens",
    "deterministic_mode",
    "reset_time",
)
_PATHS = ("save_folder", "save_latest_filename", "load_path")


def check_kinds(arguments: TrainerArguments | FitArguments) -> None:
    """Check the types of arguments whose wrong type would pass unnoticed: flags, labels, paths, lists of names."""
    given = {each.name: getattr(arguments, each.name) for each in fields(arguments)}
    check_flags(may_be_none=True, **{name: given[name] for name in _FLAGS if name in given})
    check_places(may_be_none=True, **{name: given[name] for name in _PATHS if name in given})
    check_places(save_filename=given.get("save_filename", ""))
    check_mappings(precision_config=given.get("precision_config"))
    check_texts(train_dataloader_label=given.get("train_dataloader_label", "train"))
    check_text_lists(load_exclude_algorithms=given.get("load_exclude_algorithms"))
    seed = given.get("seed")
    if seed is not None and (not is_whole(seed) or not 0 <= seed <= reproducibility.MAX_SEED):
        raise ValueError(f"Invalid seed: seed={seed!r} must be a whole number from 0 to {reproducibility.MAX_SEED}.")


def refuse_twice(**members: Iterable[object]) -> None:
    """Raise if one object is in the arguments twice, so that it would be called twice on each event."""
    seen: dict[int, str] = {}
    for name, several in members.items():
        for member in several:
            before = seen.setdefault(id(member), name)
            if before is not name or sum(other is member for other in several) > 1:
                where = f"twice in {name}" if before is name else f"in {before} and in {name}"
                raise ValueError(
                    f"The same {type(member).__name__} is {where}, so it would be called twice at each event: "
                    f"{member!r}. Leave it out once, or make a second one."
                )


def is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def to_plain(value: Any) -> Any:
    """Convert a NumPy number to a Python number. Other values are returned unchanged."""
    # By the name of the module, so that NumPy is not imported.
    is_numpys = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_numpys else value


_HERE = str(Path(__file__).parent)


def user_stacklevel() -> int:
    """Return the `stacklevel` for a warning that points at the first frame outside the Trainer's modules."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        level, frame = level + 1, frame.f_back
    return level


# Arguments that exist only for older scripts, with their defaults.
OLDER_NAMES_ONLY = {each.name: each.default for each in fields(TrainerArguments) if each.default is not MISSING}


def _clip_gradients(values: dict[str, Any], threshold: Any) -> None:
    from composer_algorithms.gradient_clipping import GradientClipping  # a slow import that only old scripts need

    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise ValueError(f"grad_clip_norm={threshold!r} must be a number; the norm of a gradient is clipped to it.")
    if threshold <= 0:
        return  # -1, the default of that release, disabled clipping
    several = list(ensure_tuple(values["algorithms"]))
    if any(isinstance(algorithm, GradientClipping) for algorithm in several):
        raise ValueError(
            f"grad_clip_norm={threshold!r} and algorithms={several!r} both clip gradients. Give the GradientClipping "
            "alone."
        )
    values["algorithms"] = [*several, GradientClipping("norm", threshold)]


def _to_interval(level: Any) -> str:
    name = str(getattr(level, "value", level)).lower()
    if name not in ("epoch", "batch"):
        raise ValueError(f"console_log_level={level!r} must be 'epoch' or 'batch'.")
    return "1ep" if name == "epoch" else "1ba"


# Arguments of earlier releases: the argument that has their value now, `None` for none, and the advice of the warning.
_OLDER: dict[str, tuple[str | None, str]] = {
    "load_strict": ("load_strict_model_weights", "Write load_strict_model_weights=...."),
    "load_chunk_size": (None, "Leave it out: downloads choose the size themselves."),
    "save_artifact_name": (
        "save_artifact_name",
        "Give save_folder an address, or the list of callbacks a CheckpointSaver(remote_file_name=...).",
    ),
    "save_latest_artifact_name": (
        "save_latest_artifact_name",
        "Give save_folder an address, or the list of callbacks a CheckpointSaver(latest_remote_file_name=...).",
    ),
    "grad_clip_norm": (None, "Write algorithms=GradientClipping('norm', ...)."),
    "compute_training_metrics": (
        "compute_training_metrics",
        "Let the model's get_metrics(is_train=True) return {} to disable them.",
    ),
    "fsdp_config": ("fsdp_config", "Write parallelism_config={'fsdp': ...}."),
    "fsdp_auto_wrap": ("fsdp_auto_wrap", "Write parallelism_config={'fsdp': {'auto_wrap': ...}}."),
    "load_fsdp_monolith_rank0_only": (
        "load_fsdp_monolith_rank0_only",
        "Write parallelism_config={'fsdp': {'load_monolith_rank0_only': ...}}.",
    ),
    "console_log_level": ("console_log_interval", "Write console_log_interval='1ep' or '1ba'."),
}


# Names of other trainers for the length of training, with the unit.
_LENGTHS = dict.fromkeys(("max_epochs", "num_epochs", "epochs", "num_train_epochs"), "ep") | dict.fromkeys(
    ("max_steps", "num_steps", "max_batches"), "ba"
)


def translate(values: dict[str, Any], older: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with those of earlier releases translated to current ones."""
    for name, value in older.items():
        if name not in _OLDER:
            near = difflib.get_close_matches(name, [*values, *_OLDER], n=3, cutoff=0.6)
            meant = f"Did you mean {' or '.join(map(repr, near))}?" if near else "See the docstring of Trainer for all."
            if name in _LENGTHS:
                number = value if is_whole(value) else 3
                meant = f"Write max_duration='{number}{_LENGTHS[name]}'."
            raise TypeError(f"Trainer.__init__() got an unexpected keyword argument {name!r}. {meant}")
    for name, value in older.items():
        newer, advice = _OLDER[name]
        if newer is not None and not _is_default(newer, values[newer], defaults):
            raise ValueError(
                f"{name}={value!r} and {newer}={values[newer]!r} are two names of one argument. Give {newer} alone."
            )
        warnings.warn(
            f"{name}={value!r} is an older spelling. {advice}", DeprecationWarning, stacklevel=user_stacklevel()
        )
        if name == "grad_clip_norm":
            _clip_gradients(values, value)
        elif newer is not None:
            values[newer] = _to_interval(value) if name == "console_log_level" else value
    return values

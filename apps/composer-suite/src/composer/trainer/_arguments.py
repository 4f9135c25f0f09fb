"""Checks of what the user gave to the Trainer, each turned into the one form that is used inside."""

import math
import os
import warnings
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from composer.trainer._argument_kinds import is_whole
from composer.trainer._caller import call_for_user, level_of_user
from composer_dist import Precision, reproducibility
from composer_dist.devices import Device, DeviceGPU, validate_precision
from composer_events.arguments import to_interval
from composer_events.batches import ensure_tuple
from composer_events.data_spec import DataSpec
from composer_events.evaluator import Evaluator
from composer_models import ComposerModel
from composer_optim import DecoupledSGDW
from composer_time import Time, TimeUnit, ensure_time

# The bases of the models that HuggingFaceModel wraps, by the packages that they are in.
_PUBLISHED = {("transformers", "PreTrainedModel"), ("peft", "PeftModel")}
_EXAMPLES = {"Algorithm": "EMA", "Callback": "SpeedMonitor", "LoggerDestination": "TensorboardLogger"}


def check_model(model: Any) -> ComposerModel:
    """Return the model if it is one that the loop can train.

    Raises:
        ValueError: If it is no ComposerModel.
    """
    if isinstance(model, ComposerModel):
        return model
    kind = f"the class {model.__name__}; call it" if isinstance(model, type) else f"a {type(model).__name__}"
    if _is_published(model):
        raise ValueError(
            f"Provided model must be a subclass of ComposerModel. model is {kind}. Wrap a model of transformers or "
            "peft with composer.models.HuggingFaceModel(model, tokenizer=...), which needs the extra 'hf': pip "
            "install 'composer-suite[hf]'."
        )
    raise ValueError(
        f"Provided model must be a subclass of ComposerModel. model is {kind}. Derive your class "
        "from composer.models.ComposerModel (forward(batch) and loss(outputs, batch)), or wrap any nn.Module with "
        "ComposerModel.from_module(module, loss_fn)."
    )


def _is_published(model: Any) -> bool:
    """Say whether a model, or a class of models, is one of transformers or peft, without importing these."""
    bases = (model if isinstance(model, type) else type(model)).__mro__
    return any((base.__module__.partition(".")[0], base.__name__) in _PUBLISHED for base in bases)


def choose_precision(precision: Any, device: Device) -> Precision:
    """Return the precision asked for, or mixed 16-bit on a GPU and full elsewhere.

    Raises:
        ValueError: If it is unknown or the device does not have it.
    """
    if precision is None:
        return Precision.AMP_FP16 if isinstance(device, DeviceGPU) else Precision.FP32
    chosen = call_for_user(Precision, precision)
    validate_precision(chosen, device)
    return chosen


def check_same_precision(asked: Precision, present: Precision) -> None:
    """Refuse another precision than the one in which the model was made ready.

    Raises:
        ValueError: If it is another.
    """
    if asked is not present:
        raise ValueError(
            f"precision={asked.value!r} cannot be set by fit(): DeepSpeed's engine was made for {present.value!r}. "
            "Give it to the constructor."
        )


def choose_optimizers(optimizers: Any, model: ComposerModel) -> list[Optimizer]:
    """Return the one optimizer, in a list; without any, plain decoupled SGD over all parameters.

    Raises:
        NotImplementedError: If there are several.
        TypeError: If it is no PyTorch optimizer.
    """
    given = ensure_tuple(optimizers)
    if len(given) > 1:
        raise NotImplementedError(
            f"Only one optimizer is supported; found {len(given)} optimizers. Give one of them groups of parameters "
            "with settings of their own instead."
        )
    for optimizer in given:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizers={optimizer!r} is no torch.optim.Optimizer. Build one over model.parameters().")
        _check_parameters(optimizer, model)
    if given:
        return list(given)
    parameters = list(model.parameters())
    if not parameters:
        warnings.warn(
            "No optimizer was specified, and the model does not have parameters, so it can be evaluated, not trained.",
            stacklevel=level_of_user(),
        )
        return []
    warnings.warn(
        "No optimizer was specified. Training uses DecoupledSGDW(model.parameters(), lr=0.1); pass optimizers=... "
        "to choose your own.",
        stacklevel=level_of_user(),
    )
    return [DecoupledSGDW(parameters, lr=0.1)]


def _check_parameters(optimizer: Optimizer, model: ComposerModel) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            f"None of the parameters of {type(optimizer).__name__} belongs to the model, so nothing would be trained. "
            "Build the optimizer over the parameters of the very model that is given."
        )


def check_subset(name: str, num_batches: Any) -> None:
    """Refuse a number of batches that is neither positive nor -1, which means all.

    Raises:
        ValueError: If it is none.
    """
    if not is_whole(num_batches) or (num_batches < 1 and num_batches != -1):
        raise ValueError(f"{name}={num_batches!r} must be a whole number of batches from 1, or -1 for all of them.")


def check_interval(interval: Any) -> None:
    """Refuse an interval of evaluations that is none.

    Raises:
        ValueError: If it is neither a number of epochs from 0, nor a time, nor a function.
        TypeError: If it is a function that cannot be called with a state and an event.
    """
    if is_whole(interval) and interval >= 0:
        return
    if callable(interval):
        to_interval("eval_interval", interval)
        return
    if not isinstance(interval, (str, Time)) or ensure_time(interval, TimeUnit.EPOCH).value < 0:
        raise ValueError(
            f"eval_interval={interval!r} must be a number of epochs (0 for never), a time such as '100ba', or a "
            "function of the state and the event."
        )


def check_iterable(name: str, dataloader: Any) -> None:
    """Refuse a dataloader that cannot be iterated over. Whoever made one into a DataSpec or Evaluator has seen to it.

    Raises:
        TypeError: If it cannot.
    """
    if not isinstance(dataloader, (DataSpec, Evaluator)) and not hasattr(dataloader, "__iter__"):
        raise TypeError(f"{name}={dataloader!r} is no iterable of batches. Give a torch DataLoader, or a list of them.")


def how_to_make(given: Any, kind: type) -> str:
    """Say what to give in place of something that is no object of a kind."""
    if isinstance(given, type):
        return f"Call it: {given.__name__}()."
    return f"Give an object, such as {_EXAMPLES.get(kind.__name__, kind.__name__)}()."


def check_members(name: str, given: Any, kind: type) -> list[Any]:
    """Return the algorithms or callbacks as a list.

    Raises:
        TypeError: If one of them is of another kind, a class in place of an instance for example.
    """
    is_many = isinstance(given, Iterable) and not isinstance(given, str)
    members = list(given) if is_many else list(ensure_tuple(given))
    for member in members:
        if not isinstance(member, kind):
            raise TypeError(f"{name} holds {member!r}, which is no {kind.__name__}. {how_to_make(member, kind)}")
    return members


def check_seed(seed: int | None) -> None:
    """Refuse a seed that is none.

    Raises:
        ValueError: If it lies outside of [0, 2**32).
    """
    if seed is not None and (not is_whole(seed) or not 0 <= seed <= reproducibility.MAX_SEED):
        raise ValueError(f"Invalid seed: seed={seed!r} must be a whole number from 0 to {reproducibility.MAX_SEED}.")


def check_dist_timeout(timeout_s: Any) -> None:
    """Refuse a time to wait for other ranks that is none.

    Raises:
        ValueError: If it is no finite number greater than 0.
    """
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:
        raise ValueError(
            f"dist_timeout={timeout_s!r} must be a finite number of seconds greater than 0. For a day write 86400."
        )


def choose_run_name(run_name: str | None) -> str | None:
    """Return the name given, or the one in the environment; None leaves it to the State to make one up.

    Raises:
        ValueError: If folders of that name would lie elsewhere than in the folders that they are to be in.
    """
    name = run_name or os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")
    if name is not None and os.pardir in str(name).replace("\\", "/").split("/"):
        raise ValueError(
            f"run_name={name!r} leads out of the folders that are named after it, such as save_folder='{{run_name}}'. "
            "Give a name without '..'."
        )
    return name

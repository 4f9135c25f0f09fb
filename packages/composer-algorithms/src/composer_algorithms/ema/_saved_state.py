"""Read the averages that checkpoints hold: our own, Composer's, and Composer's before 0.13."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from composer_algorithms.ema.parameters import EMAParameters
from composer_dist.strategy import canonical_name

FORMAT = 2
"""Format 1 is Composer's: without a number, and with the prefixes of wrappers in the names."""

# Users' log settings know Composer's names of loggers.
_log = logging.getLogger("composer.algorithms.ema")

Tensors = Mapping[str, Tensor]


def read_parameters(state: Mapping[str, Any], current: EMAParameters | None, strict: bool) -> EMAParameters:
    """Return the set of weights that a saved state of EMA holds.

    Args:
        state: What EMA's `state_dict` returned once.
        current: The set taken of the model as it is now; its names say what to look for, and what is missing in the
            state is taken from it.
        strict: Raise where names differ, instead of logging it.
    """
    if (version := state.get("format", 1)) > FORMAT:
        raise ValueError(
            f"the checkpoint has EMA's state in format {version!r}, and this version of composer-algorithms reads up "
            f"to {FORMAT}: update composer-algorithms."
        )
    current = current or EMAParameters(None)
    parameters, buffers = _saved_tensors(state, current)
    loaded = EMAParameters(None)
    loaded.named_parameters_dict = _fitted(parameters, current.named_parameters_dict, "parameters", strict)
    loaded.named_buffers_dict = _fitted(buffers, current.named_buffers_dict, "buffers", strict)
    return loaded


def _saved_tensors(state: Mapping[str, Any], current: EMAParameters) -> tuple[Tensors, Tensors]:
    saved = state["ema_model"]
    if "training_model" in state and state["ema_weights_active"]:
        saved = state["training_model"]  # before 0.13 both sets were kept; ours is the one that is not in the model
    if "named_parameters_dict" in saved:
        return saved["named_parameters_dict"], saved["named_buffers_dict"]
    if not current.named_parameters_dict:
        raise RuntimeError(
            "the checkpoint has EMA's state as Composer saved it before 0.13, which does not tell parameters from "
            "buffers: let EMA act on Event.INIT, where it learns that from the model, and load then."
        )
    names = _names_as_wanted(saved, [*current.named_parameters_dict, *current.named_buffers_dict])
    found = {wanted: saved[name] for name, wanted in names.items()}
    return (
        {name: found[name] for name in current.named_parameters_dict if name in found},
        {name: found[name] for name in current.named_buffers_dict if name in found},
    )


def _fitted(saved: Tensors, current: Tensors, kind: str, strict: bool) -> dict[str, Tensor]:
    # Copies: the average is changed in place, and the caller's state dict must not change with it.
    if not saved:  # the average had not begun, or the model has none of the kind
        return dict(current)
    names = _names_as_wanted(saved, current)
    found = {wanted: saved[name].detach().clone() for name, wanted in names.items()}
    if not current:
        return found
    missing, unexpected = sorted(current.keys() - found.keys()), sorted(found.keys() - current.keys())
    if missing or unexpected:
        kinds = (("are missing", missing), ("are of another model", unexpected))
        told = ", ".join(f"{len(names)} {what} (such as {names[:3]})" for what, names in kinds if names)
        message = f"EMA's state in the checkpoint does not have the {kind} of this model: {told}."
        # Without one name in common it belongs to another model, however lenient one is.
        if strict or (kind == "parameters" and len(missing) == len(current)):
            raise ValueError(f"{message} Load it into the model that it was saved from, or leave EMA's state out.")
        _log.warning("%s What is missing starts from the model's own.", message)
    return {name: found.get(name, tensor) for name, tensor in current.items()}


def _names_as_wanted(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    # Names of Composer's checkpoints carry DDP's "module.", which may also be part of a model's own names: the reading
    # that finds more of the wanted names is right.
    plain = {name: canonical_name(name) for name in saved}
    without_ddp = {name: canonical.removeprefix("module.") for name, canonical in plain.items()}
    sought = set(wanted)
    return max((plain, without_ddp), key=lambda names: len(sought.intersection(names.values())))

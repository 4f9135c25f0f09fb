"""A model and its optimizer in per-rank files, from a loop of one's own."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from composer_checkpoint.local_files import load_local, save_local

if TYPE_CHECKING:
    from composer_checkpoint.manifest import Manifest

__all__ = ["load_local_state", "save_local_state"]


def save_local_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    info: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> "Manifest":
    """Save what this rank holds of a model and its optimizers to a file of its own. Every rank must call this.

    Of a model sharded with `fully_shard` these are its shards; of one in `DistributedDataParallel`, or a plain one, all
    of it. Names are those of the plain model, and the file has the layout of those that a whole run saves.

    Args:
        path: With `{rank}` in it, if there are several ranks.
        model: The model.
        optimizers: The optimizer, or several, of different classes.
        info: What the manifest shall say about the run.
        timeout_s: How long the write of any rank may take.

    Returns:
        The manifest of this rank's file.

    Raises:
        ValueError: If there are several ranks and no `{rank}` in the path, or two optimizers of one class.
        CheckpointError: On all ranks, if any of them cannot write its file.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> path = tempfile.mkdtemp() + "/ba2_rank{rank}.pt"
        >>> manifest = save_local_state(path, model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> load_local_state(path, model)
    """
    return save_local(_collect(model, _named(optimizers)), path, info=info, timeout_s=timeout_s)


def load_local_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    verify: bool = True,
) -> None:
    """Load this rank's file into a model and its optimizers, spread as they were. Every rank must call this.

    Args:
        path: As it was given to `save_local_state`, or one of the per-rank files of a run.
        model: The model.
        optimizers: The optimizer, or several; none loads the model alone.
        verify: Whether the files' hashes are compared.

    Raises:
        ValueError: If another number of ranks saved the files: they are not elastic, unless `COMPOSER_LOCAL_ELASTIC=1`.
        NoCheckpointError: If there are no such files.
        CheckpointError: On all ranks, if a file of any is damaged, unsafe or of another model. Nothing was changed.
    """
    named = _named(optimizers)
    content = _collect(model, named)
    load_local(content, path, verify=verify)
    set_model_state_dict(model, content["state"]["model"])
    for name, optimizer in named.items():
        set_optimizer_state_dict(model, optimizer, content["state"]["optimizers"][name])


def _collect(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizers:
        state["optimizers"] = {name: get_optimizer_state_dict(model, each) for name, each in optimizers.items()}
    return {"state": state}


def _named(optimizers: Optimizer | Sequence[Optimizer]) -> dict[str, Optimizer]:
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    named = {type(optimizer).__qualname__: optimizer for optimizer in listed}
    if len(named) < len(listed):
        raise ValueError(
            f"optimizers={[type(optimizer).__qualname__ for optimizer in listed]}: they are known by their class, and "
            f"two have the same. Save each to a file of its own."
        )
    return named

"""Compilation by region: the repeated blocks of a model, one graph for each class of them."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from composer_dist.wrapping import unwrap_model
from composer_events.event import Event
from composer_events.logger import Logger
from composer_events.state import State

Regions = tuple[type[nn.Module], ...] | str | None

_log = logging.getLogger("composer.trainer.trainer")

_NUM_NAMED = 3


def split_config(config: Mapping[str, Any]) -> tuple[Regions, Mapping[str, Any]]:
    """Return the regions of a `compile_config`, `None` for the whole model, and the arguments of `torch.compile`.

    Raises:
        ValueError, TypeError: If `regions` is not valid.
    """
    regions: Any = config.get("regions", "auto")
    others = {name: value for name, value in config.items() if name != "regions"}
    if regions is None or regions is False:
        return None, others
    if regions == "auto":
        return "auto", others
    classes: Any = tuple(cast("Sequence[Any]", regions)) if isinstance(regions, list | tuple | set) else ()
    if classes and all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        return classes, others
    raise ValueError(
        f"compile_config has regions={regions!r}, which must be 'auto' for the repeated blocks of the model, a list of "
        f"classes of modules, or False to compile the whole model."
    )


def find_regions(model: nn.Module, regions: Regions) -> list[nn.Module]:
    """Return the outermost modules of the classes, or with `'auto'` the repeated blocks.

    Repeated blocks are the members of a `ModuleList` or `Sequential`, with children of their own, of one class whose
    modules all have the same parameters. So the layers of a transformer are, and the blocks of a ResNet are not: each
    of its sizes would be a graph of its own, and what lies between the blocks would not be compiled at all.

    Raises:
        ValueError: If there is no module of some class.
    """
    classes = regions if isinstance(regions, tuple) else ()
    found = list(_outermost(unwrap_model(model), classes))
    if not classes:
        kinds = Counter(kind for kind, _ in {(type(block), _signature(block)) for block in found})
        found = [block for block in found if kinds[type(block)] == 1]
    for kind in classes:
        if not any(isinstance(module, kind) for module in found):
            names = {type(module).__name__ for module in model.modules()}
            raise ValueError(
                f"compile_config has regions={[each.__name__ for each in classes]}, and the model has no module of "
                f"class {kind.__name__}. It has {', '.join(sorted(names))}. Use one of them, or regions='auto'."
            )
    return found


def _outermost(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    children = list(module.children())
    is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1
    repeats = not classes and is_list and len({type(child) for child in children}) == 1
    for child in children:
        if isinstance(child, classes) or (repeats and next(child.children(), None) is not None):
            yield child
        else:
            yield from _outermost(child, classes)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors)


def compile_model(model: nn.Module, regions: Regions, config: Mapping[str, Any]) -> None:
    """Compile a model or its regions in place, so that class, attributes and state dict keys do not change.

    PyTorch compiles at the first call, so the hooks of FSDP that regions have by now are not in their graphs.
    """
    blocks = find_regions(model, regions) if regions is not None else []
    compiled: list[Any] = blocks or [model]
    for module in compiled:
        module.compile(**config)
    kinds = sorted({type(module).__name__ for module in compiled})
    _log.info("Compiled: %d modules of %s.", len(compiled), ", ".join(kinds))


class RecompilationMonitor:
    """Counts recompilations in training, and logs why they happened and which algorithms may have caused them.

    Not a callback: it would be saved in checkpoints, and the ranks would exchange the losses of each batch for it.
    """

    def __init__(self) -> None:
        self.count = 0
        self._num_graphs = 0
        self._seen: set[Any] = set()

    def begin(self) -> None:
        """Ignore what was compiled before."""
        self._take()

    def look(self, state: State, logger: Logger) -> None:
        """Log recompilations of the batch. Without any, this only compares a number."""
        if _num_graphs() == self._num_graphs or not (reasons := self._take()):
            return
        self.count += len(reasons)
        logger.log_metrics({"compile/recompilations": self.count})
        changing = {Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_FORWARD}
        names = [type(each).__name__ for each in state.algorithms if changing.intersection(each.acts_on or ())]
        shapes = {name: tuple(each.shape) for name, each in _named_tensors(state.batch)}
        _log.warning(
            "Recompilations: %d in batch %d, whose tensors have shapes %s. Reasons: %s.%s",
            *(len(reasons), int(state.timestamp.batch), shapes, "; ".join(reasons[:_NUM_NAMED])),
            f" Algorithms that may change batches or the model: {', '.join(names)}." if names else "",
        )

    def _take(self) -> list[str]:
        """Return the reasons of the recompilations since the last call."""
        from torch._dynamo.utils import get_compilation_metrics  # a slow import

        self._num_graphs = _num_graphs()
        metrics: Any = get_compilation_metrics()  # of the last 64
        new = [each for each in metrics if each.start_time_us not in self._seen]
        self._seen = {each.start_time_us for each in metrics}
        return [f"{each.co_name}: {each.recompile_reason}" for each in new if each.recompile_reason]


def _num_graphs() -> int:
    from torch._dynamo.utils import counters  # a slow import

    return counters["stats"]["unique_graphs"]


def _named_tensors(batch: Any) -> list[tuple[str, torch.Tensor]]:
    items = (
        cast("Mapping[Any, Any]", batch).items()
        if isinstance(batch, Mapping)
        else enumerate(cast("Sequence[Any]", batch) if isinstance(batch, list | tuple) else [batch])
    )
    return [(str(name), value) for name, value in items if isinstance(value, torch.Tensor)]

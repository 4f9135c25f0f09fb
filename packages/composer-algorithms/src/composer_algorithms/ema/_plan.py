"""What a step of an average works on, found once and used for as long as neither model nor average are rebuilt."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from composer_algorithms._wrapping import is_dtensor, place_like

_KIND = attrgetter("dtype", "device")


class AveragingPlan:
    """Tensors of an average with those of a model that they follow, in the groups that one kernel can work on.

    Args:
        pairs: Each tensor of the average with the model's.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        # One call for all tensors of a kind: launching a kernel for each costs more than the arithmetic. Only lists of
        # one dtype and device take the fast path.
        groups: defaultdict[tuple[torch.dtype, torch.device, bool], tuple[list[Tensor], list[Tensor]]]
        groups = defaultdict(lambda: ([], []))
        self._copied: list[tuple[Tensor, Tensor]] = []
        self._mixed: list[tuple[Tensor, Tensor]] = []
        for target, source in pairs:
            distributed = is_dtensor(target)
            if not (target.is_floating_point() or target.is_complex()):
                self._copied.append((target, source))
            elif _KIND(target) == _KIND(source) and distributed == is_dtensor(source):
                group = groups[target.dtype, target.device, distributed]
                group[0].append(target)
                group[1].append(source)
            else:
                self._mixed.append((target, source))
        self._groups = list(groups.values())

    def step(self, smoothing: float) -> None:
        """Move the average one step on."""
        average_all = get_ema_multi_avg_fn(smoothing)
        for targets, sources in self._groups:
            average_all(targets, sources, None)
        for target, source in self._mixed:
            _average_mixed(target, place_like(source, target), smoothing)
        for target, source in self._copied:
            target.copy_(place_like(source, target))


class Fingerprint:
    """By which objects a model and an average are told from what they were, in much less time than by their names.

    Args:
        model: The model; only referred to weakly, but its parts are kept for as long as the fingerprint is.
        parameters: Those of the average, by name.
        buffers: Those of the average, by name.
    """

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        self._model = weakref.ref(model)
        # What is in these dicts may be replaced. What is added elsewhere has another name than all of the average's.
        kinds = ("_modules", "_parameters", "_buffers") if buffers else ("_modules", "_parameters")
        own = (vars(module)[kind] for module in model.modules() for kind in kinds)
        self._dicts: list[dict[str, Any]] = [parameters, buffers, *filter(None, own)]
        self._lengths = list(map(len, self._dicts))
        self._members = list(chain.from_iterable(map(dict.values, self._dicts)))
        # A model that is moved or converted keeps its parameters and gives them other data.
        self._parameters = [member for member in self._members if isinstance(member, nn.Parameter)]
        self._kinds = list(map(_KIND, self._parameters))

    def is_of(self, model: nn.Module) -> bool:
        """Answer whether everything is as it was."""
        return (
            self._model() is model
            and list(map(len, self._dicts)) == self._lengths
            and all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._members))
            and list(map(_KIND, self._parameters)) == self._kinds
        )


def _average_mixed(target: Tensor, source: Tensor, smoothing: float) -> None:
    dtype = torch.promote_types(target.dtype, source.dtype)
    source = source.to(device=target.device, dtype=dtype)
    target.copy_(torch.lerp(target.to(dtype), source, 1 - smoothing))

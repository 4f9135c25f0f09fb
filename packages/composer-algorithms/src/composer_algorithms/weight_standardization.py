"""Weight standardization: convolutions with filters of mean 0 and variance 1."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from composer_algorithms._arguments import check_counts
from composer_algorithms._method import ModelSurgery, log_no_effect, report
from composer_algorithms._optimizer_surgery import rename_in_optimizer
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, State

__all__ = ["WeightStandardization", "apply_weight_standardization", "METADATA"]

METADATA = METHODS["weight_standardization"]

_log = logging.getLogger("composer.algorithms.weight_standardization")
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EPS = 1e-10


class _Standardize(nn.Module):
    """Subtract each filter's mean and divide by its standard deviation."""

    def forward(self, weight: Tensor) -> Tensor:
        return _standardized(weight)


class _StandardizedWeight(parametrize.ParametrizationList):
    """Parametrizations of a weight with `_Standardize` as the first and usually the only one."""

    def forward(self) -> Tensor:
        # A fast path: torch's loop looks up each parametrization by name and calls it as a module, which for small
        # filters takes longer than the arithmetic.
        return _standardized(self.original) if len(self) == 1 else super().forward()


def apply_weight_standardization(module: nn.Module, n_last_layers_ignore: int = 0) -> int:
    """Standardize the filters of the convolutions in a model.

    Each `weight` is parametrized: reading it computes the standardized filters, and training updates the same
    `Parameter` object as before, now named `parametrizations.weight.original`. A second call changes nothing. For
    export, `torch.nn.utils.parametrize.remove_parametrizations(conv, "weight")` writes the standardized filters to the
    weight.

    Args:
        module: Changed in place; it may be a convolution itself.
        n_last_layers_ignore: Number of last convolutions that are not standardized: the last in the order of execution
            if `torch.fx` can trace the model, and otherwise in the order of registration.

    Returns:
        The number of standardized convolutions.

    Raises:
        ValueError: If `n_last_layers_ignore` is negative, or a convolution is lazy and has no weight yet.

    Example:
        >>> conv = nn.Conv2d(3, 8, 3)
        >>> apply_weight_standardization(conv)
        1
        >>> conv.weight.mean(dim=(1, 2, 3)).abs().max() < 1e-5
        tensor(True)

    Reference:
        Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization", 2019,
        arXiv:1903.10520, eq. (6).
    """
    check_counts(0, n_last_layers_ignore=n_last_layers_ignore)
    convs = {name: conv for name, conv in module.named_modules() if isinstance(conv, _CONVS)}
    # Tracing is slow and may fail, so only where the order matters.
    names = _in_order_of_execution(module, list(convs)) if 0 < n_last_layers_ignore < len(convs) else list(convs)
    chosen = names[: max(len(names) - n_last_layers_ignore, 0)]
    for name in chosen:
        _standardize(name, convs[name])
    if not chosen:
        why = f"it has {len(convs)} convolutions, of which {n_last_layers_ignore=} are left as they are"
        log_no_effect(_log, "WeightStandardization", module, why)
    return len(chosen)


def _standardize(name: str, conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
    if parametrize.is_parametrized(conv, "weight"):
        if any(isinstance(one, _Standardize) for one in _parametrizations(conv)):
            return
    elif nn.parameter.is_lazy(conv.weight):
        raise ValueError(
            f"the convolution {name!r} is a {type(conv).__qualname__} that has no weight yet: run a batch through the "
            f"model first."
        )
    # unsafe=True skips a check that computes every weight once; shape and dtype do not change.
    parametrize.register_parametrization(conv, "weight", _Standardize(), unsafe=True)
    if len(found := _parametrizations(conv)) == 1:
        # register_parametrization creates the list and has no argument for its class.
        found.__class__ = _StandardizedWeight


def _parametrizations(conv: nn.Module) -> parametrize.ParametrizationList:
    return getattr(conv.parametrizations, "weight")  # noqa: B009  # a ModuleDict's item


def _standardized(weight: Tensor) -> Tensor:
    # Layer norm over the last dims is the same arithmetic in one kernel. For channels_last weights, the permutation
    # makes these dims contiguous.
    if not _is_channels_last(weight):
        return F.layer_norm(weight, weight.shape[1:], eps=_EPS)
    nhwc = weight.permute(0, 2, 3, 1)
    return F.layer_norm(nhwc, nhwc.shape[1:], eps=_EPS).permute(0, 3, 1, 2)


def _is_channels_last(weight: Tensor) -> bool:
    # Filters of 1x1 are contiguous in both formats. Convolutions tell the formats apart by the strides, as this does.
    if weight.ndim != 4:
        return False
    _, channels, _, width = weight.stride()
    is_marked = channels == 1 and width == weight.shape[1]
    return is_marked and weight.is_contiguous(memory_format=torch.channels_last)


def _in_order_of_execution(module: nn.Module, names: list[str]) -> list[str]:
    try:
        nodes = torch.fx.symbolic_trace(module).graph.nodes
    except Exception as error:  # the model's code may raise any error when traced
        reason = f"torch.fx cannot trace the model ({type(error).__name__})"
    else:
        executed = list(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"))
        ordered = [name for name in executed if name in names]
        if len(ordered) == len(names):
            return ordered
        reason = "torch.fx does not see every convolution of the model"
    _log.warning(
        "n_last_layers_ignore counts convolutions in the order in which they were registered: %s. If that is not the "
        "order in which they run, others are left as they are.",
        reason,
    )
    return names


class WeightStandardization(ModelSurgery):
    """Standardize the filters of convolutions.

    On `INIT` it applies `apply_weight_standardization` to `state.model`, after all algorithms that add or replace
    convolutions. The optimizers keep their parameters, whose names in the model change. Loading a checkpoint of the
    changed model applies it.

    Args:
        n_last_layers_ignore: See `apply_weight_standardization`.

    Raises:
        ValueError: If `n_last_layers_ignore` is negative.

    Example:
        >>> WeightStandardization(n_last_layers_ignore=1)
        WeightStandardization(n_last_layers_ignore=1)

    Reference:
        Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization", 2019,
        arXiv:1903.10520.
    """

    surgery_rank = 4  # after the algorithms that add or replace convolutions

    def __init__(self, n_last_layers_ignore: int = 0) -> None:
        check_counts(0, n_last_layers_ignore=n_last_layers_ignore)
        self.n_last_layers_ignore = n_last_layers_ignore

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Standardize the convolutions, and log their number."""
        count = apply_weight_standardization(state.model, self.n_last_layers_ignore)
        # Optimizers created with named parameters keep the names in their groups.
        rename_in_optimizer(state.model, state.optimizers)
        report(_log, logger, {"WeightStandardization/num_weights_standardized": count})

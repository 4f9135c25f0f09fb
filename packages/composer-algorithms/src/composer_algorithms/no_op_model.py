"""No-op model: a model that computes next to nothing, for profiling the dataloader."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer_algorithms._method import ModelSurgery
from composer_algorithms.metadata import METHODS
from composer_events import Event, Logger, State
from composer_models.base import ComposerModel

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["NoOpModel", "NoOpModelClass", "METADATA"]

METADATA = METHODS["no_op_model"]


class NoOpModelClass(ComposerModel):
    """Model of one parameter, for any batch that contains a tensor.

    The targets are the second item of a list or tuple if that is a tensor, and otherwise the first tensor of the batch.

    Args:
        original_model: Model whose device and, if present, `num_classes` to copy.

    Example:
        >>> model = NoOpModelClass(nn.Linear(4, 2))
        >>> model((torch.rand(2, 4), torch.tensor([1, 0])))
        tensor([1.5000, 0.0000], grad_fn=<MulBackward0>)
    """

    def __init__(self, original_model: nn.Module) -> None:
        super().__init__()
        first = next(iter(original_model.parameters()), None)
        self.weights = nn.Parameter(torch.tensor([1.5], device=None if first is None else first.device))
        num_classes = getattr(original_model, "num_classes", None)
        if num_classes is not None:
            self.num_classes: Any = num_classes

    def forward(self, batch: Any) -> Tensor:
        """Return the targets, scaled by the parameter."""
        return _targets(batch) * self.weights

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean squared error of the scaled targets."""
        return F.mse_loss(outputs, _targets(batch).to(outputs.dtype))

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        """Return the targets."""
        return _targets(batch)

    def get_metrics(self, is_train: bool) -> "dict[str, Metric]":
        """Return an accuracy, whose value has no meaning."""
        from torchmetrics.classification import BinaryAccuracy  # slow to import

        return {"BinaryAccuracy": BinaryAccuracy(validate_args=False)}  # validation would wait for the device

    def update_metric(self, batch: Any, outputs: Any, metric: "Metric") -> None:
        """Update the metric with the targets as predictions."""
        targets = (_targets(batch) > 0).long()
        metric.update(targets, targets)


class NoOpModel(ModelSurgery):
    """Replace `state.model` by a `NoOpModelClass` on `INIT`.

    Its one parameter joins the first group of the first optimizer; all other groups become empty. It acts before all
    other algorithms, which then find nothing to change.

    Example:
        >>> NoOpModel()
        NoOpModel()
    """

    surgery_rank = 0

    def __init__(self) -> None:
        pass  # the base class would accept any arguments

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Replace the model and the parameters of the optimizers."""
        if isinstance(state.model, NoOpModelClass):
            return
        state.model = NoOpModelClass(state.model)
        for o, optimizer in enumerate(state.optimizers):
            optimizer.state.clear()  # of the replaced parameters
            for g, group in enumerate(optimizer.param_groups):
                is_first = o == g == 0
                group["params"] = [state.model.weights] if is_first else []
                if "param_names" in group:  # torch 2.6 and later keep them with the parameters
                    group["param_names"] = ["weights"] if is_first else []


def _targets(batch: Any) -> Tensor:
    if isinstance(batch, (list, tuple)) and len(batch) > 1 and isinstance(batch[1], Tensor):
        return batch[1]
    tensor = next(_tensors(batch), None)
    if tensor is None:
        raise TypeError(
            f"a batch of type {type(batch).__qualname__} contains no tensor, and NoOpModel scales the first one: let "
            f"the dataloader return tensors, in tuples, lists or dicts."
        )
    return tensor


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)

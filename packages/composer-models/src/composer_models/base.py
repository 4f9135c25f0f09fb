"""The interface between a model and the training loop."""

import abc
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from composer_models.legacy_evaluation import translate_legacy_evaluation

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composer_events.logger import Logger
    from composer_models.metrics import Metrics
    from composer_models.module_adapter import ModuleAdapter

__all__ = ["ComposerModel"]


class ComposerModel(torch.nn.Module, abc.ABC):
    """A model that takes whole batches and knows its loss and its metrics.

    Subclasses define `forward` and `loss`; `get_metrics` and `update_metric` add metrics, `eval_forward` an evaluation
    that differs from training. A plain module needs no subclass: see `from_module`.

    Two optional methods and two optional attributes of any submodule say how a model is spread over devices:
    `fsdp_wrap_fn(module)` or `_fsdp_wrap` choose what is sharded as one unit, `activation_checkpointing_fn(module)` or
    `_activation_checkpointing` what is computed anew in the backward pass. `param_init_fn(module)` fills parameters
    that were created on the meta device.

    The attribute `logger` is set by the trainer before the `INIT` event and is `None` before that. Copies of the model
    share it, and a pickle leaves it out.

    Subclasses that define `validate(batch)` and `metrics(train)`, the evaluation protocol of early releases, are
    translated when the class is created, with a `DeprecationWarning`.

    Example:
        >>> class LinearRegression(ComposerModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(3, 1)
        ...
        ...     def forward(self, batch):
        ...         inputs, _ = batch
        ...         return self.linear(inputs)
        ...
        ...     def loss(self, outputs, batch):
        ...         _, targets = batch
        ...         return torch.nn.functional.mse_loss(outputs, targets)
        >>> batch = torch.ones(2, 3), torch.zeros(2, 1)
        >>> model = LinearRegression()
        >>> model.loss(model(batch), batch).ndim
        0
    """

    def __init__(self) -> None:
        super().__init__()
        self.logger: Logger | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        translate_legacy_evaluation(cls)

    @abc.abstractmethod
    def forward(self, batch: Any) -> Any:
        """Compute the outputs for a batch.

        Args:
            batch: What the dataloader gives, or a microbatch of it.

        Returns:
            Whatever `loss` and `update_metric` take as `outputs`.
        """

    @abc.abstractmethod
    def loss(
        self, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor | Sequence[Tensor] | Mapping[str, Tensor]:
        """Compute the loss of a batch from its outputs.

        Args:
            outputs: What `forward` returned.
            batch: The batch that `forward` took.
            *args: For subclasses.
            **kwargs: For subclasses.

        Returns:
            One tensor; several, whose sum of means is minimised; or a dict of them, whose entry `'total'` is
            minimised if there is one and the sum of means otherwise.
        """

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        """Compute the outputs that the metrics see.

        Args:
            batch: The batch.
            outputs: The outputs of `forward` where the loop has them already, as it does for training metrics.

        Returns:
            `outputs` if given, else `self.forward(batch)`.
        """
        return outputs if outputs is not None else self.forward(batch)

    def update_metric(self, batch: Any, outputs: Any, metric: "Metric") -> dict[str, Any] | None:
        """Update one metric with a batch.

        Args:
            batch: The batch.
            outputs: What `eval_forward` returned.
            metric: One of the metrics of `get_metrics`, or a copy of it.

        Returns:
            `None`, or results for this batch, which the trainer keeps in `state.metric_outputs`.

        Raises:
            NotImplementedError: If the subclass has metrics and does not say how to update them.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has metrics and no update_metric: define update_metric(batch, outputs, metric), "
            f"which calls metric.update with the outputs and the targets in the batch."
        )

    def get_metrics(self, is_train: bool) -> "dict[str, Metric]":
        """Name the metrics to compute.

        Args:
            is_train: True for the metrics of training, False for those of evaluation.

        Returns:
            Metrics by name, in the order in which they are logged; the loop works on a copy of them.
        """
        return {}

    @staticmethod
    def from_module(
        module: torch.nn.Module,
        loss_fn: Callable[..., Any],
        metrics: "Metrics | None" = None,
        *,
        train_metrics: "Metrics | None" = None,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> "ModuleAdapter":
        """Make a `ComposerModel` of a plain module and a loss function.

        Args:
            module: The module, called with the inputs of a batch. A mapping is passed as keywords, a tuple as
                positional arguments, and anything else as the one argument.
            loss_fn: Called with the outputs and the targets.
            metrics: What to compute in evaluation: a torchmetrics metric, a collection, a sequence, or a mapping or
                `ModuleDict` of names to metrics. Names may be any strings.
            train_metrics: The same for training.
            input_key: Where a batch has the inputs: an index, a key, several of them, or a function of the batch.
            target_key: Where a batch has the targets.

        Returns:
            The model. Its parameters are those of `module`, under the prefix `module.`.

        Raises:
            TypeError: If `module` is no module or already a `ComposerModel`, or if `loss_fn` cannot be called or is a
                class, such as `torch.nn.MSELoss` without brackets.

        Example:
            >>> model = ComposerModel.from_module(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
            >>> batch = torch.ones(4, 3), torch.tensor([0, 1, 1, 0])
            >>> model.loss(model(batch), batch).ndim
            0
        """
        # The adapter is a subclass of this class, so its module cannot be imported above.
        from composer_models.module_adapter import ModuleAdapter

        return ModuleAdapter(
            module, loss_fn, metrics, train_metrics=train_metrics, input_key=input_key, target_key=target_key
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "logger": None}

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.__setstate__(self.__getstate__())
        copied.logger = self.logger
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        if self.logger is not None:
            memo[id(self.logger)] = self.logger  # so that submodules which hold the logger share it too
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied.logger = self.logger
        return copied

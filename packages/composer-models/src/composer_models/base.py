"""The interface between a model and the training loop."""

import abc
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from composer_events.batches import batch_get
from composer_models.legacy_evaluation import translate_legacy_evaluation

if TYPE_CHECKING:
    from composer_events.logger import Logger

__all__ = ["ComposerModel", "ModuleAdapter", "model_eval_mode"]


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


if TYPE_CHECKING:
    from torchmetrics import Metric

    from composer_models.metrics import Metrics
else:  # for typing.get_type_hints, without torchmetrics, which takes longer to import than torch
    Metric = Metrics = Any


class ModuleAdapter(ComposerModel):
    """What `ComposerModel.from_module` makes; its parameters are described there."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss_fn: Callable[..., Any],
        metrics: "Metrics | None" = None,
        *,
        train_metrics: "Metrics | None" = None,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        super().__init__()
        _check_module(module)
        if not callable(loss_fn):
            raise TypeError(f"loss_fn={loss_fn!r} cannot be called: pass a function of outputs and targets.")
        if isinstance(loss_fn, type):
            raise TypeError(
                f"loss_fn={loss_fn!r} is a class, which would take outputs and targets as its settings: pass an "
                f"instance, {loss_fn.__name__}()."
            )
        self.module = module
        self.loss_fn = loss_fn
        # Modules, so that they follow the model to its device where no trainer takes care of them. A ModuleDict could
        # not hold every name: none with a dot in it, nor that of one of its own methods.
        self._train_names, self.train_metrics = _names_and_modules(train_metrics)
        self._val_names, self.val_metrics = _names_and_modules(metrics)
        self.input_key = input_key
        self.target_key = target_key

    def forward(self, batch: Any) -> Any:
        """Call the module with the inputs of a batch."""
        inputs = batch_get(batch, self.input_key)
        if isinstance(inputs, torch.Tensor):  # found out sooner than that it is no mapping
            return self.module(inputs)
        if isinstance(inputs, Mapping):
            return self.module(**cast("Mapping[str, Any]", inputs))
        if isinstance(inputs, tuple):
            return self.module(*cast("tuple[Any, ...]", inputs))
        return self.module(inputs)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Compare outputs with the targets of a batch; further arguments go to the loss function."""
        return self.loss_fn(outputs, batch_get(batch, self.target_key), *args, **kwargs)

    def update_metric(self, batch: Any, outputs: Any, metric: "Metric") -> None:
        """Update one metric with outputs and the targets of a batch."""
        metric.update(outputs, batch_get(batch, self.target_key))

    def get_metrics(self, is_train: bool = False) -> "dict[str, Metric]":
        """Name the metrics of training or of evaluation."""
        names, metrics = (self._train_names, self.train_metrics) if is_train else (self._val_names, self.val_metrics)
        return cast("dict[str, Metric]", dict(zip(names, metrics, strict=True)))


def _names_and_modules(metrics: "Metrics | None") -> tuple[list[str], torch.nn.ModuleList]:
    if metrics is None:
        return [], torch.nn.ModuleList()
    from composer_models.metrics import metrics_by_name  # torchmetrics takes longer to import than torch

    by_name = metrics_by_name(metrics)
    return list(by_name), torch.nn.ModuleList(by_name.values())


def _check_module(module: object) -> None:
    if isinstance(module, ComposerModel):
        raise TypeError(f"module is a {type(module).__name__}, which is a ComposerModel already: use it as it is.")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module={module!r} is no torch.nn.Module: pass the module, not its class or its output.")


@contextmanager
def model_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in eval mode inside a `with` block and give every module its own mode back afterwards.

    The root goes back through `model.train(mode)`, so that a model with its own `train` is told. Submodules that
    were in another mode than the root, such as frozen batch norms, are then set back one by one.

    Args:
        model: The model, changed in place.

    Yields:
        Nothing.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Dropout())
        >>> with model_eval_mode(model):
        ...     model.training
        False
        >>> model.training
        True
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        # The root comes first in modules().
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode

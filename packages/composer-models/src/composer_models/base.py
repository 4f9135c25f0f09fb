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
    """Base class of models that accept whole batches and define their loss and metrics.

    Subclasses define `forward` and `loss`; `get_metrics` and `update_metric` add metrics, `eval_forward` an evaluation
    that differs from training. A plain module needs no subclass: see `from_module`.

    Two optional methods and two optional attributes of any submodule control how a model is distributed over devices:
    `fsdp_wrap_fn(module)` or `_fsdp_wrap` select the units of sharding, `activation_checkpointing_fn(module)` or
    `_activation_checkpointing` the modules with activation checkpointing. `param_init_fn(module)` initializes
    parameters that were created on the meta device.

    The attribute `logger` is set by the trainer before the `INIT` event and is `None` before that. Copies of the model
    share it, and pickles do not include it.

    Subclasses that define `validate(batch)` and `metrics(train)`, the evaluation protocol of early releases, are
    adapted when the class is created, with a `DeprecationWarning`.

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
            batch: A batch of the dataloader, or a microbatch of it.

        Returns:
            The outputs, which `loss` and `update_metric` receive.
        """

    @abc.abstractmethod
    def loss(
        self, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor | Sequence[Tensor] | Mapping[str, Tensor]:
        """Compute the loss of a batch from its outputs.

        Args:
            outputs: The result of `forward`.
            batch: The argument of `forward`.
            *args: For subclasses.
            **kwargs: For subclasses.

        Returns:
            One tensor; several, whose sum of means is minimized; or a dict of them, whose entry `'total'` is minimized
            if it exists and the sum of means otherwise.
        """

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        """Compute the outputs for the metrics.

        Args:
            batch: The batch.
            outputs: The outputs of `forward` if they are already computed, as for training metrics.

        Returns:
            `outputs` if given, else `self.forward(batch)`.
        """
        return outputs if outputs is not None else self.forward(batch)

    def update_metric(self, batch: Any, outputs: Any, metric: "Metric") -> dict[str, Any] | None:
        """Update one metric with the outputs of a batch.

        Args:
            batch: The batch.
            outputs: The result of `eval_forward`.
            metric: One of the metrics of `get_metrics`, or a copy of it.

        Returns:
            `None`, or results for this batch, which the trainer stores in `state.metric_outputs`.

        Raises:
            NotImplementedError: If the subclass has metrics but does not override this method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has metrics and no update_metric: define update_metric(batch, outputs, metric), "
            f"which calls metric.update with the outputs and the targets in the batch."
        )

    def get_metrics(self, is_train: bool) -> "dict[str, Metric]":
        """Return the metrics to compute.

        Args:
            is_train: True for the metrics of training, False for those of evaluation.

        Returns:
            Metrics by name, in logging order; the training loop uses copies of them.
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
        """Create a `ComposerModel` from a plain module and a loss function.

        Args:
            module: The module, called with the inputs of a batch. A mapping is passed as keyword arguments, a tuple as
                positional arguments, and anything else as the only argument.
            loss_fn: Called with the outputs and the targets.
            metrics: The metrics for evaluation: a torchmetrics metric, a collection, a sequence, or a mapping or
                `ModuleDict` of names to metrics. Names may be any strings.
            train_metrics: The metrics for training, in the same forms.
            input_key: The key of the inputs in a batch: an index, a key, several of these, or a function of the batch.
            target_key: The key of the targets in a batch.

        Returns:
            The model. Its parameters are those of `module`, under the prefix `module.`.

        Raises:
            TypeError: If `module` is not a module or already a `ComposerModel`, or if `loss_fn` is not callable or is
                a class, such as `torch.nn.MSELoss` without parentheses.

        Example:
            >>> model = ComposerModel.from_module(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
            >>> batch = torch.ones(4, 3), torch.tensor([0, 1, 1, 0])
            >>> model.loss(model(batch), batch).ndim
            0
        """
        return ModuleAdapter(
            module, loss_fn, metrics, train_metrics=train_metrics, input_key=input_key, target_key=target_key
        )

    def __getstate__(self) -> dict[str, Any]:
        # A logger has open files and connections, which cannot be pickled.
        return {**super().__getstate__(), "logger": None}

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.__setstate__(self.__getstate__())
        copied.logger = self.logger
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        # Before the recursion, since submodules may refer back to the model.
        memo[id(self)] = copied
        if self.logger is not None:
            memo[id(self.logger)] = self.logger  # so that submodules with the logger also share it
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied.logger = self.logger
        return copied


if TYPE_CHECKING:
    from torchmetrics import Metric

    from composer_models.metrics import Metrics
else:  # for typing.get_type_hints; importing torchmetrics takes longer than torch
    Metric = Metrics = Any


class ModuleAdapter(ComposerModel):
    """Model created by `ComposerModel.from_module`, which describes the parameters."""

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
        if isinstance(module, ComposerModel):
            raise TypeError(f"module is a {type(module).__name__}, which is a ComposerModel already: use it directly.")
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"module={module!r} must be a torch.nn.Module: pass the module, not its class or its output."
            )
        if not callable(loss_fn):
            raise TypeError(f"loss_fn={loss_fn!r} cannot be called: pass a function of outputs and targets.")
        # A class is callable too: MSELoss(outputs, targets) constructs a module instead of computing a loss.
        if isinstance(loss_fn, type):
            raise TypeError(
                f"loss_fn={loss_fn!r} is a class, which would take outputs and targets as its settings: pass an "
                f"instance, {loss_fn.__name__}()."
            )
        self.module = module
        self.loss_fn = loss_fn
        # In a ModuleList, so that they move with the model to its device even without a trainer. A ModuleDict rejects
        # some names: those with a dot and those of its own methods.
        self._train_names, self.train_metrics = _names_and_modules(train_metrics)
        self._val_names, self.val_metrics = _names_and_modules(metrics)
        self.input_key = input_key
        self.target_key = target_key

    def forward(self, batch: Any) -> Any:
        """Call the module with the inputs of a batch."""
        inputs = batch_get(batch, self.input_key)
        if isinstance(inputs, torch.Tensor):  # first, because the check for a mapping is slow
            return self.module(inputs)
        if isinstance(inputs, Mapping):
            return self.module(**cast("Mapping[str, Any]", inputs))
        if isinstance(inputs, tuple):
            return self.module(*cast("tuple[Any, ...]", inputs))
        return self.module(inputs)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of outputs and the targets of a batch; further arguments go to the loss function."""
        return self.loss_fn(outputs, batch_get(batch, self.target_key), *args, **kwargs)

    def update_metric(self, batch: Any, outputs: Any, metric: "Metric") -> None:
        """Update one metric with the outputs and the targets of a batch."""
        metric.update(outputs, batch_get(batch, self.target_key))

    def get_metrics(self, is_train: bool = False) -> "dict[str, Metric]":
        """Return the metrics of training or of evaluation by name."""
        names, metrics = (self._train_names, self.train_metrics) if is_train else (self._val_names, self.val_metrics)
        return cast("dict[str, Metric]", dict(zip(names, metrics, strict=True)))


def _names_and_modules(metrics: "Metrics | None") -> tuple[list[str], torch.nn.ModuleList]:
    if metrics is None:
        return [], torch.nn.ModuleList()
    from composer_models.metrics import metrics_by_name  # torchmetrics takes longer to import than torch

    by_name = metrics_by_name(metrics)
    return list(by_name), torch.nn.ModuleList(by_name.values())


@contextmanager
def model_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode inside a `with` block and restore the mode of every module afterwards.

    The root is restored by `model.train(mode)`, so that a model may override `train`. Submodules whose mode differed
    from that of the root, such as frozen batch norms, are restored individually.

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
        # `modules()` yields the root first.
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode

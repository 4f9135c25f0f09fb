"""The interface between a model and the training loop."""

import abc
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from composer_events import Logger, batch_get

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
        _translate_legacy_evaluation(cls)

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


# Outputs and targets of the last validate(). Outside the model, so that its copies and pickles hold no tensors.
_last_validated: "WeakKeyDictionary[torch.nn.Module, tuple[Any, Any]]" = WeakKeyDictionary()


def _translate_legacy_evaluation(cls: type) -> None:
    """Add the methods of the current protocol to a class with the one of early releases, and warn about it.

    Such a class defines `validate(batch) -> (outputs, targets)` and `metrics(train)`. Of an old method and the new one
    that replaces it, the one in the more derived class is used, and the new one if a class defines both.
    """
    spoken: list[str] = []
    if _is_closer(cls, "validate", than="eval_forward"):
        spoken.append("validate(batch)")
        if _is_closer(cls, "validate", than="update_metric"):
            cls.update_metric = _update_metric
        cls.eval_forward = _eval_forward
    if _is_closer(cls, "metrics", than="get_metrics"):
        spoken.append("metrics(train)")
        cls.get_metrics = _get_metrics
    if spoken:
        warnings.warn(
            f"{cls.__name__} defines {' and '.join(spoken)}, the evaluation protocol of early releases, which is "
            f"removed in 1.0. Define eval_forward(batch, outputs=None), update_metric(batch, outputs, metric) and "
            f"get_metrics(is_train) instead.",
            DeprecationWarning,
            stacklevel=4,  # past __init_subclass__ and ABCMeta.__new__, to the class statement
        )


def _is_closer(cls: type, legacy: str, *, than: str) -> bool:
    if getattr(cls, than) in (_eval_forward, _update_metric, _get_metrics):
        return False  # a base class was adapted already, and calls the methods of this class
    for owner in cls.__mro__:
        if than in vars(owner):
            return False
        if legacy in vars(owner):
            method = vars(owner)[legacy]
            # An attribute or a method of this name may have another purpose.
            parameters = inspect.signature(method).parameters.values() if inspect.isfunction(method) else ()
            required = [one for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
            return len(required) <= 2 <= len(parameters)
    return False


def _eval_forward(self: Any, batch: Any, outputs: Any | None = None) -> Any:
    # Also for training metrics, as in early releases: outputs of the training forward have no targets.
    _last_validated[self] = outputs, _ = self.validate(batch)
    return outputs


def _update_metric(self: Any, batch: Any, outputs: Any, metric: "Metric") -> None:
    validated, targets = _last_validated.get(self, (None, None))
    if validated is not outputs:  # a different batch, or replaced outputs
        _, targets = self.validate(batch)
    metric.update(outputs, targets)


def _get_metrics(self: Any, is_train: bool = False) -> "dict[str, Metric]":
    from composer_models.metrics import metrics_by_name  # torchmetrics takes longer to import than torch

    return metrics_by_name(self.metrics(is_train))


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
        if isinstance(module, ComposerModel) or not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"module={module!r:.200} must be a torch.nn.Module that is not a ComposerModel already: pass the plain "
                f"module, not its class or its output."
            )
        # MSELoss(outputs, targets) would construct a module instead of computing a loss.
        if isinstance(loss_fn, type) or not callable(loss_fn):
            raise TypeError(
                f"loss_fn={loss_fn!r} must be a function of outputs and targets. Of a class, such as MSELoss, pass an "
                f"instance, MSELoss()."
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

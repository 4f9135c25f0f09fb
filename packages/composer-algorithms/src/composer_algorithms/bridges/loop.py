"""Algorithms in a custom training loop in plain PyTorch."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms.bridges._loop_events import Epochs, LoopBatch, LoopEvents, needs_closure, shallow_copy
from composer_algorithms.bridges._refusals import check_algorithms, check_optimizers, refuse_cut_batches
from composer_events import Algorithm, Callback, Engine, Event, State
from composer_models.base import model_eval_mode
from composer_time import Time

__all__ = ["AlgorithmLoop", "LoopBatch"]


class AlgorithmLoop:
    """Run algorithms at the events of a custom training loop, in which only the body of a batch changes.

    The loop passes each batch to `batch`, assigns outputs and loss in the block, and leaves the backward pass, the
    optimizer's step and `zero_grad` to the end of the block. If the loop does not read the dataloader by `epoch`,
    epochs are counted by its length. Algorithms change the model and the optimizer in the constructor. Those that need
    the model's own loss, such as `SelectiveBackprop`, require a `ComposerModel`.

    Args:
        model: Model to train.
        optimizer: Optimizer of the model, or several.
        algorithms: One or several.
        dataloader: Training data.
        max_duration: Length of training: epochs, or a timestring such as `'10ep'` or `'500ba'`. Fractions of training
            refer to it; the loop itself decides when it ends.
        num_microbatches: Number of dataloader batches per step, which uses the mean of their gradients.
        precision: Name of the precision of the loop: `'amp_bf16'` if it runs under autocast. This class does not enter
            autocast.
        scaler: Gradient scaler of a loop that computes in float16.
        seed: Seed of the algorithms' random numbers. By default that of PyTorch, as set by `torch.manual_seed`.
        callbacks: One or several, including loggers.

    Attributes:
        state: State that the algorithms see.
        engine: Engine that runs them.
        optimizers: Optimizers that step; algorithms such as SAM may have wrapped the given ones.

    Raises:
        TypeError: If an object is not an algorithm.
        ValueError: If arguments are incompatible with each other, or with an algorithm.

    Example:
        >>> from composer_algorithms import LabelSmoothing
        >>> data = torch.utils.data.TensorDataset(torch.rand(8, 4), torch.arange(8) % 2)
        >>> loader, model = torch.utils.data.DataLoader(data, batch_size=4), nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loop = AlgorithmLoop(model, optimizer, LabelSmoothing(0.1), dataloader=loader, max_duration="1ep")
        >>> for x, y in loop.epoch():
        ...     with loop.batch(x, y) as b:
        ...         b.outputs = model(b.inputs)
        ...         b.loss = nn.functional.cross_entropy(b.outputs, b.targets)
        >>> loop.state.timestamp.batch
        Time(2, TimeUnit.BATCH)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        algorithms: Algorithm | Iterable[Algorithm] = (),
        *,
        dataloader: Iterable[Any],
        max_duration: int | str | Time[Any],
        num_microbatches: int = 1,
        precision: str | None = None,
        scaler: Any = None,
        seed: int | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
    ) -> None:
        check_optimizers(optimizer, model)
        self._events = LoopEvents(
            model,
            check_algorithms(algorithms),
            device=next(model.parameters()).device,  # there are some, since the optimizer holds them
            rank_zero_seed=torch.initial_seed() % 2**32 if seed is None else seed,
            optimizers=optimizer,
            precision=precision,
            scaler=scaler,
            callbacks=callbacks,
            device_train_microbatch_size=getattr(dataloader, "batch_size", None),
        )
        self.state: State = self._events.state
        self.engine: Engine = self._events.engine
        # Check before INIT: algorithms change the model irrevocably.
        refuse_cut_batches(self.state.algorithms, "num_microbatches", num_microbatches)
        self.state.max_duration = max_duration
        self._events.init()
        # After INIT, which may have changed the parameters in the optimizers.
        optimizers = self._events.wrap_optimizers(list(self.state.optimizers))
        optimizers, dataloader = self._prepared(optimizers, dataloader)
        self.optimizers: list[Any] = optimizers
        self._epochs = Epochs(self._events, dataloader, num_microbatches)
        # Only known now: algorithms may have wrapped the optimizers.
        if scaler is not None and any(map(needs_closure, self.optimizers)):
            raise ValueError(
                f"scaler={scaler!r} cannot be used with {type(self.optimizers[0]).__name__}, which evaluates a batch "
                f"more than once. Compute in bfloat16, which needs no scaler, or leave out one of the two."
            )
        self._create_graph = any(algorithm.backwards_create_graph for algorithm in self.state.algorithms)
        self._pieces: list[Any] = []  # microbatches of the current batch so far
        self._num_pieces = 0  # number of microbatches in the whole batch

    @contextmanager
    def batch(self, *parts: Any) -> Iterator[LoopBatch]:
        """Train on a batch: the block computes the loss, and the end of the block runs the rest.

        Args:
            *parts: Inputs and targets, or one argument, the batch in its own form.

        Raises:
            RuntimeError: If the block assigns no loss, or an optimizer evaluates each batch more than once: use
                `train_batch`.
        """
        for optimizer in self.optimizers:
            if needs_closure(optimizer):
                raise RuntimeError(
                    f"{type(optimizer).__name__} evaluates a batch more than once, and a block runs once: turn the "
                    f"block into a function of b, and call loop.train_batch(function, x, y)."
                )
        with self._trained_piece(parts) as piece:
            if len(self._pieces) == 1:
                self._begin_gradients()
            yield from self._compute(piece)
            if self._is_whole():
                self._end_gradients()
                self._step()
        if self._is_whole():
            self._end_batch()

    def train_batch(self, compute: Callable[[LoopBatch], object], *parts: Any) -> Tensor | None:
        """Train on a batch with a function instead of a block, which may be called more than once.

        Args:
            compute: Called with the batch; assigns outputs and loss.
            *parts: As for `batch`.

        Returns:
            The mean of the losses, detached; `None` until the last of `num_microbatches` has arrived.
        """
        losses: list[Tensor] = []

        def look() -> Tensor:
            self._begin_gradients()
            total: Any = 0.0
            for piece in self._pieces:
                for b in self._compute(piece):
                    compute(b)
                total = total + self.state.loss.detach() / self._num_pieces
            self._end_gradients()
            losses.append(total)
            return total

        with self._trained_piece(parts):
            if not self._is_whole():
                return None
            # Optimizers with a closure call `look` themselves, in their step.
            if not any(map(needs_closure, self.optimizers)):
                look()
            self._step(look)
        self._end_batch()
        # Of the first call: SAM's second one computes the loss at another point.
        return losses[0]

    def epoch(self) -> Iterator[Any]:
        """Read the dataloader once, running the events of an epoch; yields the batches to pass to `batch`.

        After `load_state_dict` it skips the batches of the epoch that were already trained on. If the loop leaves an
        epoch early, the next call continues that epoch, but reads the dataloader from the beginning.
        """
        return self._epochs.read()

    @contextmanager
    def evaluation(self, dataloader: Iterable[Any] | None = None) -> Iterator[None]:
        """Enclose an evaluation or a save: the model is in eval mode and holds the EMA average, if there is one.

        Args:
            dataloader: Evaluation data, set in the state within the block.
        """
        with model_eval_mode(self._events.state.model), self._events.evaluating(dataloader):
            yield

    @contextmanager
    def prediction(self, dataloader: Iterable[Any] | None = None) -> Iterator[None]:
        """Enclose predictions: the model is in eval mode and holds the weights being trained.

        Args:
            dataloader: Prediction data, set in the state within the block.
        """
        events = self._events
        with model_eval_mode(events.state.model), events.reading(dataloader, "predict"):
            events.engine.run_event(Event.PREDICT_START)
            yield
            events.engine.run_event(Event.PREDICT_END)

    def eval_batch(self, *parts: Any) -> AbstractContextManager[LoopBatch]:
        """Run the events of one batch within `evaluation`; the block assigns its outputs."""
        return self._watched_batch(parts, "eval_")

    def predict_batch(self, *parts: Any) -> AbstractContextManager[LoopBatch]:
        """Run the events of one batch within `prediction`; the block assigns its outputs."""
        return self._watched_batch(parts, "predict_")

    def close(self) -> None:
        """End training: run `FIT_END`, if training began, and close callbacks."""
        if self._events.is_fitting:
            self._events.end_fit()
        self.engine.close()

    def __enter__(self) -> "AlgorithmLoop":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.close()
        else:
            self.engine.close()  # without FIT_END, since training has failed

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the algorithms and the timestamp: tensors, numbers and strings.

        Save it together with the model, both inside one `evaluation` block or both outside: with EMA, the model holds
        one of two sets of weights, and this state the other one. With `num_microbatches`, save between whole batches;
        otherwise a resumed run has other random numbers and dropout masks than this one.

        Warns:
            UserWarning: In the middle of a batch.
        """
        if 0 < len(self._pieces) < self._num_pieces:
            warnings.warn(
                f"loop.state_dict() was called after {len(self._pieces)} of the {self._num_pieces} parts of a batch. "
                f"A resumed run starts this batch over, with other random numbers than this run: save when "
                f"loop.state.timestamp.batch has advanced.",
                stacklevel=2,
            )
        return self._events.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`.

        Raises:
            ValueError: If the state is that of other algorithms.
        """
        self._events.load_state_dict(state)
        self._epochs.resume()

    @contextmanager
    def _watched_batch(self, parts: tuple[Any, ...], phase: str) -> Iterator[LoopBatch]:
        events = self._events
        trained, events.state.batch = events.state.batch, shallow_copy(parts[0] if len(parts) == 1 else parts)
        try:
            events.engine.run_event(f"{phase}batch_start")
            b = LoopBatch(events, phase)
            yield b
            b.finish()
            events.engine.run_event(f"{phase}batch_end")
        finally:
            events.state.batch = trained  # an evaluation may run in the middle of a training batch

    def _prepared(self, optimizers: list[Optimizer], dataloader: Iterable[Any]) -> tuple[list[Any], Iterable[Any]]:
        """Return optimizers and dataloader as the loop uses them, after algorithms have changed the model."""
        return optimizers, dataloader

    def _accumulating(self) -> AbstractContextManager[Any]:
        """Return the context for the work on one microbatch."""
        return nullcontext()

    def _backward(self, loss: Tensor) -> None:
        """Add the gradients of a microbatch; the loss of the batch is the mean over its microbatches."""
        # Divided before the backward pass, since gradients of microbatches are summed.
        loss = loss if self._num_pieces == 1 else loss / self._num_pieces
        loss = loss if self.state.scaler is None else self.state.scaler.scale(loss)
        loss.backward(create_graph=self._create_graph)

    def _zero_grad(self, optimizer: Any) -> None:
        optimizer.zero_grad()

    def _unscale(self) -> None:
        if self.state.scaler is not None:
            for optimizer in self.optimizers:
                self.state.scaler.unscale_(optimizer)

    def _step(self, look: Callable[[], Tensor] | None = None) -> None:
        """Step all optimizers; those that need a closure get `look`."""
        for optimizer in self.optimizers:
            if self.state.scaler is not None:
                self.state.scaler.step(optimizer)
            elif look is not None and needs_closure(optimizer):
                optimizer.step(look)
            else:
                optimizer.step()
        # Once per step, after all optimizers, as torch's GradScaler requires.
        if self.state.scaler is not None:
            self.state.scaler.update()

    @contextmanager
    def _trained_piece(self, parts: tuple[Any, ...]) -> Iterator[Any]:
        """Add a microbatch; if the block fails, drop the batch so that the next one starts over."""
        try:
            with self._accumulating():
                yield self._load(parts)
        except BaseException:
            self._pieces.clear()
            raise

    def _load(self, parts: tuple[Any, ...]) -> Any:
        if self._events.is_evaluating:
            raise RuntimeError(
                "a batch is trained inside `with loop.evaluation():`, where the model may hold an average of its "
                "weights: leave that block first."
            )
        self._epochs.begin_batch()
        if not self._pieces:
            self._num_pieces = self._epochs.num_pieces()
        piece = self._events.load_batch(parts[0] if len(parts) == 1 else parts)
        if not self._pieces:
            piece = self._events.start_batch(piece)
        self._pieces.append(piece)
        self._epochs.count()
        return piece

    def _is_whole(self) -> bool:
        return len(self._pieces) == self._num_pieces

    def _begin_gradients(self) -> None:
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in self.optimizers:
            self._zero_grad(optimizer)

    def _compute(self, piece: Any) -> Iterator[LoopBatch]:
        self.state.batch = shallow_copy(piece)
        b = LoopBatch(self._events)
        yield b
        b.finish()
        self.engine.run_event(Event.BEFORE_BACKWARD)
        self._backward(self.state.loss)
        self.engine.run_event(Event.AFTER_BACKWARD)

    def _end_gradients(self) -> None:
        self._unscale()
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)

    def _end_batch(self) -> None:
        self._pieces.clear()
        self._events.end_batch()
        self.engine.run_event(Event.BATCH_CHECKPOINT)
        self._epochs.end_batch()

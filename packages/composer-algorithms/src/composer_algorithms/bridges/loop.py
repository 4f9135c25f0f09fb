"""Algorithms in a training loop of one's own, in plain PyTorch."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms.bridges._loop_events import (
    Epochs,
    LoopBatch,
    LoopEvaluation,
    LoopEvents,
    device_of,
    needs_closure,
    shallow_copy,
)
from composer_algorithms.bridges._refusals import check_optimizers, refuse_cut_batches
from composer_events.algorithm import Algorithm
from composer_events.callback import Callback
from composer_events.engine import Engine
from composer_events.event import Event
from composer_events.state import State
from composer_time import Time

__all__ = ["AlgorithmLoop", "LoopBatch"]


class AlgorithmLoop(LoopEvaluation):
    """Run algorithms at the events of a loop that stays as it is but for the body of a batch.

    The loop gives each batch to `batch`, assigns outputs and loss in the block, and leaves the backward pass, the
    optimizer's step and `zero_grad` to the end of the block. `epoch` reads the dataloader, so that the loop comes to
    every event; where the loop reads it itself, epochs are counted by its length, and `BEFORE_DATALOADER` comes late.

    Algorithms change the model and the optimizer when the loop is made. Methods that need the model's own loss, such as
    `SelectiveBackprop`, need a `ComposerModel`: `ComposerModel.from_module(module, loss_fn)`.

    Args:
        model: The model to train.
        optimizer: That of the model, or several.
        algorithms: One or several.
        dataloader: What is trained on.
        max_duration: How long: epochs, or a timestring such as `'10ep'` or `'500ba'`. The loop itself ends where it
            ends; parts of training are parts of this.
        num_microbatches: So many batches of the dataloader make one step, with the mean of their gradients.
        precision: In which the loop computes, by its name: `'amp_bf16'` where it runs under autocast. The loop enters
            no autocast itself.
        scaler: Scales the loss where the loop computes in float16.
        seed: Of the algorithms' draws. By default PyTorch's, as `torch.manual_seed` sets it.
        callbacks: One or several, loggers included.

    Attributes:
        state: What algorithms see.
        engine: What runs them.
        optimizers: Those that step; algorithms such as SAM may have wrapped the ones that were given.

    Raises:
        TypeError: If one of the algorithms is none.
        ValueError: If arguments do not go with each other, or with an algorithm.

    Warns:
        UserWarning: When the loop goes on after `max_duration`, once.

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
            algorithms,
            bridge="this loop",
            served=tuple(Event),
            device=device_of(model),
            rank_zero_seed=torch.initial_seed() % 2**32 if seed is None else seed,
            optimizers=optimizer,
            precision=precision,
            scaler=scaler,
            callbacks=callbacks,
            device_train_microbatch_size=getattr(dataloader, "batch_size", None),
        )
        self.state: State = self._events.state
        self.engine: Engine = self._events.engine
        refuse_cut_batches(self.state.algorithms, "num_microbatches", num_microbatches)
        self.state.max_duration = max_duration
        self._events.init()
        optimizers = self._events.wrap_optimizers(list(self.state.optimizers))
        optimizers, dataloader = self._prepared(optimizers, dataloader)
        self.optimizers: list[Any] = optimizers
        self._epochs = Epochs(self._events, dataloader, num_microbatches)
        if scaler is not None and any(map(needs_closure, self.optimizers)):
            raise ValueError(
                f"scaler={scaler!r} does not go with {type(self.optimizers[0]).__name__}, which looks at a batch more "
                f"than once. Compute in bfloat16, which needs no scaler, or leave out one of the two."
            )
        self._create_graph = any(algorithm.backwards_create_graph for algorithm in self.state.algorithms)
        self._pieces: list[Any] = []  # those of the batch that is being trained on
        self._num_pieces = 0  # how many there will be
        self._is_warned = False  # that training goes on after its end

    @contextmanager
    def batch(self, *parts: Any) -> Iterator[LoopBatch]:
        """Train on a batch: the block computes its loss, and its end does the rest.

        Args:
            *parts: The inputs and the targets; or one argument, the batch in the form that it has.

        Raises:
            RuntimeError: If the block assigns no loss, or an optimizer looks at each batch more than once: use
                `train_batch`.
        """
        self._warn_of_the_end(level=4)  # contextlib is between this block and the user's
        for optimizer in self.optimizers:
            if needs_closure(optimizer):
                raise RuntimeError(
                    f"{type(optimizer).__name__} looks at a batch more than once, and a block runs once: write what "
                    f"the block does as a function of b, and call loop.train_batch(function, x, y)."
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
        """Train on a batch with a function in the place of the block, which may be called more than once.

        Args:
            compute: Called with the batch; assigns outputs and loss.
            *parts: As for `batch`.

        Returns:
            The mean of the losses, detached; `None` until the last of `num_microbatches` is there.
        """
        self._warn_of_the_end(level=3)
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
            if not any(map(needs_closure, self.optimizers)):
                look()
            self._step(look)
        self._end_batch()
        return losses[0]

    def epoch(self) -> Iterator[Any]:
        """Read the dataloader once: yield what is to be given to `batch`, and come to the events of an epoch.

        After `load_state_dict` it passes over the batches of the epoch that were trained on. An epoch that the loop
        leaves early goes on with the next call, which reads from the beginning.
        """
        return self._epochs.read()

    def close(self) -> None:
        """End training: come to `FIT_END`, if it began, and close callbacks."""
        if self._events.is_fitting:
            self._events.end_fit()
        self.engine.close()

    def __enter__(self) -> "AlgorithmLoop":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.close()
        else:
            self.engine.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what algorithms need to go on, and the time: tensors, numbers and strings.

        Save it inside the same block of `evaluation` as the model, or outside of one as the model: where EMA keeps an
        average, the model has one of two sets of weights, and this has the other one. With `num_microbatches`, save
        between whole batches, or what resumes draws and drops out otherwise than this run.

        Warns:
            UserWarning: In the middle of a batch.
        """
        if 0 < len(self._pieces) < self._num_pieces:
            warnings.warn(
                f"loop.state_dict() was called after {len(self._pieces)} of the {self._num_pieces} parts of a batch. "
                f"Who resumes begins this batch anew, with other random numbers than this run: save when "
                f"loop.state.timestamp.batch has moved on.",
                UserWarning,
                stacklevel=2,
            )
        return self._events.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            ValueError: If it was called with other algorithms.
        """
        self._events.load_state_dict(state)
        self._epochs.resume()

    def _prepared(self, optimizers: list[Optimizer], dataloader: Iterable[Any]) -> tuple[list[Any], Iterable[Any]]:
        """Return the optimizers and the dataloader as this loop uses them, once algorithms have changed the model."""
        return optimizers, dataloader

    def _accumulating(self) -> AbstractContextManager[Any]:
        """Return what encloses the work on a piece of a batch."""
        return nullcontext()

    def _backward(self, loss: Tensor) -> None:
        """Add the gradients of a piece to those of the batch, whose loss is the mean of its pieces'."""
        loss = loss if self._num_pieces == 1 else loss / self._num_pieces
        loss = loss if self.state.scaler is None else self.state.scaler.scale(loss)
        loss.backward(create_graph=self._create_graph)

    def _zero_grad(self, optimizer: Any) -> None:
        optimizer.zero_grad()

    def _unscale(self) -> None:
        """Give the gradients their true size."""
        if self.state.scaler is not None:
            for optimizer in self.optimizers:
                self.state.scaler.unscale_(optimizer)

    def _step(self, look: Callable[[], Tensor] | None = None) -> None:
        """Step with each optimizer; `look` is for those that look at the batch themselves."""
        for optimizer in self.optimizers:
            if self.state.scaler is not None:
                self.state.scaler.step(optimizer)
            elif look is not None and needs_closure(optimizer):
                optimizer.step(look)
            else:
                optimizer.step()
        if self.state.scaler is not None:
            self.state.scaler.update()

    @contextmanager
    def _trained_piece(self, parts: tuple[Any, ...]) -> Iterator[Any]:
        """Take a piece of a batch from the loop; one that fails is forgotten, and the batch begins anew."""
        try:
            with self._accumulating():
                yield self._load(parts)
        except BaseException:
            self._pieces.clear()
            raise

    def _load(self, parts: tuple[Any, ...]) -> Any:
        self._events.refuse_training()
        self._epochs.begin_batch()
        if not self._pieces:
            self._num_pieces = self._epochs.num_pieces()
        piece = self._events.load_batch(parts[0] if len(parts) == 1 else parts)
        if not self._pieces:
            piece = self._events.start_batch(piece)
        self._pieces.append(piece)
        self._epochs.count()
        return piece

    def _warn_of_the_end(self, level: int) -> None:
        duration = self.state.max_duration
        if self._is_warned or duration is None or self.state.timestamp < duration:
            return
        self._is_warned = True
        warnings.warn(
            f"the loop goes on after max_duration={duration.to_timestring()!r}: what algorithms do at parts of "
            f"training was for that length. Give the length that the loop trains, or end it there.",
            UserWarning,
            stacklevel=level,
        )

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

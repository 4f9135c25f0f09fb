"""A small model, data that is the same in every run, and a training loop that comes to every event."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from hypothesis import settings
from torch import Tensor, nn

from composer_events import Algorithm, Callback, Engine, Event, State, create_interval_scheduler, default_split_batch

# The first call of an operator takes as long as thousands of the next ones.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

NUM_CLASSES = 3
BATCHES_PER_EPOCH = 4


class Classifier(nn.Module):
    """Batches are `(inputs, targets)`; the loss takes class indices and one value for each class."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.last = nn.Linear(8, NUM_CLASSES)

    def forward(self, batch: Any) -> Tensor:
        return self.last(self.norm(self.first(batch[0])).relu())

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])


class Saver(Callback):
    """Keep a checkpoint, as bytes that load without pickled objects, whenever its interval says so."""

    def __init__(self, interval: str) -> None:
        self.save_interval = create_interval_scheduler(interval)
        self.checkpoints: list[bytes] = []

    def _save_if_due(self, state: State, event: Event) -> None:
        if self.save_interval(state, event):
            file = io.BytesIO()
            torch.save(checkpoint_of(state), file)
            self.checkpoints.append(file.getvalue())

    def batch_checkpoint(self, state: State, logger: Any) -> None:
        self._save_if_due(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Any) -> None:
        self._save_if_due(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Any) -> None:
        self._save_if_due(state, Event.ITERATION_CHECKPOINT)


class WeightRecorder(Callback):
    """Keep a copy of `first.weight` as the model has it on every event."""

    def __init__(self) -> None:
        self.seen: list[tuple[Event, Tensor]] = []

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        self.seen.append((event, state.model.first.weight.detach().clone()))

    def on(self, event: Event) -> list[Tensor]:
        return [weight for seen_event, weight in self.seen if seen_event is event]


@dataclass
class Loop:
    """A training loop with the events of Composer's, in its order."""

    algorithms: list[Algorithm]
    callbacks: list[Callback] = field(default_factory=list)
    model: nn.Module = field(default_factory=Classifier)
    max_duration: str = "3ep"
    iteration_length: str | None = None
    evaluate: Callable[[State], bool] = lambda state: False
    num_evaluators: int = 1
    microbatch_size: int = 8
    seed: int = 17

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        for module in self.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = State(
            self.model,
            rank_zero_seed=self.seed,
            max_duration=self.max_duration,
            optimizers=optimizer,
            algorithms=self.algorithms,
            callbacks=self.callbacks,
            dataloader=epoch_of_batches(),
        )
        self.state.iteration_length = self.iteration_length
        self.engine = Engine(self.state)
        self.engine.run_event(Event.INIT)

    def fit(self) -> "Loop":
        state, run = self.state, self.engine.run_event
        run(Event.FIT_START)
        while state.get_elapsed_duration() < 1:
            if state.timestamp.batch_in_epoch == 0:
                if state.timestamp.epoch_in_iteration == 0:
                    run(Event.ITERATION_START)
                run(Event.EPOCH_START)
            for batch in epoch_of_batches()[state.timestamp.batch_in_epoch.value :]:
                run(Event.BEFORE_DATALOADER)
                self._train_on(batch)
                if state.get_elapsed_duration() >= 1 and self.max_duration.endswith("ba"):
                    break
            else:
                run(Event.BEFORE_DATALOADER)
                self._end_epoch()
        run(Event.FIT_END)
        self.engine.close()
        return self

    def resume_from(self, checkpoint: bytes) -> "Loop":
        state = self.state
        loaded = torch.load(io.BytesIO(checkpoint), weights_only=True)
        state.model.load_state_dict(loaded["model"])
        state.optimizers[0].load_state_dict(loaded["optimizer"])
        state.timestamp = state.timestamp.copy(**loaded["timestamp"])
        for algorithm, saved in zip(state.algorithms, loaded["algorithms"], strict=True):
            algorithm.load_state_dict(saved)
        return self

    def _train_on(self, batch: Any) -> None:
        state, run = self.state, self.engine.run_event
        state.batch = batch
        run(Event.AFTER_DATALOADER)
        run(Event.BATCH_START)
        whole, num_samples = state.batch, len(state.batch[0])
        run(Event.BEFORE_TRAIN_BATCH)
        state.optimizers[0].zero_grad()
        for state.batch in default_split_batch(whole, self.microbatch_size):
            share = len(state.batch[0]) / num_samples
            run(Event.BEFORE_FORWARD)
            state.outputs = state.model(state.batch)
            run(Event.AFTER_FORWARD)
            run(Event.BEFORE_LOSS)
            state.loss = state.model.loss(state.outputs, state.batch)
            run(Event.AFTER_LOSS)
            run(Event.BEFORE_BACKWARD)
            (state.loss * share).backward()
            run(Event.AFTER_BACKWARD)
        state.batch = whole
        run(Event.AFTER_TRAIN_BATCH)
        state.optimizers[0].step()
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(num_samples, duration=timedelta(seconds=1))
        run(Event.BATCH_END)
        self._evaluate_if_due()
        run(Event.BATCH_CHECKPOINT)

    def _end_epoch(self) -> None:
        state, run = self.state, self.engine.run_event
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_epoch()
        run(Event.EPOCH_END)
        run(Event.EPOCH_CHECKPOINT)
        if self.iteration_length and state.timestamp.epoch_in_iteration >= self.iteration_length:
            state.previous_timestamp = state.timestamp
            state.timestamp = state.timestamp.to_next_iteration()
            run(Event.ITERATION_END)
            run(Event.ITERATION_CHECKPOINT)

    def _evaluate_if_due(self) -> None:
        if not self.evaluate(self.state):
            return
        run = self.engine.run_event
        run(Event.EVAL_BEFORE_ALL)
        for _ in range(self.num_evaluators):
            run(Event.EVAL_START)
            run(Event.EVAL_END)
        run(Event.EVAL_AFTER_ALL)


def epoch_of_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(NUM_CLASSES, (8,), generator=generator))
        for _ in range(BATCHES_PER_EPOCH)
    ]


def checkpoint_of(state: State) -> dict[str, Any]:
    counters = ("epoch", "batch", "batch_in_epoch", "sample", "epoch_in_iteration", "iteration")
    return {
        "model": state.model.state_dict(),
        "optimizer": state.optimizers[0].state_dict(),
        "algorithms": [algorithm.state_dict() for algorithm in state.algorithms],
        "timestamp": {name: getattr(state.timestamp, name).value for name in counters},
    }


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)  # these tensors are too small for more to pay


@pytest.fixture
def make_model() -> type[Classifier]:
    return Classifier


@pytest.fixture
def make_loop() -> type[Loop]:
    return Loop


@pytest.fixture
def make_saver() -> type[Saver]:
    return Saver


@pytest.fixture
def recorder() -> WeightRecorder:
    return WeightRecorder()


@pytest.fixture
def state(make_model: type[Classifier]) -> State:
    """A state in the middle of a batch of four examples, without an engine."""
    torch.manual_seed(0)
    state = State(make_model(norm=False), rank_zero_seed=5, max_duration="2ep")
    state.batch = (torch.rand(4, 4), torch.tensor([0, 1, 2, 1]))
    state.outputs = torch.randn(4, NUM_CLASSES, requires_grad=True)
    return state


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    """Make this process the only rank of a process group."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()

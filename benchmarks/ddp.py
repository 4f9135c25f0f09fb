"""DDP steps of a tiny network and of a GPT with 10 M parameters through the Trainer, against a loop written by hand.

    python benchmarks/ddp.py [--rounds 6] [--steps 8]

All train in the same two processes over gloo, one thread each: before each step of a Trainer the loop by hand makes
one. Printed are the median times of a step on rank 0 and the median ratio to the step by hand before it. The last rows
delay each collective by 5 ms, as a slow network does: what the Trainer waits for, beside the gradients, adds to the
step by hand.
"""

import io
import statistics
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as tdist
from gpt_steps import BY_HAND, Pairs, WithTrainer, by_hand, in_turns, make_network, report, run
from rows import Row, write
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics.classification import MulticlassAccuracy

from composer import Callback

NUM_CLASSES = 10
DELAY_S = 0.005
TINY, GPT, DELAYED = "DDP step of a tiny network", "DDP step of a GPT", "DDP step, collectives delayed by 5 ms"
BUDGETS = {
    TINY: {"Trainer": 1.10, "progress bar and accuracy": 1.25},
    GPT: {"Trainer": 1.01, "Trainer with a callback": 1.01},
}
LONGER_MS = 1.0
"""How much longer than the loop by hand a step may become with delayed collectives."""


class Listener(Callback):
    """Listens, and does nothing."""

    def batch_end(self, state: object, logger: object) -> None:
        """Do nothing."""


class FirstToken(nn.Module):
    """Classify a sentence by its first token, with few parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.embedding(tokens[:, 0] % 64))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of the class."""
    return nn.functional.cross_entropy(logits, targets[:, 0] % NUM_CLASSES)


class FirstAccuracy(MulticlassAccuracy):
    """The accuracy of the class, as a classifier has it by default."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count a batch."""
        super().update(preds, target[:, 0] % NUM_CLASSES)


class DelayedWork:
    """A collective whose result arrives late."""

    def __init__(self, work: Any) -> None:
        self._work, self._arrives_s = work, time.perf_counter() + DELAY_S

    def wait(self, *_: Any) -> bool:
        """Wait for the result."""
        time.sleep(max(0.0, self._arrives_s - time.perf_counter()))
        return self._work.wait()


def delayed(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that takes longer."""

    def start(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = DelayedWork(collective(*args, async_op=True, **kwargs))
        return work if async_op else work.wait() and None

    return start


def delayed_gradients(
    state: object,
    bucket: tdist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]  # documented there
) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients, as a communication hook of DDP."""
    del state
    future: Any = torch.futures.Future()
    gradients = bucket.buffer().div_(tdist.get_world_size())
    work = DelayedWork(tdist.distributed_c10d.all_reduce(gradients, async_op=True))
    threading.Thread(target=lambda: (work.wait(), future.set_result(gradients))).start()
    return future


@contextmanager
def delays() -> Generator[None]:
    """Delay the collectives that Python calls."""
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier")
    before = {name: getattr(tdist, name) for name in names}
    for name, collective in before.items():
        setattr(tdist, name, delayed(collective))
    try:
        yield
    finally:
        for name, collective in before.items():
            setattr(tdist, name, collective)


def measure_tiny(rounds: int, num_steps: int, *, is_delayed: bool) -> dict[str, Pairs]:
    """Return the steps of each loop over the tiny network."""
    make = partial(WithTrainer, loss=loss_of)
    shown = {"progress_bar": True, "console_stream": io.StringIO()}
    accuracy = FirstAccuracy(NUM_CLASSES, average="micro")
    network = DistributedDataParallel(FirstToken(), gradient_as_bucket_view=True)
    trainers = {
        "Trainer": make(FirstToken(), num_steps),
        "progress bar and accuracy": make(FirstToken(), num_steps, metrics=accuracy, **shown),
        "progress bar, accuracy and a callback": make(
            FirstToken(), num_steps, metrics=accuracy, callbacks=[Listener()], **shown
        ),
    }
    if is_delayed:
        for model in (network, *(each.trainer.state.model for each in trainers.values())):
            model.register_comm_hook(None, delayed_gradients)
    return in_turns({BY_HAND: by_hand(network, num_steps, loss=loss_of)}, trainers, rounds)


def measure(rounds: int, num_steps: int) -> dict[str, dict[str, Pairs]]:
    """Return the steps of each loop, by network."""
    tiny = measure_tiny(rounds, 10 * num_steps, is_delayed=False)
    with delays():
        late = measure_tiny(rounds, 10 * num_steps, is_delayed=True)
    network = DistributedDataParallel(make_network(), gradient_as_bucket_view=True)
    trainers = {
        "Trainer(on_divergence=None)": WithTrainer(make_network(), num_steps, on_divergence=None),
        "Trainer": WithTrainer(make_network(), num_steps),
        "Trainer with a callback": WithTrainer(make_network(), num_steps, callbacks=[Listener()]),
    }
    gpt = in_turns({BY_HAND: by_hand(network, num_steps)}, trainers, rounds)
    return {TINY: tiny, DELAYED: late, GPT: gpt}


def growth_of(tiny: Mapping[str, Pairs], late: Mapping[str, Pairs]) -> list[Row]:
    """Return by how much delayed collectives make the Trainer's step longer than they do the loop by hand."""
    rows: list[Row] = []
    for name, pairs in late.items():
        more, more_before = (statistics.median(own - plain for own, plain in each) for each in (pairs, tiny[name]))
        growth_ms = 1000 * (more - more_before)
        print(f"{DELAYED}, {name}: {growth_ms:.2f} ms longer than by hand")
        is_met = growth_ms <= LONGER_MS
        rows.append(Row(what=f"{DELAYED}, {name}", ours=growth_ms, budget=f"{LONGER_MS:g} ms", is_met=is_met))
    return rows


def main() -> None:
    """Measure and print."""
    found, arguments = run(measure, "Compare a DDP step of the Trainer with one by hand.")
    rows = [row for what in (TINY, GPT) for row in report(found[what], what, None, BUDGETS[what])]
    write(arguments.json, rows + growth_of(found[TINY], found[DELAYED]))


if __name__ == "__main__":
    main()

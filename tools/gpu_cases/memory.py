"""Memory that runs out: `device_train_microbatch_size='auto'` against batches that really do not fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpu_cases.subjects import NUM_CLASSES, NUM_FEATURES, make_batches, make_trainer

BATCH_SIZE, DEPTH, WIDTH = 65_536, 16, 1024
ALLOWED_BYTES = 3 << 29  # 1.5 GiB, and a batch's activations take over 4


def auto_microbatch(device: str) -> str:
    """Batches several times too large train as if they had been cut from the start."""
    found, expected = make_deep(), make_deep()
    with at_most(ALLOWED_BYTES):
        size = _train(found, device, "auto")
    assert size <= BATCH_SIZE // 2, f"microbatches of {size}: nothing was cut"
    _train(expected, device, size)
    torch.testing.assert_close(list(found.parameters()), list(expected.parameters()), rtol=1e-4, atol=1e-6)
    return f"batches of {BATCH_SIZE} in microbatches of {size}"


def make_deep() -> nn.Sequential:
    """Return a network whose weights are small beside what it computes of a batch."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), *hidden, nn.Linear(WIDTH, NUM_CLASSES))


@contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    """Let this process have so much of the GPU's memory, and no more."""
    total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / total_bytes))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _train(network: nn.Module, device: str, size: Any) -> Any:
    """Train, and return the size of microbatches at the end."""
    batches = make_batches(3, BATCH_SIZE)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loader = DataLoader(TensorDataset(inputs, targets), BATCH_SIZE)  # says with how many samples to begin
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    settings = {"train_dataloader": loader, "device_train_microbatch_size": size, "optimizers": optimizer}
    with make_trainer(network, batches, device, **settings) as trainer:
        trainer.fit()
        return trainer.state.device_train_microbatch_size

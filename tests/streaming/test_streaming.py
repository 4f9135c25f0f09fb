"""A StreamingDataset is trained and evaluated on, and every sample comes once, also after a resumption."""

import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from composer import Callback, Evaluator, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist
from composer_dist.testing import run_ranks

streaming = pytest.importorskip("streaming")

NUM_LINES, BATCH_SIZE, WIDTH = 48, 4, 24


class Lines(streaming.StreamingDataset):
    """Lines of source text as bytes; what is to be told is whether one is indented."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        text = sample["text"].encode()[:WIDTH].ljust(WIDTH)
        return {
            "number": torch.tensor(sample["number"]),
            "text": torch.tensor(list(text)),
            "label": torch.tensor(int(sample["text"].startswith(" "))),
        }


class Reader(ComposerClassifier):
    def __init__(self):
        network = nn.Sequential(nn.Embedding(256, 4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, 2))
        super().__init__(network, num_classes=2)

    def forward(self, batch):
        return self.module(batch["text"])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["label"])

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch["label"])


class Seen(Callback):
    """Keeps what each batch held, and its loss to the last bit."""

    def __init__(self):
        self.batches = {}
        self.evaluated = []

    def after_train_batch(self, state, logger):
        loss = float(state.loss.detach()).hex()
        self.batches[int(state.timestamp.batch)] = (state.batch["number"].tolist(), loss)

    def eval_batch_end(self, state, logger):
        self.evaluated += state.batch["number"].tolist()


def write_lines(folder):
    lines = [line for line in Path(random.__file__).read_text().splitlines() if line.strip()][:NUM_LINES]
    with streaming.MDSWriter(out=str(folder), columns={"number": "int", "text": "str"}, size_limit=1000) as writer:
        for number, text in enumerate(lines):
            writer.write({"number": number, "text": text})
    return str(folder)


def train(data, *, loader=DataLoader, num_workers=0, evaluates=False, num_samples=BATCH_SIZE, **settings):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset = Lines(local=data, shuffle=True, batch_size=num_samples, num_canonical_nodes=1)
    seen = Seen()
    model = Reader()
    if evaluates:
        lines = Lines(local=data, shuffle=False, batch_size=num_samples, num_canonical_nodes=1)
        settings["eval_dataloader"] = Evaluator(label="lines", dataloader=loader(lines, batch_size=num_samples))
    with Trainer(
        model=model,
        train_dataloader=loader(dataset, batch_size=num_samples, num_workers=num_workers),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        callbacks=[seen],
        device="cpu",
        progress_bar=False,
        seed=5,
        run_name="plum",
        **{"max_duration": "3ep", **settings},
    ) as trainer:
        trainer.fit()
    return seen


def checkpoint(folder, epoch, batch):
    return os.path.join(folder, f"ep{epoch}-ba{batch}-rank0.pt")


@pytest.fixture
def data(tmp_path):
    return write_lines(tmp_path / "lines")


@pytest.mark.parametrize("loader", [DataLoader, streaming.StreamingDataLoader])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_same_lines_come_again_wherever_a_run_is_resumed(tmp_path, data, loader, num_workers):
    folder = str(tmp_path / "checkpoints")
    options = {"loader": loader, "num_workers": num_workers}
    expected = train(data, save_folder=folder, save_interval="1ba", **options).batches
    epochs = [sorted(line for batch in range(12) for line in expected[12 * epoch + batch][0]) for epoch in range(3)]
    assert epochs == [list(range(NUM_LINES))] * 3
    for epoch, batch in ((0, 5), (0, 12), (1, 13)):  # inside an epoch, at its last batch, after the first of another
        resumed = train(data, load_path=checkpoint(folder, epoch, batch), **options).batches
        assert resumed == {number: expected[number] for number in range(batch, 36)}


def test_a_run_that_was_saved_between_epochs_begins_the_next_one(tmp_path, data):
    folder = str(tmp_path / "checkpoints")
    expected = train(data, save_folder=folder).batches
    resumed = train(data, load_path=checkpoint(folder, 1, 12)).batches
    assert resumed == {number: expected[number] for number in range(12, 36)}


def test_lines_are_evaluated_on_once_each_time(data):
    seen = train(data, evaluates=True, max_duration="2ep")
    assert sorted(seen.evaluated) == sorted([*range(NUM_LINES)] * 2)


def resume_on_two_ranks(data, folder, loader, num_workers):
    options = {"num_samples": 2, "loader": loader, "num_workers": num_workers}
    expected = train(data, evaluates=True, save_folder=folder, save_interval="1ba", **options)
    dist.barrier()
    for epoch, batch in ((0, 5), (0, 12), (1, 17)):
        seen = train(data, evaluates=True, load_path=checkpoint(folder, epoch, batch), **options)
        assert seen.batches == {number: expected.batches[number] for number in range(batch, 36)}, batch
    return [expected.batches[number][0] for number in range(12)], expected.evaluated


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loader", [DataLoader, streaming.StreamingDataLoader])
def test_two_ranks_share_the_lines_and_are_resumed_to_the_last_bit(tmp_path, data, loader, num_workers):
    folder = str(tmp_path / "checkpoints")
    (first, evaluated), (second, others) = run_ranks(
        resume_on_two_ranks, data, folder, loader, num_workers, store=tmp_path / "store", timeout_s=200
    )
    assert sorted(line for batch in first + second for line in batch) == list(range(NUM_LINES))
    assert sorted(evaluated + others) == sorted([*range(NUM_LINES)] * 3)


def train_and_list(data, settings):
    """Train, and return the numbers of the lines of each batch."""
    return {number: lines for number, (lines, _) in train(data, **settings).batches.items()}


def on_two_ranks(tmp_path, data, **settings):
    """Train on two ranks, and return the numbers of the lines of each batch of theirs together."""
    first, second = run_ranks(train_and_list, data, settings, store=tmp_path / "store", timeout_s=200)
    assert first.keys() == second.keys()
    return {number: sorted(first[number] + second[number]) for number in first}


@pytest.mark.parametrize("loader", [DataLoader, streaming.StreamingDataLoader])
def test_an_epoch_is_finished_on_more_ranks_with_batches_of_the_same_size_in_all(tmp_path, data, loader):
    folder = str(tmp_path / "checkpoints")
    expected = train(data, loader=loader, save_folder=folder, save_interval="1ba", max_duration="2ep").batches
    resumed = on_two_ranks(
        tmp_path, data, loader=loader, num_samples=2, max_duration="2ep", load_path=checkpoint(folder, 0, 5)
    )
    assert resumed == {number: sorted(expected[number][0]) for number in range(5, 24)}


def test_with_batches_of_another_size_a_new_epoch_is_begun(tmp_path, data):
    folder = str(tmp_path / "checkpoints")
    train(data, save_folder=folder, save_interval="1ba", max_duration="5ba")
    with pytest.warns(UserWarning, match="20 samples|Training goes on with the next epoch, number 1"):
        resumed = train_and_list(data, {"num_samples": 8, "max_duration": "2ep", "load_path": checkpoint(folder, 0, 5)})
    assert list(resumed) == [5, 6, 7, 8, 9, 10]
    assert sorted(line for lines in resumed.values() for line in lines) == list(range(NUM_LINES))


def test_composers_address_is_that_of_the_dataset_itself():
    import composer

    assert composer.datasets.StreamingDataset is streaming.StreamingDataset
    assert composer.datasets.streaming.StreamingDataset is streaming.StreamingDataset

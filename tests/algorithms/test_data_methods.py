"""Methods that change what is read or evaluated, in whole runs: with workers, several ranks and a resume."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Evaluator, Trainer, functional
from composer.algorithms import AlternatingFlip, MultiViewEval
from composer.models import ComposerClassifier
from composer_dist import dist

SAMPLES, EPOCHS = 24, 4


class Flips(Callback):
    """Keep which samples were mirrored in each epoch."""

    def __init__(self):
        self.seen = []

    def batch_start(self, state, logger):
        self.seen += [(int(state.timestamp.epoch), index, bool(image[0])) for image, index in zip(*state.batch)]  # noqa: B905


def flips_of(rank, workers=0, persistent=False, **settings):
    data = TensorDataset(torch.tensor([0.0, 1.0]).expand(SAMPLES, 2), torch.arange(SAMPLES))
    sampler = dist.get_sampler(data, shuffle=True, num_replicas=2, rank=rank)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=workers, persistent_workers=persistent)
    model, flips = ComposerClassifier(nn.Linear(2, SAMPLES), num_classes=SAMPLES), Flips()
    settings = {"max_duration": f"{EPOCHS}ep", "callbacks": flips, "device": "cpu", "progress_bar": False, **settings}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Trainer(
        model, train_dataloader=loader, optimizers=optimizer, algorithms=AlternatingFlip(), seed=5, **settings
    ) as trainer:
        trainer.fit()
    return [(epoch, int(index), flipped) for epoch, index, flipped in flips.seen]


def test_each_image_is_seen_both_ways_in_two_epochs(tmp_path):
    """Also by the workers of ranks that exchange images from epoch to epoch."""
    seen = {}
    for epoch, index, flipped in [*flips_of(0), *flips_of(1)]:
        assert seen.setdefault((epoch, index), flipped) == flipped
    assert len(seen) == EPOCHS * SAMPLES
    for index in range(SAMPLES):
        assert [seen[epoch, index] for epoch in range(EPOCHS)] == [seen[0, index], not seen[0, index]] * 2
    saving = {"save_folder": str(tmp_path), "save_filename": "ba{batch}.pt", "save_interval": "2ba"}
    broken = flips_of(1, 1, max_duration="2ep", **saving)
    assert broken == flips_of(1)[: len(broken)]
    resumed = flips_of(1, 1, persistent=True, load_path=f"{tmp_path}/ba4.pt")
    assert resumed == flips_of(1)[4 * 4 :]  # from the second batch of an epoch on


@pytest.mark.parametrize("shift", [0, 1])
def test_metrics_are_those_of_averaged_predictions(shift):
    """Also in microbatches, and for a batch that is smaller than the others."""
    torch.manual_seed(0)
    images, labels = torch.rand(22, 3, 8, 8), torch.randint(4, (22,))
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 4))
    loader = DataLoader(TensorDataset(images, labels), 8)
    evaluators = [
        Evaluator(label=label, dataloader=loader, device_eval_microbatch_size=3) for label in ("views", "plain")
    ]
    with Trainer(
        ComposerClassifier(network, num_classes=4),
        optimizers=torch.optim.SGD(network.parameters(), 0.1),
        eval_dataloader=evaluators,
        algorithms=MultiViewEval(shift=shift, evaluators="views"),
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.eval()
        found = {label: metrics["CrossEntropy"].compute() for label, metrics in trainer.state.eval_metrics.items()}
    with torch.no_grad():
        averaged = functional.multi_view_forward(network, images, shift=shift)
        torch.testing.assert_close(found["views"], nn.functional.cross_entropy(averaged, labels))
        torch.testing.assert_close(found["plain"], nn.functional.cross_entropy(network(images), labels))

import pytest
import torch
import torch.nn.functional as F

import composer_models


def images(seed, size=(3, 4)):
    generator = torch.Generator().manual_seed(seed)
    batch, *spatial = (seed, *size)
    return torch.randn(batch, 3, *spatial, generator=generator), torch.randint(3, (seed, *size), generator=generator)


def tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(5, (2 + seed, 6), generator=generator)
    targets[0, :seed] = -100
    return torch.randn(2 + seed, 6, 5, generator=generator), targets


def pairs(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(9, 2, generator=generator), torch.randint(2, (9,), generator=generator)


def exchange(one, other):
    """Let one metric see another one's state as that of a second rank."""
    theirs = list(other.metric_state.values())

    def gather(tensor, group):
        return [tensor, theirs.pop(0)]

    one.dist_sync_fn = gather
    one.distributed_available_fn = lambda: True


@pytest.mark.parametrize(
    ("make", "batch_of"),
    [
        (composer_models.CrossEntropy, images),
        (lambda: composer_models.LossMetric(F.cross_entropy), images),
        (lambda: composer_models.MIoU(num_classes=3), images),
        (lambda: composer_models.Dice(num_classes=2), images),
        (composer_models.MaskedAccuracy, tokens),
        (composer_models.LanguageCrossEntropy, tokens),
        (composer_models.LanguagePerplexity, tokens),
        (composer_models.BinaryF1Score, pairs),
    ],
    ids=["CrossEntropy", "LossMetric", "MIoU", "Dice", "MaskedAccuracy", "LanguageCrossEntropy", "Perplexity", "F1"],
)
@pytest.mark.parametrize("theirs", [[3], [3, 4], []], ids=["as many batches", "more batches", "no batch"])
def test_two_ranks_compute_what_one_rank_with_all_batches_computes(make, batch_of, theirs):
    one, other, alone = make(), make(), make()
    one.update(*batch_of(1))
    for seed in theirs:
        other.update(*batch_of(seed))
    for seed in (1, *theirs):
        alone.update(*batch_of(seed))
    exchange(one, other)
    torch.testing.assert_close(one.compute(), alone.compute())

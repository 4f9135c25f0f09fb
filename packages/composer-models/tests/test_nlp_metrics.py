import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from composer_models import BinaryF1Score, LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy, nlp_metrics

seeds = st.integers(0, 999)


def random_tokens(seed, vocabulary=7):
    """Two batches of different size, with some tokens that do not count."""
    generator = torch.Generator().manual_seed(seed)
    for batch in (2, 5):
        targets = torch.randint(vocabulary, (batch, 6), generator=generator)
        targets[torch.rand(batch, 6, generator=generator) < 0.3] = -100
        targets[0, 0] = 0
        yield torch.randn(batch, 6, vocabulary, generator=generator), targets


@given(seed=seeds)
def test_every_token_of_every_batch_weighs_the_same(seed):
    metric = LanguageCrossEntropy()
    batches = list(random_tokens(seed))
    for logits, targets in batches:
        metric.update(logits, targets)
    logits, targets = (torch.cat(parts).flatten(0, 1) for parts in zip(*batches, strict=True))
    torch.testing.assert_close(metric.compute(), F.cross_entropy(logits, targets))


@given(seed=seeds)
def test_perplexity_is_the_exponential_of_the_cross_entropy(seed):
    entropy, perplexity = LanguageCrossEntropy(), LanguagePerplexity()
    for logits, targets in random_tokens(seed):
        entropy.update(logits, targets)
        perplexity.update(logits, targets)
    torch.testing.assert_close(perplexity.compute(), entropy.compute().exp())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_cross_entropy_of_many_16_bit_tokens_keeps_its_digits(dtype):
    generator = torch.Generator().manual_seed(0)
    # A loss of about 7 for each of 40 000 tokens: the sum is four times the largest float16.
    logits = (4 * torch.randn(4, 10_000, 4, generator=generator)).to(dtype)
    targets = torch.randint(4, (4, 10_000), generator=generator)
    metric = LanguageCrossEntropy()
    metric.update(logits, targets)
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).float()
    # Each token's loss is rounded to 16 bits, by half a unit in the last place at most; the sum adds no error.
    torch.testing.assert_close(metric.compute(), expected, rtol=torch.finfo(dtype).eps / 2, atol=0)


def test_tokens_may_be_of_a_smaller_integer_dtype():
    (logits, targets), _ = random_tokens(0)
    small, large = LanguageCrossEntropy(), LanguageCrossEntropy()
    small.update(logits, targets.int())
    large.update(logits, targets)
    assert small.compute() == large.compute()


def test_logits_may_come_in_a_mapping():
    (logits, targets), _ = random_tokens(0)
    bare, wrapped = LanguageCrossEntropy(), LanguageCrossEntropy()
    bare.update(logits, targets)
    wrapped.update({"loss": torch.zeros(()), "logits": logits}, targets)
    assert bare.compute() == wrapped.compute()


@pytest.mark.parametrize("output", [[1.0], {"scores": torch.zeros(1)}, None])
def test_outputs_without_logits_are_refused(output):
    with pytest.raises(TypeError, match="cannot take logits"):
        LanguageCrossEntropy().update(output, torch.tensor([0]))


@given(seed=seeds)
def test_masked_accuracy_counts_the_tokens_that_are_not_ignored(seed):
    metric, right, total = MaskedAccuracy(), 0, 0
    for logits, targets in random_tokens(seed):
        metric.update(logits, targets)
        for row, target in zip(logits.flatten(0, 1).tolist(), targets.flatten().tolist(), strict=True):
            total += target != -100
            right += target != -100 and row.index(max(row)) == target
    torch.testing.assert_close(metric.compute(), torch.tensor(right / total))


@given(seed=seeds)
def test_binary_f1_is_the_harmonic_mean_of_precision_and_recall(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, targets = torch.randn(20, 2, generator=generator), torch.randint(2, (20,), generator=generator)
    metric = BinaryF1Score()
    metric.update(logits[:5], targets[:5])
    metric.update(logits[5:], targets[5:])
    predicted = logits.argmax(dim=1)
    hits = (predicted * targets).sum().item()
    precision, recall = hits / max(predicted.sum().item(), 1), hits / max(targets.sum().item(), 1)
    expected = 2 * precision * recall / (precision + recall) if hits else 0.0
    torch.testing.assert_close(metric.compute(), torch.tensor(expected))


@pytest.mark.parametrize("name", [name for name in sorted(vars(nlp_metrics)) if name.startswith("InContextLearning")])
def test_removed_metrics_keep_their_names_and_cannot_be_made(name):
    with pytest.raises(RuntimeError, match="was removed"):
        getattr(nlp_metrics, name)()


def test_an_old_pickle_finds_the_class_of_a_removed_metric():
    metric = nlp_metrics.InContextLearningMetric
    assert isinstance(metric.__new__(nlp_metrics.InContextLearningLMAccuracy), metric)

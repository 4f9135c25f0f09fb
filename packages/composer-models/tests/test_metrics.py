import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import ModuleDict
from torchmetrics import MeanSquaredError, MetricCollection

from composer_models import CrossEntropy, Dice, LossMetric, MIoU, metrics_by_name, soft_cross_entropy

seeds = st.integers(0, 999)


def random_batch(seed, classes, channels=None, shape=(2, 3, 4)):
    generator = torch.Generator().manual_seed(seed)
    batch, *spatial = shape
    logits = torch.randn(batch, channels or classes, *spatial, generator=generator)
    return logits, torch.randint(classes, shape, generator=generator)


BATCH_SIZES = (17, 16, 8, 5, 1)
IGNORED = {"no label ignored": 0, "labels of whole batches ignored": 6}


def samples(num_ignored, *shape, of_classes=3):
    """Seventeen samples, the last of which has a far larger loss than the others, and the first ones no label."""
    logits, labels = random_batch(0, of_classes, shape=(17, *shape))
    logits[-1] *= 5
    labels[:num_ignored] = -100
    return logits, labels


def in_batches(metric, batch_size, *tensors):
    for batch in zip(*(tensor.split(batch_size) for tensor in tensors), strict=True):
        metric.update(*batch)
    return metric.compute()


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("num_ignored", IGNORED.values(), ids=IGNORED)
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=["labels", "pixels"])
@pytest.mark.parametrize(
    "make",
    [
        CrossEntropy,
        lambda: LossMetric(F.cross_entropy),
        lambda: LossMetric(torch.nn.CrossEntropyLoss()),
        lambda: LossMetric(soft_cross_entropy),
    ],
    ids=["CrossEntropy", "of a function", "of a module", "of soft_cross_entropy"],
)
def test_a_mean_loss_is_that_of_all_samples_whatever_the_batch_size(make, shape, num_ignored, batch_size):
    """A last batch of one sample counted as much as one of 16, and a batch of ignored labels made it NaN."""
    logits, labels = samples(num_ignored, *shape)
    # A mean of at most 102 float32 values of size 10, summed in parts.
    expected = F.cross_entropy(logits.double(), labels).float()
    torch.testing.assert_close(in_batches(make(), batch_size, logits, labels), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("num_ignored", IGNORED.values(), ids=IGNORED)
def test_cross_entropy_of_probabilities_weighs_by_the_probability_there_is(num_ignored, batch_size):
    """A batch weighed the same whether it had the targets of one sample or of 16."""
    logits, labels = samples(num_ignored)
    dense = F.one_hot(labels.clamp(min=0), 3) * 0.9 + 0.1 / 3
    dense[:num_ignored] = 0
    counted = F.cross_entropy(logits[num_ignored:], dense[num_ignored:])
    torch.testing.assert_close(in_batches(CrossEntropy(), batch_size, logits, dense), counted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("loss", [F.mse_loss, lambda preds, target: float(F.mse_loss(preds, target))])
def test_a_mean_loss_of_real_targets_is_that_of_all_samples(loss, batch_size):
    """A last batch of one sample counted as much as one of 16."""
    preds, target = samples(0)[0], torch.zeros(17, 3)
    value = in_batches(LossMetric(loss), batch_size, preds, target)
    torch.testing.assert_close(value, F.mse_loss(preds, target), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("make", "ignored"),
    [
        (lambda: LossMetric(torch.nn.CrossEntropyLoss(ignore_index=2)), 2),
        (lambda: LossMetric(functools.partial(F.cross_entropy, ignore_index=2)), 2),
        (lambda: LossMetric(lambda *batch: F.cross_entropy(*batch, ignore_index=2), ignore_index=2), 2),
        (lambda: CrossEntropy(ignore_index=2), 2),
    ],
    ids=["module", "partial", "argument", "CrossEntropy"],
)
def test_a_mean_loss_knows_which_labels_are_ignored(make, ignored):
    """Batches weighed by labels that their mean leaves out."""
    logits, labels = samples(0)
    expected = F.cross_entropy(logits, labels, ignore_index=ignored)
    torch.testing.assert_close(in_batches(make(), 5, logits, labels), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize(
    "make",
    [
        lambda weight: torch.nn.CrossEntropyLoss(weight=weight, ignore_index=2),
        lambda weight: functools.partial(F.cross_entropy, weight=weight, ignore_index=2),
        lambda weight: torch.nn.NLLLoss(weight=weight, ignore_index=2),
        lambda weight: torch.nn.MultiMarginLoss(weight=weight),
    ],
    ids=["module", "partial", "NLLLoss", "MultiMarginLoss"],
)
def test_a_mean_loss_with_class_weights_is_that_of_all_samples(make, batch_size):
    """The loss of an evaluation depended on the batch size, because batches weighed by labels and not by weights."""
    (logits, labels), loss = samples(0), make(torch.tensor([0.2, 3.0, 1.0]))
    value = in_batches(LossMetric(loss), batch_size, logits, labels)
    torch.testing.assert_close(value, loss(logits, labels), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "batch_of",
    [
        lambda x: {"values": x, "more": x},
        lambda x: (x, x),
        lambda x: [row for row in x],  # noqa: C416  # a list of a row for each sample
    ],
    ids=["mapping", "tuple", "list"],
)
def test_a_loss_of_targets_in_a_container_weighs_by_samples(batch_of):
    """A last batch of one sample counted as much as one of 16."""
    metric, values = LossMetric(lambda preds, target: preds.mean()), torch.arange(17.0)
    for batch in values.split(16):
        metric.update(batch, batch_of(batch))
    assert metric.compute() == values.mean()


def test_cross_entropy_ignores_the_chosen_index():
    logits, labels = random_batch(0, 4)
    metric = CrossEntropy(ignore_index=2)
    metric.update(logits, labels)
    torch.testing.assert_close(metric.compute(), F.cross_entropy(logits, labels, ignore_index=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metric", [CrossEntropy, lambda: LossMetric(F.cross_entropy)], ids=["own", "any loss"])
def test_the_loss_of_16_bit_logits_has_all_digits_of_float32(metric, dtype):
    logits, labels = random_batch(0, 4)
    logits, metric = logits.to(dtype), metric()
    metric.update(logits, labels)
    torch.testing.assert_close(metric.compute(), F.cross_entropy(logits.double(), labels).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_against_dense_16_bit_targets_has_all_digits_of_float32(dtype):
    logits, labels = random_batch(0, 4)
    logits, target = logits.to(dtype), F.one_hot(labels, 4).movedim(-1, 1).to(dtype)
    metric = CrossEntropy()
    metric.update(logits, target)
    torch.testing.assert_close(metric.compute(), F.cross_entropy(logits.double(), labels).float())


def test_any_loss_function_can_be_a_metric():
    metric = LossMetric(F.l1_loss)
    metric.update(torch.tensor([1.0]), torch.tensor([4.0]))
    metric.update(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 1.0]))
    assert metric.compute() == torch.tensor(4 / 3)


@given(seed=seeds)
def test_miou_is_the_mean_of_intersection_over_union(seed):
    classes, ignored = 5, 4
    metric = MIoU(num_classes=classes, ignore_index=ignored)
    preds, targets = [], []
    for offset in range(2):
        logits, labels = random_batch(seed + offset, classes)
        metric.update(logits, labels)
        preds += logits.argmax(dim=1).flatten().tolist()
        targets += labels.flatten().tolist()
    pixels = [(pred, target) for pred, target in zip(preds, targets, strict=True) if target != ignored]
    scores = []
    for k in range(classes):
        intersection = sum(pred == k and target == k for pred, target in pixels)
        union = sum(pred == k or target == k for pred, target in pixels)
        scores += [intersection / union] if union else []
    assert metric.compute().item() == pytest.approx(100 * sum(scores) / len(scores))


def test_miou_takes_targets_of_any_integer_dtype():
    metric = MIoU(num_classes=2)
    metric.update(torch.eye(2).unsqueeze(-1), torch.tensor([[0], [1]], dtype=torch.int32))
    assert metric.compute() == 100


@pytest.mark.parametrize("label", [3, 255, -1])
def test_miou_refuses_a_label_that_is_no_class(label):
    logits, labels = random_batch(0, 3)
    labels[0, 0, 0] = label
    with pytest.raises(
        ValueError, match=rf"the label {label}, which is not a class.*num_classes=3.*ignore_index={label} "
    ):
        MIoU(num_classes=3, ignore_index=17).update(logits, labels)


@pytest.mark.parametrize("label", [3, 255, -1])
def test_miou_takes_any_label_to_be_ignored(label):
    logits, labels = random_batch(0, 3)
    labels[0] = label
    with_ignored, without = MIoU(num_classes=3, ignore_index=label), MIoU(num_classes=3)
    with_ignored.update(logits, labels)
    without.update(logits[1:], labels[1:])
    assert with_ignored.compute() == without.compute()


@pytest.mark.parametrize("channels", [2, 4])
def test_miou_refuses_another_number_of_channels_than_of_classes(channels):
    with pytest.raises(ValueError, match=rf"have {channels} channels in dim 1.*num_classes=3"):
        MIoU(num_classes=3).update(*random_batch(0, 2, channels))


def test_miou_of_an_empty_batch_adds_nothing():
    metric = MIoU(num_classes=3)
    metric.update(torch.zeros(0, 3, 4), torch.zeros(0, 4, dtype=torch.long))
    assert metric.total_union.sum() == 0


@given(seed=seeds, batch_size=st.integers(1, 7))
def test_dice_is_the_mean_over_samples_and_foreground_classes(seed, batch_size):
    """The score was one for each batch, so that it depended on how many samples were in one."""
    foreground = 3
    logits, labels = random_batch(seed, foreground + 1, shape=(7, 3, 4))
    scores = []
    for pred, label in zip(logits.argmax(dim=1), labels, strict=True):
        for k in range(1, foreground + 1):
            tp = ((pred == k) & (label == k)).sum().item()
            fp = ((pred == k) & (label != k)).sum().item()
            fn = ((pred != k) & (label == k)).sum().item()
            scores.append(2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 1.0)
    value = in_batches(Dice(num_classes=foreground), batch_size, logits, labels)
    assert value == pytest.approx(100 * sum(scores) / len(scores), abs=0.011)  # it rounds to 0.01


@pytest.mark.parametrize(("predicted", "score"), [(0, 100.0), (1, 0.0)])
def test_a_class_absent_from_the_target_scores_by_whether_it_is_predicted(predicted, score):
    metric = Dice(num_classes=1)
    metric.update(F.one_hot(torch.full((1, 4), predicted), 2).movedim(-1, 1), torch.zeros(1, 4, dtype=torch.long))
    assert metric.compute() == score


def test_dice_takes_one_hot_targets_too():
    logits, labels = random_batch(0, 3)
    by_index, by_row = Dice(num_classes=2), Dice(num_classes=2)
    by_index.update(logits, labels)
    by_row.update(logits, F.one_hot(labels, 3).movedim(-1, 1))
    assert by_index.compute() == by_row.compute()


@pytest.mark.parametrize(
    "metric", [CrossEntropy(), MIoU(num_classes=3), Dice(num_classes=2), LossMetric(F.cross_entropy)]
)
def test_a_reset_metric_starts_anew(metric):
    logits, labels = random_batch(0, 3)
    metric.update(*random_batch(1, 3))
    metric.reset()
    metric.update(logits, labels)
    fresh = metric.clone()
    fresh.reset()
    fresh.update(logits, labels)
    assert metric.compute() == fresh.compute()


def test_metrics_are_named_after_their_classes_unless_they_have_names():
    one, other = MeanSquaredError(), CrossEntropy()
    assert metrics_by_name(None) == {}
    assert metrics_by_name(one) == {"MeanSquaredError": one}
    assert metrics_by_name([other, one]) == {"CrossEntropy": other, "MeanSquaredError": one}
    assert metrics_by_name({"b": one, "a": other}) == {"b": one, "a": other}
    assert metrics_by_name(ModuleDict({"b": one, "a": other})) == {"b": one, "a": other}
    assert list(metrics_by_name(MetricCollection([other, one], prefix="val_"))) == [
        "val_CrossEntropy",
        "val_MeanSquaredError",
    ]

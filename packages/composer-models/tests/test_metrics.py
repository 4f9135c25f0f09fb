import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import ModuleDict
from torchmetrics import MeanSquaredError, MetricCollection

from composer_models import CrossEntropy, Dice, LossMetric, MIoU, metrics_by_name

seeds = st.integers(0, 999)


def random_batch(seed, classes, channels=None, shape=(2, 3, 4)):
    generator = torch.Generator().manual_seed(seed)
    batch, *spatial = shape
    logits = torch.randn(batch, channels or classes, *spatial, generator=generator)
    return logits, torch.randint(classes, shape, generator=generator)


@given(seed=seeds)
def test_cross_entropy_is_the_mean_over_batches(seed):
    metric, expected = CrossEntropy(), []
    for offset in range(3):
        logits, labels = random_batch(seed + offset, 4)
        metric.update(logits, labels)
        expected.append(F.cross_entropy(logits, labels))
    torch.testing.assert_close(metric.compute(), torch.stack(expected).mean())


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
    assert metric.compute() == (3 + 0.5) / 2


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
        ValueError, match=rf"the label {label}, which is no class.*num_classes=3.*ignore_index={label} "
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


@given(seed=seeds)
def test_dice_is_the_mean_over_batches_and_foreground_classes(seed):
    foreground = 3
    metric, scores = Dice(num_classes=foreground), []
    for offset in range(2):
        logits, labels = random_batch(seed + offset, foreground + 1)
        metric.update(logits, labels)
        pred = logits.argmax(dim=1)
        for k in range(1, foreground + 1):
            tp = ((pred == k) & (labels == k)).sum().item()
            fp = ((pred == k) & (labels != k)).sum().item()
            fn = ((pred != k) & (labels == k)).sum().item()
            scores.append(2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 1.0)
    assert metric.compute() == pytest.approx(100 * sum(scores) / len(scores), abs=0.011)  # it rounds to 0.01


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

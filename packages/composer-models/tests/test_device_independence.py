import pytest
import torch
import torch.nn.functional as F

import composer_models

# Tensors on the meta device have no values: whoever looks at one fails, as whoever looks at one on a GPU would wait.
LOGITS = torch.empty(4, 3, device="meta")
LABELS = torch.empty(4, dtype=torch.long, device="meta")
PIXEL_LOGITS = torch.empty(4, 3, 5, 5, device="meta")
PIXEL_LABELS = torch.empty(4, 5, 5, dtype=torch.long, device="meta")


@pytest.mark.parametrize(
    ("metric", "outputs", "targets"),
    [
        (composer_models.CrossEntropy(), LOGITS, LABELS),
        (composer_models.CrossEntropy(), LOGITS, LOGITS),
        (composer_models.LossMetric(F.cross_entropy), LOGITS, LABELS),
        (composer_models.MIoU(num_classes=3), PIXEL_LOGITS, PIXEL_LABELS),
        (composer_models.Dice(num_classes=2), PIXEL_LOGITS, PIXEL_LABELS),
        (composer_models.MaskedAccuracy(), LOGITS, LABELS),
        (composer_models.LanguageCrossEntropy(), LOGITS, LABELS),
        (composer_models.BinaryF1Score(), LOGITS, LABELS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_metric_never_waits_for_the_device(metric, outputs, targets):
    metric.to("meta").update(outputs, targets)
    metric.compute()


@pytest.mark.parametrize(
    "loss",
    [
        composer_models.soft_cross_entropy,
        composer_models.binary_cross_entropy_with_logits,
        composer_models.DiceLoss(softmax=True),
        composer_models.DiceLoss(ignore_absent_classes=True),
    ],
)
@pytest.mark.parametrize("targets", [PIXEL_LABELS, PIXEL_LOGITS], ids=["indices", "dense"])
def test_computing_a_loss_never_waits_for_the_device(loss, targets):
    assert loss(PIXEL_LOGITS, targets).shape == ()


def test_a_gpt_never_waits_for_the_device():
    model = composer_models.ComposerGPT(
        {"d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 16, "max_seq_len": 4, "device": "meta"}
    )
    ids = torch.empty(2, 4, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids, "attention_mask": ids}
    model.loss(model(batch), batch).backward()


@pytest.mark.parametrize(
    "make",
    [
        lambda: composer_models.ComposerGPT(
            {"d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 16, "max_seq_len": 4}
        ),
        lambda: composer_models.ComposerClassifier(torch.nn.Linear(5, 3), num_classes=3),
    ],
    ids=["gpt", "classifier"],
)
def test_metrics_count_from_zero_where_the_weights_have_no_values(make):
    with torch.device("meta"):
        model = make()
    assert all(parameter.is_meta for parameter in model.parameters())
    metrics = [metric for is_train in (True, False) for metric in model.get_metrics(is_train=is_train).values()]
    assert not any(state.is_meta for metric in metrics for state in metric.metric_state.values())

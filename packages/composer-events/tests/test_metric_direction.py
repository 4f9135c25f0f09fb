"""Which values of a metric are better: by the metric itself, by the field's names, or nobody knows."""

from types import SimpleNamespace

import pytest

from composer_events.metric_entries import higher_is_better

LOWER = """
    loss val_loss loss/train/total LossMetric CrossEntropy metrics/eval/CrossEntropy LanguageCrossEntropy cross_entropy
    LanguagePerplexity PPL error_rate WordErrorRate val_WER wer CER MeanSquaredError rmse MAE val/mse KLDivergence nll
    fpr neg_log_likelihood LearnedPerceptualImagePatchSimilarity ContinuousRankedProbabilityScore false_positive_rate
    HammingDistance FID fid_score BrierScore top1_error CalibrationError bits_per_byte NegativeLogLikelihood
"""
HIGHER = """
    MulticlassAccuracy metrics/eval/MulticlassAccuracy metrics/lossy/MulticlassAccuracy BinaryAccuracy MaskedAccuracy
    acc val_acc Top5Accuracy BinaryF1Score f1 BinaryAUROC auc AveragePrecision mAP MAP map_50 MIoU mIoU mean_iou Dice
    val_acc1 map50 DistanceIntersectionOverUnion ScaleInvariantSignalDistortionRatio IntersectionOverUnion
    DiceScore BLEUScore ROUGE chrF PSNR SSIM recall R2Score ndcg@10 MRR exact_match MatthewsCorrCoef CosineSimilarity
    neg_mse metrics/eval/neg_mean_squared_error neg_log_loss val_neg_mae
"""


@pytest.mark.parametrize("name", LOWER.split())
def test_of_losses_errors_and_distances_less_is_better(name):
    assert higher_is_better(name) is False


@pytest.mark.parametrize("name", HIGHER.split())
def test_of_accuracies_scores_and_overlaps_more_is_better(name):
    assert higher_is_better(name) is True


@pytest.mark.parametrize("name", ["Foo", "metrics/loss/Foo", "previous", "various", "ratio", "maps", "keycount", ""])
def test_of_other_names_nobody_knows(name):
    assert higher_is_better(name) is None


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", ["loss", "accuracy", "Foo"])
def test_the_metric_itself_counts_before_its_name(name, own):
    assert higher_is_better(name, SimpleNamespace(higher_is_better=own)) is own


@pytest.mark.parametrize("metric", [None, object(), SimpleNamespace(higher_is_better=None)])
def test_a_metric_that_says_nothing_leaves_it_to_its_name(metric):
    assert higher_is_better("loss", metric) is False

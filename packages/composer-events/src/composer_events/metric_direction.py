"""Whether a larger or a smaller value of a metric is better."""

import re

__all__ = ["higher_is_better"]

# Parts of names without their separators, and whole words for what is too short to be looked for inside of others.
_LOWER_PARTS = (
    *("loss", "error", "perplexity", "crossentropy", "negativelog", "neglog", "divergence", "distance"),
    *("editrate", "failurerate", "falsepositiverate", "falsenegativerate", "bitsper", "brier"),
    *("perceptualimagepatch", "rankedprobability"),  # scores and similarities by name, and distances
)
_LOWER_WORDS = {
    *("bpb", "bpc", "cer", "deviance", "ece", "eer", "fid", "kid", "kl", "lpips", "mae", "mape", "mer", "mse"),
    *("fnr", "fpr", "msle", "nll", "ppl", "rmse", "rmsle", "smape", "ter", "wer"),
}
_HIGHER_PARTS = (
    *("accuracy", "precision", "recall", "specificity", "sensitivity", "score", "exactmatch", "hitrate", "auroc"),
    *("intersectionoverunion", "signaldistortionratio", "jaccard", "bleu", "rouge", "meteor", "psnr", "ssim"),
    *("ndcg", "similarity", "correlation"),
    *("explainedvariance", "kappa", "matthews", "quality", "reward", "passrate", "successrate", "winrate"),
)
_HIGHER_WORDS = {
    *("acc", "acc1", "acc5", "ap", "auc", "auprc", "chrf", "dice", "em", "f1", "fbeta", "iou", "map", "map50"),
    *("mcc", "miou", "mrr", "r2", "top1", "top5"),
}


def higher_is_better(name: str, metric: object = None) -> bool | None:
    """Return whether a larger value of a metric is better: by the metric itself, else by its name.

    Args:
        name: The metric's name, also as it is logged: `'MulticlassAccuracy'`, `'metrics/eval/val_wer'`,
            `'loss/train/total'`.
        metric: The metric, if there is one at hand. Its attribute `higher_is_better`, as torchmetrics has it, counts
            before the name.

    Returns:
        `None` where neither says anything.

    Example:
        >>> higher_is_better("MulticlassAccuracy"), higher_is_better("metrics/eval/CrossEntropy")
        (True, False)
    """
    own = getattr(metric, "higher_is_better", None)
    if own is not None:
        return bool(own)
    name = re.sub(r"^metrics/[^/]*/", "", name)  # the label may have any word in it
    words = {*re.split(r"[^a-z0-9]+", name.lower()), *re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower().split()}
    joined = re.sub(r"[^a-z0-9]", "", name.lower())
    if words & _LOWER_WORDS or (any(part in joined for part in _LOWER_PARTS) and "intersectionoverunion" not in joined):
        return False
    if words & _HIGHER_WORDS or any(part in joined for part in _HIGHER_PARTS):
        return True
    return None

"""Telling class indices from probabilities."""

from composer_models import check_for_index_targets, ensure_targets_one_hot, infer_target_type

__all__ = ["infer_target_type", "ensure_targets_one_hot", "check_for_index_targets"]

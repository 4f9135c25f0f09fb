"""Models for a kind of task."""

from composer_models import ComposerClassifier

__all__ = ["ComposerClassifier"]

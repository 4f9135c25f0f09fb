"""A model that sorts inputs into classes."""

from composer_models import ComposerClassifier

__all__ = ["ComposerClassifier"]

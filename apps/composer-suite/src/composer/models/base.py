"""What the training loop asks of a model."""

from composer_models import ComposerModel

__all__ = ["ComposerModel"]

"""Metrics for the kinds of task that the loop meets most."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_models import MAP as MAP
    from composer_models import BinaryF1Score as BinaryF1Score
    from composer_models import CrossEntropy as CrossEntropy
    from composer_models import Dice as Dice
    from composer_models import LanguageCrossEntropy as LanguageCrossEntropy
    from composer_models import LanguagePerplexity as LanguagePerplexity
    from composer_models import LossMetric as LossMetric
    from composer_models import MaskedAccuracy as MaskedAccuracy
    from composer_models import MIoU as MIoU

__all__ = [
    "MIoU",
    "Dice",
    "CrossEntropy",
    "LossMetric",
    "MAP",
    "BinaryF1Score",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "MaskedAccuracy",
]

# That files and scripts which only mention them can be read; making one says what to use. No star import brings them.
_OF_OLD_FILES = [
    "InContextLearningMetric",
    "InContextLearningQAAccuracy",
    "InContextLearningLMAccuracy",
    "InContextLearningMultipleChoiceAccuracy",
    "InContextLearningCodeEvalAccuracy",
    "InContextLearningMCExpectedCalibrationError",
    "InContextLearningLMExpectedCalibrationError",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {"composer_models": __all__, "composer.metrics.nlp": _OF_OLD_FILES},
    submodules=["map", "metrics", "nlp"],
    renamed={
        "CrossEntropyLoss": "composer.metrics.CrossEntropy",
        "HFCrossEntropy": "composer.metrics.LanguageCrossEntropy",
        "Perplexity": "composer.metrics.LanguagePerplexity",
    },
    removed={
        "METRIC_DEFAULT_CTORS": "it had the arguments of metrics for in-context learning tasks, which are left out."
    },
)

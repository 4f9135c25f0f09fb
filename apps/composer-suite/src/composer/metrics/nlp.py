"""Metrics for language models."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_models import BinaryF1Score as BinaryF1Score
    from composer_models import LanguageCrossEntropy as LanguageCrossEntropy
    from composer_models import LanguagePerplexity as LanguagePerplexity
    from composer_models import MaskedAccuracy as MaskedAccuracy
    from composer_models.nlp_metrics import InContextLearningCodeEvalAccuracy as InContextLearningCodeEvalAccuracy
    from composer_models.nlp_metrics import InContextLearningLMAccuracy as InContextLearningLMAccuracy
    from composer_models.nlp_metrics import (
        InContextLearningLMExpectedCalibrationError as InContextLearningLMExpectedCalibrationError,
    )
    from composer_models.nlp_metrics import (
        InContextLearningMCExpectedCalibrationError as InContextLearningMCExpectedCalibrationError,
    )
    from composer_models.nlp_metrics import InContextLearningMetric as InContextLearningMetric
    from composer_models.nlp_metrics import (
        InContextLearningMultipleChoiceAccuracy as InContextLearningMultipleChoiceAccuracy,
    )
    from composer_models.nlp_metrics import InContextLearningQAAccuracy as InContextLearningQAAccuracy

__all__ = [
    "BinaryF1Score",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "MaskedAccuracy",
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
    {
        "composer_models": ["BinaryF1Score", "LanguageCrossEntropy", "LanguagePerplexity", "MaskedAccuracy"],
        "composer_models.nlp_metrics": [
            "InContextLearningMetric",
            "InContextLearningQAAccuracy",
            "InContextLearningLMAccuracy",
            "InContextLearningMultipleChoiceAccuracy",
            "InContextLearningCodeEvalAccuracy",
            "InContextLearningMCExpectedCalibrationError",
            "InContextLearningLMExpectedCalibrationError",
        ],
    },
    renamed={
        "HFCrossEntropy": "composer.metrics.LanguageCrossEntropy",
        "Perplexity": "composer.metrics.LanguagePerplexity",
    },
    removed={
        "InContextLearningExpectedCalibrationError": "in-context learning tasks are left out; "
        "torchmetrics.CalibrationError measures calibration.",
    },
)

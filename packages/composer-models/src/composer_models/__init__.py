"""Models for the training loop: the interface, losses, metrics and small reference models."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_models.base import ComposerModel as ComposerModel
    from composer_models.base import ModuleAdapter as ModuleAdapter
    from composer_models.base import model_eval_mode as model_eval_mode
    from composer_models.classification import ComposerClassifier as ComposerClassifier
    from composer_models.classification import composer_timm as composer_timm
    from composer_models.detection import MAP as MAP
    from composer_models.gpt import GPT as GPT
    from composer_models.gpt import ComposerGPT as ComposerGPT
    from composer_models.gpt import GPTBlock as GPTBlock
    from composer_models.gpt import GPTConfig as GPTConfig
    from composer_models.initializers import Initializer as Initializer
    from composer_models.losses import DiceLoss as DiceLoss
    from composer_models.losses import binary_cross_entropy_with_logits as binary_cross_entropy_with_logits
    from composer_models.losses import loss_registry as loss_registry
    from composer_models.losses import soft_cross_entropy as soft_cross_entropy
    from composer_models.metrics import CrossEntropy as CrossEntropy
    from composer_models.metrics import Dice as Dice
    from composer_models.metrics import LossMetric as LossMetric
    from composer_models.metrics import MIoU as MIoU
    from composer_models.metrics import metrics_by_name as metrics_by_name
    from composer_models.mnist import mnist_model as mnist_model
    from composer_models.nlp_metrics import BinaryF1Score as BinaryF1Score
    from composer_models.nlp_metrics import LanguageCrossEntropy as LanguageCrossEntropy
    from composer_models.nlp_metrics import LanguagePerplexity as LanguagePerplexity
    from composer_models.nlp_metrics import MaskedAccuracy as MaskedAccuracy
    from composer_models.optional import MissingConditionalImportError as MissingConditionalImportError
    from composer_models.resnet import composer_resnet as composer_resnet
    from composer_models.targets import check_for_index_targets as check_for_index_targets
    from composer_models.targets import ensure_targets_one_hot as ensure_targets_one_hot
    from composer_models.targets import infer_target_type as infer_target_type

    __version__: str

# All modules need torch and some torchmetrics, so each name imports its module on first use.
_HOME = {
    name: module
    for module, names in {
        "base": ("ComposerModel", "ModuleAdapter", "model_eval_mode"),
        "classification": ("ComposerClassifier", "composer_timm"),
        "initializers": ("Initializer",),
        "resnet": ("composer_resnet",),
        "mnist": ("mnist_model",),
        "gpt": ("ComposerGPT", "GPT", "GPTBlock", "GPTConfig"),
        "losses": ("soft_cross_entropy", "binary_cross_entropy_with_logits", "DiceLoss", "loss_registry"),
        "targets": ("infer_target_type", "ensure_targets_one_hot", "check_for_index_targets"),
        "metrics": ("metrics_by_name", "CrossEntropy", "LossMetric", "MIoU", "Dice"),
        "nlp_metrics": ("LanguageCrossEntropy", "LanguagePerplexity", "MaskedAccuracy", "BinaryF1Score"),
        "detection": ("MAP",),
        "optional": ("MissingConditionalImportError",),
    }.items()
    for name in names
}

# Names of early releases and their current names.
_RENAMED = {
    "Perplexity": "LanguagePerplexity",
    "HFCrossEntropy": "LanguageCrossEntropy",
    "CrossEntropyLoss": "CrossEntropy",
}

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]  # declared in the block above


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        warnings.warn(
            f"{__name__}.{name} is now called {_RENAMED[name]}; the old name will be removed in 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return __getattr__(_RENAMED[name])
    if name == "__version__":
        from importlib.metadata import version  # reading the metadata is slow

        value = version("composer-models")
    elif name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # found directly from now on, without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

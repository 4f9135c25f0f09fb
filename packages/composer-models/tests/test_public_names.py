import importlib.metadata
import subprocess
import sys

import pytest

import composer_models

PUBLIC_NAMES = {
    "ComposerModel",
    "ModuleAdapter",
    "ComposerClassifier",
    "Initializer",
    "model_eval_mode",
    "composer_resnet",
    "composer_timm",
    "mnist_model",
    "ComposerGPT",
    "GPT",
    "GPTBlock",
    "GPTConfig",
    "soft_cross_entropy",
    "binary_cross_entropy_with_logits",
    "DiceLoss",
    "loss_registry",
    "TokenLosses",
    "linear_cross_entropy",
    "infer_target_type",
    "ensure_targets_one_hot",
    "check_for_index_targets",
    "metrics_by_name",
    "CrossEntropy",
    "LossMetric",
    "MIoU",
    "Dice",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "MaskedAccuracy",
    "BinaryF1Score",
    "PackedDataset",
    "PackedStream",
    "pack_window",
    "packed_data_spec",
    "document_numbers",
    "MAP",
    "MissingConditionalImportError",
    "__version__",
}


def test_the_public_names_change_only_on_purpose():
    assert set(composer_models.__all__) == PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_every_public_name_loads(name):
    assert getattr(composer_models, name) is not None


def test_the_version_is_that_of_the_distribution():
    assert composer_models.__version__ == importlib.metadata.version("composer-models")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'ComposerModle'"):
        composer_models.ComposerModle  # noqa: B018  # looking it up is the act


@pytest.mark.parametrize(
    ("imports", "unwanted"),
    [
        ("import composer_models.optional", "torch"),
        ("from composer_models import ComposerModel, ModuleAdapter, soft_cross_entropy", "torchmetrics"),
    ],
)
def test_an_import_loads_no_more_than_it_needs(imports, unwanted):
    program = f"import sys; {imports}; sys.exit({unwanted!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Perplexity", "LanguagePerplexity"),
        ("HFCrossEntropy", "LanguageCrossEntropy"),
        ("CrossEntropyLoss", "CrossEntropy"),
    ],
)
def test_early_names_of_metrics_still_work_and_name_the_new_one(old, new):
    with pytest.warns(DeprecationWarning, match=f"now called {new}"):
        assert getattr(composer_models, old) is getattr(composer_models, new)

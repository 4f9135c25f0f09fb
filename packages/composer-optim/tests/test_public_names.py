import subprocess
import sys
from importlib.metadata import version

import pytest

import composer_optim

NAMES = {
    "DecoupledSGDW",
    "DecoupledAdamW",
    "Muon",
    "ComposerScheduler",
    "StepScheduler",
    "MultiStepScheduler",
    "ConstantScheduler",
    "LinearScheduler",
    "ExponentialScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "PolynomialScheduler",
    "MultiStepWithWarmupScheduler",
    "ConstantWithWarmupScheduler",
    "LinearWithWarmupScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "PolynomialWithWarmupScheduler",
    "WarmupStableDecayScheduler",
    "InversePowerWithWarmupScheduler",
    "Schedule",
    "compile_composer_scheduler",
    "compile_composer_schedulers",
    "scale_pytorch_scheduler",
    "lr_lambda",
    "lambda_lr",
}


def test_the_public_names_change_only_on_purpose():
    assert set(composer_optim.__all__) == {*NAMES, "__version__"}
    assert all(getattr(composer_optim, name).__name__ == name for name in NAMES)


def test_the_version_is_the_distributions():
    assert composer_optim.__version__ == version("composer-optim")


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'Lion'"):
        composer_optim.Lion  # noqa: B018


def test_schedulers_come_without_torch():
    code = (
        "import sys; from composer_optim import LinearScheduler, CosineAnnealingWithWarmupScheduler; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

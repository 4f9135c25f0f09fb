"""Optimizers with decoupled weight decay, Muon, and learning rate schedulers in units of training time."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_optim.compile import compile_composer_scheduler as compile_composer_scheduler
    from composer_optim.compile import compile_composer_schedulers as compile_composer_schedulers
    from composer_optim.cooldown import InversePowerWithWarmupScheduler as InversePowerWithWarmupScheduler
    from composer_optim.cooldown import WarmupStableDecayScheduler as WarmupStableDecayScheduler
    from composer_optim.decoupled import DecoupledAdamW as DecoupledAdamW
    from composer_optim.decoupled import DecoupledSGDW as DecoupledSGDW
    from composer_optim.muon import Muon as Muon
    from composer_optim.raw_loop import lambda_lr as lambda_lr
    from composer_optim.raw_loop import lr_lambda as lr_lambda
    from composer_optim.schedule import Schedule as Schedule
    from composer_optim.schedulers import ComposerScheduler as ComposerScheduler
    from composer_optim.schedulers import ConstantScheduler as ConstantScheduler
    from composer_optim.schedulers import CosineAnnealingScheduler as CosineAnnealingScheduler
    from composer_optim.schedulers import CosineAnnealingWarmRestartsScheduler as CosineAnnealingWarmRestartsScheduler
    from composer_optim.schedulers import ExponentialScheduler as ExponentialScheduler
    from composer_optim.schedulers import LinearScheduler as LinearScheduler
    from composer_optim.schedulers import MultiStepScheduler as MultiStepScheduler
    from composer_optim.schedulers import PolynomialScheduler as PolynomialScheduler
    from composer_optim.schedulers import StepScheduler as StepScheduler
    from composer_optim.torch_schedulers import scale_pytorch_scheduler as scale_pytorch_scheduler
    from composer_optim.warmup import ConstantWithWarmupScheduler as ConstantWithWarmupScheduler
    from composer_optim.warmup import CosineAnnealingWithWarmupScheduler as CosineAnnealingWithWarmupScheduler
    from composer_optim.warmup import LinearWithWarmupScheduler as LinearWithWarmupScheduler
    from composer_optim.warmup import MultiStepWithWarmupScheduler as MultiStepWithWarmupScheduler
    from composer_optim.warmup import PolynomialWithWarmupScheduler as PolynomialWithWarmupScheduler

    __version__: str

# The schedulers need no torch, so each name imports only its own module.
_HOME = {
    name: module
    for module, names in {
        "composer_optim.decoupled": ("DecoupledSGDW", "DecoupledAdamW"),
        "composer_optim.muon": ("Muon",),
        "composer_optim.schedulers": (
            "ComposerScheduler",
            "StepScheduler",
            "MultiStepScheduler",
            "ConstantScheduler",
            "LinearScheduler",
            "ExponentialScheduler",
            "CosineAnnealingScheduler",
            "CosineAnnealingWarmRestartsScheduler",
            "PolynomialScheduler",
        ),
        "composer_optim.warmup": (
            "MultiStepWithWarmupScheduler",
            "ConstantWithWarmupScheduler",
            "LinearWithWarmupScheduler",
            "CosineAnnealingWithWarmupScheduler",
            "PolynomialWithWarmupScheduler",
        ),
        "composer_optim.cooldown": ("WarmupStableDecayScheduler", "InversePowerWithWarmupScheduler"),
        "composer_optim.schedule": ("Schedule",),
        "composer_optim.compile": ("compile_composer_scheduler", "compile_composer_schedulers"),
        "composer_optim.torch_schedulers": ("scale_pytorch_scheduler",),
        "composer_optim.raw_loop": ("lr_lambda", "lambda_lr"),
    }.items()
    for name in names
}

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]  # declared in the block above


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # slower than the rest of this module together

        value: object = version("composer-optim")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value

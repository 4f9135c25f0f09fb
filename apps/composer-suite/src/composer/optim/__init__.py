"""How weights and learning rates move."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_optim import ComposerScheduler as ComposerScheduler
    from composer_optim import ConstantScheduler as ConstantScheduler
    from composer_optim import ConstantWithWarmupScheduler as ConstantWithWarmupScheduler
    from composer_optim import CosineAnnealingScheduler as CosineAnnealingScheduler
    from composer_optim import CosineAnnealingWarmRestartsScheduler as CosineAnnealingWarmRestartsScheduler
    from composer_optim import CosineAnnealingWithWarmupScheduler as CosineAnnealingWithWarmupScheduler
    from composer_optim import DecoupledAdamW as DecoupledAdamW
    from composer_optim import DecoupledSGDW as DecoupledSGDW
    from composer_optim import ExponentialScheduler as ExponentialScheduler
    from composer_optim import LinearScheduler as LinearScheduler
    from composer_optim import LinearWithWarmupScheduler as LinearWithWarmupScheduler
    from composer_optim import MultiStepScheduler as MultiStepScheduler
    from composer_optim import MultiStepWithWarmupScheduler as MultiStepWithWarmupScheduler
    from composer_optim import PolynomialScheduler as PolynomialScheduler
    from composer_optim import PolynomialWithWarmupScheduler as PolynomialWithWarmupScheduler
    from composer_optim import StepScheduler as StepScheduler
    from composer_optim import compile_composer_scheduler as compile_composer_scheduler

__all__ = [
    "DecoupledSGDW",
    "DecoupledAdamW",
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
    "compile_composer_scheduler",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {"composer_optim": __all__},
    submodules=["decoupled_weight_decay", "scheduler"],
)

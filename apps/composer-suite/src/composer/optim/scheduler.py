"""Learning rates that follow the time of training."""

from composer._client_names import _convert_time as _convert_time
from composer._client_names import _raise_if_max_duration_exceeds_t_max as _raise_if_max_duration_exceeds_t_max
from composer._client_names import _raise_if_warmup_and_max_incompatible as _raise_if_warmup_and_max_incompatible
from composer_optim import (
    ComposerScheduler,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    StepScheduler,
    compile_composer_scheduler,
)

__all__ = [
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

"""EMA: evaluate and save an exponential moving average of the weights being trained."""

from composer_algorithms.ema.algorithm import EMA
from composer_algorithms.ema.averaging import EMAParameters, compute_ema
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import get_model_context_manager

__all__ = ["EMA", "EMAParameters", "compute_ema", "get_model_context_manager", "METADATA"]

METADATA = METHODS["ema"]

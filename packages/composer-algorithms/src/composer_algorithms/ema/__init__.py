"""EMA: evaluate and save an exponential moving average of the weights that are trained."""

from composer_algorithms.ema.algorithm import EMA
from composer_algorithms.ema.averaging import EMAParameters, compute_ema
from composer_algorithms.metadata import Metadata
from composer_algorithms.module_surgery import get_model_context_manager

__all__ = ["EMA", "EMAParameters", "compute_ema", "get_model_context_manager", "METADATA"]

METADATA = Metadata(
    name="EMA",
    class_name="EMA",
    functional="compute_ema",
    tldr="Maintains an exponential moving average of model weights for use in evaluation",
    attribution="Many",
    link="",
    domains=("cv", "nlp"),
    summary=(
        "Keeps a second set of weights, a moving average of those being trained, and puts it into the model for "
        "evaluation and for checkpoints. The average is often more accurate than the weights it follows."
    ),
    use=(
        "Start with half_life='1000ba' and an update_interval of '1ba' or '10ba'. Recommended for convolutional "
        "networks. It needs the memory of one more copy of trainable parameters and buffers. Do not combine it with "
        "SWA."
    ),
)

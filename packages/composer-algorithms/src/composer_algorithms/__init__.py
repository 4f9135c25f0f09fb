"""Published training speed-up methods, each as a function for any training loop and as an `Algorithm` for an `Engine`.

`composer_algorithms.functional` collects the functions. Most methods have a module of their own, such as
`composer_algorithms.mixup`, with both forms and `METADATA`, its row in the table of methods. Small changes to
transformers are in `composer_algorithms.transformer_surgery`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_algorithms.alibi import Alibi as Alibi
    from composer_algorithms.alternating_flip import AlternatingFlip as AlternatingFlip
    from composer_algorithms.attention_window import AttentionWindowWarmup as AttentionWindowWarmup
    from composer_algorithms.augmix import AugmentAndMixTransform as AugmentAndMixTransform
    from composer_algorithms.augmix import AugMix as AugMix
    from composer_algorithms.blurpool import BlurPool as BlurPool
    from composer_algorithms.channels_last import ChannelsLast as ChannelsLast
    from composer_algorithms.colout import ColOut as ColOut
    from composer_algorithms.colout import ColOutTransform as ColOutTransform
    from composer_algorithms.cutmix import CutMix as CutMix
    from composer_algorithms.cutmix import MixUpOrCutMix as MixUpOrCutMix
    from composer_algorithms.cutout import CutOut as CutOut
    from composer_algorithms.cutout import CutOutTransform as CutOutTransform
    from composer_algorithms.dataset_transforms import add_vision_dataset_transform as add_vision_dataset_transform
    from composer_algorithms.dirac_init import DiracInit as DiracInit
    from composer_algorithms.ema import EMA as EMA
    from composer_algorithms.factorize import Factorize as Factorize
    from composer_algorithms.fused_cross_entropy import FusedCrossEntropy as FusedCrossEntropy
    from composer_algorithms.gated_linear_units import GatedLinearUnits as GatedLinearUnits
    from composer_algorithms.ghost_batchnorm import GhostBatchNorm as GhostBatchNorm
    from composer_algorithms.gradient_clipping import AGC as AGC
    from composer_algorithms.gradient_clipping import GradientClipping as GradientClipping
    from composer_algorithms.gyro_dropout import GyroDropout as GyroDropout
    from composer_algorithms.label_smoothing import LabelSmoothing as LabelSmoothing
    from composer_algorithms.layer_freezing import LayerFreezing as LayerFreezing
    from composer_algorithms.low_precision_groupnorm import LowPrecisionGroupNorm as LowPrecisionGroupNorm
    from composer_algorithms.low_precision_layernorm import LowPrecisionLayerNorm as LowPrecisionLayerNorm
    from composer_algorithms.metadata import Metadata as Metadata
    from composer_algorithms.metadata import all_metadata as all_metadata
    from composer_algorithms.mixup import MixUp as MixUp
    from composer_algorithms.multi_token_prediction import MultiTokenPrediction as MultiTokenPrediction
    from composer_algorithms.multi_view_eval import MultiViewEval as MultiViewEval
    from composer_algorithms.mup import MuP as MuP
    from composer_algorithms.mup import coord_check as coord_check
    from composer_algorithms.no_op_model import NoOpModel as NoOpModel
    from composer_algorithms.progressive_resizing import ProgressiveResizing as ProgressiveResizing
    from composer_algorithms.randaugment import RandAugment as RandAugment
    from composer_algorithms.randaugment import RandAugmentTransform as RandAugmentTransform
    from composer_algorithms.sam import SAM as SAM
    from composer_algorithms.sam import SAMOptimizer as SAMOptimizer
    from composer_algorithms.selective_backprop import SelectiveBackprop as SelectiveBackprop
    from composer_algorithms.seq_length_warmup import SeqLengthWarmup as SeqLengthWarmup
    from composer_algorithms.squeeze_excite import SqueezeExcite as SqueezeExcite
    from composer_algorithms.stochastic_depth import StochasticDepth as StochasticDepth
    from composer_algorithms.swa import SWA as SWA
    from composer_algorithms.transformer_surgery import LogitSoftcap as LogitSoftcap
    from composer_algorithms.transformer_surgery import QKNorm as QKNorm
    from composer_algorithms.transformer_surgery import SquaredReLU as SquaredReLU
    from composer_algorithms.transformer_surgery import ValueResidual as ValueResidual
    from composer_algorithms.transformer_surgery import ZeroInit as ZeroInit
    from composer_algorithms.untied_head import UntiedHead as UntiedHead
    from composer_algorithms.weight_standardization import WeightStandardization as WeightStandardization
    from composer_algorithms.whitening_init import WhiteningInit as WhiteningInit
    from composer_algorithms.z_loss import ZLoss as ZLoss

    __version__: str

# The methods import torch, so each loads on first use.
_HOME = {
    "add_vision_dataset_transform": "dataset_transforms",
    "AGC": "gradient_clipping",
    "Alibi": "alibi",
    "all_metadata": "metadata",
    "AlternatingFlip": "alternating_flip",
    "AttentionWindowWarmup": "attention_window",
    "AugmentAndMixTransform": "augmix",
    "AugMix": "augmix",
    "BlurPool": "blurpool",
    "ChannelsLast": "channels_last",
    "ColOut": "colout",
    "ColOutTransform": "colout",
    "CutMix": "cutmix",
    "CutOut": "cutout",
    "CutOutTransform": "cutout",
    "DiracInit": "dirac_init",
    "EMA": "ema",
    "Factorize": "factorize",
    "FusedCrossEntropy": "fused_cross_entropy",
    "GatedLinearUnits": "gated_linear_units",
    "GhostBatchNorm": "ghost_batchnorm",
    "GradientClipping": "gradient_clipping",
    "GyroDropout": "gyro_dropout",
    "LabelSmoothing": "label_smoothing",
    "LayerFreezing": "layer_freezing",
    "LogitSoftcap": "transformer_surgery",
    "LowPrecisionGroupNorm": "low_precision_groupnorm",
    "LowPrecisionLayerNorm": "low_precision_layernorm",
    "Metadata": "metadata",
    "MixUp": "mixup",
    "MixUpOrCutMix": "cutmix",
    "MultiViewEval": "multi_view_eval",
    "MuP": "mup",
    "coord_check": "mup",
    "MultiTokenPrediction": "multi_token_prediction",
    "NoOpModel": "no_op_model",
    "ProgressiveResizing": "progressive_resizing",
    "QKNorm": "transformer_surgery",
    "RandAugment": "randaugment",
    "RandAugmentTransform": "randaugment",
    "SAM": "sam",
    "SAMOptimizer": "sam",
    "SelectiveBackprop": "selective_backprop",
    "SeqLengthWarmup": "seq_length_warmup",
    "SquaredReLU": "transformer_surgery",
    "SqueezeExcite": "squeeze_excite",
    "StochasticDepth": "stochastic_depth",
    "SWA": "swa",
    "UntiedHead": "untied_head",
    "ValueResidual": "transformer_surgery",
    "WeightStandardization": "weight_standardization",
    "WhiteningInit": "whitening_init",
    "ZeroInit": "transformer_surgery",
    "ZLoss": "z_loss",
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]  # the names are those of the TYPE_CHECKING block above
    *_HOME,
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # reading the metadata costs more than the rest of this import

        value: object = version("composer-algorithms")
    elif name in _HOME:
        value = getattr(import_module(f"composer_algorithms.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

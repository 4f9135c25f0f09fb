"""Methods that make training faster or better, as algorithms of the Trainer."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_algorithms.alibi import Alibi as Alibi
    from composer_algorithms.augmix import AugmentAndMixTransform as AugmentAndMixTransform
    from composer_algorithms.augmix import AugMix as AugMix
    from composer_algorithms.blurpool import BlurPool as BlurPool
    from composer_algorithms.channels_last import ChannelsLast as ChannelsLast
    from composer_algorithms.colout import ColOut as ColOut
    from composer_algorithms.colout import ColOutTransform as ColOutTransform
    from composer_algorithms.cutmix import CutMix as CutMix
    from composer_algorithms.cutout import CutOut as CutOut
    from composer_algorithms.ema import EMA as EMA
    from composer_algorithms.factorize import Factorize as Factorize
    from composer_algorithms.gated_linear_units import GatedLinearUnits as GatedLinearUnits
    from composer_algorithms.ghost_batchnorm import GhostBatchNorm as GhostBatchNorm
    from composer_algorithms.gradient_clipping import AGC as AGC
    from composer_algorithms.gradient_clipping import GradientClipping as GradientClipping
    from composer_algorithms.gyro_dropout import GyroDropout as GyroDropout
    from composer_algorithms.label_smoothing import LabelSmoothing as LabelSmoothing
    from composer_algorithms.layer_freezing import LayerFreezing as LayerFreezing
    from composer_algorithms.low_precision_groupnorm import LowPrecisionGroupNorm as LowPrecisionGroupNorm
    from composer_algorithms.low_precision_layernorm import LowPrecisionLayerNorm as LowPrecisionLayerNorm
    from composer_algorithms.mixup import MixUp as MixUp
    from composer_algorithms.no_op_model import NoOpModel as NoOpModel
    from composer_algorithms.progressive_resizing import ProgressiveResizing as ProgressiveResizing
    from composer_algorithms.randaugment import RandAugment as RandAugment
    from composer_algorithms.randaugment import RandAugmentTransform as RandAugmentTransform
    from composer_algorithms.sam import SAM as SAM
    from composer_algorithms.selective_backprop import SelectiveBackprop as SelectiveBackprop
    from composer_algorithms.seq_length_warmup import SeqLengthWarmup as SeqLengthWarmup
    from composer_algorithms.squeeze_excite import SqueezeExcite as SqueezeExcite
    from composer_algorithms.squeeze_excite import SqueezeExcite2d as SqueezeExcite2d
    from composer_algorithms.squeeze_excite import SqueezeExciteConv2d as SqueezeExciteConv2d
    from composer_algorithms.stochastic_depth import StochasticDepth as StochasticDepth
    from composer_algorithms.swa import SWA as SWA
    from composer_algorithms.weight_standardization import WeightStandardization as WeightStandardization

__all__ = [
    "AGC",
    "Alibi",
    "AugmentAndMixTransform",
    "AugMix",
    "BlurPool",
    "ChannelsLast",
    "ColOut",
    "ColOutTransform",
    "CutMix",
    "CutOut",
    "EMA",
    "Factorize",
    "GatedLinearUnits",
    "GhostBatchNorm",
    "GradientClipping",
    "GyroDropout",
    "LabelSmoothing",
    "LayerFreezing",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "MixUp",
    "NoOpModel",
    "ProgressiveResizing",
    "RandAugment",
    "RandAugmentTransform",
    "SAM",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "SqueezeExcite",
    "SqueezeExcite2d",
    "SqueezeExciteConv2d",
    "StochasticDepth",
    "SWA",
    "WeightStandardization",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_algorithms.alibi": ["Alibi"],
        "composer_algorithms.augmix": ["AugMix", "AugmentAndMixTransform"],
        "composer_algorithms.blurpool": ["BlurPool"],
        "composer_algorithms.channels_last": ["ChannelsLast"],
        "composer_algorithms.colout": ["ColOut", "ColOutTransform"],
        "composer_algorithms.cutmix": ["CutMix"],
        "composer_algorithms.cutout": ["CutOut"],
        "composer_algorithms.ema": ["EMA"],
        "composer_algorithms.factorize": ["Factorize"],
        "composer_algorithms.gated_linear_units": ["GatedLinearUnits"],
        "composer_algorithms.ghost_batchnorm": ["GhostBatchNorm"],
        "composer_algorithms.gradient_clipping": ["AGC", "GradientClipping"],
        "composer_algorithms.gyro_dropout": ["GyroDropout"],
        "composer_algorithms.label_smoothing": ["LabelSmoothing"],
        "composer_algorithms.layer_freezing": ["LayerFreezing"],
        "composer_algorithms.low_precision_groupnorm": ["LowPrecisionGroupNorm"],
        "composer_algorithms.low_precision_layernorm": ["LowPrecisionLayerNorm"],
        "composer_algorithms.mixup": ["MixUp"],
        "composer_algorithms.no_op_model": ["NoOpModel"],
        "composer_algorithms.progressive_resizing": ["ProgressiveResizing"],
        "composer_algorithms.randaugment": ["RandAugment", "RandAugmentTransform"],
        "composer_algorithms.sam": ["SAM"],
        "composer_algorithms.selective_backprop": ["SelectiveBackprop"],
        "composer_algorithms.seq_length_warmup": ["SeqLengthWarmup"],
        "composer_algorithms.squeeze_excite": ["SqueezeExcite", "SqueezeExcite2d", "SqueezeExciteConv2d"],
        "composer_algorithms.stochastic_depth": ["StochasticDepth"],
        "composer_algorithms.swa": ["SWA"],
        "composer_algorithms.weight_standardization": ["WeightStandardization"],
    },
    submodules=[
        "alibi",
        "augmix",
        "blurpool",
        "channels_last",
        "colout",
        "cutmix",
        "cutout",
        "ema",
        "factorize",
        "fused_layernorm",
        "gated_linear_units",
        "ghost_batchnorm",
        "gradient_clipping",
        "gyro_dropout",
        "label_smoothing",
        "layer_freezing",
        "low_precision_groupnorm",
        "low_precision_layernorm",
        "mixup",
        "no_op_model",
        "progressive_resizing",
        "randaugment",
        "sam",
        "selective_backprop",
        "seq_length_warmup",
        "squeeze_excite",
        "stochastic_depth",
        "swa",
        "utils",
        "warnings",
        "weight_standardization",
    ],
    renamed={"FusedLayerNorm": "composer_algorithms.LowPrecisionLayerNorm"},
)

"""Methods that make training faster or better, as algorithms of the Trainer."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_algorithms.augmix import AugmentAndMixTransform as AugmentAndMixTransform
    from composer_algorithms.augmix import AugMix as AugMix
    from composer_algorithms.colout import ColOut as ColOut
    from composer_algorithms.colout import ColOutTransform as ColOutTransform
    from composer_algorithms.cutmix import CutMix as CutMix
    from composer_algorithms.cutout import CutOut as CutOut
    from composer_algorithms.ema import EMA as EMA
    from composer_algorithms.gradient_clipping import AGC as AGC
    from composer_algorithms.gradient_clipping import GradientClipping as GradientClipping
    from composer_algorithms.label_smoothing import LabelSmoothing as LabelSmoothing
    from composer_algorithms.layer_freezing import LayerFreezing as LayerFreezing
    from composer_algorithms.mixup import MixUp as MixUp
    from composer_algorithms.progressive_resizing import ProgressiveResizing as ProgressiveResizing
    from composer_algorithms.randaugment import RandAugment as RandAugment
    from composer_algorithms.randaugment import RandAugmentTransform as RandAugmentTransform
    from composer_algorithms.sam import SAM as SAM
    from composer_algorithms.selective_backprop import SelectiveBackprop as SelectiveBackprop
    from composer_algorithms.seq_length_warmup import SeqLengthWarmup as SeqLengthWarmup
    from composer_algorithms.swa import SWA as SWA

__all__ = [
    "AugMix",
    "AugmentAndMixTransform",
    "ColOut",
    "ColOutTransform",
    "CutMix",
    "CutOut",
    "EMA",
    "AGC",
    "GradientClipping",
    "LabelSmoothing",
    "LayerFreezing",
    "MixUp",
    "ProgressiveResizing",
    "RandAugment",
    "RandAugmentTransform",
    "SAM",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "SWA",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_algorithms.augmix": ["AugMix", "AugmentAndMixTransform"],
        "composer_algorithms.colout": ["ColOut", "ColOutTransform"],
        "composer_algorithms.cutmix": ["CutMix"],
        "composer_algorithms.cutout": ["CutOut"],
        "composer_algorithms.ema": ["EMA"],
        "composer_algorithms.gradient_clipping": ["AGC", "GradientClipping"],
        "composer_algorithms.label_smoothing": ["LabelSmoothing"],
        "composer_algorithms.layer_freezing": ["LayerFreezing"],
        "composer_algorithms.mixup": ["MixUp"],
        "composer_algorithms.progressive_resizing": ["ProgressiveResizing"],
        "composer_algorithms.randaugment": ["RandAugment", "RandAugmentTransform"],
        "composer_algorithms.sam": ["SAM"],
        "composer_algorithms.selective_backprop": ["SelectiveBackprop"],
        "composer_algorithms.seq_length_warmup": ["SeqLengthWarmup"],
        "composer_algorithms.swa": ["SWA"],
    },
    submodules=[
        "augmix",
        "colout",
        "cutmix",
        "cutout",
        "ema",
        "gradient_clipping",
        "label_smoothing",
        "layer_freezing",
        "mixup",
        "progressive_resizing",
        "randaugment",
        "sam",
        "selective_backprop",
        "seq_length_warmup",
        "swa",
        "utils",
        "warnings",
    ],
)

"""Functional forms of the methods, for custom training loops: `import composer_algorithms.functional as cf`."""

from composer_algorithms.alibi import apply_alibi
from composer_algorithms.augmix import augmix_image
from composer_algorithms.blurpool import apply_blurpool
from composer_algorithms.channels_last import apply_channels_last
from composer_algorithms.colout import colout_batch
from composer_algorithms.cutmix import cutmix, cutmix_batch
from composer_algorithms.cutout import cutout_batch
from composer_algorithms.ema import compute_ema
from composer_algorithms.factorize import apply_factorization
from composer_algorithms.gated_linear_units import apply_gated_linear_units
from composer_algorithms.ghost_batchnorm import apply_ghost_batchnorm
from composer_algorithms.gradient_clipping import apply_agc, apply_gradient_clipping
from composer_algorithms.gyro_dropout import apply_gyro_dropout
from composer_algorithms.label_smoothing import smooth_labels
from composer_algorithms.layer_freezing import freeze_layers
from composer_algorithms.low_precision_groupnorm import apply_low_precision_groupnorm
from composer_algorithms.low_precision_layernorm import apply_low_precision_layernorm
from composer_algorithms.mixup import mixup_batch
from composer_algorithms.progressive_resizing import resize_batch
from composer_algorithms.randaugment import randaugment_image
from composer_algorithms.selective_backprop import select_using_loss, selective_backprop, should_selective_backprop
from composer_algorithms.seq_length_warmup import set_batch_sequence_length
from composer_algorithms.squeeze_excite import apply_squeeze_excite
from composer_algorithms.stochastic_depth import apply_stochastic_depth
from composer_algorithms.weight_standardization import apply_weight_standardization

__all__ = [
    "apply_agc",
    "apply_alibi",
    "apply_blurpool",
    "apply_channels_last",
    "apply_factorization",
    "apply_gated_linear_units",
    "apply_ghost_batchnorm",
    "apply_gradient_clipping",
    "apply_gyro_dropout",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
    "apply_squeeze_excite",
    "apply_stochastic_depth",
    "apply_weight_standardization",
    "augmix_image",
    "colout_batch",
    "compute_ema",
    "cutmix",
    "cutmix_batch",
    "cutout_batch",
    "freeze_layers",
    "mixup_batch",
    "randaugment_image",
    "resize_batch",
    "select_using_loss",
    "selective_backprop",
    "set_batch_sequence_length",
    "should_selective_backprop",
    "smooth_labels",
]

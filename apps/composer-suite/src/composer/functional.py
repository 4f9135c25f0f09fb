"""The methods as functions, for a training loop of your own: `from composer import functional as cf`."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_algorithms.alibi import apply_alibi as apply_alibi
    from composer_algorithms.augmix import augmix_image as augmix_image
    from composer_algorithms.blurpool import apply_blurpool as apply_blurpool
    from composer_algorithms.channels_last import apply_channels_last as apply_channels_last
    from composer_algorithms.colout import colout_batch as colout_batch
    from composer_algorithms.cutmix import cutmix as cutmix
    from composer_algorithms.cutmix import cutmix_batch as cutmix_batch
    from composer_algorithms.cutout import cutout_batch as cutout_batch
    from composer_algorithms.ema import compute_ema as compute_ema
    from composer_algorithms.factorize import apply_factorization as apply_factorization
    from composer_algorithms.gated_linear_units import apply_gated_linear_units as apply_gated_linear_units
    from composer_algorithms.ghost_batchnorm import apply_ghost_batchnorm as apply_ghost_batchnorm
    from composer_algorithms.gradient_clipping import apply_agc as apply_agc
    from composer_algorithms.gradient_clipping import apply_gradient_clipping as apply_gradient_clipping
    from composer_algorithms.gyro_dropout import apply_gyro_dropout as apply_gyro_dropout
    from composer_algorithms.label_smoothing import smooth_labels as smooth_labels
    from composer_algorithms.layer_freezing import freeze_layers as freeze_layers
    from composer_algorithms.low_precision_groupnorm import (
        apply_low_precision_groupnorm as apply_low_precision_groupnorm,
    )
    from composer_algorithms.low_precision_layernorm import (
        apply_low_precision_layernorm as apply_low_precision_layernorm,
    )
    from composer_algorithms.mixup import mixup_batch as mixup_batch
    from composer_algorithms.progressive_resizing import resize_batch as resize_batch
    from composer_algorithms.randaugment import randaugment_image as randaugment_image
    from composer_algorithms.selective_backprop import select_using_loss as select_using_loss
    from composer_algorithms.selective_backprop import selective_backprop as selective_backprop
    from composer_algorithms.selective_backprop import should_selective_backprop as should_selective_backprop
    from composer_algorithms.seq_length_warmup import set_batch_sequence_length as set_batch_sequence_length
    from composer_algorithms.squeeze_excite import apply_squeeze_excite as apply_squeeze_excite
    from composer_algorithms.stochastic_depth import apply_stochastic_depth as apply_stochastic_depth
    from composer_algorithms.weight_standardization import apply_weight_standardization as apply_weight_standardization

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

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_algorithms.alibi": ["apply_alibi"],
        "composer_algorithms.augmix": ["augmix_image"],
        "composer_algorithms.blurpool": ["apply_blurpool"],
        "composer_algorithms.channels_last": ["apply_channels_last"],
        "composer_algorithms.colout": ["colout_batch"],
        "composer_algorithms.cutmix": ["cutmix", "cutmix_batch"],
        "composer_algorithms.cutout": ["cutout_batch"],
        "composer_algorithms.ema": ["compute_ema"],
        "composer_algorithms.factorize": ["apply_factorization"],
        "composer_algorithms.gated_linear_units": ["apply_gated_linear_units"],
        "composer_algorithms.ghost_batchnorm": ["apply_ghost_batchnorm"],
        "composer_algorithms.gradient_clipping": ["apply_agc", "apply_gradient_clipping"],
        "composer_algorithms.gyro_dropout": ["apply_gyro_dropout"],
        "composer_algorithms.label_smoothing": ["smooth_labels"],
        "composer_algorithms.layer_freezing": ["freeze_layers"],
        "composer_algorithms.low_precision_groupnorm": ["apply_low_precision_groupnorm"],
        "composer_algorithms.low_precision_layernorm": ["apply_low_precision_layernorm"],
        "composer_algorithms.mixup": ["mixup_batch"],
        "composer_algorithms.progressive_resizing": ["resize_batch"],
        "composer_algorithms.randaugment": ["randaugment_image"],
        "composer_algorithms.selective_backprop": [
            "select_using_loss",
            "selective_backprop",
            "should_selective_backprop",
        ],
        "composer_algorithms.seq_length_warmup": ["set_batch_sequence_length"],
        "composer_algorithms.squeeze_excite": ["apply_squeeze_excite"],
        "composer_algorithms.stochastic_depth": ["apply_stochastic_depth"],
        "composer_algorithms.weight_standardization": ["apply_weight_standardization"],
    },
    renamed={"apply_fused_layernorm": "composer_algorithms.functional.apply_low_precision_layernorm"},
)

"""The methods as functions, for a training loop of your own: `from composer import functional as cf`."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer_algorithms.augmix import augmix_image as augmix_image
    from composer_algorithms.colout import colout_batch as colout_batch
    from composer_algorithms.cutmix import cutmix as cutmix
    from composer_algorithms.cutmix import cutmix_batch as cutmix_batch
    from composer_algorithms.cutout import cutout_batch as cutout_batch
    from composer_algorithms.ema import compute_ema as compute_ema
    from composer_algorithms.gradient_clipping import apply_agc as apply_agc
    from composer_algorithms.gradient_clipping import apply_gradient_clipping as apply_gradient_clipping
    from composer_algorithms.label_smoothing import smooth_labels as smooth_labels
    from composer_algorithms.layer_freezing import freeze_layers as freeze_layers
    from composer_algorithms.mixup import mixup_batch as mixup_batch
    from composer_algorithms.progressive_resizing import resize_batch as resize_batch
    from composer_algorithms.randaugment import randaugment_image as randaugment_image
    from composer_algorithms.selective_backprop import select_using_loss as select_using_loss
    from composer_algorithms.selective_backprop import selective_backprop as selective_backprop
    from composer_algorithms.selective_backprop import should_selective_backprop as should_selective_backprop
    from composer_algorithms.seq_length_warmup import set_batch_sequence_length as set_batch_sequence_length

__all__ = [
    "augmix_image",
    "colout_batch",
    "cutmix",
    "cutmix_batch",
    "cutout_batch",
    "compute_ema",
    "apply_agc",
    "apply_gradient_clipping",
    "smooth_labels",
    "freeze_layers",
    "mixup_batch",
    "resize_batch",
    "randaugment_image",
    "select_using_loss",
    "selective_backprop",
    "should_selective_backprop",
    "set_batch_sequence_length",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_algorithms.augmix": ["augmix_image"],
        "composer_algorithms.colout": ["colout_batch"],
        "composer_algorithms.cutmix": ["cutmix", "cutmix_batch"],
        "composer_algorithms.cutout": ["cutout_batch"],
        "composer_algorithms.ema": ["compute_ema"],
        "composer_algorithms.gradient_clipping": ["apply_agc", "apply_gradient_clipping"],
        "composer_algorithms.label_smoothing": ["smooth_labels"],
        "composer_algorithms.layer_freezing": ["freeze_layers"],
        "composer_algorithms.mixup": ["mixup_batch"],
        "composer_algorithms.progressive_resizing": ["resize_batch"],
        "composer_algorithms.randaugment": ["randaugment_image"],
        "composer_algorithms.selective_backprop": [
            "select_using_loss",
            "selective_backprop",
            "should_selective_backprop",
        ],
        "composer_algorithms.seq_length_warmup": ["set_batch_sequence_length"],
    },
)

"""LayerNorm in low precision, by the name of the algorithm before it."""

from composer._lazy import lazy_face

__getattr__, __dir__ = lazy_face(
    __name__,
    {},
    renamed={
        "FusedLayerNorm": "composer_algorithms.LowPrecisionLayerNorm",
        "apply_fused_layernorm": "composer_algorithms.functional.apply_low_precision_layernorm",
    },
)

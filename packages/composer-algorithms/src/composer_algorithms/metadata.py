"""Names, sources and recommended uses of the methods, from which their table is made."""

from dataclasses import dataclass
from importlib import import_module

__all__ = ["Metadata", "all_metadata"]

# Alphabetical, as `all_metadata` returns them in this order.
_METHODS = (
    "alibi",
    "augmix",
    "blurpool",
    "channels_last",
    "colout",
    "cutmix",
    "cutout",
    "ema",
    "factorize",
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
    "weight_standardization",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Row of one method in the table of methods.

    Args:
        name: Name of the method in text.
        class_name: Name of its class in `composer_algorithms`.
        functional: Name of its function in `composer_algorithms.functional`, or empty.
        tldr: Description in less than a line.
        attribution: Authors and year, or another source.
        link: URL of a description, or empty.
        domains: `'cv'`, `'nlp'` or both.
        summary: Description in a sentence or two.
        use: When the method helps, recommended settings, and costs.
    """

    name: str
    class_name: str
    functional: str
    tldr: str
    attribution: str
    link: str
    domains: tuple[str, ...]
    summary: str
    use: str


def all_metadata() -> dict[str, Metadata]:
    """Return the metadata of every method.

    Returns:
        Metadata by the name of the method's module, such as `'mixup'`, in alphabetical order.

    Example:
        >>> all_metadata()["mixup"].functional
        'mixup_batch'
    """
    # Imported only here, because these modules import `Metadata` from this one.
    return {key: import_module(f"composer_algorithms.{key}").METADATA for key in _METHODS}

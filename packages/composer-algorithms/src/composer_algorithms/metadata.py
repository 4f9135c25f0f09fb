"""What each method is called, where it comes from and when it helps: the source of the table of methods."""

from dataclasses import dataclass
from importlib import import_module

__all__ = ["Metadata", "all_metadata"]

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
    """One method's row in the table of methods.

    Args:
        name: How the method is called in text.
        class_name: Its class in `composer_algorithms`.
        functional: Its function in `composer_algorithms.functional`, empty if there is none.
        tldr: What it does, in less than a line.
        attribution: Authors and year, or whoever else it is owed to.
        link: Where it is described, empty if nowhere.
        domains: `'cv'`, `'nlp'` or both.
        summary: What it does, in a sentence or two.
        use: When it helps, with which settings, and what it costs.
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
    """Collect the metadata of every method.

    Returns:
        From the name of the method's module (`'mixup'`) to its metadata, in alphabetical order.

    Example:
        >>> all_metadata()["mixup"].functional
        'mixup_batch'
    """
    return {key: import_module(f"composer_algorithms.{key}").METADATA for key in _METHODS}

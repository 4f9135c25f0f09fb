"""ResNet for image classification."""

import logging
from collections.abc import Sequence

from composer_models.classification import ComposerClassifier
from composer_models.initializers import Initializer
from composer_models.losses import loss_registry
from composer_models.optional import MissingConditionalImportError

__all__ = ["composer_resnet"]

log = logging.getLogger("composer.models.resnet")

_MODEL_NAMES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


def composer_resnet(
    model_name: str,
    num_classes: int = 1000,
    weights: str | None = None,
    pretrained: bool = False,
    groups: int = 1,
    width_per_group: int = 64,
    initializers: Sequence[Initializer | str] | None = None,
    loss_name: str = "soft_cross_entropy",
) -> ComposerClassifier:
    """Create a classifier from a ResNet of torchvision.

    Args:
        model_name: `'resnet18'`, `'resnet34'`, `'resnet50'`, `'resnet101'` or `'resnet152'`.
        num_classes: The number of classes.
        weights: The name of trained weights in torchvision, such as `'IMAGENET1K_V2'`; they are downloaded.
        pretrained: The same as `weights='IMAGENET1K_V1'`.
        groups: Number of groups in the 3x3 convolutions of a bottleneck block.
        width_per_group: Width of each group; 64 is the standard width.
        initializers: Applied to all layers, in order.
        loss_name: A name in `loss_registry`.

    Returns:
        The classifier, with accuracy as training metric and cross entropy and accuracy for evaluation.

    Raises:
        TypeError: If `pretrained` is not a bool, as when `groups` is passed by position.
        ValueError: If a name is unknown, `pretrained` and `weights` are both given, or the trained weights do not fit
            `num_classes`.
        MissingConditionalImportError: If torchvision is not installed; the extra `vision` provides it.

    Reference:
        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385.
    """
    # Other ResNet functions have `groups` in this position, and groups=32 would count as true.
    if not isinstance(pretrained, bool):
        raise TypeError(
            f"pretrained={pretrained!r} must be a bool: the fourth argument says whether to load trained weights. Pass "
            f"groups and what follows by name, as in groups=32, width_per_group=4."
        )
    if model_name not in _MODEL_NAMES:
        raise ValueError(f"model_name={model_name!r} is not known: choose one of {', '.join(_MODEL_NAMES)}.")
    if loss_name not in loss_registry:
        raise ValueError(f"loss_name={loss_name!r} is not known: choose one of {', '.join(sorted(loss_registry))}.")
    if pretrained and weights is not None:
        raise ValueError(f"pretrained=True and weights={weights!r} exclude each other: pass weights alone.")
    chosen = [Initializer(initializer) for initializer in initializers or ()]
    if loss_name == "binary_cross_entropy_with_logits" and Initializer.LINEAR_LOG_CONSTANT_BIAS not in chosen:
        log.warning(
            "loss_name='binary_cross_entropy_with_logits' trains better with initializers that contain "
            "'linear_log_constant_bias': without it every class starts at a probability of about one half."
        )
    try:
        from torchvision.models import get_model  # the extra `vision`
    except ImportError as error:
        raise MissingConditionalImportError("vision", "torchvision", distribution="composer-models") from error
    module = get_model(
        model_name,
        weights="IMAGENET1K_V1" if pretrained else weights,
        num_classes=num_classes,
        groups=groups,
        width_per_group=width_per_group,
    )
    # After the trained weights were loaded, which an initializer may overwrite.
    for initializer in chosen:
        module.apply(initializer.get_initializer())
    return ComposerClassifier(module, num_classes=num_classes, loss_fn=loss_registry[loss_name])

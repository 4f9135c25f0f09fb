"""Small convolutional network for handwritten digits."""

from collections.abc import Sequence

from torch import Tensor, nn

from composer_models.classification import ComposerClassifier
from composer_models.initializers import Initializer

__all__ = ["mnist_model"]


def mnist_model(num_classes: int = 10, initializers: Sequence[Initializer | str] | None = None) -> ComposerClassifier:
    """Create a small classifier for images with one channel, such as MNIST's.

    Args:
        num_classes: The number of classes.
        initializers: Applied to all layers, in order.

    Returns:
        A classifier for inputs of shape `(batch, 1, height, width)` with at least 5 pixels per side.

    Raises:
        ValueError: If an initializer is unknown.

    Example:
        >>> import torch
        >>> model = mnist_model()
        >>> model((torch.zeros(2, 1, 28, 28), None)).shape
        torch.Size([2, 10])
    """
    module = _MNISTNet(num_classes)
    for initializer in initializers or ():
        module.apply(Initializer(initializer).get_initializer())
    return ComposerClassifier(module, num_classes=num_classes)


class _MNISTNet(nn.Module):
    """Two convolutions, pooled to 4x4, and two linear layers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3)
        self.bn = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.conv1(images).relu()
        features = self.bn(self.conv2(features)).relu()
        pooled = nn.functional.adaptive_avg_pool2d(features, (4, 4)).flatten(start_dim=1)
        return self.fc2(self.fc1(pooled).relu())

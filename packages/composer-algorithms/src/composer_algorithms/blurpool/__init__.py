"""BlurPool: blur before downsampling, so that small shifts of the image change the features less."""

from composer_algorithms.blurpool.algorithm import BlurPool, apply_blurpool
from composer_algorithms.blurpool.layers import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d, blurmax_pool2d
from composer_algorithms.metadata import Metadata

__all__ = [
    "BlurPool",
    "apply_blurpool",
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool2d",
    "blur_2d",
    "blurmax_pool2d",
    "METADATA",
]

METADATA = Metadata(
    name="BlurPool",
    class_name="BlurPool",
    functional="apply_blurpool",
    tldr="Applies a blur before pooling or downsampling",
    attribution="(Zhang, 2019)",
    link="https://arxiv.org/abs/1904.11486",
    domains=("cv",),
    summary=(
        "Puts a small low-pass filter before strided convolutions and into max pooling, so that sampling down does not "
        "alias, and the output depends less on where exactly the object lies."
    ),
    use=(
        "Keep the defaults. The paper reports 0.5 to 1% on ImageNet. blur_first=False blurs after the convolution, "
        "which then computes at full resolution: four times the work for stride 2, about 10% of training time for "
        "about 0.1% with ResNet-50. Networks for CIFAR often have nothing to replace."
    ),
)

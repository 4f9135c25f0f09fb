import torch

from composer_models import mnist_model


def test_images_of_digits_become_logits():
    assert mnist_model(num_classes=5)((torch.zeros(3, 1, 28, 28), None)).shape == (3, 5)


def test_the_layers_have_the_published_sizes():
    shapes = [tuple(layer.weight.shape) for layer in mnist_model().modules() if hasattr(layer, "weight")]
    assert shapes == [(16, 1, 3, 3), (32, 16, 3, 3), (32,), (32, 512), (10, 32)]


def test_initializers_are_applied():
    assert (mnist_model(initializers=["linear_log_constant_bias"]).module.fc2.bias.exp() - 0.1).abs().max() < 1e-6

import builtins
import logging
import math

import pytest
import torch

from composer_models import MissingConditionalImportError, composer_resnet, soft_cross_entropy


@pytest.fixture
def torchvision():
    return pytest.importorskip("torchvision", reason="the wheel alone comes without the extra vision")


@pytest.mark.usefixtures("torchvision")
class TestResNet:
    def test_images_become_logits_of_the_classes(self):
        model = composer_resnet(model_name="resnet18", num_classes=7)
        assert model((torch.zeros(2, 3, 32, 32), None)).shape == (2, 7)
        assert model.num_classes == 7

    def test_metrics_are_those_of_a_classifier(self):
        model = composer_resnet("resnet18", num_classes=2)
        assert list(model.get_metrics(is_train=True)) == ["MulticlassAccuracy"]
        assert list(model.get_metrics(is_train=False)) == ["CrossEntropy", "MulticlassAccuracy"]

    def test_the_loss_is_soft_cross_entropy_and_reaches_every_parameter(self):
        model = composer_resnet("resnet18", num_classes=2)
        batch = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
        outputs = model(batch)
        loss = model.loss(outputs, batch)
        assert torch.equal(loss, soft_cross_entropy(outputs, batch[1]))
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_groups_and_width_reach_the_bottlenecks(self):
        with torch.device("meta"):
            model = composer_resnet("resnet50", groups=32, width_per_group=4)
        assert model.module.layer1[0].conv2.groups == 32
        assert model.module.layer1[0].conv2.out_channels == 128

    def test_initializers_are_applied_in_order(self):
        model = composer_resnet("resnet18", 4, initializers=["bn_uniform", "bn_ones", "linear_log_constant_bias"])
        assert (model.module.bn1.weight == 1).all()
        torch.testing.assert_close(model.module.fc.bias, torch.full((4,), -math.log(4)))

    def test_binary_cross_entropy_is_found_by_name_and_asks_for_its_initializer(self, caplog):
        with caplog.at_level(logging.WARNING, logger="composer.models"):
            model = composer_resnet("resnet18", 3, loss_name="binary_cross_entropy_with_logits")
        assert "linear_log_constant_bias" in caplog.text
        # at logits of 0 every class costs log 2
        loss = model.loss(torch.zeros(2, 3), (None, torch.tensor([0, 2])))
        torch.testing.assert_close(loss, torch.tensor(3 * math.log(2)))

    def test_binary_cross_entropy_with_its_initializer_is_quiet(self, caplog):
        names = ["linear_log_constant_bias"]
        composer_resnet("resnet18", 3, initializers=names, loss_name="binary_cross_entropy_with_logits")
        assert caplog.text == ""

    def test_unknown_weights_are_refused(self):
        with pytest.raises((ValueError, KeyError), match="NO_SUCH_WEIGHTS"):
            composer_resnet("resnet18", weights="NO_SUCH_WEIGHTS")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_name": "resnet19"}, "model_name='resnet19' is not known: choose one of resnet18"),
        ({"model_name": "resnet18", "loss_name": "mse"}, "loss_name='mse' is not known"),
        ({"model_name": "resnet18", "weights": "DEFAULT", "pretrained": True}, "exclude each other"),
        ({"model_name": "resnet18", "initializers": ["zeros"]}, "zeros"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_loaded(arguments, message):
    with pytest.raises(ValueError, match=message):
        composer_resnet(**arguments)


def test_groups_in_the_place_of_pretrained_are_refused_before_weights_are_loaded():
    with pytest.raises(TypeError, match=r"pretrained=32 must be a bool.*groups and what follows by name"):
        composer_resnet("resnet50", 1000, None, 32, 4)


def test_a_missing_torchvision_names_the_extra(monkeypatch):
    real_import = builtins.__import__

    def without_torchvision(name, *args, **kwargs):
        if name.startswith("torchvision"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torchvision)
    with pytest.raises(MissingConditionalImportError, match=r"composer-models\[vision\]"):
        composer_resnet("resnet18")

import sys

import pytest
import torch

from composer_models import MissingConditionalImportError, composer_timm


@pytest.fixture
def timm():
    return pytest.importorskip("timm", reason="the wheel alone comes without the extra timm")


@pytest.mark.usefixtures("timm")
class TestTimm:
    @pytest.mark.parametrize(
        ("name", "settings"),
        [("resnet10t", {"drop_path_rate": 0.1}), ("vit_tiny_patch16_224", {"img_size": 32, "global_pool": "avg"})],
    )
    def test_images_become_logits_of_the_classes(self, name, settings):
        model = composer_timm(name, num_classes=7, **settings)
        assert model((torch.zeros(2, 3, 32, 32), None)).shape == (2, 7)
        assert model.num_classes == 7
        assert list(model.get_metrics(is_train=False)) == ["CrossEntropy", "MulticlassAccuracy"]

    def test_settings_of_batch_norms_and_dropout_reach_the_model(self):
        model = composer_timm("efficientnet_b0", num_classes=2, drop_rate=0.25, bn_momentum=0.3, bn_eps=1e-4).module
        assert (model.drop_rate, model.bn1.momentum, model.bn1.eps) == (0.25, 0.3, 1e-4)


def test_without_timm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingConditionalImportError, match=r"composer-models\[timm\]"):
        composer_timm("resnet50")

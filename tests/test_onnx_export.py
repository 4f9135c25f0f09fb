"""A model in ONNX computes what the model does, as another implementation of ONNX finds."""

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from composer import Trainer
from composer.models import ComposerClassifier


@pytest.fixture
def trainer():
    torch.manual_seed(3)
    model = ComposerClassifier(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)), num_classes=2)
    data = [(torch.randn(4, 2), torch.tensor([0, 1, 1, 0])) for _ in range(3)]
    with Trainer(
        model=model,
        train_dataloader=data,
        device_train_microbatch_size=4,
        max_duration="3ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        progress_bar=False,
        seed=1,
    ) as trainer:
        yield trainer


def test_onnx_computes_what_the_model_does(trainer, tmp_path):
    trainer.fit()
    path = str(tmp_path / "model.onnx")
    trainer.export_for_inference("onnx", path)  # the sample is the latest batch
    graph = onnx.load(path)
    onnx.checker.check_model(graph)
    assert [given.name for given in graph.graph.input] == ["input"]  # targets are not needed for outputs
    x = torch.randn(4, 2)
    (found,) = ReferenceEvaluator(graph).run(["output"], {"input": x.numpy()})
    model = trainer.state.model
    with torch.no_grad():
        expected = model.eval()((x, torch.zeros(4))).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_names_are_those_of_a_dict_or_the_users_own(tmp_path):
    from composer.utils.inference import export_for_inference

    class Two(nn.Module):
        def forward(self, batch):
            return batch["left"] - batch["right"]

    sample = {"left": torch.ones(2), "right": torch.zeros(2)}
    path = tmp_path / "two.onnx"
    export_for_inference(Two(), "onnx", path, sample_input=(sample, {}), output_names=["difference"])
    graph = onnx.load(path)
    assert [given.name for given in graph.graph.input] == ["left", "right"]
    assert [given.name for given in graph.graph.output] == ["difference"]

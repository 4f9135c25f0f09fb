"""Exported models compute what the model computes, and the model itself is left alone."""

import copy

import pytest
import torch
from torch import nn

from composer.loggers import LoggerDestination
from composer.utils.inference import ExportFormat, export_for_inference, quantize_dynamic


@pytest.fixture
def batch(make_data):
    points, targets = make_data(4).tensors
    return points, targets


@pytest.fixture
def trained(make_trainer):
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    return trainer


@pytest.fixture
def expected(trained, batch):
    model = copy.deepcopy(trained.state.model).eval()
    with torch.no_grad():
        return model(batch)


def load_exported(path):
    return torch.export.load(path).module()


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch.export.load of torch 2.11
@pytest.mark.parametrize(("save_format", "load"), [("torchscript", torch.jit.load), ("export", load_exported)])
def test_the_exported_model_computes_what_the_model_does(trained, batch, expected, tmp_path, save_format, load):
    path = tmp_path / "deeper" / "model.bin"
    trained.export_for_inference(save_format, str(path), sample_input=batch)
    torch.testing.assert_close(load(path)(batch), expected, rtol=0, atol=0)
    assert [file.name for file in path.parent.iterdir()] == ["model.bin"]


def test_the_latest_batch_is_the_sample_where_none_is_given(trained, batch, expected, tmp_path):
    trained.export_for_inference("export", str(tmp_path / "model.pt2"))
    torch.testing.assert_close(load_exported(tmp_path / "model.pt2")(list(batch)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("save_format", list(ExportFormat))
def test_the_model_stays_as_it_is(trained, batch, tmp_path, save_format):
    if save_format is ExportFormat.ONNX:
        pytest.importorskip("onnx", reason="the wheel alone comes without the extra onnx")
    model = trained.state.model.train()
    before = copy.deepcopy(model.state_dict())
    trained.export_for_inference(save_format, str(tmp_path / "model"), sample_input=batch)
    assert trained.state.model is model
    assert all(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert model.logger is trained.logger


def test_safetensors_are_the_weights(trained, tmp_path):
    from composer_checkpoint import load_file

    expected = trained.state.model.state_dict()
    trained.state.model.multi_token_heads = nn.Linear(2, 2)  # as of MultiTokenPrediction, for training only
    trained.export_for_inference("safetensors", str(tmp_path / "model.safetensors"))
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value)


def test_an_export_goes_to_an_address(trained, batch, expected, tmp_path):
    trained.export_for_inference("export", f"file://{tmp_path}/model.pt2", sample_input=batch)
    torch.testing.assert_close(load_exported(tmp_path / "model.pt2")(batch), expected, rtol=0, atol=0)


def test_a_logger_that_keeps_files_gets_the_export(make_trainer, batch, tmp_path):
    class Keep(LoggerDestination):
        def can_upload_files(self):
            return True

        def upload_file(self, state, remote_file_name, file_path, *, overwrite):
            (tmp_path / remote_file_name).write_bytes(file_path.read_bytes())

    trainer = make_trainer(loggers=Keep())
    trainer.export_for_inference("export", "model.pt2", sample_input=batch)
    model = copy.deepcopy(trainer.state.model).eval()
    torch.testing.assert_close(load_exported(tmp_path / "model.pt2")(batch), model(batch).detach(), rtol=0, atol=0)


def test_a_checkpoint_gives_the_weights(trained, make_model, batch, expected, tmp_path):
    checkpoint = trained.save_checkpoint(str(tmp_path / "trained.pt"))
    path = tmp_path / "model.pt2"
    export_for_inference(
        make_model(seed=9), "export", path, sample_input=(batch, {}), load_path=checkpoint, load_strict=True
    )
    torch.testing.assert_close(load_exported(path)(batch), expected, rtol=0, atol=0)


def test_surgery_comes_before_transforms(batch, tmp_path):
    order = []

    def change(name):
        return lambda model: order.append(name) or model

    export_for_inference(
        nn.Linear(2, 2),
        "export",
        tmp_path / "model.pt2",
        sample_input=batch[0],
        transforms=[change("first"), change("second")],
        surgery_algs=change("surgery"),
    )
    assert order == ["surgery", "first", "second"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_weights_of_eight_bits_take_less_room(tmp_path):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    for name, transforms in (("whole", None), ("small", quantize_dynamic)):
        export_for_inference(model, "torchscript", tmp_path / name, transforms=transforms)
    assert (tmp_path / "whole").stat().st_size > 3 * (tmp_path / "small").stat().st_size
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    # Two layers, each rounded to 1/255 of its largest weight.
    torch.testing.assert_close(torch.jit.load(tmp_path / "small")(x), model(x).detach(), rtol=0, atol=0.05)


def test_a_model_that_cannot_be_scripted_is_traced(tmp_path):
    class Strange(nn.Module):
        def forward(self, x):
            return x * len([n for n in globals() if n == "pytest"])

    export_for_inference(Strange(), "torchscript", tmp_path / "model.pt", sample_input=torch.ones(3))
    with pytest.raises(RuntimeError, match=r"(?s)cannot be scripted.*Give sample_input"):
        export_for_inference(Strange(), "torchscript", tmp_path / "other.pt")
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize("save_format", ["onnx", "export"])
def test_formats_that_need_a_sample_say_so(trained, make_trainer, tmp_path, save_format):
    with pytest.raises(ValueError, match=r"sample_input=None.*needs to see the model run"):
        export_for_inference(trained.state.model, save_format, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_onnx_without_its_package_names_the_extra(trained, batch, tmp_path, monkeypatch):
    monkeypatch.setattr("composer.utils.inference.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"composer-suite\[onnx\]"):
        trained.export_for_inference("onnx", str(tmp_path / "model"), sample_input=batch)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format(trained, tmp_path):
    with pytest.raises(ValueError, match="keras"):
        trained.export_for_inference("keras", str(tmp_path / "model"))

"""ExportForInferenceCallback: the model as a file when training ends."""

import pytest
import torch

from composer.callbacks import ExportForInferenceCallback
from composer.loggers import LoggerDestination


class Keeper(LoggerDestination):
    """Keeps the contents of files."""

    def __init__(self):
        self.files = {}

    def can_upload_files(self):
        return True

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        self.files[remote_file_name] = file_path.read_bytes()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch.export.load of torch 2.11
def test_the_trained_model_is_exported_with_the_first_batch_as_its_sample(make_trainer, make_loader, tmp_path):
    path = tmp_path / "model.pt2"
    trainer = make_trainer(
        train_dataloader=make_loader(8, 4),
        max_duration="2ep",
        callbacks=ExportForInferenceCallback("export", str(path)),
    )
    trainer.fit()
    exported = torch.export.load(path).module()
    batch = next(iter(make_loader(8, 4)))
    torch.testing.assert_close(exported(batch), trainer.state.model(batch))


def test_what_is_no_store_is_refused_before_anything_is_trained():
    with pytest.raises(TypeError, match=r"save_object_store='s3://plums' must be an ObjectStore"):
        ExportForInferenceCallback("torchscript", "model.pt", save_object_store="s3://plums")


def test_formats_that_need_no_sample_keep_none(make_trainer, tmp_path):
    exporter = ExportForInferenceCallback("torchscript", str(tmp_path / "model.pt"))
    make_trainer(max_duration="1ep", callbacks=exporter).fit()
    assert exporter.sample_input is None
    assert (tmp_path / "model.pt").exists()


def test_a_logger_that_keeps_files_gets_the_model(make_trainer):
    keeper = Keeper()
    exporter = ExportForInferenceCallback("safetensors", "exported/model.safetensors")
    make_trainer(max_duration="1ep", callbacks=exporter, loggers=keeper).fit()
    assert list(keeper.files) == ["exported/model.safetensors"]


def test_the_exporter_is_called_with_all_settings(make_trainer, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "composer.callbacks.export_for_inference.export_with_logger", lambda **settings: calls.append(settings)
    )
    exporter = ExportForInferenceCallback("onnx", "model.onnx", input_names=["points"], output_names=["logits"])
    trainer = make_trainer(max_duration="1ep", callbacks=exporter)
    trainer.fit()
    (settings,) = calls
    sample, keywords = settings.pop("sample_input")
    torch.testing.assert_close(sample, next(iter(trainer.state.train_dataloader)))
    assert keywords == {}
    assert settings == {
        "model": trainer.state.model,
        "save_format": "onnx",
        "save_path": "model.onnx",
        "logger": trainer.logger,
        "save_object_store": None,
        "transforms": None,
        "input_names": ["points"],
        "output_names": ["logits"],
    }


def test_a_format_that_does_not_exist_is_refused_before_training():
    with pytest.raises(ValueError, match="pickle"):
        ExportForInferenceCallback("pickle", "model.pkl")

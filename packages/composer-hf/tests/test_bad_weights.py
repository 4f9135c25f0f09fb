"""Checkpoints whose weights are not those of the model that they describe."""

import os

import pytest
import torch

from composer_checkpoint import (
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    NoCheckpointError,
    UnfittingWeightsError,
    UnsafeCheckpointError,
    save_file,
)
from composer_hf import HuggingFaceModel, MissingMetadataError
from composer_hf import write_huggingface_pretrained_from_composer_checkpoint as write_folder


@pytest.fixture
def save_changed(make_model, tmp_path):
    """Save a checkpoint after something was done to its weights and its description."""

    def write(change, name="gpt2"):
        model = HuggingFaceModel(make_model(name))
        weights, saved = dict(model.state_dict()), model.get_metadata()
        change(weights, saved)
        path = tmp_path / "changed.pt"
        save_file({"state": {"model": weights, "integrations": {"huggingface": saved}}}, path)
        return path

    return write


def check_nothing_was_left(tmp_path):
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".pt")) == []


def test_missing_weights_are_named(save_changed, tmp_path):
    path = save_changed(lambda weights, _: weights.pop("model.transformer.ln_f.weight"))

    with pytest.raises(UnfittingWeightsError, match=r"1 not in the checkpoint: transformer\.ln_f\.weight"):
        write_folder(path, tmp_path / "out")
    check_nothing_was_left(tmp_path)


def test_surplus_weights_are_named(save_changed, tmp_path):
    path = save_changed(lambda weights, _: weights.update({"model.transformer.h.2.bias": torch.ones(2)}))

    with pytest.raises(UnfittingWeightsError, match=r"1 not in the model: transformer\.h\.2\.bias"):
        write_folder(path, tmp_path / "out")
    check_nothing_was_left(tmp_path)


def test_weights_of_another_shape_are_named(save_changed, tmp_path):
    path = save_changed(lambda weights, _: weights.update({"model.transformer.ln_f.weight": torch.ones(2)}))

    with pytest.raises(UnfittingWeightsError, match=r"transformer\.ln_f\.weight \(\(2,\) in the checkpoint, \(16,\)"):
        write_folder(path, tmp_path / "out")


def test_two_weights_that_would_have_one_name_are_refused(save_changed, tmp_path):
    path = save_changed(lambda weights, _: weights.update({"module.model.transformer.ln_f.weight": torch.ones(16)}))

    with pytest.raises(IncompatibleCheckpointError, match=r"ln_f\.weight and module\.model\.transformer\.ln_f\.weight"):
        write_folder(path, tmp_path / "out")
    check_nothing_was_left(tmp_path)


def test_a_tied_weight_may_have_one_of_its_names(save_changed, tmp_path):
    for number, name in enumerate(["model.lm_head.weight", "model.transformer.wte.weight"]):
        path = save_changed(lambda weights, _, name=name: weights.pop(name))

        folder = write_folder(path, tmp_path / str(number))

        assert "model.safetensors" in os.listdir(folder)


def test_tied_weights_that_differ_are_not_thrown_away(save_changed, tmp_path):
    path = save_changed(lambda weights, _: weights.update({"model.lm_head.weight": torch.zeros(300, 16)}))

    with pytest.raises(IncompatibleCheckpointError, match="tie_word_embeddings=False"):
        write_folder(path, tmp_path / "out")
    check_nothing_was_left(tmp_path)


def test_experts_under_the_names_of_the_other_release_become_the_same_folder(save_changed, make_model, tmp_path):
    from safetensors.torch import load_file

    expected = load_file(write_folder(save_changed(lambda *_: None, "mixtral"), tmp_path / "one") / "model.safetensors")
    (tmp_path / "changed.pt").unlink()

    def as_transformers_4(weights, _):
        weights.clear()
        weights.update({f"model.{name}": weight for name, weight in expected.items()})

    folder = write_folder(save_changed(as_transformers_4, "mixtral"), tmp_path / "two")

    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "values", [{"n_head": 0}, {"activation_function": "no such"}, {"n_embd": "wide"}, {"model_type": ["gpt2"]}]
)
def test_a_configuration_of_which_no_model_can_be_made_is_told(values, save_changed, tmp_path):
    path = save_changed(lambda _, saved: saved["model"]["config"]["content"].update(values))

    with pytest.raises(IncompatibleCheckpointError, match=r"Give the configuration that fits|does not know it"):
        write_folder(path, tmp_path / "out")
    check_nothing_was_left(tmp_path)


def test_a_checkpoint_without_a_description_is_told(save_changed, tmp_path):
    path = save_changed(lambda _, saved: saved.clear())

    with pytest.raises(MissingMetadataError, match="integrations/huggingface"):
        write_folder(path, tmp_path / "out")


def test_a_class_of_somebody_else_is_not_imported(save_changed, tmp_path, monkeypatch):
    (tmp_path / "evil_models.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = save_changed(lambda _, saved: saved["model"]["config"].update({"class": "evil_models.Model"}))

    with pytest.raises(UnsafeCheckpointError, match=r"evil_models\.Model"):
        write_folder(path, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_a_file_that_runs_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch ran",)

    torch.save({"state": {"model": Evil()}}, tmp_path / "evil.pt")

    with pytest.raises(UnsafeCheckpointError, match="system"):
        write_folder(tmp_path / "evil.pt", tmp_path / "out")


def test_a_changed_byte_is_noticed(save_changed, tmp_path):
    path = save_changed(lambda *_: None)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(CorruptCheckpointError):
        write_folder(path, tmp_path / "out")
    check_nothing_was_left(tmp_path)


def test_a_checkpoint_that_is_not_there_is_told(tmp_path):
    with pytest.raises((NoCheckpointError, FileNotFoundError)):
        write_folder(tmp_path / "none.pt", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"format": "onnx"}, "format='onnx'"),
        ({"precision": "int8"}, "precision='int8'"),
        ({"max_shard_size": "5 apples"}, "max_shard_size='5 apples'"),
        ({"max_shard_size": 0}, "max_shard_size=0"),
    ],
)
def test_settings_that_there_are_not_are_told(options, told, save_changed, tmp_path):
    with pytest.raises(ValueError, match=told):
        write_folder(save_changed(lambda *_: None), tmp_path / "out", **options)

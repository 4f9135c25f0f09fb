"""From a model to a checkpoint, to a folder, and back, bit for bit."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers

from composer_checkpoint import CheckpointConflictError, StorageError
from composer_hf import HuggingFaceModel, hf_from_composer_checkpoint
from composer_hf import write_huggingface_pretrained_from_composer_checkpoint as write_folder


def assert_same_weights(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if mine[name].dtype != theirs[name].dtype or not mine[name].equal(theirs[name])]
    assert different == []


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_a_folder_has_the_very_weights(format, make_model, batch, save, tmp_path, architectures):
    for name in architectures:
        model = make_model(name)
        checkpoint = save(HuggingFaceModel(model))

        folder = write_folder(checkpoint, tmp_path / name, format=format)
        loaded = type(model).from_pretrained(folder)

        assert_same_weights(loaded, model)
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        inputs |= {"decoder_input_ids": batch["input_ids"]} if name == "t5" else {}
        with torch.no_grad():
            assert torch.equal(loaded.eval()(**inputs).logits, model(**inputs).logits), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_other_formats_stay_what_they_are(dtype, make_model, save, tmp_path):
    model = make_model("llama").to(dtype)

    folder = write_folder(save(HuggingFaceModel(model)), tmp_path / "out")

    assert_same_weights(type(model).from_pretrained(folder, dtype=dtype), model)
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_precision_is_rounded_to_once(make_model, save, tmp_path):
    model = make_model("gpt2")

    folder = write_folder(save(HuggingFaceModel(model)), tmp_path / "out", precision="bfloat16")

    assert_same_weights(type(model).from_pretrained(folder, dtype=torch.bfloat16), model.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_weights_are_spread_over_files_of_a_limited_size(name, format, make_model, save, tmp_path):
    model = make_model(name)

    folder = write_folder(save(HuggingFaceModel(model)), tmp_path / "out", max_shard_size="30KB", format=format)

    files = [path for path in folder.iterdir() if path.suffix == f".{format}"]
    assert len(files) > 1
    assert_same_weights(type(model).from_pretrained(folder), model)


def test_tied_weights_are_written_once(make_model, save, tmp_path):
    from safetensors import safe_open

    folder = write_folder(save(HuggingFaceModel(make_model("t5"))), tmp_path / "out")

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "shared.weight" in names
    assert not names & {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}


def test_both_formats_lie_in_one_folder(make_model, save, tmp_path):
    folder = write_folder(save(HuggingFaceModel(make_model("gpt2"))), tmp_path / "out", format="both")

    assert {"model.safetensors", "pytorch_model.bin", "config.json"} <= set(os.listdir(folder))


def test_a_folder_loads_where_composer_is_not(make_model, batch, save, tokenizer, tmp_path):
    model = make_model("gpt2")
    folder = write_folder(save(HuggingFaceModel(model, tokenizer)), tmp_path / "out")
    torch.save(batch["input_ids"], tmp_path / "tokens.pt")
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["composer", "composer_hf", "composer_checkpoint", "composer_models"]))  # none of it
import torch, transformers
torch.set_num_threads({torch.get_num_threads()})  # of which the order of sums depends
model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})
tokenizer = transformers.AutoTokenizer.from_pretrained({str(folder)!r})
with torch.no_grad():
    torch.save(model(torch.load({str(tmp_path / "tokens.pt")!r})).logits, {str(tmp_path / "logits.pt")!r})
print(tokenizer("the quick brown fox")["input_ids"])
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), model(batch["input_ids"]).logits)
    assert json.loads(done.stdout) == tokenizer("the quick brown fox")["input_ids"]


def test_a_checkpoint_gives_back_model_and_tokenizer(make_model, save, tokenizer, tmp_path, monkeypatch, architectures):
    monkeypatch.chdir(tmp_path)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    for name in architectures:
        model = make_model(name)
        checkpoint = save(HuggingFaceModel(model, tokenizer))

        drawn, _ = HuggingFaceModel.hf_from_composer_checkpoint(str(checkpoint))
        loaded, restored = hf_from_composer_checkpoint(checkpoint, load_weights=True)

        assert type(drawn) is type(loaded) is type(model)
        assert_same_weights(loaded, model)
        assert restored("to be or not")["input_ids"] == tokenizer("to be or not")["input_ids"]
        assert restored.chat_template == tokenizer.chat_template
        assert restored.pad_token == "<pad>"


def test_another_class_and_other_values_are_taken(make_model, save, tmp_path):
    checkpoint = save(HuggingFaceModel(make_model("bert")))

    model, tokenizer = HuggingFaceModel.hf_from_composer_checkpoint(
        str(checkpoint), "transformers.AutoModelForSequenceClassification", {"num_labels": 5}, tmp_path / "link.pt"
    )

    assert isinstance(model, transformers.BertForSequenceClassification)
    assert model.config.num_labels == 5
    assert tokenizer is None
    assert (tmp_path / "link.pt").is_symlink()


def test_a_checkpoint_in_a_store_is_fetched(make_model, save, tmp_path):
    from composer_checkpoint import RemoteUploader

    model = make_model("gpt2")
    uploader = RemoteUploader("memory://bucket")
    uploader.upload_file_async("run/ep1.pt", save(HuggingFaceModel(model)), overwrite=True)
    uploader.wait_and_close()

    folder = write_folder("memory://bucket/run/ep1.pt", tmp_path / "out")

    assert_same_weights(type(model).from_pretrained(folder), model)


def test_a_folder_that_exists_is_left_alone(make_model, save, tmp_path):
    """With `overwrite=True` all files of the folder were gone, those of the user as well."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    checkpoint = save(HuggingFaceModel(make_model("gpt2")))

    with pytest.raises(CheckpointConflictError, match="overwrite=True"):
        write_folder(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["mine.txt"]

    for older in ("model-00001-of-00002.safetensors", "tokenizer.json", "pytorch_model.bin"):
        (tmp_path / "out" / older).write_text("of another model")
    write_folder(checkpoint, tmp_path / "out", overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json",
        "generation_config.json",
        "mine.txt",
        "model.safetensors",
        "tokenizer.json",  # which is not written, as the model has no tokenizer
    ]


def test_a_disk_that_fills_up_leaves_nothing(make_model, save, tmp_path, monkeypatch):
    import errno

    checkpoint = save(HuggingFaceModel(make_model("gpt2")))
    monkeypatch.setattr("composer_hf.weight_files.stream_shards", _full)

    with pytest.raises(StorageError) as caught:
        write_folder(checkpoint, tmp_path / "out")

    assert caught.value.errno == errno.ENOSPC
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.pt"]


def _full(files, folder, **_):
    import errno

    (folder / "model.safetensors").write_bytes(b"begun")
    raise OSError(errno.ENOSPC, "No space left on device")

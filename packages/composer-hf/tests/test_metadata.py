"""What checkpoints say of a model and its tokenizer."""

import json

import pytest
import torch
import transformers

from composer_checkpoint import IncompatibleCheckpointError, UnsafeCheckpointError, load_file
from composer_hf import HuggingFaceMetadata, HuggingFaceModel, MissingMetadataError
from composer_hf.model_classes import build_config, find_class
from composer_hf.publishing import readable_config, write_tokenizer
from composer_hf.saved_state import get_peft_config_from_composer_state_dict


def content_of(model, tokenizer):
    return {"model": {"config": {"file_extension": ".json", "content": model, "class": "x.Y"}}, "tokenizer": tokenizer}


def test_a_checkpoint_tells_class_configuration_and_release(make_model, tokenizer, save):
    path = save(HuggingFaceModel(make_model("bert"), tokenizer))

    metadata = HuggingFaceMetadata.from_checkpoint(load_file(path))

    assert metadata.model_class == "transformers.models.bert.modeling_bert.BertForMaskedLM"
    assert metadata.model_type == "bert"
    assert metadata.transformers_version == transformers.__version__
    assert metadata.config["architectures"] == ["BertForMaskedLM"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= metadata.tokenizer_files.keys()
    assert metadata.peft_config is None


def test_torch_alone_loads_a_checkpoint_with_a_tokenizer(make_model, tokenizer, save):
    tokenizer.chat_template = "{{ messages }}"
    path = save(HuggingFaceModel(make_model("gpt2"), tokenizer))

    saved = torch.load(path, weights_only=True)["state"]["integrations"]["huggingface"]

    assert saved["tokenizer"]["chat_template.jinja"] == {"file_extension": ".jinja", "content": "{{ messages }}"}
    assert saved["model"]["config"]["content"]["model_type"] == "gpt2"


def test_files_come_back_as_they_were(tmp_path):
    lines = ["[PAD]", "a", "", "\u2028", "##b"]  # the separator of lines that is a token
    files = {
        "vocab": {"file_extension": ".txt", "content": lines},  # as old releases of Composer named it
        "spiece.model": {"file_extension": ".model", "content": b"\x00\x01\xff"},
        "template.jinja": {"file_extension": ".jinja", "content": "a\nb"},
        "tokenizer.json": {"file_extension": ".json", "content": {"score": -11.5129, "token": "\u2581the"}},
    }

    write_tokenizer(tmp_path, HuggingFaceMetadata.from_saved(content_of({}, files)))

    assert (tmp_path / "vocab.txt").read_bytes().decode() == "[PAD]\na\n\n\u2028\n##b\n"
    assert (tmp_path / "spiece.model").read_bytes() == b"\x00\x01\xff"
    assert (tmp_path / "template.jinja").read_text() == "a\nb"
    assert json.loads((tmp_path / "tokenizer.json").read_bytes()) == {"score": -11.5129, "token": "\u2581the"}


def test_code_is_written_only_where_it_is_trusted(tmp_path):
    files = {
        "tokenization.py": {"file_extension": ".py", "content": "print(1)"},
        "tokenizer_config.json": {"file_extension": ".json", "content": {"auto_map": {"AutoTokenizer": "a.B"}}},
    }
    metadata = HuggingFaceMetadata.from_saved(content_of({"model_type": "x", "auto_map": {}}, files))

    write_tokenizer(tmp_path, metadata)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer_config.json"]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {}
    assert "auto_map" not in readable_config(metadata)

    write_tokenizer(tmp_path, metadata, trust_remote_code=True)
    assert (tmp_path / "tokenization.py").read_text() == "print(1)"
    assert "auto_map" in readable_config(metadata, trust_remote_code=True)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_checkpoint_chooses_no_kernel_of_the_hub(name):
    nested = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, name: "user/kernel"}
    metadata = HuggingFaceMetadata({**nested, "text_config": dict(nested)}, "transformers.GPT2LMHeadModel")

    config = build_config(metadata)  # on some releases of transformers a model of it would import the kernel

    assert "user/kernel" not in repr({**config.to_dict(), **vars(config)})
    assert name not in repr(readable_config(metadata))
    assert name in readable_config(metadata, trust_remote_code=True)
    assert build_config(metadata, {"attn_implementation": "eager"})._attn_implementation == "eager"  # the caller's


@pytest.mark.parametrize("target", ["_attn_implementation_internal", "_attn_implementation", "_experts_implementation"])
def test_a_checkpoint_gives_no_setting_another_meaning(target):
    renamed = {"attribute_map": {"hidden_size": "n_embd", "other": target}, "other": "user/kernel"}
    metadata = HuggingFaceMetadata({"model_type": "gpt2", "n_embd": 8, **renamed}, "transformers.GPT2LMHeadModel")

    config = build_config(metadata)

    assert (config._attn_implementation, getattr(config, "_experts_implementation", None)) == (None, None)
    assert config.hidden_size == 8
    assert "attribute_map" not in readable_config(metadata)


def test_an_adapter_names_no_module_of_megatron():
    peft = pytest.importorskip("peft")
    adapter = {"peft_type": "LORA", "r": 2, "megatron_config": {"a": 1}, "megatron_core": "somebody.module"}
    saved = content_of({"model_type": "gpt2"}, {})
    saved["model"]["peft_config"] = {"file_extension": ".json", "content": adapter, "class": "peft.LoraConfig"}

    config = get_peft_config_from_composer_state_dict({"state": {"integrations": {"huggingface": saved}}})

    assert isinstance(config, peft.LoraConfig)
    assert (config.r, config.megatron_config) == (2, None)


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a/b.json", "..\\x.json", "c:x.json", "a\0.json"])
def test_a_file_outside_the_folder_is_refused(name):
    with pytest.raises(UnsafeCheckpointError, match="not a plain one"):
        HuggingFaceMetadata.from_saved(content_of({}, {name: {"file_extension": ".json", "content": {}}}))


@pytest.mark.parametrize(
    "entry",
    [
        {"file_extension": ".exe", "content": ""},
        {"file_extension": ".json"},
        {"file_extension": ".txt", "content": 3},
        {"file_extension": ".model", "content": "text"},
        "text",
    ],
)
def test_a_file_of_no_known_kind_is_refused(entry):
    with pytest.raises(IncompatibleCheckpointError, match="Give the tokenizer yourself"):
        HuggingFaceMetadata.from_saved(content_of({}, {"a": entry}))


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "model.safetensors.index.json"])
def test_a_file_that_would_replace_one_of_the_models_is_refused(name):
    files = {name: {"file_extension": ".json", "content": {"auto_map": {"AutoModel": "evil.Model"}}}}

    with pytest.raises(UnsafeCheckpointError, match="describes models and not tokenizers"):
        HuggingFaceMetadata.from_saved(content_of({}, files))


def test_settings_of_a_tokenizer_that_are_no_object_are_refused(tmp_path):
    files = {"tokenizer_config.json": {"file_extension": ".json", "content": [1]}}

    with pytest.raises(IncompatibleCheckpointError, match="JSON list"):
        write_tokenizer(tmp_path, HuggingFaceMetadata.from_saved(content_of({}, files)))


@pytest.mark.parametrize("content", [{}, {"state": {}}, {"state": {"integrations": {}}}, [], {"state": 3}])
def test_a_checkpoint_of_another_model_is_told(content):
    with pytest.raises(MissingMetadataError, match=r'Name a checkpoint|"state" is not an available key'):
        HuggingFaceMetadata.from_checkpoint(content)


@pytest.mark.parametrize("saved", [{"model": {}}, {"model": {"config": {}}}, {"model": 3}, {"model": {"config": []}}])
def test_a_description_without_a_configuration_is_refused(saved):
    with pytest.raises(IncompatibleCheckpointError, match="should be a dict"):
        HuggingFaceMetadata.from_saved(saved)


def test_an_unknown_architecture_is_told_with_both_releases():
    metadata = HuggingFaceMetadata({"model_type": "warp9", "transformers_version": "9.9"}, "transformers.Warp9")

    with pytest.raises(IncompatibleCheckpointError, match=r"'warp9', saved with transformers 9\.9") as caught:
        build_config(metadata)
    assert transformers.__version__ in str(caught.value)


def test_no_module_is_imported_because_a_checkpoint_names_it(tmp_path, monkeypatch):
    (tmp_path / "evil_models.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(UnsafeCheckpointError, match="trust_remote_code=True"):
        find_class("evil_models.Model")


@pytest.mark.parametrize("name", ["transformers.NoSuchModel", "transformers.no.such.Module", "transformers.pipeline"])
def test_a_class_that_there_is_not_is_told(name):
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        find_class(name)


def test_labels_are_numbered_again():
    metadata = HuggingFaceMetadata({"model_type": "bert", "id2label": {"0": "no", "1": "yes"}})

    assert build_config(metadata).id2label == {0: "no", 1: "yes"}


def test_rotary_embeddings_are_spelt_for_both_releases():
    config = readable_config(
        HuggingFaceMetadata({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    )

    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] is None
    assert config["rope_parameters"]["rope_theta"] == 5e5


def test_a_tokenizer_of_transformers_5_is_spelt_as_4_reads_it(tmp_path):
    settings = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "extra_special_tokens": ["<x>"]}
    files = {"tokenizer_config.json": {"file_extension": ".json", "content": settings}}

    write_tokenizer(tmp_path, HuggingFaceMetadata.from_saved(content_of({}, files)))

    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written == {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<x>"]}


def test_several_chat_templates_are_kept(make_model, tokenizer, tmp_path):
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    saved = HuggingFaceModel(make_model("gpt2"), tokenizer).get_metadata()

    restored = HuggingFaceModel.load_huggingface_tokenizer_from_saved_state(saved, tokenizer_save_dir=str(tmp_path))

    assert restored.chat_template == tokenizer.chat_template


def test_a_checkpoint_without_a_tokenizer_gives_none(make_model):
    saved = HuggingFaceModel(make_model("gpt2")).get_metadata()

    assert HuggingFaceModel.load_huggingface_tokenizer_from_saved_state(saved) is None
    assert HuggingFaceModel.load_huggingface_tokenizer_from_saved_state({}) is None


def test_a_class_that_is_no_model_is_told(make_model):
    saved = HuggingFaceModel(make_model("gpt2")).get_metadata()

    with pytest.raises(AttributeError, match="not a class of a Hugging Face model"):
        HuggingFaceModel.load_huggingface_model_from_saved_state(saved, None, torch.nn.Linear)

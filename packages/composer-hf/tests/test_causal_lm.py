"""Causal language models by their path, as configurations spell them."""

import json

import pytest
import torch
import transformers

from composer_hf import ComposerHFCausalLM, hf_causal_lm


@pytest.fixture
def folder(make_model, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def test_weights_are_loaded_or_drawn(folder, tokenizer):
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    loaded = hf_causal_lm(tokenizer, name="hf_causal_lm", pretrained_model_name_or_path=folder)
    drawn = ComposerHFCausalLM(tokenizer, folder, pretrained=False)

    assert all(torch.equal(loaded.model.state_dict()[name], weight) for name, weight in saved.items())
    assert not torch.equal(drawn.model.lm_head.weight, saved["lm_head.weight"])
    assert loaded.config.use_cache is False
    assert loaded.use_logits
    assert loaded.shift_labels


def test_a_file_of_lower_precision_is_trained_in_float32(make_model, tokenizer, tmp_path):
    make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)

    model = ComposerHFCausalLM(tokenizer, str(tmp_path))

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_metrics_are_those_of_language_models_and_more(folder, tokenizer):
    model = ComposerHFCausalLM(
        tokenizer, folder, use_train_metrics=False, additional_eval_metrics=["MaskedAccuracy", "MeanMetric"]
    )

    assert model.get_metrics(is_train=True) == {}
    assert [*model.get_metrics(is_train=False)] == [
        "LanguageCrossEntropy",
        "LanguagePerplexity",
        "MaskedAccuracy",
        "MeanMetric",
    ]


def test_values_of_the_configuration_are_replaced(folder, tokenizer):
    model = ComposerHFCausalLM(tokenizer, folder, pretrained=False, config_overrides={"num_hidden_layers": 1})

    assert len(model.model.model.layers) == 1


def test_on_meta_nothing_has_memory_and_every_module_can_be_filled(folder, tokenizer):
    model = ComposerHFCausalLM(tokenizer, folder, pretrained=False, init_device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())

    # What FSDP does, but that it keeps a shard of each weight.
    rebuilt = model.model.to_empty(device="cpu") if next(model.buffers()).is_meta else model.model
    if rebuilt is model.model:
        for module in rebuilt.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_meta:
                    module._parameters[name] = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"))
    for module in rebuilt.modules():
        rebuilt.param_init_fn(module)

    frequencies = transformers.AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    assert torch.equal(rebuilt.model.rotary_emb.inv_freq, frequencies)
    assert all(weight.isfinite().all() for weight in rebuilt.parameters())


def test_an_adapter_is_described_or_loaded(folder, tokenizer, tmp_path):
    pytest.importorskip("peft")
    import warnings

    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
    described = {"peft_type": "lora", "task_type": "causal_lm", "target_modules": ["q_proj"], "r": 2}
    model = ComposerHFCausalLM(tokenizer, folder, peft_config=described)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    model.model.save_pretrained(tmp_path / "adapter")

    again = ComposerHFCausalLM(tokenizer, folder, pretrained_lora_id_or_path=str(tmp_path / "adapter"))

    assert again.using_peft
    weights = model.state_dict()
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in weights.items())
    assert any(parameter.requires_grad for parameter in again.parameters())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"init_device": "gpu"}, "init_device='gpu'"),
        ({"init_device": "meta"}, "pretrained=False"),
        ({"config_overrides": {"num_layer": 1}}, "'num_layer'"),
        ({"peft_config": {"peft_type": "IA3", "task_type": "CAUSAL_LM"}}, "peft_type='IA3'"),
        ({"additional_eval_metrics": ["Nonsense"]}, "'Nonsense'"),
        ({"use_flash_attention_2": True, "attn_implementation": "sdpa"}, "no other attention"),
        ({"peft_config": {}, "pretrained_lora_id_or_path": "x"}, "Give one of them"),
    ],
)
def test_settings_that_do_not_fit_are_told(settings, told, folder, tokenizer):
    with pytest.raises(ValueError, match=told):
        ComposerHFCausalLM(tokenizer, folder, **settings)


def test_a_model_with_a_class_of_its_own_is_refused(folder, tokenizer, tmp_path):
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "model_type": "mpt"}))

    with pytest.raises(ValueError, match="MPT"):
        ComposerHFCausalLM(tokenizer, folder)


def test_another_kind_of_model_is_refused(folder, tokenizer):
    with pytest.raises(ValueError, match="name='mpt_causal_lm'"):
        hf_causal_lm(tokenizer, name="mpt_causal_lm", pretrained_model_name_or_path=folder)


def test_code_beside_a_model_is_not_run(folder, tokenizer, tmp_path):
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    (tmp_path / "base" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")

    with pytest.raises(ValueError, match=r"trust_remote_code|own"):
        ComposerHFCausalLM(tokenizer, folder)
    assert not (tmp_path / "ran").exists()

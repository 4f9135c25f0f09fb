"""MuP and surgery on models of transformers."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from composer.functional import (
    apply_logit_softcap,
    apply_multi_token_prediction,
    apply_mup,
    apply_qk_norm,
    apply_squared_relu,
    apply_untied_head,
    apply_value_residual,
    apply_zero_init,
    multi_token_loss,
)
from composer.models import HuggingFaceModel
from composer.optim import DecoupledAdamW, Muon
from composer_algorithms import coord_check
from composer_events import NoEffectWarning

transformers = pytest.importorskip("transformers")
IDS = torch.arange(64).view(4, 16) % 31
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}


def gpt2(width, hidden_act="gelu_new", num_hidden_layers=1):
    sizes = {
        "n_embd": width,
        "n_layer": num_hidden_layers,
        "n_head": 4,
        "n_positions": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, activation_function=hidden_act, **sizes, **no_dropout)
    )


def encoder(kind, config, width, **more):
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 4 * width}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {"vocab_size": 32, "max_position_embeddings": 32, **sizes, **no_dropout, **more}
    return getattr(transformers, kind)(getattr(transformers, config)(**settings))


def llama(width, **more):
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 2 * width}
    config = transformers.LlamaConfig(
        vocab_size=32, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, **(sizes | more)
    )
    return transformers.LlamaForCausalLM(config)


FAMILIES = {
    "gpt2": gpt2,
    "bert": partial(encoder, "BertForMaskedLM", "BertConfig"),
    "roberta": partial(encoder, "RobertaForMaskedLM", "RobertaConfig"),
    "llama": llama,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_flat_with_mup_and_grow_without(family):
    def make_model(width):
        return HuggingFaceModel(FAMILIES[family](width))

    with_mup, without = (
        coord_check(make_model, BATCH, (32, 128), base_width=base, base_heads=base and 4).growth for base in (32, None)
    )
    assert max(with_mup.values()) < 0.4  # the mean over a single random vector of token types is noisy
    assert max(without.values()) > 1.0
    assert with_mup["logits"] < without["logits"]


def test_the_output_layer_of_a_classifier_is_found():
    model = encoder("BertForSequenceClassification", "BertConfig", 32, num_labels=3).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.4)
    apply_mup(model, base_width=16, optimizers=optimizer)
    rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    assert rates[id(model.classifier.weight)] == 0.4
    assert rates[id(model.bert.pooler.dense.weight)] == 0.2


def test_decay_relative_to_the_initial_rate_stays():
    model = gpt2(32)
    optimizer = DecoupledAdamW(model.parameters(), lr=0.4, weight_decay=1e-4)
    apply_mup(model, base_width=16, optimizers=optimizer)
    settings = [(group["lr"], group["initial_lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert settings == [(0.4, 0.4, 1e-4), (0.2, 0.2, 1e-4)]


@pytest.mark.parametrize(("kind", "rate"), [("match_rms_adamw", 0.2), ("original", 0.4)])
def test_muons_matrices_have_a_rate_of_their_own_and_its_other_weights_that_of_adamw(kind, rate):
    model = gpt2(64)
    optimizer = Muon(model, lr=0.4, adjust_lr_fn=kind)
    apply_mup(model, base_width=16, optimizers=optimizer)
    assert {group["role"]: group["lr"] for group in optimizer.param_groups} == {"muon": rate, "adamw": 0.4}


EACH = pytest.mark.parametrize("family", FAMILIES)


def make(family, **more):
    torch.manual_seed(0)
    return FAMILIES[family](32, **more).double().eval()


@EACH
@torch.no_grad()
def test_blocks_with_zero_initialization_are_the_identity(family):
    model = make(family)
    assert apply_zero_init(model) == 2
    (block,) = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    seen = []
    block.register_forward_hook(lambda module, arguments, output: seen.extend([arguments[0], output]))
    model(IDS)
    inputs, outputs = (each[0] if isinstance(each, tuple) else each for each in seen)
    # The norms at the end of the blocks of BERT divide by a standard deviation of 1, up to their epsilon.
    torch.testing.assert_close(outputs, inputs, rtol=1e-4, atol=1e-9)


@EACH
@torch.no_grad()
def test_with_normalized_queries_and_keys_their_length_does_not_matter(family):
    model = make(family)
    weights = [
        parameter for name, parameter in model.named_parameters() if re.search("c_attn|query|key|[qk]_proj", name)
    ]
    for weight in weights:
        weight[..., : 64 if "gpt2" in family else None] *= 50.0  # queries and keys, far above the epsilon of the norm
    assert apply_qk_norm(model, initial_scale=20.0) == 1
    expected = model(IDS).logits
    for weight in weights:
        weight[..., : 64 if "gpt2" in family else None] *= 50.0
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_normalized_scores_do_not_depend_on_the_scaling_of_the_model():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}

    def logits(scaling, apply):
        torch.manual_seed(0)
        config = transformers.GraniteConfig(vocab_size=32, attention_multiplier=scaling, initializer_range=0.5, **sizes)
        model = transformers.GraniteForCausalLM(config).double().eval()
        apply(model)
        return model(IDS).logits

    assert not torch.allclose(logits(1.0, nn.Module.eval), logits(0.1, nn.Module.eval), rtol=1e-3)
    torch.testing.assert_close(logits(1.0, apply_qk_norm), logits(0.1, apply_qk_norm))


def test_blocks_of_which_only_a_part_is_zero_are_reported():
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]}
    model = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(vocab_size=32, intermediate_size=32, **sizes))
    with pytest.warns(UserWarning, match=r"only some residual branches .* such as transformer.h.0.mlp.c_proj, "):
        assert apply_zero_init(model) == 2


def test_models_with_two_stacks_get_no_values_of_a_first_layer():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = transformers.CLIPTextConfig(**sizes, vocab_size=32, max_position_embeddings=8, eos_token_id=2)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict()))
    with pytest.warns(NoEffectWarning, match="no stack of attention layers"):
        assert apply_value_residual(clip) == 0


def test_attention_whose_queries_are_not_a_third_of_its_layer_is_left_as_it_is():
    config = transformers.GPTBigCodeConfig(vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    model = transformers.GPTBigCodeForCausalLM(config)
    with pytest.warns(NoEffectWarning, match="QKNorm has no effect"):
        assert apply_qk_norm(model) == 0
    with pytest.warns(NoEffectWarning, match="ValueResidual has no effect"):
        assert apply_value_residual(model) == 0


@EACH
@torch.no_grad()
def test_the_values_of_the_first_layer_can_replace_those_of_the_second(family):
    model = make(family, num_hidden_layers=2)
    assert apply_value_residual(model) == 1
    parameters = dict(model.named_parameters())
    (name,) = (name for name in parameters if name.endswith("value_mix"))
    parameters[name].copy_(torch.tensor([0.0, 1.0]))
    expected = model(IDS).logits
    weight = parameters[name.replace("value_mix", "weight")]
    weight[..., -32:] = 0  # values only, or all of those of layers that compute nothing else
    torch.testing.assert_close(model(IDS).logits, expected)
    parameters[name].copy_(torch.tensor([1.0, 0.0]))
    assert not torch.allclose(model(IDS).logits, expected)


@EACH
@torch.no_grad()
def test_capped_logits_and_squared_relu_are_those_of_the_formula_and_of_transformers(family):
    plain, model = make(family, hidden_act="relu2"), make(family)
    assert apply_squared_relu(model) == 1
    torch.testing.assert_close(model.base_model(IDS)[0], plain.base_model(IDS)[0])
    logits = model(IDS).logits
    assert apply_logit_softcap(model, 0.1) == 1
    torch.testing.assert_close(model(IDS).logits, 0.1 * torch.tanh(logits / 0.1))


@EACH
def test_heads_of_causal_models_predict_through_their_output_layer(family):
    model = FAMILIES[family](64).double()
    if "bert" in family:
        with pytest.warns(NoEffectWarning, match="MultiTokenPrediction has no effect"):
            assert apply_multi_token_prediction(model) == 0
        return
    wrapped, optimizer = HuggingFaceModel(model), Muon(model, lr=0.1)
    expected = model(input_ids=IDS, labels=IDS)
    assert apply_multi_token_prediction(wrapped, 2, optimizer) == 2
    roles = {id(each): group["role"] for group in optimizer.param_groups for each in group["params"]}
    assert [roles[id(each)] for each in wrapped.multi_token_heads.parameters()] == ["muon", "adamw"] * 2
    outputs = wrapped(BATCH)
    torch.testing.assert_close((outputs.loss, outputs.logits), (expected.loss, expected.logits))
    found = multi_token_loss(wrapped.multi_token_heads.take_logits(), IDS)  # its heads begin with the model's logits
    losses = [
        nn.functional.cross_entropy(outputs.logits[:, :-ahead].flatten(0, 1), IDS[:, ahead:].flatten(), reduction="sum")
        for ahead in (2, 3)
    ]
    torch.testing.assert_close(found, sum(losses) / IDS[:, 1:].numel())
    assert not any("multi_token" in name for name in model.state_dict())


@EACH
def test_muon_steps_new_parameters_with_adamw(family):
    model = make(family, num_hidden_layers=2)
    optimizer = Muon(model, lr=0.1)
    apply_qk_norm(model, optimizers=optimizer)
    apply_value_residual(model, optimizers=optimizer)
    roles = {id(each): group["role"] for group in optimizer.param_groups for each in group["params"]}
    new = {name: each for name, each in model.named_parameters() if name.endswith(("qk_scale", "value_mix"))}
    assert len(new) == 3
    assert {roles[id(each)] for each in new.values()} == {"adamw"}
    before = {name: each.detach().clone() for name, each in new.items()}
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not any(torch.equal(each, before[name]) for name, each in new.items())


@EACH
def test_untied_output_layers_have_the_state_of_the_embeddings_and_their_own_weights_in_a_folder(family, tmp_path):
    model = FAMILIES[family](32, **({"tie_word_embeddings": True} if family == "llama" else {}))
    optimizer = Muon(model, lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = model.eval()(IDS).logits
    if "bert" in family:
        with pytest.warns(NoEffectWarning, match="UntiedHead has no effect on this \\w+ForMaskedLM"):
            assert apply_untied_head(model, optimizer) == 0
        return
    assert apply_untied_head(model, optimizer) == 1
    assert torch.equal(model(IDS).logits, expected)
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    roles = {id(each): group["role"] for group in optimizer.param_groups for each in group["params"]}
    assert roles[id(head)] == "adamw"
    copied, original = optimizer.state[head], optimizer.state[embeddings]
    assert copied.keys() == original.keys()
    for name, value in original.items():
        torch.testing.assert_close(copied[name], value, rtol=0, atol=0)
        assert copied[name] is not value or not isinstance(value, torch.Tensor)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not torch.equal(head, embeddings)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert not loaded.config.tie_word_embeddings


def with_logits_of_its_own(kind, **more):
    config = getattr(transformers, f"{kind}Config")
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 16}
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config(**sizes, pad_token_id=0, **more)).train()


def test_heads_for_later_tokens_have_the_cap_that_a_model_applies_after_its_output_layer():
    model = with_logits_of_its_own("Gemma2", final_logit_softcapping=0.5, initializer_range=1.0)
    apply_multi_token_prediction(model)
    logits = model(input_ids=IDS, labels=IDS).logits
    of_heads = model.multi_token_heads.take_logits()
    assert logits.abs().max() > 0.4
    torch.testing.assert_close(of_heads, logits)  # the heads begin as the identity


def test_heads_for_later_tokens_of_a_model_that_scales_its_logits_are_refused_by_name():
    model = with_logits_of_its_own("Granite", logits_scaling=8.0)
    with pytest.raises(ValueError, match=r"GraniteForCausalLM changes its logits .*logits_scaling=8\.0"):
        apply_multi_token_prediction(model)
    assert apply_multi_token_prediction(with_logits_of_its_own("Granite", logits_scaling=1.0)) == 1

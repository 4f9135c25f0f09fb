"""MuP on models of transformers."""

import pytest
import torch

from composer.functional import apply_mup
from composer.models import HuggingFaceModel
from composer.optim import DecoupledAdamW, Muon
from composer_algorithms import coord_check

transformers = pytest.importorskip("transformers")
IDS = torch.arange(64).view(4, 16) % 31
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}


def gpt2(width):
    sizes = {"n_embd": width, "n_layer": 1, "n_head": 4, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 2}
    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, **sizes, **no_dropout))


def encoder(kind, config, width, **more):
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 4 * width}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {"vocab_size": 32, "max_position_embeddings": 32, **sizes, **no_dropout, **more}
    return getattr(transformers, kind)(getattr(transformers, config)(**settings))


def llama(width):
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 2 * width}
    config = transformers.LlamaConfig(
        vocab_size=32, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, **sizes
    )
    return transformers.LlamaForCausalLM(config)


FAMILIES = {
    "gpt2": gpt2,
    "bert": lambda width: encoder("BertForMaskedLM", "BertConfig", width),
    "roberta": lambda width: encoder("RobertaForMaskedLM", "RobertaConfig", width),
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

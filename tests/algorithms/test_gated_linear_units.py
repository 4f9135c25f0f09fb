"""Gated feed-forward layers in transformers' BERT."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel, GPT2Config, GPT2Model

import composer_algorithms.functional as cf
from composer_algorithms import GatedLinearUnits
from composer_algorithms.gated_linear_units import BERTGatedFFOutput
from composer_events import Event, State


def bert(model_class=BertModel, **settings):
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=19,
        max_position_embeddings=12,
        **settings,
    )
    return model_class(config)


def layers(model):
    return [module for module in model.modules() if isinstance(module, BERTGatedFFOutput)]


@pytest.mark.parametrize(("act_fn", "expected"), [("gelu", F.gelu), ("relu", F.relu), (torch.tanh, torch.tanh)])
def test_a_layer_computes_the_formula(act_fn, expected):
    model = bert().eval()
    cf.apply_gated_linear_units(model, act_fn=act_fn, gated_layer_bias=True)
    layer = layers(model)[0].double()
    x, residual = torch.randn(2, 3, 16, dtype=torch.double), torch.randn(2, 3, 16, dtype=torch.double)
    gate = expected(x @ layer.gated_layer.weight.T + layer.gated_layer.bias)
    hidden = gate * (x @ layer.non_gated_layer.weight.T)
    output = hidden @ layer.wo.weight.T + layer.wo.bias + residual
    normalized = (output - output.mean(-1, keepdim=True)) / (output.var(-1, correction=0, keepdim=True) + 1e-12).sqrt()
    torch.testing.assert_close(layer(x, residual), normalized)


def test_the_models_activation_size_and_initialization_are_used():
    model = bert(hidden_act="relu", initializer_range=0.5)
    cf.apply_gated_linear_units(model)
    for layer in layers(model):
        assert isinstance(layer.act, nn.ReLU)
        assert layer.gated_layer.weight.shape == layer.non_gated_layer.weight.shape == (24, 16)
        assert layer.gated_layer.bias is None
        assert layer.gated_layer.weight.std().item() == pytest.approx(0.5, rel=0.2)  # of 384 numbers
        assert not layer.wo.bias.any()
        assert layer.layernorm.eps == model.config.layer_norm_eps
    assert model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape == (1, 3, 16)


def test_a_model_inside_another_module_is_found():
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

    wrapped = Wrapper(bert(BertForSequenceClassification))
    cf.apply_gated_linear_units(wrapped)
    assert len(layers(wrapped)) == 2


def test_weights_and_biases_stay_in_their_groups_and_all_is_trained():
    model = bert()
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}, {"params": no_decay}]
    optimizer = torch.optim.AdamW(groups)
    cf.apply_gated_linear_units(model, optimizers=optimizer, gated_layer_bias=True)
    decayed, others = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert decayed | others == {id(p) for p in model.parameters()}
    for layer in layers(model):
        assert {id(one.weight) for one in (layer.gated_layer, layer.non_gated_layer, layer.wo)} <= decayed
        assert {id(one) for one in (layer.gated_layer.bias, layer.wo.bias)} <= others


def test_twice_is_once():
    model = bert()
    cf.apply_gated_linear_units(model)
    once = copy.deepcopy(model)
    cf.apply_gated_linear_units(model)
    assert str(once) == str(model)
    assert all(torch.equal(a, b) for a, b in zip(once.state_dict().values(), model.state_dict().values(), strict=True))


def test_a_model_that_is_no_bert_is_refused():
    with pytest.raises(TypeError, match="the model is a GPT2Model, and gated linear units are for BERT"):
        cf.apply_gated_linear_units(GPT2Model(GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=5)))


def test_several_kinds_of_activations_and_unknown_names_are_refused():
    model = bert()
    model.encoder.layer[0].intermediate.intermediate_act_fn = nn.ReLU()
    with pytest.raises(ValueError, match="act_fn=None takes the activation of the model"):
        cf.apply_gated_linear_units(model)
    with pytest.raises(ValueError, match="act_fn='bump' names no activation"):
        cf.apply_gated_linear_units(model, act_fn="bump")
    cf.apply_gated_linear_units(model, act_fn="gelu")


@pytest.mark.parametrize("act_fn", [None, "relu", F.relu])
def test_a_checkpoint_applies_it_by_itself(act_fn):
    def state(*algorithms):
        return State(bert(), rank_zero_seed=0, max_duration="1ep", algorithms=algorithms)

    saved, fresh = state(GatedLinearUnits(act_fn)), state()
    saved.algorithms[0].apply(Event.INIT, saved, None)
    with pytest.warns(UserWarning, match="Automatically adding required_on_load algorithm GatedLinearUnits"):
        fresh.load_state_dict(saved.state_dict(), strict=True)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(fresh.model.eval()(ids).last_hidden_state, saved.model.eval()(ids).last_hidden_state)

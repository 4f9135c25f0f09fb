"""ALiBi really biases the attention of transformers' GPT-2, BERT and RoBERTa, whatever computes the attention."""

import math

import pytest
import torch
import transformers
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    RobertaConfig,
    RobertaModel,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

import composer_algorithms.functional as cf
from composer_algorithms import Alibi
from composer_algorithms.alibi.attention_surgery_functions import policy_registry
from composer_algorithms.alibi.surgery import _attn, enlarge_mask
from composer_events import Event, State

HEADS, WIDTH, VOCABULARY = 3, 24, 31
# For 3 heads: both of 2 heads, then every other one of 4.
SLOPES = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2], dtype=torch.double)


def gpt2(implementation="eager", num_layers=1, length=16, model_class=GPT2Model):
    config = GPT2Config(
        n_embd=WIDTH,
        n_layer=num_layers,
        n_head=HEADS,
        n_positions=length,
        vocab_size=VOCABULARY,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    return model_class(config).eval()


def bert(implementation="eager", num_layers=1, length=16, model_class=BertModel, config_class=BertConfig, **settings):
    config = config_class(
        hidden_size=WIDTH,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=length,
        vocab_size=VOCABULARY,
        attn_implementation=implementation,
        **settings,
    )
    torch.manual_seed(0)
    return model_class(config).eval()


def roberta(implementation="eager", num_layers=1, length=16):
    return bert(implementation, num_layers, length + 2, RobertaModel, RobertaConfig, pad_token_id=1)


MODELS = {"gpt2": gpt2, "bert": bert, "roberta": roberta}


def tokens(batch_size=2, length=12):
    return torch.randint(3, VOCABULARY, (batch_size, length), generator=torch.Generator().manual_seed(7))


def queries_and_keys(name, model, ids):
    """Compute what the first layer's attention compares, in double precision, from the weights alone."""
    weights = {key: value.double() for key, value in model.state_dict().items()}
    if name == "gpt2":
        hidden = torch.nn.functional.layer_norm(
            weights["wte.weight"][ids], (WIDTH,), weights["h.0.ln_1.weight"], weights["h.0.ln_1.bias"], 1e-5
        )
        query, key, _ = (hidden @ weights["h.0.attn.c_attn.weight"] + weights["h.0.attn.c_attn.bias"]).split(WIDTH, -1)
    else:
        hidden = weights["embeddings.word_embeddings.weight"][ids]
        hidden = hidden + weights["embeddings.token_type_embeddings.weight"][0]
        hidden = torch.nn.functional.layer_norm(
            hidden, (WIDTH,), weights["embeddings.LayerNorm.weight"], weights["embeddings.LayerNorm.bias"], 1e-12
        )
        query, key = (
            hidden @ weights[f"encoder.layer.0.attention.self.{part}.weight"].T
            + weights[f"encoder.layer.0.attention.self.{part}.bias"]
            for part in ("query", "key")
        )
    return (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (query, key))


def expected_attention(name, model, ids, padding=None):
    query, key = queries_and_keys(name, model, ids)
    length = ids.shape[1]
    scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
    for i in range(length):
        for j in range(length):
            scores[:, :, i, j] -= SLOPES * abs(i - j)
            if name == "gpt2" and j > i:
                scores[:, :, i, j] = -math.inf
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None, :] == 0, -math.inf)
    return scores.softmax(-1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_attention_weights_are_those_of_the_closed_form(name, padded):
    model, ids = MODELS[name](), tokens()
    padding = torch.ones_like(ids)
    if padded:
        padding[1, -3:] = 0
    cf.apply_alibi(model, max_sequence_length=16)
    with torch.no_grad():
        attention = model(ids, attention_mask=padding, output_attentions=True).attentions[0]
    expected = expected_attention(name, model, ids, padding)
    torch.testing.assert_close(attention.double(), expected, atol=1e-5, rtol=0)  # float32 against float64
    assert not torch.allclose(attention.double(), expected.flip(1), atol=1e-2), "heads have different slopes"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_sdpa_computes_what_eager_computes(name, padded):
    ids = tokens()
    padding = torch.ones_like(ids)
    if padded:
        padding[1, -3:] = 0
    outputs = []
    for implementation in ("eager", "sdpa"):
        model = MODELS[name](implementation, num_layers=2)
        plain = model(ids, attention_mask=padding).last_hidden_state
        cf.apply_alibi(model, max_sequence_length=16)
        outputs.append(model(ids, attention_mask=padding).last_hidden_state)
        assert not torch.allclose(outputs[-1], plain, atol=1e-2)
    seen = padding.bool()
    torch.testing.assert_close(outputs[0][seen], outputs[1][seen], atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_earlier_tokens_matters_to_the_last_one(name, implementation):
    model, ids = MODELS[name](implementation), tokens(1)
    permuted = torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], dim=1)
    cf.apply_alibi(model, max_sequence_length=16)
    with torch.no_grad():
        last, permuted_last = (model(one).last_hidden_state[:, -1] for one in (ids, permuted))
    assert not torch.allclose(last, permuted_last, atol=1e-4)
    for module in model.modules():
        if hasattr(module, "alibi_slopes"):
            module.alibi_slopes.zero_()
    with torch.no_grad():
        last, permuted_last = (model(one).last_hidden_state[:, -1] for one in (ids, permuted))
    torch.testing.assert_close(last, permuted_last, atol=1e-5, rtol=0)  # without the bias there are no positions


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_sequences_of_the_new_length_work_and_longer_ones_than_before(name, implementation):
    model = MODELS[name](implementation, length=8)
    cf.apply_alibi(model, max_sequence_length=40)
    assert model(tokens(length=40)).last_hidden_state.shape == (2, 40, WIDTH)
    assert model.config.max_position_embeddings == 40 + (2 if name == "roberta" else 0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_decoding_with_a_cache_gives_what_the_whole_sequence_gives(implementation):
    model, ids = gpt2(implementation, num_layers=2, model_class=GPT2LMHeadModel), tokens()
    cf.apply_alibi(model, max_sequence_length=32)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :5], use_cache=True)
        middle = model(ids[:, 5:9], past_key_values=first.past_key_values, use_cache=True)
        last = model(ids[:, 9:10], past_key_values=middle.past_key_values, use_cache=True)
    parts = torch.cat([first.logits, middle.logits, last.logits], dim=1)
    torch.testing.assert_close(parts, whole[:, :10], atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_gives_the_tokens_that_the_whole_sequence_gives(implementation, cache):
    model, ids = gpt2(implementation, num_layers=2, model_class=GPT2LMHeadModel), tokens(2, 6)
    cf.apply_alibi(model, max_sequence_length=32)
    settings = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0, **settings
    )
    for length in range(6, generated.shape[1]):
        with torch.no_grad():
            expected = model(generated[:, :length]).logits[:, -1].argmax(-1)
        unfinished = (generated[:, 6:length] != 2).all(1)
        assert torch.equal(generated[unfinished, length], expected[unfinished])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_low_precision_keeps_near_tokens_apart_at_great_distances(name, implementation):
    length = 400  # bfloat16 cannot tell 399 from 400
    model = MODELS[name](implementation, length=8)
    cf.apply_alibi(model, max_sequence_length=length)
    ids = tokens(1, length)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(ids).last_hidden_state
    torch.testing.assert_close(outputs.float(), expected, atol=0.06, rtol=0)  # 8 bits through three matrix products


@pytest.mark.parametrize("name", MODELS)
def test_a_second_call_changes_the_length_only(name):
    once, twice = MODELS[name](), MODELS[name]()
    cf.apply_alibi(once, max_sequence_length=24)
    cf.apply_alibi(twice, max_sequence_length=10)
    cf.apply_alibi(twice, max_sequence_length=24)
    assert once.state_dict().keys() == twice.state_dict().keys()
    for key, tensor in once.state_dict().items():
        assert torch.equal(tensor, twice.state_dict()[key])
    assert torch.equal(once(tokens(length=24)).last_hidden_state, twice(tokens(length=24)).last_hidden_state)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_optimizer_trains_what_is_trainable_and_output_heads_stay_tied(kind):
    model = gpt2(model_class=GPT2LMHeadModel) if kind == "gpt2" else bert(model_class=BertForMaskedLM)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    cf.apply_alibi(model, max_sequence_length=24, optimizers=optimizer)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    group = optimizer.param_groups[0]
    assert {id(one) for one in group["params"]} == {id(one) for one in trainable.values()}
    assert group["param_names"] == list(trainable)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    positions = [p for n, p in model.named_parameters() if "position" in n or "wpe" in n]
    assert [(p.shape[0], p.any().item(), p.requires_grad) for p in positions] == [(24, False, False)]


def test_nothing_of_the_length_is_saved_but_the_table_of_positions():
    model = bert(length=8)
    names = set(model.state_dict())
    cf.apply_alibi(model, max_sequence_length=64)
    assert set(model.state_dict()) == names


def test_who_exports_or_reloads_a_model_with_alibi_is_told_that_transformers_does_not_know_it(tmp_path, caplog):
    from composer.models import HuggingFaceModel
    from composer_hf import HuggingFaceMetadata
    from composer_hf.publishing import write_description

    model, ids = gpt2("sdpa", model_class=GPT2LMHeadModel), tokens()
    cf.apply_alibi(model, 40)
    HuggingFaceModel(model)
    assert "from_pretrained" not in caplog.text

    model.save_pretrained(tmp_path)
    write_description(tmp_path, HuggingFaceMetadata(model.config.to_dict()))
    assert "has to call composer.functional.apply_alibi(model, max_sequence_length=40)" in caplog.text

    caplog.clear()
    reloaded = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    HuggingFaceModel(reloaded)
    assert "were trained with Alibi(" in caplog.text
    assert "Call composer.functional.apply_alibi(model, max_sequence_length=40)" in caplog.text
    with torch.no_grad():
        assert not torch.allclose(reloaded(ids).logits, model(ids).logits)
        cf.apply_alibi(reloaded, 40)
        assert torch.equal(reloaded(ids).logits, model(ids).logits)


def test_an_unsupported_model_is_left_alone_with_a_warning_in_the_log(caplog):
    assert cf.apply_alibi(torch.nn.Linear(2, 2), max_sequence_length=8) == 0
    assert "ALiBi has no effect on this Linear" in caplog.text
    assert "transformers.models.gpt2.modeling_gpt2.GPT2Attention" in caplog.text


def test_a_policy_that_is_registered_later_is_used():
    def double(module: torch.nn.Module, module_index: int, max_sequence_length: int) -> torch.nn.Module:
        module.length = max_sequence_length
        return module

    policy_registry.register(torch.nn.Linear)(double)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        cf.apply_alibi(model, max_sequence_length=8)
    finally:
        del policy_registry[torch.nn.Linear]
    assert model[0].length == 8


def test_the_call_of_the_old_documentation_works_on_a_bare_model():
    model = gpt2("sdpa", length=8)
    with pytest.warns(DeprecationWarning, match="heads_per_layer.*are not needed for this model"):
        cf.apply_alibi(
            model=model,
            heads_per_layer=HEADS,
            max_sequence_length=64,
            position_embedding_attribute="module.transformer.wpe",
            attention_module=GPT2Attention,
            attr_to_replace="_attn",
            alibi_attention=_attn,
            mask_replacement_function=enlarge_mask,
        )
    new = gpt2("sdpa", length=8)
    cf.apply_alibi(new, 64)
    assert torch.equal(model(tokens(length=64)).last_hidden_state, new(tokens(length=64)).last_hidden_state)


def test_the_algorithm_cuts_a_batch_encoding_and_leaves_the_loaders_batch_alone():
    state = State(gpt2(), rank_zero_seed=0, max_duration="1ep")
    algorithm = Alibi(max_sequence_length=16, train_sequence_length_scaling=0.25)
    ids = torch.arange(16).reshape(2, 8)
    loaded = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "label": torch.tensor([4, 5])})
    state.batch = loaded
    algorithm.apply(Event.AFTER_DATALOADER, state, None)
    assert isinstance(state.batch, BatchEncoding)
    assert state.batch["input_ids"].tolist() == [[2 * i, 2 * i + 1] for i in range(8)]
    assert state.batch["attention_mask"].shape == (8, 2)
    assert state.batch["label"].tolist() == [4, 4, 4, 4, 5, 5, 5, 5]
    assert loaded["input_ids"] is ids


def test_init_is_acted_on_once():
    state = State(gpt2(), rank_zero_seed=0, max_duration="1ep")
    algorithm = Alibi(max_sequence_length=20)
    assert algorithm.match(Event.INIT, state)
    algorithm.apply(Event.INIT, state, None)
    assert not algorithm.match(Event.INIT, state)
    assert algorithm.match(Event.AFTER_DATALOADER, state)
    assert state.model.wpe.weight.shape[0] == 20


@pytest.mark.slow  # compiles a kernel
@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 has no flex attention for these models")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers' call
@pytest.mark.parametrize("name", ["bert", "roberta"])  # transformers has no flex attention for GPT-2
def test_flex_attention_computes_what_eager_computes(name):
    ids, outputs = tokens(), []
    for implementation in ("eager", "flex_attention"):
        model = MODELS[name](implementation)
        cf.apply_alibi(model, max_sequence_length=16)
        with torch.no_grad():  # on CPUs it has no backward
            outputs.append(model(ids).last_hidden_state)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("build", [gpt2, bert, roberta])
def test_a_configuration_that_others_use_stays_as_it_was(build):
    model = build("sdpa")
    given = model.config
    before = given.to_dict()
    cf.apply_alibi(model, max_sequence_length=64)
    assert (given.to_dict(), given._attn_implementation) == (before, "sdpa")
    assert model.config.composer_alibi == {"max_sequence_length": 64}
    own = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    assert own == {id(model.config)}  # what was one is one
    plain = type(model)(given)
    assert not any(hasattr(module, "alibi_slopes") for module in plain.modules())
    assert plain(tokens())[0].isfinite().all()

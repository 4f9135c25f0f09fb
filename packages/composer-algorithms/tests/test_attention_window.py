"""The window of attention: what tokens attend to, how it grows, and that the model has its own attention at the end."""

import pytest
import torch

from composer_algorithms import AttentionWindowWarmup
from composer_algorithms.functional import attention_window
from composer_events import Engine, Event, NoEffectWarning, State
from composer_models import ComposerGPT
from composer_time import Time

SIZES = {"d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 32, "max_seq_len": 12}
IDS = torch.randint(32, (3, 12), generator=torch.Generator().manual_seed(0))


def make_gpt(**settings):
    torch.manual_seed(0)
    return ComposerGPT({**SIZES, **settings})


@pytest.mark.parametrize("attn_impl", ["torch", "flash"])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("window", [1, 3, 12])
def test_the_logits_of_a_token_depend_on_the_tokens_of_its_window_alone(window, has_mask, attn_impl):
    model = make_gpt(attn_impl=attn_impl)
    mask = {"attention_mask": torch.ones_like(IDS)} if has_mask else {}
    full = model({"input_ids": IDS, **mask})
    with attention_window(model, window):
        whole = model({"input_ids": IDS, **mask})
        for changed in range(12):
            other = IDS.clone()
            other[:, changed] = (other[:, changed] + 1) % 32
            differs = (model({"input_ids": other, **mask}) != whole).any(dim=-1).any(dim=0)
            assert differs.tolist() == [changed <= token < changed + window for token in range(12)]
    if window == 12:
        torch.testing.assert_close(whole, full)
    assert torch.equal(model({"input_ids": IDS, **mask}), full)


def test_padding_on_the_left_has_no_effect():
    model, padded = make_gpt(), torch.cat([torch.zeros(3, 4, dtype=torch.long), IDS[:, :8]], dim=1)
    mask = (torch.arange(12) >= 4).long().expand(3, 12)
    with attention_window(model, 3):
        alone = model({"input_ids": IDS[:, :8]})
        torch.testing.assert_close(model({"input_ids": padded, "attention_mask": mask})[:, 4:], alone)


@pytest.mark.parametrize(
    ("duration", "max_duration", "expected"),
    [
        ("0.5dur", "4ep", [3, 3, 6, 9, None, None, None, None]),
        ("4ba", "4ep", [3, 3, 6, 9, None, None, None, None]),
        ("1ep", "4ep", [3, 6, None, None, None, None, None, None]),
        ("12sp", "30sp", [3, 3, 6, 9, None, None, None, None]),
        (Time(0.0, "dur"), "4ep", [None] * 8),
    ],
)
def test_the_window_grows_by_training_time_and_only_training_has_it(duration, max_duration, expected):
    model = make_gpt()
    state = State(model, rank_zero_seed=0, max_duration=max_duration, dataloader=[0, 0])
    state.algorithms = [AttentionWindowWarmup(duration, 3, 12)]
    engine, seen = Engine(state), []
    engine.run_event(Event.INIT)
    for number in range(8):
        engine.run_event(Event.BATCH_START)
        seen.append(model.model.window)
        state.timestamp = state.timestamp.to_next_batch(samples=3)
        engine.run_event(Event.BATCH_END)
        assert model.model.window is None
        if number % 2:
            state.timestamp = state.timestamp.to_next_epoch()
    assert seen == expected


def test_a_batch_that_fails_leaves_no_window_to_the_rest_of_training():
    model = make_gpt()
    state = State(model, rank_zero_seed=0, max_duration="4ba", dataloader=[0, 0])
    state.algorithms = [AttentionWindowWarmup("2ba", 3, 12)]
    for batch in (0, 2):
        while state.timestamp.batch < batch:
            state.timestamp = state.timestamp.to_next_batch(samples=3)
        Engine(state).run_event(Event.BATCH_START)
    assert model.model.window is None


OF_ALL_LAYERS = ("mistral", "mixtral", "phi3", "starcoder2")
SOME_LAYERS = ("qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss")


def make_model(kind, window):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    sizes |= {"intermediate_size": 32}
    sizes |= {
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "pad_token_id": 0,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
    }
    if kind in SOME_LAYERS:
        sizes |= {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    config = transformers.AutoConfig.for_model(kind, sliding_window=window, **sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "own"),
    [*((kind, None) for kind in OF_ALL_LAYERS), *((kind, 8) for kind in (*OF_ALL_LAYERS, *SOME_LAYERS))],
)
def test_models_of_transformers_have_the_window_of_a_configured_one(kind, own):
    model = make_model(kind, own)
    before = model(IDS).logits
    with attention_window(model, 3) as num_changed:
        assert num_changed >= 1
        found = model(IDS).logits
    assert torch.equal(found, make_model(kind, 3)(IDS).logits)
    assert not torch.equal(found, before)
    assert torch.equal(model(IDS).logits, before)
    assert model.config.sliding_window == own


def test_without_windows_it_has_no_effect():
    state = State(torch.nn.Linear(2, 2), rank_zero_seed=0, max_duration="4ba", dataloader=[0])
    state.algorithms = [AttentionWindowWarmup()]
    with pytest.warns(NoEffectWarning, match="AttentionWindowWarmup has no effect on this Linear"):
        Engine(state).run_event(Event.INIT)


def test_impossible_windows_are_refused_by_name():
    with pytest.raises(ValueError, match="final_window=8 is not in"):
        AttentionWindowWarmup("1ba", 8, 8)
    with pytest.raises(ValueError, match="duration='half' is not a time"):
        AttentionWindowWarmup("half")

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from composer_models import GPT, ComposerGPT, GPTBlock, GPTConfig

SETTINGS = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 50, "max_seq_len": 16}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ComposerGPT(SETTINGS).eval()


def random_batch(batch=2, tokens=10, seed=0):
    ids = torch.randint(50, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def plain_gpt(gpt, ids):
    """Compute one sequence of a GPT token by token, head by head."""
    x = gpt.wte.weight[ids] + gpt.wpe.weight[: len(ids)]
    for block in gpt.blocks:
        normed = F.layer_norm(x, (32,), block.ln_1.weight, block.ln_1.bias)
        q, k, v = (normed @ block.attn.qkv.weight.T + block.attn.qkv.bias).chunk(3, dim=-1)
        mixed = torch.zeros_like(x)
        for token in range(len(ids)):
            for head in range(4):
                depth = slice(8 * head, 8 * head + 8)
                scores = k[: token + 1, depth] @ q[token, depth] / math.sqrt(8)
                mixed[token, depth] = scores.softmax(dim=0) @ v[: token + 1, depth]
        x = x + mixed @ block.attn.out.weight.T + block.attn.out.bias
        normed = F.layer_norm(x, (32,), block.ln_2.weight, block.ln_2.bias)
        hidden = normed @ block.mlp[0].weight.T + block.mlp[0].bias
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + hidden @ block.mlp[2].weight.T + block.mlp[2].bias
    return F.layer_norm(x, (32,), gpt.ln_f.weight, gpt.ln_f.bias) @ gpt.wte.weight.T


def test_logits_are_those_of_a_plain_implementation(model):
    batch = random_batch()
    expected = torch.stack([plain_gpt(model.model, ids) for ids in batch["input_ids"]])
    torch.testing.assert_close(model(batch), expected)


def test_later_tokens_do_not_reach_earlier_ones(model):
    batch, changed = random_batch(), random_batch()
    changed["input_ids"][:, 6:] = 0
    torch.testing.assert_close(model(changed)[:, :6], model(batch)[:, :6])
    assert not torch.allclose(model(changed)[:, 6:], model(batch)[:, 6:])


@pytest.mark.parametrize("padding", [slice(0, 3), slice(7, 10)], ids=["left", "right"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding_does_not_reach_real_tokens(model, padding, dtype):
    batch, changed = random_batch(), random_batch()
    mask = torch.ones(2, 10, dtype=dtype)
    mask[:, padding] = 0
    changed["input_ids"][:, padding] = 0
    logits, others = (model({**b, "attention_mask": mask}) for b in (batch, changed))
    torch.testing.assert_close(logits[mask.bool()], others[mask.bool()])
    assert logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("padding", [1, 4, 6])
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_a_padded_sequence_are_those_of_the_bare_one(model, side, padding, dtype):
    ids = random_batch()["input_ids"]
    width = (padding, 0) if side == "left" else (0, padding)
    mask = F.pad(torch.ones(2, 10), width).to(dtype)
    padded = model({"input_ids": F.pad(ids, width), "attention_mask": mask})
    torch.testing.assert_close(padded[mask.bool()].view(2, 10, -1), model({"input_ids": ids}))


def test_a_mask_of_ones_changes_nothing(model):
    batch = random_batch()
    masked = model({**batch, "attention_mask": torch.ones(2, 10)})
    torch.testing.assert_close(masked, model(batch))


def test_flash_attention_needs_no_mask_for_padding_on_the_right(model):
    flash = ComposerGPT({**SETTINGS, "attn_impl": "flash"}).eval()
    flash.load_state_dict(model.state_dict())
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[:, 7:] = 0
    batch = {**random_batch(), "attention_mask": mask}
    torch.testing.assert_close(flash(batch)[:, :7], model(batch)[:, :7])


def test_the_target_of_a_token_is_the_next_label(model):
    batch = random_batch()
    batch["labels"][0, 3] = -100
    logits = model(batch)
    losses = [
        F.cross_entropy(logits[i, t], batch["labels"][i, t + 1])
        for i in range(2)
        for t in range(9)
        if (i, t + 1) != (0, 3)
    ]
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(model.loss(logits, batch), expected)
    metrics = model.get_metrics(is_train=False)
    for metric in metrics.values():
        model.update_metric(batch, logits, metric)
    torch.testing.assert_close(metrics["LanguageCrossEntropy"].compute(), expected)
    torch.testing.assert_close(metrics["LanguagePerplexity"].compute(), expected.exp())


def test_computing_the_loss_leaves_the_batch_alone(model):
    batch = random_batch()
    before = copy.deepcopy(batch)
    model.loss(model(batch), batch)
    assert torch.equal(batch["labels"], before["labels"])


def test_embeddings_and_output_share_one_matrix(model):
    model(random_batch()).sum().backward()
    assert [name for name in model.state_dict() if "wte" in name] == ["model.wte.weight"]
    assert not any("head" in name for name in model.state_dict())
    assert model.model.wte.weight.grad is not None


@pytest.mark.parametrize(
    "cfg", [SETTINGS, SimpleNamespace(**SETTINGS, verbose=True), GPTConfig(**SETTINGS), {**SETTINGS, "name": "gpt"}]
)
def test_settings_come_as_a_mapping_an_object_or_a_config(cfg):
    assert ComposerGPT(cfg).model.config == GPTConfig(**SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 30}, "d_model=30 cannot be split over n_heads=4"),
        ({"n_layers": 0}, "n_layers=0 must be a whole number"),
        ({"vocab_size": 5.5}, r"vocab_size=5\.5 must be a whole number"),
        ({"emb_pdrop": 1.0}, r"emb_pdrop=1\.0 must be a rate"),
        ({"init_std": 0}, "init_std=0 must be positive"),
        ({"mlp_ratio": math.inf}, "mlp_ratio=inf must be positive and finite"),
        ({"resid_pdrop": math.nan}, "resid_pdrop=nan must be a rate"),
        ({"attn_impl": "triton"}, "attn_impl='triton' is not known"),
        ({"mlp_ration": 2}, r"entries \['mlp_ration'\], which a GPT does not have.*mlp_ratio"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ComposerGPT({**SETTINGS, **change})


@pytest.mark.parametrize("value", [True, "1"])
@pytest.mark.parametrize("name", ["d_model", "max_seq_len", "mlp_ratio", "init_std", "attn_pdrop"])
def test_bools_and_strings_are_no_numbers(name, value):
    message = f"{name}={value!r} must be a number, without quotes; got a {type(value).__name__}"
    with pytest.raises(TypeError, match=message):
        ComposerGPT({**SETTINGS, name: value})


def test_missing_settings_are_named():
    with pytest.raises(ValueError, match="lacks n_heads, max_seq_len"):
        ComposerGPT({"d_model": 32, "n_layers": 2, "vocab_size": 50})


def test_sequences_that_are_too_long_are_refused(model):
    with pytest.raises(ValueError, match="17 tokens in a sequence and the model positions for max_seq_len=16"):
        model(random_batch(tokens=17))


def check_initial_weights(gpt, init_std, n_layers):
    for name, module in gpt.named_modules():
        if isinstance(module, nn.Linear):
            is_residual = name.endswith(("attn.out", "mlp.2"))
            expected = init_std / math.sqrt(2 * n_layers) if is_residual else init_std
            # At least 4096 samples each: the standard deviation is known to about 1 %.
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05), name
            assert (module.bias == 0).all()
        elif isinstance(module, nn.Embedding):
            assert module.weight.std().item() == pytest.approx(init_std, rel=0.05), name
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def test_weights_start_normal_and_smaller_into_the_residual_stream():
    torch.manual_seed(0)
    check_initial_weights(GPT(GPTConfig(**{**SETTINGS, "d_model": 64, "max_seq_len": 64, "init_std": 0.1})), 0.1, 2)


def test_a_model_on_the_meta_device_is_filled_module_by_module():
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**{**SETTINGS, "d_model": 64, "max_seq_len": 64, "device": "meta"}))
    assert all(parameter.is_meta for parameter in gpt.parameters())
    gpt.to_empty(device="cpu")
    for module in gpt.modules():
        gpt.param_init_fn(module)
    check_initial_weights(gpt, 0.02, 2)


def test_blocks_are_the_units_of_sharding_and_of_checkpointing(model):
    gpt = model.model
    blocks = [module for module in gpt.modules() if isinstance(module, GPTBlock)]
    assert len(blocks) == 2
    assert [module for module in gpt.modules() if gpt.fsdp_wrap_fn(module)] == blocks
    assert [module for module in gpt.modules() if gpt.activation_checkpointing_fn(module)] == blocks


def test_flops_are_six_for_each_parameter_and_token_and_those_of_attention(model):
    d, n, v, s = 32, 2, 50, 16
    block = 2 * 2 * d + (3 * d * d + 3 * d) + (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d)
    parameters = v * d + s * d + n * block + 2 * d
    batch, tokens = 2, 10
    attention = 12 * n * d * tokens
    assert model.flops_per_batch(random_batch(batch, tokens)) == batch * tokens * (6 * parameters + attention)


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = ComposerGPT({**SETTINGS, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "emb_pdrop": 0.5})
    batch = random_batch()
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


# The largest rate below 1: all but certainly nothing passes.
NEARLY_ALL = math.nextafter(1, 0)


def training_gpt(**rates):
    torch.manual_seed(0)
    return GPT(GPTConfig(**SETTINGS, **rates)).train()


def test_dropping_embeddings_hides_the_tokens():
    gpt = training_gpt(emb_pdrop=NEARLY_ALL)
    logits, others = (gpt(random_batch(seed=seed)["input_ids"]) for seed in (0, 1))
    assert torch.equal(logits, others)


def test_dropping_what_blocks_add_leaves_the_embeddings():
    gpt, ids = training_gpt(resid_pdrop=NEARLY_ALL), random_batch()["input_ids"]
    embedded = gpt.wte(ids) + gpt.wpe.weight[:10]
    torch.testing.assert_close(gpt(ids), gpt.ln_f(embedded) @ gpt.wte.weight.T)


def test_dropping_attention_weights_separates_the_tokens_and_leaves_the_mlp():
    gpt, ids = training_gpt(attn_pdrop=NEARLY_ALL), random_batch()["input_ids"]
    x = gpt.wte(ids) + gpt.wpe.weight[:10]
    for block in gpt.blocks:
        x = x + block.attn.out.bias
        x = x + block.mlp(block.ln_2(x))
    torch.testing.assert_close(gpt(ids), gpt.ln_f(x) @ gpt.wte.weight.T)


def test_a_few_steps_learn_a_sequence_by_heart():
    torch.manual_seed(0)
    model, batch = ComposerGPT(SETTINGS), random_batch(batch=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 < math.log(50)

"""Surgery on ComposerGPT: zero initialization, normalized queries and keys, capped logits, squared ReLU."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import composer_algorithms
import composer_algorithms.functional as cf
from composer_events import Event, NoEffectWarning, State
from composer_models import ComposerGPT

WIDTH, HEADS, LENGTH = 16, 2, 8
IDS = torch.arange(32).view(4, LENGTH)
BATCH = {"input_ids": IDS, "labels": IDS}
SIZES = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": 2, "vocab_size": 32, "max_seq_len": LENGTH, "init_std": 0.5}
FUNCTIONS = {
    "ZeroInit": cf.apply_zero_init,
    "QKNorm": cf.apply_qk_norm,
    "ValueResidual": cf.apply_value_residual,
    "LogitSoftcap": cf.apply_logit_softcap,
    "SquaredReLU": cf.apply_squared_relu,
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)


def gpt(**more):
    torch.manual_seed(0)
    return ComposerGPT({**SIZES, **more}).double()


def inputs():
    return torch.randn(3, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_with_zero_initialization_each_block_is_the_identity_and_then_learns():
    model = gpt()
    assert cf.apply_zero_init(model) == 4
    for block in model.model.blocks:
        assert torch.equal(block(inputs()), inputs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.loss(model(BATCH), BATCH).backward()
    optimizer.step()
    for block in model.model.blocks:
        assert all(block.get_parameter(name).any() for name in ("attn.out.weight", "mlp.2.weight"))


@pytest.mark.parametrize("initial_scale", [None, 5.0])
def test_attention_is_that_of_queries_and_keys_of_length_1(initial_scale):
    model = gpt()
    cf.apply_qk_norm(model, initial_scale)
    attention, x = model.model.blocks[0].attn, inputs()
    size = WIDTH // HEADS
    scale = attention.qkv.qk_scale.detach()
    assert scale.item() == (math.sqrt(size) if initial_scale is None else initial_scale)
    expected = []
    queries, keys, values = (x @ attention.qkv.weight.T + attention.qkv.bias).split(WIDTH, dim=-1)
    for head in range(HEADS):
        q, k, v = (each[..., head * size : (head + 1) * size] for each in (queries, keys, values))
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6 * size).sqrt() for each in (q, k))
        scores = scale * q @ k.transpose(1, 2)
        assert scores.abs().max() <= scale
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
        expected.append(scores.softmax(dim=-1) @ v)
    torch.testing.assert_close(attention(x), attention.out(torch.cat(expected, dim=-1)))


def test_later_layers_attend_to_a_mixture_with_the_values_of_the_first():
    model, seen = gpt(n_layers=3), []
    assert cf.apply_value_residual(model) == 2
    attentions = [block.attn for block in model.model.blocks]
    assert [hasattr(each.qkv, "value_mix") for each in attentions] == [False, True, True]
    assert torch.equal(attentions[1].qkv.value_mix.detach(), torch.tensor([0.5, 0.5], dtype=torch.float64))
    with torch.no_grad():
        attentions[2].qkv.value_mix.copy_(torch.tensor([0.25, 2.0]))
    for attention in attentions:
        attention.register_forward_hook(lambda module, arguments, output: seen.append((arguments[0], output)))
    model(BATCH)
    parts = [
        (x @ each.qkv.weight.T + each.qkv.bias).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        for each, (x, _) in zip(attentions, seen, strict=True)
    ]
    queries, keys, values = parts[2]
    mixed = nn.functional.scaled_dot_product_attention(queries, keys, 0.25 * values + 2 * parts[0][2], is_causal=True)
    torch.testing.assert_close(seen[2][1], attentions[2].out(mixed.transpose(1, 2).flatten(2)))


def test_the_values_of_the_first_layer_survive_activation_checkpointing():
    def gradients(is_checkpointed, use_reentrant=False):
        model = gpt(n_layers=3)
        cf.apply_value_residual(model)
        if is_checkpointed:
            for block in model.model.blocks:
                forward = block.forward
                block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=use_reentrant)
        loss = model.loss(model(BATCH), BATCH)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(gradients(is_checkpointed=True), gradients(is_checkpointed=False))
    # It would leave out the gradients of the first layer's values.
    with pytest.raises(RuntimeError, match="ValueResidual needs activation checkpointing with use_reentrant=False"):
        gradients(is_checkpointed=True, use_reentrant=True)


def test_the_cap_bounds_logits_with_the_derivative_of_tanh():
    plain, model, cap = gpt(), gpt(), 2.0
    assert cf.apply_logit_softcap(model, cap) == 1
    logits = plain(BATCH).detach()
    assert logits.abs().max() > cap
    torch.testing.assert_close(model(BATCH), cap * torch.tanh(logits / cap))
    weights = torch.randn_like(logits)
    # d(cap * tanh(x / cap)) / dx = 1 - tanh(x / cap)^2
    derivative = 1 - torch.tanh(logits / cap) ** 2
    expected = torch.autograd.grad(plain(BATCH), list(plain.parameters()), weights * derivative)
    torch.testing.assert_close(torch.autograd.grad(model(BATCH), list(model.parameters()), weights), expected)


def test_feed_forward_layers_have_the_squared_relu():
    model, x = gpt(), inputs()
    assert cf.apply_squared_relu(model) == 2
    first, _, last = mlp = model.model.blocks[0].mlp
    torch.testing.assert_close(mlp(x), last(first(x).clamp(min=0) ** 2))


@EACH
def test_a_second_call_changes_nothing_and_copies_compute_the_same(name):
    model = gpt()
    FUNCTIONS[name](model)
    expected = model(BATCH)
    FUNCTIONS[name](model)
    assert torch.equal(model(BATCH), expected)
    assert torch.equal(copy.deepcopy(model)(BATCH), expected)


def test_all_of_them_compile_without_a_break():
    model = gpt()
    for function in list(FUNCTIONS.values())[1:]:  # outputs of blocks that start at zero would hide the others
        function(model)
    torch.compiler.reset()  # torch does not check hooks before it reuses what it compiled for another model
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(BATCH), model(BATCH))


@EACH
def test_the_outputs_keep_the_dtype_of_autocast(name):
    model = gpt().float()
    FUNCTIONS[name](model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(BATCH)
    assert logits.dtype is torch.bfloat16
    torch.testing.assert_close(logits.float(), model(BATCH), rtol=0.1, atol=0.5)


@EACH
def test_a_model_without_such_a_part_is_left_alone_with_a_warning(name):
    with pytest.warns(NoEffectWarning, match=f"{name} has no effect on this Linear: .* Use ComposerGPT or") as warned:
        assert FUNCTIONS[name](nn.Linear(2, 2)) == 0
    assert warned[0].filename == __file__


@pytest.mark.parametrize("is_named", [False, True])
def test_the_scale_of_scores_is_trained_with_biases_and_norms(is_named):
    model = gpt()
    parameters = list(model.named_parameters()) if is_named else list(enumerate(model.parameters()))
    groups = [[each for each in parameters if (each[1].ndim >= 2) is is_matrix] for is_matrix in (True, False)]
    groups = groups if is_named else [[parameter for _, parameter in group] for group in groups]
    optimizer = torch.optim.AdamW(
        [{"params": group, "lr": rate} for group, rate in zip(groups, (0.1, 0.2), strict=True)]
    )
    state = State(model, rank_zero_seed=0, max_duration="1ep", optimizers=optimizer)
    composer_algorithms.QKNorm().apply(Event.INIT, state, None)
    assert [{parameter.ndim for parameter in group["params"]} for group in optimizer.param_groups] == [{2}, {1}]
    assert len({id(parameter) for group in optimizer.param_groups for parameter in group["params"]}) == len(
        list(model.parameters())
    )
    if is_named:
        assert "model.blocks.1.attn.qkv.qk_scale" in optimizer.param_groups[1]["param_names"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cf.apply_zero_init(gpt(device="meta")), "on the meta device. Initialize them"),
        (lambda: cf.apply_qk_norm(gpt(), 0), "initial_scale=0"),
        (lambda: composer_algorithms.QKNorm(-1.0), r"initial_scale=-1\.0"),
        (lambda: cf.apply_logit_softcap(gpt(), 0), "cap=0"),
        (lambda: composer_algorithms.LogitSoftcap(-1.0), r"cap=-1\.0"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_names_in_the_log_stay_the_same():
    methods = (getattr(composer_algorithms, name) for name in composer_algorithms.__all__)
    found = {each.__name__: each.counted for each in methods if hasattr(each, "counted")}
    assert found == {
        "DiracInit": "dirac_init/num_convolutions",
        "LogitSoftcap": "logit_softcap/num_output_layers",
        "QKNorm": "qk_norm/num_attention_layers",
        "SquaredReLU": "squared_relu/num_layers",
        "ValueResidual": "value_residual/num_attention_layers",
        "WhiteningInit": "whitening_init/num_filters",
        "ZeroInit": "zero_init/num_layers",
    }

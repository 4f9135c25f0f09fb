"""MuP on ComposerGPT: rates, initial weights, and activations that do not depend on the width."""

import copy

import pytest
import torch
from torch import nn

from composer_algorithms import MuP, coord_check
from composer_algorithms.functional import apply_mup
from composer_models import ComposerGPT

VOCABULARY, LENGTH = 32, 8
IDS = torch.arange(32).view(4, LENGTH)
BATCH = {"input_ids": IDS, "labels": IDS}
HIDDEN = ("qkv.weight", "out.weight", "mlp.0.weight", "mlp.2.weight")


def gpt(width=64, n_heads=4):
    torch.manual_seed(0)
    return ComposerGPT(
        {"d_model": width, "n_heads": n_heads, "n_layers": 1, "vocab_size": VOCABULARY, "max_seq_len": LENGTH}
    )


def is_hidden(name):
    return name.endswith(HIDDEN)


def settings_by_name(model, optimizer):
    of_parameter = {
        id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    return {name: of_parameter[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("make_optimizer", "hidden", "others"),
    [
        (lambda params: torch.optim.AdamW(params, lr=0.8, weight_decay=0.1), (0.2, 0.4), (0.8, 0.1)),
        (lambda params: torch.optim.SGD(params, lr=0.8, weight_decay=0.4), (0.8, 0.4), (3.2, 0.1)),
    ],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_each_weight_has_the_rate_of_table_8(make_optimizer, hidden, others, is_named):
    model = gpt()
    optimizer = make_optimizer(model.named_parameters() if is_named else model.parameters())
    apply_mup(model, base_width=16, optimizers=optimizer)
    assert settings_by_name(model, optimizer) == {
        name: hidden if is_hidden(name) else others for name, _ in model.named_parameters()
    }
    if is_named:
        names = {name for group in optimizer.param_groups for name in group["param_names"]}
        assert names == dict(model.named_parameters()).keys()


@pytest.mark.parametrize(("kind", "expected"), [("match_rms_adamw", (0.4, 0.2)), ("original", (0.8, 0.1))])
def test_muons_rates_depend_on_the_size_of_its_updates(kind, expected):
    model = gpt()
    matrices = [parameter for name, parameter in model.named_parameters() if is_hidden(name)]
    optimizer = torch.optim.Muon(matrices, lr=0.8, weight_decay=0.1, adjust_lr_fn=kind)
    apply_mup(model, base_width=16, optimizers=optimizer)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [expected]


def test_hidden_matrices_shrink_and_the_logits_are_divided():
    plain, model = gpt(), gpt()
    apply_mup(model, base_width=16)
    before, after = dict(plain.named_parameters()), dict(model.named_parameters())
    for name, weight in after.items():
        assert torch.equal(weight, before[name] / 2 if is_hidden(name) else before[name])
    with torch.no_grad():
        for name, weight in after.items():
            weight.copy_(before[name])
    assert torch.allclose(model(BATCH), plain(BATCH) / 4, rtol=1e-5, atol=1e-7)


def test_heads_that_grow_have_smaller_scores():
    plain, model = gpt(), gpt()
    apply_mup(model, base_width=16, base_heads=4)
    inputs = torch.randn(2, LENGTH, 64)
    attentions = [each.model.blocks[0].attn for each in (plain, model)]
    queries, scaled = (attention.qkv(inputs).chunk(3, dim=-1)[0] for attention in attentions)
    # Halved with the weights, and by the root of 4 / 16, the sizes of the heads.
    assert torch.allclose(scaled, queries / 2 * (4 / 16) ** 0.5, rtol=1e-5)


def test_nothing_changes_at_the_base_width():
    plain, model = gpt(), gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    apply_mup(model, base_width=64, base_heads=4, optimizers=optimizer)
    assert torch.equal(model(BATCH), plain(BATCH))
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}


def test_a_second_call_changes_only_a_new_optimizer_and_a_copy_computes_the_same():
    model = gpt()
    apply_mup(model, base_width=16)
    outputs = model(BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.8)
    apply_mup(model, base_width=16, optimizers=optimizer)
    assert sorted(group["lr"] for group in optimizer.param_groups) == [0.2, 0.8]
    assert torch.equal(model(BATCH), outputs)
    assert torch.equal(copy.deepcopy(model)(BATCH), outputs)


def make_model(width):
    return gpt(width, n_heads=width // 16)


def test_activations_are_flat_with_mup_and_grow_without():
    widths = (64, 128, 256, 512, 1024)
    with_mup = coord_check(make_model, BATCH, widths, base_width=64)
    without = coord_check(make_model, BATCH, widths)
    assert max(with_mup.growth.values()) < 0.15
    assert max(without.growth.values()) > 1.0
    assert without.growth["logits"] > 0.5 > abs(with_mup.growth["logits"]) + 0.3
    assert str(with_mup).splitlines()[0].split() == ["layer", "growth", *map(str, widths)]


def test_the_check_leaves_the_random_state_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    coord_check(make_model, BATCH, (16, 32), num_steps=1)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: apply_mup(nn.Linear(4, 4), 16), "does not know how Linear is initialized. Use ComposerGPT"),
        (lambda: apply_mup(gpt(), 16, optimizers=torch.optim.Rprop(gpt().parameters())), "not of Rprop. Use one of"),
        (lambda: apply_mup(gpt(), 0), "base_width=0"),
        (lambda: MuP(16, base_heads=-1), "base_heads=-1"),
        (lambda: apply_mup(gpt().to("meta"), 16), "on the meta device"),
        (lambda: coord_check(make_model, BATCH, (64,)), r"widths=\(64,\) must be two or more"),
    ],
)
def test_what_cannot_be_parametrized_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()

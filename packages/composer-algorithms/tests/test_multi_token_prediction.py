"""Heads for the tokens after the next one: their loss, the models they are added to, and the optimizer."""

import copy
import math

import pytest
import torch
from torch import nn

import composer_algorithms.functional as cf
from composer_algorithms import MultiTokenPrediction
from composer_events import Event, NoEffectWarning, State
from composer_models import ComposerGPT

LENGTH, VOCABULARY = 6, 11
SIZES = {"d_model": 8, "n_heads": 2, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": LENGTH, "init_std": 0.5}
IDS = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.tensor([[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]]).bool(), -100)
BATCH = {"input_ids": IDS, "labels": LABELS}


def gpt(**more):
    torch.manual_seed(0)
    return ComposerGPT({**SIZES, **more}).double()


@pytest.mark.parametrize("num_extra_tokens", [1, 3])
def test_each_head_has_the_cross_entropy_of_its_token_through_the_output_layer(num_extra_tokens):
    model, hidden = gpt(), []
    plain = model(BATCH)
    assert cf.apply_multi_token_prediction(model, num_extra_tokens) == num_extra_tokens
    heads, network = model.multi_token_heads, model.model
    for head in heads:
        nn.init.normal_(head.linear.weight)
        nn.init.normal_(head.linear.bias)
    network.ln_f.register_forward_pre_hook(lambda module, arguments: hidden.append(arguments[0]))
    torch.testing.assert_close(model(BATCH), plain)
    x = nn.functional.layer_norm(hidden[0], (8,), network.ln_f.weight, network.ln_f.bias)
    expected = 0.0
    for number, head in enumerate(heads, 1):
        z = x @ head.linear.weight.T + head.linear.bias
        z = x + z / (1 + torch.exp(-z))
        log_p = (z @ network.wte.weight.T).log_softmax(dim=-1)
        terms = [
            -log_p[row, place, LABELS[row, place + number + 1]]
            for row in range(2)
            for place in range(LENGTH - number - 1)
            if LABELS[row, place + number + 1] != -100
        ]
        expected = expected + sum(terms) / 9  # next-token targets
    found = cf.multi_token_loss(heads.take_logits(), LABELS)
    torch.testing.assert_close(found, expected)
    parameters = list(model.parameters())
    for one, other in zip(
        *(torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_head_without_tokens_to_predict_adds_nothing():
    logits = torch.randn(3 * 2, 2, VOCABULARY, requires_grad=True)
    loss = cf.multi_token_loss(logits, IDS[:, :2])
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


def test_packed_documents_are_not_predicted_from_each_other():
    logits = torch.randn(2, 7, VOCABULARY, dtype=torch.float64)  # of two heads
    labels, positions = torch.tensor([[0, 1, 2, 3, -100, 5, 6]]), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    alone = [cf.multi_token_loss(logits[:, part], labels[:, part]) for part in (slice(0, 4), slice(4, 7))]
    expected = (3 * alone[0] + 2 * alone[1]) / 5  # weighted by next-token targets
    torch.testing.assert_close(cf.multi_token_loss(logits, labels, positions), expected)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("num_heads", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(1, 3), (2, 2), (1, 1, 1, 1)], ids=str)
def test_microbatches_weighted_by_next_token_targets_have_the_loss_of_the_batch(sizes, num_heads, is_packed):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_heads, 4, 7, VOCABULARY, dtype=torch.float64, generator=generator)
    labels = torch.randint(VOCABULARY, (4, 7), generator=generator)
    labels[0, 2:], labels[1, :3] = -100, -100
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2]).expand(4, -1) if is_packed else None
    if is_packed:
        labels[:, 4] = -100
    weighted, start = 0.0, 0
    for size in sizes:
        rows = slice(start, start := start + size)
        own = None if positions is None else positions[rows]
        loss = cf.multi_token_loss(logits[:, rows].flatten(0, 1), labels[rows], own)
        weighted += loss * (labels[rows, 1:] != -100).sum()
    expected = cf.multi_token_loss(logits.flatten(0, 1), labels, positions)
    torch.testing.assert_close(weighted / (labels[:, 1:] != -100).sum(), expected)


def test_heads_begin_with_the_logits_of_the_next_token_and_only_exist_in_training():
    model = gpt()
    cf.apply_multi_token_prediction(model)
    model.model.register_forward_hook(lambda module, arguments, logits: seen.append(logits))
    seen = []
    logits = model(BATCH)
    assert torch.equal(model.multi_token_heads.take_logits(), logits)
    model.eval()
    assert torch.equal(model(BATCH), logits)
    with pytest.raises(RuntimeError, match="multi_token_heads have no logits"):
        model.multi_token_heads.take_logits()


def test_a_second_call_changes_nothing_and_copies_have_their_own_heads():
    model = gpt()
    for _ in range(2):
        assert cf.apply_multi_token_prediction(model, 2) == 2
    model(BATCH)
    copied = copy.deepcopy(model)
    nn.init.normal_(copied.multi_token_heads[0].linear.weight)
    logits = copied(BATCH)
    assert logits.shape == (2, LENGTH, VOCABULARY)
    first, second = copied.multi_token_heads.take_logits().chunk(2)
    assert torch.equal(second, logits)
    assert not torch.allclose(first, logits)


def test_a_cap_of_the_logits_holds_for_the_heads():
    model = gpt()
    for function in (cf.apply_logit_softcap, cf.apply_multi_token_prediction):
        function(model)
    model.model.wte.weight.data.mul_(1000)
    model(BATCH)
    assert model.multi_token_heads.take_logits().abs().max() <= 30


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_the_loss_in_training_is_the_sum_and_heads_are_trained_with_their_kind(coefficient):
    model = gpt()
    groups = [[each for each in model.parameters() if (each.ndim >= 2) is is_matrix] for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    state = State(model, rank_zero_seed=0, max_duration="1ep", optimizers=optimizer)
    algorithm = MultiTokenPrediction(2, coefficient)
    algorithm.apply(Event.INIT, state, None)
    assert [{parameter.ndim for parameter in group["params"]} for group in optimizer.param_groups] == [{2}, {1}]
    assert len(list(model.parameters())) == sum(len(group["params"]) for group in optimizer.param_groups)
    state.batch, state.outputs = BATCH, model(BATCH)
    own = cf.multi_token_loss(model.multi_token_heads.kept.value, LABELS)
    state.loss = torch.tensor(2.0)
    algorithm.apply(Event.BEFORE_BACKWARD, state, None)
    torch.testing.assert_close(state.loss, 2 + coefficient * own)
    state.batch = {"input_ids": IDS}
    with pytest.raises(ValueError, match="MultiTokenPrediction needs 'labels' in the batch"):
        algorithm.apply(Event.BEFORE_BACKWARD, state, None)


def test_it_compiles_without_a_break():
    model = gpt()
    cf.apply_multi_token_prediction(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(BATCH), model(BATCH))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cf.apply_multi_token_prediction(gpt(), 0), "num_extra_tokens=0"),
        (lambda: MultiTokenPrediction(0), "num_extra_tokens=0"),
        (lambda: MultiTokenPrediction(coefficient=-1.0), r"coefficient=-1\.0"),
        (lambda: MultiTokenPrediction(coefficient=math.nan), "coefficient=nan"),
        (lambda: cf.apply_multi_token_prediction(gpt(device="meta")), "on the meta device. Initialize them"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_other_models_are_left_alone_with_a_warning():
    with pytest.warns(NoEffectWarning, match="MultiTokenPrediction has no effect on this Linear"):
        assert cf.apply_multi_token_prediction(nn.Linear(2, 2)) == 0

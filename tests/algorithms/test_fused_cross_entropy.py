"""FusedCrossEntropy: the loss, gradients and metrics of a language model with logits, without them."""

import copy
import math
import pickle

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from composer import Engine, Event, State, Trainer
from composer.algorithms import FusedCrossEntropy, LabelSmoothing, LogitSoftcap, MultiTokenPrediction, ZLoss
from composer.functional import apply_factorization, apply_fused_cross_entropy, apply_logit_softcap
from composer.models import ComposerGPT, HuggingFaceModel
from composer_dist.testing import run_ranks
from composer_events import NoEffectWarning
from composer_models import BinaryF1Score, LanguageCrossEntropy, MaskedAccuracy, linear_cross_entropy

VOCABULARY, LENGTH = 32, 8
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OF_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "GPT2LMHeadModel": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "LlamaForCausalLM": {"tie_word_embeddings": False},
    "Gemma2ForCausalLM": {"num_key_value_heads": 1, "head_dim": 4, "final_logit_softcapping": 0.02},
    "BertForMaskedLM": OF_BERT,
    "GraniteForCausalLM": {"logits_scaling": 2.0},
    "MixtralForCausalLM": {"num_key_value_heads": 1, "output_router_logits": True},
    "BertForSequenceClassification": OF_BERT,
}
FUSED = tuple(MODELS)[:4]


def batch(num_sequences=2):
    ids = torch.randint(3, VOCABULARY, (num_sequences, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def make(name="gpt", **settings):
    torch.manual_seed(0)
    if name == "gpt":
        sizes = {"d_model": 8, "n_heads": 2, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": LENGTH}
        return ComposerGPT({**sizes, "init_std": 0.3})
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES, **MODELS[name]))
    return HuggingFaceModel(model, use_logits=True, metrics=[LanguageCrossEntropy(), MaskedAccuracy()], **settings)


def loss_and_grads(model, backend=None):
    outputs = (model if backend is None else torch.compile(model, backend=backend))(batch())
    loss = model.loss(outputs, batch())
    loss.backward()
    return {"loss": loss.detach()} | {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, None) for name in ("gpt", *FUSED)), ("gpt", "aot_eager"), ("LlamaForCausalLM", "aot_eager")],
)
def test_loss_and_gradients_are_those_of_logits(name, backend):
    fused, plain = make(name), make(name)
    assert apply_fused_cross_entropy(fused) == 1
    fused = pickle.loads(pickle.dumps(copy.deepcopy(fused)))
    expected = loss_and_grads(plain)
    actual = loss_and_grads(fused, backend)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    # In evaluation, and without labels in training, there are logits.
    of_eval = [model.eval().eval_forward(batch()) for model in (fused, plain)]
    torch.testing.assert_close(*of_eval)


@pytest.mark.parametrize("cap_first", [True, False])
def test_a_cap_of_the_logits_applies(cap_first):
    for name in ("gpt", "LlamaForCausalLM"):
        plain, fused = make(name), make(name)
        apply_logit_softcap(plain, 0.5)
        for apply in [apply_logit_softcap, apply_fused_cross_entropy][:: 1 if cap_first else -1]:
            apply(fused, 0.5 if apply is apply_logit_softcap else 0.0)
        torch.testing.assert_close(loss_and_grads(fused), loss_and_grads(plain), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (None, "GraniteForCausalLM", "changes its logits after its output layer"),
        (None, "MixtralForCausalLM", "output_router_logits"),
        (lambda model: apply_logit_softcap(model, 1.0), "Gemma2ForCausalLM", "LogitSoftcap does it again"),
        (
            lambda model: apply_factorization(model, min_features=8, latent_features=2),
            "LlamaForCausalLM",
            "is a FactorizedLinear",
        ),
    ],
)
def test_heads_and_losses_that_are_more_than_a_product_are_refused(change, name, message):
    model = make(name)
    if change is not None:
        change(model)
    with pytest.raises(ValueError, match=message):
        _ = apply_fused_cross_entropy(model), model(batch())


def test_without_an_effect_it_warns():
    with pytest.warns(NoEffectWarning, match="no output layer of a language model of a supported kind"):
        assert apply_fused_cross_entropy(make("BertForSequenceClassification")) == 0
    model = make("LlamaForCausalLM")
    apply_fused_cross_entropy(model)
    with pytest.warns(NoEffectWarning, match="called in training without labels"):
        model({"input_ids": batch()["input_ids"]})


def train(model, *methods, **settings):
    data = batch(8)
    samples = [{name: each[index] for name, each in data.items()} for index in range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Trainer(
        model,
        train_dataloader=DataLoader(samples, batch_size=4),
        optimizers=optimizer,
        max_duration="2ba",
        algorithms=methods,
        progress_bar=False,
        **settings,
    ) as trainer:
        trainer.fit()
    metrics = {name: metric.compute() for name, metric in trainer.state.train_metrics.items()}
    return [{"loss": trainer.state.loss.detach(), **metrics}, model.state_dict()]


@pytest.mark.parametrize("name", ["gpt", "LlamaForCausalLM"])
def test_training_with_a_cap_and_z_loss_and_its_metrics_are_the_same(name):
    methods = (LogitSoftcap(0.5), ZLoss(0.1))
    expected = train(make(name), *methods, device_train_microbatch_size=2)
    actual = train(make(name), FusedCrossEntropy(), *methods, device_train_microbatch_size=2)
    assert {"LanguageCrossEntropy"} < actual[0].keys()
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", ["gpt", *FUSED])
def test_z_loss_is_the_mean_over_the_tokens_of_the_loss(name, is_padded):
    """So microbatches and ranks, which are weighted by these tokens, add up to the whole batch."""
    model, given = make(name), batch()
    if is_padded:
        given["attention_mask"] = torch.ones_like(given["labels"])
    state = State(model, rank_zero_seed=0, max_duration="1ep", algorithms=[ZLoss(0.5)], dataloader=[0])
    state.batch, state.outputs, state.loss = given, model(given), torch.tensor(2.0)
    Engine(state).run_event(Event.BEFORE_BACKWARD)
    logits = getattr(state.outputs, "logits", state.outputs)
    targets = given["labels"]
    if name != "BertForMaskedLM":
        logits, targets = logits[:, :-1], targets[:, 1:]
    squares = logits.logsumexp(dim=-1).square()[targets != -100]
    torch.testing.assert_close(state.loss, 2 + 0.5 * squares.mean())


def test_what_needs_logits_in_training_is_refused_by_name():
    model = make()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"LabelSmoothing.*needs logits.*FusedCrossEntropy\(label_smoothing="):
        Trainer(model, algorithms=[FusedCrossEntropy(), LabelSmoothing(0.1)], optimizers=optimizer, device="cpu")
    with pytest.raises(ValueError, match=r"MultiTokenPrediction.*needs logits"):
        Trainer(model, algorithms=[MultiTokenPrediction(), FusedCrossEntropy()], optimizers=optimizer, device="cpu")
    model = make()
    model.train_metrics.add_metrics(BinaryF1Score())
    with pytest.raises(ValueError, match="metrics BinaryF1Score of training need logits"):
        train(model, FusedCrossEntropy())


def on_two_ranks():
    """Return pairs of results with whole weights and with weights sharded by tensor parallelism."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(3, 11, 8), torch.randn(51, 8), torch.randn(51)  # not a multiple of the ranks
    target = torch.randint(0, 51, (3, 11))
    target[0, :5] = torch.tensor([50, -100, 25, 26, 0])
    whole = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    sharded = [hidden.requires_grad_()]
    sharded += [distribute_tensor(each, mesh, [Shard(0)]).requires_grad_() for each in (weight, bias)]
    results = []
    for inputs in (whole, sharded):
        losses = linear_cross_entropy(*inputs[:2], target, inputs[2], label_smoothing=0.1, z_loss=0.01)
        grads = torch.autograd.grad(losses.loss, inputs)
        results.append([losses.loss.detach(), losses.is_correct, losses.log_z.detach(), *map(_whole, grads)])
    of_models = []
    for is_parallel in (False, True):
        model = make("LlamaForCausalLM")
        if is_parallel:
            parallelize_module(model.model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        apply_fused_cross_entropy(model)
        of_models.append({name: _whole(each) for name, each in loss_and_grads(model).items()})
    return results, of_models


def on_two_ranks_without_a_class():
    """Return losses of targets that are and are not classes, and the error for each number of classes."""
    mesh = init_device_mesh("cpu", (2,))
    hidden, weight = torch.zeros(2, 8), distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)])
    losses = {
        other: linear_cross_entropy(hidden, weight, torch.tensor([1, other])).loss.item()
        for other in (0, 3, -100, -1, 4, 9)
    }
    errors = {}
    for num_classes in (1, 2, 3):
        small = distribute_tensor(torch.ones(num_classes, 8), mesh, [Shard(0)])
        try:
            errors[num_classes] = linear_cross_entropy(hidden, small, torch.zeros(2, dtype=torch.long)).loss.item()
        except ValueError as error:
            errors[num_classes] = str(error)
    return losses, errors


def test_with_a_sharded_head_targets_outside_the_vocabulary_are_nan_and_empty_shards_are_refused(tmp_path):
    for losses, errors in run_ranks(on_two_ranks_without_a_class, store=tmp_path / "store"):
        assert all(math.isnan(losses[other]) for other in (-1, 4, 9))
        assert [losses[other] for other in (0, 3, -100)] == pytest.approx([math.log(4)] * 3)
        assert "has 1 classes, and some of the 2 ranks of its mesh have none" in errors[1]
        assert [errors[2], errors[3]] == pytest.approx([math.log(2), math.log(3)])


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_a_head_that_is_sharded_over_its_classes_stays_sharded(tmp_path):
    for pairs in run_ranks(on_two_ranks, store=tmp_path / "store"):
        for expected, actual in pairs:
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)

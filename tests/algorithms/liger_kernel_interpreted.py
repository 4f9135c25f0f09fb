"""The kernel of Liger on the CPU, where Triton interprets it: values and gradients are those of logits.

`test_liger.py` runs this file in a process of its own with `TRITON_INTERPRET=1`.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from liger_kernel.ops import cross_entropy, fused_linear_cross_entropy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.utils.data import DataLoader
from triton import language

from composer import Trainer
from composer.algorithms import FusedCrossEntropy, LogitSoftcap, ZLoss
from composer.models import ComposerGPT, HuggingFaceModel
from composer_dist.testing import run_ranks
from composer_models import LanguageCrossEntropy, MaskedAccuracy, linear_cross_entropy

CLASSES, FEATURES, LENGTH = 50, 16, 8


class Cap(float):
    """A number that interpreted kernels can convert, as compiled ones can."""

    def to(self, dtype):
        return self


@pytest.fixture(autouse=True)
def soft_capping(monkeypatch):
    """Let the interpreter compute caps, which need conversions and a library that only compiled kernels have."""
    kernel = fused_linear_cross_entropy.liger_cross_entropy_kernel

    class WithCap:
        def __getitem__(self, grid):
            return lambda softcap, **arguments: kernel[grid](softcap=softcap and Cap(softcap), **arguments)

    monkeypatch.setattr(fused_linear_cross_entropy, "liger_cross_entropy_kernel", WithCap())
    monkeypatch.setattr(cross_entropy, "tanh", lambda x: 2 * language.sigmoid(2 * x) - 1)


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 11, FEATURES), (CLASSES, FEATURES), (CLASSES,)]
    tensors = [0.3 * torch.randn(shape, generator=generator) for shape in shapes]
    target = torch.randint(0, CLASSES, (3, 11), generator=generator)
    target[0, :3] = -100
    return [each.requires_grad_() for each in tensors], target  # losses of about 4


def plain(hidden, weight, target, bias, z_loss, softcap, token_weights):
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, target.flatten(), reduction="none") + z_loss * logits.logsumexp(-1) ** 2
    weights = (target.flatten() != -100) * (1.0 if token_weights is None else token_weights.flatten())
    return (losses * weights).sum() / weights.sum()


@pytest.mark.parametrize("trained", ["hidden weight bias", "hidden weight", "weight", "hidden"])
@pytest.mark.parametrize(
    ("softcap", "z_loss", "has_weights"), list(itertools.product([None, 3.0], [0.0, 0.01], [False, True]))
)
def test_values_and_gradients_are_those_of_all_logits(softcap, z_loss, has_weights, trained):
    (hidden, weight, bias), target = inputs()
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}
    for name, each in tensors.items():
        each.requires_grad_(name in trained)
    bias = bias if "bias" in trained else None
    leaves = [tensors[name] for name in trained.split()]
    settings = {"z_loss": z_loss, "softcap": softcap}
    settings["token_weights"] = torch.linspace(0, 1, 33).view(3, 11) if has_weights else None
    expected = plain(hidden, weight, target, bias, **settings)
    losses = linear_cross_entropy(hidden, weight, target, bias, kernel="liger", **settings)
    grads = [torch.autograd.grad(loss, leaves) for loss in (losses.loss, expected)]
    torch.testing.assert_close((losses.loss, *grads[0]), (expected, *grads[1]), atol=1e-6, rtol=0)
    torch.testing.assert_close(losses, linear_cross_entropy(hidden, weight, target, bias, **settings))


def test_in_bfloat16_only_the_matrix_products_round():
    (hidden, weight, bias), target = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        results = [linear_cross_entropy(hidden, weight, target, bias, kernel=name).loss for name in ("torch", "liger")]
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(*results, atol=eps, rtol=0)  # the kernel writes logits and their gradients in bfloat16
    grads = [torch.autograd.grad(loss, [hidden, weight, bias]) for loss in results]
    torch.testing.assert_close(*grads, atol=2 * eps * 0.1, rtol=0)


def test_targets_outside_the_vocabulary_are_not_read():
    (hidden, weight, bias), target = inputs()
    target[0, 5] = CLASSES
    with pytest.raises(IndexError, match="out of range"):
        linear_cross_entropy(hidden, weight, target, bias, kernel="liger")


def make(name):
    torch.manual_seed(0)
    if name == "gpt":
        sizes = {"d_model": 8, "n_heads": 2, "n_layers": 2, "vocab_size": 32, "max_seq_len": LENGTH}
        return ComposerGPT({**sizes, "init_std": 0.3})
    import transformers

    kind = getattr(transformers, name)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 32, "pad_token_id": 0, "tie_word_embeddings": name == "GPT2LMHeadModel"}
    sizes |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if name == "GPT2LMHeadModel" else {}
    model = kind(kind.config_class(**sizes))
    return HuggingFaceModel(model, use_logits=True, metrics=[LanguageCrossEntropy(), MaskedAccuracy()])


def train(model, *methods, **settings):
    ids = torch.randint(3, 32, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :3] = -100
    samples = [{"input_ids": one, "labels": of_one} for one, of_one in zip(ids, labels, strict=True)]
    with Trainer(
        model,
        train_dataloader=DataLoader(samples, batch_size=4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_duration="2ba",
        algorithms=methods,
        device="cpu",
        device_train_microbatch_size=2,
        progress_bar=False,
        **settings,
    ) as trainer:
        trainer.fit()
    metrics = {name: metric.compute() for name, metric in trainer.state.train_metrics.items()}
    return [{"loss": trainer.state.loss.detach(), **metrics}, model.state_dict()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler, where a graph begins anew
@pytest.mark.parametrize(
    ("name", "has_cap", "has_z_loss", "settings"),
    [
        # The first two have tied embeddings.
        *itertools.product(["gpt", "GPT2LMHeadModel", "LlamaForCausalLM"], [False, True], [False, True], [{}]),
        ("gpt", True, True, {"compile_config": {"backend": "aot_eager"}}),
    ],
)
def test_training_and_its_metrics_are_those_with_logits(name, has_cap, has_z_loss, settings):
    methods = [*([LogitSoftcap(0.5)] if has_cap else []), *([ZLoss(0.1)] if has_z_loss else [])]
    expected = train(make(name), *methods)
    actual = train(make(name), FusedCrossEntropy(kernel="liger"), *methods, **settings)
    assert {"LanguageCrossEntropy"} < actual[0].keys()
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def on_two_ranks():
    """Return the results with whole weights and with weights sharded by tensor parallelism."""
    mesh = init_device_mesh("cpu", (2,))
    (hidden, weight, bias), target = inputs()
    sharded = [distribute_tensor(each.detach(), mesh, [Shard(0)]).requires_grad_() for each in (weight, bias)]
    results = []
    for of_head in ([weight, bias], sharded):
        losses = linear_cross_entropy(hidden, of_head[0], target, of_head[1], z_loss=0.01, kernel="liger")
        grads = torch.autograd.grad(losses.loss, [hidden, *of_head])
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in grads]
        results.append([losses.loss.detach(), losses.is_correct, losses.log_z.detach(), *whole])
    return results


def test_a_head_that_is_sharded_over_its_classes_stays_sharded(tmp_path):
    for expected, actual in run_ranks(on_two_ranks, store=tmp_path / "store"):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)

"""Targets that `LabelSmoothing` puts into the batch: values for whoever reads them, class indices for cross entropy."""

import functools

import pytest
import torch
import torch.nn.functional as F

from composer_algorithms import CutMix, LabelSmoothing, MixUp
from composer_algorithms.functional import smooth_labels
from composer_events import Event
from composer_models import soft_cross_entropy


def targets_of(state, logits, labels, smoothing=0.2):
    state.batch, state.outputs = (None, labels), logits
    LabelSmoothing(smoothing).apply(Event.BEFORE_LOSS, state, None)
    return state.batch[1]


def pixels(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(4, 5, 3, 2, dtype=dtype, requires_grad=True), torch.randint(5, (4, 3, 2))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [F.cross_entropy, soft_cross_entropy])
def test_losses_and_gradients_are_those_of_the_values(state, loss, reduction):
    logits, labels = pixels()
    results = []
    for target in (targets_of(state, logits, labels), smooth_labels(logits, labels, 0.2).double()):
        value = loss(logits, target, reduction=reduction)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        results.append((value, gradient))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)  # the values are float32


@pytest.mark.parametrize("options", [{"weight": torch.rand(5)}, {"label_smoothing": 0.1}])
def test_options_of_the_loss_that_concern_values_get_them(state, options):
    logits, labels = pixels(torch.float32)
    found = F.cross_entropy(logits, targets_of(state, logits, labels), **options)
    torch.testing.assert_close(found, F.cross_entropy(logits, smooth_labels(logits, labels, 0.2), **options))


def test_cross_entropy_does_not_make_the_values(state, monkeypatch):
    def refuse(*args):
        raise AssertionError("the values were asked for")

    logits, labels = pixels()
    targets = targets_of(state, logits, labels)
    monkeypatch.setattr(type(targets), "dense", refuse)
    F.cross_entropy(logits, targets)
    soft_cross_entropy(logits, targets)
    assert (targets.shape, targets.dtype, len(targets)) == (logits.shape, torch.float32, 4)
    with pytest.raises(AssertionError, match="asked for"):
        targets.argmax(dim=1)


def test_whoever_reads_the_targets_gets_plain_values(state):
    logits, labels = pixels()
    targets, expected = targets_of(state, logits, labels), smooth_labels(logits, labels, 0.2)
    for read in (
        lambda t: t,
        lambda t: t + 1,
        lambda t: t[1:3],
        lambda t: t.sum(dim=1),
        lambda t: torch.stack([t, t]),
        lambda t: F.kl_div(logits.log_softmax(1), target=t, reduction="batchmean"),
    ):
        torch.testing.assert_close(read(targets) * 1, read(expected))
        assert type(read(targets) * 1) is torch.Tensor
    assert targets.sum() == labels.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_low_precision_have_a_loss(state, dtype):
    logits, labels = pixels(torch.float32)
    loss = F.cross_entropy(logits.to(dtype), targets_of(state, logits.to(dtype), labels))
    expected = F.cross_entropy(logits, labels, label_smoothing=0.2)
    torch.testing.assert_close(loss.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("loss", [F.cross_entropy, soft_cross_entropy])
def test_labels_out_of_range_are_refused_where_the_loss_does_not_ignore_them(state, loss):
    logits, labels = pixels()
    targets = targets_of(state, logits, labels.fill_(7))
    with pytest.raises(ValueError, match="too few for the label 7"):
        loss(logits, targets)
    with pytest.raises(ValueError, match="too few for the label 7"):
        targets.argmax(dim=1)


# Labels of 8 examples with two ignored ones, the pairs that they are mixed in, and the weight of their own part.
IGNORED = {-100: torch.int64, 255: torch.uint8, 0: torch.int64}
OTHERS = torch.tensor([3, 0, 1, 2, 7, 4, 5, 6])
OWN = 0.7


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("mixing", [None, "MixUp", "CutMix", "MixUp of losses"])
@pytest.mark.parametrize("loss", [F.cross_entropy, soft_cross_entropy, "CrossEntropyLoss", "weighted"])
@pytest.mark.parametrize("ignored", IGNORED)
def test_ignored_labels_add_nothing_to_any_loss(state, ignored, loss, mixing, smoothing):
    """Seen before: "num_classes=5 is too few for the label 255", or a mean over the ignored examples too."""
    torch.manual_seed(1)
    weight = torch.rand(5) if loss == "weighted" else None
    if isinstance(loss, str):
        loss_fn = torch.nn.CrossEntropyLoss(weight, ignore_index=ignored)
    else:
        loss_fn = functools.partial(loss, ignore_index=ignored)
    logits, images = torch.randn(8, 5, requires_grad=True), torch.rand(8, 1, 2, 2)
    labels = torch.tensor([1, 2, 3, 4, 1, 2, ignored, ignored], dtype=IGNORED[ignored])
    state.batch, state.outputs, state.model = (images, labels), logits, torch.nn.Linear(1, 1)
    state.model.loss = lambda outputs, batch: loss_fn(outputs, batch[1])
    algorithms = [LabelSmoothing(smoothing)] if smoothing else []
    if mixing is not None:
        mixes = (CutMix if mixing == "CutMix" else MixUp)(interpolate_loss="losses" in mixing)
        mixes._permuted_target, mixes._own_weight = labels[OTHERS], OWN
        algorithms.insert(0, mixes)
    state.algorithms = algorithms

    def run(event):
        for algorithm in algorithms[:: -1 if event.is_after_event else 1]:
            if algorithm.match(event, state) and event in algorithm.acts_on:
                algorithm.apply(event, state, None)

    run(Event.BEFORE_LOSS)
    state.loss = state.model.loss(logits, state.batch)
    run(Event.AFTER_LOSS)
    run(Event.BEFORE_BACKWARD)
    assert state.batch[1] is labels

    # By the definition: each example has the weighted sum of the terms of its labels, smoothed, if not ignored.
    terms = -logits.log_softmax(dim=1) * (1 if weight is None else weight)
    own, others = [], []
    for found, of_examples in ((own, labels.tolist()), (others, labels[OTHERS].tolist())):
        for row, label in zip(terms, of_examples, strict=True):
            found.append(None if label == ignored else (1 - smoothing) * row[label] + smoothing * row.mean())
    parts = [(OWN, own), (1 - OWN, others)] if mixing else [(1.0, own)]
    expected = sum(share * term for share, found in parts for term in found if term is not None) / 6
    if weight is not None and (not (mixing or smoothing) or (mixing == "MixUp of losses" and not smoothing)):
        # Without values for each class the mean is weighted, too.
        expected = expected * 6 / sum(weight[label] for label in labels.tolist() if label != ignored)
    torch.testing.assert_close(state.loss, expected)
    (gradient,) = torch.autograd.grad(state.loss, logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


@pytest.mark.parametrize("loss", [F.cross_entropy, soft_cross_entropy])
def test_a_batch_of_ignored_labels_has_gradients_of_zero(state, loss):
    """Seen before: "the targets have a total probability of 0.0", which ended the run."""
    logits, labels = pixels()
    value = loss(logits, targets_of(state, logits, torch.full_like(labels, 255)), ignore_index=255)
    assert value.isnan()
    assert torch.autograd.grad(value, logits)[0].count_nonzero() == 0


def test_a_compiled_cross_entropy_is_the_plain_one(state):
    torch.compiler.reset()  # what was compiled for other tests counts among what may be compiled anew
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    dense = smooth_labels(logits, labels, 0.2)
    compiled = torch.compile(F.cross_entropy, backend="eager")
    torch.testing.assert_close(compiled(logits, targets_of(state, logits, labels)), F.cross_entropy(logits, dense))

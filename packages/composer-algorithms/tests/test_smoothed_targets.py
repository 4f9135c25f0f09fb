"""Targets that `LabelSmoothing` puts into the batch: values for whoever reads them, class indices for cross entropy."""

import pytest
import torch
import torch.nn.functional as F

from composer_algorithms import LabelSmoothing
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
    monkeypatch.setattr(LabelSmoothing, "smooth", refuse)
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


def test_labels_out_of_range_are_refused_as_before(state):
    logits, labels = pixels()
    with pytest.raises(ValueError, match="too few for the label 7"):
        targets_of(state, logits, labels.fill_(7))


def test_a_compiled_cross_entropy_is_the_plain_one(state):
    torch.compiler.reset()  # what was compiled for other tests counts among what may be compiled anew
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    dense = smooth_labels(logits, labels, 0.2)
    compiled = torch.compile(F.cross_entropy, backend="eager")
    torch.testing.assert_close(compiled(logits, targets_of(state, logits, labels)), F.cross_entropy(logits, dense))

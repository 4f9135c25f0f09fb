"""Cross entropy in chunks: equal to that of all logits, in a fraction of the memory."""

import math
import sys
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from composer_models import (
    LanguageCrossEntropy,
    LanguagePerplexity,
    MaskedAccuracy,
    MissingConditionalImportError,
    linear_cross_entropy,
)

CLASSES, FEATURES = 50, 16
SETTINGS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "cap": {"softcap": 3.0},
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "token_weights": True},
}


def inputs(dtype=torch.float64, has_bias=True):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 11, FEATURES), (CLASSES, FEATURES), *([(CLASSES,)] if has_bias else [])]
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    target = torch.randint(0, CLASSES, (3, 11), generator=generator)
    target[0, :3] = -100
    return [(0.3 * each).to(dtype).requires_grad_() for each in tensors], target  # losses of about 4


def plain(hidden, weight, target, bias, label_smoothing=0.0, z_loss=0.0, softcap=None, token_weights=None):
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    target = target.flatten()
    losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * logits.logsumexp(-1) ** 2
    weights = (target != -100) * (1.0 if token_weights is None else token_weights.flatten())
    return (losses * weights).sum() / weights.sum()


def settings_of(name, dtype):
    settings = dict(SETTINGS[name])
    if "token_weights" in settings:
        settings["token_weights"] = torch.linspace(0, 1, 33, dtype=dtype).view(3, 11)
    return settings


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SETTINGS)
def test_values_and_gradients_are_those_of_all_logits(name, dtype, has_bias):
    (hidden, weight, *bias), target = inputs(dtype, has_bias)
    settings, tensors = settings_of(name, dtype), [hidden, weight, *bias]
    ours = linear_cross_entropy(hidden, weight, target, *bias, **settings).loss
    actual = torch.autograd.grad(ours, tensors)
    # In float64, which tells errors from rounding.
    (hidden, weight, *bias), _ = inputs(torch.float64, has_bias)
    loss = plain(hidden, weight, target, *(bias or [None]), **settings_of(name, torch.float64))
    expected = torch.autograd.grad(loss, [hidden, weight, *bias])
    tolerance = {"atol": 1e-6 if dtype == torch.float32 else 1e-14, "rtol": 0, "check_dtype": False}
    torch.testing.assert_close((ours, *actual), (loss, *expected), **tolerance)


def test_in_bfloat16_only_the_matrix_products_round():
    (hidden, weight, bias), target = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, target, bias).loss
        expected = plain(hidden, weight, target, bias)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)
    pairs = zip(*(torch.autograd.grad(each, [hidden, weight, bias]) for each in (ours, expected)), strict=True)
    for actual, plain_grad in pairs:  # chunks are rounded one by one
        torch.testing.assert_close(actual, plain_grad, atol=2 * torch.finfo(torch.bfloat16).eps * 0.1, rtol=0)


def peak_bytes(compute):
    """Return the most memory that is allocated within a function."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        compute()
    events = profiler.profiler.kineto_results.events()
    current = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        current += size
        peak = max(peak, current)
    return peak


def test_loss_and_backward_take_at_most_035_of_the_memory():
    tokens, classes = 512, 50_000
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(classes, 8, requires_grad=True)
    target = torch.randint(0, classes, (tokens,))
    plain_peak = peak_bytes(lambda: F.cross_entropy(F.linear(hidden, weight), target).backward())
    assert plain_peak > 4 * tokens * classes  # the measurement sees the logits
    ours = peak_bytes(lambda: linear_cross_entropy(hidden, weight, target).loss.backward())
    assert ours <= 0.35 * plain_peak


def test_metrics_are_those_of_logits():
    (hidden, weight, bias), target = inputs(torch.float32)
    target[2] = F.linear(hidden, weight, bias)[2].argmax(dim=-1)
    losses = linear_cross_entropy(hidden, weight, target, bias, label_smoothing=0.1)
    assert losses.is_correct.any()
    target[1, :4] = -100  # the metrics may ignore more than the loss
    for metric in (LanguageCrossEntropy(), LanguagePerplexity(), MaskedAccuracy()):
        values = []
        for outputs in (losses, F.linear(hidden, weight, bias)):
            metric.reset()
            metric.update(outputs, target)
            values.append(metric.compute())
        torch.testing.assert_close(*values)


def test_targets_of_another_shape_are_refused():
    (hidden, weight, bias), target = inputs()
    with pytest.raises(ValueError, match=r"targets have shape \(3, 10\) and must have \(3, 11\)"):
        linear_cross_entropy(hidden, weight, target[:, 1:], bias)
    target[0, 5] = CLASSES
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        linear_cross_entropy(hidden, weight, target, bias)


@pytest.mark.parametrize(
    "settings",
    [
        {name: value}
        for name, values in {
            "label_smoothing": (-0.1, 1.1, 2.0, math.nan),
            "softcap": (0.0, -1.0, math.inf, math.nan),
        }.items()
        for value in values
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(settings):
    (hidden, weight, bias), target = inputs()
    with pytest.raises(ValueError, match=next(iter(settings))):
        linear_cross_entropy(hidden, weight, target, bias, **settings)


def test_a_kernel_that_cannot_be_used_is_refused(monkeypatch):
    (hidden, weight, bias), target = inputs(torch.float32)
    with pytest.raises(ValueError, match="kernel='cuda' must be 'torch' or 'liger'"):
        linear_cross_entropy(hidden, weight, target, bias, kernel="cuda")
    with pytest.raises(ValueError, match="kernel='liger' cannot be combined with label_smoothing"):
        linear_cross_entropy(hidden, weight, target, bias, kernel="liger", label_smoothing=0.1)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="kernel='liger' runs on GPUs; got tensors on 'cpu'"):
        linear_cross_entropy(hidden, weight, target, bias, kernel="liger")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(MissingConditionalImportError, match=r"composer-models\[liger\]"):
        linear_cross_entropy(hidden, weight, target, bias, kernel="liger")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", Mock())
    monkeypatch.setattr("composer_models.token_losses._installed_version", lambda name: "0.8.1")
    with pytest.raises(ValueError, match=r"needs liger-kernel 0\.8\.2 or later.*got 0\.8\.1"):
        linear_cross_entropy(hidden, weight, target, bias, kernel="liger")

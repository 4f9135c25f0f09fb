"""`apply_whitening_init`: outputs without correlation, filters that stay, and models that are left alone."""

import pytest
import torch
from torch import nn

from composer_algorithms import WhiteningInit
from composer_algorithms.functional import apply_whitening_init
from composer_events import NoEffectWarning


def images(channels=3):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(64, channels, 9, 9, dtype=torch.float64, generator=generator)
    mix = torch.randn(channels, channels, dtype=torch.float64, generator=generator)
    # Neighbors are correlated, as in photographs.
    return torch.einsum("oc,nchw->nohw", mix, noise + noise.roll(1, dims=2) + noise.roll(1, dims=3)) + 0.5


@pytest.mark.parametrize("settings", [{}, {"stride": 2, "padding": 1}, {"dilation": 2}, {"bias": False}])
def test_the_covariance_of_outputs_is_the_identity(settings):
    conv = nn.Conv2d(3, 30, 2, **settings).double()
    plain = conv.weight[24:].clone()
    assert apply_whitening_init(nn.Sequential(conv, nn.Conv2d(30, 4, 3)), images(), eps=0.0) == 24
    everywhere = nn.functional.conv2d(images(), conv.weight, dilation=conv.dilation)
    outputs = everywhere.transpose(0, 1).flatten(1)
    torch.testing.assert_close(outputs[:12].cov(), torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-9)
    assert torch.equal(outputs[12:24], -outputs[:12])
    assert torch.equal(conv.weight[24:], plain)
    assert conv.bias is None or not conv.bias.any()


def test_fewer_filters_are_those_of_the_largest_variance_and_signs_do_not_depend_on_the_order_of_images():
    first, second = (nn.Conv2d(3, 5, 2).double() for _ in range(2))
    assert apply_whitening_init(first, images()) == 5
    apply_whitening_init(second, images().flip(0))
    torch.testing.assert_close(first.weight, second.weight)
    largest = first.weight.flatten(1).gather(1, first.weight.flatten(1).abs().argmax(dim=1, keepdim=True))
    assert (largest > 0).all()
    patches = nn.functional.unfold(images(), 2).transpose(0, 1).flatten(1)
    variances = torch.linalg.eigvalsh(patches.cov()).flip(0)[:5]
    found = (first.weight.flatten(1) @ patches).var(dim=1)
    torch.testing.assert_close(found, variances / (variances + 5e-4))


@pytest.mark.parametrize("freeze", [False, True])
def test_only_the_bias_of_frozen_filters_is_trained(freeze):
    model = nn.Sequential(nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Linear(512, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    apply_whitening_init(model, images(), freeze=freeze)
    before = {name: value.clone() for name, value in model.named_parameters()}
    model(images()).square().sum().backward()
    optimizer.step()
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == set(before) - ({"0.weight"} if freeze else set())


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.Conv1d(3, 4, 3), nn.Conv2d(3, 3, 3, groups=3)],
    ids=lambda model: type(model).__name__,
)
def test_other_models_are_left_alone_with_a_warning(model):
    with pytest.warns(NoEffectWarning, match="WhiteningInit has no effect on this") as warned:
        assert apply_whitening_init(model, images()) == 0
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: apply_whitening_init(nn.Conv2d(3, 4, 2, device="meta"), images()), "on the meta device"),
        (lambda: apply_whitening_init(nn.Conv2d(3, 4, 2), images(2)), r"\(64, 2, 9, 9\) must be \(batch, 3, "),
        (lambda: apply_whitening_init(nn.Conv2d(3, 4, 3), images()[:1, :, :5, :5]), "9 patches of 27 numbers"),
        (lambda: apply_whitening_init(nn.Conv2d(3, 4, 2), images(), eps=-1.0), r"eps=-1\.0"),
        (lambda: WhiteningInit(images(), eps=-1.0), r"eps=-1\.0"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("images", "eps", "message"),
    [
        (torch.ones(10, 3, 8, 8), 0.0, "eps=0.0 is too small"),
        (torch.rand(10, 1, 8, 8).expand(-1, 3, -1, -1), 0.0, "eps=0.0 is too small"),
        (torch.full((10, 3, 8, 8), float("nan")), 5e-4, "NaN or infinite"),
        (torch.rand(100, 3, 1, 8), 5e-4, "smaller than the kernel"),
    ],
)
def test_images_that_have_no_filters_are_refused(images, eps, message):
    conv = nn.Conv2d(3, 24, 2)
    before = conv.weight.clone()
    with pytest.raises(ValueError, match=message):
        apply_whitening_init(conv, images, eps=eps)
    assert torch.equal(conv.weight, before)

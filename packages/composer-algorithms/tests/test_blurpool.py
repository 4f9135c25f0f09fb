"""Blurring layers against sums written out in NumPy's order of loops, and what `apply_blurpool` replaces."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from composer_algorithms import BlurPool
from composer_algorithms.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d, blurmax_pool2d
from composer_algorithms.functional import apply_blurpool
from composer_events import Event, NoEffectWarning, State

WEIGHTS = (0.25, 0.5, 0.25)


def blurred(images, stride=1):
    """Blur pixel by pixel, in double precision."""
    batch, channels, height, width = images.shape
    rows, columns = range(0, height, stride), range(0, width, stride)
    result = torch.zeros(batch, channels, len(rows), len(columns), dtype=torch.double)
    for i, y in enumerate(rows):
        for j, x in enumerate(columns):
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    if 0 <= y + dy < height and 0 <= x + dx < width:
                        pixel = images[:, :, y + dy, x + dx].double()
                        result[:, :, i, j] += WEIGHTS[dy + 1] * WEIGHTS[dx + 1] * pixel
    return result


def images(channels=3, size=(7, 8), seed=0):
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("channels", [-1, 3])
def test_blurring_is_the_weighted_mean_of_the_neighbourhood(stride, channels):
    x = images()
    assert_near(blur_2d(x, channels, stride), blurred(x, stride))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_blurring_keeps_the_dtype_and_the_input(dtype):
    x = images().to(dtype)
    before = x.clone()
    assert blur_2d(x).dtype == dtype
    assert torch.equal(x, before)


def test_another_filter_is_used_and_one_without_a_middle_is_refused():
    x = images()
    shift = torch.zeros(1, 1, 1, 3)
    shift[..., 0] = 1
    assert torch.equal(blur_2d(x, filter=shift)[..., 1:], x[..., :-1])
    with pytest.raises(IndexError, match="the filter is 2 by 3"):
        blur_2d(x, filter=torch.ones(1, 1, 2, 3))


@pytest.mark.parametrize("stride", [1, 2])
def test_max_pooling_takes_the_maxima_first_and_blurs_them_then(stride):
    x = images()
    maxima = F.max_pool2d(x.double(), 3, stride=1, padding=1)
    assert_near(blurmax_pool2d(x, 3, stride=stride, padding=1), blurred(maxima, stride))
    assert_near(BlurMaxPool2d(3, stride, 1)(x), blurred(maxima, stride))


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(
    "arguments", [(2, None, 0), (3, 2, 1), (3, 3, 1), (2, 3, 0), ((3, 2), (2, 1), 0), (3, 2, 1, 2)]
)
@pytest.mark.parametrize("height", range(5, 12))
def test_pooled_images_have_the_size_that_max_pooling_gives(height, arguments, ceil_mode):
    kernel, stride, padding, dilation = (*arguments, 1)[:4]
    x = torch.rand(1, 2, height, height + 1)
    pool = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil_mode)
    assert BlurMaxPool2d.from_maxpool2d(pool)(x).shape == pool(x).shape


def test_a_convolution_is_blurred_before_it_or_after_it():
    x, conv = images(4), nn.Conv2d(4, 6, 3, stride=2, padding=1)
    before = BlurConv2d.from_conv2d(conv, blur_first=True)
    after = BlurConv2d.from_conv2d(conv, blur_first=False)
    weight, bias = conv.weight.double(), conv.bias.double()
    assert_near(before(x), F.conv2d(blurred(x), weight, bias, stride=2, padding=1))
    assert_near(after(x), blurred(F.conv2d(x.double(), weight, bias, padding=1), 2))


def test_blur_pool_is_a_plain_blur():
    x = images()
    assert_near(BlurPool2d()(x), blurred(x, 2))
    assert_near(BlurPool2d(channels=3, stride=3)(x), blurred(x, 3))


def test_the_size_of_a_stride_is_required_where_it_has_no_default():
    with pytest.raises(ValueError, match="stride=None"):
        BlurConv2d(3, 3, 2)
    assert BlurConv2d(3, 3, 2, blur_first=False)(images(size=(8, 8))).shape[-1] == 4


def test_a_shift_by_one_pixel_changes_less_than_without_the_blur():
    signal = torch.zeros(1, 16, 1, 32)
    signal[..., ::2] = 1  # the highest frequency: sampling every other pixel sees all of it or nothing
    conv = nn.Conv2d(16, 4, (1, 3), stride=(1, 2), padding=(0, 1), bias=False)
    model = nn.Sequential(conv)

    def change():
        return (model(signal) - model(signal.roll(1, -1)))[..., 2:-2].norm()

    plain = change()
    apply_blurpool(model)
    assert change() < 1e-5 * plain


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(32, 32, 3, padding=1),
    )


@pytest.mark.parametrize(("convs", "pools"), [(True, True), (True, False), (False, True)])
def test_what_is_replaced_is_what_samples_down(convs, pools):
    model = convnet()
    apply_blurpool(model, replace_convs=convs, replace_maxpools=pools)
    kinds = ["Conv2d", "ReLU", "BlurConv2d" if convs else "Conv2d", "BlurMaxPool2d" if pools else "MaxPool2d", "Conv2d"]
    assert [type(layer).__name__ for layer in model] == kinds


def test_narrow_convolutions_are_replaced_on_request():
    model = convnet()
    apply_blurpool(model, min_channels=3)
    assert isinstance(model[0], BlurConv2d)


def test_weights_are_copied_and_the_optimizer_trains_the_copies():
    model = convnet()
    old = model[2].weight
    optimizer = torch.optim.SGD([{"params": model[:2].parameters()}, {"params": model[2:].parameters()}], lr=0.1)
    apply_blurpool(model, optimizers=optimizer)
    new = model[2].conv.weight
    assert new is not old
    assert torch.equal(new, old)
    group = optimizer.param_groups[1]["params"]
    assert any(one is new for one in group)
    assert not any(one is old for one in group)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_padding_mode_dtype_memory_format_and_parametrizations_are_kept():
    conv = nn.Conv2d(16, 8, 3, stride=2, padding=1, padding_mode="circular", groups=2)
    conv = conv.to(torch.bfloat16, memory_format=torch.channels_last)
    parametrize.register_parametrization(conv, "weight", nn.Tanh())
    model = nn.Sequential(conv)
    x = torch.rand(1, 16, 8, 8, dtype=torch.bfloat16)
    expected = conv(blurred(x).bfloat16())
    apply_blurpool(model)
    assert model[0].blur_filter.dtype == torch.bfloat16
    original = model[0].conv.parametrizations.weight.original
    assert original.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), expected, atol=0.02, rtol=0)  # bfloat16


def test_twice_is_once():
    once, twice = convnet(), convnet()
    apply_blurpool(once)
    apply_blurpool(twice)
    apply_blurpool(twice)
    assert str(once) == str(twice)
    assert all(torch.equal(a, b) for a, b in zip(once.state_dict().values(), twice.state_dict().values(), strict=True))


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Conv2d(16, 16, 3, stride=2), nn.Sequential(nn.Conv2d(16, 8, 3))])
def test_a_model_that_it_cannot_change_is_warned_about(model):
    with pytest.warns(NoEffectWarning, match=f"BlurPool has no effect on this {type(model).__name__}") as caught:
        apply_blurpool(model)
    assert caught[0].filename == __file__


def test_max_pooling_that_returns_indices_too_is_left_alone():
    class Unpooled(nn.Sequential):
        def forward(self, x):
            pooled, indices = self[1](self[0](x))
            return self[2](pooled, indices)

    model = Unpooled(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2))
    apply_blurpool(model)
    assert isinstance(model[0], BlurConv2d)
    assert model(torch.rand(2, 16, 8, 8)).shape == (2, 16, 4, 4)


@pytest.mark.parametrize("arguments", [{}, {"ceil_mode": True}, {"padding": 1}])
def test_an_image_without_a_batch_is_pooled_as_one_in_a_batch(arguments):
    model = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2), nn.MaxPool2d(2, **arguments))
    apply_blurpool(model)
    image = torch.rand(16, 15, 12)
    torch.testing.assert_close(model(image), model(image[None])[0])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_a_weight_that_comes_from_a_hook_is_refused_with_its_place():
    model = nn.Sequential(nn.ReLU(), nn.utils.weight_norm(nn.Conv2d(16, 16, 3, stride=2)))
    with pytest.raises(ValueError, match=r"use the parametrization instead.*parametrizations\.weight_norm") as caught:
        apply_blurpool(model)
    assert "'1'" in caught.value.__notes__[0]
    assert model(torch.rand(1, 16, 8, 8)).shape == (1, 16, 3, 3)


def test_filters_on_the_meta_device_can_be_written_later():
    with torch.device("meta"):
        model = convnet()
    apply_blurpool(model)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert model(torch.rand(1, 3, 32, 32)).isfinite().all()
    assert math.isclose(model[2].blur_filter[0].sum().item(), 1)
    assert math.isclose(model[3].filt2d.sum().item(), 1)


def test_the_changed_model_can_be_traced():
    model = convnet()
    apply_blurpool(model)
    x = torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("training", [True, False])
def test_the_changed_model_can_be_scripted(training):
    model = convnet().train(training)
    apply_blurpool(model)
    x = torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


def test_it_works_under_autocast_and_in_half_precision():
    model = convnet()
    apply_blurpool(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.rand(1, 3, 32, 32)).dtype == torch.bfloat16
    assert nn.Sequential(BlurMaxPool2d(2))(torch.rand(1, 3, 8, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_the_algorithm_logs_how_many_layers_there_are():
    class Log:
        def log_hyperparameters(self, parameters):
            self.parameters = parameters

    state, log = State(convnet(), rank_zero_seed=0, max_duration="1ep"), Log()
    BlurPool().apply(Event.INIT, state, log)
    assert log.parameters == {"blurpool/num_blurpool_layers": 1, "blurpool/num_blurconv_layers": 1}


def test_an_algorithm_with_nothing_to_replace_is_refused():
    with pytest.raises(ValueError, match="replace_convs=False and replace_maxpools=False"):
        BlurPool(replace_convs=False, replace_maxpools=False)


def assert_near(actual, expected):
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=0)  # float32 against float64

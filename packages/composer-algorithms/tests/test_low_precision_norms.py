"""Low precision norms against the norm in double precision, and that they stay the same objects."""

import pytest
import torch
from torch import nn

from composer_algorithms import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from composer_algorithms.functional import apply_low_precision_groupnorm, apply_low_precision_layernorm
from composer_algorithms.low_precision_groupnorm import LPGroupNorm
from composer_algorithms.low_precision_layernorm import LPLayerNorm
from composer_events import Event, NoEffectWarning, State

KINDS = {
    "LayerNorm": (
        apply_low_precision_layernorm,
        LPLayerNorm,
        LowPrecisionLayerNorm,
        lambda **kw: nn.LayerNorm(8, **kw),
    ),
    "GroupNorm": (
        apply_low_precision_groupnorm,
        LPGroupNorm,
        LowPrecisionGroupNorm,
        lambda **kw: nn.GroupNorm(2, 8, **kw),
    ),
}
both = pytest.mark.parametrize(("apply", "low", "algorithm", "make"), KINDS.values(), ids=KINDS)


class ImageNorm(nn.LayerNorm):
    """As ConvNeXt's: the channels are the second dim."""

    def forward(self, input):
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


def reference(norm, x):
    x = x.double()
    groups = x.unflatten(-1, (norm.num_groups, -1)) if isinstance(norm, nn.GroupNorm) else x[:, None]
    mean = groups.mean(-1, keepdim=True)
    variance = (groups - mean).square().mean(-1, keepdim=True)
    normalized = ((groups - mean) / (variance + norm.eps).sqrt()).reshape(x.shape)
    weight = 1 if norm.weight is None else norm.weight.double()
    bias = 0 if norm.bias is None else norm.bias.double()
    return normalized * weight + bias


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_result_is_the_norms_in_the_low_dtype(apply, low, algorithm, make, dtype):
    model = nn.Sequential(make())
    nn.init.normal_(model[0].weight)
    nn.init.normal_(model[0].bias)
    x = torch.randn(4, 8)
    assert apply(model, "amp_bf16") is model
    with torch.autocast("cpu", dtype):
        result = model(x)
        assert torch.is_autocast_enabled("cpu")
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), reference(model[0], x), atol=0.05, rtol=0.01)  # 8 bits
    plain = model(x)
    assert plain.dtype == torch.float32
    torch.testing.assert_close(plain.double(), reference(model[0], x), atol=1e-5, rtol=0)


@both
@pytest.mark.parametrize("missing", ["affine", "weight", "bias"])
def test_a_missing_weight_or_bias_stays_missing(apply, low, algorithm, make, missing):
    if missing == "affine":
        norm = nn.LayerNorm(8, elementwise_affine=False) if low is LPLayerNorm else nn.GroupNorm(2, 8, affine=False)
    else:
        norm = make()
        setattr(norm, missing, None)
    model, x = nn.Sequential(norm), torch.randn(4, 8)
    apply(model, "amp_fp16")
    assert isinstance(model[0], low)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).double(), reference(norm, x), atol=0.05, rtol=0.01)


@both
def test_object_parameters_hooks_and_optimizer_stay(apply, low, algorithm, make):
    model, calls = nn.Sequential(nn.Linear(8, 8), make()).bfloat16(), []
    norm, parameters = model[1], list(model.parameters())
    norm.register_forward_hook(lambda *args: calls.append(1))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    apply(model, "amp_bf16", optimizers=optimizer)
    apply(model, "amp_bf16", optimizers=optimizer)
    assert model[1] is norm
    assert type(norm) is low
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
    model(torch.rand(2, 8, dtype=torch.bfloat16))
    assert calls == [1]


@both
def test_a_norm_on_its_own_is_changed(apply, low, algorithm, make):
    assert isinstance(apply(make(), "amp_bf16"), low)


@both
@pytest.mark.parametrize("precision", ["fp32", "amp_fp8", None])
def test_other_precisions_leave_the_model_alone_with_a_warning(apply, low, algorithm, make, precision):
    model = nn.Sequential(make())
    name = low.__name__.removeprefix("LP")
    message = f"Low Precision {name} only applies to AMP_FP16 and AMP_BF16 precisions"
    with pytest.warns(NoEffectWarning, match=message) as caught:
        assert apply(model, precision) is model
    assert caught[0].filename == __file__
    assert not isinstance(model[0], low)


@both
def test_a_model_without_norms_is_warned_about(apply, low, algorithm, make):
    name = low.__name__.removeprefix("LP")
    with pytest.warns(NoEffectWarning, match=f"No instances of torch.nn.{name} found in this Linear"):
        apply(nn.Linear(1, 1), "amp_bf16")


def test_subclasses_that_compute_something_else_are_left_alone():
    model = nn.Sequential(ImageNorm(3), nn.LayerNorm(4))
    apply_low_precision_layernorm(model, "amp_bf16")
    assert [type(norm) for norm in model] == [ImageNorm, LPLayerNorm]


@both
@pytest.mark.parametrize("event", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD])
def test_the_algorithm_acts_on_its_event_in_the_precision_of_the_state(apply, low, algorithm, make, event):
    one = algorithm(apply_at=event)
    state = State(nn.Sequential(make()), rank_zero_seed=0, max_duration="1ep", precision="amp_bf16")
    assert [e for e in Event if one.match(e, state)] == [event]
    one.apply(event, state, None)
    assert isinstance(state.model[0], low)
    assert repr(one) == f"{algorithm.__name__}(apply_at=Event.{event.name})"


@both
def test_other_events_are_refused(apply, low, algorithm, make):
    with pytest.raises(ValueError, match=r"apply_at=<Event\.FIT_START"):
        algorithm(apply_at=Event.FIT_START)


def test_the_constructors_are_those_of_torch():
    assert LPLayerNorm(8, 1e-3, False).weight is None
    assert LPLayerNorm((2, 8), dtype=torch.bfloat16).weight.shape == (2, 8)
    assert LPGroupNorm(2, 8, 1e-3, False).weight is None

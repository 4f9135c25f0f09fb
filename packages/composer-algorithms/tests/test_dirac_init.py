"""`apply_dirac_init`: convolutions that are the identity, and those that are left as they are."""

import pytest
import torch
from torch import nn

from composer_algorithms.functional import apply_dirac_init
from composer_events import NoEffectWarning


@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), (5, 2)])
def test_the_first_filters_copy_their_inputs_and_the_others_stay(conv, kernel, padding):
    first, second = conv(4, 4, 3).double(), conv(4, 6, kernel, padding=padding, bias=False).double()
    plain, others = first.weight.clone(), second.weight[4:].clone()
    assert apply_dirac_init(nn.Sequential(first, second)) == 1
    x = torch.randn(2, 4, *[7] * (second.weight.ndim - 2), dtype=torch.float64)
    torch.testing.assert_close(second(x)[:, :4], x)
    assert torch.equal(second.weight[4:], others)
    assert torch.equal(first.weight, plain)
    second(x).sum().backward()
    assert second.weight.grad is not None


def test_what_cannot_be_the_identity_is_left_alone_with_a_warning():
    standardized = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 3), nn.Conv2d(2, 2, 3, groups=2), standardized)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(NoEffectWarning, match="DiracInit has no effect on this Sequential") as warned:
        assert apply_dirac_init(model) == 0
    assert warned[0].filename == __file__
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_weights_without_values_are_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    with pytest.raises(ValueError, match="on the meta device"):
        apply_dirac_init(model)

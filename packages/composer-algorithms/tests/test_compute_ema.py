"""`compute_ema` and `EMAParameters` in a loop of one's own, against the formula written out."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composer_algorithms.ema import EMAParameters, compute_ema

SMOOTHINGS = [0, 0.5, 0.99, 1]


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def snapshot(model):
    return {name: tensor.detach().clone() for name, tensor in tensors(model).items()}


def shifted(model):
    """A copy of the model with other values in every tensor, counts included."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in tensors(other).values():
            tensor.add_(torch.rand(tensor.shape).add(1).to(tensor.dtype))
    return other


def expected_average(average, current, smoothing):
    """One tensor after the other in double precision, and counts as they are now."""
    return {
        name: (smoothing * average[name].double() + (1 - smoothing) * tensor.double()).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in current.items()
    }


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("kind", ["module", "parameters"])
def test_every_tensor_takes_one_step_and_the_model_none(make_model, kind, smoothing):
    average_model = make_model()
    model = shifted(average_model)
    start, current = snapshot(average_model), snapshot(model)
    average = average_model if kind == "module" else EMAParameters(average_model)
    compute_ema(model, average, smoothing)
    result = tensors(average) if kind == "module" else {**average.named_parameters_dict, **average.named_buffers_dict}
    torch.testing.assert_close(dict(result), expected_average(start, current, smoothing))
    torch.testing.assert_close(snapshot(model), current, rtol=0, atol=0)


@given(smoothing=st.floats(0, 1), seed=st.integers(0, 99))
def test_the_average_lies_between_what_it_was_and_the_model(smoothing, seed):
    torch.manual_seed(seed)
    model, average = nn.Linear(3, 3), nn.Linear(3, 3)
    low, high = torch.minimum(model.weight, average.weight), torch.maximum(model.weight, average.weight)
    compute_ema(model, average, smoothing)
    # one rounding of float32
    assert (average.weight >= low - 1e-7).all()
    assert (average.weight <= high + 1e-7).all()


@pytest.mark.parametrize("smoothing", [0, 1])
def test_the_ends_of_the_range_are_exact(smoothing):
    model, average = nn.Linear(50, 50), nn.Linear(50, 50)
    expected = (average if smoothing else model).weight.detach().clone()
    compute_ema(model, average, smoothing)
    assert torch.equal(average.weight, expected)


@pytest.mark.parametrize("smoothing", [0.9, 2 ** (-1 / 100)])
@pytest.mark.parametrize("kind", ["module", "parameters"])
def test_integer_buffers_keep_their_values_exactly(smoothing, kind):
    model = nn.Module()
    model.register_buffer("position_ids", torch.arange(2048))
    model.register_buffer("mask", torch.tensor([True, False]))
    average = copy.deepcopy(model) if kind == "module" else EMAParameters(model)
    for _ in range(20):
        compute_ema(model, average, smoothing)
    buffers = dict(average.named_buffers())
    assert torch.equal(buffers["position_ids"], torch.arange(2048))
    assert torch.equal(buffers["mask"], torch.tensor([True, False]))


def test_a_module_is_averaged_as_far_as_its_state_dict_goes():
    model = nn.Linear(2, 2)
    model.register_buffer("saved", torch.ones(1))
    model.register_buffer("unsaved", torch.ones(1), persistent=False)
    average = copy.deepcopy(model)
    average.saved.zero_()
    average.unsaved.zero_()
    compute_ema(model, average, 0.5)
    assert average.saved.item() == 0.5
    assert average.unsaved.item() == 0


def test_tied_parameters_take_one_step_not_two():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    average = copy.deepcopy(model)
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(average[0].weight)
    compute_ema(model, average, 0.75)
    torch.testing.assert_close(average[1].weight, torch.full((2, 2), 0.25))


def test_frozen_parameters_are_left_out_of_the_second_set():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert list(EMAParameters(model).named_parameters_dict) == ["weight"]
    assert list(EMAParameters(None).named_parameters()) == []


def test_the_average_keeps_its_dtype():
    model, average = nn.Linear(2, 2).double(), nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(average.weight)
    compute_ema(model, average, 0.75)
    assert average.weight.dtype == torch.float32
    torch.testing.assert_close(average.weight, torch.full((2, 2), 0.25))


def test_a_buffer_that_grew_is_taken_from_the_model():
    model = nn.Module()
    model.register_buffer("cache", torch.zeros(2))
    average = EMAParameters(model)
    model.cache = torch.ones(5)
    compute_ema(model, average, 0.9)
    assert torch.equal(average.named_buffers_dict["cache"], torch.ones(5))
    average.swap_params(model)
    assert model.cache.shape == (5,)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1])
def test_a_smoothing_that_is_no_weight_is_refused(smoothing):
    with pytest.raises(ValueError, match=f"smoothing={smoothing}"):
        compute_ema(nn.Linear(1, 1), nn.Linear(1, 1), smoothing)


def test_what_cannot_keep_an_average_is_refused():
    with pytest.raises(ValueError, match="pass a module or EMAParameters"):
        compute_ema(nn.Linear(1, 1), {"weight": torch.zeros(1, 1)})


def test_models_that_do_not_fit_together_are_refused_not_skipped():
    with pytest.raises(ValueError, match="no tensor name in common"):
        compute_ema(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match=r"2 parameters that Linear does not have, such as \['0.weight', '0.bias'\]"):
        compute_ema(nn.Linear(1, 1), EMAParameters(nn.Sequential(nn.Linear(1, 1))))


def test_an_exchange_and_its_return_restore_both_sets_bit_for_bit(make_model):
    model = make_model()
    average = EMAParameters(shifted(model))
    before, other = snapshot(model), {**average.named_parameters_dict, **average.named_buffers_dict}
    other = {name: tensor.clone() for name, tensor in other.items()}
    average.swap_params(model)
    torch.testing.assert_close(snapshot(model), other, rtol=0, atol=0)
    held = {**average.named_parameters_dict, **average.named_buffers_dict}
    torch.testing.assert_close(held, before, rtol=0, atol=0)
    average.swap_params(model)
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)


def test_an_exchange_copies_nothing_and_keeps_the_parameter_objects(make_model):
    model = make_model()
    average = EMAParameters(model)
    objects = [id(tensor) for tensor in tensors(model).values()]
    storages = {tensor.data_ptr() for tensor in tensors(model).values()}
    average.swap_params(model)
    assert [id(tensor) for tensor in tensors(model).values()] == objects
    held = {**average.named_parameters_dict, **average.named_buffers_dict}
    assert {tensor.data_ptr() for tensor in held.values()} == storages


def test_slices_of_a_larger_storage_are_exchanged_by_value_and_stay_slices():
    flat = torch.arange(6.0)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:2]), nn.Parameter(flat[2:])
    average = EMAParameters(model)
    compute_ema(shifted(model), average, 0)
    kept = average.named_parameters_dict["second"].clone()
    average.swap_params(model)
    assert torch.equal(flat[2:], kept)
    assert torch.equal(average.named_parameters_dict["second"], torch.arange(2.0, 6.0))


def test_an_exchange_with_another_dtype_leaves_the_model_its_own(make_model):
    model = make_model()
    average = EMAParameters(copy.deepcopy(model).double())
    average.swap_params(model)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}


class WithExpandedBuffer(nn.Module):
    """Its buffer has three rows that are one place in memory, as masks and position tables do."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.register_buffer("table", torch.full((1, 2), value).expand(3, 2))


def test_expanded_buffers_are_exchanged_and_come_back_as_they_were():
    model = WithExpandedBuffer(1.0)
    average = EMAParameters(WithExpandedBuffer(5.0))
    storage = model.table.data_ptr()
    average.swap_params(model)
    assert torch.equal(model.table, torch.full((3, 2), 5.0))
    assert torch.equal(average.named_buffers_dict["table"], torch.ones(3, 2))
    average.swap_params(model)
    assert model.table.data_ptr() == storage
    assert model.table.stride() == (0, 1)
    assert torch.equal(average.named_buffers_dict["table"], torch.full((3, 2), 5.0))


def test_expanded_buffers_are_exchanged_with_another_dtype_and_transferred():
    model, other = WithExpandedBuffer(1.0), WithExpandedBuffer(2.0)
    average = EMAParameters(WithExpandedBuffer(5.0).double())
    average.transfer_ema_params(other)
    assert torch.equal(other.table, torch.full((3, 2), 5.0))
    average.swap_params(model)
    assert model.table.dtype == torch.float32
    assert torch.equal(model.table, torch.full((3, 2), 5.0))
    other.table[0, 0] = 9.0
    assert average.named_buffers_dict["table"].max() == 1.0


@pytest.mark.parametrize("kind", ["module", "parameters", "parameters that were exchanged"])
def test_expanded_buffers_are_averaged(kind):
    model, target = WithExpandedBuffer(1.0), WithExpandedBuffer(5.0)
    average = target if kind == "module" else EMAParameters(target)
    if kind == "parameters that were exchanged":
        other = WithExpandedBuffer(5.0)
        average.swap_params(other)
    compute_ema(model, average, 0.75)
    assert torch.equal(dict(average.named_buffers())["table"], torch.full((3, 2), 4.0))
    assert torch.equal(model.table, torch.ones(3, 2))


def test_an_optimizer_goes_on_after_an_exchange(make_model):
    model = make_model(norm=False)
    average = EMAParameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average.swap_params(model)
    average.swap_params(model)
    before = snapshot(model)
    model((torch.ones(2, 4), None)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.last.bias, before["last.bias"] - 2)  # the gradient of a sum over two examples


def test_transfer_copies_into_another_model_and_keeps_the_average(make_model):
    model, other = make_model(), make_model()
    average = EMAParameters(model)
    average.transfer_ema_params(other)
    torch.testing.assert_close(snapshot(other), snapshot(model), rtol=0, atol=0)
    with torch.no_grad():
        other.last.bias.add_(1)
    torch.testing.assert_close(average.named_parameters_dict["last.bias"], model.last.bias.detach())

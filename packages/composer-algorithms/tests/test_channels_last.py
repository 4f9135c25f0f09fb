"""The memory format changes and nothing else."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from composer_algorithms import ChannelsLast
from composer_algorithms.functional import apply_channels_last
from composer_events import Event, State


@pytest.mark.parametrize(
    ("conv", "size", "memory_format"),
    [
        (nn.Conv2d(3, 8, 3), (2, 3, 6, 6), torch.channels_last),
        (nn.Conv3d(3, 8, 2), (2, 3, 4, 4, 4), torch.channels_last_3d),
    ],
    ids=["2d", "3d"],
)
def test_filters_and_outputs_have_their_channels_last_and_the_same_values(conv, size, memory_format):
    model, x = nn.Sequential(conv, nn.Flatten(), nn.LazyLinear(2)), torch.rand(size)
    expected, features = model(x), conv(x)
    parameters = list(model.parameters())
    apply_channels_last(model)
    assert conv.weight.is_contiguous(memory_format=memory_format)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert conv(x).is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(conv(x), features)
    torch.testing.assert_close(model(x), expected)


def test_checkpoints_are_those_of_the_plain_model():
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    plain = copy.deepcopy(model)
    ChannelsLast().apply(Event.INIT, State(model, rank_zero_seed=0, max_duration="1ep"), None)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_filters_of_a_model_that_will_be_sharded_stay_and_inputs_are_converted():
    conv = nn.Conv2d(3, 8, 3)
    sharding = SimpleNamespace(fsdp=None, fsdp2=SimpleNamespace(), tp=None)
    state = State(nn.Sequential(conv), rank_zero_seed=0, max_duration="1ep", parallelism_config=sharding)
    x = torch.rand(2, 3, 6, 6)
    expected = conv(x)
    for _ in range(2):
        ChannelsLast().apply(Event.INIT, state, None)
    assert conv.weight.is_contiguous()
    output = state.model(x)
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, expected)
    assert state.model(x[0]).shape == (8, 4, 4)


def test_a_model_without_convolutions_is_logged(caplog):
    apply_channels_last(nn.Linear(2, 2))
    assert "ChannelsLast has no effect on this Linear" in caplog.text


def test_it_takes_no_arguments_and_acts_on_init_only():
    with pytest.raises(TypeError):
        ChannelsLast(1)
    assert [event for event in Event if ChannelsLast().match(event, None)] == [Event.INIT]

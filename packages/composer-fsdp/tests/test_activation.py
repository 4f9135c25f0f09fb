import pytest
import torch
from torch import nn

from composer_dist.wrapping import canonical_name
from composer_fsdp import apply_ac
from composer_fsdp.activation import chosen_for_checkpointing


class Layer(nn.Linear):
    def forward(self, inputs):
        self.num_runs = getattr(self, "num_runs", 0) + 1
        return super().forward(inputs).relu()


class Net(nn.Sequential):
    def activation_checkpointing_fn(self, module):
        return isinstance(module, Layer)


def make():
    torch.manual_seed(1)
    model = nn.Module()
    model.net = Net(Layer(3, 4), Layer(4, 4), nn.Linear(4, 1))
    return model


def gradients(model):
    model.net(torch.ones(2, 3, requires_grad=True)).sum().backward()
    return {canonical_name(name): parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("recomputes", "offloads"), [(True, False), (True, True), (False, True), ("selective", False)])
def test_gradients_and_names_are_those_of_the_plain_model(recomputes, offloads, reentrant):
    if recomputes == "selective" and reentrant:
        with pytest.raises(ValueError, match="'selective' needs the newer implementation"):
            apply_ac(make(), "selective", False, reentrant=True)
        return
    model, plain = make(), make()
    layers = [model.net[0], model.net[1]]
    replaced = apply_ac(model, recomputes, offloads, reentrant=reentrant)
    assert list(replaced) == layers
    found, expected = gradients(model), gradients(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [layer.num_runs for layer in layers] == ([2, 2] if recomputes else [1, 1])


def test_an_attribute_comes_before_the_function_which_may_be_another():
    model = make()
    first, second, last = model.net
    assert chosen_for_checkpointing(model) == [first, second]
    first._activation_checkpointing = False
    last._activation_checkpointing = True
    assert chosen_for_checkpointing(model) == [second, last]
    assert chosen_for_checkpointing(model, lambda module: False) == [last]


def test_a_plain_module_chooses_among_its_own_layers():
    net = make().net
    assert chosen_for_checkpointing(net) == [net[0], net[1]]


def test_a_module_with_several_names_is_wrapped_under_each():
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(3, 3)] * 3)
    apply_ac(model, True, False, lambda module: isinstance(module, Layer))
    first, second, third = model.layers
    assert first is second is third
    assert not isinstance(first, Layer)


def test_what_is_no_function_cannot_choose():
    with pytest.raises(TypeError, match="activation_checkpointing_fn=3 is not a function"):
        apply_ac(make(), True, False, 3)


def test_what_is_wrapped_is_not_wrapped_again():
    model = make()
    apply_ac(model, True, False)
    assert apply_ac(model, True, False) == {}


def test_nothing_is_wrapped_where_nothing_is_asked_for():
    assert apply_ac(make(), False, False) == {}

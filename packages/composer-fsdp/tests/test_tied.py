import pytest
import torch
from torch import nn

from composer_fsdp import FSDPConfig, make_plan
from composer_fsdp.unit_selection import (
    check_param_tying,
    get_standalone_and_tied_modules,
    legalize_param_sharing_between_modules,
    resolve_ties,
)
from composer_fsdp.wrap_rules import choose_units


def tied_pair():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return first, second


class Net(nn.Module):
    """Holds modules by name, of which some are units."""

    def __init__(self, chosen, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self._chosen = chosen

    def fsdp_wrap_fn(self, module):
        return any(getattr(self, name) is module for name in self._chosen)


def resolve(net, policy="error"):
    model = nn.Module()
    model.net = net
    plan = make_plan(FSDPConfig(min_params=None), world_size=1)
    return resolve_ties(model, choose_units(model, plan), policy)


def test_two_units_with_one_weight_are_refused():
    a, b = tied_pair()
    with pytest.raises(ValueError, match="Detected tied parameters between modules designated for FSDP wrapping"):
        resolve(Net(["a", "b"], a=a, b=b))


def test_a_unit_that_shares_with_what_is_none_is_refused():
    a, b = tied_pair()
    with pytest.raises(ValueError, match="Parameter sharing detected between modules to be sharded and module 'b'"):
        resolve(Net(["a"], a=a, b=b))


@pytest.mark.filterwarnings("ignore:fsdp_wrap_fn chooses none")
def test_tied_modules_inside_one_unit_are_fine():
    a, b = tied_pair()
    assert [unit.name for unit in resolve(Net(["pair"], pair=nn.Sequential(a, b)))] == ["net.pair", "net"]
    a, b = tied_pair()
    assert [unit.name for unit in resolve(Net([], a=a, b=b))] == ["net"]


def test_a_child_that_shares_with_its_parent_cannot_be_a_unit():
    def family():
        parent = nn.Module()
        parent.child = nn.Linear(3, 3)
        parent.weight = parent.child.weight
        return parent

    assert [unit.name for unit in resolve(Net(["parent"], parent=family()))] == ["net.parent", "net"]
    for chosen in (["child"], ["parent", "child"]):
        parent = family()
        net = Net([], parent=parent)
        picked = {"child": parent.child, "parent": parent}
        net.fsdp_wrap_fn = lambda module, names=chosen, picked=picked: any(module is picked[name] for name in names)
        with pytest.raises(ValueError, match="Parameter sharing detected"):
            resolve(net)


def test_units_with_one_weight_may_become_one():
    a, b = tied_pair()
    units = resolve(Net(["a", "b"], a=a, b=b), "group")
    assert [(unit.name, unit.partners) for unit in units] == [("net.a", (b,)), ("net", ())]


def test_units_tied_in_a_chain_become_one():
    """The second unit stayed alone if it shared a weight with the third, which the first had taken in already."""
    a, c = tied_pair()
    b = nn.Linear(3, 3)
    b.bias = c.bias
    units = resolve(Net(["a", "b", "c"], a=a, b=b, c=c), "group")
    assert [(unit.name, set(unit.partners)) for unit in units] == [("net.a", {b, c}), ("net", set())]


def test_modules_are_told_apart_by_whether_they_share():
    a, b = tied_pair()
    alone, empty, outer = nn.Linear(1, 1), nn.ReLU(), nn.Sequential(nn.Linear(2, 2))
    assert get_standalone_and_tied_modules([a, alone, b]) == ([alone], {a, b})
    assert get_standalone_and_tied_modules([alone, a, empty]) == ([alone, a], set())
    assert get_standalone_and_tied_modules([outer, outer[0]]) == ([], {outer, outer[0]})
    assert get_standalone_and_tied_modules([]) == ([], set())


def test_sharing_is_looked_for_outside_of_what_is_listed():
    a, b = tied_pair()
    model = nn.Sequential(nn.Sequential(a, nn.ReLU()), nn.Sequential(b))
    legalize_param_sharing_between_modules(model, [model])
    legalize_param_sharing_between_modules(model, [model[0], model[1]])  # both are listed
    with pytest.raises(ValueError, match=r"module '1\.0': '0' has the same weights"):
        legalize_param_sharing_between_modules(model, [model[0]])


def test_a_tie_may_be_neither_made_nor_broken():
    a, b = tied_pair()
    model = nn.Sequential(a, b)
    with check_param_tying(model):
        new = nn.Parameter(torch.zeros(3, 3))
        a.weight = b.weight = new
    with (
        pytest.raises(RuntimeError, match="Parameter tying relationship changed during the context"),
        check_param_tying(model),
    ):
        a.weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(RuntimeError, match="Parameter tying relationship changed"), check_param_tying(model):
        a.bias = b.bias

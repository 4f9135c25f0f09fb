"""Replacing modules: what is visited, what a replacement takes over, and how optimizers follow."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from composer_algorithms.module_surgery import (
    count_module_instances,
    replace_module_classes,
    update_params_in_optimizer,
)


class Doubled(nn.Module):
    """A linear layer, computed twice."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return 2 * self.linear(x)


def copied(module, index):
    return copy.deepcopy(module)


def fresh_linear(module, index):
    return nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 2)
    )


def params_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def same_objects(first, second):
    return [id(one) for one in first] == [id(one) for one in second]


def test_every_descendant_is_asked_about_once_parents_first_with_a_count_of_its_class():
    model, asked = network(), []
    policies = {
        nn.Linear: lambda module, index: asked.append((module, index)),
        nn.Sequential: lambda module, index: asked.append((module, index)),
    }
    assert replace_module_classes(model, policies) == {}
    inner = model[1]
    assert asked == [(model[0], 0), (inner, 0), (inner[1], 1), (inner[2], 1), (inner[2][0], 2), (model[2], 3)]


def test_counts_go_on_from_the_indices_that_are_passed():
    seen, indices = [], {nn.Linear: 5}
    replace_module_classes(network(), {nn.Linear: lambda module, index: seen.append(index)}, indices=indices)
    assert seen == [5, 6, 7, 8]
    assert indices == {nn.Linear: 9}


def test_a_replacement_hangs_everywhere_where_the_module_hung():
    model = network()
    shared = model[0]
    model[1].add_module("again", shared)
    replaced = replace_module_classes(model, {nn.Linear: lambda m, i: nn.Identity() if m is shared else None})
    assert list(replaced) == [shared]
    assert model[0] is replaced[shared] is model[1].again


def test_children_of_a_replaced_module_are_visited_and_replaced_inside_a_wrapper():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    replaced = replace_module_classes(model, {nn.Sequential: lambda m, i: Doubled(m), nn.Linear: fresh_linear})
    assert len(replaced) == 2
    assert isinstance(model[0], Doubled)
    assert model[0].linear[0] in replaced.values()


def test_with_recursion_replacements_are_visited_too():
    def grow(module, index):
        return nn.Sequential(nn.ReLU(), nn.Tanh()) if index < 2 else None

    def tanh(module, index):
        return nn.ReLU()

    model = nn.Sequential(nn.ReLU())
    replace_module_classes(model, {nn.ReLU: grow, nn.Tanh: tanh}, recurse_on_replacements=True)
    assert [type(module).__name__ for module in model[0].modules()][:2] == ["Sequential", "Sequential"]


def test_the_root_is_visited_on_request_and_changed_in_place_only():
    model = nn.Linear(2, 2)
    assert replace_module_classes(model, {nn.Linear: copied}) == {}
    assert replace_module_classes(model, {nn.Linear: lambda m, i: m}, include_root=True) == {model: model}
    with pytest.raises(TypeError, match="the model itself, a Linear"):
        replace_module_classes(model, {nn.Linear: copied}, include_root=True)


def test_two_policies_may_not_replace_one_module():
    with pytest.raises(RuntimeError, match=r"two policies replace the module '0', a Linear"):
        replace_module_classes(nn.Sequential(nn.Linear(1, 1)), {nn.Linear: copied, nn.Module: copied})


def test_a_model_inside_ddp_is_refused(process_group):
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match="wrapped by DistributedDataParallel"):
        replace_module_classes(model, {nn.Linear: copied})


def test_instances_are_counted_once_and_without_the_root():
    model = network()
    model.add_module("again", model[0])
    assert count_module_instances(model, nn.Linear) == 4
    assert count_module_instances(model, (nn.Linear, nn.ReLU)) == 5
    assert count_module_instances(model, nn.Sequential) == 2


def test_dtype_mode_frozenness_and_memory_format_are_those_of_the_old_module():
    old = nn.Conv2d(4, 4, 3).to(torch.bfloat16, memory_format=torch.channels_last).eval().requires_grad_(False)
    model = nn.Sequential(old)
    replace_module_classes(model, {nn.Conv2d: lambda m, i: nn.Conv2d(4, 4, 3)})
    new = model[0]
    assert new is not old
    assert new.weight.dtype == new.bias.dtype == torch.bfloat16
    assert new.weight.is_contiguous(memory_format=torch.channels_last)
    assert not new.training
    assert not new.weight.requires_grad
    assert not new.bias.requires_grad


def test_a_dtype_that_was_chosen_on_purpose_stays():
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16))
    replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(2, 2, dtype=torch.float64)})
    assert model[0].weight.dtype == torch.float64


def test_frozenness_is_that_of_the_parameter_of_the_same_name():
    model = network()
    model[0].bias.requires_grad_(False)
    replace_module_classes(model, {nn.Linear: fresh_linear})
    assert [p.requires_grad for p in model[0].parameters()] == [True, False]


def test_modules_on_the_meta_device_get_replacements_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    replace_module_classes(model, {nn.Linear: fresh_linear, nn.ReLU: lambda m, i: nn.BatchNorm1d(2)})
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


def test_hooks_fire_for_the_replacement_and_their_handles_remove_them():
    model, calls = nn.Sequential(nn.Linear(2, 2)), []
    handle = model[0].register_forward_hook(lambda module, args, output: calls.append(module))
    model[0].register_forward_pre_hook(lambda module, args, kwargs: calls.append("pre"), with_kwargs=True)
    replace_module_classes(model, {nn.Linear: fresh_linear})
    model(torch.rand(1, 2))
    assert calls == ["pre", model[0]]
    handle.remove()
    model(torch.rand(1, 2))
    assert calls == ["pre", model[0], "pre"]


def test_hooks_of_a_wrapped_module_fire_once():
    model, calls = nn.Sequential(nn.Linear(2, 2)), []
    model[0].register_forward_hook(lambda *args: calls.append(1))
    replace_module_classes(model, {nn.Linear: lambda m, i: Doubled(m)})
    model(torch.rand(1, 2))
    assert calls == [1]


def test_shared_parameters_stay_shared():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "body": nn.Linear(3, 3), "head": nn.Linear(3, 5)})
    model["head"].weight = model["embedding"].weight
    old = model["head"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_module_classes(model, {nn.Linear: copied}, optimizer)
    assert model["head"].weight is model["embedding"].weight
    assert model["head"].weight is not old
    assert {id(p) for p in params_of(optimizer)} == {id(p) for p in model.parameters()}


def test_parameters_that_two_replaced_modules_share_stay_shared():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias, model[1].bias]}], lr=0.1)
    replace_module_classes(model, {nn.Linear: copied}, optimizer)
    assert model[1].weight is model[0].weight
    assert same_objects(optimizer.param_groups[0]["params"], [model[0].weight])
    assert {id(p) for p in optimizer.param_groups[1]["params"]} == {id(model[0].bias), id(model[1].bias)}


def test_a_replacement_without_a_place_for_a_shared_parameter_is_refused_with_the_modules_path():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "body": nn.Sequential(nn.Linear(3, 5))})
    model["body"][0].weight = model["embedding"].weight
    with pytest.raises(ValueError, match=r"the module 'body.0' shares its parameter 'weight' of shape \(5, 3\)"):
        replace_module_classes(model, {nn.Linear: lambda m, i: nn.Linear(3, 6)})


def test_parametrized_modules_can_be_replaced_by_wrappers():
    model = nn.Sequential(parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Tanh()))
    expected = 2 * model[0](torch.ones(1, 2))
    replace_module_classes(model, {nn.Linear: lambda m, i: Doubled(m)})
    assert torch.equal(model(torch.ones(1, 2)), expected)


def test_a_fully_replaced_model_has_its_parameters_in_order_in_the_optimizer():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    replace_module_classes(model, {nn.Linear: fresh_linear}, optimizer)
    assert same_objects(params_of(optimizer), model.parameters())


def test_kept_parameters_stay_in_place_and_keep_their_state_and_the_others_lose_it():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    old, kept = model[0].weight, model[2].weight
    replace_module_classes(model[1], {nn.Linear: fresh_linear}, optimizer)
    replace_module_classes(model, {nn.Linear: lambda m, i: fresh_linear(m, i) if i == 0 else None}, optimizer)
    assert kept in optimizer.state
    assert old not in optimizer.state
    expected = [model[2].weight, model[2].bias, *model[1].parameters(), *model[0].parameters()]
    assert same_objects(params_of(optimizer), expected)


def test_new_parameters_join_the_group_of_those_of_the_same_name():
    model = network()
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.1)
    replace_module_classes(model, {nn.Linear: lambda m, i: Doubled(fresh_linear(m, i))}, optimizer)
    named = list(model.named_parameters())
    assert same_objects(optimizer.param_groups[0]["params"], [p for n, p in named if n.endswith("weight")])
    assert same_objects(optimizer.param_groups[1]["params"], [p for n, p in named if n.endswith("bias")])


def test_names_beside_the_parameters_follow():
    model = network()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    replace_module_classes(model, {nn.Linear: lambda m, i: Doubled(m if i % 2 else fresh_linear(m, i))}, optimizer)
    group = optimizer.param_groups[0]
    names = {id(p): n for n, p in model.named_parameters()}
    assert group["param_names"] == [names[id(p)] for p in group["params"]]
    assert set(group["param_names"]) == set(names.values())


def test_frozen_replacements_join_only_where_their_predecessors_were():
    model = network()
    model.requires_grad_(False)
    outside, inside = torch.optim.SGD([nn.Parameter(torch.ones(1))]), torch.optim.SGD(model.parameters())
    replace_module_classes(model, {nn.Linear: fresh_linear}, outside)
    assert len(params_of(outside)) == 1
    inside = torch.optim.SGD(model.parameters())
    replace_module_classes(model, {nn.Linear: fresh_linear}, inside)
    assert same_objects(params_of(inside), model.parameters())


def test_several_optimizers_each_follow_their_own_modules():
    model = network()
    first, second = torch.optim.SGD(model[0].parameters()), torch.optim.Adam(model[1:].parameters())
    replace_module_classes(model, {nn.Linear: fresh_linear}, [first, second])
    assert same_objects(params_of(first), model[0].parameters())
    assert same_objects(params_of(second), model[1:].parameters())


def test_new_parameters_of_a_module_in_no_group_are_an_error_that_names_them():
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(RuntimeError, match=r"the parameter '2.weight' .* in none of the 2 groups of 1 optimizer"):
        replace_module_classes(model, {nn.Linear: fresh_linear}, optimizer)


def test_a_replacement_trains_as_a_model_whose_optimizer_came_later():
    results = []
    for optimizer_first in (True, False):
        model = network()
        if optimizer_first:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        replace_module_classes(model, {nn.Linear: fresh_linear}, optimizer if optimizer_first else None)
        if not optimizer_first:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        results.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_without_an_optimizer_the_log_says_what_that_means(caplog):
    caplog.set_level(logging.INFO, logger="composer.algorithms.module_surgery")
    replace_module_classes(network(), {nn.Linear: fresh_linear})
    assert "4 modules were replaced, and no optimizer was passed" in caplog.text
    caplog.clear()
    replace_module_classes(network(), {nn.Conv2d: copied})
    assert not caplog.text


class TestUpdateParamsInOptimizer:
    def test_removed_ones_leave_with_their_state_and_added_ones_come_last(self):
        a, b, c, d = (nn.Parameter(torch.ones(1)) for _ in range(4))
        optimizer = torch.optim.SGD([a, b, c], lr=0.1, momentum=0.9)
        optimizer.state[a]["momentum_buffer"] = torch.ones(1)
        update_params_in_optimizer([a, b], [b, d], optimizer)
        assert same_objects(params_of(optimizer), [b, c, d])
        assert a not in optimizer.state

    def test_nothing_changes_where_the_sets_are_equal(self):
        a, b = (nn.Parameter(torch.ones(1)) for _ in range(2))
        optimizer = torch.optim.SGD([a, b])
        update_params_in_optimizer([a, b], [b, a], optimizer)
        assert same_objects(params_of(optimizer), [a, b])

    @pytest.mark.parametrize("old", [[], [0, 1], [3]], ids=["none", "both groups", "unknown"])
    def test_it_is_an_error_if_no_single_one_of_several_groups_is_meant(self, old):
        tensors = [nn.Parameter(torch.ones(1)) for _ in range(5)]
        optimizer = torch.optim.SGD([{"params": [tensors[0]]}, {"params": [tensors[1]]}], lr=0.1)
        with pytest.raises(RuntimeError, match="no single parameter group"):
            update_params_in_optimizer([tensors[i] for i in old], [tensors[4]], optimizer)
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]

    def test_the_group_of_the_removed_ones_is_used(self):
        a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
        optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=0.1)
        update_params_in_optimizer([b], [c], optimizer)
        assert optimizer.param_groups[1]["params"] == [c]

    def test_several_optimizers_without_one_that_holds_the_old_ones_are_not_implemented(self):
        a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
        optimizers = [torch.optim.SGD([a]), torch.optim.SGD([b])]
        with pytest.raises(NotImplementedError, match="of 2 optimizer"):
            update_params_in_optimizer([a, b], [c], optimizers)

    def test_names_that_are_not_known_are_an_error(self):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.named_parameters())
        with pytest.raises(RuntimeError, match="use replace_module_classes"):
            update_params_in_optimizer(model.parameters(), [nn.Parameter(torch.ones(1))], optimizer)

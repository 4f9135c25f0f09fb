import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from composer_fsdp import FSDP2Config, FSDPConfig, make_plan
from composer_fsdp.wrap_rules import choose_units, function_of_policy


class Block(nn.Module):
    """110 parameters, in two layers of 55."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 5)
        self.second = nn.Linear(10, 5)


class Net(nn.Module):
    def __init__(self, wrap_fn=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 2)
        if wrap_fn is not None:
            self.fsdp_wrap_fn = wrap_fn


class Model(nn.Module):
    def __init__(self, wrap_fn=None):
        super().__init__()
        self.model = Net(wrap_fn)


def is_block(module):
    return isinstance(module, Block)


def plan_of(precision="fp32", **settings):
    return make_plan(FSDPConfig(**{"min_params": None, **settings}), world_size=1, precision=precision)


def names(model, plan=None, **how):
    return [unit.name for unit in choose_units(model, plan or plan_of(), **how)]


@pytest.mark.parametrize(
    ("min_params", "expected"),
    [
        (111, ["model"]),
        # A layer does not reach it, a block does, and what is left of the model does not matter: it is a root.
        (110, ["model.blocks.0", "model.blocks.1", "model"]),
        (56, ["model.blocks.0", "model.blocks.1", "model"]),
        # Both layers do, and nothing is left for the block.
        (55, [f"model.blocks.{i}.{layer}" for i in (0, 1) for layer in ("first", "second")] + ["model"]),
        (None, ["model"]),
        ("110", ["model.blocks.0", "model.blocks.1", "model"]),
    ],
)
def test_modules_are_chosen_by_what_no_unit_inside_them_takes(min_params, expected):
    assert names(Model(), plan_of(min_params=min_params)) == expected


def test_a_large_module_is_a_unit_although_the_function_says_no():
    assert names(Model(lambda module: False), plan_of(min_params=110)) == ["model.blocks.0", "model.blocks.1", "model"]


def test_the_function_of_the_direct_child_chooses():
    assert names(Model(is_block)) == ["model.blocks.0", "model.blocks.1", "model"]


def test_a_unit_may_have_one_of_torchs_own_strategies():
    options = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    unit, *_ = choose_units(Model(lambda module: options if is_block(module) else False), plan_of())
    assert unit.options == {"sharding_strategy": "SHARD_GRAD_OP"}


def test_an_attribute_comes_before_function_and_size():
    model = Model(is_block)
    model.model.blocks[0]._fsdp_wrap = False
    model.model.head._fsdp_wrap = True
    assert names(model, plan_of(min_params=110)) == ["model.blocks.1", "model.head", "model"]


def test_a_child_that_is_not_to_be_wrapped_is_left_alone():
    model = Model(is_block)
    model.other = nn.Linear(2, 2)
    model.model._fsdp_wrap = False
    assert names(model) == ["other"]


def test_a_container_gives_its_members_as_roots():
    model = nn.Module()
    model.parts = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ModuleList([nn.Linear(1, 1)])})
    units = choose_units(model, plan_of())
    assert [(unit.name, unit.is_root) for unit in units] == [("parts.a", True), ("parts.b.0", True)]


def test_a_plain_module_is_its_own_root():
    units = choose_units(Net(is_block), plan_of(), wraps_itself=True)
    assert [(unit.name, unit.is_root) for unit in units] == [("blocks.0", False), ("blocks.1", False), ("", True)]


def test_a_plain_module_that_is_not_to_be_wrapped_has_its_children_as_roots():
    """Seen before: it was wrapped as a whole all the same."""
    net = Net(is_block)
    net._fsdp_wrap = False
    units = choose_units(net, plan_of(), wraps_itself=True)
    assert [(unit.name, unit.is_root) for unit in units] == [("blocks.0", True), ("blocks.1", True), ("head", True)]


def test_a_function_that_chooses_nothing_is_warned_about():
    """Seen before: one unit of all weights, without a word."""
    with pytest.warns(UserWarning, match=r"fsdp_wrap_fn chooses none of the \d+ modules in the Net 'model', whose"):
        assert names(Model(lambda module: False)) == ["model"]
    model = Model(is_block)
    model.model._fsdp_wrap = False
    with pytest.warns(UserWarning, match="Nothing of the Model is sharded.*_fsdp_wrap=False"):
        assert names(model) == []


def test_ignored_modules_and_modules_without_parameters_are_passed_over():
    model = Model(lambda module: not isinstance(module, nn.ModuleList))
    model.model.act = nn.ReLU()
    ignored = model.model.blocks[0]
    assert names(model, plan_of(ignored_modules=[ignored])) == [
        "model.blocks.1.first",
        "model.blocks.1.second",
        "model.head",
        "model",
    ]


def test_a_module_that_is_reached_twice_is_one_unit():
    model = Model(is_block)
    model.model.again = model.model.blocks[0]
    assert names(model) == ["model.blocks.0", "model.blocks.1", "model"]


def test_nothing_is_chosen_where_the_caller_has_sharded():
    assert names(Model(is_block), plan_of(auto_wrap=False)) == []


def test_metrics_are_not_sharded():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Counter(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def update(self):
            pass

        def compute(self):
            pass

    model = Model()
    model.metric, model.metrics = Counter(), torchmetrics.MetricCollection([Counter()])
    assert names(model) == ["model"]


def test_the_settings_of_one_unit_come_from_the_function():
    options = {"process_group": "node", "mixed_precision": "FULL"}
    units = choose_units(Model(lambda module: options if is_block(module) else False), plan_of())
    assert [unit.options for unit in units] == [options, options, {}]


def test_a_setting_that_one_unit_cannot_have_is_refused():
    wrong = Model(lambda module: {"mixed_precison": "FULL"} if is_block(module) else False)
    with pytest.raises(ValueError, match=r"'mixed_precison' for 'model\.blocks\.0'.*Did you mean 'mixed_precision'"):
        choose_units(wrong, plan_of())
    wrong = Model(lambda module: {"grad_sync": "all"} if is_block(module) else False)
    with pytest.raises(ValueError, match="grad_sync='all'"):
        choose_units(wrong, plan_of())


@pytest.mark.filterwarnings("ignore:FSDP2 Config/APIs are experimental:UserWarning")
def test_the_narrow_form_knows_settings_of_its_own_and_no_sizes():
    plan = make_plan(FSDP2Config(), world_size=1)
    assert names(Model(), plan) == ["model"]
    right = Model(lambda module: {"reshard_after_forward": False} if is_block(module) else False)
    assert names(right, plan) == ["model.blocks.0", "model.blocks.1", "model"]
    wrong = Model(lambda module: {"process_group": "node"} if is_block(module) else False)
    with pytest.raises(KeyError, match=r"Invalid FSDP2 config keys in wrap_fn return value\. Valid keys are: \{"):
        choose_units(wrong, plan)


@pytest.mark.filterwarnings("ignore:FSDP2 Config/APIs are experimental:UserWarning")
def test_the_attribute_is_deprecated_in_the_narrow_form_and_said_once():
    plan = make_plan(FSDP2Config(), world_size=1)
    model = Model()
    model.model.blocks[0]._fsdp_wrap = model.model.blocks[1]._fsdp_wrap = True
    with pytest.warns(DeprecationWarning, match="The _fsdp_wrap attribute will be removed in a future release") as said:
        assert names(model, plan) == ["model.blocks.0", "model.blocks.1", "model"]
    assert len(said) == 1


@pytest.mark.parametrize(("precision", "is_apart"), [("fp32", False), ("amp_bf16", True)])
def test_running_statistics_are_kept_apart_from_low_precision(precision, is_apart):
    model = nn.Module()
    model.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    units = {unit.name: unit.options for unit in choose_units(model, plan_of(precision))}
    assert units == ({"net.1": {"mixed_precision": "FULL"}, "net": {}} if is_apart else {"net": {}})


def test_choosing_changes_nothing_and_works_without_weights():
    with torch.device("meta"):
        model = Model(is_block)
    before = dict(model.named_parameters())
    assert len(choose_units(model, plan_of())) == 3
    assert dict(model.named_parameters()) == before


@pytest.mark.parametrize("policy", [CustomPolicy(is_block), ModuleWrapPolicy({Block}), is_block])
def test_policies_of_torch_choose_as_a_function_does(policy):
    model = Net()
    assert names(model, wraps_itself=True, wrap_fn=function_of_policy(model, policy)) == ["blocks.0", "blocks.1", ""]


def test_settings_that_a_policy_of_torch_returns_are_those_of_the_unit():
    model = Net()
    policy = CustomPolicy(lambda module: {"mixed_precision": "FULL"} if is_block(module) else False)
    units = choose_units(model, plan_of(), wraps_itself=True, wrap_fn=function_of_policy(model, policy))
    assert [dict(unit.options) for unit in units] == [{"mixed_precision": "FULL"}] * 2 + [{}]


def test_a_policy_that_is_none_is_refused():
    with pytest.raises(TypeError, match="the policy 3 is a int"):
        function_of_policy(Net(), 3)

import json

import pytest
from torch import nn

from composer_fsdp import FSDPConfig, explain


class Expert(nn.Linear):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), Expert(6, 6)) for _ in range(2))
        self.frozen = nn.Linear(6, 6)

    def forward(self, inputs):
        return self.blocks[1](self.blocks[0](self.stem(inputs)))

    def fsdp_wrap_fn(self, module):
        if isinstance(module, Expert):
            return {"process_group": "set2", "mixed_precision": "FULL"}
        return isinstance(module, nn.Sequential)

    def activation_checkpointing_fn(self, module):
        return False


def units_of(*args, **settings):
    return {unit.name: unit for unit in explain(*args, **settings).units}


def test_units_come_in_the_order_of_the_model_as_a_tree():
    explanation = explain(Net(), FSDPConfig(), world_size=4)
    assert [(unit.name, unit.depth) for unit in explanation.units] == [
        ("", 0),
        ("blocks.0", 1),
        ("blocks.0.1", 2),
        ("blocks.1", 1),
        ("blocks.1.1", 2),
    ]
    assert str(explanation).splitlines()[2].startswith("    blocks.0.1 (Expert): 42 parameters")


def test_each_unit_has_its_own_mesh_and_formats():
    units = units_of(Net(), FSDPConfig(), world_size=4, precision="amp_bf16")
    assert units["blocks.0"].mesh == {"data_parallel_shard": 4}
    assert units["blocks.0.1"].mesh == {"data_parallel_shard": 2}
    assert (units["blocks.0"].param_dtype, units["blocks.0.1"].param_dtype) == ("bfloat16", "float32")


def test_sizes_follow_from_rows_and_ranks():
    units = units_of(Net(), FSDPConfig(), world_size=4)
    # 6 rows over 4 ranks: 2 for rank 0, of the weight and of the bias, in float32; gathered with what fills them up.
    assert units["blocks.0"].shard_bytes == (2 * 6 + 2) * 4
    assert units["blocks.0"].gathered_bytes == 4 * (2 * 6 + 2) * 4


@pytest.mark.parametrize(
    ("settings", "mesh"),
    [
        ({}, {"data_parallel_shard": 16}),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"data_parallel_replicate": 2, "data_parallel_shard": 8}),
        ({"sharding_strategy": "NO_SHARD"}, {"data_parallel_replicate": 16, "data_parallel_shard": 1}),
        ({"process_group": "set4"}, {"data_parallel_shard": 4}),
        (
            {"sharding_strategy": "HYBRID_SHARD", "process_group": ("set4", "mod4")},
            {"data_parallel_replicate": 4, "data_parallel_shard": 4},
        ),
    ],
)
def test_the_mesh_is_that_of_the_settings(settings, mesh):
    (unit,) = explain(nn.Linear(4, 4), FSDPConfig(**settings), world_size=16).units
    assert unit.mesh == mesh


@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {"data_parallel_shard": 16}),
        ({"sharding_strategy": "no_shard"}, {"data_parallel_replicate": 16, "data_parallel_shard": 1}),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"data_parallel_replicate": 2, "data_parallel_shard": 8}),
        ({"process_group": ["set4", "mod4"]}, {"data_parallel_replicate": 4, "data_parallel_shard": 4}),
    ],
)
def test_a_unit_has_the_mesh_of_its_own_settings(options, mesh):
    model = Net()
    model.fsdp_wrap_fn = lambda module: options if isinstance(module, Expert) else False
    units = units_of(model, FSDPConfig(), world_size=16)
    assert units["blocks.0.1"].mesh == mesh
    assert units[""].mesh == {"data_parallel_shard": 16}


def test_ignored_modules_are_whole():
    model = Net()
    assert explain(model, FSDPConfig(ignored_modules=[model.frozen]), world_size=2).whole_parameters == 42


def test_it_is_json_too():
    explanation = explain(Net(), FSDPConfig(), world_size=4)
    assert json.loads(json.dumps(explanation.to_dict()))["units"][1]["name"] == "blocks.0"


def test_units_that_differ_only_in_their_names_are_one_line():
    class Blocks(nn.Sequential):
        def fsdp_wrap_fn(self, module):
            return isinstance(module, nn.Linear)

    model = Blocks(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 6))
    lines = str(explain(model, FSDPConfig(), world_size=4)).splitlines()
    assert [line.split(": ")[0].strip() for line in lines if " (" in line and "Linear" in line] == [
        "0 to 2 (3 x Linear), each",
        "3 (Linear)",
    ]

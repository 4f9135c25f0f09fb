"""What a state does with settings of parallelism where torch is: a mesh over its ranks, and what only weights tell."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from composer_events import State


@dataclass
class FSDPConfig:
    load_monolith_rank0_only: bool = True
    sync_module_states: bool = True


@dataclass
class ParallelismConfig:
    fsdp: Any = None
    fsdp2: Any = None
    tp: Any = None


PROGRAM = """
from types import SimpleNamespace as Settings
from composer_events import ParallelismType, State

class CUDALike:
    def tensor_to_device(self, tensor):
        return tensor

def make_state(tp=None, device="cpu", model=None, **fsdp):
    kind = "fsdp2" if "device_mesh" in fsdp else "fsdp"
    config = Settings(fsdp=None, fsdp2=None, tp=tp and Settings(tensor_parallel_degree=tp))
    setattr(config, kind, Settings(**fsdp))
    return State(model, 0, "run", device, parallelism_config=config)

def describe(**settings):
    mesh = make_state(**settings).device_mesh
    return mesh if mesh is None else [list(mesh.mesh_dim_names), mesh.mesh.tolist(), mesh.device_type]

def message(**settings):
    try:
        make_state(**settings)
    except ValueError as error:
        return str(error)

seen["default"] = describe()
seen["device"] = describe(device=CUDALike())
seen["replicated"] = describe(data_parallel_replicate_degree=2)
seen["filled"] = describe(data_parallel_replicate_degree=-1, data_parallel_shard_degree=2)
seen["split"] = describe(tp=2)
seen["groups"] = describe(process_group="self")
seen["hybrid"] = describe(sharding_strategy="hybrid_shard")
seen["hybrid by degrees"] = describe(sharding_strategy="hybrid_shard", data_parallel_replicate_degree=2)
seen["too many"] = message(data_parallel_shard_degree=4)

state = make_state(data_parallel_replicate_degree=2, tp=None)
sums = torch.tensor([float(rank + 1)])
group = state.device_mesh[ParallelismType.DATA_PARALLEL_REPLICATE.value].get_group()
torch.distributed.all_reduce(sums, group=group)
seen["sum"] = sums.item()

own = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("mine",))
seen["own"] = make_state(device_mesh=own).device_mesh is own
seen["own, split"] = message(device_mesh=own, tp=2)

# Rank 1 builds its model on meta, as it should, then rank 0 does; sync_module_states differs in the last one.
monolith = {"load_monolith_rank0_only": True, "sync_module_states": True}
there, nowhere = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")
seen["good"] = message(model=there if rank == 0 else nowhere, **monolith)
seen["bad"] = message(model=nowhere if rank == 0 else there, **monolith)
monolith["sync_module_states"] = rank == 0
seen["unlike"] = message(model=there, **monolith)
seen["without sync"] = message(model=there, **{**monolith, "sync_module_states": False})

# Without a comparison one rank would wait for the other, or both for different groups.
seen["alone"] = message(load_monolith_rank0_only=rank == 0, sync_module_states=True)
seen["degrees"] = message(data_parallel_replicate_degree=2 if rank == 0 else None)
seen["shards"] = message(data_parallel_shard_degree=3 - rank)
seen["versions"] = message(**({"device_mesh": own} if rank == 0 else {}))
seen["verbose"] = message(verbose=rank == 0)

class FSDPConfig:
    data_parallel_replicate_degree = 2

state = State(None, 0)
state.fsdp_config = FSDPConfig()
seen["assigned"] = list(state.device_mesh.mesh_dim_names)
"""


@pytest.mark.slow
def test_two_ranks_build_the_same_mesh_and_refuse_alike(run_two_ranks):
    first, second = run_two_ranks(PROGRAM)
    assert first == second
    shard, replicate, tensor = "data_parallel_shard", "data_parallel_replicate", "tensor_parallel"
    assert first["default"] == first["device"] == [[shard], [0, 1], "cpu"]
    assert first["replicated"] == first["hybrid by degrees"] == [[replicate, shard], [[0], [1]], "cpu"]
    assert first["filled"] == [[replicate, shard], [[0, 1]], "cpu"]
    assert first["split"] == [[shard, tensor], [[0, 1]], "cpu"]
    assert first["groups"] is None
    assert first["hybrid"] is None
    assert "World size 2 does not equal the product of the specified parallelism degrees, 4" in first["too many"]
    assert first["sum"] == 1 + 2
    assert first["own"]
    assert "the ranks that share a tensor are unknown" in first["own, split"]
    assert first["good"] is None
    assert "needs real weights on rank 0" in first["bad"]
    assert "needs sync_module_states=True" in first["without sync"]
    assert "fsdp.sync_module_states is {0: 'True', 1: 'False'} by rank" in first["unlike"]
    assert "fsdp.load_monolith_rank0_only is {0: 'True', 1: 'False'} by rank" in first["alone"]
    assert "fsdp.data_parallel_replicate_degree is {0: '2', 1: 'None'} by rank" in first["degrees"]
    assert "fsdp.data_parallel_shard_degree is {0: '3', 1: '2'} by rank" in first["shards"]
    assert "fsdp2.state_dict_type is {0: \"'full'\", 1: 'no such settings'} by rank" in first["versions"]
    assert first["verbose"] is None
    assert first["assigned"] == [replicate, shard]


def test_no_mesh_is_made_while_no_process_group_runs():
    state = State(torch.nn.Linear(2, 2), 0, parallelism_config=ParallelismConfig(fsdp=FSDPConfig()))
    assert state.device_mesh is None
    assert not torch.distributed.is_initialized()


def test_a_checkpoint_for_rank_zero_alone_needs_weights_there():
    model = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="needs real weights on rank 0"):
        State(model, 0, parallelism_config=ParallelismConfig(fsdp=FSDPConfig()))
    # FSDP 2 shards first and broadcasts into the shards.
    State(model, 0, parallelism_config=ParallelismConfig(fsdp2=FSDPConfig()))

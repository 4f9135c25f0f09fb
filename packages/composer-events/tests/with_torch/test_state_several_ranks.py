import pytest

PROGRAM = """
import copy
from torch.distributed.fsdp import fully_shard
from composer_events import State

class FSDP2Config:
    state_dict_type = "full"
    load_monolith_rank0_only = True

class ParallelismConfig:
    fsdp, fsdp2, tp = None, FSDP2Config(), None

def make_state(seed, sharded=True):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 6)
    if sharded:
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters())
    return State(model, 10, "run", optimizers=optimizer, parallelism_config=ParallelismConfig() if sharded else None)

def step(state):
    state.model(torch.ones(2, 4)).square().sum().backward()
    state.optimizers.step()
    state.optimizers.zero_grad()

def full(state):
    return [parameter.full_tensor().tolist() for parameter in state.model.parameters()]

seen["seed"] = make_state(0).seed
state = make_state(0)
step(state)
saved = copy.deepcopy(state.state_dict())
seen["saved"] = sorted(saved["model"])
seen["world_size"] = saved["metadata"]["world_size"]
step(state)

resumed = make_state(1)
resumed.load_state_dict(saved)  # rank 1 has nothing and receives all
step(resumed)
seen["same"] = full(resumed) == full(state)

lone = make_state(0, sharded=False)
step(lone)
states = {"Adam": lone.get_optim_state_dict()["Adam"]} if rank == 0 else {}
other = make_state(0, sharded=False)
other.load_optim_state({"optimizers": states})
seen["restored"] = bool(other.optimizers[0].state)
"""


@pytest.mark.slow
def test_two_ranks_save_and_load_as_one(run_two_ranks):
    first, second = run_two_ranks(PROGRAM)
    assert (first["seed"], second["seed"]) == (10, 11)
    assert first["world_size"] == second["world_size"] == 2
    # A full checkpoint is gathered on rank 0 only, and given to both when it is loaded.
    assert (first["saved"], second["saved"]) == (["bias", "weight"], [])
    assert first["same"]
    assert second["same"]
    # What one rank lacks is restored on none, or the ranks would go on from different states.
    assert not first["restored"]
    assert not second["restored"]

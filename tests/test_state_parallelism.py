"""What a state and the settings of composer-fsdp make of each other: checks, and a mesh over the ranks."""

import pytest
import torch

from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_events import ParallelismType, State
from composer_fsdp import FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore:FSDP2 Config/APIs are experimental", "ignore:Tensor parallelism .TP. is experimental:FutureWarning"
)


def make_state(model=None, device="cpu", save_metrics=False, **config):
    config = ParallelismConfig(**config)
    return State(model, 0, device=device, save_metrics=save_metrics, parallelism_config=config)


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(("part", "kind"), [("fsdp", FSDPConfig), ("fsdp2", FSDP2Config)])
@pytest.mark.parametrize("state_dict_type", [None, "full", "sharded", "local"])
def test_the_ways_to_save_a_sharded_model_are_accepted(part, kind, state_dict_type):
    config = kind(state_dict_type=state_dict_type)
    assert make_state(**{part: config}).fsdp_config is config


BAD = [
    ({"state_dict_type": "bogus"}, "state_dict_type='bogus'.*fsdp_state_dict_type must be one of 'full'"),
    ({"state_dict_type": "sharded"}, "save_metrics=True cannot be combined with state_dict_type='sharded'"),
    ({"activation_cpu_offload": True, "use_orig_params": False}, "activation_cpu_offload=True is not supported"),
    ({"data_parallel_shard_degree": 0}, "data_parallel_shard_degree=0 is not a number of ranks"),
    ({"data_parallel_shard_degree": 7}, "World size 1 .* the product"),
    ({"load_monolith_rank0_only": True}, "load_monolith_rank0_only=True needs sync_module_states=True"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_sharding_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_state(fsdp=FSDPConfig(**settings), save_metrics=True)
    state = State(None, 0, save_metrics=True)
    state.fsdp_config = good = FSDPConfig()
    with pytest.raises(ValueError, match=message):
        state.fsdp_config = FSDPConfig(**settings)
    assert (state.fsdp_config, state.fsdp_config_version) == (good, 1)


@pytest.mark.parametrize(
    ("fsdp", "message"),
    [
        (None, r"Tensor parallelism \(TP\) currently requires FSDP to be enabled"),
        (FSDPConfig(use_orig_params=False), r"use_orig_params=False cannot be combined with tensor parallelism"),
        (
            FSDPConfig(load_monolith_rank0_only=True, sync_module_states=True),
            "load_monolith_rank0_only is not compatible with tensor parallel",
        ),
    ],
)
def test_tensor_parallelism_with_settings_that_it_cannot_work_with_is_refused(two_ranks, fsdp, message):
    with pytest.raises(ValueError, match=message):
        make_state(fsdp=fsdp, tp=TPConfig(tensor_parallel_degree=2))


def test_tensor_parallelism_is_announced_as_experimental_where_the_state_is_made(two_ranks):
    config = ParallelismConfig(fsdp=FSDPConfig(), tp=TPConfig(tensor_parallel_degree=2))
    with pytest.warns(FutureWarning, match="experimental and may change in future versions") as caught:
        State(None, 0, parallelism_config=config)
    assert [warning.filename for warning in caught] == [__file__]


def test_tensor_parallelism_over_one_rank_is_left_out():
    with pytest.warns(UserWarning, match="Received tensor_parallel_degree of 1, which is a no-op") as caught:
        state = make_state(fsdp=FSDPConfig(), tp=TPConfig(tensor_parallel_degree=1))
    assert [warning.category for warning in caught] == [FutureWarning, UserWarning]
    assert state.tp_config is None


def test_no_mesh_is_made_while_no_process_group_runs(two_ranks):
    assert make_state(fsdp=FSDPConfig(data_parallel_shard_degree=2)).device_mesh is None
    assert not torch.distributed.is_initialized()


def test_a_checkpoint_for_rank_zero_alone_needs_weights_there():
    model = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="needs real weights on rank 0"):
        make_state(model, fsdp=FSDPConfig(load_monolith_rank0_only=True, sync_module_states=True))
    # FSDP 2 shards first and broadcasts into the shards.
    make_state(model, fsdp2=FSDP2Config(state_dict_type="full", load_monolith_rank0_only=True))


def describe(tp=None, **fsdp):
    tp = None if tp is None else TPConfig(tensor_parallel_degree=tp)
    mesh = make_state(fsdp=FSDPConfig(**fsdp), tp=tp).device_mesh
    return mesh if mesh is None else [list(mesh.mesh_dim_names), mesh.mesh.tolist(), mesh.device_type]


def complaint(model=None, **fsdp):
    try:
        make_state(model, fsdp=FSDPConfig(**fsdp))
    except ValueError as error:
        return str(error)
    return None


def meshes():
    rank = dist.get_global_rank()
    seen = {
        "default": describe(),
        "replicated": describe(data_parallel_replicate_degree=2),
        "filled": describe(data_parallel_replicate_degree=-1, data_parallel_shard_degree=2),
        "split": describe(tp=2),
        "groups": describe(process_group="self"),
        "hybrid": describe(sharding_strategy="hybrid_shard"),
    }
    state = make_state(fsdp=FSDPConfig(data_parallel_replicate_degree=2))
    sums = torch.tensor([float(rank + 1)])
    torch.distributed.all_reduce(
        sums, group=state.device_mesh[ParallelismType.DATA_PARALLEL_REPLICATE.value].get_group()
    )
    own = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("mine",))
    seen |= {"sum": sums.item(), "own": make_state(fsdp2=FSDP2Config(device_mesh=own)).device_mesh is own}
    # Rank 1 builds its model on meta, as it should, then rank 0 does.
    monolith = {"load_monolith_rank0_only": True, "sync_module_states": True}
    there, nowhere = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")
    seen["good"] = complaint(there if rank == 0 else nowhere, **monolith)
    seen["bad"] = complaint(nowhere if rank == 0 else there, **monolith)
    # Without a comparison one rank would wait for the other, or both for different groups.
    seen["alone"] = complaint(load_monolith_rank0_only=rank == 0, sync_module_states=True)
    seen["degrees"] = complaint(data_parallel_replicate_degree=2 if rank == 0 else None)
    seen["verbose"] = complaint(verbose=rank == 0)
    state = State(None, 0)
    state.fsdp_config = FSDPConfig(data_parallel_replicate_degree=2)
    seen["assigned"] = list(state.device_mesh.mesh_dim_names)
    return seen


def test_two_ranks_build_the_same_mesh_and_refuse_together(tmp_path):
    first, second = run_ranks(meshes, store=tmp_path / "store")
    shard, replicate, tensor = "data_parallel_shard", "data_parallel_replicate", "tensor_parallel"
    assert "needs real weights on rank 0" in first.pop("bad")
    assert "needs real weights on rank 0" in second.pop("bad")
    assert first == second
    assert first["default"] == [[shard], [0, 1], "cpu"]
    assert first["replicated"] == [[replicate, shard], [[0], [1]], "cpu"]
    assert first["filled"] == [[replicate, shard], [[0, 1]], "cpu"]
    assert first["split"] == [[shard, tensor], [[0, 1]], "cpu"]
    assert first["groups"] is None
    assert first["hybrid"] is None
    assert first["sum"] == 1 + 2
    assert first["own"]
    assert first["good"] is None
    assert "load_monolith_rank0_only: True on rank 0, False on rank 1" in first["alone"]
    assert "degrees" in first["degrees"]
    assert first["verbose"] is None
    assert first["assigned"] == [replicate, shard]

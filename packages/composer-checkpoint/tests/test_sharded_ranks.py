"""Sharded checkpoints of real models, saved on some ranks and loaded on others, spread otherwise."""

import copy

import pytest
import torch
import torch.distributed as tdist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from composer_checkpoint import save_file
from composer_checkpoint.errors import CheckpointConflictError, CheckpointError, CorruptCheckpointError
from composer_checkpoint.sharded import (
    VerifiedWriter,
    VerifyingReader,
    load_sharded,
    read_folder_metadata,
    save_sharded,
    verify_folder,
)
from composer_checkpoint.sharded.load import WholeSavePlanner
from composer_checkpoint.tensors import open_checkpoint
from composer_dist.testing import run_ranks


class TiedModel(nn.Module):
    """Dims that neither 2 nor 3 ranks divide, a buffer, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.up = nn.Linear(7, 11)
        self.down = nn.Linear(11, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def spread(kind, seed):
    torch.manual_seed(seed)
    model = TiedModel()
    if kind == "fsdp":
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (tdist.get_world_size(),))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif kind == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, tdist.get_world_size() // 2), mesh_dim_names=("r", "s")))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer, seed):
    """A step with gradients that do not depend on how the model is spread."""
    for parameter in model.parameters():
        parameter.grad = torch.sin(parameter.detach() * (seed + 1))
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}


def full(value):
    """The same nested dicts with whole tensors."""
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def save_and_return_all(kind, folder):
    model, optimizer = spread(kind, seed=0)
    for seed in range(2):
        step(model, optimizer, seed)
    state = state_of(model, optimizer)
    manifest = save_sharded(state, folder, info={"epoch": 1})
    assert (manifest is not None) == (tdist.get_rank() == 0)
    return full(state)


def load_and_return_all(kind, folder):
    model, optimizer = spread(kind, seed=1)
    state = state_of(model, optimizer)
    load_sharded(state, folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return full(state_of(model, optimizer))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


@pytest.fixture(scope="module")
def saved_by_fsdp_on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "ep1"
    states = run_ranks(save_and_return_all, "fsdp", folder, store=folder.parent / "store")
    assert_same(states[1], states[0])
    return folder, states[0]


def test_the_folder_holds_one_part_of_each_weight_for_each_rank(saved_by_fsdp_on_two):
    folder, _ = saved_by_fsdp_on_two
    manifest = verify_folder(folder)
    assert manifest.info["epoch"] == 1
    assert set(manifest.files) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    up = {name: entry.shape for name, entry in manifest.tensors.items() if name.startswith("model.up.weight")}
    assert up == {"model.up.weight[0:6, 0:7]": (6, 7), "model.up.weight[6:11, 0:7]": (5, 7)}


@pytest.mark.parametrize(
    ("kind", "world_size"), [("plain", 1), ("fsdp", 3), ("ddp", 2), ("tp", 2), ("hybrid", 4)], ids=str
)
def test_what_fsdp_saved_on_two_ranks_loads_bit_equal(saved_by_fsdp_on_two, tmp_path, kind, world_size):
    folder, expected = saved_by_fsdp_on_two
    for found in run_ranks(load_and_return_all, kind, folder, store=tmp_path / "store", world_size=world_size):
        assert_same(found, expected)


@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 2), ("tp", 2), ("hybrid", 4)])
def test_what_others_saved_loads_bit_equal_under_fsdp_on_two_ranks(tmp_path, kind, world_size):
    states = run_ranks(save_and_return_all, kind, tmp_path / "ep1", store=tmp_path / "store", world_size=world_size)
    for found in run_ranks(load_and_return_all, "fsdp", tmp_path / "ep1", store=tmp_path / "store2"):
        assert_same(found, states[0])


def attempt(work):
    """The class and text of what was raised."""
    try:
        work()
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return None


def load_damaged(folder):
    model, optimizer = spread("fsdp", seed=1)
    state = state_of(model, optimizer)
    before = full(state)
    raised = attempt(lambda: load_sharded(state, folder))
    assert_same(full(state_of(model, optimizer)), before)
    return raised


def test_a_flipped_bit_is_refused_on_all_ranks_alike_and_changes_nothing(saved_by_fsdp_on_two, tmp_path):
    folder = tmp_path / "ep1"
    folder.mkdir()
    for file in saved_by_fsdp_on_two[0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    shard = folder / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    first, second = run_ranks(load_damaged, folder, store=tmp_path / "store")
    assert first == second
    name, text = first
    assert name == "CorruptCheckpointError"
    assert str(shard) in text
    with pytest.raises(CorruptCheckpointError, match=text.split("'")[1].replace("[", r"\[")):
        verify_folder(folder)


def save_what_rank_one_cannot(folder):
    state = {"w": torch.ones(3), f"of rank {tdist.get_rank()}": 1 if tdist.get_rank() == 0 else (lambda: 1)}
    try:
        save_sharded(state, folder)
    except Exception as error:
        return str(error)
    return None


def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing(tmp_path):
    first, second = run_ranks(save_what_rank_one_cannot, tmp_path / "saved" / "ep1", store=tmp_path / "store")
    assert first is not None
    assert first == second
    assert list((tmp_path / "saved").iterdir()) == []


def save_twice(folder):
    save_sharded({"w": torch.ones(3)}, folder)
    return attempt(lambda: save_sharded({"w": torch.zeros(3)}, folder))


def test_an_existing_checkpoint_is_kept_on_all_ranks_alike(tmp_path):
    first, second = run_ranks(save_twice, tmp_path / "ep1", store=tmp_path / "store")
    assert first == second
    assert first[0] == CheckpointConflictError.__name__
    state = {"w": torch.zeros(3)}
    load_sharded(state, tmp_path / "ep1")
    assert state["w"].tolist() == [1, 1, 1]


def exchange_with_torch(folder):
    model, optimizer = spread("fsdp", seed=0)
    step(model, optimizer, 0)
    state = state_of(model, optimizer)
    dcp.save(state, storage_writer=VerifiedWriter(folder / "ours"))
    dcp.save(state, checkpoint_id=folder / "torch")
    expected = full(state)
    for reader in (
        dcp.FileSystemReader(folder / "ours"),
        VerifyingReader(folder / "ours"),
        VerifyingReader(folder / "torch"),
    ):
        found = state_of(*spread("fsdp", seed=1))
        dcp.load(found, storage_reader=reader)
        assert_same(full(found), expected)


def test_torch_and_this_package_read_each_others_folders(tmp_path):
    run_ranks(exchange_with_torch, tmp_path, store=tmp_path / "store")
    assert verify_folder(tmp_path / "ours") is not None
    assert verify_folder(tmp_path / "torch") is None


def save_own_part(folder):
    mesh = init_device_mesh("cpu", (tdist.get_world_size(),))
    part = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    try:
        save_file({"state": {"model": {"w": part}}}, f"{folder}/x{tdist.get_rank()}.pt")
    except TypeError as error:
        return str(error)
    return "no error"


def test_a_part_of_a_tensor_is_not_saved_to_a_file_of_its_own(tmp_path):
    for told in run_ranks(save_own_part, str(tmp_path), store=tmp_path / "store"):
        assert "1 tensors are DTensors (state/model/w)" in told
        assert "save_sharded()" in told
    assert list(tmp_path.glob("x*")) == []


def save_what_differs(folder):
    """Save what is whole on both ranks and not alike, and return what this rank had."""
    own = {f"mean{index}": torch.full((2,), float(10 * index + tdist.get_rank())) for index in range(6)}
    save_sharded(own, folder, planner=WholeSavePlanner(first_rank_decides=True))
    return own


def test_what_is_whole_on_several_ranks_can_all_be_taken_from_the_first(tmp_path):
    folder = str(tmp_path / "ep1")
    of_first, _ = run_ranks(save_what_differs, folder, store=tmp_path / "store")
    loaded = {name: torch.zeros(2) for name in of_first}
    load_sharded(loaded, folder)
    for name, value in of_first.items():
        assert torch.equal(loaded[name], value), name


def test_dicts_in_which_there_is_nothing_are_saved_as_well(tmp_path):
    folder = str(tmp_path / "ep1")
    save_sharded({"state": {"seen": {}, "many": [{}, {"w": torch.ones(1)}]}, "w": torch.ones(2)}, folder)
    metadata = read_folder_metadata(folder)
    assert set(metadata.state_dict_metadata) == {"state.seen", "state.many.0", "state.many.1.w", "w"}
    content = {"state": {"seen": None, "many": [None, {"w": torch.zeros(1)}]}}
    load_sharded(content, folder)
    assert content == {"state": {"seen": {}, "many": [{}, {"w": torch.ones(1)}]}}
    of_torch = {"state": {"seen": {}}, "w": torch.zeros(2)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(of_torch, checkpoint_id=folder)
    assert torch.equal(of_torch["w"], torch.ones(2))


def save_what_rank_zero_alone_has(folder):
    is_first = tdist.get_rank() == 0
    callbacks = {"Recorder": {"lines": 3, "acting": {"MixUp": [1, 2]}} if is_first else {}, "Other": {}}
    kept = [torch.ones(2)] if is_first else []
    save_sharded({"state": {"callbacks": callbacks, "kept": kept}, "none": {}}, folder)


def test_what_only_one_rank_has_is_opened_beside_the_empty_places_of_the_others(tmp_path):
    run_ranks(save_what_rank_zero_alone_has, tmp_path / "saved", store=tmp_path / "store")
    with open_checkpoint(tmp_path / "saved") as source:
        state = source.tree["state"]
        assert state["callbacks"] == {"Recorder": {"lines": 3, "acting": {"MixUp": [1, 2]}}, "Other": {}}
        assert torch.equal(state["kept"][0].read(), torch.ones(2))
        assert source.tree["none"] == {}

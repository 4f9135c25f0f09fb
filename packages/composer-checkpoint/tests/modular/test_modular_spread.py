"""Parts that are saved by some ranks and loaded by others, however the models are spread."""

import pytest
import torch
import torch.distributed as tdist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from composer_checkpoint.modular import (
    CheckpointLoadOptions,
    get_model_state_dict,
    get_optim_state_dict,
    load_checkpoint,
    load_model_checkpoint,
    load_optim_checkpoint,
    save_model_to_disk,
    save_optim_to_disk,
)
from composer_dist.testing import run_ranks


class TiedModel(nn.Module):
    """Dims that neither 2 nor 3 ranks divide, a buffer, and a weight used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.up = nn.Linear(7, 11)
        self.down = nn.Linear(11, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        return self.head(self.down(self.up(self.embedding(tokens)).relu()))


def spread(kind, seed):
    torch.manual_seed(seed)
    model = TiedModel()
    model.steps.fill_(seed + 5)
    if kind == "fsdp":
        fully_shard(model.up)
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (tdist.get_world_size(),))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif kind == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, tdist.get_world_size() // 2), mesh_dim_names=("r", "s")))
    elif kind == "compiled":
        model = torch.compile(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer, seed):
    """A step with gradients that do not depend on how the model is spread."""
    for parameter in model.parameters():
        parameter.grad = torch.sin(parameter.detach() * (seed + 1))
    optimizer.step()
    optimizer.zero_grad()


def whole(value):
    """The same nested containers with whole tensors."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else value


def everything(model, optimizer):
    weights = get_model_state_dict(model, sharded_state_dict=True)
    return whole({"model": weights, "optim": get_optim_state_dict(model, optimizer, sharded_state_dict=True)})


def save_and_return_all(kind, folder, sharded):
    model, optimizer = spread(kind, seed=0)
    for seed in range(2):
        step(model, optimizer, seed)
    save_model_to_disk(model, folder, sharded)
    save_optim_to_disk(model, optimizer, folder, sharded)
    return everything(model, optimizer)


def load_and_return_all(kind, folder, settings):
    model, optimizer = spread(kind, seed=1)
    load_checkpoint(folder, CheckpointLoadOptions(load_optimizer=True, **settings), model, optimizer)
    return everything(model, optimizer)


def assert_same(found, expected, name=""):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_same(found[key], value, f"{name}/{key}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name
    elif isinstance(expected, list):
        for index, (mine, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(mine, other, f"{name}/{index}")
    else:
        assert found == expected, name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What FSDP saved on two ranks, as shards and whole."""
    folder = tmp_path_factory.mktemp("saved")
    states = [
        run_ranks(save_and_return_all, "fsdp", folder / kind, kind == "sharded", store=folder / f"store-{kind}")[0]
        for kind in ("sharded", "whole")
    ]
    assert_same(*states)
    return folder, states[0]


@pytest.mark.parametrize("layout", ["sharded", "whole"])
@pytest.mark.parametrize(
    ("kind", "world_size"), [("plain", 1), ("fsdp", 3), ("ddp", 2), ("tp", 2), ("hybrid", 4)], ids=str
)
def test_any_model_takes_what_was_saved_bit_for_bit(layout, kind, world_size, saved, tmp_path):
    folder, expected = saved
    found = run_ranks(
        load_and_return_all,
        *(kind, folder / layout, {"sharded_checkpoint": None}),
        store=tmp_path / "store",
        world_size=world_size,
    )
    for state in found:
        assert_same(state, expected)


@pytest.mark.parametrize("layout", ["sharded", "whole"])
def test_a_compiled_model_in_this_process_takes_it_too(layout, saved):
    folder, expected = saved
    assert_same(load_and_return_all("compiled", folder / layout, {"sharded_checkpoint": None}), expected)


@pytest.mark.parametrize("kind", ["tp", "ddp"])
def test_fsdp_takes_what_others_saved(kind, tmp_path):
    sharded = kind == "tp"
    expected = run_ranks(save_and_return_all, kind, tmp_path / "saved", sharded, store=tmp_path / "store")[0]
    found = run_ranks(
        load_and_return_all, "fsdp", tmp_path / "saved", {"sharded_checkpoint": None}, store=tmp_path / "other"
    )
    for state in found:
        assert_same(state, expected)


@pytest.mark.parametrize("layout", ["sharded", "whole"])
def test_a_plain_model_and_its_optimizer_are_sharded_while_they_are_loaded(layout, saved, tmp_path):
    folder, expected = saved
    settings = {"shard_as_needed_during_load": True, "sharded_checkpoint": layout == "sharded"}
    results = run_ranks(load_plain_and_train, folder / layout, settings, store=tmp_path / "store")
    for state, stepped, num_sharded in results:
        assert_same(state, expected)
        assert num_sharded == 2
        assert_same(stepped, results[0][1])
    trained = load_and_return_all("plain", folder / layout, {"sharded_checkpoint": None})
    assert_same(trained, expected)
    assert not torch.equal(results[0][1]["model"]["up.weight"], expected["model"]["up.weight"])


def load_plain_and_train(folder, settings):
    model, optimizer = spread("plain", seed=1)
    model.up._fsdp_wrap = True
    mesh = init_device_mesh("cpu", (tdist.get_world_size(),))
    options = CheckpointLoadOptions(load_optimizer=True, device_mesh=mesh, **settings)
    load_checkpoint(folder, options, model, optimizer)
    state = everything(model, optimizer)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    optimizer.step()
    return state, everything(model, optimizer), sum(isinstance(part, FSDPModule) for part in model.modules())


def load_into_meta(folder):
    with torch.device("meta"):
        model, tied = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), TiedModel()
    settings = {"shard_as_needed_during_load": True, "strict": False}
    load_model_checkpoint(model, folder / "model", CheckpointLoadOptions(**settings), seed=3)
    answer = told(lambda: load_model_checkpoint(tied, folder / "model", CheckpointLoadOptions(**settings)))
    return whole(get_model_state_dict(model, sharded_state_dict=True)), answer


def test_weights_without_memory_are_loaded_or_drawn_from_the_seed(tmp_path):
    saved = nn.Sequential(nn.Linear(5, 7))
    save_model_to_disk(saved, tmp_path)
    results = [run_ranks(load_into_meta, tmp_path, store=tmp_path / f"store{repeat}") for repeat in range(2)]
    for weights, answer in (*results[0], *results[1]):
        assert_same(weights, results[0][0][0])
        assert torch.equal(weights["0.weight"], saved[0].weight)
        assert 0 < weights["1.weight"].abs().max() <= 7**-0.5  # as Linear draws
        assert "TiedModel' object has no attribute 'reset_parameters'" in answer


def refusals(folder):
    model, optimizer = spread("fsdp", seed=1)
    ddp, _ = spread("ddp", seed=1)
    plain, plain_optimizer = spread("plain", seed=1)
    step(plain, plain_optimizer, 0)
    return [
        told(lambda: load_model_checkpoint(model, folder / "whole/model")),
        told(lambda: load_optim_checkpoint(model, optimizer, folder / "whole/optim")),
        told(lambda: load_model_checkpoint(plain, folder / "sharded/model", {"sharded_checkpoint": True})),
        told(lambda: load_model_checkpoint(ddp, folder / "whole/model", {"shard_as_needed_during_load": True})),
        told(
            lambda: load_checkpoint(
                folder / "whole", {"shard_as_needed_during_load": True}, model=plain, optim=plain_optimizer
            )
        ),
        told(
            lambda: load_model_checkpoint(
                plain, folder / "whole", {"shard_as_needed_during_load": True, "fsdp_config": {"wrap": 1}}
            )
        ),
    ]


def told(load):
    try:
        load()
    except (ValueError, FileNotFoundError, AttributeError) as error:
        return str(error)
    return None


def test_what_does_not_go_together_is_refused_on_every_rank(saved, tmp_path):
    folder, _ = saved
    first, second = run_ranks(refusals, folder, store=tmp_path / "store")
    assert first == second
    assert "is not a sharded checkpoint, and the model is sharded" in first[0]
    assert "and the model of the optimizer is sharded" in first[1]
    assert "is a sharded checkpoint, and the model is not sharded" in first[2]
    assert "the model is wrapped in DistributedDataParallel" in first[3]
    assert "the optimizer has stepped" in first[4]
    assert "there is no checkpoint" in first[5]


def load_damaged_and_other(folder):
    model, optimizer = spread("fsdp", seed=1)
    before = everything(model, optimizer)
    names = []
    for path in ("damaged/model/model.pt", "other/model/model.pt"):
        try:
            load_model_checkpoint(model, folder / path, CheckpointLoadOptions(sharded_checkpoint=None))
        except Exception as error:
            names.append((type(error).__name__, str(error)))
    assert_same(everything(model, optimizer), before)
    return names


def test_all_ranks_hear_of_damage_and_mismatch_and_keep_their_weights(saved, tmp_path):
    folder, state = saved
    data = bytearray((folder / "whole/model/model.pt").read_bytes())
    data[data.index(state["model"]["up.weight"].numpy().tobytes())] ^= 1
    (tmp_path / "damaged/model").mkdir(parents=True)
    (tmp_path / "damaged/model/model.pt").write_bytes(data)
    save_model_to_disk(nn.Linear(2, 2), tmp_path / "other")
    first, second = run_ranks(load_damaged_and_other, tmp_path, store=tmp_path / "store")
    assert first == second
    assert first[0][0] == "CorruptCheckpointError"
    assert "up.weight" in first[0][1]
    assert first[1][0] == "WeightsMismatchError"
    assert "Error(s) in loading state_dict for FSDPTiedModel: 7 missing" in first[1][1]


def tensors_on_this_rank(precision):
    model, optimizer = spread("fsdp", seed=0)
    step(model, optimizer, 0)
    weights = get_model_state_dict(model, precision=precision)
    moments = get_optim_state_dict(model, optimizer, precision=precision)
    tied = bool(weights) and weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()
    return {name: value.dtype for name, value in weights.items()}, tied, len(moments.get("state", ()))


def test_a_sharded_model_is_gathered_on_rank_zero_alone_with_its_ties(tmp_path):
    first, second = run_ranks(tensors_on_this_rank, "bf16", store=tmp_path / "store")
    assert set(first[0].values()) == {torch.bfloat16, torch.int64}
    assert first[1:] == (True, 5)
    assert second == ({}, False, 0)

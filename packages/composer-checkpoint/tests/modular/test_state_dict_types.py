"""Weights and optimizer state of models on two ranks: whole, sharded, and what each rank has by itself."""

import copy

import pytest
import torch
import torch.distributed as tdist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composer_checkpoint.modular import (
    fsdp_get_optim_state_dict,
    fsdp_state_dict_type_context,
    get_fsdp_full_optim_state_dict,
    get_fsdp_sharded_optim_state_dict,
    get_optim_state_dict,
)
from composer_dist.testing import run_ranks

TYPES = ("full", "sharded", "local")


class Counting(nn.Linear):
    """Saves more than tensors."""

    def __init__(self, *args):
        super().__init__(*args)
        self.counted = {"calls": 0, "seen": torch.zeros(2)}

    def get_extra_state(self):
        return self.counted

    def set_extra_state(self, state):
        self.counted = state


class Model(nn.Module):
    """Rows that two ranks cannot share out evenly, a single row, a tied weight and a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.up = nn.Linear(7, 5)
        self.down = Counting(5, 7)
        self.gate = nn.Linear(7, 1)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def make(seed, *, sharded=False, dtype=torch.float32):
    torch.manual_seed(seed)
    model = Model().to(dtype)
    model.steps.fill_(seed)
    model.down.counted = {"calls": seed, "seen": torch.full((2,), float(seed))}
    if sharded:
        fully_shard(model.up)
        fully_shard(model)
    first = [p for name, p in model.named_parameters() if name.startswith("up")]
    second = [p for name, p in model.named_parameters() if not name.startswith("up")]
    return model, torch.optim.Adam([{"params": second, "lr": 0.1 + seed}, {"params": first}], lr=0.01)


def step(model, optimizer, times=1):
    """Train with gradients that do not depend on how the model is spread, nor does Adam."""
    for _ in range(times):
        for parameter in model.parameters():
            parameter.grad = torch.sin(parameter.detach())
        optimizer.step()


def whole(value):
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else value


def assert_same(found, expected, name=""):
    if isinstance(expected, dict):
        assert list(found) == list(expected), name
        for key, value in expected.items():
            assert_same(found[key], value, f"{name}/{key}")
    elif isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor, name
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name
    elif isinstance(expected, list):
        for index, (mine, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(mine, other, f"{name}/{index}")
    else:
        assert found == expected, name


def trained(times=2):
    """What a single process has after some steps."""
    model, optimizer = make(0)
    step(model, optimizer, times)
    return model, optimizer


def tensors_of(state):
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def give_weights(state_dict_type):
    model, _ = make(0, sharded=True)
    with fsdp_state_dict_type_context(model, state_dict_type):
        state = model.state_dict()
    kinds = {type(value) for value in tensors_of(state)}
    return kinds, (dict(state) if state_dict_type != "sharded" else whole(dict(state)))


def test_the_full_type_gives_rank_zero_what_a_plain_model_has(tmp_path):
    (kinds, full), (_, other) = run_ranks(give_weights, "full", store=tmp_path / "store")
    assert_same(full, dict(make(0)[0].state_dict()))
    assert kinds == {torch.Tensor}
    assert other == {}


def test_the_sharded_type_gives_dtensors_under_the_same_names(tmp_path):
    for kinds, state in run_ranks(give_weights, "sharded", store=tmp_path / "store"):
        assert_same(state, dict(make(0)[0].state_dict()))
        assert kinds == {DTensor, torch.Tensor}  # the buffer is not sharded


def test_the_local_type_gives_each_rank_its_own_rows(tmp_path):
    (kinds, first), (_, second) = run_ranks(give_weights, "local", store=tmp_path / "store")
    assert kinds == {torch.Tensor}
    for name, weight in make(0)[0].named_parameters(remove_duplicate=False):
        rows = -(-len(weight) // 2)  # the first rank has the odd one
        assert_same(first[name], weight.detach()[:rows])
        assert_same(second[name], weight.detach()[rows:])


def load_weights(state_dict_type):
    source, _ = make(0, sharded=True)
    target, _ = make(1, sharded=True)
    with fsdp_state_dict_type_context(source, state_dict_type):
        state = copy.deepcopy(source.state_dict())
    with fsdp_state_dict_type_context(target, state_dict_type):
        keys = target.load_state_dict(state)
    return tuple(keys), target.head.weight is target.embedding.weight, whole(dict(target.state_dict()))


@pytest.mark.parametrize("state_dict_type", TYPES)
def test_what_was_given_is_taken_back(state_dict_type, tmp_path):
    for keys, is_tied, weights in run_ranks(load_weights, state_dict_type, store=tmp_path / "store"):
        assert keys == ([], [])
        assert is_tied
        assert_same(weights, dict(make(0)[0].state_dict()))


def load_optimizer():
    source, source_optimizer = make(0, sharded=True)
    step(source, source_optimizer, times=2)
    target, optimizer = make(1, sharded=True)
    with fsdp_state_dict_type_context(source, "sharded"), fsdp_state_dict_type_context(target, "sharded"):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    state = copy.deepcopy(fsdp_get_optim_state_dict(source, source_optimizer, "full"))
    optimizer.load_state_dict(get_fsdp_sharded_optim_state_dict(state, target))
    step(target, optimizer)
    return state, whole(dict(target.state_dict()))


def test_adam_goes_on_from_whole_state_as_if_nothing_had_happened(tmp_path):
    results = run_ranks(load_optimizer, store=tmp_path / "store")
    for _, weights in results:
        assert_same(weights, dict(trained(times=3)[0].state_dict()))
    assert_same(results[0][0], get_optim_state_dict(*trained()))
    assert results[1][0] == {}


def go_on_from(state, weights):
    """Load what a single process had, which is on rank 0 alone, and return it all again."""
    is_first = tdist.get_rank() == 0
    model, optimizer = make(1, sharded=True)
    with fsdp_state_dict_type_context(model, "full"):
        model.load_state_dict(weights if is_first else {})
    optimizer.load_state_dict(get_fsdp_sharded_optim_state_dict(state if is_first else None, model))
    parts = {type(value) for entries in optimizer.state.values() for value in entries.values()}
    step(model, optimizer)
    with fsdp_state_dict_type_context(model, "full"):
        weights = dict(model.state_dict())
    return parts, weights, get_fsdp_full_optim_state_dict(model, optimizer, rank0_only=False)


def test_adam_goes_from_one_process_to_two_and_back(tmp_path):
    plain, optimizer = trained(times=2)
    whole_state = get_fsdp_full_optim_state_dict(plain, optimizer)
    (parts, weights, state), (_, nothing, same) = run_ranks(
        go_on_from, whole_state, dict(plain.state_dict()), store=tmp_path / "store"
    )
    assert parts == {DTensor, torch.Tensor}  # sharded as the parameters are, but for the count of steps
    assert nothing == {}
    assert_same(same, state)

    model, optimizer = make(5)
    with fsdp_state_dict_type_context(model):
        model.load_state_dict(weights)
    optimizer.load_state_dict(get_fsdp_sharded_optim_state_dict(state, model))
    step(model, optimizer)
    expected, expected_optimizer = trained(times=4)
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    assert_same(optimizer.state_dict(), expected_optimizer.state_dict())


def name_things(kind):
    model, optimizer = make(0)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "compiled":
        model = torch.compile(model)
    elif kind == "checkpointed":
        model.up = checkpoint_wrapper(model.up)
        fully_shard(model.up)
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())
    with fsdp_state_dict_type_context(model):
        state = copy.deepcopy(dict(model.state_dict()))
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        model.load_state_dict(state)
        again = dict(model.state_dict())
    names = fsdp_get_optim_state_dict(model, optimizer, "sharded")["param_groups"]
    return state, again, {name for group in names for name in group["params"]}


@pytest.mark.parametrize("kind", ["plain", "ddp", "compiled", "checkpointed"])
def test_names_are_those_of_the_plain_model(kind, tmp_path):
    plain = make(0)[0]
    results = run_ranks(name_things, kind, store=tmp_path / "store")
    for state, again, names in results:
        assert_same(again, state)
        assert names == {name for name, _ in plain.named_parameters()}
    assert_same(results[0][0], dict(plain.state_dict()))
    assert results[1][0] == {}


def evaluate_and_name():
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(3, 5)), nn.Linear(5, 3)))
    optimizer = torch.optim.SGD(model.parameters())
    with torch.no_grad():
        model(torch.ones(2, 3))
    is_gathered = not isinstance(model[1].weight, DTensor)
    return is_gathered, fsdp_get_optim_state_dict(model, optimizer, "local")["param_groups"][0]["params"]


def test_what_an_evaluation_has_left_gathered_is_named_all_the_same(tmp_path):
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert run_ranks(evaluate_and_name, store=tmp_path / "store") == [(True, names)] * 2


def fail_to_load(cases):
    """What each rank hears, for each of the cases in which only one of them has something wrong."""
    rank = tdist.get_rank()
    model, optimizer = make(0, sharded=True)
    whole_state = get_fsdp_full_optim_state_dict(model, optimizer)
    heard = []
    for case in cases:
        state_dict_type = "local" if case == "rows" else "full"
        with fsdp_state_dict_type_context(model, state_dict_type):
            weights = dict(model.state_dict())
            if (case == "rows" and rank == 1) or (case == "shape" and rank == 0):
                weights["up.weight"] = torch.zeros(4, 7)
            elif case == "missing" and rank == 0:
                weights["up.wait"] = weights.pop("up.weight")
            elif case == "shards" and rank == 1:
                weights["up.weight"] = model.up.weight
            try:
                if case == "state":
                    get_fsdp_sharded_optim_state_dict({} if rank == 0 else whole_state, model)
                elif case == "names":
                    get_fsdp_sharded_optim_state_dict(optimizer.state_dict(), model)
                elif case == "parts":
                    step(model, optimizer)
                    get_fsdp_sharded_optim_state_dict(fsdp_get_optim_state_dict(model, optimizer, "sharded"), model)
                else:
                    model.load_state_dict(weights)
            except (ValueError, RuntimeError) as error:
                heard.append(f"{type(error).__name__}: {error}")
    return heard


def test_what_does_not_fit_is_an_error_on_every_rank(tmp_path):
    cases = {
        "rows": "ValueError: up.weight has the shape (4, 7), and rank 1 holds (2, 7) of (5, 7).",
        "shape": "size mismatch for up.weight: copying a param with shape torch.Size([4, 7])",
        "missing": 'Unexpected key(s) in state_dict: "up.wait"',
        "shards": "ValueError: up.weight is a DTensor, and whole tensors are needed: weights of state_dict_type='full'",
        "state": "ValueError: full_optim_state_dict has the keys [], and no param_groups, on rank 0.",
        "names": "ValueError: full_optim_state_dict has 7 parameters that the model does not have: 0, 1,",
        "parts": "is a DTensor, and whole tensors are needed",
    }
    for heard in run_ranks(fail_to_load, list(cases), store=tmp_path / "store"):
        assert [case for case, text in zip(cases, heard, strict=True) if cases[case] not in text] == []


@pytest.mark.parametrize("state_dict_type", ["FULL", "flat", None])
def test_another_word_is_an_error_that_lists_the_types(state_dict_type):
    model, optimizer = make(0)
    match = rf"state_dict_type={state_dict_type!r} .*'full'.*'sharded'.*'local'"
    with pytest.raises(ValueError, match=match), fsdp_state_dict_type_context(model, state_dict_type):
        pass
    with pytest.raises(ValueError, match=match):
        fsdp_get_optim_state_dict(model, optimizer, state_dict_type)


def nest_contexts():
    model, _ = make(0, sharded=True)
    kinds = []

    def look():
        value = model.state_dict().get("up.weight")
        kinds.append(type(value).__name__)

    with fsdp_state_dict_type_context(model, "full"):
        with fsdp_state_dict_type_context(model, "sharded"):
            look()
        with fsdp_state_dict_type_context(model, "full"):
            model.load_state_dict(model.state_dict())
        look()
    try:
        with fsdp_state_dict_type_context(model, "local"):
            look()
            raise KeyError
    except KeyError:
        look()
    return kinds


def test_the_innermost_context_counts_and_leaves_nothing_behind(tmp_path):
    first, second = run_ranks(nest_contexts, store=tmp_path / "store")
    assert first == ["DTensor", "Tensor", "Tensor", "DTensor"]
    assert second == ["DTensor", "NoneType", "Tensor", "DTensor"]


def test_a_model_without_memory_is_given_its_weights():
    plain = make(0)[0]
    with torch.device("meta"):
        model = Model()
    with fsdp_state_dict_type_context(model):
        model.load_state_dict(plain.state_dict(), assign=True)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_model_inside_another_one_keeps_its_place():
    outer = nn.ModuleDict({"a": make(0)[0], "b": nn.Linear(2, 1)})
    with fsdp_state_dict_type_context(outer["a"]):
        state = outer.state_dict()
        assert_same(set(state), set(outer.state_dict(keep_vars=True)))
        outer.load_state_dict(state)
    assert_same(dict(sorted(state.items())), dict(sorted(outer.state_dict().items())))


def test_a_copy_made_inside_a_context_loads_as_any_model_does_afterwards(monkeypatch):
    def fail(*_):
        raise AssertionError("The copy is in no context, and asks no other rank.")

    model = nn.Linear(2, 2)
    with fsdp_state_dict_type_context(model, "full"):
        copied = copy.deepcopy(model)
    weights = {name: torch.full_like(weight, 3.0) for name, weight in model.state_dict().items()}
    monkeypatch.setattr("composer_checkpoint.modular.state_dict_types.Ranks", fail)
    copied.load_state_dict(weights)
    assert all(torch.equal(weight, weights[name]) for name, weight in copied.state_dict().items())

"""What a loop may ask of a sharded model: state dicts, whole parameters, norms, units of their own, another attempt."""

import contextlib
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_dist import DDP, SingleDevice, Strategy, dist, get_device, seed_all
from composer_dist.testing import run_ranks
from composer_fsdp import FSDP, FSDPConfig, make_plan, summon_full_params_fsdp2

CPU = get_device("cpu")


class Expert(nn.Linear):
    pass


class Net(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.expert = Expert(6, 6)
        self.head = nn.Linear(6, 3)
        self._options = options

    def forward(self, inputs):
        self.seen = self.expert(self.stem(inputs))
        return self.head(self.seen)

    def embed(self, inputs):
        return self.head(self.stem(inputs))

    fsdp_forward_methods = ("embed",)

    def fsdp_wrap_fn(self, module):
        return self._options if isinstance(module, Expert) else False


class Model(nn.Module):
    def __init__(self, options=True):
        super().__init__()
        self.net = Net(options)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, inputs):
        return self.net(inputs)


def make(strategy=None, options=True, precision="fp32", **settings):
    seed_all(3)
    model = Model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if strategy is None:
        plan = make_plan(FSDPConfig(**settings), world_size=dist.get_world_size(), precision=precision)
        strategy = FSDP(CPU, plan)
    model, (optimizer,) = strategy.prepare(model, [optimizer])
    return strategy, model, optimizer


def step(strategy, model, optimizer, number):
    rank = dist.get_global_rank()
    generator = torch.Generator().manual_seed(number)
    inputs, targets = torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    own = slice(rank * 4, rank * 4 + 4)
    strategy.zero_grad(optimizer)
    with strategy.microbatch(is_last=True):
        strategy.backward(F.cross_entropy(model(inputs[own]).float(), targets[own]))
    strategy.step(optimizer)


def go_on_elsewhere(make_other):
    """Train three steps; and one step, then two more on what another strategy has loaded."""
    strategy, model, optimizer = make()
    step(strategy, model, optimizer, 0)
    weights = strategy.model_state_dict(model)
    state = strategy.optimizer_state_dict(model, optimizer)
    for number in (1, 2):
        step(strategy, model, optimizer, number)
    expected = strategy.model_state_dict(model)

    other, again, second = make(DDP(CPU) if make_other else None)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    assert other.load_model_state_dict(again, weights) == ([], [])
    other.load_optimizer_state_dict(again, second, state)
    for number in (1, 2):
        step(other, again, second, number)
    reached = other.model_state_dict(again)
    shapes = [tuple(value.shape) for value in state["state"][0].values()]
    return max((reached[name] - expected[name]).abs().max().item() for name in expected), shapes


@pytest.mark.parametrize("elsewhere", [False, True])
def test_training_goes_on_from_whole_state_dicts_sharded_or_not(elsewhere, tmp_path):
    for distance, shapes in run_ranks(go_on_elsewhere, elsewhere, store=tmp_path / "store"):
        assert distance < 1e-6  # Adam's rounding, as the ranks' sums are of another order
        assert shapes == [(), (6, 4), (6, 4)]


def weights_after_two_steps():
    strategy, model, optimizer = make()
    assert isinstance(strategy, Strategy)
    for number in (0, 1):
        step(strategy, model, optimizer, number)
    return strategy.model_state_dict(model), strategy.sum([1, 2.5]), strategy.mean({"a": torch.tensor(3.0)})["a"].item()


def test_what_two_ranks_have_trained_fits_a_model_of_one_process(tmp_path):
    (weights, total, mean), _ = run_ranks(weights_after_two_steps, store=tmp_path / "store")
    assert (total, mean) == ([2, 5.0], 3.0)
    alone = SingleDevice(CPU)
    assert alone.load_model_state_dict(Model(), weights) == ([], [])


def complaints():
    strategy, model, _ = make()
    weights = strategy.model_state_dict(model)
    said = []
    for change in ({"net.stem.weight": torch.zeros(1)}, {"more": torch.zeros(1)}):
        with pytest.raises(RuntimeError, match="Error\\(s\\) in loading state_dict") as refusal:
            strategy.load_model_state_dict(model, {**weights, **change})
        said.append(str(refusal.value))
    less = {name: value for name, value in weights.items() if name != "net.head.bias"}
    assert strategy.load_model_state_dict(model, less, strict=False) == (["net.head.bias"], [])
    return said


def test_weights_that_do_not_fit_are_refused(tmp_path):
    first, second = run_ranks(complaints, store=tmp_path / "store")
    assert first == second
    assert "size mismatch for net.stem.weight" in first[0]
    assert "Unexpected key(s) in state_dict: more" in first[1]


def summoned():
    strategy, model, _ = make()
    before = strategy.model_state_dict(model)
    seen = {}
    with summon_full_params_fsdp2(model):
        inside = {name: parameter for name, parameter in model.named_parameters() if "frozen" not in name}
        seen["whole"] = all(torch.equal(parameter, before[name]) for name, parameter in inside.items())
        seen["plain"] = not any(isinstance(parameter, DTensor) for parameter in inside.values())
        with torch.no_grad():
            model.net.stem.weight.add_(1)
    after = strategy.model_state_dict(model)
    seen["written"] = torch.equal(after["net.stem.weight"], before["net.stem.weight"] + 1)
    with contextlib.suppress(KeyError), summon_full_params_fsdp2(model, writeback=False):
        with torch.no_grad():
            model.net.stem.weight.zero_()
        raise KeyError
    seen["put back"] = torch.equal(strategy.model_state_dict(model)["net.stem.weight"], after["net.stem.weight"])
    with summon_full_params_fsdp2(model.net, recurse=False):
        seen["own only"] = (isinstance(model.net.stem.weight, DTensor), isinstance(model.net.expert.weight, DTensor))
    with summon_full_params_fsdp2(model, rank0_only=True, offload_to_cpu=True), torch.no_grad():
        seen["here"] = not isinstance(model.net.head.bias, DTensor)
        if seen["here"]:
            model.net.head.bias.fill_(7)
    seen["sent"] = strategy.model_state_dict(model)["net.head.bias"].tolist()
    return seen


def test_parameters_are_whole_for_a_while(tmp_path):
    for rank, seen in enumerate(run_ranks(summoned, store=tmp_path / "store")):
        assert seen == {
            "whole": True,
            "plain": True,
            "written": True,
            "put back": True,
            "own only": (False, True),
            "here": rank == 0,
            "sent": [7.0] * 3,
        }


def unit_of_its_own(options, precision):
    warnings.simplefilter("ignore")
    strategy, model, optimizer = make(options=options, precision=precision, mixed_precision="DEFAULT")
    if dist.get_global_rank() and options.get("process_group") == "self":
        with torch.no_grad():
            model.net.expert.weight.to_local().add_(1)
    dtypes = []
    for part in (model.net.stem, model.net.expert):
        part.register_forward_hook(lambda part, _, __: dtypes.append(part.weight.dtype))
    for number in (0, 1):
        step(strategy, model, optimizer, number)
    mesh = model.net.expert.weight.device_mesh
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local().clone() for g in gradients]
    norm = strategy.clip_grad_norm(model.parameters(), math.inf)
    is_local = [g.device_mesh.size() < dist.get_world_size() for g in gradients]
    return [str(d) for d in dtypes[:2]], mesh.mesh.tolist(), model.net.seen.dtype, norm.item(), local, is_local


def test_a_unit_may_have_a_precision_and_a_group_of_its_own(tmp_path):
    options = {"process_group": "node", "mixed_precision": "FULL"}
    for dtypes, mesh, output, *_ in run_ranks(unit_of_its_own, options, "amp_bf16", store=tmp_path / "store"):
        assert dtypes == ["torch.bfloat16", "torch.float32"]
        assert mesh == [0, 1]
        assert output is torch.bfloat16  # what it gives to the rest is in the format of the rest


@pytest.mark.slow
@pytest.mark.parametrize("group", ["self", "set2", "mod2"])
def test_the_norm_counts_what_each_group_of_ranks_has_once(group, tmp_path):
    ranks = run_ranks(unit_of_its_own, {"process_group": group}, "fp32", store=tmp_path / "store", world_size=4)
    # In parts all over the ranks each number lies on one of them; so do the numbers of each group.
    power = sum(local.pow(2).sum().item() for *_, parts, _ in ranks for local in parts)
    for *_, norm, _, is_local in ranks:
        assert is_local.count(True) == 2  # weight and bias of the expert
        assert norm == pytest.approx(math.sqrt(power), rel=1e-5)


def other_entry_points():
    _, model, _ = make()
    expected = make(SingleDevice(CPU))[1].net.embed(torch.ones(2, 4))
    return torch.equal(model.net.embed(torch.ones(2, 4)), expected)


def test_methods_that_a_model_names_may_be_called_without_forward(tmp_path):
    assert run_ranks(other_entry_points, store=tmp_path / "store") == [True, True]


class _FailsElsewhere(Exception):
    pass


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("injected")


def repeat_after(stage):
    """Train with and without a failure of rank 1, and return how far the weights are apart."""
    reached = []
    for fails in (False, True):
        strategy, model, optimizer = make()
        is_armed = []

        def fail(_, __, output, is_armed=is_armed):
            if not is_armed or dist.get_global_rank() == 0:
                return output
            if stage == "forward":
                raise torch.OutOfMemoryError("injected")
            return _FailsInBackward.apply(output)

        model.net.expert.register_forward_hook(fail)

        def check(has_failed=False, strategy=strategy):
            (num_failing,) = strategy.sum([int(has_failed)])
            if num_failing and not has_failed:
                raise _FailsElsewhere

        for number in range(3):
            for attempt in range(2):
                is_armed[:] = [True] if fails and number == 1 and attempt == 0 else []
                try:
                    with strategy.attempt(check):
                        step(strategy, model, optimizer, number)
                    break
                except _FailsElsewhere:
                    continue
                except torch.OutOfMemoryError:
                    check(has_failed=True)
        reached.append(strategy.model_state_dict(model))
    plain, repeated = reached
    return max((plain[name] - repeated[name]).abs().max().item() for name in plain)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch has no FSDPModule.reset_iter_state")
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_step_that_one_rank_gives_up_is_repeated_by_all(stage, tmp_path):
    assert run_ranks(repeat_after, stage, store=tmp_path / "store") == [0.0, 0.0]


def test_no_step_is_begun_that_torch_could_not_repeat(monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)  # torch 2.11 has none
    strategy = FSDP(CPU, make_plan(FSDPConfig(), world_size=1))
    for begin in (strategy.check_repeatable, strategy.attempt(lambda: None).__enter__):
        with pytest.raises(ValueError, match=r"no FSDPModule\.reset_iter_state\. Use a newer torch, or give"):
            begin()


def scaled_step():
    strategy, model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = strategy.model_state_dict(model)
    loss = model(torch.full((1, 4), math.inf if dist.get_global_rank() else 1.0)).sum()
    strategy.backward(scaler.scale(loss))
    strategy.step(optimizer, scaler=scaler)
    scaler.update()
    after = strategy.model_state_dict(model)
    return all(torch.equal(before[name], after[name]) for name in before), scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_of_all(tmp_path):
    assert run_ranks(scaled_step, store=tmp_path / "store") == [(True, 1.0), (True, 1.0)]

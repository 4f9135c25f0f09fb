"""`SAMOptimizer` against the paper's step in float64, and `SAM` in training."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from composer_algorithms import SAM, MixUp, SAMOptimizer
from composer_dist.testing import run_ranks
from composer_events import Algorithm, Event


def make_closure(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        closure.calls += 1
        return loss

    closure.calls = 0
    return closure


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    return model, torch.randn(8, 3, dtype=dtype), torch.randn(8, 1, dtype=dtype)


@given(rho=st.floats(0, 2), lr=st.floats(0.001, 0.5))
def test_a_step_takes_the_gradient_at_the_worst_point_nearby(rho, lr):
    model, x, y = problem()
    parameters = list(model.parameters())
    optimizer = SAMOptimizer(torch.optim.SGD(parameters, lr=lr), rho=rho)
    expected = [parameter.detach().clone() for parameter in parameters]
    gradients = torch.autograd.grad(F.mse_loss(model(x), y), parameters)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    away = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, gradient in zip(away.parameters(), gradients, strict=True):
            parameter.add_(rho * gradient / norm)
    there = torch.autograd.grad(F.mse_loss(away(x), y), list(away.parameters()))
    expected = [weight - lr * gradient for weight, gradient in zip(expected, there, strict=True)]
    loss_before = F.mse_loss(model(x), y)

    loss = optimizer.step(make_closure(model, optimizer, x, y))
    torch.testing.assert_close([parameter.detach() for parameter in parameters], expected)
    torch.testing.assert_close(loss, loss_before)


def test_between_the_intervals_steps_are_the_base_optimizers():
    (model, x, y), (plain, _, _) = problem(), problem()
    base = torch.optim.Adam(plain.parameters(), lr=0.1)
    optimizer = SAMOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), rho=0.5, interval=3)
    closure, plain_closure = make_closure(model, optimizer, x, y), make_closure(plain, base, x, y)
    for expected_calls in (1, 2, 4, 5, 6, 8):
        optimizer.step(closure)
        assert closure.calls == expected_calls
        if expected_calls < 4:
            base.step(plain_closure)
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert optimizer.global_step == 6


class Widen(nn.Module):
    def forward(self, x):
        return x.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None], ids=["float32", "bfloat16", "mixed"])
def test_the_weights_come_back_bit_for_bit(dtype, monkeypatch):
    copy_, kinds = torch._foreach_copy_, []

    def copy_and_note(to, source):
        kinds.append({tensor.dtype for tensor in to})
        return copy_(to, source)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_and_note)
    model, x, y = problem(dtype or torch.float32)
    if dtype is None:
        model, y = nn.Sequential(model[:2], Widen(), model[2].double()), y.double()
    optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), rho=3.0)
    before = copy.deepcopy(model.state_dict())
    optimizer.step(make_closure(model, optimizer, x, y))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [len(kind) for kind in kinds] == [1] * (2 if dtype is None else 1), "a GPU copies mixed lists one by one"


def test_the_weights_come_back_when_the_second_call_fails():
    model, x, y = problem()
    optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    closure, before = make_closure(model, optimizer, x, y), copy.deepcopy(model.state_dict())

    def failing():
        if closure.calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return closure()

    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step(failing)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("bad_call", [1, 2])
def test_a_call_that_returns_none_because_gradients_are_not_finite_skips_the_step(bad_call):
    model, x, y = problem()
    optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    closure, before = make_closure(model, optimizer, x, y), copy.deepcopy(model.state_dict())

    def overflowing():
        loss = closure()
        return None if closure.calls == bad_call else loss

    optimizer.step(overflowing)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.base_optimizer.state


def test_a_loss_of_exactly_zero_still_steps():
    weight = torch.tensor([1.0], requires_grad=True)
    optimizer = SAMOptimizer(torch.optim.SGD([weight], lr=0.1, weight_decay=1.0))

    def closure():
        optimizer.zero_grad()
        loss = (weight * 0).sum()
        loss.backward()
        return 0.0

    assert optimizer.step(closure) == 0.0
    assert weight.item() == pytest.approx(0.9)


def test_a_closure_hears_which_call_it_is_if_it_listens():
    model, x, y = problem()
    optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    closure, calls = make_closure(model, optimizer, x, y), []

    def listening(loss_dict=None, ddp_sync=True):
        calls.append((loss_dict, ddp_sync))
        return closure()

    optimizer.step(listening)
    assert calls == [(None, True), ({}, True)]


def test_a_step_needs_a_closure():
    model, _, _ = problem()
    with pytest.raises(RuntimeError, match="needs a closure"):
        SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)).step()


@pytest.mark.parametrize("make", [SAM, lambda **k: SAMOptimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1), **k)])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"rho": -0.1}, r"rho=-0\.1"), ({"epsilon": -1}, "epsilon=-1"), ({"interval": 0}, "interval=0")],
)
def test_numbers_outside_their_range_are_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_groups_and_state_are_the_base_optimizers_own():
    model, x, y = problem()
    base = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.1}], lr=0.2, momentum=0.9)
    optimizer = SAMOptimizer(base, rho=0.5)
    optimizer.add_param_group({"params": model[2].parameters(), "rho": 0.0})
    assert all(group is own for group, own in zip(optimizer.param_groups, base.param_groups, strict=True))
    assert [group["rho"] for group in base.param_groups] == [0.5, 0.0]
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1)
    optimizer.step(make_closure(model, optimizer, x, y))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert optimizer.state is base.state
    assert len(optimizer.state) == 4


def with_momentum(model):
    return SAMOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9), rho=0.2, interval=2)


@pytest.mark.parametrize(
    "carry", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_of_an_optimizer_with_a_scheduler_steps_for_itself(carry):
    model, x, y = problem()
    optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy(model.state_dict())
    other, its_optimizer = carry((model, optimizer))
    its_optimizer.step(make_closure(other, its_optimizer, x, y))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(before["0.weight"], other[0].weight)


def test_what_is_no_optimizer_cannot_be_wrapped():
    with pytest.raises(TypeError, match=r"type str, which is not a torch\.optim\.Optimizer"):
        SAMOptimizer("adam")


@pytest.mark.parametrize("carry", ["state dict", "deepcopy", "pickle"])
def test_a_saved_optimizer_goes_on_exactly(carry):
    model, x, y = problem()
    optimizer = with_momentum(model)
    for _ in range(3):
        optimizer.step(make_closure(model, optimizer, x, y))
    if carry == "state dict":
        other = problem()[0]
        other.load_state_dict(model.state_dict())
        resumed = with_momentum(other)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        other, resumed = (
            copy.deepcopy((model, optimizer)) if carry == "deepcopy" else pickle.loads(pickle.dumps((model, optimizer)))
        )
    assert resumed.global_step == 3
    assert resumed.param_groups is resumed.base_optimizer.param_groups
    for _ in range(3):
        optimizer.step(make_closure(model, optimizer, x, y))
        resumed.step(make_closure(other, resumed, x, y))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_states_that_others_saved_load():
    model, x, y = problem()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    base.step(make_closure(model, base, x, y))
    saved = copy.deepcopy(base.state_dict())
    optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), rho=0.3)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["rho"] == 0.3
    assert torch.equal(
        optimizer.state[model[0].weight]["momentum_buffer"], base.state[model[0].weight]["momentum_buffer"]
    )
    composers = {
        "state": {0: {"e_w": torch.ones(4, 3)}},
        "param_groups": [{**saved["param_groups"][0], "rho": 0.05, "epsilon": 1e-12}],
    }
    optimizer.load_state_dict(composers)
    assert not optimizer.state
    optimizer.load_state_dict({"base": saved, "global_step": 7})
    assert optimizer.global_step == 7
    assert len(optimizer.state) == 4


def test_the_second_call_repeats_the_draws_of_the_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    masks = []
    model[1].register_forward_hook(lambda module, args, output: masks.append(output == 0))
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    for replay in (True, False):
        masks.clear()
        optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=1e-6, replay=replay)
        optimizer.step(make_closure(model, optimizer, x, y))
        assert torch.equal(*masks) == replay
    before = masks[0]
    optimizer.step(make_closure(model, optimizer, x, y))
    assert not torch.equal(masks[2], before)  # the next step draws anew


def fit_with_sam(make_loop, algorithms=(), callbacks=(), checkpoint=None, **settings):
    """A loop that steps with a closure of all of its microbatches."""

    class ClosureLoop(make_loop):
        def _train_on(self, batch):
            optimizer = self.state.optimizers[0]
            passes = []

            def closure():
                passes.append(True)
                base_step, optimizer.base_optimizer.step = optimizer.base_optimizer.step, lambda: None
                try:
                    whole = self.state.batch
                    self._one_pass(whole)
                finally:
                    optimizer.base_optimizer.step = base_step
                return self.state.loss.detach()

            self.state.batch = batch
            self.engine.run_event(Event.AFTER_DATALOADER)
            optimizer.step(closure)
            self.state.timestamp = self.state.timestamp.to_next_batch(len(batch[0]))
            self.engine.run_event(Event.BATCH_END)
            self.engine.run_event(Event.BATCH_CHECKPOINT)

        def _one_pass(self, whole):
            state, run, size = self.state, self.engine.run_event, self.microbatch_size
            run(Event.BEFORE_TRAIN_BATCH)
            state.optimizers[0].zero_grad()
            for start in range(0, len(whole[0]), size):
                state.batch = tuple(part[start : start + size] for part in whole)
                run(Event.BEFORE_FORWARD)
                state.outputs = state.model(state.batch)
                run(Event.BEFORE_LOSS)
                state.loss = state.model.loss(state.outputs, state.batch)
                run(Event.AFTER_LOSS)
                (state.loss * size / len(whole[0])).backward()
            state.batch = whole
            run(Event.AFTER_TRAIN_BATCH)

    loop = ClosureLoop([SAM(rho=0.1, interval=2), *algorithms], list(callbacks), **settings)
    loop.engine.run_event(Event.BEFORE_LOAD)
    if checkpoint is not None:
        loop.resume_from(checkpoint)
    loop.engine.run_event(Event.AFTER_LOAD)
    return loop.fit()


def test_training_does_not_depend_on_how_a_batch_is_cut(make_loop, make_model):
    weights = [
        fit_with_sam(make_loop, model=make_model(norm=False), microbatch_size=size).model.state_dict()
        for size in (8, 4, 2)
    ]
    plain = make_loop([], model=make_model(norm=False)).fit().model.state_dict()
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain["first.weight"], weights[0]["first.weight"])


def test_training_resumed_from_a_checkpoint_ends_with_the_same_weights(make_loop, make_saver):
    saver = make_saver("3ba")
    whole = fit_with_sam(make_loop, [MixUp(1.0)], [saver])
    for checkpoint in saver.checkpoints[:-1]:
        resumed = fit_with_sam(make_loop, [MixUp(1.0)], checkpoint=checkpoint)
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_both_passes_see_the_same_mixed_data(make_loop):
    class Seeing(Algorithm):
        runs_after = frozenset({"MixUp"})

        def match(self, event, state):
            return event == Event.BEFORE_FORWARD

        def apply(self, event, state, logger):
            inputs.append(state.batch[0])

    inputs = []
    fit_with_sam(make_loop, [Seeing(), MixUp(1.0)], max_duration="1ep", microbatch_size=4)
    # Of 4 steps the second and the last look twice: 2 microbatches, then 2 x 2.
    assert len(inputs) == 12
    assert torch.equal(inputs[2], inputs[4])
    assert torch.equal(inputs[3], inputs[5])
    assert not torch.equal(inputs[2], inputs[3])


def test_each_optimizer_is_wrapped_once_before_or_after_a_checkpoint_is_loaded(state):
    base = torch.optim.SGD(state.model.parameters(), lr=0.1)
    state.optimizers = base
    algorithm = SAM(rho=0.3, interval=4)
    assert [event for event in Event if algorithm.match(event, state)] == [Event.BEFORE_LOAD, Event.AFTER_LOAD]
    algorithm.apply(Event.BEFORE_LOAD, state, None)
    wrapped = state.optimizers[0]
    assert isinstance(wrapped, SAMOptimizer)
    assert wrapped.base_optimizer is base
    assert (wrapped.param_groups[0]["rho"], wrapped.interval) == (0.3, 4)
    assert not algorithm.match(Event.AFTER_LOAD, state)
    algorithm.apply(Event.AFTER_LOAD, state, None)
    assert state.optimizers[0] is wrapped


def test_the_state_of_a_run_has_the_base_optimizers_state_by_name(state):
    state.optimizers = torch.optim.SGD(state.model.parameters(), lr=0.1, momentum=0.9)
    SAM().apply(Event.BEFORE_LOAD, state, None)
    optimizer = state.optimizers[0]

    def closure():
        optimizer.zero_grad()
        loss = state.model.loss(state.model(state.batch), state.batch)
        loss.backward()
        return loss

    optimizer.step(closure)
    saved = state.get_optim_state_dict()["SAMOptimizer"]
    assert set(saved["state"]) == {name for name, _ in state.model.named_parameters()}
    assert set(saved["state"]["first.weight"]) == {"momentum_buffer"}


def test_deepspeed_is_refused(state):
    state.deepspeed_config = {}
    with pytest.raises(ValueError, match="cannot be used under DeepSpeed"):
        SAM().apply(Event.BEFORE_LOAD, state, None)


def step_on_ranks(wrap):
    model, x, y = problem()
    x, y = x.chunk(2)[torch.distributed.get_rank()], y.chunk(2)[torch.distributed.get_rank()]
    if wrap == "ddp":
        spread = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        spread = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = SAMOptimizer(torch.optim.SGD(spread.parameters(), lr=0.1, momentum=0.9), rho=0.5)
    for _ in range(2):
        optimizer.step(make_closure(spread, optimizer, x, y))
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_two_ranks_step_like_one_with_the_whole_batch(wrap, tmp_path):
    model, x, y = problem()
    optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.5)
    for _ in range(2):
        optimizer.step(make_closure(model, optimizer, x, y))
    for weights in run_ranks(step_on_ranks, wrap, store=tmp_path / "store"):
        torch.testing.assert_close(weights, [parameter.detach() for parameter in model.parameters()])

import functools
import math

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from composer_dist import Device, SingleDevice, Strategy, get_device


class DeviceMeta(Device):
    """Torch's device without memory: somewhere else than the CPU that every machine has."""

    def module_to_device(self, module):
        return module.to("meta")

    def tensor_to_device(self, tensor):
        return tensor.to("meta")


@pytest.fixture
def strategy():
    return SingleDevice(get_device("cpu"))


def two_layers():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def microbatches():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(5, 3, generator=generator) for _ in range(2)]


def test_a_single_device_is_a_strategy(strategy):
    assert isinstance(strategy, Strategy)


def test_a_loop_with_it_is_the_plain_loop(strategy):
    plain, spread = two_layers(), two_layers()
    optimizer = torch.optim.AdamW(plain.parameters())
    model, (prepared,) = strategy.prepare(spread, [torch.optim.AdamW(spread.parameters())])
    for _ in range(3):
        optimizer.zero_grad()
        strategy.zero_grad(prepared)
        for index, batch in enumerate(microbatches()):
            (plain(batch).square().mean() / 2).backward()
            with strategy.microbatch(is_last=index == 1):
                strategy.backward(model(batch).square().mean() / 2)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert torch.equal(strategy.clip_grad_norm(model.parameters(), 0.1), expected)
        optimizer.step()
        strategy.step(prepared)
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_preparing_moves_the_model_and_what_its_optimizers_remember(strategy):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = next(iter(optimizer.state.values()))
    prepared, optimizers = SingleDevice(DeviceMeta()).prepare(model, [optimizer])
    assert prepared.weight.is_meta
    assert optimizers == [optimizer]
    assert state["momentum_buffer"].is_meta


def test_a_microbatch_costs_no_new_context(strategy):
    assert strategy.microbatch(is_last=False) is strategy.microbatch(is_last=True)
    assert strategy.microbatch(is_last=True, sync=False) is strategy.microbatch(is_last=True)


def test_an_attempt_asks_at_its_end_whether_it_counts(strategy):
    asked = []
    with strategy.attempt(lambda: asked.append(True)):
        assert not asked
    assert asked == [True]


def test_an_attempt_that_fails_asks_nobody(strategy):
    asked = []

    def fail():
        with strategy.attempt(lambda: asked.append(True)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not asked


def test_nobody_is_met_in_a_forward_pass(strategy):
    assert not strategy.meets_in_forward


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")  # torch's advice, heeded below
def test_a_graph_of_the_gradients_can_be_kept(strategy):
    weight = torch.tensor(3.0, requires_grad=True)
    strategy.backward(weight**3, create_graph=True)
    assert torch.autograd.grad(weight.grad, weight)[0].item() == 6 * 3.0
    weight.grad = None  # the two would keep each other alive


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (math.inf, 4.0), (1.0, 7.0)])
def test_clipping_returns_the_norm_before_it(strategy, norm_type, norm):
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.tensor([3.0, -4.0])
    assert strategy.clip_grad_norm([weight], norm / 2, norm_type=norm_type).item() == norm
    # Torch adds 1e-6 to the norm it divides by.
    torch.testing.assert_close(weight.grad, torch.tensor([1.5, -2.0]), rtol=1e-5, atol=0)


def test_a_closure_is_called_by_the_optimizer(strategy):
    weight = torch.tensor([1.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def closure():
        strategy.zero_grad(optimizer)
        loss = (weight**2).sum()
        strategy.backward(loss)
        return loss

    assert strategy.step(optimizer, closure).item() == 1.0
    assert weight.item() == 0.0


@pytest.mark.parametrize(("gradient", "after"), [(2.0, 0.0), (math.inf, 1.0)])
def test_a_step_by_way_of_a_scaler_leaves_out_what_overflowed(strategy, gradient, after):
    weight = torch.tensor([1.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    strategy.backward(scaler.scale((weight * gradient).sum()))
    strategy.step(optimizer, scaler=scaler)
    assert weight.item() == after


def test_sums_and_means_over_one_rank_are_the_numbers(strategy):
    assert strategy.world_size == 1
    assert list(strategy.sum([3, 5])) == [3, 5]
    losses = {"loss": torch.tensor(2.0), "parts": torch.tensor([1.0, 3.0])}
    means = strategy.mean(losses)
    assert list(means) == list(losses)
    assert all(means[name] is losses[name] for name in losses)


def test_a_batch_stays_as_it_is(strategy):
    batch = [torch.ones(1), {"labels": torch.ones(1)}]
    assert strategy.prepare_batch(batch) is batch
    assert not strategy.has_own_precision


def test_saving_then_loading_gives_everything_back(strategy):
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters())
    strategy.backward(model(microbatches()[0]).sum())
    strategy.step(optimizer)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    other_optimizer = torch.optim.Adam(other.parameters())
    weights, state = strategy.model_state_dict(model), strategy.optimizer_state_dict(model, optimizer)
    assert strategy.load_model_state_dict(other, weights) == ([], [])
    strategy.load_optimizer_state_dict(other, other_optimizer, state)
    torch.testing.assert_close(strategy.model_state_dict(other), weights, rtol=0, atol=0)
    torch.testing.assert_close(strategy.optimizer_state_dict(other, other_optimizer), state, rtol=0, atol=0)


def test_names_that_do_not_fit_are_returned_or_refused(strategy):
    model = torch.nn.Linear(2, 1)
    weights = {"weight": torch.zeros(1, 2), "scale": torch.zeros(1)}
    assert strategy.load_model_state_dict(model, weights, strict=False) == (["bias"], ["scale"])
    with pytest.raises(RuntimeError, match="Missing key"):
        strategy.load_model_state_dict(model, weights)


class Counting(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        self.defaults["calls"] = self.defaults.get("calls", 0) + 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("place", ["class", "instance", "PyTorch's class"])
def test_an_optimizers_own_way_to_drop_gradients_is_taken(strategy, monkeypatch, place):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    calls = []

    def own(*args):
        calls.append(args)

    optimizer = (Counting if place == "class" else torch.optim.SGD)([weight], lr=0.1)
    if place == "instance":
        optimizer.zero_grad = own
    if place == "PyTorch's class":
        monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", own)
    strategy.zero_grad(optimizer)
    assert len(calls) + optimizer.defaults.get("calls", 0) == 1
    assert (weight.grad is None) == (place == "class")


def make_optimizer():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.25), weight


def test_a_step_without_onlookers_is_the_optimizers_step(strategy):
    optimizer, weight = make_optimizer()
    assert strategy.step(optimizer) is None
    assert weight.tolist() == [0.75, 0.75]
    loss = torch.tensor(3.0)
    assert strategy.step(optimizer, lambda: loss) is loss


@pytest.mark.parametrize("kind", ["pre", "post", "pre of all", "post of all"])
def test_hooks_of_a_step_are_called(strategy, kind):
    optimizer, weight = make_optimizer()
    seen = []
    register = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "pre of all": register_optimizer_step_pre_hook,
        "post of all": register_optimizer_step_post_hook,
    }[kind]
    with register(lambda *_: seen.append(weight.tolist())):
        strategy.step(optimizer)
    strategy.step(optimizer)
    assert seen == [[1.0, 1.0] if "pre" in kind else [0.75, 0.75]]
    assert weight.tolist() == [0.5, 0.5]


def test_a_profiler_sees_the_step(strategy):
    optimizer, _ = make_optimizer()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        strategy.step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("place", ["class", "instance", "scheduler"])
def test_a_step_that_somebody_has_wrapped_is_taken(strategy, monkeypatch, place):
    optimizer, weight = make_optimizer()
    calls = []
    torchs = torch.optim.SGD.step

    @functools.wraps(torchs)  # as PyTorch's own wrappers look
    def own(self, *args):
        calls.append(args)
        return torchs(self, *args)

    if place == "class":
        monkeypatch.setattr(torch.optim.SGD, "step", own)
    elif place == "instance":
        optimizer.step = functools.partial(own, optimizer)
    else:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    strategy.step(optimizer)
    assert weight.tolist() == [0.75, 0.75]
    assert calls == ([] if place == "scheduler" else [()])
    if place == "scheduler":
        scheduler.step()  # warns of a step that it has not seen

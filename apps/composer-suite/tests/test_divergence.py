"""A batch whose gradient is not finite is found before the optimizer steps. The reference is a plain loop."""

import copy
import logging
import math

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from composer import Trainer
from composer.algorithms import EMA, SAM, GradientClipping
from composer.core import Callback, DataSpec, Evaluator, Event
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.trainer import _divergence_guard
from composer.trainer.divergence import DivergenceError, OnDivergence
from composer_checkpoint import load_file
from composer_dist.testing import SimulatedAccelerator

BATCH, NUM_BATCHES = 4, 8


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def make_batches(bad=(), value=math.nan):
    """Make batches of inputs and targets; those in `bad` have the value in the last sample."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for index in range(NUM_BATCHES):
        inputs = torch.randn(BATCH, 3, generator=generator)
        targets = torch.randint(2, (BATCH,), generator=generator)
        if index in bad:
            inputs[-1, 0] = value
        batches.append((inputs, targets))
    return batches


def optimizer_for(network):
    return torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)


def train_by_hand(batches, network=None):
    network = network or make_network()
    optimizer = optimizer_for(network)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
    return network


@pytest.fixture
def train():
    """Train on batches; return the Trainer, whatever came of it, and the error."""
    trainers = []

    def run(batches, network=None, loss=nn.functional.cross_entropy, optimizer=None, scaler=None, **settings):
        network = network or make_network()
        trainer = Trainer(
            model=ComposerModel.from_module(network, loss),
            train_dataloader=batches,
            max_duration="1ep",
            optimizers=optimizer or optimizer_for(network),
            progress_bar=False,
            **{"device": "cpu", "device_train_microbatch_size": BATCH, **settings},
        )
        trainers.append(trainer)
        trainer.state.scaler = scaler
        try:
            trainer.fit()
        except DivergenceError as error:
            return trainer, network, error
        return trainer, network, None

    yield run
    for trainer in trainers:
        trainer.close()


def assert_same_weights(network, expected):
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(network.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bad", [0, 5])
def test_training_ends_at_the_bad_batch_with_the_weights_before_it(train, bad, value):
    batches = make_batches({bad}, value)
    trainer, network, error = train(batches)
    assert error.divergence.batch == bad == trainer.state.timestamp.batch
    assert_same_weights(network, train_by_hand(batches[:bad]))
    assert f"Batch {bad} of epoch 0" in str(error)
    assert "0.weight" in str(error), "names what is not finite"


def test_one_bad_microbatch_is_enough(train):
    batches = make_batches({2})
    _, network, error = train(batches, device_train_microbatch_size=1)
    assert error.divergence.batch == 2
    _, expected, _ = train(batches[:2], device_train_microbatch_size=1)
    assert_same_weights(network, expected)


@pytest.mark.parametrize("microbatch_size", [BATCH, 2])
def test_training_goes_on_with_an_infinite_loss_whose_gradients_are_finite(train, microbatch_size, caplog):
    """A DivergenceError ended the run."""

    def loss(outputs, targets):
        calls.append(None)
        is_bad = len(calls) * microbatch_size in (3 * BATCH, 4 * BATCH)
        return nn.functional.cross_entropy(outputs, targets) + (math.inf if is_bad else 0.0)

    calls, batches = [], make_batches()
    trainer, network, error = train(batches, loss=loss, device_train_microbatch_size=microbatch_size)
    assert (error, trainer.divergences) == (None, [])
    _, expected, _ = train(batches, device_train_microbatch_size=microbatch_size)
    assert_same_weights(network, expected)
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2, "once at the first batch, and the count at the end"
    assert "loss of batch 2 is not finite" in said[0]
    assert "accumulate_train_batch_on_tokens" in said[0]
    assert "2 batches" in said[1]


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("microbatch_size", [BATCH, 2, 1])
def test_a_microbatch_whose_labels_are_all_ignored_changes_nothing(train, microbatch_size, by_tokens):
    """A DivergenceError ended the run, although the gradients of such a microbatch are 0."""

    def count(batch):
        return {"total": len(batch[1]), "loss_generating": int((batch[1] != -100).sum())}

    batches = make_batches()
    batches[2] = (batches[2][0], torch.tensor([-100, -100, 1, 0]))
    batches[4] = (batches[4][0], torch.full((BATCH,), -100))
    logged = InMemoryLogger()
    data = DataSpec(batches, get_num_tokens_in_batch=count)
    settings = {"device_train_microbatch_size": microbatch_size, "accumulate_train_batch_on_tokens": by_tokens}
    _, network, error = train(data, loggers=logged, **settings)
    assert error is None

    expected, means = make_network(), []
    optimizer = optimizer_for(expected)
    for inputs, targets in batches:
        optimizer.zero_grad()
        weight = total = 0.0
        num_tokens = int((targets != -100).sum())
        for start in range(0, BATCH, microbatch_size):
            part = slice(start, start + microbatch_size)
            kept = int((targets[part] != -100).sum())
            loss = nn.functional.cross_entropy(expected(inputs[part]), targets[part])
            share = (kept / num_tokens if num_tokens else 0.0) if by_tokens else microbatch_size / BATCH
            if kept:
                (loss * share).backward()
                weight, total = weight + share, total + loss.item() * share
        if not num_tokens:
            expected(inputs).sum().mul(0).backward()
        optimizer.step()
        means.append(total / weight if weight else (0.0 if by_tokens else math.nan))
    for own, other in zip(network.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)  # a few float32 roundings of values below 1
    seen = [float(loss) for _, loss in logged.data["loss/train/total"]]
    assert seen == pytest.approx(means, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("num_samples", [10, 20])
def test_a_batch_without_any_label_has_no_loss_however_it_is_cut(train, num_samples):
    """Ten shares of 0.1 add up to 1.0000001, and a loss of -0.0 was logged, beside which usual losses were spikes."""
    inputs = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(1))
    batches = [(inputs, torch.full((num_samples,), label)) for label in (1, -100, -100, -100, 0)]
    logged = InMemoryLogger()
    policy = OnDivergence("raise", spike_factor=10.0, on_spike="raise")
    settings = {"device_train_microbatch_size": 1, "on_divergence": policy}
    _, _, error = train(batches, loggers=logged, **settings)
    assert error is None
    losses = [float(loss) for _, loss in logged.data["loss/train/total"]]
    assert [math.isnan(loss) for loss in losses] == [False, True, True, True, False]


def test_a_loss_that_is_not_finite_counts_once_where_sam_evaluates_it_twice(train, caplog):
    batches = make_batches()[:3]
    batches[1] = (batches[1][0], torch.full((BATCH,), -100))
    _, _, error = train(batches, algorithms=[SAM()])
    assert error is None
    assert [record.message[:19] for record in caplog.records if record.levelno >= logging.WARNING] == [
        "The loss of batch 1"
    ]


@pytest.mark.parametrize("microbatch_size", [2, 1])
def test_a_part_of_the_loss_that_is_not_finite_is_left_out_of_its_mean(train, microbatch_size):
    """The part was logged as NaN."""

    def loss(outputs, targets):
        calls.append(None)
        is_bad = (len(calls) - 1) * microbatch_size % BATCH == 0
        return {"one": outputs.sum() * 0 + 1, "two": outputs.sum() * 0 + (math.nan if is_bad else 2.0)}

    calls, logged = [], InMemoryLogger()
    _, _, error = train(make_batches(), loss=loss, loggers=logged, device_train_microbatch_size=microbatch_size)
    assert error is None
    seen = {name: {float(value) for _, value in logged.data[f"loss/train/{name}"]} for name in ("one", "two", "total")}
    assert seen == {"one": {1.0}, "two": {2.0}, "total": {3.0}}


def test_a_gradient_counts_though_the_loss_is_finite(train):
    class SquareRoot(nn.Module):
        """The root of what is 0 in the third batch, where its slope is infinite."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, inputs):
            return (self.weight * inputs).square().sum().sqrt()

    batches = [(torch.tensor([[float(index != 2), 0.0]]), torch.zeros(1)) for index in range(4)]
    _, network, error = train(
        batches, SquareRoot(), loss=lambda outputs, targets: outputs, device_train_microbatch_size=1
    )
    assert error.divergence.batch == 2
    assert math.isfinite(error.divergence.loss)
    assert all(torch.isfinite(p).all() for p in network.parameters())


def test_skipping_leaves_the_batch_out_and_says_which(train, caplog):
    batches = make_batches({0, 3, 7})
    with caplog.at_level(logging.WARNING):
        trainer, network, error = train(batches, on_divergence="skip")
    assert error is None
    assert [divergence.batch for divergence in trainer.divergences] == [0, 3, 7]
    assert "Batch 3 of epoch 0" in caplog.text
    assert trainer.state.timestamp.batch == NUM_BATCHES
    assert_same_weights(network, train_by_hand([b for index, b in enumerate(batches) if index not in (0, 3, 7)]))


class DropsBadGradients(torch.optim.SGD):
    def step(self, closure=None):
        if all(p.grad.isfinite().all() for group in self.param_groups for p in group["params"]):
            super().step(closure)


def zero_bad_gradients(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            torch.nan_to_num_(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)


def sgd_with_hook(parameters, **settings):
    optimizer = torch.optim.SGD(parameters, **settings)
    optimizer.register_step_pre_hook(zero_bad_gradients)
    return optimizer


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("make_optimizer", [DropsBadGradients, sgd_with_hook])
def test_an_optimizer_that_drops_bad_gradients_by_itself_trains_on(train, make_optimizer, value):
    """A script that Composer trains through, with a hook that zeroes NaN gradients, ended with a DivergenceError."""
    batches, network, by_hand = make_batches({0, 5}, value), make_network(), make_network()
    _, _, error = train(batches, network, optimizer=make_optimizer(network.parameters(), lr=0.5, momentum=0.9))
    optimizer = make_optimizer(by_hand.parameters(), lr=0.5, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(inputs), targets).backward()
        optimizer.step()
    assert error is None
    assert_same_weights(network, by_hand)


def test_a_run_that_can_only_skip_ends_with_an_error(train):
    _, network, error = train(make_batches(range(2, 8)), on_divergence=OnDivergence("skip", max_in_a_row=3))
    assert error.divergence.batch == 4
    assert "3 batches in a row" in str(error)
    assert_same_weights(network, train_by_hand(make_batches()[:2]))


def test_rolling_back_goes_on_from_the_latest_copy(train):
    batches = make_batches({5})
    trainer, network, _ = train(batches, on_divergence=OnDivergence("rollback", rollback_batches=3))
    assert [divergence.action for divergence in trainer.divergences] == ["rollback"]
    # Copies are taken before batches 0, 3 and 6.
    assert_same_weights(network, train_by_hand([*batches[:3], *batches[6:]]))


def test_running_means_are_those_before_a_bad_batch(train):
    def make():
        return nn.Sequential(nn.BatchNorm1d(3), make_network())

    batches = make_batches({4})
    _, network, _ = train(batches, make(), on_divergence="skip")
    expected = train_by_hand([b for index, b in enumerate(batches) if index != 4], make())
    torch.testing.assert_close(network[0].running_mean, expected[0].running_mean, rtol=0, atol=0)
    torch.testing.assert_close(network[0].running_var, expected[0].running_var, rtol=0, atol=0)


class Meddler(nn.Module):
    """Changes each kind of buffer in each forward pass, and hands its input on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_calls", torch.tensor(0))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("latest", None)

    def forward(self, inputs):
        self.num_calls += 1
        self.phase *= 1j
        self.total = self.total + inputs.detach().sum()  # another tensor each time
        self.latest = inputs.detach().mean()
        return inputs


@pytest.mark.parametrize("make_part", [lambda: nn.BatchNorm1d(3), Meddler], ids=["batch norm", "every kind"])
@pytest.mark.parametrize("bad", [0, 4])
def test_no_buffer_of_whatever_kind_remembers_a_skipped_batch(train, make_part, bad):
    batches = make_batches({bad})
    _, network, _ = train(batches, nn.Sequential(make_part(), make_network()), on_divergence="skip")
    good = [batch for index, batch in enumerate(batches) if index != bad]
    expected = train_by_hand(good, nn.Sequential(make_part(), make_network()))
    assert_same_weights(network, expected)


def test_running_means_without_a_counter_are_those_before_a_bad_batch(train):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(3))
            self.register_buffer("running_var", torch.ones(3))

        def forward(self, inputs):
            return nn.functional.batch_norm(inputs, self.running_mean, self.running_var, training=True)

    batches = make_batches({4})
    _, network, _ = train(batches, nn.Sequential(Plain(), make_network()), on_divergence="skip")
    expected = train_by_hand(batches[:4] + batches[5:], nn.Sequential(Plain(), make_network()))
    assert_same_weights(network, expected)


def test_a_buffer_that_does_not_change_is_copied_once(train):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(1000, 1000))
            self.layers = make_network()

        def forward(self, inputs):
            return self.layers(inputs) * self.mask[0, 0]

    size_bytes = 4 * 1000 * 1000
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(make_batches(), Masked())
    allocated = [entry.self_cpu_memory_usage for entry in profiler.events() if entry.name != "[memory]"]
    assert sum(1 for size in allocated if size >= size_bytes) <= 2  # the mask itself, and its copy


def zero_gradients(outputs, targets):
    return nn.functional.cross_entropy(outputs * 0.0, targets)


def adam_without_eps(network):
    """Return an optimizer that divides 0 by 0 where there is no gradient."""
    return torch.optim.Adam(network.parameters(), lr=0.1, eps=0.0)


def test_weights_that_the_last_step_ruins_are_an_error_and_not_saved(train, tmp_path):
    network = make_network()
    settings = {"save_folder": str(tmp_path), "save_interval": "1ba", "loss": zero_gradients}
    trainer, _, error = train(make_batches()[:1], network, optimizer=adam_without_eps(network), **settings)
    assert "0.weight" in str(error), "names what is not finite"
    assert [divergence.batch for divergence in trainer.divergences] == [0]
    assert not list(tmp_path.rglob("*.pt"))


def test_weights_that_the_last_step_ruins_are_an_error_where_nothing_is_saved(train):
    network = make_network()
    _, _, error = train(make_batches()[:1], network, optimizer=adam_without_eps(network), loss=zero_gradients)
    assert "0.weight" in str(error)


def test_what_an_optimizer_keeps_is_looked_at_before_it_is_saved(train, tmp_path):
    def loss(outputs, targets):
        return outputs.sum() * 1e25  # whose square, which Adam keeps, overflows: it would never move again

    network = make_network()
    settings = {"save_folder": str(tmp_path), "save_interval": "1ba", "loss": loss}
    adam = torch.optim.Adam(network.parameters())
    _, _, error = train(make_batches()[:1], network, optimizer=adam, **settings)
    assert "what the optimizer keeps" in str(error)
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize(
    ("kind", "clip", "factor"),
    [("value", nn.utils.clip_grad_value_, math.inf), ("norm", nn.utils.clip_grad_norm_, 1e25)],
)
def test_what_clipping_makes_finite_is_no_divergence(train, kind, clip, factor):
    """A DivergenceError ended the run, where a plain loop that clips trains through with finite weights."""

    def make():
        """Make a network whose last bias has a huge gradient in the third batch, of a norm that overflows."""
        calls, network = [], make_network()
        network[2].bias.register_hook(lambda gradient: calls.append(None) or gradient + (len(calls) == 3 and factor))
        return network

    batches = make_batches()
    clipping = GradientClipping(clipping_type=kind, clipping_threshold=0.5)
    _, network, error = train(batches, make(), algorithms=[clipping])
    assert error is None
    expected = make()
    optimizer = optimizer_for(expected)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(inputs), targets).backward()
        clip(expected.parameters(), 0.5)
        optimizer.step()
    for own, other in zip(network.parameters(), expected.parameters(), strict=True):
        assert torch.isfinite(other).all()
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


def test_who_wants_no_guard_gets_what_a_plain_loop_gives(train):
    _, network, error = train(make_batches({3}), on_divergence=None)
    assert error is None
    assert not any(torch.isfinite(p).all() for p in network.parameters())


@pytest.mark.parametrize(
    ("on_spike", "trained_on"),
    [("log", range(8)), ("skip", [0, 1, 2, 3, 4, 6, 7]), ("rollback", [0, 1, 2, 3, 6, 7])],
)
def test_a_loss_a_thousand_times_as_large(train, on_spike, trained_on):
    def by_hand(batches):
        network = make_network()
        optimizer = optimizer_for(network)
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(network(inputs), targets).backward()
            optimizer.step()
        return network

    made = enumerate(make_batches())
    batches = [(inputs, inputs[:, :2] * (100.0 if index == 5 else 1.0)) for index, (inputs, _) in made]
    policy = OnDivergence(spike_factor=1000, on_spike=on_spike, rollback_batches=4)
    trainer, network, error = train(batches, loss=nn.functional.mse_loss, on_divergence=policy)
    assert error is None
    first = trainer.divergences[0]  # where the step was made, what follows may jump too
    assert (first.batch, first.is_spike, first.action) == (5, True, on_spike)
    assert on_spike == "log" or len(trainer.divergences) == 1
    assert_same_weights(network, by_hand([batches[index] for index in trained_on]))


@pytest.mark.parametrize("on_spike", ["skip", "rollback"])
def test_spikes_in_a_row_end_the_run_as_other_divergences_do(train, on_spike):
    """A run whose losses stayed high was skipped to its end: nothing was trained, and nothing raised."""
    made = enumerate(make_batches())
    batches = [(inputs, inputs[:, :2] * (100.0 if index >= 3 else 1.0)) for index, (inputs, _) in made]
    policy = OnDivergence(spike_factor=1000, on_spike=on_spike, max_in_a_row=3)
    _, _, error = train(batches, loss=nn.functional.mse_loss, on_divergence=policy)
    assert isinstance(error, DivergenceError)
    assert (error.divergence.batch, error.divergence.is_spike) == (5, True)


def test_gradients_that_overflow_under_a_scaler_are_no_divergence(train):
    batches = make_batches()
    scaler = GradScaler("cpu", init_scale=2.0**127)  # too large for float32 until it was halved a few times

    def loss(outputs, targets):
        return 64 * nn.functional.cross_entropy(outputs, targets)

    trainer, _, error = train(batches, scaler=scaler, loss=loss)
    assert error is None
    assert scaler.get_scale() < 2.0**125
    assert trainer.divergences == []


def test_a_loss_that_is_not_finite_is_a_divergence_under_a_scaler_too(train):
    batches = make_batches({5})
    _, network, error = train(batches, scaler=GradScaler("cpu", init_scale=4.0))
    assert error.divergence.batch == 5
    assert_same_weights(network, train_by_hand(batches[:5]))  # a power of 2 leaves no rounding


def test_overflows_without_end_are_a_divergence(train):
    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.inf

    def loss(outputs, targets):
        return nn.functional.cross_entropy(Overflow.apply(outputs), targets)

    network = make_network()
    before = copy.deepcopy(network)
    _, network, error = train(make_batches() * 5, network, loss=loss, scaler=GradScaler("cpu"))
    assert error.divergence.batch == 31
    assert_same_weights(network, before)


def test_lbfgs_is_left_with_the_weights_and_the_state_before_the_bad_batch(train):
    def optimizer(network):
        return torch.optim.LBFGS(network.parameters(), max_iter=3)

    batches, network, expected = make_batches({4}), make_network(), make_network()
    lbfgs, reference = optimizer(network), optimizer(expected)
    trainer, network, _ = train(batches, network, optimizer=lbfgs, on_divergence="skip")
    _, expected, _ = train([b for index, b in enumerate(batches) if index != 4], expected, optimizer=reference)
    assert [divergence.batch for divergence in trainer.divergences] == [4]
    assert_same_weights(network, expected)


def test_sparse_gradients_are_looked_at(train):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(6, 2, sparse=True)

        def forward(self, words):
            return self.embedding(words)

    words = [
        (torch.tensor([index % 6] * 2), torch.tensor([[1.0, math.nan if index == 3 else 1.0]] * 2))
        for index in range(5)
    ]
    network = Words()
    sgd = torch.optim.SGD(network.parameters(), lr=0.1)
    _, network, error = train(words, network, nn.functional.mse_loss, sgd, device_train_microbatch_size=2)
    assert error.divergence.batch == 3
    assert torch.isfinite(network.embedding.weight).all()


@pytest.mark.parametrize("given", ["stop", "Raise", ""])
def test_an_unknown_policy_is_refused_with_those_there_are(make_trainer, given):
    with pytest.raises(ValueError, match=r"on_divergence=.*'raise', 'skip', 'rollback'"):
        make_trainer(on_divergence=given)


@pytest.mark.parametrize(
    "settings",
    [{"action": "stop"}, {"on_spike": "stop"}, {"spike_factor": 1}, {"rollback_batches": 0}, {"max_in_a_row": 0}],
)
def test_a_policy_that_makes_no_sense_is_refused(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        OnDivergence(**settings)


@pytest.fixture(params=["cpu", "simulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def late(request, monkeypatch):
    """Let the host read the results two batches later, which only GPUs need, and return the device."""
    if request.param == "simulated":
        if torch.cuda.is_available():
            pytest.skip("PyTorch has one accelerator type per process, here CUDA")
        with SimulatedAccelerator() as accelerator:
            yield accelerator
        return
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setattr(_divergence_guard, "_DEFERS_ON", {"cpu", "cuda"})
    yield request.param


def place_of(device):
    return {"cpu": "cpu", "gpu": "cuda"}.get(device, "simgpu")


class Finite(Callback):
    """Check that the weights are finite whenever they are evaluated."""

    def eval_start(self, state, logger):
        assert all(parameter.isfinite().all() for parameter in state.model.parameters())


def fused_sgd(parameters, **settings):
    return torch.optim.SGD(parameters, fused=True, **settings)


SGD = {"plain": torch.optim.SGD, "fused": fused_sgd, "drops": DropsBadGradients, "hook": sgd_with_hook}


@pytest.mark.parametrize("make_optimizer", SGD.values(), ids=SGD)
@pytest.mark.parametrize("action", ["raise", "skip", "rollback"])
def test_a_result_that_arrives_late_ends_in_the_same_weights(train, late, action, make_optimizer, caplog):
    batches, device = make_batches({5}), place_of(late)
    network = make_network().to(device)
    optimizer = make_optimizer(network.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    policy = OnDivergence(action, rollback_batches=2)
    trainer, network, error = train(
        batches, network, optimizer=optimizer, on_divergence=policy, device=late, precision="fp32"
    )
    drops = action == "raise" and make_optimizer in (DropsBadGradients, sgd_with_hook)
    assert [each.batch for each in trainer.divergences] == ([] if drops else [5])
    assert ("waits for the device" in caplog.text) == (action == "skip" and make_optimizer is not fused_sgd)
    if action == "raise" and not drops:
        assert error.divergence.batch == 5
    if action == "raise" and make_optimizer is torch.optim.SGD:
        assert "0.weight" in str(error), "names the weights, which the host has not kept"
        return
    kept = {"raise": batches[:5], "skip": batches[:5] + batches[6:], "rollback": batches[:4] + batches[6:]}[action]
    expected = train_by_hand(
        [(inputs.to(device), targets.to(device)) for inputs, targets in kept], make_network().to(device)
    )
    if drops:
        expected = reference_that_drops(batches, device, make_optimizer)
    for one, other in zip(network.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # fused kernels round otherwise


def test_an_error_after_rollbacks_names_the_batches_that_were_undone(train, late):
    """It claimed that the weights were those from before the batch."""
    batches, network = make_batches(range(3, 8)), make_network().to(place_of(late))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    policy = OnDivergence("rollback", rollback_batches=2, max_in_a_row=2)
    _, network, error = train(
        batches, network, optimizer=optimizer, on_divergence=policy, device=late, precision="fp32"
    )
    assert "rolled back by" in str(error)
    assert "those before it" not in str(error)
    assert all(parameter.isfinite().all() for parameter in network.parameters())


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "offloaded", "both"])
def test_gradients_that_the_kernel_does_not_take_are_checked_by_a_few_kernels(kind, bad):
    """Each tensor took several kernels, and a copy if it was offloaded."""
    if torch.cuda.is_available():
        pytest.skip("PyTorch has one accelerator type per process, here CUDA")
    with SimulatedAccelerator() as accelerator:
        on_host = [torch.ones(3) for _ in range(20)] if kind != "bfloat16" else []
        on_device = [torch.ones(3, dtype=torch.bfloat16, device="simgpu") for _ in range(20 * (kind != "offloaded"))]
        tensors = on_host + on_device
        tensors[-1][1] = math.nan if bad else 1.0
        found, one = torch.zeros((), device="simgpu"), torch.ones((), device="simgpu")
        with accelerator.counting() as counts:
            _divergence_guard.note_non_finite(tensors, found, one)
        assert found.item() == bad
    assert counts.kernels.total() <= 10
    assert (counts.copies_to_device.total(), counts.synchronizations.total()) == (int(bool(on_host)), 0)


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": True}, {"fused": False}], ids=str)
def test_a_fused_kernel_that_was_not_chosen_is_advised_once(train, settings, has_scaler, caplog):
    if torch.cuda.is_available():
        pytest.skip("PyTorch has one accelerator type per process, here CUDA")
    caplog.set_level(logging.INFO)
    with SimulatedAccelerator() as accelerator:
        trainer, _, _ = train(
            make_batches(),
            network := make_network(),
            optimizer=torch.optim.AdamW(network.parameters(), **settings),
            device=accelerator,
            scaler=GradScaler("simgpu") if has_scaler else None,
        )
        trainer.fit(duration="1ep")
    found = [record for record in caplog.records if "AdamW steps without its fused kernel" in record.message]
    assert [record.levelname for record in found] == ([] if settings else ["WARNING" if has_scaler else "INFO"])


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, fused_sgd])
def test_a_rollback_leaves_no_bad_weights_in_an_average(train, late, make_optimizer):
    """EMA averaged the steps that were taken until the host knew of the divergence."""
    ema, network = EMA(half_life="2ba"), make_network().to("cuda" if late == "gpu" else "cpu")
    optimizer = make_optimizer(network.parameters(), lr=0.5, momentum=0.9)
    trainer, network, _ = train(
        make_batches({5}),
        network,
        optimizer=optimizer,
        algorithms=ema,
        on_divergence=OnDivergence("rollback", rollback_batches=2),
        device=late,
        precision="fp32",
    )
    assert [each.batch for each in trainer.divergences] == [5]
    average = ema.get_ema_model(copy.deepcopy(trainer.state.model))
    assert all(parameter.isfinite().all() for parameter in average.parameters())


def reference_that_drops(batches, device, make_optimizer):
    network = make_network().to(device)
    optimizer = make_optimizer(network.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()
    return network


MAKERS = {
    "SGD": lambda network: (optimizer_for(network), None),
    "SAM": lambda network: (optimizer_for(network), SAM()),
    "LBFGS": lambda network: (torch.optim.LBFGS(network.parameters(), lr=0.1, max_iter=3), None),
    "EMA": lambda network: (optimizer_for(network), EMA(half_life="2ba")),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("interval", [1, 2, 7])
def test_weights_that_are_known_late_to_be_bad_are_neither_saved_nor_evaluated(train, late, tmp_path, make, interval):
    network = make_network().to(place_of(late))
    optimizer, algorithm = make(network)
    evaluator = Evaluator(label="eval", dataloader=make_batches(), device_eval_microbatch_size=BATCH)
    saving = {"save_folder": str(tmp_path), "save_interval": f"{interval}ba", "save_filename": "ba{batch}.pt"}
    evaluation = {"eval_dataloader": evaluator, "eval_interval": f"{interval}ba", "callbacks": Finite()}
    _, _, error = train(
        make_batches({5}),
        network,
        optimizer=optimizer,
        algorithms=algorithm,
        device=late,
        precision="fp32",
        **saving,
        **evaluation,
    )
    assert error.divergence.batch == 5
    assert sorted(path.name for path in tmp_path.glob("ba*")) == [f"ba{n}.pt" for n in range(interval, 6, interval)]
    for path in tmp_path.glob("ba*"):
        assert all(weight.isfinite().all() for weight in load_file(path)["state"]["model"].values())


class FiniteBuffers(Callback):
    def eval_start(self, state, logger):
        self.is_finite = all(buffer.isfinite().all() for buffer in state.model.buffers())


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, fused_sgd])
def test_an_evaluation_after_a_bad_batch_uses_finite_running_means(train, late, make_optimizer):
    """A fused optimizer kept the weights, but running means were NaN until the host knew of the divergence."""
    network = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    network.to("cuda" if late == "gpu" else "cpu")
    finite = FiniteBuffers()
    evaluator = Evaluator(label="eval", dataloader=make_batches(), device_eval_microbatch_size=BATCH)
    train(
        make_batches({5}),
        network,
        optimizer=make_optimizer(network.parameters(), lr=0.1),
        on_divergence="skip",
        eval_dataloader=evaluator,
        eval_interval=lambda state, event: event == Event.BATCH_END and state.timestamp.batch == 6,
        callbacks=finite,
        device=late,
        precision="fp32",
    )
    assert finite.is_finite


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nobody_waits_for_a_gpu_whose_optimizer_is_fused(train):
    batches = [(inputs.cuda(), targets.cuda()) for inputs, targets in make_batches({5})]
    network, expected = make_network().cuda(), make_network().cuda()
    optimizers = [fused_sgd(each.parameters(), lr=0.5, momentum=0.9) for each in (network, expected)]
    train(batches[:5], expected, optimizer=optimizers[1], device="gpu", precision="fp32")
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, network, error = train(batches, network, optimizer=optimizers[0], device="gpu", precision="fp32")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert error.divergence.batch == 5
    assert_same_weights(network, expected)

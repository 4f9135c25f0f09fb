"""`SWA` against the mean of the weights, and in training."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel

from composer_algorithms import SWA
from composer_dist import get_device
from composer_dist.testing import run_ranks
from composer_events import Callback, Event, State
from composer_time import Timestamp


class AtEnds(Callback):
    """Keep the weights and the learning rate at the ends of batches or epochs, as the callbacks after SWA see them."""

    def __init__(self, event):
        self.event = event
        self.weights, self.lrs = [], []

    def run_event(self, event, state, logger):
        if event == self.event:
            self.weights.append(state.model.first.weight.detach().clone().double())
            self.lrs.append(state.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("max_duration", "interval", "event", "chosen", "end"),
    [
        # 5 epochs of 4 batches; from half of them on, to four fifths.
        ("20ba", "1ba", Event.BATCH_END, [10, 11, 12, 13, 14, 15, 16], 16),
        ("20ba", "3ba", Event.BATCH_END, [10, 13, 16], 16),
        ("5ep", "1ep", Event.EPOCH_END, [3, 4], 4),
        ("5ep", "2ep", Event.EPOCH_END, [3], 4),
    ],
)
def test_the_model_gets_the_mean_of_the_weights_at_the_intervals(make_loop, max_duration, interval, event, chosen, end):
    plain, averaged = AtEnds(event), AtEnds(event)
    make_loop([], [plain], max_duration=max_duration).fit()
    loop = make_loop([SWA("0.5dur", "0.8dur", interval)], [averaged], max_duration=max_duration).fit()
    # Up to the end nothing changes.
    assert all(torch.equal(a, b) for a, b in zip(plain.weights[: end - 1], averaged.weights[: end - 1], strict=True))
    expected = torch.stack([plain.weights[number - 1] for number in chosen]).mean(dim=0)
    torch.testing.assert_close(averaged.weights[end - 1], expected, rtol=1e-6, atol=1e-7)  # a mean in float32
    assert loop.state.algorithms[0].swa_completed
    assert not torch.equal(averaged.weights[-1], averaged.weights[end - 1])  # training goes on


def test_epochs_count_as_well_as_parts_of_training(make_loop):
    weights = []
    for start, end in (("0.4dur", "0.8dur"), ("2ep", "4ep")):
        loop = make_loop([SWA(start, end)], max_duration="5ep").fit()
        weights.append(loop.model.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_buffers_are_not_averaged_and_integers_keep_their_values(make_loop):
    plain = make_loop([], max_duration="2ep").fit()
    loop = make_loop([SWA("0dur", "1dur", "1ba")], max_duration="2ep").fit()
    assert torch.equal(loop.model.norm.running_mean, plain.model.norm.running_mean)
    assert loop.model.norm.num_batches_tracked == plain.model.norm.num_batches_tracked
    assert not torch.equal(loop.model.first.weight, plain.model.first.weight)


def test_an_end_at_the_very_end_warns_that_batch_norms_are_stale(make_loop, caplog):
    loop = make_loop([SWA("0.5dur", "1dur", "1ba")], max_duration="2ep")
    assert "leaves no training" in caplog.text
    loop.fit()
    assert "at the very end of training" in caplog.text


@pytest.mark.parametrize("strategy", ["linear", "cos"])
def test_the_learning_rate_goes_where_torchs_own_scheduler_takes_it(make_loop, strategy):
    seen = AtEnds(Event.BATCH_END)
    make_loop(
        [SWA("0dur", "1dur", "1ba", schedule_swa_lr=True, anneal_strategy=strategy, anneal_steps=5, swa_lr=0.02)],
        [seen],
        max_duration="2ep",
    ).fit()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=5, anneal_strategy=strategy)
    expected = []
    for _ in range(7):
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert seen.lrs[:7] == pytest.approx(expected)


def test_other_schedulers_do_not_interfere_and_have_their_way_afterwards(make_loop):
    class Meddling(Callback):
        def batch_start(self, state, logger):
            used.append(state.optimizers[0].param_groups[0]["lr"])

        def after_train_batch(self, state, logger):
            state.optimizers[0].param_groups[0]["lr"] = 7e-5  # as a scheduler does before the end of the batch

    used = []
    swa = SWA("1ep", "2ep", "1ep", schedule_swa_lr=True, anneal_steps=1, swa_lr=0.05)
    make_loop([swa], [Meddling()], max_duration="3ep").fit()
    assert used == pytest.approx([0.1, *[7e-5] * 3, *[0.05] * 5, *[7e-5] * 3])  # from the first batch afterwards on


def test_without_a_rate_of_its_own_each_group_keeps_the_one_it_has(make_loop):
    seen = AtEnds(Event.BATCH_END)
    make_loop([SWA("0dur", "1dur", "1ba", schedule_swa_lr=True)], [seen], max_duration="2ep").fit()
    assert seen.lrs == pytest.approx([0.1] * 8)


@pytest.mark.parametrize(
    "make", [lambda: SWA("1ep", "4ep"), lambda: SWA("0.25dur", "0.9dur", "2ba", True, "cos", 3, 0.01)]
)
def test_training_resumed_from_a_checkpoint_ends_with_the_same_weights(make_loop, make_saver, make):
    saver = make_saver("3ba")
    whole = make_loop([make()], [saver], max_duration="5ep").fit()
    for checkpoint in saver.checkpoints[:-1]:
        resumed = make_loop([make()], max_duration="5ep").resume_from(checkpoint).fit()
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_second_run_begins_anew(make_loop):
    swa = SWA("1ep", "2ep")
    first = make_loop([swa], max_duration="3ep").fit()
    assert swa.swa_completed
    second = make_loop([swa], max_duration="3ep")
    assert not swa.swa_completed
    torch.testing.assert_close(second.fit().model.state_dict(), first.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("prefix", ["", "module."], ids=["bare", "DDP"])
def test_a_state_of_composer_itself_goes_on(make_model, prefix):
    torch.manual_seed(0)
    model, optimizer = make_model(norm=False), None
    averaged = AveragedModel(nn.Sequential())
    averaged.module = make_model(norm=False)
    names = {"n_averaged": torch.tensor(3)}
    for name, tensor in averaged.module.state_dict().items():
        names[f"module.{prefix}{name}"] = tensor.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = SWALR(optimizer, swa_lr=0.1, anneal_epochs=10, anneal_strategy="linear")
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    saved = {
        "swa_model": names,
        "swa_completed": False,
        "swa_started": True,
        "swa_scheduler": {key: value for key, value in scheduler.state_dict().items() if key != "anneal_func"},
        "step_counter": 3,
        "repr": "<SWA>",
    }
    state = State(model, rank_zero_seed=1, max_duration="9ep", device=get_device("cpu"), optimizers=optimizer)
    swa = SWA("1ep", "5ep", schedule_swa_lr=True, swa_lr=0.1)
    swa.apply(Event.INIT, state, None)
    swa.load_state_dict(saved)
    old, new = averaged.module.first.weight.double(), model.first.weight.detach().double()
    state.timestamp = Timestamp(epoch=5)
    assert swa.match(Event.EPOCH_END, state)
    swa.apply(Event.EPOCH_END, state, None)
    torch.testing.assert_close(model.first.weight.detach().double(), (3 * old + new) / 4, rtol=1e-6, atol=1e-7)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.3 + 0.5 * 0.7)  # it had its last step before


def test_a_state_of_another_model_is_refused(make_model):
    swa = SWA("1ep", "5ep")
    saved = {"swa_model": {"n_averaged": 1, "module.other": torch.zeros(1)}, "swa_started": True}
    swa.load_state_dict({**saved, "swa_completed": False, "step_counter": 1})
    state = State(make_model(), rank_zero_seed=1, max_duration="9ep", device=get_device("cpu"))
    state.timestamp = Timestamp(epoch=2)
    with pytest.raises(ValueError, match="does not have 6 parameters of the model, such as"):
        swa.apply(Event.EPOCH_END, state, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swa_start": "1ep"}, "different units"),
        ({"swa_start": "5ba", "swa_end": "9ba"}, "swa_start='5ba' is not valid"),
        ({"swa_end": "1.5dur"}, r"swa_end='1\.5dur' is not valid"),
        ({"swa_start": "0.97dur"}, "is not before"),
        ({"update_interval": "0.1dur"}, r"update_interval='0\.1dur' is not a valid interval"),
        ({"update_interval": "0ep"}, "update_interval='0ep'"),
        ({"anneal_steps": 0}, "anneal_steps=0"),
        ({"anneal_strategy": "steps"}, "anneal_strategy='steps' is unknown"),
    ],
)
def test_times_and_steps_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SWA(**arguments)


def test_spellings_of_strategies_and_of_older_releases_are_accepted():
    assert SWA(anneal_strategy="COSINE").anneal_strategy == "cos"
    assert SWA(anneal_strategy="lin").anneal_strategy == "linear"
    with pytest.warns(DeprecationWarning, match="anneal_steps=3"):
        assert SWA(anneal_epochs=3).anneal_steps == 3


def test_a_rate_without_a_schedule_is_pointed_out(caplog):
    SWA(swa_lr=0.1)
    assert "swa_lr=0.1 has no effect without schedule_swa_lr=True" in caplog.text


def test_a_schedule_needs_a_single_optimizer_and_parts_of_training_a_length(state):
    state.timestamp = Timestamp(epoch=1)
    with pytest.raises(RuntimeError, match="there are 0"):
        SWA("1ep", "2ep", schedule_swa_lr=True).apply(Event.EPOCH_END, state, None)
    state.max_duration = None
    with pytest.raises(RuntimeError, match="whose length is not known"):
        SWA().match(Event.EPOCH_END, state)


def average_on_ranks(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    spread = DistributedDataParallel(model) if wrap == "ddp" else fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state = State(spread, rank_zero_seed=1, max_duration="9ep", device=get_device("cpu"))

    def whole():
        return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]

    swa, seen = SWA("1ep", "3ep"), []
    for epoch in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(epoch)
        seen.append(whole())
        state.timestamp = Timestamp(epoch=epoch)
        if epoch == 3:
            resumed = SWA("1ep", "3ep")
            resumed.load_state_dict(swa.state_dict())
            swa = resumed
        swa.apply(Event.EPOCH_END, state, None)
    return sorted(name for name in SWA.state_dict(swa)["swa_model"]), seen, whole()


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_the_mean_of_a_spread_model_is_that_of_its_whole_weights(wrap, tmp_path):
    for names, seen, final in run_ranks(average_on_ranks, wrap, store=tmp_path / "store"):
        assert names == ["n_averaged"]
        expected = [sum(weights) / 3 for weights in zip(*seen, strict=True)]
        torch.testing.assert_close(final, expected)


def test_names_in_the_state_are_those_of_the_bare_model(state):
    swa = SWA("1ep", "3ep")
    state.timestamp = Timestamp(epoch=1)
    swa.apply(Event.EPOCH_END, state, None)
    saved = swa.state_dict()
    expected = {f"module.{name}" for name, _ in state.model.named_parameters()} | {"n_averaged"}
    assert set(saved["swa_model"]) == expected
    assert saved["swa_scheduler"] is None
    assert math.isclose(int(saved["swa_model"]["n_averaged"]), 1)

"""Several optimizers over disjoint parameters train like one optimizer with as many parameter groups."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer, algorithms
from composer.callbacks import LRMonitor, OptimizerMonitor
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.optim import ConstantScheduler, DecoupledAdamW, LinearScheduler
from composer_dist.devices import Device, DeviceCPU

EVERY = {
    "plain": {},
    "microbatches": {"device_train_microbatch_size": 2},
    "Composer schedule": {"schedulers": LinearScheduler()},
    "two Composer schedules": {"schedulers": [LinearScheduler(), ConstantScheduler(0.5)]},
    "clipping": {"algorithms": lambda: algorithms.GradientClipping("norm", 0.05)},
    "EMA": {"algorithms": lambda: algorithms.EMA(half_life="3ba", update_interval="1ba")},
    "SWA": {"algorithms": lambda: algorithms.SWA("0.2dur", "0.8dur", "1ba", schedule_swa_lr=True, swa_lr=0.02)},
    "layer freezing": {"algorithms": lambda: algorithms.LayerFreezing(0.0, 0.5)},
    "surgery": {"algorithms": lambda: [algorithms.SqueezeExcite(4, 4), algorithms.BlurPool(True, True, True)]},
    "rollback without a divergence": {"on_divergence": "rollback"},
}
KINDS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "DecoupledAdamW": lambda groups: DecoupledAdamW(groups, weight_decay=1e-4),
}


class Float16Device(Device):
    """A CPU that is none by its class, so that float16 is allowed."""

    name, dist_backend = "gpu", "gloo"
    _device = torch.device("cpu")

    def module_to_device(self, module):
        return module

    def tensor_to_device(self, tensor):
        return tensor


class SmallDevice(DeviceCPU):
    """A CPU that calls itself a GPU with memory for two samples."""

    name = "gpu"


def make_network():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def make_batches():
    generator = torch.Generator().manual_seed(5)
    images, labels = torch.randn(32, 3, 8, 8, generator=generator), torch.randint(3, (32,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=4)


def groups_of(network, num=2):
    """Return groups of parameters that lie far apart in the network, with rates of their own."""
    layers = [layer for layer in network if list(layer.parameters())]
    parts = [[p for layer in layers[place::num] for p in layer.parameters()] for place in range(num)]
    return [{"params": part, "lr": 0.05 / (1 + place)} for place, part in enumerate(parts)]


def several(kind, network, num=2):
    return [kind([group]) for group in groups_of(network, num)]


def make_trainer(network, optimizers, **settings):
    model = ComposerModel.from_module(network, nn.functional.cross_entropy)
    made = settings.pop("algorithms", None)
    settings = {"device": "cpu", "precision": "fp32", "max_duration": "2ep", "progress_bar": False, **settings}
    return Trainer(
        model=model,
        train_dataloader=make_batches(),
        optimizers=optimizers,
        algorithms=made() if callable(made) else made,
        seed=3,
        **settings,
    )


def result(trainer):
    """Return the weights, and the state of each parameter by its name."""
    state = trainer.state
    saved = state.get_optim_state_dict()
    entries = {name: value for one in saved.values() for name, value in one["state"].items()}
    return dict(state.model.state_dict()), dict(sorted(entries.items()))


def train(network, optimizers, **settings):
    with warnings.catch_warnings(), make_trainer(network, optimizers, **settings) as trainer:
        warnings.filterwarnings("ignore", ".*microbatch size will be decreased|.*is experimental")
        trainer.fit()
        return result(trainer)


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", EVERY)
def test_two_optimizers_train_like_one_with_two_groups(setting, kind):
    one, two = make_network(), make_network()
    expected = train(one, KINDS[kind](groups_of(one)), **EVERY[setting])
    assert_same(train(two, several(KINDS[kind], two), **EVERY[setting]), expected)


def test_optimizers_of_different_kinds_step_in_their_order():
    stepped = []
    network, by_hand = make_network(), make_network()

    def make(network):
        first, second, third = groups_of(network, 3)
        return [torch.optim.SGD([first]), torch.optim.AdamW([second]), torch.optim.RMSprop([third])]

    optimizers = make(network)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda each, *_: stepped.append(type(each).__name__))
    train(network, optimizers, max_duration="8ba")

    theirs = make(by_hand)
    for inputs, targets in make_batches():
        for optimizer in theirs:
            optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(inputs), targets).backward()
        for optimizer in theirs:
            optimizer.step()
    assert stepped == ["SGD", "AdamW", "RMSprop"] * 8
    assert_same(dict(network.state_dict()), dict(by_hand.state_dict()))


@pytest.mark.parametrize("first", [True, False], ids=["of the first", "of the second"])
def test_a_pytorch_scheduler_moves_the_optimizer_it_was_made_from(first):
    network = make_network()
    optimizers = several(KINDS["SGD"], network)
    moved, other = optimizers if first else reversed(optimizers)
    rates = moved.param_groups[0]["lr"], other.param_groups[0]["lr"]
    train(network, optimizers, schedulers=StepLR(moved, 1, gamma=0.5))
    assert [each.param_groups[0]["lr"] for each in (moved, other)] == [rates[0] / 4, rates[1]]


def test_composer_schedulers_scale_every_optimizer_and_pytorchs_one():
    network, logger = make_network(), InMemoryLogger()
    optimizers = several(KINDS["SGD"], network)
    schedulers = [StepLR(optimizers[1], 3, gamma=0.5), LinearScheduler(t_max="8ba")]
    train(
        network,
        optimizers,
        schedulers=schedulers,
        loggers=logger,
        callbacks=LRMonitor(),
        step_schedulers_every_batch=True,
        max_duration="8ba",
    )
    linear = [1 - batch / 8 for batch in range(8)]
    assert [rate for _, rate in logger.data["lr-SGD/group0"]] == pytest.approx([0.05 * each for each in linear])
    steps = [0.025 * 0.5 ** (batch // 3) * each for batch, each in enumerate(linear)]
    assert [rate for _, rate in logger.data["lr-SGD#1/group0"]] == pytest.approx(steps)


@pytest.mark.parametrize("kinds", [("AdamW", "AdamW"), ("SGD", "AdamW"), ("AdamW", "SGD", "AdamW")], ids="-".join)
@pytest.mark.parametrize("schedulers", [None, LinearScheduler()], ids=["constant", "schedule"])
def test_a_resumed_run_is_the_uninterrupted_one(kinds, schedulers, tmp_path):
    def make(folder, **settings):
        network = make_network()
        optimizers = [KINDS[kind]([group]) for kind, group in zip(kinds, groups_of(network, len(kinds)), strict=True)]
        return make_trainer(network, optimizers, schedulers=schedulers, save_folder=folder, **settings)

    with make(tmp_path / "whole", save_interval="5ba") as trainer:
        trainer.fit()
        expected = result(trainer)
    saved = torch.load(tmp_path / "whole" / "ep0-ba5-rank0.pt", weights_only=False)["state"]["optimizers"]
    names = list(kinds) if len(set(kinds)) == len(kinds) else [*dict.fromkeys(kinds), "AdamW#1"]
    assert sorted(saved) == sorted(names)
    with make(tmp_path / "other", load_path=str(tmp_path / "whole" / "ep0-ba5-rank0.pt")) as trainer:
        trainer.fit()
        assert_same(result(trainer), expected)


def test_a_file_of_another_division_is_an_error_that_names_a_parameter(tmp_path):
    network = make_network()
    optimizers = several(KINDS["AdamW"], network)
    with make_trainer(network, optimizers, max_duration="2ba") as trainer:
        trainer.fit()
        path = trainer.save_checkpoint(str(tmp_path / "saved.pt"))
    again = make_network()
    with pytest.raises(KeyError, match=r"its AdamW has no state of 'module\.\d\.\w+'"):
        make_trainer(again, several(KINDS["AdamW"], again)[::-1], load_path=path)


class Breaks(Callback):
    """Makes the gradient of one parameter NaN or infinite, in one batch."""

    def __init__(self, name, value, batch=3):
        self.name, self.value, self.batch = name, value, batch

    def after_backward(self, state, logger):
        if state.timestamp.batch == self.batch:
            dict(state.model.named_parameters())[self.name].grad.fill_(self.value)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("name", ["module.0.weight", "module.7.bias"])
def test_a_bad_gradient_of_one_optimizer_stops_all_of_them(policy, name):
    """The other optimizer would otherwise step alone with that batch."""
    one, two = make_network(), make_network()
    settings = {"on_divergence": policy, "callbacks": Breaks(name, math.nan)}
    expected = train(one, KINDS["AdamW"](groups_of(one)), **settings)
    assert_same(train(two, several(KINDS["AdamW"], two), **settings), expected)


@pytest.mark.parametrize("name", ["module.0.weight", "module.7.bias"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipping"])
def test_an_overflow_of_one_optimizer_skips_the_step_of_all(name, clips):
    clipping = {"algorithms": lambda: algorithms.GradientClipping("norm", 0.05)} if clips else {}
    settings = {"device": Float16Device(), "precision": "amp_fp16", "callbacks": Breaks(name, math.inf), **clipping}
    one, two = make_network(), make_network()
    expected = train(one, KINDS["AdamW"](groups_of(one)), **settings)
    assert_same(train(two, several(KINDS["AdamW"], two), **settings), expected)
    assert all(value.isfinite().all() for value in two.state_dict().values())


class HungryAdam(torch.optim.AdamW):
    """Runs out of memory in its step, after it has moved its weights, if microbatches have more than two samples."""

    trainer_state = None

    def step(self, closure=None):
        super().step()
        if self.trainer_state is not None and self.trainer_state.device_train_microbatch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("hungry", [0, 1])
def test_auto_microbatching_undoes_the_steps_of_all(hungry):
    small, expected = make_network(), make_network()
    fits = train(expected, several(KINDS["AdamW"], expected), device_train_microbatch_size=2)
    optimizers = several(KINDS["AdamW"], small)
    optimizers[hungry] = HungryAdam([groups_of(small)[hungry]], weight_decay=0.1)
    with pytest.warns(UserWarning, match="is experimental"):
        trainer = make_trainer(small, optimizers, device=SmallDevice(), device_train_microbatch_size="auto")
    with trainer:
        optimizers[hungry].trainer_state = trainer.state
        with pytest.warns(RuntimeWarning, match="microbatch size will be decreased from 4 to 2"):
            trainer.fit()
        assert_same(result(trainer), fits)


def test_the_monitor_reports_the_parameters_of_all_optimizers():
    network, logger = make_network(), InMemoryLogger()
    optimizers = several(KINDS["DecoupledAdamW"], network)
    train(network, optimizers, loggers=logger, callbacks=OptimizerMonitor(batch_log_interval=1), max_duration="2ba")
    logged = {name.removeprefix("l2_norm/moment/module.") for name in logger.data if "l2_norm/moment/" in name}
    assert logged == {name for name, _ in network.named_parameters()}


DIVISIONS = {
    "in two": (
        lambda network: [*several(KINDS["SGD"], network), KINDS["AdamW"]([network[7].bias])],
        r"\['SGD', 'SGD', 'AdamW'\] must divide .*; module\.7\.bias is in more than one of them",
    ),
    "in none": (
        lambda network: [KINDS["SGD"](network[:4].parameters()), KINDS["AdamW"]([network[7].weight])],
        r"; module\.7\.bias is in none of them. .*requires_grad_\(False\)",
    ),
    "many in none": (
        lambda network: [KINDS["SGD"]([network[0].weight]), KINDS["AdamW"]([network[0].bias])],
        r"; module\.1\.weight, module\.1\.bias, module\.3\.weight, module\.3\.bias, module\.7\.weight and 1 more ",
    ),
    "LBFGS": (
        lambda network: [KINDS["SGD"](network[:4].parameters()), torch.optim.LBFGS(network[4:].parameters())],
        "LBFGS evaluates the loss itself, which works with one optimizer only; got 2: SGD, LBFGS",
    ),
}


@pytest.mark.parametrize("division", DIVISIONS)
def test_optimizers_that_cannot_train_together_are_refused(division):
    network, (make, message) = make_network(), DIVISIONS[division]
    with pytest.raises(ValueError, match=message):
        make_trainer(network, make(network))


def test_frozen_parameters_need_no_optimizer():
    network = make_network()
    network[1].requires_grad_(False)
    train(network, [KINDS["SGD"](network[0].parameters()), KINDS["SGD"](network[3:].parameters())])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithms": algorithms.SAM()}, "SAMOptimizer evaluates the loss itself, which works with one optimizer"),
        ({"deepspeed_config": {}}, r"\['SGD', 'SGD'\] cannot be combined with deepspeed_config"),
    ],
    ids=["SAM", "DeepSpeed"],
)
def test_what_takes_a_single_optimizer_is_refused_by_name(settings, message):
    network = make_network()
    with pytest.raises(ValueError, match=message):
        make_trainer(network, several(KINDS["SGD"], network), **settings)


def test_fit_trains_on_with_other_optimizers():
    network, by_hand = make_network(), make_network()
    with make_trainer(network, KINDS["SGD"](groups_of(network)), max_duration="8ba") as trainer:
        trainer.fit()
        trainer.fit(duration="8ba", optimizers=several(KINDS["AdamW"], network))
        trainer.fit(duration="8ba")

    first, second = KINDS["SGD"](groups_of(by_hand)), KINDS["AdamW"](groups_of(by_hand))
    for optimizer in (first, second, second):
        for inputs, targets in make_batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(by_hand(inputs), targets).backward()
            optimizer.step()
    assert_same(dict(network.state_dict()), dict(by_hand.state_dict()))


def test_a_composer_schedule_goes_on_with_other_optimizers():
    network = make_network()
    seen = []

    class Rates(Callback):
        def batch_start(self, state, logger):
            seen.append([group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups])

    first = KINDS["SGD"](network.parameters())
    with make_trainer(
        network, first, schedulers=LinearScheduler(t_max="16ba"), callbacks=Rates(), max_duration="8ba"
    ) as trainer:
        trainer.fit()
        trainer.fit(duration="8ba", optimizers=several(KINDS["SGD"], network))
    assert seen[:8] == [pytest.approx([1e-3 * (1 - batch / 16)]) for batch in range(8)]
    assert seen[8:] == [pytest.approx([0.05 * (1 - b / 16), 0.025 * (1 - b / 16)]) for b in range(8, 16)]


def test_optimizers_that_fit_refuses_leave_the_trainer_as_it_was():
    network = make_network()
    optimizer = KINDS["SGD"](groups_of(network))
    with make_trainer(network, optimizer, schedulers=StepLR(optimizer, 1), max_duration="8ba") as trainer:
        trainer.fit()
        other = several(KINDS["AdamW"], network)
        refused = {
            "replaces the SGD of a StepLR.*fit\\(schedulers=": {"optimizers": other},
            "replaces the SGD of a StepLR": {"optimizers": other, "schedulers": StepLR(optimizer, 1)},
            "must divide": {"optimizers": [*other, optimizer]},
            "None of the parameters": {"optimizers": KINDS["SGD"](make_network().parameters())},
        }
        for message, settings in refused.items():
            with pytest.raises(ValueError, match=message):
                trainer.fit(duration="8ba", **settings)
            assert list(trainer.state.optimizers) == [optimizer]
        trainer.fit(duration="8ba", optimizers=other, schedulers=StepLR(other[1], 1, gamma=0.5))
        assert [each.param_groups[0]["lr"] for each in other] == [0.05, 0.0125]


def test_fit_does_not_replace_an_optimizer_that_an_algorithm_has_wrapped():
    network = make_network()
    with (
        make_trainer(network, KINDS["SGD"](groups_of(network)), algorithms=algorithms.SAM()) as trainer,
        pytest.raises(ValueError, match="cannot replace SAMOptimizer, which wraps"),
    ):
        trainer.fit(optimizers=KINDS["SGD"](groups_of(network)))

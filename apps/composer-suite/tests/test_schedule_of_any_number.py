"""`Schedule` in the Trainer: settings of parameter groups and arguments of algorithms follow a curve in time."""

import math
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import composer.algorithms
from composer.algorithms import EMA, MixUp, StochasticDepth
from composer.callbacks import LRMonitor
from composer.core import Algorithm, Callback, Event
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, ComposerGPT
from composer.optim import LinearScheduler, Schedule
from composer_algorithms import all_metadata

FALL = LinearScheduler(1.0, 0.0)  # of 8 batches: 1, 7/8, 6/8, ...
FACTORS = [1 - batch / 8 for batch in range(8)]


class Seen(Callback):
    """Keep what `read` returns in each batch, after all schedules have acted."""

    def __init__(self, read):
        self.read, self.values = read, []

    def before_train_batch(self, state, logger):
        self.values.append(self.read(state))


@pytest.fixture
def train(make_trainer, make_model, make_loader):
    """Train 8 batches, and return what `read` has returned in each."""

    def train(schedulers, read, make_optimizer=None, max_duration="2ep", **settings):
        model, seen = make_model(), Seen(read)
        make_optimizer = make_optimizer or (
            lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9), weight_decay=0.4)
        )
        optimizer = make_optimizer(model)
        trainer = make_trainer(
            model=model,
            optimizers=optimizer,
            schedulers=schedulers(optimizer) if isinstance(schedulers, FunctionType) else schedulers,
            callbacks=[seen, *settings.pop("callbacks", [])],
            max_duration=max_duration,
            **{"train_dataloader": make_loader(16, 4, shuffle=True), **settings},
        )
        trainer.fit()
        return seen.values

    return train


def group(index, name):
    return lambda state: state.optimizers[0].param_groups[index][name]


def rates_of_groups(state):
    return tuple(group["lr"] for group in state.optimizers[0].param_groups)


def two_groups(model):
    named = dict(model.named_parameters())
    parts = [[(n, p) for n, p in named.items() if n.endswith(kind)] for kind in ("weight", "bias")]
    groups = [{"params": parts[0], "role": "matrices"}, {"params": parts[1], "weight_decay": 0.2}]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.8, weight_decay=0.4)


@pytest.mark.parametrize(
    ("schedule", "name", "expected"),
    [
        (Schedule("weight_decay", FALL), "weight_decay", [0.4 * factor for factor in FACTORS]),
        (Schedule("weight_decay", lambda state: 0.5), "weight_decay", [0.2] * 8),
        (Schedule("betas[0]", FALL), "betas", [(0.8 * factor, 0.9) for factor in FACTORS]),
        (
            Schedule("betas[1]", LinearScheduler(0.5, 0.7), absolute=True),
            "betas",
            [(0.8, 0.5 + batch / 8 * (0.7 - 0.5)) for batch in range(8)],
        ),
        (Schedule("lr", FALL), "lr", [0.1 * factor for factor in FACTORS]),
        (Schedule("lr", lambda state: 0.3, absolute=True), "lr", [0.1 * (0.3 / 0.1)] * 8),
    ],
)
def test_each_batch_trains_with_the_setting_of_its_time(train, schedule, name, expected):
    assert train(schedule, group(0, name)) == expected


@pytest.mark.parametrize("groups", [0, "matrices", "*.weight", [0]])
@pytest.mark.parametrize("others", [[], [LinearScheduler(1.0, 0.5)]])
def test_a_learning_rate_schedule_of_one_group_multiplies_that_of_all(train, groups, others):
    rates = train(
        [Schedule("lr", FALL, groups=groups), *others],
        rates_of_groups,
        two_groups,
    )
    whole = [1 - batch / 16 if others else 1.0 for batch in range(8)]
    assert rates == [(factor * common, common) for factor, common in zip(FACTORS, whole, strict=True)]


def test_pytorchs_schedulers_keep_the_factor_of_a_group(train):
    rates = train(
        lambda optimizer: [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), Schedule("lr", FALL, groups=1)],
        rates_of_groups,
        two_groups,
        step_schedulers_every_batch=True,
    )
    assert rates == [(0.5**batch, 0.5**batch * factor) for batch, factor in enumerate(FACTORS)]


def test_one_group_of_two_is_scheduled_and_logged(train):
    logger = InMemoryLogger()
    values = train(
        [Schedule("weight_decay", FALL, groups=1), Schedule("momentum", lambda state: 0.7, absolute=True)],
        lambda state: [(each["weight_decay"], each["momentum"]) for each in state.optimizers[0].param_groups],
        two_groups,
        callbacks=[LRMonitor()],
        loggers=logger,
    )
    assert values == [[(0.4, 0.7), (0.2 * factor, 0.7)] for factor in FACTORS]
    logged = {name: [value for _, value in data] for name, data in logger.data.items() if name.startswith("schedule/")}
    assert logged == {
        "schedule/weight_decay/group1": [0.2 * factor for factor in FACTORS],
        "schedule/momentum/group0": [0.7] * 8,
        "schedule/momentum/group1": [0.7] * 8,
    }


def test_groups_are_counted_over_all_optimizers(train):
    def two_optimizers(model):
        parameters = list(model.parameters())
        return [
            torch.optim.SGD(parameters[:2], lr=1.0, weight_decay=0.4),
            torch.optim.AdamW(parameters[2:], lr=0.1, weight_decay=0.2),
        ]

    def read(state):
        return [(each["lr"], each["weight_decay"]) for one in state.optimizers for each in one.param_groups]

    schedulers = [Schedule("lr", FALL, groups=0), Schedule("weight_decay", FALL, groups=1), LinearScheduler(1.0, 0.5)]
    common = [1 - batch / 16 for batch in range(8)]
    assert train(schedulers, read, two_optimizers) == [
        [(factor * rate, 0.4), (0.1 * rate, 0.2 * factor)] for factor, rate in zip(FACTORS, common, strict=True)
    ]


def test_a_schedule_steps_every_epoch_where_the_others_do(train):
    values = train(Schedule("weight_decay", FALL), group(0, "weight_decay"), step_schedulers_every_batch=False)
    assert values == [0.4] * 4 + [0.2] * 4


def test_the_ratio_scales_a_schedule(train):
    curve = LinearScheduler(t_max="16ba")
    values = train(
        Schedule("weight_decay", curve), group(0, "weight_decay"), max_duration="4ep", scale_schedule_ratio=0.5
    )
    assert values == [0.4 * factor for factor in FACTORS]


class Scaled(Algorithm):
    """An algorithm of a user, with a number that it reads in each batch."""

    def __init__(self, strength):
        self.strength, self.label = strength, "x"

    def match(self, event, state):
        return event == Event.AFTER_LOSS

    def apply(self, event, state, logger):
        state.loss = state.loss * self.strength


@pytest.mark.parametrize(
    ("algorithm", "target", "read", "initial"),
    [
        (lambda: MixUp(alpha=0.4, interpolate_loss=True), "MixUp.alpha", lambda each: each.alpha, 0.4),
        (lambda: Scaled(2.0), "Scaled.strength", lambda each: each.strength, 2.0),
        (lambda: EMA(half_life=None, smoothing=0.5), "EMA.smoothing", lambda each: each.smoothing, 0.5),
    ],
)
def test_an_argument_of_an_algorithm_follows_its_curve(train, algorithm, target, read, initial):
    values = train(Schedule(target, FALL), lambda state: read(state.algorithms[0]), algorithms=[algorithm()])
    assert values == [initial * factor for factor in FACTORS]


def test_a_half_life_is_a_time_and_sets_the_smoothing(train):
    ema = EMA(half_life="16ba")
    values = train(Schedule("EMA.half_life", FALL), lambda state: state.algorithms[0].smoothing, algorithms=[ema])
    assert values == [2 ** (-1 / (16 - 2 * batch)) for batch in range(8)]
    assert str(ema.half_life) == "1ba"  # at the end, where the curve is 0


def test_the_rate_of_every_block_follows_and_checkpoints_record_the_argument(make_trainer, make_loader):
    from torchvision.models.resnet import BasicBlock

    network = nn.Sequential(
        nn.Linear(2, 4 * 16), nn.Unflatten(1, (4, 4, 4)), BasicBlock(4, 4), BasicBlock(4, 4), nn.Flatten(),
        nn.Linear(64, 2),
    )  # fmt: skip
    depth = StochasticDepth("ResNetBasicBlock", drop_rate=0.5)
    seen = Seen(lambda state: [float(block.drop_rate) for block in (network[2], network[3])])
    trainer = make_trainer(
        model=ComposerClassifier(network, num_classes=2),
        algorithms=[depth],
        schedulers=Schedule("StochasticDepth.drop_rate", FALL),
        train_dataloader=make_loader(16, 4),
        callbacks=[seen],
        max_duration="2ep",
    )
    before = repr(depth)
    trainer.fit()
    assert seen.values == [[0.25 * factor, 0.5 * factor] for factor in FACTORS]
    assert repr(depth) == before  # by which a checkpoint rebuilds the algorithm


# With these arguments, a quarter of each that is declared to be schedulable must train to other weights.
WITH_ARGUMENTS = {
    "Alibi": {"max_sequence_length": 128},
    "ColOut": {"p_row": 0.5, "p_col": 0.5},
    "CutMix": {"alpha": 1.0},
    "CutOut": {"length": 1.0},
    "EMA": {"half_life": "8ba"},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 0.01},
    "LabelSmoothing": {"smoothing": 0.5},
    "MixUp": {"alpha": 1.0},
    "MixUpOrCutMix": {"mixup_alpha": 1.0, "switch_prob": 0.7},
    "MuP": {"base_width": 64},
    "MultiTokenPrediction": {},
    "SelectiveBackprop": {"start": 0.0, "end": 1.0, "keep": 1.0, "scale_factor": 1.0, "interrupt": 0},
    "StochasticDepth": {"target_layer_name": "ResNetBasicBlock", "drop_rate": 1.0, "drop_distribution": "uniform"},
    "ZLoss": {"coefficient": 0.1},
}


def schedulable(kind):
    method = getattr(composer.algorithms, kind)
    if kind in WITH_ARGUMENTS:  # others may need libraries that are not installed
        method = method(**WITH_ARGUMENTS[kind])
    return method.schedulable


SCHEDULABLE = [f"{row.class_name}.{name}" for row in all_metadata().values() for name in schedulable(row.class_name)]


@pytest.mark.parametrize("target", SCHEDULABLE)
def test_a_schedule_of_a_declared_argument_has_an_effect(make_trainer, target):
    from torchvision.models.resnet import BasicBlock

    kind, _, argument = target.partition(".")
    arguments = {"EMA.smoothing": {"half_life": None, "smoothing": 0.8}}.get(target, WITH_ARGUMENTS[kind])
    if target == "SelectiveBackprop.scale_factor":
        arguments = {**arguments, "keep": 0.5}

    def train(factor):
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.rand(16, 3, 16, 16, generator=generator), torch.arange(16) % 2)
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3), BasicBlock(4, 4), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 2)]
        model = ComposerClassifier(nn.Sequential(*layers), num_classes=2)
        if kind == "MultiTokenPrediction":
            model = ComposerGPT({"d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 16, "max_seq_len": 8})
            data = [{"input_ids": ids, "labels": ids} for ids in torch.arange(128).view(16, 8) % 16]
        algorithm = getattr(composer.algorithms, kind)(**arguments)
        make_trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            algorithms=algorithm,
            schedulers=Schedule(f"{kind}.{argument}", lambda state: factor),
            train_dataloader=DataLoader(data, batch_size=4),
            max_duration="1ep",
        ).fit()
        trained = algorithm.ema_model.named_parameters_dict.values() if kind == "EMA" else model.parameters()
        return torch.cat([tensor.detach().flatten() for tensor in trained])

    assert not torch.equal(train(1.0), train(0.25))


@pytest.mark.parametrize("batch", [3, 5])
def test_a_resumed_run_ends_with_the_same_weights(make_trainer, make_model, make_loader, tmp_path, batch):
    def run(folder, **settings):
        model = make_model()
        trainer = make_trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.4),
            algorithms=[MixUp(alpha=0.4, interpolate_loss=True), EMA(half_life="16ba")],
            schedulers=[
                LinearScheduler(),
                Schedule("weight_decay", FALL),
                Schedule("betas[0]", FALL),
                Schedule("EMA.half_life", FALL),
                Schedule("MixUp.alpha", FALL),
            ],
            train_dataloader=make_loader(16, 4, shuffle=True),
            max_duration="2ep",
            save_folder=str(tmp_path / folder),
            save_interval="1ba",
            **settings,
        )
        trainer.fit()
        return [parameter.detach().clone() for parameter in model.parameters()]

    whole = run("whole")
    resumed = run("rest", load_path=str(tmp_path / "whole" / f"ep{batch // 4}-ba{batch}-rank0.pt"))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Schedule("weight_decays", FALL),
            r"'weight_decays' is not a setting of .* group 0.* betas\[0\]",
        ),
        (lambda: Schedule("foreach", FALL), "'foreach' is not a setting"),
        (lambda: Schedule("amsgrad", FALL), "amsgrad/group0 is False, which is not a number"),
        (lambda: Schedule("betas", FALL), r"betas/group0 is \(0.9, 0.999\), which is not a number"),
        (lambda: Schedule("betas[2]", FALL), r"'betas\[2\]' is not a setting"),
        (lambda: Schedule("lr", FALL, groups=1), "groups=1 must be the index of one of 1 parameter groups"),
        (lambda: Schedule("lr", FALL, groups="*.weight"), "only some parameters of group 0"),
        (lambda: Schedule("lr", FALL, groups="head"), "groups='head' matches no parameter group"),
        (lambda: Schedule("CutMix.alpha", FALL), "exactly one algorithm; the algorithms are: MixUp"),
        (lambda: Schedule("MixUp.beta", FALL), "'MixUp.beta' is not an argument of MixUp .* that can: alpha"),
        (lambda: Schedule("MixUp.input_key", FALL), "'MixUp.input_key' is not an argument of MixUp .* that can: alpha"),
        (lambda: [Schedule("weight_decay", FALL)] * 2, "two schedules of weight_decay/group0"),
        (lambda: [Schedule("MixUp.alpha", FALL), Schedule("MixUp.alpha", FALL)], "two schedules of MixUp.alpha"),
        (lambda: Schedule("weight decay", FALL), "target='weight decay' must be the name"),
        (lambda: Schedule("MixUp.alpha", FALL, groups=0), "groups=0 selects parameter groups"),
        (lambda: Schedule("eps", lambda state: math.nan), "eps=nan must be finite"),
    ],
)
def test_an_impossible_schedule_is_an_error_before_training(make_trainer, make_model, make, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        make_trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters()),
            algorithms=[MixUp(interpolate_loss=True)],
            schedulers=make(),
            max_duration="1ep",
        )


def test_what_is_0_is_scheduled_by_absolute_values_only(train):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"weight_decay/group0 is 0, and remains 0 .* absolute=True"):
        train(Schedule("weight_decay", FALL), group(0, "weight_decay"), sgd)
    assert train(Schedule("weight_decay", FALL, absolute=True), group(0, "weight_decay"), sgd) == FACTORS


def test_a_learning_rate_of_0_is_refused_for_absolute_values_too(train):
    """It ended in a ZeroDivisionError."""
    with pytest.raises(ValueError, match=r"lr/group0 is 0, .* Set it to its largest value\."):
        train(
            Schedule("lr", FALL, absolute=True),
            group(0, "lr"),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        )

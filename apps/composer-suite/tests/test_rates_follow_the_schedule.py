"""Each batch trains with what its scheduler says of its own time, whatever has moved the time or the schedule."""

import logging
from types import FunctionType

import pytest
import torch
from torch.optim import lr_scheduler

from composer.algorithms import SWA
from composer.callbacks import LRMonitor
from composer.core import Callback, DataSpec, Event
from composer.loggers import InMemoryLogger
from composer.optim import (
    ConstantScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    ExponentialScheduler,
    InversePowerWithWarmupScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    StepScheduler,
    WarmupStableDecayScheduler,
)
from composer_optim import lr_lambda

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is not in the state_dict:UserWarning"),  # it was left out, or is another one
    # Where a resumed run begins with the end of an epoch.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step.*` before `optimizer.step:UserWarning"),
]

LRS = (1.0, 0.5)  # of the two groups
# The whole training and its first half, in each unit: 10 batches of 4 samples and 8 tokens, 5 of them to an epoch.
LENGTHS = {
    "batches": ("10ba", "5ba", 1.0),
    "epochs": ("2ep", "1ep", 1.0),
    "samples": ("40sp", "20sp", 1.0),
    "tokens": ("80tok", "40tok", 1.0),
    "ratio": ("20ba", "10ba", 0.5),
}


def by_epoch(state, ssr=1.0):
    return 0.5 ** int(state.timestamp.epoch)


# Each with the unit in which its training is counted, so that every unit has several kinds and every kind a unit.
KINDS = {
    "linear": ([LinearScheduler()], "batches"),
    "steps": ([StepScheduler("2ba", 0.5)], "samples"),
    "steps-dur": ([StepScheduler("0.2dur", 0.5)], "epochs"),
    "milestones": ([MultiStepScheduler(["0.3dur", "0.5dur", "0.9dur"])], "tokens"),
    "exponential": ([ExponentialScheduler(0.5, "1ep")], "ratio"),
    "cosine": ([CosineAnnealingScheduler("40sp")], "epochs"),
    "restarts": ([CosineAnnealingWarmRestartsScheduler("24tok")], "batches"),
    "polynomial": ([PolynomialScheduler(2.0)], "tokens"),
    "warmup": ([LinearWithWarmupScheduler("3ba")], "batches"),
    "warmup-dur": ([LinearWithWarmupScheduler("0.4dur")], "samples"),
    "warmup-steps": ([MultiStepWithWarmupScheduler("4ba", ["0.8dur"])], "ratio"),
    # Half of the training is within the decay of the whole one, and extending it starts the decay later.
    "stable-decay": ([WarmupStableDecayScheduler("0.1dur", "0.6dur", alpha_f=0.1)], "tokens"),
    "inverse-power": ([InversePowerWithWarmupScheduler("0.2dur", t_decay="0.3dur")], "samples"),
    "function": ([by_epoch], "epochs"),
    "two": ([LinearScheduler(), ConstantScheduler(0.5, "0.4dur")], "epochs"),
}


def whole_run(kind):
    """Return the factor of each batch of one run that nothing interrupts, from the formulas."""
    schedulers, unit = KINDS[kind]
    whole, _, ratio = LENGTHS[unit]
    counts = {"batches_per_epoch": 5, "samples_per_batch": 4, "tokens_per_batch": 8, "scale_schedule_ratio": ratio}
    factors = [1.0] * 10
    for scheduler in schedulers:
        factor = lr_lambda(scheduler, max_duration=whole, **counts)
        factors = [so_far * factor(batch) for batch, so_far in enumerate(factors)]
    return factors


class Rates(Callback):
    """Keep the learning rates that each batch trains with; a batch that is trained on again is there twice."""

    def __init__(self):
        self.seen = []

    def before_train_batch(self, state, logger):
        batch = state.timestamp.num_batches
        self.seen.append((batch, *[group["lr"] for group in state.optimizers[0].param_groups]))


class StopAt(Callback):
    """Stop training once, on the first event of this kind at or after batch 3."""

    def __init__(self, event):
        self.event = event

    def run_event(self, event, state, logger):
        if event == self.event and state.timestamp.num_batches >= 3:
            self.event = None
            state.stop_training()


class Extend(Callback):
    def __init__(self, whole):
        self.whole = whole

    def batch_end(self, state, logger):
        if state.timestamp.num_batches == 5:
            state.max_duration = self.whole


@pytest.fixture
def start(make_trainer, make_model, make_loader):
    """Make a trainer of two groups of parameters, whose rates are kept."""

    def start(schedulers, max_duration, *callbacks, lrs=LRS, **settings):
        model = make_model()
        *weights, bias = model.parameters()
        optimizer = torch.optim.SGD([{"params": weights}, {"params": [bias], "lr": lrs[1]}], lr=lrs[0], momentum=0.9)
        rates = Rates()
        trainer = make_trainer(
            model=model,
            optimizers=optimizer,
            schedulers=schedulers(optimizer) if isinstance(schedulers, FunctionType) else schedulers,
            train_dataloader=DataSpec(make_loader(20, 4), get_num_tokens_in_batch=lambda batch: 8),
            max_duration=max_duration,
            callbacks=[rates, *callbacks],
            **settings,
        )
        return trainer, rates.seen

    return start


@pytest.fixture
def save(start, tmp_path):
    """Train the first half and return its checkpoint."""

    def save(schedulers, max_duration, *callbacks, **settings):
        folder = str(tmp_path / "first")
        start(schedulers, max_duration, *callbacks, save_folder=folder, save_interval="1ep", **settings)[0].fit()
        return f"{folder}/latest-rank0.pt"

    return save


def fit_whole(start, save, schedulers, whole, half, settings):
    trainer, seen = start(schedulers, whole, **settings)
    trainer.fit()
    return seen


def fit_twice(start, save, schedulers, whole, half, settings):
    trainer, seen = start(schedulers, half, **settings)
    trainer.fit()
    trainer.fit(duration="5ba")
    return seen[5:]


def fit_again_from_zero(start, save, schedulers, whole, half, settings):
    trainer, seen = start(schedulers, whole, **settings)
    trainer.fit()
    trainer.fit(reset_time=True)
    return seen[10:]


def fit_again_from_zero_for_longer(start, save, schedulers, whole, half, settings):
    trainer, seen = start(schedulers, half, **settings)
    trainer.fit()
    trainer.fit(duration="10ba", reset_time=True)
    return seen[5:]


def extend_on_the_way(start, save, schedulers, whole, half, settings):
    trainer, seen = start(schedulers, half, Extend("10ba"), **settings)
    trainer.fit()
    return seen[5:]


def resume(start, save, schedulers, whole, half, settings):
    trainer, seen = start(schedulers, whole, load_path=save(schedulers, half, **settings), **settings)
    trainer.fit()
    return seen


def resume_after_another_scheduler(start, save, schedulers, whole, half, settings):
    other = save(ExponentialScheduler(0.3, "1ba"), half, **settings)
    trainer, seen = start(schedulers, whole, load_path=other, **settings)
    trainer.fit()
    return seen


def resume_without(part):
    def resume_without_part(start, save, schedulers, whole, half, settings):
        ignored = {"load_path": save(schedulers, half, **settings), "load_ignore_keys": [f"state/{part}/*"]}
        trainer, seen = start(schedulers, whole, **ignored, **settings)
        trainer.fit()
        return seen

    return resume_without_part


MOVES = {
    "whole": fit_whole,
    "fit twice": fit_twice,
    "reset": fit_again_from_zero,
    "reset longer": fit_again_from_zero_for_longer,
    "extended": extend_on_the_way,
    "resumed": resume,
    "another scheduler": resume_after_another_scheduler,
    "without schedulers": resume_without("schedulers"),
    "without optimizers": resume_without("optimizers"),
}


# Every kind in the plain moves, and every move with three kinds.
CELLS = [
    (kind, move)
    for kind in KINDS
    for move in MOVES
    if move in ("whole", "fit twice", "resumed") or kind in ("linear", "warmup-dur", "stable-decay", "function")
]


@pytest.mark.parametrize(("kind", "move"), CELLS)
def test_a_batch_trains_with_the_rate_of_its_own_time(start, save, kind, move):
    """A schedule was one batch late, and the first batch after a move had the rate of before."""
    schedulers, unit = KINDS[kind]
    whole, half, ratio = LENGTHS[unit]
    settings = {} if ratio == 1.0 else {"scale_schedule_ratio": ratio}
    factors = whole_run(kind)
    seen = MOVES[move](start, save, schedulers, whole, half, settings)
    first = 0 if move in ("whole", "reset", "reset longer") else 5
    # The same products of the same floats.
    assert seen == [(batch, *(lr * factors[batch] for lr in LRS)) for batch in range(first, 10)]


STOPS = [
    *(Event.ITERATION_START, Event.EPOCH_START, Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_START),
    *(Event.BEFORE_TRAIN_BATCH, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT),
    *(Event.EPOCH_END, Event.EPOCH_CHECKPOINT),
]


@pytest.mark.parametrize("event", STOPS, ids=lambda event: event.value)
@pytest.mark.parametrize(
    ("kind", "goes_on"),
    [("steps-dur", "in a second fit"), ("two", "in a second fit"), ("warmup-dur", "from a checkpoint")],
)
def test_a_run_that_is_stopped_goes_on_with_the_rates_of_one_that_is_not(start, tmp_path, kind, goes_on, event):
    """Of a run that was stopped before the end of a batch, the next batch trained with the rate of a run's end."""
    schedulers, unit = KINDS[kind]
    whole, _, _ = LENGTHS[unit]
    saving = {"save_folder": str(tmp_path), "save_interval": "1ba"} if goes_on == "from a checkpoint" else {}
    trainer, seen = start(schedulers, whole, StopAt(event), **saving)
    trainer.fit()
    num_batches = len(seen)
    if goes_on == "in a second fit" and num_batches < 10:
        trainer.fit(duration=f"{10 - num_batches}ba")
    elif num_batches < 10:
        trainer, rest = start(schedulers, whole, load_path=f"{tmp_path}/latest-rank0.pt")
        trainer.fit(duration=f"{10 - num_batches}ba")  # a stopped run does not go on by itself
        seen += rest
    factors = whole_run(kind)
    assert 3 <= num_batches <= 6 or event == Event.ITERATION_START  # which comes once
    assert seen == [(batch, *(lr * factor for lr in LRS)) for batch, factor in enumerate(factors)]


def test_milestones_and_warmups_are_where_their_formulas_put_them(start):
    """Milestones took effect before batches 28, 46 and 82, and a warm-up gave 0, 0, 0.25."""
    trainer, seen = start(MultiStepScheduler(["0.3dur", "0.5dur", "0.9dur"]), "90ba")
    trainer.fit()
    drops = [batch for (batch, rate, _), (_, before, _) in zip(seen[1:], seen, strict=False) if rate != before]
    assert drops == [27, 45, 81]
    trainer, seen = start(MultiStepWithWarmupScheduler("4ba", ["0.9dur"]), "10ba")
    trainer.fit()
    assert [rate for _, rate, _ in seen] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.1], rel=1e-15)


def halving(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def halving_a_milestone(optimizer):
    return lr_scheduler.MultiStepLR(optimizer, [1, 4, 7], 0.5)


PYTORCHS = {
    "whole": range(10),
    "fit twice": range(5, 10),
    "reset": range(10, 20),  # they count steps, not time
    "extended": range(5, 10),
    "resumed": range(5, 10),
    "without schedulers": range(5),  # one that is not loaded is at its start
    "another scheduler": range(5),
    "without optimizers": range(5, 10),
}


@pytest.mark.parametrize("move", PYTORCHS)
@pytest.mark.parametrize(
    ("make", "factor", "every_batch"),
    [
        (halving, lambda step: 0.5**step, False),
        (halving_a_milestone, lambda step: 0.5 ** sum(step >= m for m in (1, 4, 7)), True),
    ],
    ids=["every epoch", "every batch"],
)
def test_pytorchs_schedulers_count_their_steps_and_set_the_rate_they_say(start, save, make, factor, move, every_batch):
    """Without the optimizer's state, a resumed run went on from its first rate instead of the scheduler's."""
    seen = MOVES[move](start, save, make, "10ba", "5ba", {"step_schedulers_every_batch": every_batch})
    steps = PYTORCHS[move]
    is_fresh = move in ("without schedulers", "another scheduler")
    if not every_batch:  # a resumed run begins with the end of the epoch, which is a step
        steps = [max(step, 5 * is_fresh) // 5 for step in steps]
    assert [rates for _, *rates in seen] == [[lr * factor(step) for lr in LRS] for step in steps]


def side_by_side(optimizer):
    return [halving(optimizer), LinearScheduler()]


@pytest.mark.parametrize(("every_batch", "order"), [(True, 1), (False, -1)])
@pytest.mark.parametrize("move", ["whole", "fit twice", "resumed", "without optimizers", "extended", "reset"])
def test_side_by_side_the_rate_is_the_product_of_both(start, save, move, order, every_batch):
    settings = {"step_schedulers_every_batch": every_batch}
    seen = MOVES[move](start, save, lambda optimizer: side_by_side(optimizer)[::order], "10ba", "5ba", settings)
    steps = PYTORCHS[move]
    if not every_batch:
        steps = [step // 5 for step in steps]
    times = [batch if every_batch else batch // 5 * 5 for batch, *_ in seen]
    factors = [0.5**step * (1 - time / 10) for step, time in zip(steps, times, strict=True)]
    assert [rate for _, rate, _ in seen] == pytest.approx(factors, rel=1e-15)


@pytest.mark.parametrize(("schedulers", "num_batches"), [(LinearScheduler(), 3), (side_by_side, 1), (side_by_side, 6)])
def test_a_run_resumed_within_an_epoch_has_the_rate_of_the_epoch(start, save, schedulers, num_batches):
    """Schedulers that step after each epoch hold a rate for the epoch, and so they do for the rest of one."""
    settings = {"step_schedulers_every_batch": False}
    trainer, seen = start(schedulers, "10ba", load_path=save(schedulers, f"{num_batches}ba", **settings), **settings)
    trainer.fit()
    whole, expected = start(schedulers, "10ba", **settings)
    whole.fit()
    assert seen == expected[num_batches:]


@pytest.mark.parametrize("interval", ["1ba", "1ep"])
def test_the_rate_of_swa_is_not_the_schedulers_where_a_run_resumes(start, save, interval):
    """What an algorithm makes of the rate on the way holds after a resume as well."""

    def swa():
        return SWA("0.2dur", "0.8dur", interval, schedule_swa_lr=True, anneal_steps=3, swa_lr=0.05)

    whole, expected = start(LinearScheduler(), "15ba", algorithms=swa())
    whole.fit()
    path = save(LinearScheduler(), "15ba", StopAt(Event.EPOCH_END), algorithms=swa())
    trainer, seen = start(LinearScheduler(), "15ba", load_path=path, algorithms=swa())
    trainer.fit(duration="10ba")  # a stopped run does not go on by itself
    assert len(seen) == 10
    assert seen == expected[5:]


def test_what_is_logged_is_the_rate_that_the_batch_trains_with(start):
    """After a stop, the rate that was logged for the next batch was that of a run's end."""
    logged = InMemoryLogger()
    trainer, seen = start(LinearScheduler(), "10ba", LRMonitor(), StopAt(Event.BATCH_START), loggers=logged)
    trainer.fit()
    trainer.fit(duration="6ba")
    assert [(int(time.batch), rate) for time, rate in logged.data["lr-SGD/group0"]] == [seen_at[:2] for seen_at in seen]


@pytest.mark.parametrize(
    ("schedulers", "settings"),
    [
        (LinearScheduler(), {}),
        (halving, {}),
        (None, {}),
        (LinearScheduler(), {"load_ignore_keys": ["state/optimizers/*"]}),
    ],
    ids=["composer's", "pytorch's", "none", "without optimizers"],
)
def test_a_new_lr_that_the_checkpoint_overrides_is_reported_once(start, save, caplog, schedulers, settings):
    """The script's lr had no effect, and nothing said so."""
    path = save(schedulers, "5ba")
    caplog.set_level(logging.WARNING)
    start(schedulers, "10ba", load_path=path, **settings)
    start(schedulers, "10ba", load_path=path, load_weights_only=True, lrs=(2.0, 0.5))
    assert "replaced" not in caplog.text
    start(schedulers, "10ba", load_path=path, lrs=(2.0, 0.5), **settings)
    (message,) = [record.getMessage() for record in caplog.records if "replaced" in record.getMessage()]
    assert message.startswith("The script's lr=2, 0.5 is replaced by the checkpoint's lr=1, 0.5.")


def test_a_new_lr_takes_effect_where_the_schedulers_are_not_loaded(start, save, caplog):
    path = save(LinearScheduler(), "5ba")
    ignored = {"load_path": path, "load_ignore_keys": ["state/schedulers/*"]}
    trainer, seen = start(LinearScheduler(), "10ba", lrs=(2.0, 1.0), **ignored)
    trainer.fit()
    assert [rates for _, *rates in seen] == [pytest.approx([2 * f, f]) for f in (0.5, 0.4, 0.3, 0.2, 0.1)]
    assert "replaced" not in caplog.text


def test_a_duration_that_the_schedule_does_not_fit_is_refused_before_a_batch(start):
    """It was refused after the first batch, in the middle of a training that had begun."""
    trainer, seen = start(LinearWithWarmupScheduler("2ba", t_max="5ba"), "5ba")
    trainer.fit()
    with pytest.raises(ValueError, match="t_max='5ba'"):
        trainer.fit(duration="5ba")
    assert len(seen) == 5
    assert str(trainer.state.max_duration) == "5ba"


def test_a_run_that_is_only_evaluated_asks_no_scheduler(start, save, make_loader):
    """A checkpoint of a longer run loads into a shorter one that evaluates."""
    path = save(LinearScheduler(), "5ba")
    trainer, _ = start(LinearScheduler(), "2ba", load_path=path)
    trainer.eval(make_loader(8, 4))
    assert trainer.state.timestamp.num_batches == 5

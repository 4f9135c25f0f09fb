import copy
import pickle

import pytest
import torch

from composer_optim import (
    CosineAnnealingWithWarmupScheduler,
    LinearScheduler,
    MultiStepScheduler,
    StepScheduler,
    lambda_lr,
    lr_lambda,
)
from composer_time import Time


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)


def train(schedule, num_batches):
    """Return the learning rate that each batch is trained with."""
    rates = []
    for _ in range(num_batches):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return rates


def half_at_second_epoch(state):
    """Decide by looking at the clock, as users' own schedulers do."""
    return 0.5 if state.timestamp >= "1ep" else 1.0


def test_each_batch_trains_with_the_factor_for_the_batches_done_before_it(optimizer):
    assert train(lambda_lr(optimizer, LinearScheduler(), max_duration="4ba"), 4) == [2.0, 1.5, 1.0, 0.5]


def test_fractions_of_the_duration_work_in_epochs(optimizer):
    schedule = lambda_lr(
        optimizer, MultiStepScheduler(["0.5dur", "0.75dur"], gamma=0.5), max_duration="2ep", batches_per_epoch=4
    )
    assert train(schedule, 8) == [2.0] * 4 + [1.0] * 2 + [0.5] * 2


@pytest.mark.parametrize(("part", "batches", "drop"), [("0.3dur", 270, 81), ("0.29dur", 100, 29), ("0.9dur", 10, 9)])
def test_a_part_of_the_duration_loses_no_batch_to_the_rounding_of_floats(part, batches, drop):
    """0.3 of 90 epochs of 3 batches was 80 batches."""
    counts = {"max_duration": f"{batches // 3}ep", "batches_per_epoch": 3} if batches == 270 else {}
    factor = lr_lambda(MultiStepScheduler([part]), **{"max_duration": f"{batches}ba", **counts})
    assert [batch for batch in range(1, batches) if factor(batch) != factor(batch - 1)] == [drop]


@pytest.mark.parametrize(
    ("step_size", "counts"),
    [
        ("2ep", {"batches_per_epoch": 2}),
        ("32sp", {"samples_per_batch": 8}),
        ("4096tok", {"tokens_per_batch": 1024}),
    ],
)
def test_every_unit_advances_with_the_batches(step_size, counts):
    factor = lr_lambda(StepScheduler(step_size, gamma=0.5), max_duration="12ba", **counts)
    assert [factor(batch) for batch in range(12)] == [1.0] * 4 + [0.5] * 4 + [0.25] * 4


def test_a_users_own_scheduler_sees_the_epochs():
    factor = lr_lambda(half_at_second_epoch, max_duration="2ep", batches_per_epoch=2)
    assert [factor(batch) for batch in range(4)] == [1.0, 1.0, 0.5, 0.5]


def test_the_duration_may_be_in_tokens():
    factor = lr_lambda(LinearScheduler(), max_duration="4096tok", tokens_per_batch=1024)
    assert [factor(batch) for batch in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_the_ratio_scales_the_duration_and_the_schedule():
    scheduler = CosineAnnealingWithWarmupScheduler("2ba", t_max="8ep", alpha_f=0.1)
    factor = lr_lambda(scheduler, max_duration="8ep", batches_per_epoch=2, scale_schedule_ratio=0.5)
    assert factor(2) == 1.0
    assert factor(5) == pytest.approx(0.55)  # half of the way from the 2nd to the 8th batch
    assert factor(8) == pytest.approx(0.1)


def test_the_schedule_resumes_from_plain_state(optimizer, tmp_path):
    def make(optimizer):
        return lambda_lr(optimizer, CosineAnnealingWithWarmupScheduler("0.2dur"), max_duration="10ba")

    whole = train(make(copy.deepcopy(optimizer)), 10)
    interrupted = make(optimizer)
    first = train(interrupted, 4)
    torch.save((optimizer.state_dict(), interrupted.state_dict()), tmp_path / "saved.pt")

    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    resumed = make(other)
    optimizer_state, schedule_state = torch.load(tmp_path / "saved.pt", weights_only=True)
    other.load_state_dict(optimizer_state)
    resumed.load_state_dict(schedule_state)
    assert first + train(resumed, 6) == whole


def test_the_schedule_survives_pickling(optimizer):
    schedule = lambda_lr(optimizer, LinearScheduler(), max_duration="8ba")
    train(schedule, 2)
    assert train(pickle.loads(pickle.dumps(schedule)), 3) == train(schedule, 3) == [1.5, 1.25, 1.0]


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (StepScheduler("32sp"), "samples_per_batch=None"),
        (StepScheduler("32tok"), "tokens_per_batch=None"),
        (StepScheduler("1iter"), "'iter' is not counted"),
    ],
)
def test_a_schedule_that_counts_what_the_loop_does_not_is_refused_at_once(optimizer, scheduler, message):
    with pytest.raises(ValueError, match=message):
        lambda_lr(optimizer, scheduler, max_duration="8ba")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (half_at_second_epoch, "batches_per_epoch=None"),
        (lambda state: state.timestamp < "1ep", "batches_per_epoch=None"),
        (lambda state: state.timestamp <= Time(1, "ep"), "batches_per_epoch=None"),
        (lambda state: state.timestamp > "64sp", "samples_per_batch=None"),
        (lambda state: state.timestamp == "64tok", "tokens_per_batch=None"),
        (lambda state: state.timestamp != "64tok", "tokens_per_batch=None"),
        (lambda state: state.timestamp >= "1ep", "batches_per_epoch=None"),
        (lambda state: Time(1, "ep") <= state.timestamp, "batches_per_epoch=None"),
        (lambda state: state.timestamp >= "1iter", "'iter' is not counted"),
        (lambda state: state.timestamp >= "1sec", "'sec' is not counted"),
        (lambda state: state.timestamp.get("ep"), "batches_per_epoch=None"),
        (lambda state: state.timestamp.epoch, "batches_per_epoch=None"),
        (lambda state: state.timestamp.sample, "samples_per_batch=None"),
        (lambda state: state.timestamp.token, "tokens_per_batch=None"),
        (lambda state: state.timestamp.batch_in_epoch, "batches_per_epoch=None"),
        (lambda state: state.timestamp.sample_in_epoch, "batches_per_epoch=None"),
        (lambda state: state.timestamp.token_in_epoch, "batches_per_epoch=None"),
        (lambda state: state.timestamp.iteration, "'iter' is not counted"),
        (lambda state: state.timestamp.total_wct, "'sec' is not counted"),
    ],
)
def test_a_look_at_a_clock_that_the_loop_does_not_keep_is_refused(read, message):
    with pytest.raises(ValueError, match=message):
        lr_lambda(read, max_duration="8ba")(0)


def test_a_clock_that_the_loop_keeps_can_be_read_in_every_way():
    def read(state):
        now = state.timestamp
        counted = (now.epoch, now.batch, now.sample, now.token, now.batch_in_epoch, now.sample_in_epoch)
        assert counted == ("1ep", "5ba", "10sp", "15tok", "2ba", "4sp")
        assert now.token_in_epoch == now.get("tok") - "9tok"
        assert now == "1ep"
        assert now != "2ep"
        assert "1ep" <= now < "2ep"
        assert now > "9sp"
        return 1.0

    counts = {"batches_per_epoch": 3, "samples_per_batch": 2, "tokens_per_batch": 3}
    assert lr_lambda(read, max_duration="2ep", **counts)(5) == 1.0


def test_epochs_without_their_length_are_refused_at_once(optimizer):
    with pytest.raises(RuntimeError, match="dataloader_len is None"):
        lambda_lr(optimizer, LinearScheduler(), max_duration="8ep")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_duration": "8tok"}, "tokens_per_batch=None"),
        ({"max_duration": "30sec"}, "'sec' is not counted"),
        ({"max_duration": "1dur"}, "'dur' is not counted"),
        ({"max_duration": "8ba", "batches_per_epoch": 0}, "batches_per_epoch=0 must be 1 or more"),
        ({"max_duration": "8ba", "scale_schedule_ratio": 0.1}, "reduced the max_duration to 0"),
        ({"max_duration": "8ba", "scale_schedule_ratio": -1.0}, "must be more than 0"),
        ({"max_duration": "-4ba"}, "max_duration='-4ba' is not a length"),
    ],
)
def test_a_loop_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lr_lambda(LinearScheduler(), **options)


def test_a_ratio_for_a_callable_that_takes_none_is_refused():
    with pytest.raises(ValueError, match="cannot be given"):
        lr_lambda(half_at_second_epoch, max_duration="8ba", scale_schedule_ratio=0.5)

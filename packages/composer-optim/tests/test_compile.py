import functools

import pytest
import torch

from composer_optim import (
    ConstantScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearScheduler,
    MultiStepScheduler,
    StepScheduler,
    compile_composer_scheduler,
    compile_composer_schedulers,
)


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)


@pytest.fixture
def optimized(training, optimizer):
    """Make a state whose only optimizer has a learning rate of 2."""

    def make(max_duration, **counters):
        state = training(max_duration, **counters)
        state.optimizers.append(optimizer)
        return state

    return make


def advance(state, compiled):
    """Train one batch, the way in which the trainer does it: the clock moves after the schedulers."""
    lr = state.optimizers[0].param_groups[0]["lr"]
    state.optimizers[0].step()
    compiled.step()
    state.timestamp = state.timestamp.to_next_batch()
    return lr


def test_the_learning_rate_follows_the_clock_of_the_state(optimized):
    state = optimized("4ba")
    compiled = compile_composer_scheduler(LinearScheduler(), state)
    lrs = [advance(state, compiled) for _ in range(4)]
    assert lrs == [2.0, 2.0, 1.5, 1.0]
    assert compiled.get_last_lr() == [0.5]


def test_the_first_learning_rate_is_set_at_once(optimized, optimizer):
    compile_composer_scheduler(LinearScheduler(), optimized("4ba", batch=1))
    assert optimizer.param_groups[0]["lr"] == 1.5


def test_the_result_is_pytorchs_own_kind_whose_state_is_plain(optimized, tmp_path):
    compiled = compile_composer_scheduler(StepScheduler("1ba"), optimized("4ba"))
    assert type(compiled) is torch.optim.lr_scheduler.LambdaLR
    torch.save(compiled.state_dict(), tmp_path / "scheduler.pt")
    loaded = torch.load(tmp_path / "scheduler.pt", weights_only=True)
    assert loaded["lr_lambdas"] == [None]
    compiled.load_state_dict(loaded)


def test_every_parameter_group_keeps_its_own_base(optimized, optimizer):
    state = optimized("4ba", batch=2)
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 10.0})
    compile_composer_scheduler(LinearScheduler(), state)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 5.0]


def test_the_factors_of_several_schedulers_multiply(optimized, optimizer):
    state = optimized("4ba")
    compiled = compile_composer_schedulers([LinearScheduler(), ConstantScheduler(0.5), lambda state: 3.0], state)
    rates = []
    for batch in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        state.timestamp = state.timestamp.copy(batch=batch + 1)
        for scheduler in compiled[:: 1 if batch % 2 else -1]:  # in either order
            scheduler.step()
    assert rates == [2.0 * 0.5 * 3.0 * (1 - batch / 4) for batch in range(4)]
    assert len(compiled) == 3


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda state: 0.5,
        lambda state, ssr: 0.5 * ssr,
        lambda state, ssr=1.0: 0.5 * ssr,
        lambda state, ratio, /: 0.5 * ratio,
        lambda *args: 0.5 * args[1],
        lambda state, *, factor=0.5: factor,
        lambda state, **options: 0.5,
        functools.partial(lambda state, factor: factor, factor=0.5),
        functools.partial(lambda factor, state, ssr: factor * ssr, 0.5),
    ],
)
def test_any_callable_is_a_scheduler(optimized, scheduler):
    assert compile_composer_scheduler(scheduler, optimized("4ba")).get_last_lr() == [1.0]


def test_the_ratio_reaches_the_scheduler(optimized):
    state = optimized("2ba", batch=1)
    assert compile_composer_scheduler(LinearScheduler(t_max="4ba"), state, 0.5).get_last_lr() == [1.0]


def test_a_warmup_with_a_ratio_fits_a_duration_that_was_scaled_first(optimized):
    scheduler = CosineAnnealingWithWarmupScheduler("1ba", t_max="10ba")
    assert compile_composer_scheduler(scheduler, optimized("5ba", batch=1), 0.5).get_last_lr() == [2.0]
    with pytest.raises(ValueError, match="must be greater than or equal to max_duration"):
        compile_composer_scheduler(scheduler, optimized("10ba"), 0.5)


def test_a_ratio_for_a_callable_that_takes_none_is_refused(optimized):
    for scheduler in (lambda state: 1.0, lambda state, *, factor=1.0: factor):
        with pytest.raises(ValueError, match=r"scale_schedule_ratio=0\.5 cannot be given"):
            compile_composer_scheduler(scheduler, optimized("4ba"), 0.5)


def test_a_scheduler_of_pytorchs_alone_needs_no_compiling(optimized, optimizer):
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(ValueError, match="scheduler=StepLR is PyTorch's own"):
        compile_composer_scheduler(theirs, optimized("4ba"))


@pytest.mark.parametrize("ssr", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ratio_that_is_not_positive_is_refused(optimized, ssr):
    with pytest.raises(ValueError, match="must be more than 0"):
        compile_composer_scheduler(LinearScheduler(), optimized("4ba"), ssr)


@pytest.mark.parametrize("ssr", ["0.5", None, True])
def test_a_ratio_that_is_no_number_is_named(optimized, ssr):
    with pytest.raises(TypeError, match=f"scale_schedule_ratio={ssr!r} is not a number"):
        compile_composer_scheduler(LinearScheduler(), optimized("4ba"), ssr)


@pytest.mark.parametrize(
    ("scheduler", "hint"),
    [(LinearScheduler, r"Call it: LinearScheduler\(\.\.\.\)"), ("cosine", "Pass a function of the state")],
)
def test_what_cannot_be_called_with_a_state_is_refused(optimized, scheduler, hint):
    with pytest.raises(TypeError, match=f"is not a scheduler.*{hint}"):
        compile_composer_scheduler(scheduler, optimized("4ba"))


@pytest.mark.parametrize("num_optimizers", [0, 2])
def test_other_than_one_optimizer_is_refused(training, optimizer, num_optimizers):
    state = training("4ba")
    state.optimizers = [optimizer] * num_optimizers
    with pytest.raises(NotImplementedError, match=f"Only one optimizer is supported; found {num_optimizers}"):
        compile_composer_scheduler(LinearScheduler(), state)


def test_what_the_schedule_needs_to_know_is_asked_for_before_the_first_batch(optimized):
    with pytest.raises(AssertionError, match="max_duration"):
        compile_composer_scheduler(LinearScheduler(), optimized(None))
    with pytest.raises(RuntimeError, match="dataloader_len"):
        compile_composer_scheduler(MultiStepScheduler(["1ep"]), optimized("4ba", batches_per_epoch=None))

"""What a call of `fit` changes before it trains: data, duration, schedule, evaluators, microbatches, precision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from composer.trainer._argument_kinds import check_kinds
from composer.trainer._arguments import check_same_precision, choose_precision
from composer.trainer._evaluators import make_evaluators
from composer.trainer._loss_scaling import make_scaler
from composer.trainer._microbatching import Microbatching, refuse_unrepeatable
from composer.trainer._schedules import Schedule, stay_stopped, to_duration
from composer_time import Timestamp

if TYPE_CHECKING:
    from composer.trainer._data import TrainBatches
    from composer.trainer._workings import Workings

__all__ = ["take_fit_arguments"]


def take_fit_arguments(workings: Workings, asked: SimpleNamespace) -> TrainBatches:
    """Check the arguments of `fit`, make them count, and return what is trained on.

    Args:
        workings: What they change. If one of them is refused, nothing is changed.
        asked: The arguments, by name.

    Raises:
        ValueError, TypeError: If one cannot be used, something needed is missing, or no time is left to train.
    """
    state, plan = workings.state, workings.plan
    if not state.optimizers:
        raise ValueError(
            "No optimizer was specified when constructing the Trainer, and the model has no parameters to train."
        )
    check_kinds(asked)
    longer = to_duration(asked.duration, "duration")
    schedule = Schedule.of(asked.schedulers, asked.scale_schedule_ratio, asked.step_schedulers_every_batch)
    evaluators = make_evaluators(
        asked.eval_dataloader,
        workings.model,
        asked.eval_interval,
        asked.eval_subset_num_batches,
        state.device,
        present=state.evaluators,
    )
    new_precision = choose_precision(asked.precision or state.precision, state.device)
    if workings.strategy.has_own_precision:
        check_same_precision(new_precision, state.precision)
    scaler = make_scaler(new_precision, state.device, state.optimizers)
    microbatching = None
    if asked.device_train_microbatch_size is not None or asked.grad_accum is not None:
        microbatching = Microbatching.of(
            asked.device_train_microbatch_size, asked.grad_accum, state.device, profiler=state.profiler
        )
        refuse_unrepeatable(microbatching, workings.strategy, is_deepspeed=state.deepspeed_enabled)
    stopped = None if longer is not None or asked.reset_time else state.stopped_duration
    with plan.undone_if_refused():
        if microbatching is not None:
            plan.microbatching = microbatching
        batches = plan.choose_batches(
            asked.train_dataloader, asked.train_dataloader_label, asked.train_subset_num_batches
        )
        if asked.reset_time:
            state.timestamp = Timestamp()
        if longer is not None:
            state.max_duration = state.timestamp.get(longer.unit) + longer
        plan.set_schedule(schedule, begins_now=True)
    stay_stopped(state, stopped)
    if asked.reset_time:
        plan.begin_again(batches)
    if asked.spin_dataloaders is not None:
        workings.position.spin = asked.spin_dataloaders
    if asked.eval_dataloader is not None:
        workings.set_evaluators(evaluators)
    if new_precision is not state.precision:
        state.precision, state.scaler = new_precision, scaler
    return batches

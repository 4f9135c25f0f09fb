"""Evaluation and prediction: events, forward passes, metrics and outputs over one dataloader."""

from __future__ import annotations

import copy
import datetime
import functools
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from composer.trainer import _error_context as error_context
from composer.trainer._arguments import check_subset, user_stacklevel
from composer.trainer._data import restore_dataloader
from composer.trainer._microbatching import REPORT_OUT_OF_MEMORY, Attempts, halve, release_memory
from composer.trainer._progress import Clock
from composer.trainer._rank_sync import Ranks, next_batch
from composer.trainer._restore import MetricsUndo
from composer.trainer._shared_results import compute_over_ranks
from composer.trainer._step import Autocast, cut, split, transform
from composer_dist import dist, get_global_rank, get_world_size
from composer_dist.ddp import share_buffers
from composer_dist.devices import Device, DeviceCPU
from composer_dist.strategy import Strategy
from composer_events.arguments import check_counts, check_flags, to_interval
from composer_events.batches import ensure_tuple
from composer_events.data_position import set_epoch
from composer_events.data_spec import DataSpec, ensure_data_spec
from composer_events.engine import Engine
from composer_events.evaluator import Evaluator, ensure_evaluator
from composer_events.event import Event
from composer_events.logger import Logger
from composer_events.metric_entries import by_entry
from composer_events.seeded_batches import SeededBatches, can_be_seeded, derive_seed, seeded
from composer_events.state import State
from composer_models import ComposerModel, model_eval_mode
from composer_time import Time, Timestamp

if TYPE_CHECKING:
    from composer.trainer._build import Runtime
    from composer.trainer._step import Autocast


_NO_BATCH: Any = object()


@dataclass(slots=True, eq=False)
class Evaluation:
    """Runs evaluators: events, forward passes and metrics.

    Each sample counts once, even if a DistributedSampler repeats some to give all ranks the same number.
    """

    state: State
    engine: Engine
    logger: Logger
    strategy: Strategy
    model: ComposerModel
    autocast: Autocast
    _clock: Clock = field(default_factory=Clock, init=False)
    _attempts: Attempts = field(init=False)
    _eval_forward: Callable[[Any], Any] = field(init=False)

    def __post_init__(self) -> None:
        # ValueError for other CUDA errors, as in Composer.
        self._attempts = Attempts(self.strategy, ValueError)
        forward = self.model.eval_forward
        outputs = inspect.signature(forward).parameters.get("outputs")
        is_required = outputs is not None and outputs.default is inspect.Parameter.empty
        self._eval_forward = functools.partial(forward, outputs=None) if is_required else forward

    def run(
        self,
        evaluator: Evaluator,
        subset_num_batches: int | None = None,
        open_batches: Callable[[Evaluator], Iterator[Any]] | None = None,
    ) -> None:
        """Evaluate over one dataloader, log the metrics, and restore the state's dataloader and the model's mode.

        A dataloader that yields no batch causes a warning, and its metrics keep their values.
        """
        state, run_event, metrics = self.state, self.engine.run_event, self.state.eval_metrics[evaluator.label]
        subset = evaluator.subset_num_batches if subset_num_batches is None else subset_num_batches
        state.settle()
        state.eval_timestamp = Timestamp()
        with evaluating(state, evaluator.dataloader.dataloader, evaluator.label, -1 if subset is None else subset):
            run_event(Event.EVAL_START)
            share_buffers(state.model)  # after EVAL_START, where algorithms may swap in averaged weights
            for metric in metrics.values():
                state.device.module_to_device(metric).reset()
            ranks, padding = Ranks(self.strategy), Padding(evaluator.dataloader.dataloader)
            ranks.begin(evaluator.dataloader)
            self._clock.start_batch()
            for state.batch in self._batches(evaluator, ranks, open_batches):
                self._evaluate_batch(evaluator, metrics, ranks, padding)
            if evaluator.auto_microbatching:
                key = f"trainer/{evaluator.label}/device_eval_microbatch_size"
                self.logger.log_metrics({key: evaluator.device_eval_microbatch_size})
            if state.eval_timestamp.num_batches > 0:
                self._report(evaluator.label, metrics)
            else:
                warnings.warn(
                    f"No batches were evaluated for global rank {get_global_rank()}: the dataloader of evaluator "
                    f"{evaluator.label!r} yielded none. An iterator, for one, can be read only once.",
                    stacklevel=user_stacklevel(),
                )
            run_event(Event.EVAL_END)

    @error_context.stage("the dataloader of an evaluation")
    def _batches(
        self, evaluator: Evaluator, ranks: Ranks, open_batches: Callable[[Evaluator], Iterator[Any]] | None
    ) -> Iterator[Any]:
        loader = evaluator.dataloader.dataloader
        # By the batches trained on, so that a resumed run shuffles as the uninterrupted one.
        set_epoch(loader, self.state.timestamp.num_batches)
        batches = iter(loader) if open_batches is None else open_batches(evaluator)
        yield from common_batches(batches, evaluator.dataloader, self.state.dataloader_len, ranks)

    @error_context.stage("an evaluation")
    def _evaluate_batch(self, evaluator: Evaluator, metrics: Mapping[str, Any], ranks: Ranks, padding: Padding) -> None:
        state, run_event, spec = self.state, self.engine.run_event, evaluator.dataloader
        batch, num_samples = state.batch, spec.get_num_samples_in_batch(state.batch)
        num_tokens = spec.get_num_tokens_in_batch(batch)
        num_repeated, has_repeated = padding.in_batch(num_samples)
        run_event(Event.EVAL_BATCH_START)
        evaluate = functools.partial(self._evaluate_microbatches, evaluator, metrics, ranks, has_repeated)
        if evaluator.auto_microbatching:
            self._evaluate_until_it_fits(evaluator, metrics, evaluate)
        else:
            evaluate()
        state.batch = batch
        ranks.start_total(num_samples, num_tokens, self._clock.end_batch_s)
        samples, tokens, seconds = ranks.total()
        state.eval_timestamp = state.eval_timestamp.to_next_batch(
            samples=samples - num_repeated, tokens=tokens, duration=datetime.timedelta(seconds=seconds)
        )
        run_event(Event.EVAL_BATCH_END)

    def _evaluate_microbatches(
        self, evaluator: Evaluator, metrics: Mapping[str, Any], ranks: Ranks, has_repeated: bool
    ) -> bool:
        """Evaluate the batch in microbatches, and return True."""
        state, run_event, spec = self.state, self.engine.run_event, evaluator.dataloader
        try:
            microbatches = cut(state.batch, spec, evaluator.device_eval_microbatch_size)
        except Exception as error:
            error_context.name_setters(error, state, (Event.EVAL_BATCH_START,))
            raise
        parts = counted_parts(microbatches, spec, has_repeated)
        if self.strategy.meets_in_forward and not ranks.same_batch_size:
            # Repeat the last one uncounted, so that ranks with fewer microbatches still join every collective.
            parts += [(microbatches[-1], False)] * (ranks.most(len(parts)) - len(parts))
        with self._attempts.meeting(sync=False) if evaluator.auto_microbatching else nullcontext():
            for microbatch, is_counted in parts:
                on_device = state.device.batch_to_device(microbatch)
                state.batch = self.strategy.prepare_batch(transform("microbatch_transforms", spec, on_device))
                run_event(Event.EVAL_BEFORE_FORWARD)
                with self.autocast():
                    state.outputs = self._eval_forward(state.batch)
                run_event(Event.EVAL_AFTER_FORWARD)
                if not is_counted:
                    continue
                with self.autocast():
                    for metric in metrics.values():
                        state.metric_outputs = self.model.update_metric(state.batch, state.outputs, metric) or {}
        if evaluator.auto_microbatching:
            self._attempts.agree()
        return True

    def _evaluate_until_it_fits(
        self, evaluator: Evaluator, metrics: Mapping[str, Any], evaluate: Callable[[], bool]
    ) -> None:
        """Evaluate a batch; halve the microbatches on all ranks until it fits on every rank."""
        state, undo = self.state, MetricsUndo(metrics)
        batch = state.batch
        while not self._attempts.result(evaluate):
            state.batch, state.outputs = batch, torch.empty(0)  # releases the tensors of the failed attempt
            undo()
            old = evaluator.device_eval_microbatch_size
            assert old is not None, "Evaluator begins with a size"
            evaluator.device_eval_microbatch_size = halve(old)
            if evaluator.device_eval_microbatch_size is None:
                raise RuntimeError(
                    f"The device ran out of memory in evaluator {evaluator.label!r}, on one rank at least, with a "
                    "single sample. Use a smaller model, a lower precision, or shorter samples."
                )
            warnings.warn(
                f"An evaluation ran out of memory. Eval microbatch size of {evaluator.label!r} will be decreased from "
                f"{old} to {evaluator.device_eval_microbatch_size}.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
            release_memory()

    def _report(self, label: str, metrics: Mapping[str, Any]) -> None:
        _fill_shorter_lists(metrics)
        values = compute_over_ranks(metrics)
        self.state.eval_metric_values.update(values)
        self.logger.log_metrics({f"metrics/{label}/{name}": value for name, value in by_entry(values).items()})


@contextmanager
def evaluating(state: State, dataloader: Any, label: str, subset_num_batches: int) -> Generator[None]:
    """Set a dataloader on the state, without gradients and in evaluation mode; restore all of it afterwards."""
    before = (state.dataloader, state.dataloader_label, state.dataloader_len)
    try:
        with torch.no_grad(), model_eval_mode(state.model):
            state.set_dataloader(dataloader, label, subset_num_batches)
            yield
    finally:
        restore_dataloader(state, *before)


def common_batches(batches: Iterator[Any], spec: DataSpec, length: Time[int] | None, ranks: Ranks) -> Iterator[Any]:
    """Yield batches, as many as every rank has, and at most `length`. Every rank must call this."""
    for num_read in itertools.count():
        # Every rank must reach the collective below, even one without a batch.
        may_read = length is None or num_read < int(length)
        batch = next_batch(batches, spec.dataloader, num_read, _NO_BATCH) if may_read else _NO_BATCH
        if not ranks.all_have_a_batch(batch is not _NO_BATCH):
            break
        yield transform("batch_transforms", spec, batch)


def _fill_shorter_lists(metrics: Mapping[str, Any]) -> None:
    """Pad the lists of each metric with empty tensors to the same length on every rank. Every rank must call this.

    torchmetrics gathers lists element by element. For a rank with an empty list, such as one without samples, it would
    use a flat float32 tensor, regardless of the shape and dtype of the others.
    """
    parts: list[Any] = [part for metric in metrics.values() for part in metric.modules()]
    states: list[Any] = [getattr(part, "metric_state", {}).values() for part in parts]
    lists: list[list[list[Any]]] = [[value for value in of_part if type(value) is list] for of_part in states]
    if get_world_size() == 1 or not any(lists):
        return
    own = [[_kinds(found) for found in of_part] for of_part in lists]
    for part, of_part, *of_ranks in zip(parts, lists, *dist.all_gather_object(own), strict=True):
        _pad(part, of_part, of_ranks)


def _pad(part: Any, lists: list[list[Any]], of_ranks: list[Any]) -> None:
    # The longest list of any rank has the shapes and dtypes for the padding.
    longest = [max(of_list, key=len) for of_list in zip(*of_ranks, strict=True)]
    # A metric with lists of objects other than tensors gathers them itself.
    if any(None in kinds for kinds in longest):
        return
    for found, kinds, *lengths in zip(lists, longest, *of_ranks, strict=True):
        if min(map(len, lengths)) < len(kinds):
            # A 0-d tensor has no empty form to pad with.
            found[:] = [element.reshape(1) if element.ndim == 0 else element for element in found]
            missing = kinds[len(found) :]
            found += [torch.empty(0, *shape, dtype=dtype, device=part.device) for dtype, shape in missing]


def _kinds(found: list[Any]) -> list[tuple[torch.dtype, torch.Size] | None]:
    return [(each.dtype, each.shape[1:]) if isinstance(each, Tensor) else None for each in found]


class EvaluationBatches:
    """Iterators over evaluation dataloaders whose random draws depend only on the training batch.

    Otherwise training after an evaluation would depend on whether its persistent workers had been started before.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._seeded: dict[int, SeededBatches] = {}  # kept between evaluations, since workers may persist

    def open(self, evaluator: Evaluator) -> Iterator[Any]:
        loader: Any = evaluator.dataloader.dataloader
        batch, position = self._state.timestamp.num_batches, self._state.data_position
        rank = get_global_rank() if position is None else position.rank
        seed = derive_seed(self._state.rank_zero_seed, "evaluation", evaluator.label)
        if not isinstance(loader, DataLoader):
            return iter(loader)
        torch_loader = cast("DataLoader[Any]", loader)
        if can_be_seeded(torch_loader):
            batches = self._seeded.setdefault(id(torch_loader), SeededBatches(torch_loader, rank))
            return batches.open(seed, batch)
        with seeded(derive_seed(seed, batch, rank)):
            return iter(torch_loader)


_log = logging.getLogger("composer.trainer.trainer")


def make_evaluators(
    given: Any,
    model: ComposerModel,
    eval_interval: Any,
    subset_num_batches: int,
    device: Device,
) -> list[Evaluator]:
    """Wrap each dataloader in an Evaluator that computes all metrics of the model."""
    items = _listed(given)
    # 1 is the default interval, and 0 turns evaluation off.
    if not items and (eval_interval not in (0, 1) or subset_num_batches != -1):
        warnings.warn(
            f"Without an eval_dataloader, eval_interval={eval_interval!r} and "
            f"eval_subset_num_batches={subset_num_batches!r} has no effect. If trying to run an evaluator, give it as "
            "eval_dataloader, also one of an earlier call.",
            stacklevel=user_stacklevel(),
        )
    kinds = {isinstance(item, Evaluator) for item in items}
    if len(kinds) > 1:
        raise ValueError(
            "Mixing Evaluator with other classes is not allowed, please wrapall other classes with the Evaluator "
            f"class. eval_dataloader holds {[type(item).__name__ for item in items]}."
        )
    metrics = metrics_by_name(model, is_train=False)
    if items:
        check_metrics(metrics)
    names = list(metrics)
    check_subset("eval_subset_num_batches", subset_num_batches)
    to_interval("eval_interval", eval_interval)
    # Copies, because defaults are filled in and the user may pass the evaluators to another Trainer.
    evaluators = [copy.copy(ensure_evaluator(item, names)) for item in items]
    warn_of_known_labels(evaluators, [])
    for evaluator in evaluators:
        complete_evaluator(evaluator, model, eval_interval, subset_num_batches, device)
    return evaluators


def complete_evaluator(
    evaluator: Evaluator, model: ComposerModel, eval_interval: Any, subset_num_batches: int, device: Device
) -> None:
    """Give an evaluator the settings that it does not have, and check it, in place."""
    if evaluator.subset_num_batches is None:
        evaluator.subset_num_batches = subset_num_batches
    if evaluator.eval_interval is None:
        evaluator.eval_interval = eval_interval
    if evaluator.auto_microbatching and device.name not in REPORT_OUT_OF_MEMORY:
        raise ValueError(
            f"Can only use adaptive device_eval_microbatch_size on GPU, and device is {device.name!r}: other "
            f"devices do not report that they are out of memory. Give evaluator {evaluator.label!r} a number."
        )
    metrics = metrics_by_name(model, is_train=False)
    if evaluator.metric_names and not evaluator.select_metrics(metrics):
        there = ", ".join(metrics if evaluator.metrics is None else evaluator.metrics) or "none at all"
        raise ValueError(
            f"Evaluator {evaluator.label!r} has metric_names={evaluator.metric_names!r}, and no metric matches. "
            f"There are {there}. Name some of these, or leave metric_names out for all."
        )
    loader = evaluator.dataloader.dataloader
    if evaluator.subset_num_batches != -1 or not hasattr(loader, "__len__"):
        return
    try:
        len(loader)
    except TypeError as error:
        raise ValueError(
            f"eval_subset_num_batches must be set when using an infinite sized dataloader: evaluator "
            f"{evaluator.label!r} has {loader!r}, whose length is unknown. Say how many batches an evaluation reads."
        ) from error


def warn_of_known_labels(evaluators: Sequence[Evaluator], others: Iterable[Evaluator]) -> None:
    """Warn if two evaluators share a label, so that each overwrites the results of the other."""
    known = {evaluator.label for evaluator in others}
    for evaluator in evaluators:
        if evaluator.label in known and others:
            warnings.warn(
                f"eval_dataloader label {evaluator.label!r} is that of another evaluator of this Trainer; its metrics "
                "are replaced. Use Evaluator(label=...) with a label of its own.",
                stacklevel=user_stacklevel(),
            )
        elif evaluator.label in known:
            _log.warning("Several evaluators have the label %r and share its metrics.", evaluator.label)
        known.add(evaluator.label)


def _listed(given: Any) -> Sequence[Any]:
    if not isinstance(given, (list, tuple)):
        return () if given is None else (given,)
    items = ensure_tuple(cast("Sequence[Any]", given))
    # A list of batches is one dataloader.
    is_batch = [isinstance(i, (tuple, Tensor)) or (isinstance(i, Mapping) and "dataloader" not in i) for i in items]
    return (cast(object, given),) if items and all(is_batch) else items


def metrics_by_name(model: ComposerModel, *, is_train: bool) -> Mapping[str, Any]:
    metrics: Any = model.get_metrics(is_train=is_train)
    # By attribute, because ModuleDict and MetricCollection are not Mappings.
    if hasattr(metrics, "keys") and hasattr(metrics, "items"):
        return metrics
    raise TypeError(
        f"{type(model).__name__}.get_metrics(is_train={is_train}) returned {metrics!r}, a {type(metrics).__name__}. It "
        "must return a dict of names to metrics, such as {'MulticlassAccuracy': MulticlassAccuracy(...)}, or {} "
        "without metrics."
    )


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Reject metrics on the meta device, which have no values to start from."""
    for name, metric in metrics.items():
        states = [value for part in metric.modules() for value in getattr(part, "metric_state", {}).values()]
        if any(isinstance(state, Tensor) and state.is_meta for state in states):
            raise ValueError(
                f"the metric {name!r} of the model, a {type(metric).__name__}, is on the meta device, where it has no "
                f"values to start from. Create the model's metrics inside "
                f"`with torch.device('cpu'):`, even if the rest of the model is created on the meta device."
            )


class Padding:
    """Counts of the repeated samples in one pass over a dataloader.

    The sampler repeats them as the last sample of each of the last ranks, in the last batch.
    """

    def __init__(self, dataloader: Any) -> None:
        self._num_repeated = 0
        self._is_own = False
        self._num_left = 0
        sampler: Any = getattr(getattr(dataloader, "batch_sampler", None), "sampler", None)
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
            # `total_size` is the size of the dataset, rounded up to a multiple of the ranks.
            self._num_repeated = sampler.total_size - len(cast(Any, sampler).dataset)
            self._is_own = sampler.rank >= sampler.num_replicas - self._num_repeated
            self._num_left = sampler.num_samples

    def in_batch(self, num_samples: int | float) -> tuple[int, bool]:
        """Return the number of repeated samples in the next batch over all ranks, and whether this rank has one."""
        if self._num_repeated == 0:
            return 0, False
        self._num_left -= int(num_samples)
        return (0, False) if self._num_left > 0 else (self._num_repeated, self._is_own)


def counted_parts(microbatches: Sequence[Any], spec: DataSpec, has_repeated: bool) -> list[tuple[Any, bool]]:
    """Return each microbatch with whether it counts, the last one without the repeated sample.

    A microbatch of this sample alone does not count, but is evaluated: other ranks may wait in a collective.
    """
    parts = [(microbatch, True) for microbatch in microbatches]
    if has_repeated:
        last = microbatches[-1]
        num_samples = int(spec.get_num_samples_in_batch(last))
        parts[-1] = (spec.split_batch(last, num_samples - 1)[0], True) if num_samples > 1 else (last, False)
    return parts


def evaluate_alone(runtime: Runtime, eval_dataloader: Any, subset_num_batches: int) -> None:
    """Evaluate on a dataloader, or with all evaluators of the state."""
    state = runtime.state
    runtime.take_evaluators()
    evaluators: list[Evaluator] = list(state.evaluators)
    if eval_dataloader is not None:
        evaluators = make_evaluators(eval_dataloader, runtime.model, 1, subset_num_batches, state.device)
        warn_of_known_labels(evaluators, state.evaluators)
        runtime.add_metrics(evaluators)
    if not evaluators:
        raise ValueError("eval_dataloader must be provided to either Trainer init() or eval().")
    runtime.engine.run_event(Event.EVAL_STANDALONE_START)
    # Registered for the duration of the call, so that callbacks find them on the state.
    state.evaluators = [*state.evaluators, *(e for e in evaluators if e not in state.evaluators)]
    try:
        evaluation = runtime.make_evaluation()
        for evaluator in evaluators:
            evaluation.run(evaluator, None if subset_num_batches == -1 else subset_num_batches)
    finally:
        if eval_dataloader is not None:
            state.evaluators = [e for e in state.evaluators if e not in evaluators]
    runtime.engine.run_event(Event.EVAL_STANDALONE_END)


def check_prediction(dataloader: Any, subset_num_batches: Any, microbatch_size: Any, return_outputs: Any) -> DataSpec:
    """Check the arguments of `predict`, and return the dataloader as a DataSpec."""
    check_flags(return_outputs=return_outputs)
    data_spec = ensure_data_spec(dataloader)
    check_subset("subset_num_batches", subset_num_batches)
    if microbatch_size is not None:
        check_counts(device_predict_microbatch_size=microbatch_size)
    return data_spec


@dataclass(slots=True, eq=False)
class Prediction:
    """Runs the model over a dataloader with the events of `predict`, then restores its mode and the dataloader.

    Samples that a DistributedSampler repeats to give all ranks the same number are not returned.
    """

    state: State
    engine: Engine
    strategy: Strategy
    autocast: Autocast
    _clock: Clock = field(default_factory=Clock, init=False)

    def run(self, data_spec: DataSpec, subset_num_batches: int, microbatch_size: int | None, keeps: bool) -> list[Any]:
        """Return the outputs of each batch on the CPU, or an empty list if `keeps` is False."""
        state, run_event = self.state, self.engine.run_event
        state.settle()
        state.predict_timestamp = Timestamp()
        outputs: list[Any] = []
        with evaluating(state, data_spec.dataloader, "predict", subset_num_batches):
            run_event(Event.PREDICT_START)
            ranks, padding = Ranks(self.strategy), Padding(data_spec.dataloader)
            ranks.begin(data_spec, may_stop=bool(state.callbacks))  # which may read the clock
            self._clock.start_batch()
            for batch in self._batches(data_spec, ranks):
                parts = self._predict(batch, data_spec, ranks, padding, microbatch_size, keeps)
                outputs += [_join(parts)] if keeps and parts else []
                run_event(Event.PREDICT_BATCH_END)
            run_event(Event.PREDICT_END)
        return outputs

    @error_context.stage("the dataloader of a prediction")
    def _batches(self, data_spec: DataSpec, ranks: Ranks) -> Iterator[Any]:
        set_epoch(data_spec.dataloader, self.state.timestamp.num_batches)
        yield from common_batches(iter(data_spec.dataloader), data_spec, self.state.dataloader_len, ranks)

    @error_context.stage("a prediction")
    def _predict(
        self, batch: Any, data_spec: DataSpec, ranks: Ranks, padding: Padding, microbatch_size: int | None, keeps: bool
    ) -> list[Any]:
        """Return the outputs of each microbatch of a batch, without those of a repeated sample."""
        state, run_event = self.state, self.engine.run_event
        num_samples, num_tokens = data_spec.get_num_samples_in_batch(batch), data_spec.get_num_tokens_in_batch(batch)
        num_repeated, has_repeated = padding.in_batch(num_samples)
        # `split_batch` would warn about a last batch that is smaller than a microbatch.
        is_whole = microbatch_size is None or num_samples <= microbatch_size
        microbatches = [batch] if is_whole else split(data_spec, batch, microbatch_size)
        outputs: list[Any] = []
        for index, (microbatch, is_counted) in enumerate(counted_parts(microbatches, data_spec, has_repeated)):
            on_device = transform("microbatch_transforms", data_spec, state.device.batch_to_device(microbatch))
            state.batch = self.strategy.prepare_batch(on_device)
            # After the first microbatch is on the device, since callbacks expect a prepared batch.
            if index == 0:
                run_event(Event.PREDICT_BATCH_START)
            run_event(Event.PREDICT_BEFORE_FORWARD)
            with self.autocast():
                state.outputs = state.model(state.batch)
            run_event(Event.PREDICT_AFTER_FORWARD)
            # Moved to the CPU at once, so that the outputs of all batches need not fit on the device.
            outputs += [DeviceCPU().batch_to_device(state.outputs)] if keeps and is_counted else []
        ranks.start_total(num_samples, num_tokens, self._clock.end_batch_s)
        samples, tokens, seconds = ranks.total()
        state.predict_timestamp = state.predict_timestamp.to_next_batch(
            samples=samples - num_repeated, tokens=tokens, duration=datetime.timedelta(seconds=seconds)
        )
        return outputs


def _join(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.ndim else torch.stack(list(parts))
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts]) for key in cast("Mapping[Any, Any]", first)}
    if isinstance(first, (list, tuple)):
        kind: Any = type(cast(object, first))
        return kind(_join(items) for items in zip(*parts, strict=True))
    return first

"""Evaluation of one evaluator over its dataloader: its events, forward passes and metrics."""

import datetime
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from composer.trainer._autocast import Autocast
from composer.trainer._batch import cut
from composer.trainer._blame import in_stage, name_setters
from composer.trainer._caller import level_of_user
from composer.trainer._clock import Clock
from composer.trainer._fitting import halve, release_memory
from composer.trainer._out_of_memory import Attempts, Stage
from composer.trainer._padding import Padding, without_last
from composer.trainer._ranks import Ranks, next_batch
from composer.trainer._undo import MetricsUndo
from composer.trainer._users_functions import transform_batch, transform_microbatch
from composer_checkpoint.data_position import set_epoch
from composer_dist import dist, get_global_rank, get_world_size
from composer_dist.ddp import share_buffers
from composer_dist.strategy import Strategy
from composer_events.data_spec import DataSpec
from composer_events.engine import Engine
from composer_events.evaluator import Evaluator
from composer_events.event import Event
from composer_events.logger import Logger
from composer_events.metric_entries import by_entry
from composer_events.state import State
from composer_models import ComposerModel, model_eval_mode
from composer_time import Time, Timestamp

_NO_BATCH: Any = object()


class Evaluation:
    """Runs evaluators: events, forward passes, metrics.

    Every sample counts once, also where a DistributedSampler repeats some so that each rank has as many.
    """

    def __init__(
        self,
        state: State,
        engine: Engine,
        logger: Logger,
        strategy: Strategy,
        *,
        model: ComposerModel,
        autocast: Autocast,
    ) -> None:
        self._state = state
        self._strategy = strategy
        self._engine = engine
        self._logger = logger
        self._model = model
        self._eval_forward = _of_batch(model.eval_forward)
        self._autocast = autocast
        self._attempts = Attempts(strategy, ValueError)
        self._clock = Clock()

    def run(
        self,
        evaluator: Evaluator,
        metrics: Mapping[str, Any],
        subset_num_batches: int = -1,
        open_batches: Callable[[Evaluator], Iterator[Any]] | None = None,
    ) -> None:
        """Evaluate over one dataloader, log the metrics, and leave the state's dataloader and mode as they were.

        A dataloader that yields no batch is warned about, and its metrics stay as they were.

        Args:
            evaluator: Says over which.
            metrics: Those of the evaluator, by name.
            subset_num_batches: How many batches to read; -1 for all.
            open_batches: Begins to read the dataloader, in place of `iter`.
        """
        state, run_event = self._state, self._engine.run_event
        before = (state.dataloader, state.dataloader_label, state.dataloader_len)
        state.eval_timestamp = Timestamp()
        try:
            with torch.no_grad(), model_eval_mode(state.model):
                state.set_dataloader(evaluator.dataloader.dataloader, evaluator.label, subset_num_batches)
                run_event(Event.EVAL_START)
                share_buffers(state.model)  # by now those of an average, if algorithms put one into the model
                for metric in metrics.values():
                    state.device.module_to_device(metric).reset()
                ranks, padding = Ranks(self._strategy), Padding(evaluator.dataloader.dataloader)
                ranks.begin(evaluator.dataloader)
                self._clock.start_batch()
                for state.batch in self._batches(evaluator, ranks, open_batches):
                    self._evaluate_batch(evaluator, metrics, ranks, padding)
                if evaluator.auto_microbatching:
                    key = f"trainer/{evaluator.label}/device_eval_microbatch_size"
                    self._logger.log_metrics({key: evaluator.device_eval_microbatch_size})
                if state.eval_timestamp.num_batches > 0:
                    self._report(evaluator.label, metrics)
                else:
                    _warn_of_nothing(evaluator)
                run_event(Event.EVAL_END)
        finally:
            restore_dataloader(state, *before)

    @in_stage("the dataloader of an evaluation")
    def _batches(
        self, evaluator: Evaluator, ranks: Ranks, open_batches: Callable[[Evaluator], Iterator[Any]] | None
    ) -> Iterator[Any]:
        state, spec = self._state, evaluator.dataloader
        length = state.dataloader_len
        set_epoch(spec.dataloader, state.timestamp.num_batches)
        batches = iter(spec.dataloader) if open_batches is None else open_batches(evaluator)
        while True:
            may_read = length is None or state.eval_timestamp.batch < length
            num_read = state.eval_timestamp.num_batches
            batch = next_batch(batches, spec.dataloader, num_read, _NO_BATCH) if may_read else _NO_BATCH
            if not ranks.all_have_a_batch(batch is not _NO_BATCH):
                break
            yield transform_batch(spec, batch)

    @in_stage("an evaluation")
    def _evaluate_batch(self, evaluator: Evaluator, metrics: Mapping[str, Any], ranks: Ranks, padding: Padding) -> None:
        state, run_event, spec = self._state, self._engine.run_event, evaluator.dataloader
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
        samples, tokens, seconds = ranks.total(num_samples, num_tokens, self._clock.end_batch_s())
        state.eval_timestamp = state.eval_timestamp.to_next_batch(
            samples=samples - num_repeated, tokens=tokens, duration=datetime.timedelta(seconds=seconds)
        )
        run_event(Event.EVAL_BATCH_END)

    def _evaluate_microbatches(
        self, evaluator: Evaluator, metrics: Mapping[str, Any], ranks: Ranks, has_repeated: bool
    ) -> None:
        spec = evaluator.dataloader
        try:
            microbatches = cut(self._state.batch, spec, evaluator.device_eval_microbatch_size)
        except Exception as error:
            name_setters(error, self._state, (Event.EVAL_BATCH_START,))
            raise
        parts = [(microbatch, True) for microbatch in microbatches]
        if has_repeated:
            parts[-1] = without_last(microbatches[-1], spec)
        if self._strategy.meets_in_forward and not ranks.keep_step:
            # The last one again, uncounted, for the ranks that have more of them.
            parts += [(microbatches[-1], False)] * (ranks.most(len(parts)) - len(parts))
        if not evaluator.auto_microbatching:
            self._evaluate_parts(spec, parts, metrics)
            return
        with self._attempts.meeting(sync=False):
            self._evaluate_parts(spec, parts, metrics)

    def _evaluate_parts(self, spec: DataSpec, parts: Sequence[tuple[Any, bool]], metrics: Mapping[str, Any]) -> None:
        """Evaluate microbatches, of which some do not count."""
        state, run_event = self._state, self._engine.run_event
        for microbatch, is_counted in parts:
            on_device = state.device.batch_to_device(microbatch)
            state.batch = self._strategy.prepare_batch(transform_microbatch(spec, on_device))
            run_event(Event.EVAL_BEFORE_FORWARD)
            with self._autocast():
                state.outputs = self._eval_forward(state.batch)
            run_event(Event.EVAL_AFTER_FORWARD)
            if is_counted:
                self._update(metrics)

    def _evaluate_until_it_fits(
        self, evaluator: Evaluator, metrics: Mapping[str, Any], evaluate: Callable[[], None]
    ) -> None:
        """Evaluate a batch, with microbatches of half the size on all ranks whenever it does not fit on one of them."""
        state, undo = self._state, MetricsUndo(metrics)
        batch = state.batch
        while not self._attempts.succeeds(evaluate, Stage.GRADIENTS):
            state.batch, state.outputs = batch, torch.empty(0)
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
                stacklevel=level_of_user(),
            )
            release_memory()

    def _update(self, metrics: Mapping[str, Any]) -> None:
        state = self._state
        with self._autocast():
            for metric in metrics.values():
                state.metric_outputs = self._model.update_metric(state.batch, state.outputs, metric) or {}

    def _report(self, label: str, metrics: Mapping[str, Any]) -> None:
        _fill_shorter_lists(metrics)
        values = {name: metric.compute() for name, metric in metrics.items()}
        self._state.eval_metric_values.update(values)
        self._logger.log_metrics({f"metrics/{label}/{name}": value for name, value in by_entry(values).items()})


def restore_dataloader(state: State, dataloader: Any, label: str | None, length: Time[int] | None) -> None:
    """Put back the dataloader that a state had before, with the length it had there."""
    state.set_dataloader(dataloader, label, -1 if length is None else length)


def _fill_shorter_lists(metrics: Mapping[str, Any]) -> None:
    """Give every rank as many tensors in each list of a metric as the others have, by adding empty ones.

    torchmetrics gathers lists element by element, and for a rank that has none, such as one without samples, it makes
    up a flat one of float32, whatever the others have. Every rank must call this.
    """
    parts = [part for metric in metrics.values() for part in metric.modules()]
    lists = [[value for value in getattr(part, "metric_state", {}).values() if type(value) is list] for part in parts]
    if get_world_size() == 1 or not any(lists):
        return
    own = [[[_kind_of(element) for element in found] for found in of_part] for of_part in lists]
    for part, of_part, *of_ranks in zip(parts, lists, *dist.all_gather_object(own), strict=True):
        longest = [max(of_list, key=len) for of_list in zip(*of_ranks, strict=True)]
        if any(None in kinds for kinds in longest):  # a metric with more than tensors gathers them its own way
            continue
        for found, kinds, *lengths in zip(of_part, longest, *of_ranks, strict=True):
            if min(map(len, lengths)) < len(kinds):
                found[:] = map(torch.atleast_1d, found)  # a number has no empty form
                found += [torch.empty(0, *kind[1], dtype=kind[0], device=part.device) for kind in kinds[len(found) :]]


def _kind_of(element: Any) -> tuple[torch.dtype, torch.Size] | None:
    return (element.dtype, element.shape[1:]) if isinstance(element, torch.Tensor) else None


def _warn_of_nothing(evaluator: Evaluator) -> None:
    warnings.warn(
        f"No batches were evaluated for global rank {get_global_rank()}: the dataloader of evaluator "
        f"{evaluator.label!r} yielded none. An iterator, for one, can be read only once.",
        stacklevel=level_of_user(),
    )


def _of_batch(eval_forward: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return `eval_forward` as a function of the batch alone, also where its author gave `outputs` no default."""
    outputs = inspect.signature(eval_forward).parameters.get("outputs")
    if outputs is not None and outputs.default is inspect.Parameter.empty:
        return functools.partial(eval_forward, outputs=None)
    return eval_forward

"""Prediction: the model's outputs for the batches of a dataloader."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from composer.trainer import _error_context as error_context
from composer.trainer._arguments import check_iterable, check_subset
from composer.trainer._data import Clock
from composer.trainer._evaluation import Padding, restore_dataloader, without_last
from composer.trainer._rank_sync import Ranks, next_batch
from composer.trainer._step import split, transform
from composer_dist.devices import DeviceCPU
from composer_events.arguments import check_flags
from composer_events.data_position import set_epoch
from composer_events.data_spec import DataSpec, ensure_data_spec
from composer_events.event import Event
from composer_models import model_eval_mode
from composer_time import Timestamp

if TYPE_CHECKING:
    from composer.trainer._step import Autocast
    from composer_dist.strategy import Strategy
    from composer_events.engine import Engine
    from composer_events.state import State


_NO_BATCH: Any = object()


def check_prediction(dataloader: Any, subset_num_batches: Any, microbatch_size: Any, return_outputs: Any) -> DataSpec:
    """Check the arguments of `predict`, and return the dataloader as a DataSpec."""
    check_flags(return_outputs=return_outputs)
    check_iterable("dataloader", dataloader)
    data_spec = ensure_data_spec(dataloader)
    check_subset("subset_num_batches", subset_num_batches)
    is_size = isinstance(microbatch_size, int) and not isinstance(microbatch_size, bool) and microbatch_size > 0
    if microbatch_size is not None and not is_size:
        raise ValueError(
            f"device_predict_microbatch_size={microbatch_size!r} must be a whole number of samples greater than 0, or "
            "None for whole batches."
        )
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
        before = (state.dataloader, state.dataloader_label, state.dataloader_len)
        state.predict_timestamp = Timestamp()
        outputs: list[Any] = []
        try:
            with torch.no_grad(), model_eval_mode(state.model):
                state.set_dataloader(data_spec.dataloader, "predict", subset_num_batches)
                run_event(Event.PREDICT_START)
                ranks, padding = Ranks(self.strategy), Padding(data_spec.dataloader)
                ranks.begin(data_spec, listens=bool(state.callbacks))
                self._clock.start_batch()
                for batch in self._batches(data_spec, ranks):
                    parts = self._predict(batch, data_spec, ranks, padding, microbatch_size, keeps)
                    outputs += [_join(parts)] if keeps and parts else []
                    run_event(Event.PREDICT_BATCH_END)
                run_event(Event.PREDICT_END)
        finally:
            restore_dataloader(state, *before)
        return outputs

    @error_context.stage("the dataloader of a prediction")
    def _batches(self, data_spec: DataSpec, ranks: Ranks) -> Iterator[Any]:
        state = self.state
        length = state.dataloader_len
        set_epoch(data_spec.dataloader, state.timestamp.num_batches)
        batches = iter(data_spec.dataloader)
        while True:
            # Every rank must reach the collective below, even one without a batch.
            may_read = length is None or state.predict_timestamp.batch < length
            num_read = state.predict_timestamp.num_batches
            batch = next_batch(batches, data_spec.dataloader, num_read, _NO_BATCH) if may_read else _NO_BATCH
            if not ranks.all_have_a_batch(batch is not _NO_BATCH):
                break
            yield transform("batch_transforms", data_spec, batch)

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
        parts = [(microbatch, True) for microbatch in microbatches]
        if has_repeated:
            parts[-1] = without_last(microbatches[-1], data_spec)
        outputs: list[Any] = []
        for index, (microbatch, is_counted) in enumerate(parts):
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
        samples, tokens, seconds = ranks.total(num_samples, num_tokens, self._clock.end_batch_s())
        state.predict_timestamp = state.predict_timestamp.to_next_batch(
            samples=samples - num_repeated, tokens=tokens, duration=datetime.timedelta(seconds=seconds)
        )
        return outputs


def _join(parts: Sequence[Any]) -> Any:
    """Join the outputs of microbatches to those of the batch."""
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

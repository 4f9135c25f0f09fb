"""Text generation from prompts during training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from composer_dist import dist
from composer_dist.devices import get_precision_context
from composer_dist.reproducibility import seed_context
from composer_dist.wrapping import unwrap_model
from composer_events.arguments import check_counts, to_time
from composer_events.callback import Callback
from composer_events.event import Event
from composer_events.intervals import create_interval_scheduler
from composer_events.logger import Logger
from composer_events.state import State
from composer_models.base import model_eval_mode
from composer_time import Time, TimeUnit

__all__ = ["Generate"]


class Generate(Callback):
    """Generate text from prompts, at intervals and at the end of training, and log it as the table `generations`.

    The model must have a method `generate`, like Hugging Face models, and a `tokenizer`. Sampling does not affect
    training: it is seeded with the run's seed and the batch, and the random generators are restored. Every rank
    generates, as sharded models require, and rank 0 logs.

    Args:
        prompts: The prompts.
        interval: Interval: epochs, a timestring or a `Time`.
        batch_size: Number of prompts per forward pass. Default: all.
        **generate_kwargs: Further arguments of `generate`, such as `max_new_tokens`.

    Raises:
        ValueError: If `prompts` is empty or the batch size is not positive; in training, if the model cannot
            generate.

    Example:
        >>> generate = Generate(['The capital of Peru is'], interval='500ba', max_new_tokens=20)
    """

    def __init__(
        self,
        prompts: Sequence[str],
        interval: str | int | Time[int],
        batch_size: int | None = None,
        **generate_kwargs: Any,
    ) -> None:
        self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not self.prompts:
            raise ValueError(f"prompts={prompts!r} must be a sequence of texts, one or more.")
        self.batch_size = len(self.prompts) if batch_size is None else batch_size
        check_counts(batch_size=self.batch_size)
        self.generate_kwargs = generate_kwargs
        self._is_due = create_interval_scheduler(to_time("interval", interval, TimeUnit.EPOCH))

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Generate at the interval."""
        self._generate_if_due(Event.BATCH_CHECKPOINT, state, logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Generate at the interval."""
        self._generate_if_due(Event.EPOCH_CHECKPOINT, state, logger)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Generate at the interval."""
        self._generate_if_due(Event.ITERATION_CHECKPOINT, state, logger)

    def generate(self, state: State, logger: Logger) -> None:
        """Generate and log. Every rank must call this.

        Raises:
            ValueError: If the model has no `generate` or no tokenizer.
        """
        model, tokenizer = _generating(state.model)
        # The same seed on all ranks, so that they sample the same tokens.
        seed = state.rank_zero_seed + state.timestamp.num_batches
        with model_eval_mode(model), _padding_left(tokenizer), seed_context(seed), torch.no_grad():
            inputs: Mapping[str, Any] = tokenizer(self.prompts, return_tensors="pt", padding=True)
            texts: list[str] = []
            for start in range(0, len(self.prompts), self.batch_size):
                part = slice(start, start + self.batch_size)
                batch = {name: inputs[name][part] for name in ("input_ids", "attention_mask")}
                texts += self._texts(model, tokenizer, batch, state)
        if dist.get_global_rank() == 0:
            rows = [list(row) for row in zip(self.prompts, texts, strict=True)]
            logger.log_table(columns=["prompt", "generation"], rows=rows, name="generations")

    def _generate_if_due(self, event: Event, state: State, logger: Logger) -> None:
        if state.get_elapsed_duration() is not None and self._is_due(state, event):
            self.generate(state, logger)

    def _texts(self, model: Any, tokenizer: Any, batch: dict[str, Any], state: State) -> list[str]:
        """Return the continuation of each prompt on rank 0, and empty strings on the other ranks, which do not log."""
        on_device = state.device.batch_to_device(batch)
        if hasattr(model, "dummy_forward_called"):
            model.dummy_forward_called = False
        with get_precision_context(state.precision, state.precision_config):
            # Every forward pass of a sharded model is a collective, so no rank may stop before the others.
            output = model.generate(**on_device, synced_gpus=dist.get_world_size() > 1, **self.generate_kwargs)
        if dist.get_global_rank() != 0:
            return [""] * len(batch["input_ids"])
        rows = zip(batch["input_ids"].tolist(), output.tolist(), strict=True)
        return tokenizer.batch_decode([_after(prompt, row) for prompt, row in rows], skip_special_tokens=True)


def _generating(model: Any) -> tuple[Any, Any]:
    """Return the model without its parallel wrappers, and its tokenizer."""
    model = unwrap_model(model)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None or not hasattr(model, "generate"):
        raise ValueError(
            f"{type(model).__name__} cannot generate text: it needs a method 'generate' and a tokenizer, as "
            f"HuggingFaceModel(..., tokenizer=tokenizer) has."
        )
    return model, tokenizer


def _after(prompt: list[int], row: list[int]) -> list[int]:
    # Decoder-only models repeat the prompt, encoder-decoder models do not.
    return row[len(prompt) :] if row[: len(prompt)] == prompt else row


@contextmanager
def _padding_left(tokenizer: Any) -> Iterator[None]:
    """Pad prompts on the left, since text is generated on the right, by default with the end-of-text token."""
    side, pads = tokenizer.padding_side, tokenizer.pad_token_id is not None
    tokenizer.padding_side = "left"
    if not pads:
        tokenizer.pad_token = tokenizer.eos_token
    try:
        yield
    finally:
        tokenizer.padding_side = side
        if not pads:
            tokenizer.pad_token = None

"""Attention window warm-up: let tokens attend to near tokens only at the start of training."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from composer_algorithms._arguments import check_counts
from composer_algorithms._method import NO_LENGTH, Method, count_or_warn, parse_time, refuse_conflicts
from composer_algorithms.metadata import METHODS
from composer_dist.wrapping import unwrap_model
from composer_events import Event, Logger, State
from composer_time import Time, TimeUnit

__all__ = ["METADATA", "AttentionWindowWarmup", "attention_window"]

METADATA = METHODS["attention_window"]

# Models of transformers whose layers all have the window of the config, or attend to all tokens if it is `None`. Others
# with windows name the layers that have them in `layer_types`.
_OF_ALL_LAYERS = frozenset({"ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"})


@contextmanager
def attention_window(model: nn.Module, window: int) -> Generator[int]:
    """Limit attention to the last `window` tokens inside a `with` block, around the forward and the backward pass.

    Supported are `ComposerGPT` and models of transformers with sliding windows, such as Mistral, Phi-3 or Gemma. Where
    only some layers have a window, as in Gemma, the others keep attending to all tokens.

    Args:
        model: Has its own attention again after the block.
        window: Number of tokens that a token attends to, itself included.

    Yields:
        The number of modules and configurations with the window.

    Raises:
        ValueError: If `window` is less than 1.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=8, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=8))
        >>> with attention_window(model, 4) as num_changed:
        ...     num_changed, model.model.window
        (1, 4)

    Reference:
        Jordan et al., modded-nanogpt, 2024, https://github.com/KellerJordan/modded-nanogpt.
    """
    check_counts(window=window)
    own = [(holder, getattr(holder, name), name) for holder, name in _holders(model)]
    try:
        for holder, _, name in own:
            setattr(holder, name, window)
        yield len(own)
    finally:
        for holder, value, name in own:
            setattr(holder, name, value)


@dataclass(repr=False, eq=False)
class AttentionWindowWarmup(Method):
    """Increase the window of attention during training, from a few tokens to all.

    From `BATCH_START` to `BATCH_END` it applies `attention_window`, with a window that grows from `initial_window`
    towards `final_window` in `num_windows` steps of equal time. They are multiples of `initial_window`. After
    `duration`, the window is not limited. In evaluations and checkpoints it never is.

    Args:
        duration: Length of the warm-up, such as `'0.5dur'`, `'1000ba'` or `'2ep'`.
        initial_window: First window, in tokens. Use a multiple of the block size of the attention kernel.
        final_window: The length of sequences, or the window of the model.
        num_windows: Number of windows. `torch.compile` compiles the model for each of them.

    Raises:
        ValueError: If a number is less than 1, or `final_window` is not larger than `initial_window`; on `INIT`, if
            there is another one.

    Warns:
        NoEffectWarning: On `INIT`, if the model has no such attention.

    Example:
        >>> warmup = AttentionWindowWarmup(initial_window=128, final_window=1024)
        >>> [warmup.window(done) for done in (0, 0.25, 0.5, 0.75)]
        [128, 256, 512, 768]

    Reference:
        See `attention_window`.
    """

    acts_on = frozenset({Event.INIT, Event.BATCH_START, Event.BATCH_END})
    surgery_rank = 7
    conflicts_with = MappingProxyType(
        {"AttentionWindowWarmup": "Each would restore the window of the other as that of the model. Leave one out."}
    )

    duration: str | Time[Any] = "0.5dur"
    initial_window: int = 128
    final_window: int = 1024
    num_windows: int = 4

    def __post_init__(self) -> None:
        self.duration = self._length = parse_time("duration", self.duration)
        check_counts(initial_window=self.initial_window, num_windows=self.num_windows)
        check_counts(self.initial_window + 1, final_window=self.final_window)
        self._windows = ExitStack()

    def window(self, warmup_done: float) -> int:
        """Return the window.

        Args:
            warmup_done: Completed fraction of the warm-up, less than 1.
        """
        step = int(warmup_done * self.num_windows) / self.num_windows
        num_blocks = 1 + int(step * (self.final_window / self.initial_window - 1))
        return self.initial_window * num_blocks

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Validate the model on INIT, limit attention on BATCH_START, and restore it on BATCH_END."""
        if event == Event.INIT:
            refuse_conflicts(self, state)
            advice = "Use ComposerGPT or a model of transformers with sliding windows, such as Mistral"
            count = len(list(_holders(state.model)))
            count_or_warn("AttentionWindowWarmup", state.model, "attention with a window", count, advice)
            return
        self._windows.close()  # also of a batch that has failed
        if event == Event.BATCH_END:
            return
        done = self._warmup_done(state)
        if done < 1:
            window = self.window(done)
            self._windows.enter_context(attention_window(state.model, window))
            if logger is not None:
                logger.log_metrics({"attention_window/window": window})

    def _warmup_done(self, state: State) -> float:
        value, unit = self._length.value, self._length.unit
        if unit == TimeUnit.DURATION:
            if state.max_duration is None:
                raise RuntimeError(NO_LENGTH.format("AttentionWindowWarmup"))
            value, unit = value * state.max_duration.value, state.max_duration.unit
        if unit == TimeUnit.EPOCH and state.dataloader_len is not None:  # the epoch does not change within an epoch
            value, unit = value * state.dataloader_len.value, TimeUnit.BATCH
        # A product such as 0.1 * 30 may be too large by rounding.
        return state.timestamp.get(unit).value / value * (1 + 1e-9) if value else 1.0


def _holders(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield the objects with a window, and its name."""
    from composer_models.gpt import GPT  # loads the metrics

    modules = list(unwrap_model(model).modules())
    yield from ((module, "window") for module in modules if isinstance(module, GPT))
    # Masks are made from the config; fused kernels get the attribute of the layer.
    yield from ((each, "sliding_window") for each in modules if isinstance(getattr(each, "sliding_window", None), int))
    configs = {id(config): config for each in modules if (config := getattr(each, "config", None)) is not None}
    for config in configs.values():
        types = getattr(config, "layer_types", None) or ()
        if getattr(config, "model_type", None) in _OF_ALL_LAYERS or "sliding_attention" in types:
            yield config, "sliding_window"

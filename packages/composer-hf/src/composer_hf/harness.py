"""Evaluation of language models on the tasks of EleutherAI's lm-evaluation-harness during training."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from composer_dist import dist
from composer_dist.devices import get_precision_context
from composer_dist.reproducibility import seed_context
from composer_dist.wrapping import unwrap_model
from composer_events import Callback, Event, Logger, State, create_interval_scheduler
from composer_events.arguments import check_counts, check_texts, to_interval
from composer_models import MissingConditionalImportError, model_eval_mode
from composer_time import Time

__all__ = ["LMEvalHarness"]

_EVENTS: Final = (Event.BATCH_END, Event.EPOCH_END, Event.ITERATION_END, Event.FIT_END)


class LMEvalHarness(Callback):
    """Evaluate on tasks of lm-eval, at intervals and at the end of training.

    Logs `metrics/<label>/<task>/<metric>`, the same values on all ranks. Ranks divide the requests, so every rank must
    have this callback; rank and world size do not change results. Training continues as without the callback: the
    model's mode and the random generators are restored. Parameters may be sharded by FSDP2.

    Args:
        tasks: Names of tasks or groups, task configurations as mappings, or `Task` objects.
        interval: How often: epochs, a timestring, a `Time`, or a function of the state and the event.
        tokenizer: Tokenizer of transformers with an `eos_token_id`. Default: the `tokenizer` of the model.
        label: Names the results.
        include_path: Folder with further tasks in YAML files.
        num_fewshot: Examples in each prompt. Default: as the task defines.
        limit: Evaluate this number of documents of each task, or this fraction if less than 1.
        batch_size: Requests per forward pass of a rank.
        max_length: Tokens in a sequence; earlier ones are left out. Default: as many as the model has positions for.

    Raises:
        MissingConditionalImportError: If lm-eval is not installed.
        ValueError: If an argument is invalid; when training begins, if the tokenizer is missing, it has no
            `eos_token_id`, the maximum length is unknown, or a task does not exist; in evaluation, if a continuation is
            longer than `max_length` or a task samples.

    Example:
        >>> callback = LMEvalHarness(['hellaswag', 'arc_easy'], interval='1000ba', limit=500)

    Reference:
        Biderman et al., "Lessons from the Trenches on Reproducible Evaluation of Language Models", 2024,
        arXiv:2405.14782.
    """

    def __init__(
        self,
        tasks: Sequence[Any],
        interval: int | str | Time[Any] | Callable[[State, Event], bool] = "1ep",
        *,
        tokenizer: Any = None,
        label: str = "lm_eval",
        include_path: str | None = None,
        num_fewshot: int | None = None,
        limit: int | float | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
    ) -> None:
        try:
            import lm_eval as harness  # optional
        except ImportError as error:
            raise MissingConditionalImportError("lm-eval", "lm-eval", distribution="composer-hf") from error
        self.tasks = [tasks] if isinstance(tasks, str | Mapping) else list(tasks)
        if not self.tasks:
            raise ValueError(f"tasks={tasks!r} must be a list with one task or more.")
        check_texts(label=label)
        check_counts(batch_size=batch_size)
        if max_length is not None:
            check_counts(max_length=max_length)
        self.tokenizer, self.label = tokenizer, label
        self.batch_size, self.max_length = batch_size, max_length
        self._evaluate = partial(
            harness.simple_evaluate,
            num_fewshot=num_fewshot,
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
        )
        self._include_path = include_path
        self._loaded: list[Any] | None = None  # tasks and groups of lm-eval
        found = to_interval("interval", interval)
        # On *_END events, which come before *_CHECKPOINT, so that checkpoints include the results.
        self._is_due = (
            found
            if callable(found)
            else create_interval_scheduler(found, checkpoint_events=False, final_events={Event.FIT_END})
        )

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Check the model and load the tasks when training begins, and evaluate at the interval."""
        if event == Event.FIT_START:
            self._language_model(state)
            with seed_context(0):
                self._loaded = self._loaded or self._load()
        elif event in _EVENTS and state.get_elapsed_duration() is not None and self._is_due(state, event):
            self.evaluate(state, logger)

    def evaluate(self, state: State, logger: Logger) -> dict[str, float]:
        """Evaluate, log, and return the results by `metrics/<label>/<task>/<metric>`. Every rank must call this."""
        language_model = self._language_model(state)
        precision = get_precision_context(state.precision, state.precision_config)
        with model_eval_mode(language_model.model), seed_context(0), torch.no_grad(), precision:
            from lm_eval.tasks import TaskManager  # optional

            if self._loaded is None:
                self._loaded = self._load()
            index = TaskManager(include_defaults=False)  # empty: tasks are objects
            found: Any = self._evaluate(language_model, tasks=self._loaded, task_manager=index)
        # lm-eval returns results where the local rank is 0.
        results = {} if found is None else _numbers(found["results"], self.label)
        shared = [results]
        dist.broadcast_object_list(shared, src=0)
        logger.log_metrics(shared[0])
        return shared[0]

    def _load(self) -> list[Any]:
        """Return the tasks and groups as objects, with their datasets."""
        from lm_eval.tasks import TaskManager  # optional

        # Looking tasks up by name reads thousands of files, which takes seconds.
        has_names = any(map(_names_a_task, self.tasks))
        manager = TaskManager(include_path=self._include_path, include_defaults=has_names)
        try:
            found: Any = manager.load(self.tasks)
        except KeyError as error:  # an unknown name, or an entry or split that the task's dataset does not have
            raise ValueError(
                f"the tasks of LMEvalHarness cannot be loaded: {error.args[0]}. The command `lm_eval ls tasks` lists "
                f"the names; include_path=... adds a folder of further tasks."
            ) from error
        nested = {name for names in found["group_map"].values() for name in names}
        return [each for name, each in {**found["groups"], **found["tasks"]}.items() if name not in nested]

    def _language_model(self, state: State) -> Any:
        model: Any = unwrap_model(state.model)
        tokenizer = self.tokenizer if self.tokenizer is not None else getattr(model, "tokenizer", None)
        if getattr(tokenizer, "eos_token_id", None) is None:
            lacks = "the tokenizer is missing" if tokenizer is None else "the tokenizer has no eos_token_id"
            raise ValueError(
                f"{type(model).__name__} cannot be evaluated by lm-eval: {lacks}. Pass LMEvalHarness(tokenizer=...) a "
                f"tokenizer of transformers with an end-of-text token."
            )
        max_length = self.max_length or _num_positions(model)
        if max_length is None:
            raise ValueError(
                f"the configuration of {type(model).__name__} has no max_position_embeddings. Pass "
                f"LMEvalHarness(max_length=...) the maximum number of tokens."
            )
        from composer_hf._harness_model import HarnessModel  # imports lm-eval

        axes = getattr(state.device_mesh, "mesh_dim_names", None) or ()
        return HarnessModel(
            model, tokenizer, state.device, max_length, self.batch_size, divides="tensor_parallel" not in axes
        )


def _names_a_task(task: Any) -> bool:
    """Return whether a task is a name, or a configuration that changes a task of that name."""
    return isinstance(task, str) or (isinstance(task, Mapping) and "dataset_path" not in task)


def _num_positions(model: Any) -> int | None:
    config = getattr(model, "config", None) or getattr(getattr(model, "model", None), "config", None)
    names = ("max_position_embeddings", "max_seq_len")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _numbers(results: Mapping[str, Mapping[str, Any]], label: str) -> dict[str, float]:
    return {
        f"metrics/{label}/{task}/{name.removesuffix(',none')}": float(value)
        for task, values in results.items()
        for name, value in values.items()
        if isinstance(value, int | float) and "_stderr" not in name and name != "sample_len"
    }

"""Untied head: an output layer with its own weights, from the start or from a time of training."""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._method import ModelSurgery, check_initialized, count_or_warn, is_reached, parse_time, report
from composer_algorithms._optimizer_surgery import Replacement, as_optimizers, follow_replacements
from composer_algorithms.metadata import METHODS
from composer_dist.wrapping import unwrap_model
from composer_events import Event, Logger, State
from composer_time import Time

__all__ = ["METADATA", "UntiedHead", "apply_untied_head"]

METADATA = METHODS["untied_head"]

_log = logging.getLogger("composer.algorithms.untied_head")

_MISSING = "output layer that shares one weight, and nothing else, with the embeddings"
_ADVICE = "Use ComposerGPT or a causal language model of transformers with tie_word_embeddings=True, such as GPT-2"


def apply_untied_head(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer] | None = None) -> int:
    """Give the output layer of a language model its own copy of the weights that it shares with the embeddings.

    Supported are `ComposerGPT`, whose copy is `model.unembedding`, and models of transformers that share this weight
    only, such as GPT-2 or Llama with `tie_word_embeddings=True`, which becomes false. Call it before the model is
    wrapped for DDP or FSDP. Outputs stay the same. A second call changes nothing, with the same warning.

    Args:
        model: Changed in place.
        optimizers: Existing optimizers of the model. The copy joins the group of the embeddings, with a copy of their
            state, such as the moments of Adam.

    Returns:
        The number of output layers with new weights.

    Raises:
        ValueError: If the weights are on the meta device.

    Warns:
        NoEffectWarning: If the model has no such output layer.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=8, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=8))
        >>> apply_untied_head(model)
        1
        >>> torch.equal(model.model.unembedding.weight, model.model.wte.weight)
        True

    Reference:
        Jordan et al., "modded-nanogpt: Speedrunning the NanoGPT baseline", 2024. Press and Wolf, "Using the Output
        Embedding to Improve Language Models", EACL 2017, arXiv:1608.05859, ties the weights.
    """
    return count_or_warn("UntiedHead", model, _MISSING, len(_untie(model, as_optimizers(optimizers))), _ADVICE)


@dataclass(repr=False, eq=False)
class UntiedHead(ModelSurgery):
    """Train the output layer of a language model apart from the embeddings, from the start or from a time on.

    On `INIT` it applies `apply_untied_head` to `state.model` and `state.optimizers`. Until `after`, both copies are
    trained as one weight: on `AFTER_TRAIN_BATCH` the gradient of the output layer is added to that of the embeddings
    and set to 0, and on `BATCH_END` the weights are copied. At `after`, the state of the optimizer is copied. The
    model and its checkpoints have the same parameters before and after `after`, and wrappers need not be changed.
    Loading a checkpoint of the changed model applies it.

    Args:
        after: Time in training, such as `'0.7dur'` or `'1000ba'`. `None` for the start.

    Raises:
        TypeError: If `after` has no unit.
        ValueError: If `after` is not a time; on INIT, under DeepSpeed if it is not `None`.

    Example:
        >>> UntiedHead(after="0.7dur")
        UntiedHead(after='0.7dur')

    Reference:
        See `apply_untied_head`.
    """

    acts_on = frozenset({Event.INIT, Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH, Event.BATCH_END})
    surgery_rank = 5
    runs_before = frozenset({"EMA", "SWA"})  # they read the weights
    runs_after = frozenset({"GradientClipping"})  # which reverses on AFTER_TRAIN_BATCH: the gradients are added first

    after: str | Time[Any] | None = None

    def __post_init__(self) -> None:
        self._time = None if self.after is None else parse_time("after", self.after)
        self.after = self._time
        self._is_tied = self._time is not None
        self._pairs: list[tuple[Any, Any]] = []

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Change the model on INIT, and later keep the weights equal until they are untied."""
        if event == Event.INIT:
            if self._time is not None and state.deepspeed_enabled:
                raise ValueError(
                    f"{self!r} cannot be used under DeepSpeed, which does not leave gradients in the parameters. Use "
                    f"after=None, or train with DDP or parallelism_config={{'fsdp': {{}}}}."
                )
            self._is_tied = self._time is not None
            self._pairs = _untie(state.model, tuple(state.optimizers))
            count = count_or_warn("UntiedHead", state.model, _MISSING, len(self._pairs), _ADVICE)
            report(_log, logger, {"untied_head/num_output_layers": count})
        elif self._time is not None and self._is_tied:
            # LayerFreezing freezes the embeddings alone.
            pairs = [(one.weight, head.weight) for one, head in self._pairs if one.weight.requires_grad]
            if event == Event.AFTER_TRAIN_BATCH:
                _add_gradients(pairs)
                return
            _copy_weights(pairs)  # also before the second gradient of a step of SAM, which moves only the embeddings
            if event == Event.BEFORE_TRAIN_BATCH and is_reached(self._time, state, "after"):
                self._is_tied = False
                _copy_states(pairs, state.optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return whether the weights are still trained as one."""
        return {**super().state_dict(), "is_tied": self._is_tied}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load whether the weights are still trained as one."""
        super().load_state_dict(state)
        self._is_tied = self._is_tied and bool(state.get("is_tied", True))


def _untie(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[Any, Any]]:
    """Return the embeddings and the output layers, which were tied."""
    old_params: dict[str, Tensor] = dict(model.named_parameters())
    pairs: list[tuple[Any, Any]] = []
    for owner, embedding in _tied(model):
        weight = embedding.weight
        check_initialized("UntiedHead", weight)
        head = _head_of(owner, weight)
        head.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        pairs.append((embedding, head))
    by_id = {id(head.weight): embedding.weight for embedding, head in pairs}
    predecessors = {name: by_id[id(one)] for name, one in model.named_parameters() if id(one) in by_id}
    trained = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    if trained.issuperset(map(id, by_id.values())) and pairs:
        follow_replacements([Replacement("", {**old_params, **predecessors}, model)], model, optimizers)
    _copy_states([(embedding.weight, head.weight) for embedding, head in pairs], optimizers)
    return pairs


def _head_of(owner: Any, weight: Tensor) -> Any:
    """Return the output layer, which a model of transformers has already, and describes as tied."""
    if hasattr(owner, "unembedding"):
        owner.unembedding = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
        return owner.unembedding
    for config in (owner.config, owner.config.get_text_config()):
        config.tie_word_embeddings = False
    for module in owner.modules():
        if hasattr(module, "all_tied_weights_keys"):  # found by transformers 5 when the model was made
            module.all_tied_weights_keys = {}
    return owner.get_output_embeddings()


def _tied(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield models whose output layer and embeddings are one weight, and the embeddings."""
    from composer_models.gpt import GPT  # loads the metrics

    for module in list[Any](unwrap_model(model).modules()):
        if isinstance(module, GPT):
            if module.unembedding is None:
                yield module, module.wte
        elif callable(getattr(module, "get_output_embeddings", None)):
            head: Any = module.get_output_embeddings()
            names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            # One name more than weights. The biases of BERT are tied as well, and so are the embeddings of T5.
            is_only = len(names) == len(list(module.parameters())) + 1
            if head is not None and is_only and head.weight is module.get_input_embeddings().weight:
                yield module, module.get_input_embeddings()


@torch.no_grad()
def _add_gradients(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for embedding, head in pairs:
        if head.grad is not None:
            # Not None, so that the gradients of all microbatches and ranks have the same parameters.
            embedding.grad = head.grad.clone() if embedding.grad is None else embedding.grad.add_(head.grad)
            head.grad.zero_()


@torch.no_grad()
def _copy_weights(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for embedding, head in pairs:
        head.copy_(embedding)


def _copy_states(pairs: Sequence[tuple[Tensor, Tensor]], optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        for embedding, head in pairs:
            if embedding in optimizer.state:
                optimizer.state[head] = copy.deepcopy(optimizer.state[embedding])

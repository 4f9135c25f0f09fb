"""Gated linear units: feed-forward layers of BERT in which one projection gates another one."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._method import ModelSurgery
from composer_algorithms.metadata import METHODS
from composer_algorithms.module_surgery import count_module_instances, replace_module_classes
from composer_events import Event, Logger, State
from composer_models.optional import MissingConditionalImportError

__all__ = ["BERTGatedFFOutput", "GatedLinearUnits", "apply_gated_linear_units", "METADATA"]

METADATA = METHODS["gated_linear_units"]

_log = logging.getLogger("composer.algorithms.gated_linear_units")


class BERTGatedFFOutput(nn.Module):
    """A complete feed-forward layer with a gate, a replacement for transformers' `BertOutput`.

    Computes `layernorm(wo(dropout(act(gated_layer(x)) * non_gated_layer(x))) + residual)`.

    Args:
        d_embed: Features of input and output.
        d_ff: Features of the hidden layer.
        dropout_rate: Rate of the dropout before the last projection.
        act_fn: Activation function.
        layernorm_eps: Epsilon of the layer norm.
        gated_layer_bias: Whether the projection into the activation has a bias.
        non_gated_layer_bias: Whether the other projection has a bias.

    Example:
        >>> import torch
        >>> layer = BERTGatedFFOutput(8, 16, dropout_rate=0.1, act_fn=nn.GELU(), layernorm_eps=1e-12)
        >>> x = torch.rand(2, 3, 8)
        >>> layer(x, x).shape
        torch.Size([2, 3, 8])

    Reference:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202, eq. (6), which has no biases.
    """

    def __init__(
        self,
        d_embed: int,
        d_ff: int,
        dropout_rate: float,
        act_fn: Callable[[Tensor], Tensor],
        layernorm_eps: float,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
    ) -> None:
        super().__init__()
        self.gated_layer = nn.Linear(d_embed, d_ff, bias=gated_layer_bias)
        self.non_gated_layer = nn.Linear(d_embed, d_ff, bias=non_gated_layer_bias)
        self.wo = nn.Linear(d_ff, d_embed)
        self.dropout = nn.Dropout(dropout_rate)
        self.act = act_fn
        self.layernorm = nn.LayerNorm(d_embed, eps=layernorm_eps)

    def forward(self, hidden_states: Tensor, residual_connection: Tensor) -> Tensor:
        """Transform `hidden_states` and add the residual connection."""
        gate = self.act(self.gated_layer(hidden_states))
        hidden_states = self.wo(self.dropout(gate * self.non_gated_layer(hidden_states)))
        return self.layernorm(hidden_states + residual_connection)


_Activation = Callable[[Tensor], Tensor]
# Functions that a checkpoint can name, by their names in transformers.
_NAMED_FUNCTIONS = {F.gelu: "gelu", F.relu: "relu", F.silu: "silu", torch.relu: "relu", torch.tanh: "tanh"}


def apply_gated_linear_units(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    act_fn: str | _Activation | None = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
) -> None:
    """Replace the feed-forward layers of a BERT model with gated ones, with new weights.

    Each `BertIntermediate` becomes an `nn.Identity`, each `BertOutput` a `BERTGatedFFOutput`. The weights are drawn as
    in the model's configuration (`initializer_range`). A second call changes nothing.

    Args:
        model: A transformers BERT model, or a module with one in its attribute `model`. Changed in place.
        optimizers: Existing optimizers of the model, which get the new parameters.
        act_fn: Activation: a function, or its name in transformers (`'gelu'`). That of the model when `None`.
        gated_layer_bias: Whether the projections into the activation have a bias.
        non_gated_layer_bias: Whether the other projections have a bias.

    Raises:
        MissingConditionalImportError: If transformers is not installed.
        TypeError: If the model is not a BERT model of transformers.
        ValueError: If `act_fn` is `None` and the model has no activation, or several kinds; or if its name is unknown.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> apply_gated_linear_units(model)
        >>> type(model.encoder.layer[0].output).__name__
        'BERTGatedFFOutput'

    Reference:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202. The paper scales the intermediate size by
        2/3; here it is that of the model.
    """
    bert_classes = _bert_classes()
    bert: Any = model
    while not isinstance(bert, bert_classes.BertPreTrainedModel) and isinstance(
        getattr(bert, "model", None), nn.Module
    ):
        bert = bert.model  # the attribute of HuggingFaceModel and similar wrappers
    if not isinstance(bert, bert_classes.BertPreTrainedModel):
        raise TypeError(
            f"the model is a {type(model).__qualname__}, and gated linear units are for BERT models of transformers "
            f"(BertPreTrainedModel): leave GatedLinearUnits out, or pass such a model."
        )
    intermediates = [one for one in bert.modules() if isinstance(one, bert_classes.BertIntermediate)]
    if not intermediates:
        return  # already replaced by an earlier call
    activation = _activation(act_fn, intermediates)

    def gated(module: Any, module_index: int) -> nn.Module:
        layer = BERTGatedFFOutput(
            d_embed=module.dense.out_features,
            d_ff=module.dense.in_features,
            dropout_rate=module.dropout.p,
            act_fn=copy.deepcopy(activation),  # an activation module must not be shared between layers
            layernorm_eps=module.LayerNorm.eps,
            gated_layer_bias=gated_layer_bias,
            non_gated_layer_bias=non_gated_layer_bias,
        )
        for linear in (layer.gated_layer, layer.non_gated_layer, layer.wo):
            nn.init.normal_(linear.weight, std=float(getattr(bert.config, "initializer_range", 0.02)))
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        return layer

    policies = {
        bert_classes.BertIntermediate: lambda module, module_index: nn.Identity(),
        bert_classes.BertOutput: gated,
    }
    replace_module_classes(model, policies, optimizers)


def _bert_classes() -> Any:
    try:
        from transformers.models.bert import modeling_bert  # an optional dependency, and slow to import
    except ImportError as error:
        raise MissingConditionalImportError(
            "transformers", "transformers", distribution="composer-algorithms"
        ) from error
    return modeling_bert


def _activation(act_fn: str | _Activation | None, intermediates: Sequence[Any]) -> _Activation:
    if isinstance(act_fn, str):
        from transformers.activations import ACT2FN  # already loaded with the classes of BERT

        if act_fn not in ACT2FN:
            raise ValueError(f"act_fn={act_fn!r} names no activation of transformers: use one of {sorted(ACT2FN)}.")
        return ACT2FN[act_fn]
    if act_fn is not None:
        return act_fn
    found = [module.intermediate_act_fn for module in intermediates]
    kinds = {type(one) if isinstance(one, nn.Module) else one for one in found}
    if len(kinds) != 1 or found[0] is None:
        raise ValueError(
            f"act_fn=None takes the activation of the model, and this one has {kinds}: pass the one to use as act_fn."
        )
    return found[0]


@dataclass(repr=False, eq=False)
class GatedLinearUnits(ModelSurgery):
    """Replace the feed-forward layers of BERT in `state.model` with gated ones on `INIT`, in place.

    The optimizers' parameter groups are updated: new weights join the groups of old weights, biases those of old
    biases. It acts before algorithms that wrap modules. Loading a checkpoint of the changed model applies the
    algorithm, if `act_fn` is `None`, a name, or a torch function with a name in transformers; a checkpoint cannot hold
    other functions.

    Args:
        act_fn: Activation: a function, or its name in transformers (`'gelu'`). That of the model when `None`.
        gated_layer_bias: Whether the projections into the activation have a bias.
        non_gated_layer_bias: Whether the other projections have a bias.

    Raises:
        MissingConditionalImportError: If transformers is not installed.

    Example:
        >>> GatedLinearUnits(act_fn="relu")
        GatedLinearUnits(act_fn='relu', gated_layer_bias=False, non_gated_layer_bias=False)

    Reference:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202; Dauphin et al., "Language Modeling with
        Gated Convolutional Networks", 2016, arXiv:1612.08083.
    """

    surgery_rank = 1

    act_fn: str | _Activation | None = None
    gated_layer_bias: bool = False
    non_gated_layer_bias: bool = False

    def __post_init__(self) -> None:
        _bert_classes()  # raises early if transformers is missing

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Replace the feed-forward layers."""
        apply_gated_linear_units(state.model, state.optimizers, **self.arguments())
        count = count_module_instances(state.model, BERTGatedFFOutput)
        _log.info("GatedLinearUnits: %d feed-forward layers have a gate.", count)

    def __repr__(self) -> str:
        act_fn: Any = self.act_fn
        if callable(act_fn) and act_fn in _NAMED_FUNCTIONS:
            act_fn = _NAMED_FUNCTIONS[act_fn]
        return super().__repr__().replace(f"act_fn={self.act_fn!r}", f"act_fn={act_fn!r}")

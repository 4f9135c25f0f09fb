"""The feed-forward layer of BERT with a gate."""

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["BERTGatedFFOutput"]


class BERTGatedFFOutput(nn.Module):
    """A whole feed-forward layer with a gate, in the place of transformers' `BertOutput`.

    Computes `layernorm(wo(dropout(act(gated_layer(x)) * non_gated_layer(x))) + residual)`.

    Args:
        d_embed: Features of the input and the output.
        d_ff: Features in between.
        dropout_rate: Of the dropout before the last projection.
        act_fn: The activation function.
        layernorm_eps: Of the layer norm.
        gated_layer_bias: Whether the projection into the activation has a bias.
        non_gated_layer_bias: Whether the other one has.

    Example:
        >>> import torch
        >>> layer = BERTGatedFFOutput(8, 16, dropout_rate=0.1, act_fn=nn.GELU(), layernorm_eps=1e-12)
        >>> x = torch.rand(2, 3, 8)
        >>> layer(x, x).shape
        torch.Size([2, 3, 8])

    Reference:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202, eq. (6). There without biases.
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
        """Transform `hidden_states`, and add the residual connection."""
        gate = self.act(self.gated_layer(hidden_states))
        hidden_states = self.wo(self.dropout(gate * self.non_gated_layer(hidden_states)))
        return self.layernorm(hidden_states + residual_connection)

"""Small GPT: a causal transformer with pre-layer normalization and tied embeddings."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from composer_models.base import ComposerModel
from composer_models.metrics import counting_from_zero, metrics_by_name
from composer_models.nlp_metrics import LanguageCrossEntropy, LanguagePerplexity
from composer_models.packing import document_numbers
from composer_models.targets import IGNORED
from composer_models.token_losses import TokenLosses

__all__ = ["GPTBlock", "GPT", "ComposerGPT", "GPTConfig"]

# Entries of a recipe's model section that are not settings of the model.
_COMPANIONS = frozenset({"name", "tokenizer_name"})

_SIZES = ("d_model", "n_heads", "n_layers", "vocab_size", "max_seq_len")
_RATES = ("attn_pdrop", "resid_pdrop", "emb_pdrop")
_SCALES = ("mlp_ratio", "init_std")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Settings of a GPT.

    Args:
        d_model: The width of the residual stream; a multiple of `n_heads`.
        n_heads: Attention heads per block.
        n_layers: Number of blocks.
        vocab_size: Size of the vocabulary. A multiple of 64 is fastest on GPUs.
        max_seq_len: The maximum sequence length, in tokens.
        mlp_ratio: The width of an MLP's hidden layer, as a multiple of `d_model`.
        init_std: The standard deviation of the initial weights.
        attn_pdrop: Dropout rate of attention weights, in [0, 1).
        resid_pdrop: Dropout rate of the residual updates of each block, in [0, 1).
        emb_pdrop: Dropout rate of embeddings, in [0, 1).
        attn_impl: `'torch'` applies any attention mask. `'flash'` omits the mask, as PyTorch's flash kernels require:
            sequences must be padded on the right, where causal attention of real tokens never sees the padding.
        device: The device on which parameters are created; `'meta'` for shapes without values.

    Raises:
        TypeError: If a number is given as a string or a bool.
        ValueError: If a setting is out of its range, or `d_model` is not a multiple of `n_heads`.

    Example:
        >>> GPTConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=256, max_seq_len=128).mlp_ratio
        4
    """

    d_model: int
    n_heads: int
    n_layers: int
    vocab_size: int
    max_seq_len: int
    mlp_ratio: int | float = 4
    init_std: float = 0.02
    attn_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    emb_pdrop: float = 0.0
    attn_impl: Literal["torch", "flash"] = "torch"
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        for names, is_valid, what in (
            (_SIZES, lambda value: isinstance(value, int) and value >= 1, "a whole number of 1 or more"),
            (_RATES, lambda value: 0 <= value < 1, "a rate of dropout in [0, 1)"),
            (_SCALES, lambda value: 0 < value < math.inf, "positive and finite"),
        ):
            for name in names:
                # bool is a subclass of int, so d_model=True would create a model of width 1.
                if isinstance(value := getattr(self, name), bool) or not isinstance(value, Real):
                    raise TypeError(f"{name}={value!r} must be a number, without quotes; got a {type(value).__name__}.")
                if not is_valid(value):
                    raise ValueError(f"{name}={value!r} must be {what}.")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model={self.d_model} cannot be split over n_heads={self.n_heads}: make it a multiple of n_heads."
            )
        if self.attn_impl not in ("torch", "flash"):
            raise ValueError(f"attn_impl={self.attn_impl!r} is not known: choose 'torch' or 'flash'.")

    @classmethod
    def from_any(cls, cfg: "GPTConfig | Mapping[str, Any] | object") -> Self:
        """Convert a mapping, or an object with attributes, to settings.

        Args:
            cfg: A `GPTConfig`, which is returned unchanged; a mapping, which may also have the entries `name` and
                `tokenizer_name`; or any object, such as parsed command line arguments.

        Returns:
            The settings.

        Raises:
            TypeError: If a number is given as a string or a bool.
            ValueError: If a setting without default is missing, or a mapping has an unknown entry.
        """
        if isinstance(cfg, cls):
            return cfg
        fields = {field.name: field.default for field in dataclasses.fields(cls)}
        if isinstance(cfg, Mapping):
            mapping = cast("Mapping[str, Any]", cfg)
            given = {key: value for key, value in mapping.items() if key not in _COMPANIONS}
            if unknown := sorted(given.keys() - fields.keys(), key=str):
                raise ValueError(f"cfg has the entries {unknown}, which a GPT does not have: {', '.join(fields)}.")
        else:
            given = {name: getattr(cfg, name) for name in fields if hasattr(cfg, name)}
        if missing := [name for name in fields if name not in given and fields[name] is dataclasses.MISSING]:
            raise ValueError(f"cfg={cfg!r} lacks {', '.join(missing)}, which a GPT needs.")
        return cls(**given)


class ResidualProjection(nn.Linear):
    """Linear layer whose output is added to the residual stream, and whose initial weights are therefore smaller."""


class CausalSelfAttention(nn.Module):
    """Causal self-attention: each token attends to itself and the tokens before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.dropout = config.attn_pdrop
        # One large matrix product is faster than three.
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, device=config.device)
        self.out = ResidualProjection(config.d_model, config.d_model, device=config.device)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the attention output of each token; the shapes are those of `GPTBlock.forward`."""
        # Dimensions: b batch, l tokens, h heads, d width of a head.
        q_bhld, k_bhld, v_bhld = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed_bhld = F.scaled_dot_product_attention(
            q_bhld,
            k_bhld,
            v_bhld,
            attn_mask=mask,
            # A function, not a module, so evaluation mode must be applied here.
            dropout_p=self.dropout if self.training else 0.0,
            # The kernels accept a mask or `is_causal`; the mask includes the causal one.
            is_causal=mask is None,
        )
        return self.out(mixed_bhld.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    """Transformer block: attention and an MLP, each after a layer norm and with a residual connection.

    Args:
        config: The settings of the model.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = int(config.mlp_ratio * config.d_model)
        self.ln_1 = nn.LayerNorm(config.d_model, device=config.device)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.d_model, device=config.device)
        self.mlp = nn.Sequential(
            nn.Linear(config.d_model, hidden, device=config.device),
            nn.GELU(),
            ResidualProjection(hidden, config.d_model, device=config.device),
        )
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add the outputs of attention and the MLP to each token.

        Args:
            x: Shape `(batch, tokens, d_model)`.
            mask: True where a token may attend to another, shape `(batch, 1, tokens, tokens)`; causal if `None`.

        Returns:
            The shape of `x`.
        """
        x = x + self.dropout(self.attn(self.ln_1(x), mask))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """Transformer that computes logits of the next token from token ids.

    The token embeddings and the output layer share their weights, unless there is an `unembedding`. Weights are
    initialized from a normal distribution with standard deviation `init_std`, those of projections into the residual
    stream with `init_std / sqrt(2 * n_layers)`, biases with 0.

    Args:
        config: The settings.

    Attributes:
        window: Number of tokens that a token attends to, itself included; all tokens before it if `None`. A window is
            applied as a mask, also with `attn_impl='flash'`.
        token_losses: Function of hidden states, the weight of the output layer and targets, which is called in training
            in place of the output layer if there are targets.
        logit_softcap: Keyword argument `softcap` of `token_losses`.
        unembedding: Weights of the output layer; those of the embeddings if `None`.

    Reference:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    token_losses: Callable[..., TokenLosses] | None = None
    logit_softcap: float | None = None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.window: int | None = None
        self.wte = nn.Embedding(config.vocab_size, config.d_model, device=config.device)
        self.unembedding: nn.Embedding | None = None
        self.wpe = nn.Embedding(config.max_seq_len, config.d_model, device=config.device)
        self.emb_drop = nn.Dropout(config.emb_pdrop)
        self.blocks = nn.ModuleList([GPTBlock(config) for _ in range(config.n_layers)])
        self.ln_f = nn.LayerNorm(config.d_model, device=config.device)
        # Parameters on the meta device have no values yet; `param_init_fn` is called after materialization.
        if not self.wte.weight.is_meta:
            self.apply(self.param_init_fn)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor | TokenLosses:
        """Compute the logits of the token after each token.

        Args:
            input_ids: Shape `(batch, tokens)`.
            attention_mask: The same shape, true or 1 for real tokens, 0 for padding. If `None`, all tokens are real. If
                it is applied, positions count only real tokens, so that padding on the left has no effect on them.
            position_ids: The same shape. Wherever positions do not increase by 1 another document begins, whose tokens
                attend to each other only.
            targets: The token after each token, for `token_losses`.

        Returns:
            Shape `(batch, tokens, vocab_size)`, or the result of `token_losses`.

        Raises:
            ValueError: If there are more than `max_seq_len` tokens, or `position_ids` with `attn_impl='flash'`.
        """
        num_tokens = input_ids.shape[1]
        if position_ids is not None and self.config.attn_impl == "flash":
            raise ValueError(
                "the batch has position_ids, which separate documents, and attn_impl='flash' applies no mask. Use "
                "attn_impl='torch', or leave position_ids out."
            )
        if num_tokens > self.config.max_seq_len:
            raise ValueError(
                f"input_ids has {num_tokens} tokens in a sequence and the model positions for "
                f"max_seq_len={self.config.max_seq_len}: truncate the sequences, or build the model for longer ones."
            )
        mask = None
        positions = torch.arange(num_tokens, device=input_ids.device)
        padding = None if self.config.attn_impl == "flash" else attention_mask
        if self.window is not None or padding is not None or position_ids is not None:
            mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=input_ids.device).tril()
            if self.window is not None:
                mask = mask.triu(1 - self.window)
            if padding is not None:
                is_real = padding.bool()
                # Every token may attend to itself, even padding: a softmax over no tokens is NaN in some kernels.
                itself = torch.eye(num_tokens, dtype=torch.bool, device=is_real.device)
                mask = (mask & is_real[:, None, None, :]) | itself
                positions = (is_real.cumsum(dim=1) - 1).clamp(min=0)  # -1 before the first real token
            if position_ids is not None:
                documents = document_numbers(position_ids)
                mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
                positions = position_ids
        x = self.emb_drop(self.wte(input_ids) + self.wpe(positions))
        for block in self.blocks:
            x = block(x, mask)
        if self.training and self.token_losses is not None and targets is not None:
            return self.token_losses(self.ln_f(x), self.output_weight, targets, softcap=self.logit_softcap)
        # Not a second module with a shared weight, which state dicts would hold twice and sharding could untie.
        return F.linear(self.ln_f(x), self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """The weight of the output layer."""
        return (self.wte if self.unembedding is None else self.unembedding).weight

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Select the blocks, as units of sharding and for activation checkpointing."""
        return isinstance(module, GPTBlock)

    activation_checkpointing_fn = fsdp_wrap_fn

    def param_init_fn(self, module: nn.Module) -> None:
        """Initialize the parameters that a module itself owns.

        Args:
            module: A module of this model, changed in place.
        """
        if isinstance(module, nn.Linear):
            # Each of n_layers blocks adds to the residual stream twice; its variance should not grow with depth.
            scale = 1 / math.sqrt(2 * self.config.n_layers) if isinstance(module, ResidualProjection) else 1.0
            nn.init.normal_(module.weight, std=self.config.init_std * scale)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.init_std)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()


class ComposerGPT(ComposerModel):
    """GPT for causal language modeling, with cross entropy and perplexity as metrics.

    Batches are mappings with `input_ids` and `labels` of shape `(batch, tokens)`, and an optional `attention_mask` and
    `position_ids` of that shape. The target of a token is the label of the next one; the label -100 is ignored.
    Positions that start again separate packed documents, see `PackedDataset`.

    Args:
        cfg: A `GPTConfig`, or a mapping or an object with the same settings.

    Raises:
        TypeError: If a number is given as a string or a bool.
        ValueError: If a setting is missing, unknown or out of its range.

    Example:
        >>> model = ComposerGPT(dict(d_model=16, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=8))
        >>> ids = torch.arange(8).unsqueeze(0)
        >>> batch = {"input_ids": ids, "labels": ids}
        >>> model(batch).shape
        torch.Size([1, 8, 32])
    """

    def __init__(self, cfg: GPTConfig | Mapping[str, Any] | object) -> None:
        super().__init__()
        self.model = GPT(GPTConfig.from_any(cfg))
        with counting_from_zero():
            self.train_metrics = MetricCollection([LanguageCrossEntropy(), LanguagePerplexity()])
            self.val_metrics = MetricCollection([LanguageCrossEntropy(), LanguagePerplexity()])

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor | TokenLosses:
        """Compute the logits of the token after each token, or in training the losses if the model has a fused loss."""
        targets = None if self.model.token_losses is None or "labels" not in batch else _targets(batch)
        return self.model(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids"), targets)

    def loss(self, outputs: Tensor | TokenLosses, batch: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the mean cross entropy of the tokens that are not ignored."""
        if isinstance(outputs, TokenLosses):
            return outputs.loss
        return F.cross_entropy(outputs.flatten(0, 1), _targets(batch).flatten(), ignore_index=IGNORED)

    def update_metric(self, batch: Mapping[str, Tensor], outputs: Tensor | TokenLosses, metric: Metric) -> None:
        """Update one metric with the logits or losses, and the next tokens."""
        metric.update(outputs, _targets(batch))

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the metrics of training or of evaluation by class name."""
        return metrics_by_name(self.train_metrics if is_train else self.val_metrics)

    def flops_per_batch(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of floating point operations to train on a batch, forward and backward.

        Six per parameter and token, and `12 * n_layers * d_model * tokens` for the attention of each token. The
        recomputation of activation checkpointing and the savings of causal kernels are not considered.

        Args:
            batch: The batch; only the shape of `input_ids` is used.

        Returns:
            The number of operations.

        Reference:
            Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, arXiv:2204.02311, appendix B.
        """
        num_sequences, num_tokens = batch["input_ids"].shape
        config = self.model.config
        # Tied weights count once, and so do untied ones: the output layer multiplies by them, the embedding reads rows.
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        if self.model.unembedding is not None:
            num_parameters -= self.model.wte.weight.numel()
        attention = 12 * config.n_layers * config.d_model * num_tokens
        return num_sequences * num_tokens * (6 * num_parameters + attention)


def _targets(batch: Mapping[str, Tensor]) -> Tensor:
    targets = batch["labels"].roll(-1, dims=1)  # a copy, so the next line does not change the batch
    targets[:, -1] = IGNORED
    return targets

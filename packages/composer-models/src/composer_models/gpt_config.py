"""The sizes and rates of a GPT."""

import dataclasses
import math
from collections.abc import Mapping
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal, Self, cast

import torch

__all__ = ["GPTConfig"]

# What a recipe's model section holds beside the settings of the model itself.
_COMPANIONS = frozenset({"name", "tokenizer_name"})

_SIZES = ("d_model", "n_heads", "n_layers", "vocab_size", "max_seq_len")
_RATES = ("attn_pdrop", "resid_pdrop", "emb_pdrop")
_SCALES = ("mlp_ratio", "init_std")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The settings of a GPT.

    Args:
        d_model: The width of the residual stream; a multiple of `n_heads`.
        n_heads: Attention heads in each block.
        n_layers: Blocks.
        vocab_size: Tokens in the vocabulary. A multiple of 64 is fastest on GPUs.
        max_seq_len: The longest sequence, in tokens.
        mlp_ratio: The width of an MLP's hidden layer, as a multiple of `d_model`.
        init_std: The standard deviation of the initial weights.
        attn_pdrop: The rate in [0, 1) at which attention weights are dropped.
        resid_pdrop: The rate in [0, 1) at which what a block adds to the residual stream is dropped.
        emb_pdrop: The rate in [0, 1) at which embeddings are dropped.
        attn_impl: `'torch'` heeds any attention mask. `'flash'` leaves the mask out, which PyTorch's flash kernels
            need: sequences must be padded on the right, where causal attention never looks back from a real token.
        device: Where parameters are created; `'meta'` for sizes without values.

    Raises:
        TypeError: If a number is given as a string or a bool.
        ValueError: If a setting is out of its range, or `d_model` is no multiple of `n_heads`.

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
        for name in (*_SIZES, *_RATES, *_SCALES):
            _check_number(name, getattr(self, name))
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is no size: give a whole number of 1 or more.")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model={self.d_model} cannot be split over n_heads={self.n_heads}: make it a multiple of n_heads."
            )
        for name in _RATES:
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value!r} is no rate of dropout: give a number in [0, 1).")
        for name in _SCALES:
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={value!r} is not positive and finite: give a number above 0.")
        if self.attn_impl not in ("torch", "flash"):
            raise ValueError(f"attn_impl={self.attn_impl!r} is not known: choose 'torch' or 'flash'.")

    @classmethod
    def from_any(cls, cfg: "GPTConfig | Mapping[str, Any] | object") -> Self:
        """Read settings from a mapping, or from an object that has them as attributes.

        Args:
            cfg: A `GPTConfig`, which comes back as it is; a mapping, which may also have the entries `name` and
                `tokenizer_name`; or any object, such as a parsed command line.

        Returns:
            The settings.

        Raises:
            TypeError: If a number is given as a string or a bool.
            ValueError: If a setting without default is missing, or a mapping has an entry that is none.
        """
        if isinstance(cfg, cls):
            return cfg
        names = [field.name for field in dataclasses.fields(cls)]
        if isinstance(cfg, Mapping):
            mapping = cast("Mapping[str, Any]", cfg)
            given = {key: value for key, value in mapping.items() if key not in _COMPANIONS}
            _check_known(given, names)
        else:
            given = {name: getattr(cfg, name) for name in names if hasattr(cfg, name)}
        required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
        if missing := [name for name in required if name not in given]:
            raise ValueError(f"cfg={cfg!r} lacks {', '.join(missing)}: a GPT needs {', '.join(required)}.")
        return cls(**given)


def _check_number(name: str, value: object) -> None:
    # A bool is an int to Python, and d_model=True would make a model of width 1.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__} and no number: give it without quotes, as in {name}=1 or "
            f"{name}=0.1 where a fraction makes sense."
        )


def _check_known(given: Mapping[str, Any], names: list[str]) -> None:
    for key in given:
        if key not in names:
            near = get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(names)}."
            raise ValueError(f"cfg has the entry {key!r}={given[key]!r}, which is no setting of a GPT: {hint}")

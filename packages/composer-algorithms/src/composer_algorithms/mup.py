"""MuP: initial weights, multipliers and learning rates that make the best hyperparameters independent of the width."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._arguments import check_counts
from composer_algorithms._method import ModelSurgery, check_initialized, record_in_config, report
from composer_algorithms._optimizer_surgery import as_optimizers
from composer_algorithms.metadata import METHODS
from composer_dist.wrapping import unwrap_model
from composer_events import Event, Logger, State

__all__ = ["CoordCheck", "MuP", "apply_mup", "coord_check", "METADATA"]

METADATA = METHODS["mup"]

_log = logging.getLogger("composer.algorithms.mup")

# The modules that compute queries, and into how many equal parts their output is divided, of which they are the first.
_QUERIES = {"qkv": 3, "c_attn": 3, "query": 1, "q_proj": 1}


@torch.no_grad()
def apply_mup(
    model: nn.Module,
    base_width: int,
    base_heads: int | None = None,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> None:
    """Parametrize a transformer so that hyperparameters tuned at `base_width` are the best ones at its width.

    With `m = width / base_width`:

    | weights | initial values | learning rate of Adam, AdamW | of SGD | multiplier |
    |---|---|---|---|---|
    | hidden matrices | `/ sqrt(m)` | `/ m` | | |
    | output layer | | | `* m` | input `/ m` |
    | embeddings, biases, norms | | | `* m` | |
    | attention, with `base_heads` | | | | queries `* sqrt(size of base heads / size of heads)` |

    The learning rate of matrices that Muon orthogonalizes is divided by `sqrt(m)` if its updates have the size of
    AdamW's (`adjust_lr_fn="match_rms_adamw"`), and is otherwise unchanged. Weight decay is multiplied by the inverse,
    so that each step removes the same part of a weight. Groups with several kinds of weights are divided. At
    `base_width` nothing changes.

    Supported are `ComposerGPT` and models of transformers that draw all matrices with one `initializer_range`, such as
    GPT-2, BERT, RoBERTa and Llama, freshly initialized. A second call changes only optimizers.

    Args:
        model: Changed in place; contains one of these models, or is one.
        base_width: The width (`d_model`, `hidden_size`) for which the hyperparameters are meant.
        base_heads: Number of attention heads at `base_width`. `None`: the heads have the same size at every width.
        optimizers: Existing optimizers of the model. Create PyTorch schedulers afterwards.

    Raises:
        ValueError: If the model or an optimizer is not supported, or weights are on the meta device.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=64, n_heads=4, n_layers=1, vocab_size=32, max_seq_len=8))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> apply_mup(model, base_width=16, optimizers=optimizer)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.01, 0.0025]

    Reference:
        Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer", NeurIPS
        2021, arXiv:2203.03466, table 8.
    """
    check_counts(base_width=base_width)
    if base_heads is not None:
        check_counts(base_heads=base_heads)
    transformer = _find_transformer(model)
    hidden = _hidden_matrices(transformer)
    check_initialized("MuP", *hidden)
    m = transformer.width / base_width
    changes = [
        change for optimizer in as_optimizers(optimizers) for change in _rate_changes(optimizer, hidden, m)
    ]  # all errors come before the first change
    if not hasattr(transformer.module, "_mup_base"):
        _scale_queries(transformer, base_width, base_heads)
        transformer.scale_head(1 / m)
        for weight in hidden:
            weight.mul_(m**-0.5)
        transformer.module._mup_base = base_width
        record_in_config(model, "mup", {"base_width": base_width, "base_heads": base_heads})
    for change in changes:
        change()


class MuP(ModelSurgery):
    """Parametrize a transformer so that hyperparameters tuned at a small width are the best ones at any width.

    On `INIT` it applies `apply_mup` to `state.model` and `state.optimizers`, after the algorithms that replace modules.
    Loading a checkpoint of the changed model applies it.

    Args:
        base_width: The width (`d_model`, `hidden_size`) for which the hyperparameters are meant.
        base_heads: Number of attention heads at `base_width`. `None`: the heads have the same size at every width.

    Raises:
        ValueError: If a number is less than 1; on INIT, see `apply_mup`.

    Example:
        >>> MuP(base_width=256)
        MuP(base_width=256, base_heads=None)

    Reference:
        See `apply_mup`.
    """

    surgery_rank = 6  # on the matrices that are left after all replacements

    def __init__(self, base_width: int, base_heads: int | None = None) -> None:
        check_counts(base_width=base_width)
        if base_heads is not None:
            check_counts(base_heads=base_heads)
        self.base_width = base_width
        self.base_heads = base_heads

    def apply(self, event: Event, state: State, logger: Logger | None) -> None:
        """Change the model and the optimizers, and log the number of hidden matrices."""
        apply_mup(state.model, self.base_width, self.base_heads, state.optimizers)
        report(_log, logger, {"mup/num_hidden_matrices": len(_hidden_matrices(_find_transformer(state.model)))})


@dataclass(frozen=True, slots=True)
class CoordCheck:
    """Sizes of the activations of a model at several widths.

    Attributes:
        widths: The widths.
        scales: For each layer the mean absolute output at each width.
    """

    widths: tuple[int, ...]
    scales: Mapping[str, tuple[float, ...]]

    @property
    def growth(self) -> dict[str, float]:
        """The exponent with which the output of each layer grows with the width; it should be about 0, or below."""
        x = torch.tensor(self.widths, dtype=torch.float64).log()
        x -= x.mean()
        return {
            name: float((x * torch.tensor(scales, dtype=torch.float64).log()).sum() / (x * x).sum())
            for name, scales in self.scales.items()
        }

    def __str__(self) -> str:
        size = max(map(len, self.scales))
        rows = [
            f"{name:{size}} {growth:7.2f}" + "".join(f" {scale:9.3g}" for scale in self.scales[name])
            for name, growth in self.growth.items()
        ]
        return "\n".join([f"{'layer':{size}}  growth" + "".join(f" {width:9}" for width in self.widths), *rows])


def coord_check(
    make_model: Callable[[int], nn.Module],
    batch: Any,
    widths: Sequence[int] = (64, 128, 256, 512, 1024),
    *,
    base_width: int | None = None,
    base_heads: int | None = None,
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    num_steps: int = 4,
) -> CoordCheck:
    """Train models of several widths for a few steps on one batch, and measure the size of their activations.

    Args:
        make_model: Returns a model with a `loss(outputs, batch)` for a width.
        batch: The batch.
        widths: The widths, two or more.
        base_width: See `apply_mup`. `None` trains without muP.
        base_heads: See `apply_mup`.
        make_optimizer: Returns the optimizer of a model. AdamW with a learning rate of 0.01 when `None`.
        num_steps: Number of steps before the measurement.

    Returns:
        The sizes. Printed, it is a table of them.

    Example:
        >>> from composer_models import ComposerGPT
        >>> def make_model(width):
        ...     return ComposerGPT(dict(d_model=width, n_heads=width // 8, n_layers=1, vocab_size=32, max_seq_len=8))
        >>> ids = torch.arange(16).view(2, 8)
        >>> check = coord_check(make_model, {"input_ids": ids, "labels": ids}, widths=(32, 64, 128), base_width=32)
        >>> max(check.growth.values()) < 0.2
        True
    """
    if len(widths) < 2:
        raise ValueError(f"widths={widths!r} must be two or more: the check compares them.")
    check_counts(num_steps=num_steps)
    scales: dict[str, list[float]] = {}
    with torch.random.fork_rng(), torch.enable_grad():
        for width in widths:
            torch.manual_seed(0)
            model: Any = make_model(width)
            make = make_optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
            optimizer = make(model)
            if base_width is not None:
                apply_mup(model, base_width, base_heads, optimizer)
            for _ in range(num_steps):
                optimizer.zero_grad()
                model.loss(model(batch), batch).backward()
                optimizer.step()
            for name, scale in _scales(model, batch).items():
                scales.setdefault(name, []).append(scale)
    return CoordCheck(tuple(widths), {name: tuple(each) for name, each in scales.items() if len(each) == len(widths)})


@torch.no_grad()
def _scales(model: nn.Module, batch: Any) -> dict[str, float]:
    """Return the mean absolute output of each layer that has weights, and of the model."""
    scales: dict[str, float] = {}

    def keep(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            scales[name] = float(output.abs().mean())

    layers = [(name, module) for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    handles = [module.register_forward_hook(partial(keep, name)) for name, module in layers]
    outputs = model(batch)
    for handle in handles:
        handle.remove()
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return {**scales, "logits": float(logits.abs().mean())}


@dataclass(frozen=True, slots=True)
class _Transformer:
    """A supported model.

    Attributes:
        module: The model itself, without what wraps it.
        width: The size of its residual stream.
        num_heads: Number of its attention heads.
        heads: Its output layers; empty if it multiplies by the embeddings.
        norm: The last norm, whose output goes to the embeddings; `None` if there are output layers.
    """

    module: Any
    width: int
    num_heads: int
    heads: tuple[nn.Module, ...]
    norm: nn.Module | None = None

    def scale_head(self, factor: float) -> None:
        if self.norm is not None:
            self.norm.register_forward_hook(partial(_scale_output, factor))
        for head in self.heads:
            head.register_forward_pre_hook(partial(_scale_input, factor))


def _find_transformer(model: nn.Module) -> _Transformer:
    from composer_models.gpt import GPT  # loads the metrics

    for module in unwrap_model(model).modules():
        config: Any = getattr(module, "config", None)
        if isinstance(module, GPT):
            return _Transformer(module, module.config.d_model, module.config.n_heads, (), module.ln_f)
        get_head = getattr(module, "get_output_embeddings", None)  # of all models of transformers
        if get_head is None or not hasattr(config, "initializer_range") or not hasattr(config, "hidden_size"):
            continue
        head = get_head()
        labels = getattr(config, "num_labels", None)
        heads = (
            [each for each in module.modules() if isinstance(each, nn.Linear) and each.out_features == labels]
            if head is None
            else [head]
        )
        if not heads:
            raise ValueError(f"MuP finds no output layer in {type(module).__qualname__}. Use a model with a head.")
        return _Transformer(module, config.hidden_size, config.num_attention_heads, tuple(heads))
    raise ValueError(
        f"MuP does not know how {type(unwrap_model(model)).__qualname__} is initialized. Use ComposerGPT, or a model "
        f"of transformers whose configuration has hidden_size and initializer_range, such as GPT-2, BERT or Llama."
    )


def _hidden_matrices(transformer: _Transformer) -> list[Tensor]:
    """Return the matrices whose both dims grow with the width."""
    ends = (*transformer.heads, *(each for each in transformer.module.modules() if isinstance(each, nn.Embedding)))
    others = {id(parameter) for module in ends for parameter in module.parameters(recurse=False)}
    return [each for each in transformer.module.parameters() if each.ndim >= 2 and id(each) not in others]


def _scale_queries(transformer: _Transformer, base_width: int, base_heads: int | None) -> None:
    if base_heads is None:
        return
    factor = math.sqrt(base_width / base_heads * transformer.num_heads / transformer.width)
    layers = [
        (module, _QUERIES[leaf])
        for name, module in transformer.module.named_modules()
        if (leaf := name.rpartition(".")[2]) in _QUERIES
    ]
    if not layers:
        raise ValueError(
            f"base_heads={base_heads!r} scales queries, and {type(transformer.module).__qualname__} has no layer named "
            f"{', '.join(_QUERIES)}. Leave base_heads out, and make the number of heads grow with the width."
        )
    for module, num_parts in layers:
        module.register_forward_hook(partial(_scale_first, factor, num_parts))


# Functions of the module, so that models with them can be copied and pickled.
def _scale_input(factor: float, module: nn.Module, arguments: Any) -> Any:
    return (arguments[0] * factor, *arguments[1:])


def _scale_output(factor: float, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return output * factor


def _scale_first(factor: float, num_parts: int, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    first = output.shape[-1] // num_parts
    return torch.cat([output[..., :first] * factor, output[..., first:]], dim=-1)


def _rate_changes(optimizer: Optimizer, hidden: Sequence[Tensor], m: float) -> Iterator[Callable[[], None]]:
    """Yield functions that change the groups of an optimizer; two for one that has both kinds of weights."""
    of_hidden = {id(weight) for weight in hidden}
    for group in list(optimizer.param_groups):
        inner, outer = _factors(optimizer, group, m)
        is_hidden = [id(parameter) in of_hidden for parameter in group["params"]]
        if all(is_hidden):
            yield partial(_scale_rate, optimizer, group, inner)
        elif not any(is_hidden) or inner == outer:
            yield partial(_scale_rate, optimizer, group, outer)
        else:
            yield partial(_divide, optimizer, group, is_hidden, inner, outer)


def _factors(optimizer: Optimizer, group: Mapping[str, Any], m: float) -> tuple[float, float]:
    """Return the factors of the learning rate of hidden matrices and of other weights."""
    if "adjust_lr_fn" in group and group.get("role", "muon") == "muon":
        return (m**-0.5 if group["adjust_lr_fn"] == "match_rms_adamw" else 1.0), 1.0
    if "betas" in group:
        return 1 / m, 1.0
    if "dampening" in group:
        return 1.0, m
    raise ValueError(
        f"MuP knows the learning rates of Adam, AdamW, Muon and SGD, not of {type(optimizer).__qualname__}. Use one of "
        f"these."
    )


def _divide(optimizer: Optimizer, group: dict[str, Any], is_hidden: Sequence[bool], inner: float, outer: float) -> None:
    """Move the hidden matrices of a group to a new one."""
    options = {name: value for name, value in group.items() if name not in ("params", "param_names", "initial_lr")}
    names, members = group.get("param_names"), group["params"]
    members = members if names is None else list(zip(names, members, strict=True))
    chosen = [member for member, is_one in zip(members, is_hidden, strict=True) if is_one]
    for name in ("params", "param_names"):
        if name in group:
            group[name] = [each for each, is_one in zip(group[name], is_hidden, strict=True) if not is_one]
    optimizer.add_param_group({**options, "params": chosen})
    _scale_rate(optimizer, optimizer.param_groups[-1], inner)
    _scale_rate(optimizer, group, outer)


def _scale_rate(optimizer: Optimizer, group: dict[str, Any], factor: float) -> None:
    if factor == 1.0:
        return
    for name in ("lr", "initial_lr"):
        if name in group:
            group[name] = group[name] * factor
    # Decay that is relative to the initial learning rate is not divided with it.
    if not getattr(optimizer, "has_relative_decay", False) and "weight_decay" in group:
        group["weight_decay"] = group["weight_decay"] / factor

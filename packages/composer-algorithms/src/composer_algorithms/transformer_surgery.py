"""Changes to transformers: zero initialization, QK-norm, value residual, capped logits, and squared ReLU."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_algorithms._arguments import check_interval
from composer_algorithms._method import (
    AppliedFunction,
    ModelSurgery,
    check_initialized,
    count_or_warn,
    own_configs,
    record_in_config,
)
from composer_algorithms._optimizer_surgery import Replacement, as_optimizers, follow_replacements
from composer_algorithms.module_surgery import replace_module_classes
from composer_dist.wrapping import unwrap_model

__all__ = [
    "LogitSoftcap",
    "QKNorm",
    "SquaredReLU",
    "ValueResidual",
    "ZeroInit",
    "apply_logit_softcap",
    "apply_qk_norm",
    "apply_squared_relu",
    "apply_value_residual",
    "apply_zero_init",
]

_Optimizers = Optimizer | Sequence[Optimizer] | None
# The last layers of residual branches in GPT-2 (c_proj), Llama and its relatives, and BERT; ComposerGPT has a class.
_RESIDUAL = re.compile(r"(^|\.)(c_proj|o_proj|down_proj|output\.dense)$")
_IN_BLOCK = re.compile(r"(.*?\.\d+)\.(.*)")  # the path of a block, and that of a layer in it
_FEED_FORWARD = re.compile(r"(^|\.)(mlp|intermediate)\.")
_CONFIG_NAMES = ("activation_function", "hidden_act", "hidden_activation")  # of GPT-2, Llama and Gemma
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_EPS = 1e-6


def apply_zero_init(model: nn.Module) -> int:
    """Set the last layer of each residual branch of a transformer to zero, so that each block is the identity.

    Supported are `ComposerGPT` and models of transformers that name these layers as GPT-2, BERT, Llama or Mistral do.
    The blocks of BERT, which end with a norm, are the identity on their normalized inputs. Use it before training.

    Args:
        model: Changed in place.

    Returns:
        The number of layers set to zero.

    Raises:
        ValueError: If the weights are on the meta device.

    Warns:
        NoEffectWarning: If the model has no such layer.
        UserWarning: If a block has such layers in only one of attention and feed-forward.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=8, n_heads=2, n_layers=3, vocab_size=32, max_seq_len=8))
        >>> apply_zero_init(model)
        6

    Reference:
        Zhang et al., "Fixup Initialization: Residual Learning Without Normalization", ICLR 2019, arXiv:1901.09321,
        section 3, rule 1.
    """
    from composer_models.gpt import ResidualProjection  # loads the metrics

    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ResidualProjection) or _RESIDUAL.search(name)
    }
    # The second layer of a factorized one.
    layers: list[Any] = [getattr(module, "module1", module) for module in found.values()]
    for layer in layers:
        check_initialized("ZeroInit", *layer.parameters())
        for parameter in layer.parameters(recurse=False):
            nn.init.zeros_(parameter)
    blocks: dict[bool, set[str]] = {True: set(), False: set()}  # of attention, and of feed-forward layers
    for match in filter(None, map(_IN_BLOCK.match, found)):
        blocks["att" in match[2]].add(match[1])
    if blocks[True] != blocks[False]:
        warnings.warn(
            f"ZeroInit sets only some residual branches of this {type(model).__qualname__} to zero, such as "
            f"{', '.join(list(found)[:2])}: not every block is the identity.",
            stacklevel=2,
        )
    return count_or_warn("ZeroInit", model, "known last layer of a residual branch", len(layers))


@dataclass(repr=False, eq=False)
class ZeroInit(AppliedFunction):
    """Set the last layer of each residual branch of a transformer to zero.

    On `INIT` it applies `apply_zero_init` to `state.model`, after algorithms that replace layers. Weights of a
    checkpoint are loaded later, so a resumed run is not affected.

    Example:
        >>> ZeroInit()
        ZeroInit()

    Reference:
        See `apply_zero_init`.
    """

    surgery_rank = 5
    function = staticmethod(apply_zero_init)
    counted = "zero_init/num_layers"


def apply_qk_norm(model: nn.Module, initial_scale: float | None = None, optimizers: _Optimizers = None) -> int:
    """Normalize the queries and keys of each attention head, so that attention scores are bounded.

    The scores of queries `q` and keys `k` of size `d` become `g * (q / |q|) . (k / |k|)`, where `|x|` is
    `sqrt(sum(x^2) + 1e-6 * d)`. Each layer learns its `g`, the parameter `qk_scale` of the layer that computes queries.
    It has one value, so weight decay pulls the scores of all heads towards 0; exclude it, like norms and biases.
    Rotary embeddings, which keep lengths, follow the normalization.

    Supported are `ComposerGPT` and models of transformers whose attention is named as in GPT-2, BERT, Llama or Mistral.
    A second call changes nothing.

    Args:
        model: Changed in place.
        initial_scale: Initial `g`. `sqrt(d)` when `None`, as with an RMS norm of queries and keys. The paper starts
            with `log2(L^2 - L)` for sequences of `L` tokens.
        optimizers: Existing optimizers of the model. The new parameters join the group of the first norm or bias.

    Returns:
        The number of attention layers with normalized queries and keys.

    Raises:
        ValueError: If `initial_scale` is not positive.

    Warns:
        NoEffectWarning: If the model has no such attention.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=8, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=8))
        >>> apply_qk_norm(model)
        1
        >>> model.model.blocks[0].attn.qkv.qk_scale.data
        tensor([2.])

    Reference:
        Henry et al., "Query-Key Normalization for Transformers", Findings of EMNLP 2020, arXiv:2010.04245.
    """
    if initial_scale is not None:
        check_interval("(0, inf)", initial_scale=initial_scale)
    optimizers = as_optimizers(optimizers)
    old_params: dict[str, Tensor] = dict(model.named_parameters())
    attentions = list(_find_attentions(model))
    for (queries, *others), head_size, scaling in attentions:
        if hasattr(queries, "qk_scale"):
            continue
        scale = head_size**0.5 if initial_scale is None else float(initial_scale)
        # Not a scalar, which FSDP2 cannot shard.
        queries.qk_scale = nn.Parameter(queries.weight.new_full((1,), scale))
        hook = _normalize_queries if others else _normalize_queries_and_keys
        queries.register_forward_hook(partial(hook, head_size, scaling))
        if others:
            others[0].register_forward_hook(partial(_normalize_keys, head_size))
    if optimizers:
        add_to_optimizers(model, old_params, optimizers)
    return count_or_warn("QKNorm", model, "attention layer of a supported kind", len(attentions))


@dataclass(repr=False, eq=False)
class QKNorm(AppliedFunction, ModelSurgery):
    """Normalize the queries and keys of each attention head of a transformer.

    On `INIT` it applies `apply_qk_norm` to `state.model` and `state.optimizers`, after algorithms that replace layers.
    Loading a checkpoint of the changed model applies it.

    Args:
        initial_scale: See `apply_qk_norm`.

    Raises:
        ValueError: If `initial_scale` is not positive.

    Example:
        >>> QKNorm(initial_scale=20)
        QKNorm(initial_scale=20)

    Reference:
        See `apply_qk_norm`.
    """

    surgery_rank = 5
    function = staticmethod(apply_qk_norm)
    counted = "qk_norm/num_attention_layers"

    initial_scale: float | None = None

    def __post_init__(self) -> None:
        if self.initial_scale is not None:
            check_interval("(0, inf)", initial_scale=self.initial_scale)


def apply_value_residual(model: nn.Module, optimizers: _Optimizers = None) -> int:
    """Mix the values of the first attention layer of a transformer into the values of each later one.

    Layer `n` attends to `a_n * v_n + b_n * v_1`, where `v_n` are its own values and `v_1` those of the first layer. It
    learns `a_n` and `b_n`, both 0.5 at first: the parameter `value_mix` of the layer that computes values.

    Supported are `ComposerGPT` and models of transformers with one stack of layers whose attention is named as in
    GPT-2, BERT, Llama or Mistral. A second call changes nothing.

    Args:
        model: Changed in place.
        optimizers: Existing optimizers of the model. The new parameters join the group of the first norm or bias.

    Returns:
        The number of attention layers that have values of the first one.

    Warns:
        NoEffectWarning: If the model has no two such layers.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=8, n_heads=2, n_layers=3, vocab_size=32, max_seq_len=8))
        >>> apply_value_residual(model)
        2

    Reference:
        Zhou et al., "Value Residual Learning", 2024, arXiv:2410.17897.
    """
    optimizers = as_optimizers(optimizers)
    old_params: dict[str, Tensor] = dict(model.named_parameters())
    # One layer for all three computes values in the last third of its outputs.
    found = {layers[-1]: 3 if len(layers) == 1 else 1 for layers, *_ in _find_attentions(model)}
    names = {module: name for name, module in model.named_modules()}
    # By the path of a layer up to its number, since an encoder and a decoder, or the towers of CLIP, are two stacks.
    if len({re.split(r"\.\d+\.", names[layer])[0] for layer in found}) > 1:
        found = {}
    values = list(found)
    if len(values) > 1 and not hasattr(values[1], "value_mix"):
        first = ForwardTensor()
        for layer, num_parts in found.items():
            if layer is not values[0]:
                layer.value_mix = nn.Parameter(layer.weight.new_full((2,), 0.5))
            layer.register_forward_hook(partial(_mix_values, first, num_parts))
    if optimizers:
        add_to_optimizers(model, old_params, optimizers)
    return count_or_warn("ValueResidual", model, "stack of attention layers of a supported kind", len(values[1:]))


@dataclass(repr=False, eq=False)
class ValueResidual(AppliedFunction, ModelSurgery):
    """Mix the values of the first attention layer of a transformer into the values of each later one.

    On `INIT` it applies `apply_value_residual` to `state.model` and `state.optimizers`, after algorithms that replace
    layers. Loading a checkpoint of the changed model applies it.

    Example:
        >>> ValueResidual()
        ValueResidual()

    Reference:
        See `apply_value_residual`.
    """

    surgery_rank = 5
    function = staticmethod(apply_value_residual)
    counted = "value_residual/num_attention_layers"


def apply_logit_softcap(model: nn.Module, cap: float = 30.0) -> int:
    """Bound the logits of a language model: `cap * tanh(logits / cap)`.

    Supported are `ComposerGPT` and models of transformers with an output layer for tokens. Attention scores stay as
    they are, since fused attention has no cap; `apply_qk_norm` bounds them. A second call changes nothing.

    Args:
        model: Changed in place.
        cap: The bound of the absolute logits, above 0. Gemma 2 has 30.

    Returns:
        The number of output layers.

    Raises:
        ValueError: If `cap` is not positive.

    Warns:
        NoEffectWarning: If the model has no such output layer.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=8, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=8))
        >>> apply_logit_softcap(model, cap=0.01)
        1
        >>> model({"input_ids": torch.arange(8)[None]}).abs().max() <= 0.01
        tensor(True)

    Reference:
        Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024, arXiv:2408.00118, section 2.
    """
    check_interval("(0, inf)", cap=cap)
    heads = set(output_layers(model))
    for head in heads:
        if getattr(head, "logit_softcap", None) is None:
            head.register_forward_hook(_cap)
            head.logit_softcap = float(cap)
            record_in_config(model, "logit_softcap", {"cap": cap})
    return count_or_warn("LogitSoftcap", model, "output layer for tokens", len(heads))


@dataclass(repr=False, eq=False)
class LogitSoftcap(AppliedFunction, ModelSurgery):
    """Bound the logits of a language model.

    On `INIT` it applies `apply_logit_softcap` to `state.model`, after algorithms that replace layers. Loading a
    checkpoint of the changed model applies it.

    Args:
        cap: The bound of the absolute logits, above 0.

    Raises:
        ValueError: If `cap` is not positive.

    Example:
        >>> LogitSoftcap()
        LogitSoftcap(cap=30.0)

    Reference:
        See `apply_logit_softcap`.
    """

    surgery_rank = 5
    function = staticmethod(apply_logit_softcap)
    counted = "logit_softcap/num_output_layers"

    cap: float = 30.0

    def __post_init__(self) -> None:
        check_interval("(0, inf)", cap=self.cap)


class _SquaredReLU(nn.Module):
    is_squared_relu = True  # read by `composer_hf`

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(inputs).square()


def apply_squared_relu(model: nn.Module) -> int:
    """Replace the activations in the feed-forward layers of a transformer with `max(x, 0)^2`.

    Replaced are activation modules without parameters in modules named `mlp` or `intermediate`, such as those of
    `ComposerGPT`, GPT-2, BERT and Llama in transformers, and the vision transformers of torchvision and timm. The gate
    of a gated feed-forward layer, as in Llama, gets the squared ReLU. A second call changes nothing.

    Args:
        model: Changed in place.

    Returns:
        The number of feed-forward layers with the squared ReLU.

    Warns:
        NoEffectWarning: If the model has no such layer.

    Example:
        >>> from composer_models import ComposerGPT
        >>> model = ComposerGPT(dict(d_model=8, n_heads=2, n_layers=1, vocab_size=32, max_seq_len=8))
        >>> apply_squared_relu(model)
        1
        >>> model.model.blocks[0].mlp[1](torch.tensor([-2.0, 3.0]))
        tensor([0., 9.])

    Reference:
        So et al., "Primer: Searching for Efficient Transformers for Language Modeling", NeurIPS 2021, arXiv:2109.08668.
    """
    activations = {
        name: module
        for name, module in model.named_modules()
        if type(module).__module__ in _ACTIVATIONS and not list(module.parameters())
    }
    found = {module for name, module in activations.items() if _FEED_FORWARD.search(name)}
    if found:
        _describe(model, found, {*activations.values()} - found)
    replace_module_classes(model, {nn.Module: lambda module, _: _SquaredReLU() if module in found else None})
    count = sum(isinstance(module, _SquaredReLU) for module in model.modules())
    return count_or_warn("SquaredReLU", model, "activation in a module named mlp or intermediate", count)


def _describe(model: nn.Module, replaced: set[nn.Module], kept: set[nn.Module]) -> None:
    """Set the activation in the configuration of a transformers model, or record the change there."""
    names = [(config, name) for config in own_configs(model) for name in _CONFIG_NAMES if hasattr(config, name)]
    # The head of BERT keeps an activation of the same name.
    if not names or {type(module) for module in replaced} & {type(module) for module in kept}:
        record_in_config(model, "squared_relu", {})
        return
    for config, name in names:
        setattr(config, name, "relu2")


@dataclass(repr=False, eq=False)
class SquaredReLU(AppliedFunction, ModelSurgery):
    """Replace the activations in the feed-forward layers of a transformer with the squared ReLU.

    On `INIT` it applies `apply_squared_relu` to `state.model`, before algorithms that replace feed-forward layers and
    keep their activation. Loading a checkpoint of the changed model applies it.

    Example:
        >>> SquaredReLU()
        SquaredReLU()

    Reference:
        See `apply_squared_relu`.
    """

    surgery_rank = 0
    function = staticmethod(apply_squared_relu)
    counted = "squared_relu/num_layers"


def _find_attentions(model: nn.Module) -> Iterator[tuple[list[Any], int, float]]:
    """Yield the layers of queries, keys and values, or the one for all three; the size of a head; and the scaling.

    The scaling is what the model multiplies attention scores by.
    """
    for name, module in model.named_modules():
        # In cross-attention, the c_attn of GPT-2 has no queries, and the values are those of another sequence. That of
        # GPT-BigCode, which has `multi_query`, is not three equal parts.
        if hasattr(module, "q_attn") or hasattr(module, "multi_query") or "cross" in name:
            continue
        attention: Any = module
        for names in (("qkv",), ("c_attn",), ("query", "key", "value"), ("q_proj", "k_proj", "v_proj")):
            layers = [getattr(attention, name, None) for name in names]
            sizes = [getattr(attention, name) for name in ("head_dim", "attention_head_size") if hasattr(module, name)]
            if hasattr(module, "n_heads") and hasattr(module, "out"):  # ComposerGPT
                sizes.append(attention.out.in_features // attention.n_heads)
            if sizes and all(isinstance(layer, nn.Module) for layer in layers):
                # Granite and Gemma 2 have a number of their own.
                yield layers, sizes[0], float(getattr(module, "scaling", None) or sizes[0] ** -0.5)


# Functions of the module, so that models with them can be copied and pickled.
def _normalize_queries_and_keys(head_size: int, scaling: float, module: Any, arguments: Any, output: Tensor) -> Tensor:
    queries, keys, values = output.chunk(3, dim=-1)
    queries = _normalize_queries(head_size, scaling, module, arguments, queries)
    return torch.cat([queries, _normalize_keys(head_size, module, arguments, keys), values], dim=-1)


def _normalize_queries(head_size: int, scaling: float, module: Any, arguments: Any, output: Tensor) -> Tensor:
    # The RMS norm leaves vectors of length sqrt(d), so the model's scores would be d times its scaling.
    scale = module.qk_scale / (head_size * scaling)
    return _normalize_keys(head_size, module, arguments, output) * scale.to(output.dtype)


def _normalize_keys(head_size: int, module: Any, arguments: Any, output: Tensor) -> Tensor:
    heads = output.unflatten(-1, (-1, head_size))
    return F.rms_norm(heads, (head_size,), eps=_EPS).flatten(-2).to(output.dtype)


class ForwardTensor:
    """A tensor of the present forward pass, which copies and pickled models do not have."""

    value: Tensor | None = None
    has_graph = True  # whether gradients are computed through it

    def __getstate__(self) -> None:
        return None


def _mix_values(first: ForwardTensor, num_parts: int, module: Any, arguments: Any, output: Tensor) -> Tensor:
    *others, values = output.chunk(num_parts, dim=-1)
    mix = getattr(module, "value_mix", None)
    if mix is None:
        first.value, first.has_graph = values, torch.is_grad_enabled()
        return output
    if torch.is_grad_enabled() and not first.has_graph:
        raise RuntimeError(
            "ValueResidual needs activation checkpointing with use_reentrant=False: the reentrant implementation does "
            "not compute the gradients of the first layer's values."
        )
    own, other = mix.to(output.dtype)
    return torch.cat([*others, own * values + other * first.value], dim=-1)


def _cap(module: Any, arguments: Any, output: Any) -> Any:
    if not isinstance(output, Tensor) or getattr(module, "targets", None) is not None:
        return output  # a fused loss, which caps the logits itself
    return torch.tanh(output / module.logit_softcap) * module.logit_softcap


def output_layers(model: nn.Module) -> Iterator[Any]:
    from composer_models.gpt import GPT  # loads the metrics

    for module in unwrap_model(model).modules():
        get_head: Callable[[], Any] = getattr(module, "get_output_embeddings", lambda: None)
        if isinstance(module, GPT):
            yield module
        elif (head := get_head()) is not None:
            yield head


def add_to_optimizers(model: nn.Module, old_params: dict[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Add each new parameter to the group of an old one of its shape, or else of the first with as many dims.

    Optimizers may treat matrices, and vectors such as norms and biases, differently.
    """
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    old = [each for each in old_params.values() if id(each) in trained]
    predecessors: dict[str, Tensor] = {}
    for name, new in model.named_parameters():
        if name not in old_params and (alike := [each for each in old if each.ndim == new.ndim]):
            predecessors[name] = next((each for each in alike if each.shape == new.shape), alike[0])
    follow_replacements([Replacement("", {**old_params, **predecessors}, model)], model, optimizers)

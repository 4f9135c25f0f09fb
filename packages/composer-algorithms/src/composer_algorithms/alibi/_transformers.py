"""ALiBi for GPT-2, BERT and RoBERTa of transformers."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertEmbeddings, BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings, RobertaSelfAttention

from composer_algorithms.alibi.attention import add_bias, register_alibi, zero_and_freeze_expand_position_embeddings


def register_policies(registry: Any) -> None:
    registry.register(GPT2Model)(_gpt2_embedding)
    registry.register(GPT2Attention)(_gpt2_attention)
    registry.register(BertEmbeddings, RobertaEmbeddings)(_bert_embedding)
    registry.register(BertSelfAttention, RobertaSelfAttention)(_bert_attention)


def _gpt2_embedding(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module:
    zero_and_freeze_expand_position_embeddings(module, max_sequence_length, "wpe")
    _note_positions(module, max_sequence_length)
    return module


def _gpt2_attention(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module | None:
    attention: Any = module
    if attention.is_cross_attention:  # no distance is defined between two sequences
        return None
    register_alibi(module, attention.num_heads)
    bias = getattr(attention, "bias", None)
    if isinstance(bias, Tensor):  # transformers 4 slices its causal mask out of this buffer
        causal = torch.ones(max_sequence_length, max_sequence_length, dtype=torch.bool, device=bias.device).tril()
        _replace_buffer(module, "bias", causal[None, None])
    return module


def _bert_embedding(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module:
    embeddings: Any = module
    num_positions = max_sequence_length
    if isinstance(module, RobertaEmbeddings):  # its positions start after the padding index
        num_positions += embeddings.padding_idx + 1
    zero_and_freeze_expand_position_embeddings(module, num_positions, "position_embeddings")
    for name, fill in (("position_ids", torch.arange(num_positions)), ("token_type_ids", torch.zeros(num_positions))):
        if isinstance(old := getattr(module, name, None), Tensor):
            _replace_buffer(module, name, fill[None].to(old.device, old.dtype))
    _note_positions(module, num_positions)
    return module


def _bert_attention(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module:
    attention: Any = module
    register_alibi(module, attention.num_attention_heads)
    # BERT looks up its attention function in the registry only since transformers 5. The mark keeps a second call from
    # adding the bias twice.
    has_interface = "ALL_ATTENTION_FUNCTIONS" in type(module).forward.__code__.co_names
    if not has_interface and not hasattr(module, "_adds_alibi"):
        module.register_forward_pre_hook(_add_bias_to_mask, with_kwargs=True)
        attention._adds_alibi = True
    return module


def _add_bias_to_mask(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the bias to the attention mask, an argument of BERT's attention in transformers 4."""
    # Cross-attention: no distance is defined between two sequences.
    if kwargs.get("encoder_hidden_states") is not None:
        return args, kwargs
    hidden_states = args[0] if args else kwargs["hidden_states"]
    mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
    cache = kwargs.get("past_key_values")
    num_queries = hidden_states.shape[1]
    num_keys = num_queries + (0 if cache is None else cache.get_seq_length())
    if mask is not None:
        num_keys = mask.shape[-1]
    biased = add_bias(module.alibi_slopes, mask, num_queries, num_keys, is_causal=bool(module.is_decoder))
    dtype = module.query.weight.dtype if mask is None else mask.dtype
    # As in sdpa: the lowest float32 would be minus infinity in float16.
    biased = biased.clamp_min(torch.finfo(dtype).min).to(dtype)
    return (*args[:1], *args[2:]), {**kwargs, "attention_mask": biased}


def _note_positions(module: Any, num_positions: int) -> None:
    module.num_alibi_positions = num_positions  # copied to the configuration, which not every module holds


def _replace_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    is_saved = name in module.state_dict()
    module.register_buffer(name, value, persistent=is_saved)

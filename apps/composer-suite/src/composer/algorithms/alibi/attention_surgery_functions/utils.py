"""What registering a module for ALiBi needs."""

from composer_algorithms.alibi.attention import register_alibi, zero_and_freeze_expand_position_embeddings
from composer_algorithms.alibi.attention_surgery_functions import policy_registry
from composer_algorithms.alibi.registry import AlibiReplacementFunction, PolicyRegistry

__all__ = [
    "AlibiReplacementFunction",
    "PolicyRegistry",
    "policy_registry",
    "register_alibi",
    "zero_and_freeze_expand_position_embeddings",
]

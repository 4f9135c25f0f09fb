"""The registry of what can be given ALiBi, with transformers' GPT-2, BERT and RoBERTa in it if it is installed."""

from importlib.util import find_spec

from composer_algorithms.alibi.registry import PolicyRegistry

__all__ = ["policy_registry"]

policy_registry = PolicyRegistry()
"""From classes of modules to the functions that give their instances ALiBi."""

if find_spec("transformers") is not None:
    from composer_algorithms.alibi.attention_surgery_functions._transformers import register_policies

    register_policies(policy_registry)

"""Registry of the modules that support ALiBi, with GPT-2, BERT and RoBERTa if transformers is installed."""

from importlib.util import find_spec

from composer_algorithms.alibi.registry import PolicyRegistry

__all__ = ["policy_registry"]

policy_registry = PolicyRegistry()
"""Maps module classes to the functions that add ALiBi to their instances."""

if find_spec("transformers") is not None:
    from composer_algorithms.alibi.attention_surgery_functions._transformers import register_policies

    register_policies(policy_registry)

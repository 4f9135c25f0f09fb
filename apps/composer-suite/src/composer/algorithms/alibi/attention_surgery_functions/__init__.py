"""What can be given ALiBi."""

from composer_algorithms.alibi.attention_surgery_functions import policy_registry

__all__ = ["policy_registry"]

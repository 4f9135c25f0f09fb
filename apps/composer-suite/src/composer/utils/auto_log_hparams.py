"""Hyperparameters as plain values, nested or flat."""

from composer_events.hparams import (
    convert_flat_dict_to_nested_dict,
    convert_nested_dict_to_flat_dict,
    extract_hparams,
)

__all__ = ["extract_hparams", "convert_nested_dict_to_flat_dict", "convert_flat_dict_to_nested_dict"]

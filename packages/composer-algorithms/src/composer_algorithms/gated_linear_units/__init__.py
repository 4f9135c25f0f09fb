"""Gated linear units: feed-forward layers of BERT in which one projection gates another one."""

from composer_algorithms.gated_linear_units.algorithm import (
    BERTGatedFFOutput,
    GatedLinearUnits,
    apply_gated_linear_units,
)
from composer_algorithms.metadata import METHODS

__all__ = ["BERTGatedFFOutput", "GatedLinearUnits", "apply_gated_linear_units", "METADATA"]

METADATA = METHODS["gated_linear_units"]

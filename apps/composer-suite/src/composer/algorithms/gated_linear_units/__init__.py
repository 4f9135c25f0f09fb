"""Feed-forward layers with a gate."""

from composer_algorithms.gated_linear_units import GatedLinearUnits, apply_gated_linear_units

__all__ = ["GatedLinearUnits", "apply_gated_linear_units"]

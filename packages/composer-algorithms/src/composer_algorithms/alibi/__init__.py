"""ALiBi: attention with a position bias that grows with distance and extrapolates to longer sequences."""

from composer_algorithms.alibi.surgery import Alibi, apply_alibi
from composer_algorithms.metadata import METHODS

__all__ = ["Alibi", "apply_alibi", "METADATA"]

METADATA = METHODS["alibi"]

"""The tuned baseline of stdlib: AdamW on windows of 256 bytes, and no methods."""

from dataclasses import replace

from stdlib import STDLIB, TASK

__all__ = ["RECIPE", "TASK"]

RECIPE = replace(STDLIB.arm("baseline"), name="AdamW, tuned", lr=2e-3)

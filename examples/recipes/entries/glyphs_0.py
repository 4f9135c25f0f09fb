"""The tuned baseline of glyphs: SGD with momentum on whole images, and no methods."""

from dataclasses import replace

from glyphs import GLYPHS, TASK

__all__ = ["RECIPE", "TASK"]

RECIPE = replace(GLYPHS.arm("baseline"), name="SGD, tuned", lr=0.1)

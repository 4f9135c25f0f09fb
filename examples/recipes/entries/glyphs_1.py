"""Muon in place of SGD, in bfloat16, with Dirac initialization, BlurPool, label smoothing, and channels last."""

from dataclasses import replace
from functools import partial

from arms import Arm
from glyphs import TASK

from composer.algorithms import BlurPool, ChannelsLast, DiracInit, LabelSmoothing
from composer.optim import Muon

__all__ = ["LEARNING_RATES", "PARTS", "RECIPE", "TASK"]

RECIPE = Arm(
    name="Muon, bfloat16, Dirac init, BlurPool, label smoothing, channels last",
    duration="290ba",
    algorithms=lambda: [ChannelsLast(), BlurPool(), DiracInit(), LabelSmoothing(0.1)],
    optimizer=partial(Muon, weight_decay=0.0),
    settings={"precision": "amp_bf16", "eval_interval": "0.25dur"},
    lr=3e-2,
)

# How each part is taken out.
PARTS = {
    "Muon": lambda arm: replace(arm, optimizer=None),
    "DiracInit": lambda arm: arm.without(DiracInit),
    "BlurPool": lambda arm: arm.without(BlurPool),
    "LabelSmoothing": lambda arm: arm.without(LabelSmoothing),
    "ChannelsLast": lambda arm: arm.without(ChannelsLast),
    "bfloat16": lambda arm: replace(arm, settings=arm.settings | {"precision": "fp32"}),
}

# What the recipe and the one with the task's own optimizer are tuned with, to see what the parts are worth.
LEARNING_RATES = (3e-2, 0.1, 0.3)

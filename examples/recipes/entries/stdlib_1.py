"""Muon in place of AdamW, on windows of 32 bytes, with ALiBi, zero initialization and the squared ReLU.

45 batches of 16 windows of 32 bytes are a 36th of what the baseline reads. ALiBi lets the model read the 256 bytes of
an evaluation after that.
"""

from dataclasses import replace
from functools import partial

from arms import Arm
from stdlib import CONTEXT, TASK, alibi

from composer.algorithms import Alibi, SquaredReLU, ZeroInit
from composer.optim import Muon

__all__ = ["LEARNING_RATES", "PARTS", "RECIPE", "TASK"]

RECIPE = Arm(
    name="Muon, ALiBi, short windows, zero init, squared ReLU",
    duration="45ba",
    algorithms=lambda: [alibi(), ZeroInit(), SquaredReLU()],
    optimizer=partial(Muon, weight_decay=0.0, momentum=0.85),
    settings={"batch_size": 16, "window": 32, "eval_interval": "0.25dur"},
    lr=2.4e-2,
)

# How each part is taken out. Whole windows are as many bytes a batch.
PARTS = {
    "Muon": lambda arm: replace(arm, optimizer=None),
    "ALiBi": lambda arm: arm.without(Alibi),
    "short windows": lambda arm: replace(arm, settings=arm.settings | {"batch_size": 2, "window": CONTEXT}),
    "ZeroInit": lambda arm: arm.without(ZeroInit),
    "SquaredReLU": lambda arm: arm.without(SquaredReLU),
}

# What the recipe and the one with the task's own optimizer are tuned with, to see what the parts are worth.
LEARNING_RATES = (3e-3, 8e-3, 2.4e-2)

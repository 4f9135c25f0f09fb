"""Muon against AdamW, on the task of stdlib.py and without its recipe.

python examples/recipes/stdlib_muon.py --seeds 5
"""

import sys
from dataclasses import replace

from arms import Arm
from comparison import main
from stdlib import STDLIB

STDLIB_MUON = replace(
    STDLIB,
    name="stdlib-muon",
    arms=(
        STDLIB.arm("baseline"),
        Arm(name="Muon", duration="385ba", settings={"optimizer": "muon"}),
        STDLIB.arm("baseline, half the time"),
        Arm(name="Muon, half the time", duration="185ba", settings={"optimizer": "muon"}, like="Muon"),
    ),
    composed="Muon",
)


if __name__ == "__main__":
    sys.exit(main(STDLIB_MUON, __doc__))

"""Look into a checkpoint of somebody else's script, convert it, and compare the two."""

from pathlib import Path
from tempfile import mkdtemp

import torch

from composer_ckpt.cli import main

folder = Path(mkdtemp())
torch.save({"state": {"model": torch.nn.Linear(3, 2).state_dict()}}, folder / "theirs.pt")

assert main(["inspect", f"{folder}/theirs.pt"]) == 0
assert main(["convert", f"{folder}/theirs.pt", f"{folder}/weights.safetensors", "--to", "safetensors"]) == 0
assert main(["diff", f"{folder}/theirs.pt", f"{folder}/weights.safetensors"]) == 0

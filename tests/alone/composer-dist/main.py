"""Average a number over two processes that the launcher starts."""

import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import torch
from composer_dist import dist

dist.initialize_dist("cpu")
number = torch.tensor([1.0 + dist.get_global_rank()])
dist.all_reduce(number)
print(f"rank {dist.get_global_rank()} of {dist.get_world_size()}: {number.item() / dist.get_world_size()}")
"""

with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "average.py"
    script.write_text(PROGRAM)
    command = [str(Path(sys.executable).parent / "composer"), "-n", "2", "--tee", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)

assert "rank 0 of 2: 1.5" in run.stdout, run.stdout + run.stderr
print(run.stdout.strip())

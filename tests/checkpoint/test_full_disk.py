"""A disk that is really full: a small file system in memory that only the test sees."""

import json
import subprocess
import sys

import pytest

MOUNT = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
SAVES = """
import json, os, sys
import torch
from composer_checkpoint import StorageError, load_file, save_file
from composer_checkpoint.commit import write_atomically

def save(name, numbers):
    with write_atomically(os.path.join(sys.argv[1], name)) as unfinished:
        save_file({"weight": torch.ones(numbers)}, unfinished)

save("ep1.pt", 1000)
errors = []
for name in ("ep2.pt", "ep1.pt"):
    try:
        save(name, 1_000_000)
    except StorageError as error:
        errors.append(str(error))
weight = load_file(sys.argv[1] + "/ep1.pt")["weight"]
print(json.dumps({"errors": errors, "left": os.listdir(sys.argv[1]), "sum": weight.sum().item()}))
"""


def can_mount(folder):
    try:
        return subprocess.run([*MOUNT, f"mount -t tmpfs tmpfs '{folder}'"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_a_save_that_does_not_fit_says_so_and_the_one_before_still_loads(tmp_path):
    if not can_mount(tmp_path):
        pytest.skip("this process may not mount a file system of its own")
    mounted = f"mount -t tmpfs -o size=1m tmpfs '{tmp_path}' && exec \"$@\""
    done = subprocess.run(
        [*MOUNT, mounted, "sh", sys.executable, "-c", SAVES, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["left"] == ["ep1.pt"]
    assert seen["sum"] == 1000
    assert len(seen["errors"]) == 2
    for error in seen["errors"]:
        assert "Free space:" in error
        assert "needed:" in error

import subprocess
import sys

import pytest

STATE_MB = 500

SCRIPT = """
import sys, torch
from composer_checkpoint import load_file, save_file

def peak_mb():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

def make():
    return {f"layer{i}": torch.ones(10_000_000 // 4 if i % 2 else 2_500, 1) for i in range(2 * STATE_MB // 10)}

path, action = sys.argv[1:]
small = {"w": torch.ones(3)}
save_file(small, path + ".warm.pt")
load_file(path + ".warm.pt")
if action == "save":
    state = make()
    open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
    before = peak_mb()
    save_file(state, path)
else:
    open("/proc/self/clear_refs", "w").write("5")
    before = peak_mb()
    state = load_file(path, mmap=action == "mmap")
    sum(float(tensor.sum()) for tensor in state.values())
print(peak_mb() - before)
"""


def peak_mb(path, action):
    script = SCRIPT.replace("STATE_MB", str(STATE_MB))
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), action], capture_output=True, text=True, check=True, timeout=300
    )
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("extension", ["pt", "safetensors"])
def test_saving_and_loading_need_little_more_memory_than_the_state(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    assert peak_mb(path, "save") < 0.2 * STATE_MB  # beside the state itself
    assert peak_mb(path, "mmap") < 1.05 * STATE_MB
    assert peak_mb(path, "copy") < 1.05 * STATE_MB

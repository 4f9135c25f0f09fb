"""How much memory sharded saving and loading take beyond the state itself."""

from pathlib import Path

import torch
import torch.distributed as tdist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composer_checkpoint.sharded import load_sharded, save_sharded
from composer_dist.testing import run_ranks

SHARD_BYTES = 250_000_000  # on each of two ranks


def local_state(value):
    """Two tensors of 100 MB, one of 25 MB, and a hundred small ones, on each rank."""
    mesh = init_device_mesh("cpu", (tdist.get_world_size(),))
    rows = [25_000, 25_000, 6_250, *[62] * 100]
    parts = {f"w{i}": torch.full((count, 1000), float(value)) for i, count in enumerate(rows)}
    state = {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in parts.items()}
    assert sum(part.nbytes for part in parts.values()) >= 0.99 * SHARD_BYTES
    return state


def peak_bytes(work):
    """The most memory that this process had while it worked, with what it had before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(folder):
    save_sharded({"warm": torch.ones(1000)}, folder / "warm")
    load_sharded({"warm": torch.ones(1000)}, folder / "warm")
    state = local_state(tdist.get_rank() + 1)
    saving = peak_bytes(lambda: save_sharded(state, folder / "ep1"))
    for tensor in state.values():
        tensor.to_local().zero_()
    loading = peak_bytes(lambda: load_sharded(state, folder / "ep1"))
    assert all((tensor.to_local() == tdist.get_rank() + 1).all() for tensor in state.values())
    return saving / SHARD_BYTES, loading / SHARD_BYTES


def test_saving_and_loading_take_less_than_a_fifth_of_the_local_shard(tmp_path):
    for saving, loading in run_ranks(measure, tmp_path, store=tmp_path / "store"):
        print(f"beyond the shard: {saving:.3f} while saving, {loading:.3f} while loading")  # noqa: T201  # for pytest -s
        assert saving < 0.2
        assert loading < 0.2

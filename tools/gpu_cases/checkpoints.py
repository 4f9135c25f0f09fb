"""Checkpoints from a GPU: what is saved in the background is what was, nobody waits for it, and training goes on."""

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer.core import Callback
from composer_checkpoint import AsyncSaver, load_file, save_file
from gpu_cases.subjects import make_batches, make_network, make_trainer


def async_snapshot(device: str) -> str:
    """Each checkpoint of a Trainer that saves in the background has the weights and the moments of its batch."""
    batches, kept = make_batches(12), Kept()
    network = make_network(width=4096 if device == "cuda" else 64)
    with tempfile.TemporaryDirectory() as folder:
        saving = {"save_folder": folder, "save_filename": "ba{batch}.pt", "save_interval": "3ba", "save_async": True}
        with make_trainer(network, batches, device, callbacks=kept, **saving) as trainer:
            trainer.fit()
        for batch in (3, 6, 9, 12):
            saved = load_file(Path(folder) / f"ba{batch}.pt")["state"]
            assert _same(_tensors(saved["model"]), kept.weights[batch]), f"weights of batch {batch} differ"
            assert _same(_tensors(saved["optimizers"]), kept.moments[batch]), f"moments of batch {batch} differ"
    size_mb = sum(tensor.nbytes for tensor in [*kept.weights[12], *kept.moments[12]]) / 1e6
    return f"4 checkpoints of {size_mb:.0f} MB, equal to the bit"


def async_unwaited(device: str) -> str:
    """A save in the background returns, copies and all, while the GPU is still at what it was given before."""
    weight = torch.ones(1000, device=device)
    with tempfile.TemporaryDirectory() as folder, AsyncSaver() as saver:
        saver.save({"w": weight}, Path(folder) / "warm.pt")  # makes the stream and the page-locked memory
        saver.wait()
        torch.cuda.synchronize()
        _keep_busy()
        done = torch.cuda.Event()
        done.record()
        saver.save({"w": weight}, Path(folder) / "ep1.pt", stable_until_step=[weight])
        saver.wait_for_staging()
        assert not done.query(), "the save waited for the device"
        saver.wait()
        assert (load_file(Path(folder) / "ep1.pt")["w"] == 1).all(), "the checkpoint has other values"
    return "saved while the GPU computed"


def async_stall(device: str) -> str:
    """How long training stands still for a checkpoint in the background, beside one that it waits for."""
    num_layers = 32 if device == "cuda" else 2
    state = {f"layer{index}": torch.randn(2048, 2048, device=device) for index in range(num_layers)}
    waited, stalls = [], []
    with tempfile.TemporaryDirectory() as folder, AsyncSaver() as saver:
        for round_ in range(4):  # the first ones make the memory
            start = time.perf_counter()
            save_file(state, Path(folder) / f"waited{round_}.pt")
            waited.append(time.perf_counter() - start)
            stalls.append(_stall_s(saver, state, Path(folder) / f"ours{round_}.pt", device))
            for path in Path(folder).iterdir():
                path.unlink()
    stall_s, waited_s = statistics.median(stalls[1:]), statistics.median(waited[1:])
    size_gb = sum(tensor.nbytes for tensor in state.values()) / 1e9
    return f"{1e3 * stall_s:.1f} ms of {1e3 * waited_s:.0f} ms ({stall_s / waited_s:.1%}), {size_gb:.2f} GB"


def resume(device: str) -> str:
    """A run that stopped and went on ends where one that did not stop ends, its dropout included."""
    whole, second = make_network(dropout=0.5), make_network(dropout=0.5)
    batches = make_batches(8)
    with tempfile.TemporaryDirectory() as folder:
        saving = {"save_folder": folder, "save_filename": "ba{batch}.pt", "save_interval": "4ba"}
        with make_trainer(whole, batches, device, **saving) as trainer:
            trainer.fit()
        with make_trainer(second, batches, device, load_path=f"{folder}/ba4.pt") as trainer:
            trainer.fit()  # which begins with the random numbers of the file
            gc.collect()
            assert f"{folder}/ba4.pt" not in Path("/proc/self/maps").read_text(), "the optimizer is still in the file"
            assert trainer.state.timestamp.batch == 8, "it did not go on from batch 4"
    torch.testing.assert_close(list(second.parameters()), list(whole.parameters()), rtol=1e-5, atol=1e-7)
    return "same weights after batch 8"


class Kept(Callback):
    """Copies of the weights and moments at the end of each batch."""

    def __init__(self) -> None:
        self.weights: dict[int, list[Tensor]] = {}
        self.moments: dict[int, list[Tensor]] = {}

    def batch_end(self, state: Any, logger: Any) -> None:
        """Copy them."""
        batch = int(state.timestamp.batch)
        self.weights[batch] = [tensor.clone() for tensor in state.model.state_dict().values()]
        entries = state.optimizers[0].state.values()
        self.moments[batch] = [value.clone() for entry in entries for value in _tensors(entry)]


def _stall_s(saver: AsyncSaver, state: dict[str, Tensor], path: Path, device: str) -> float:
    """Save in the background while the device works, and return how long the calls for it took."""
    stall_s = 0.0
    start = time.perf_counter()
    saver.save(state, path, stable_until_step=state.values())
    stall_s += time.perf_counter() - start
    _work(device)  # forward and backward
    start = time.perf_counter()
    saver.wait_for_staging()
    stall_s += time.perf_counter() - start
    state["layer0"] += 1
    while saver.is_saving:
        _work(device)
        start = time.perf_counter()
        saver.check()
        stall_s += time.perf_counter() - start
    return stall_s


def _work(device: str) -> None:
    """Take a few hundred milliseconds of the device's time."""
    if device == "cuda":
        _keep_busy()
        torch.cuda.synchronize()
    else:
        time.sleep(0.05)


def _keep_busy() -> None:
    """Give the GPU work that it has not done when this returns."""
    square = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        square = square @ square / 128


def _tensors(tree: Any) -> list[Tensor]:
    """Return all tensors of nested mappings, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for value in tree.values() for leaf in _tensors(value)] if isinstance(tree, dict) else []


def _same(saved: list[Tensor], kept: list[Tensor]) -> bool:
    return len(saved) == len(kept) and all(map(torch.equal, saved, (tensor.cpu() for tensor in kept)))

"""Saving in the background from a CUDA device, whose copies are made while it goes on. On the CPU: test_async_save."""

import pytest
import torch

from composer_checkpoint import AsyncSaver, CheckpointError, load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="copies of a CUDA device need one"),
]


def keep_busy():
    """Give the device work that it has not done when this returns."""
    square = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        square = square @ square / 64


@pytest.mark.parametrize("is_stable", [False, True], ids=["copied at once", "copied until the step"])
@pytest.mark.parametrize("shape", ["in one piece", "in pieces"])
def test_the_checkpoint_has_the_values_of_the_call_whatever_the_device_still_does(tmp_path, is_stable, shape):
    weight = torch.zeros(4000, 1000, device="cuda")
    weight = weight if shape == "in one piece" else weight.t()
    with AsyncSaver() as saver:
        for save in range(3):
            keep_busy()
            weight.fill_(save)  # done after all that, and to be in the copy
            saver.save({"w": weight}, tmp_path / f"ep{save}.pt", stable_until_step=[weight] if is_stable else ())
            if is_stable:
                saver.wait_for_staging()
            weight.fill_(-1)  # not to be in the copy
    for save in range(3):
        assert (load_file(tmp_path / f"ep{save}.pt")["w"] == save).all()


def test_the_device_is_not_waited_for(tmp_path):
    weight = torch.ones(1000, device="cuda")
    with AsyncSaver() as saver:
        saver.save({"w": weight}, tmp_path / "warm.pt")  # makes the stream and the page-locked memory
        saver.wait()
        torch.cuda.synchronize()
        keep_busy()
        done = torch.cuda.Event()
        done.record()
        saver.save({"w": weight}, tmp_path / "ep1.pt", stable_until_step=[weight])
        saver.wait_for_staging()
        assert not done.query()  # the device is still at it
    assert (load_file(tmp_path / "ep1.pt")["w"] == 1).all()


def test_training_in_a_stream_of_its_own_is_waited_for_in_that_stream(tmp_path):
    with AsyncSaver() as saver, torch.cuda.stream(torch.cuda.Stream()):
        weight = torch.zeros(1_000_000, device="cuda")
        keep_busy()
        weight.fill_(3)
        saver.save({"w": weight}, tmp_path / "ep1.pt", stable_until_step=[weight])
        saver.wait_for_staging()
        weight.fill_(-1)
    assert (load_file(tmp_path / "ep1.pt")["w"] == 3).all()


def test_a_stable_tensor_that_changes_too_early_fails_the_save(tmp_path):
    weight = torch.zeros(10, device="cuda")
    saver = AsyncSaver()
    keep_busy()
    saver.save({"w": weight}, tmp_path / "ep1.pt", stable_until_step=[weight])
    weight += 1
    with pytest.raises(CheckpointError, match="was changed while it was copied"):
        saver.close()

"""Saving in the background: the checkpoint is of the moment of the call, and no failure is lost."""

import collections
import os
import resource
import threading

import pytest
import torch
import torch.distributed as tdist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from composer_checkpoint.async_save import AsyncSaver
from composer_checkpoint.errors import CheckpointConflictError, CheckpointError
from composer_checkpoint.files import load_file, save_file
from composer_checkpoint.formats.per_rank import save_local
from composer_checkpoint.sharded import load_sharded, save_sharded, verify_folder
from composer_dist.testing import SimulatedAccelerator, run_ranks

KINDS = pytest.mark.parametrize("sharded", [False, True], ids=["file", "sharded"])


def new_state(value):
    return {"w": torch.full((1000, 100), value), "step": torch.tensor(value), "group": {"lr": value}}


def load(path, sharded):
    if not sharded:
        return load_file(path)
    state = new_state(-1.0)
    load_sharded(state, path)
    return state


def assert_is(state, value):
    assert torch.equal(state["w"], torch.full((1000, 100), value))
    assert state["step"].item() == value
    assert state["group"] == {"lr": value}


def change(state, value):
    state["w"].fill_(value)
    state["step"].fill_(value)
    state["group"]["lr"] = value


@KINDS
def test_what_changes_after_the_call_is_not_in_the_checkpoint(tmp_path, sharded):
    state = new_state(0.0)
    with AsyncSaver() as saver:
        for save in range(3):
            change(state, float(save))
            assert saver.save(state, tmp_path / f"ep{save}", sharded=sharded)
            change(state, -7.0)
    for save in range(3):
        assert_is(load(tmp_path / f"ep{save}", sharded), float(save))


@KINDS
def test_stable_tensors_may_change_once_staging_was_waited_for(tmp_path, sharded):
    state = new_state(1.0)
    with AsyncSaver() as saver:
        saver.save(state, tmp_path / "ep1", sharded=sharded, stable_until_step=[state["w"]])
        saver.wait_for_staging()
        change(state, 2.0)
    assert_is(load(tmp_path / "ep1", sharded), 1.0)


class Slow:
    """Something that is pickled only when it may be."""

    def __init__(self, event):
        self.event = event

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        self.event.wait()
        return collections.OrderedDict, ()


def test_a_stable_tensor_that_changes_too_early_fails_the_save(tmp_path):
    weight, event = torch.zeros(10), threading.Event()
    saver = AsyncSaver()
    saver.save({"w": weight, "slow": Slow(event)}, tmp_path / "ep1", stable_until_step=[weight])
    weight += 1
    event.set()
    while saver.is_saving:
        try:
            saver.check()
        except CheckpointError as error:
            raised = error
    assert "'w' was changed while it was copied" in str(raised)


def test_a_change_before_the_wait_is_found_even_if_the_wait_comes_first(tmp_path):
    """A step before `wait_for_staging` went into the checkpoint if the wait ended before the writing did."""
    weight, event = torch.zeros(10), threading.Event()
    saver = AsyncSaver()
    saver.save({"w": weight, "slow": Slow(event)}, tmp_path / "ep1", stable_until_step=[weight])
    weight += 1
    threading.Timer(0.05, event.set).start()
    saver.wait_for_staging()
    with pytest.raises(CheckpointError, match="was changed while it was copied"):
        saver.close()
    assert not (tmp_path / "ep1").exists()
    assert list(tmp_path.iterdir()) == []
    saver.close()


@KINDS
def test_a_failure_is_raised_once_and_leaves_nothing(tmp_path, sharded):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    saver = AsyncSaver()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    try:
        saver.save(new_state(0.0), tmp_path / "ep0", sharded=sharded)
        with pytest.raises(CheckpointError, match="could not be written"):
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    assert not saver.is_saving
    saver.save(new_state(1.0), tmp_path / "ep1", sharded=sharded)
    saver.close()
    assert_is(load(tmp_path / "ep1", sharded), 1.0)


@KINDS
def test_what_cannot_be_begun_is_raised_by_the_call(tmp_path, sharded):
    with AsyncSaver() as saver:
        saver.save(new_state(0.0), tmp_path / "ep0", sharded=sharded)
        with pytest.raises(CheckpointConflictError):
            saver.save(new_state(1.0), tmp_path / "ep0", sharded=sharded)
        saver.save(new_state(2.0), tmp_path / "ep0", sharded=sharded, overwrite=True)
    assert_is(load(tmp_path / "ep0", sharded), 2.0)


def test_a_save_waits_for_the_one_before_or_is_skipped(tmp_path):
    for policy, expected in (("wait", ["ep0", "ep1"]), ("skip", ["ep0"])):
        folder = tmp_path / policy
        written = threading.Event()
        with AsyncSaver(policy=policy) as saver:
            hold = written.wait if policy == "skip" else None
            saver.save(new_state(0.0), folder / "ep0", sharded=True, then=hold)
            assert saver.save(new_state(1.0), folder / "ep1", sharded=True) == (policy == "wait")
            written.set()
        assert sorted(path.name for path in folder.iterdir()) == expected


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match=r"policy='drop' is not known. Use 'wait' or 'skip'"):
        AsyncSaver(policy="drop")


def test_the_next_thing_happens_only_once_the_checkpoint_is_there(tmp_path):
    seen = []
    with AsyncSaver() as saver:
        saver.save(new_state(0.0), tmp_path / "ep0", sharded=True, then=lambda: seen.append(os.listdir(tmp_path)))
    assert seen == [["ep0"]]


def test_an_exception_in_training_still_lets_the_save_end(tmp_path):
    def train():
        with AsyncSaver() as saver:
            saver.save(new_state(3.0), tmp_path / "ep3", sharded=True)
            raise RuntimeError("training")

    with pytest.raises(RuntimeError, match="training"):
        train()
    assert_is(load(tmp_path / "ep3", True), 3.0)


def test_tied_weights_stay_one_tensor_in_the_file(tmp_path):
    weight = torch.randn(100, 100)
    with AsyncSaver() as saver:
        saver.save({"in": weight, "out": weight.view(100, 100)}, tmp_path / "ep0.pt")
    loaded = load_file(tmp_path / "ep0.pt")
    assert loaded["in"].data_ptr() == loaded["out"].data_ptr()
    assert (tmp_path / "ep0.pt").stat().st_size < 1.2 * weight.nbytes


def train_and_save(folder):
    """Training talks in the default group while checkpoints are written."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 257), nn.Linear(257, 64))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    expected = {}
    with AsyncSaver() as saver:
        for step in range(6):
            weights, _ = get_state_dict(model, optimizer)
            if step % 2 == 0:
                expected[step] = {name: tensor.full_tensor().clone() for name, tensor in weights.items()}
                saver.save({"model": weights}, folder / f"ba{step}", sharded=True, stable_until_step=weights.values())
            model(torch.randn(8, 64)).square().sum().backward()
            saver.wait_for_staging()
            optimizer.step()
            optimizer.zero_grad()
            saver.check()
    return expected


def test_training_of_two_ranks_goes_on_and_each_checkpoint_is_of_its_step(tmp_path):
    expected, _ = run_ranks(train_and_save, tmp_path / "saved", store=tmp_path / "store")
    for step, weights in expected.items():
        verify_folder(tmp_path / "saved" / f"ba{step}")
        found = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}}
        load_sharded(found, tmp_path / "saved" / f"ba{step}")
        for name, tensor in weights.items():
            assert torch.equal(found["model"][name], tensor)


def fail_on_rank_one(folder, sharded):
    def then():
        if tdist.get_rank() == 1:
            raise OSError("the pointer's disk is gone")

    saver = AsyncSaver()
    saver.save({"w": torch.ones(10)} if sharded or not tdist.get_rank() else {}, folder, sharded=sharded, then=then)
    step = 0
    while True:
        tdist.barrier()
        try:
            saver.check()
        except OSError as error:
            saver.close()
            return step, str(error)
        step += 1


@KINDS
def test_a_failure_on_one_rank_is_raised_at_the_same_step_on_all(tmp_path, sharded):
    first, second = run_ranks(fail_on_rank_one, tmp_path / "ep0", sharded, store=tmp_path / "store")
    assert first == second
    assert "the pointer's disk is gone" in first[1]


ODD = {
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "coo with a graph": lambda: torch.eye(3).to_sparse().requires_grad_() * 2,
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())
def test_what_has_no_plain_copy_is_saved_as_in_the_foreground(make, tmp_path):
    with AsyncSaver() as saver:
        saver.save({"odd": make(), "w": torch.ones(2)}, tmp_path / "async.pt")
    save_file({"odd": make(), "w": torch.ones(2)}, tmp_path / "now.pt")
    one, other = (load_file(tmp_path / name)["odd"] for name in ("async.pt", "now.pt"))
    assert (one.layout, one.dtype) == (other.layout, other.dtype)
    dense = [tensor.dequantize() if tensor.is_quantized else tensor.to_dense() for tensor in (one, other)]
    assert torch.equal(*dense)


def test_a_save_in_inference_mode_is_one(tmp_path):
    with torch.inference_mode(), AsyncSaver() as saver:
        saver.save({"w": torch.ones(2)}, tmp_path / "ep1.pt")
    assert torch.equal(load_file(tmp_path / "ep1.pt")["w"], torch.ones(2))


SAVES = {
    "file": (save_file, {}, "ep1.pt"),
    "weights": (save_file, {}, "ep1.safetensors"),
    "local": (save_local, {"local": True}, "ep1_rank{rank}.pt"),
    "sharded": (save_sharded, {"sharded": True}, "ep1"),
}


@pytest.mark.parametrize(("save_now", "options", "name"), SAVES.values(), ids=SAVES.keys())
def test_what_has_no_elements_is_refused_by_the_call_as_in_the_foreground(save_now, options, name, tmp_path):
    content = {"w": torch.ones(2, device="meta"), "v": torch.ones(2)}
    with pytest.raises(TypeError, match="meta device") as now:
        save_now(content, tmp_path / name)
    with AsyncSaver() as saver:
        with pytest.raises(TypeError) as later:
            saver.save(content, tmp_path / name, **options)
        assert str(later.value) == str(now.value)
        assert not saver.is_saving
        assert saver.save({"v": torch.ones(2)}, tmp_path / name, **options)  # nothing is left of the other
    assert len(list(tmp_path.iterdir())) == 1


def refuse_on_all_ranks(path):
    content = {"w": torch.ones(2, device="meta")} if tdist.get_rank() == 0 else {}
    with AsyncSaver() as saver:
        try:
            saver.save(content, path)
        except TypeError as error:
            return str(error)
    return "begun"


def test_all_ranks_hear_at_once_that_rank_zero_has_no_elements(tmp_path):
    first, second = run_ranks(refuse_on_all_ranks, tmp_path / "ep1.pt", store=tmp_path / "store")
    assert "(w)" in first
    assert first == second


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch has one accelerator type per process: CUDA")
@pytest.mark.parametrize("is_stable", [False, True], ids=["copied at once", "copied until the step"])
def test_any_accelerator_is_copied_through_pinned_memory_without_a_wait(tmp_path, is_stable):
    """Only CUDA tensors were; others were copied one by one, each with a wait."""
    with SimulatedAccelerator() as accelerator, AsyncSaver() as saver:
        weight = torch.full((1000,), 3.0, device="simgpu")
        with accelerator.counting() as counts:
            saver.save({"w": weight}, tmp_path / "ep1.pt", stable_until_step=[weight] if is_stable else ())
            saver.wait_for_staging()
            weight.fill_(-1)
            saver.wait()
        assert (counts.copies_to_host.total(), counts.synchronizations.total()) == (1, 0)
        assert (load_file(tmp_path / "ep1.pt")["w"] == 3).all()

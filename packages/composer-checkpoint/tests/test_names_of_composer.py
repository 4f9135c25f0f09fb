"""Functions and readers that Composer's users know, beyond saving and loading a state."""

import os
import sys
import tarfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from composer_checkpoint import (
    IncompatibleCheckpointError,
    NoCheckpointError,
    UnsafeCheckpointError,
    load_file,
    load_sharded,
    safe_torch_load,
    save_file,
    save_sharded,
)
from composer_checkpoint.loader import load_sharded_checkpoint
from composer_checkpoint.remote.fetch import download_object_or_file
from composer_checkpoint.resume import download_checkpoint
from composer_checkpoint.sharded import VerifyingReader
from composer_checkpoint.sharded.save import DistCPObjectStoreReader, FileSystemReaderWithValidation, dist_cp_load
from composer_checkpoint.state import get_save_filename
from composer_checkpoint.stores import FsspecObjectStore, LibcloudObjectStore
from composer_dist import dist
from composer_dist.testing import run_ranks
from composer_events import LoggerDestination, State

VARIABLE = "CHECKPOINT_VALIDATION_FUNCTION"
CONTENT = {"w": torch.arange(6.0), "epoch": 3}


@pytest.fixture
def folder(tmp_path):
    save_sharded(CONTENT, tmp_path / "ep3")
    return tmp_path / "ep3"


@pytest.fixture
def store(tmp_path, folder):
    """Hold the folder under `run/ep3`."""
    made = LibcloudObjectStore("local", "box", provider_kwargs={"key": str(tmp_path / "remote")})
    for file in folder.iterdir():
        made.upload_object(f"run/ep3/{file.name}", file)
    return made


@pytest.fixture
def validator(monkeypatch):
    """Be a module with a function that notes what it is asked, and answers what the test wants."""
    calls = []
    module = SimpleNamespace(calls=calls, answer=True)
    module.check = lambda path, specs: calls.append((path, specs)) or module.answer
    monkeypatch.setitem(sys.modules, "checks_of_mine", module)
    monkeypatch.setenv(VARIABLE, "checks_of_mine.check")
    return module


def empty():
    return {"w": torch.zeros(6), "epoch": 0}


def check_loaded(target):
    assert torch.equal(target["w"], CONTENT["w"])
    assert target["epoch"] == 3


@pytest.mark.parametrize("make", [VerifyingReader, FileSystemReaderWithValidation, dcp.FileSystemReader])
def test_readers_load_through_torchs_function(folder, make):
    target = empty()
    dist_cp_load(target, make(str(folder)))
    check_loaded(target)


def test_what_is_wrong_is_raised_as_it_is(folder):
    with pytest.raises(IncompatibleCheckpointError, match="missing"):
        dist_cp_load({**empty(), "other": torch.zeros(1)}, VerifyingReader(folder))
    with pytest.raises(NoCheckpointError):
        dist_cp_load(empty(), VerifyingReader(folder.parent / "nothing"))


def test_a_setting_that_older_optimizers_did_not_save_stays_as_it_is(tmp_path):
    save_sharded({"optim": {"param_groups": [{"lr": 0.5}]}}, tmp_path / "old")
    target = {"optim": {"param_groups": [{"lr": 0.0, "decoupled_weight_decay": True}]}}
    dist_cp_load(target, VerifyingReader(tmp_path / "old"))
    assert target == {"optim": {"param_groups": [{"lr": 0.5, "decoupled_weight_decay": True}]}}
    target["optim"]["param_groups"][0]["nesterov"] = True
    with pytest.raises(IncompatibleCheckpointError, match="nesterov"):
        dist_cp_load(target, VerifyingReader(tmp_path / "old"))


def test_the_validation_function_sees_each_file_with_what_is_read_of_it(folder, validator):
    dist_cp_load({"w": torch.zeros(6)}, VerifyingReader(folder))
    (path, specs), *others = validator.calls
    assert others == []
    assert path == str(folder / "__0_0.distcp")
    size = os.path.getsize(path)
    assert all(start >= 0 and length > 0 and start + length <= size for start, length in specs)
    assert sum(length for _, length in specs) >= 6 * 4


def test_a_folder_that_the_validation_function_refuses_is_not_read(folder, validator):
    validator.answer = False
    target = empty()
    with pytest.raises(ValueError, match=r"__0_0.distcp is refused"):
        load_sharded(target, folder)
    assert not target["w"].any()


def test_a_reader_may_have_a_validation_function_of_its_own(folder, validator):
    seen = []
    dist_cp_load(empty(), FileSystemReaderWithValidation(folder, lambda path, specs: seen.append(path) or True))
    assert seen == [str(folder / "__0_0.distcp")]
    assert validator.calls == []


def test_the_validation_function_is_asked_about_a_single_file(tmp_path, validator):
    save_file(CONTENT, tmp_path / "x.pt")
    load_file(tmp_path / "x.pt")
    assert validator.calls == [(str(tmp_path / "x.pt"), None)]
    validator.answer = 0
    with pytest.raises(ValueError, match=r"x\.pt is refused"):
        load_file(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no_such_module_here.check", ModuleNotFoundError),
        ("os.path.no_such_function", AttributeError),
        ("x", ValueError),
    ],
)
def test_a_validation_function_that_does_not_exist_is_an_error(tmp_path, monkeypatch, name, error):
    save_file(CONTENT, tmp_path / "x.pt")
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(error):
        load_file(tmp_path / "x.pt")


def test_only_the_files_that_are_needed_come_from_a_store_and_only_once(store, tmp_path):
    target = empty()
    dist_cp_load(target, DistCPObjectStoreReader("run/ep3", tmp_path / "here", store))
    check_loaded(target)
    fetched = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "here").iterdir() if ".lock" not in path.name}
    assert fetched.keys() == {".metadata", "__0_0.distcp", "composer_manifest.json"}
    dist_cp_load(empty(), DistCPObjectStoreReader("run/ep3", tmp_path / "here", store))
    assert {name: (tmp_path / "here" / name).stat().st_mtime_ns for name in fetched} == fetched
    with pytest.raises(NoCheckpointError):
        dist_cp_load(empty(), DistCPObjectStoreReader("run/ep4", tmp_path / "there", store))


def test_an_object_comes_from_a_store_or_from_a_logger(store, tmp_path):
    class Keeper(LoggerDestination):
        def download_file(self, remote_file_name, destination, overwrite=False, progress_bar=True):
            store.download_object(remote_file_name, destination, overwrite)

    for index, place in enumerate((store, Keeper())):
        download_object_or_file("run/ep3/.metadata", tmp_path / str(index), place)
        assert (tmp_path / str(index)).read_bytes() == (tmp_path / "ep3" / ".metadata").read_bytes()
        with pytest.raises(FileExistsError):
            download_object_or_file("run/ep3/.metadata", tmp_path / str(index), place)
        with pytest.raises(FileNotFoundError):
            download_object_or_file("run/ep4/.metadata", tmp_path / "missing", place)


@pytest.mark.parametrize("name", ["ep1-rank{rank}.pt", "ep1.tar", "ep1.tar.gz", "ep1.pt.gz"])
def test_a_checkpoint_is_brought_to_the_node_and_unpacked(tmp_path, name):
    save_file({"state": {"model": {"w": torch.ones(2)}}}, tmp_path / name.replace("{rank}", "0"))
    states, unpacked, is_own = download_checkpoint(tmp_path / name, tmp_path / "node", progress_bar=False)
    assert safe_torch_load(states)["state"]["model"]["w"].sum() == 2
    assert (unpacked is None) == ("tar" not in name)
    assert unpacked is None or os.path.dirname(states) == unpacked
    assert not is_own


def test_a_checkpoint_that_is_not_there_or_leads_out_of_its_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        download_checkpoint(tmp_path / "x.pt", tmp_path / "node")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(__file__, "../evil.py")
    with pytest.raises(UnsafeCheckpointError, match="leads out of the archive"):
        download_checkpoint(tmp_path / "x.tar", tmp_path / "node")
    assert not (tmp_path / "evil.py").exists()


def bring(folder, name, is_own):
    states, _, _ = download_checkpoint(
        f"{folder}/{name}", f"{folder}/node", progress_bar=False, fsdp_sharded_state_dict_enabled=is_own
    )
    return float(safe_torch_load(states)["w"].sum())


@pytest.mark.parametrize(("is_own", "expected"), [(False, [0, 0]), (True, [0, 2])])
def test_ranks_share_a_file_or_bring_each_its_own(tmp_path, is_own, expected):
    for rank in range(2):
        save_file({"w": torch.full((2,), float(rank))}, tmp_path / f"rank{rank}.pt")
    assert run_ranks(bring, str(tmp_path), "rank{rank}.pt", is_own, store=tmp_path / "store") == expected


def fail_to_bring(folder):
    try:
        download_checkpoint(f"{folder}/missing.pt", f"{folder}/node")
    except FileNotFoundError as error:
        return str(error)
    return f"no error on rank {dist.get_global_rank()}"


def test_all_ranks_hear_of_a_file_that_is_not_there(tmp_path):
    first, second = run_ranks(fail_to_bring, str(tmp_path), store=tmp_path / "store")
    assert "does not exist" in first
    assert "This likely implies a download failed on local rank 0, which is global rank 0" in second


def make_state(kind=None):
    parallelism = None
    if kind is not None:
        parallelism = SimpleNamespace(fsdp=SimpleNamespace(state_dict_type=kind), fsdp2=None, tp=None)
    return State(torch.nn.Linear(2, 1), 1, "plum", "cpu", parallelism_config=parallelism)


def test_the_name_of_the_next_file_is_known():
    assert get_save_filename(make_state()) == "ep0-ba0-rank0"
    assert get_save_filename(make_state(), "{run_name}/{batch}.pt") == "plum/0.pt"


def test_a_folder_is_loaded_and_a_file_refused(folder, tmp_path):
    saved, state = make_state(), make_state()
    save_sharded({"state": saved.state_dict()}, tmp_path / "whole")
    load_sharded_checkpoint(tmp_path / "whole", state, None, load_weights_only=True)
    assert torch.equal(state.model.weight, saved.model.weight)
    save_file(CONTENT, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt' is a file, and a sharded checkpoint is a folder"):
        load_sharded_checkpoint(tmp_path / "x.pt", state, None)
    with pytest.raises(FileNotFoundError):
        load_sharded_checkpoint(tmp_path / "nothing", state, None)


def test_a_store_in_memory_will_do(folder, tmp_path):
    store = FsspecObjectStore("memory://names-of-composer")
    for file in folder.iterdir():
        store.upload_object(file.name, file)
    target = empty()
    dist_cp_load(target, DistCPObjectStoreReader("", tmp_path / "here", store))
    check_loaded(target)

"""Checkpoints of a store are read, and written, like those of this machine; `memory://` is one inside this process."""

import fsspec
import pytest
import torch

from composer_checkpoint import load_file, save_file, save_sharded
from composer_checkpoint.formats.per_rank import save_local

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def store():
    """Return the file system in memory, empty before and after."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield memory
    memory.store.clear()


@pytest.fixture
def put(store):
    """Copy a file or a folder of this machine to the store."""

    def copy(path, address):
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        for file in files:
            name = f"{address}/{file.relative_to(path)}" if path.is_dir() else address
            with store.open(name, "wb") as remote:
                remote.write(file.read_bytes())

    return copy


def test_a_folder_of_a_store_is_read_as_one_of_this_machine(content, run, run_json, put, tmp_path):
    save_sharded(content, tmp_path / "ep2")
    put(tmp_path / "ep2", "/bucket/run/ep2")
    assert run_json("inspect", "memory://bucket/run/ep2")[1]["format"] == "dcp"
    assert run("diff", tmp_path / "ep2", "memory://bucket/run/ep2", "--all")[0] == 0
    assert run("verify", "memory://bucket/run/ep2/")[0] == 0


def test_the_files_of_all_ranks_are_fetched(content, run, put, tmp_path):
    save_local(content, tmp_path / "ba2_rank{rank}.pt")
    put(tmp_path, "/bucket/run")
    assert run("diff", tmp_path / "ba2_rank{rank}.pt", "memory://bucket/run/ba2_rank{rank}.pt", "--all")[0] == 0


@pytest.mark.parametrize("address", ["memory://bucket/none", "memory://bucket/none.pt", "memory://bucket/x{rank}.pt"])
def test_an_address_of_nothing_is_named(address, run, store):
    code, _, errors = run("inspect", address)
    assert code == 1
    assert "none" in errors or "{rank}" in errors


@pytest.mark.parametrize(("name", "more"), [("out.pt", []), ("out", ["--to", "dcp"]), ("out.safetensors", [])])
def test_a_conversion_goes_to_a_store_and_comes_back(name, more, content, run, store, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    address = f"memory://bucket/run/{name}"
    code, out, errors = run("convert", tmp_path / "ep2.pt", address, *more)
    assert code == 0, errors
    assert address in out
    assert run("diff", tmp_path / "ep2.pt", address)[0] == 0
    assert run("convert", address, tmp_path / "back.pt")[0] == 0
    back = load_file(tmp_path / "back.pt")["state"]["model"]
    assert all(torch.equal(back[name], weight) for name, weight in content["state"]["model"].items())


def test_what_a_store_has_stays_unless_it_may_be_replaced(content, run, store, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    address = "memory://bucket/run/out"
    assert run("convert", tmp_path / "ep2.pt", address, "--to", "dcp", "--world-size", "2")[0] == 0
    store.pipe("/bucket/run/out/notes.txt", b"mine")
    before = store.find("/bucket/run/out")
    code, _, errors = run("convert", tmp_path / "ep2.pt", address, "--to", "dcp")
    assert code == 1
    assert "--overwrite" in errors
    assert store.find("/bucket/run/out") == before
    assert run("convert", tmp_path / "ep2.pt", address, "--to", "dcp", "--overwrite", "--dry-run")[0] == 0
    assert store.find("/bucket/run/out") == before
    assert run("convert", tmp_path / "ep2.pt", address, "--to", "dcp", "--overwrite")[0] == 0
    left = {path.rpartition("/")[2] for path in store.find("/bucket/run/out")}
    assert {"__0_0.distcp", ".metadata", "notes.txt"} <= left
    assert "__1_0.distcp" not in left


def test_an_upload_that_fails_leaves_nothing_that_looks_whole(content, run, store, tmp_path, monkeypatch):
    save_file(content, tmp_path / "ep2.pt")
    put = type(store)._open

    def refuse(self, path, mode="rb", *arguments, **options):
        if "w" in mode and path.endswith(".distcp"):
            raise PermissionError("not you")
        return put(self, path, mode, *arguments, **options)

    monkeypatch.setattr(type(store), "_open", refuse)
    code, _, _ = run("convert", tmp_path / "ep2.pt", "memory://bucket/run/out", "--to", "dcp")
    assert code == 1
    assert not store.exists("/bucket/run/out/.metadata")


def test_an_object_that_leads_out_of_its_folder_is_refused(run, store, tmp_path, monkeypatch):
    from composer_checkpoint.stores.fsspec import FsspecObjectStore

    monkeypatch.setattr(FsspecObjectStore, "list_objects", lambda *_: ["run/../../evil.pt"])
    code, _, errors = run("inspect", "memory://bucket/run")
    assert code == 4
    assert "outside its folder" in errors


@pytest.mark.parametrize(
    ("target", "words"), [("memory://bucket", "a whole store"), ("ftps9://bucket/out", "nothing here saves")]
)
def test_an_address_that_nothing_is_written_to_is_a_usage_error(target, words, content, run, tmp_path):
    save_file(content, tmp_path / "ep2.pt")
    code, _, errors = run("convert", tmp_path / "ep2.pt", target, "--to", "dcp")
    assert code == 2
    assert words in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "foo://x/y"],
        ["inspect", "foo://x/y.pt"],
        ["inspect", "https://host.invalid/folder"],
        ["verify", "foo://x/y"],
        ["diff", "ep2.pt", "foo://x"],
        ["convert", "foo://x/y", "out.pt"],
        [
            "convert",
            "--composer_path",
            "foo://x/y.pt",
            "--hf_output_path",
            "out",
            "--local_checkpoint_save_location",
            "k",
        ],
        ["merge", "ep2.pt", "foo://x/y", "out.pt"],
        ["reshard", "foo://x/y", "out", "--world-size", "2"],
        ["extract", "foo://x/y", "out.pt"],
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_an_address_that_nothing_is_read_from_is_a_usage_error(arguments, content, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(content, "ep2.pt")
    code, _, errors = run(*arguments)
    assert code == 2
    address = next(argument for argument in arguments if "://" in argument)
    assert errors.startswith(f"composer-ckpt: {address!r}: nothing here ")
    assert errors.count("\n") == 1

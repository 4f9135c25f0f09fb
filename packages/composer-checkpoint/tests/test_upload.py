import threading
import uuid
from types import SimpleNamespace

import pytest

from composer_checkpoint.remote.fetch import CheckpointUploadCallback, download_monolithic_checkpoint, upload_file
from composer_checkpoint.remote.upload import RemoteFilesExistingCheckStatus, RemoteUploader
from composer_checkpoint.stores import FsspecObjectStore


@pytest.fixture
def remote():
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def uploader(remote):
    made = RemoteUploader(remote)
    yield made
    made.wait_and_close()


def text(remote, name):
    store = FsspecObjectStore(remote)
    return store.filesystem.cat_file(f"{remote.removeprefix('memory://')}/{name}").decode()


def test_a_file_may_be_changed_and_deleted_once_its_upload_was_asked_for(uploader, remote, tmp_path):
    path = tmp_path / "x"
    path.write_text("first")
    future = uploader.upload_file_async("run/x", path, overwrite=False)
    path.write_text("second")
    path.unlink()
    future.result(timeout=60)
    assert text(remote, "run/x") == "first"


def test_of_many_rapid_uploads_of_one_name_the_last_wins(remote, tmp_path):
    uploader = RemoteUploader(remote, num_concurrent_uploads=4)
    for number in range(20):
        (tmp_path / "x").write_text(str(number))
        uploader.upload_file_async("x", tmp_path / "x", overwrite=True)
    uploader.wait_and_close()
    assert text(remote, "x") == "19"


def test_an_object_that_exists_is_refused_without_overwrite(uploader, tmp_path):
    (tmp_path / "x").write_text("x")
    uploader.upload_file_async("x", tmp_path / "x", overwrite=False)
    uploader.wait()
    uploader.upload_file_async("x", tmp_path / "x", overwrite=False)
    with pytest.raises(FileExistsError, match="already exists, but overwrite was set to False"):
        uploader.wait()
    assert uploader.futures == []


def test_finished_uploads_are_forgotten(uploader, tmp_path):
    (tmp_path / "x").write_text("x")
    uploader.upload_file_async("x", tmp_path / "x", overwrite=True).result(timeout=60)
    uploader.check_workers()
    assert uploader.futures == []


def test_nothing_stays_on_the_disk_and_the_uploader_can_be_used_again(uploader, remote, tmp_path, monkeypatch):
    (tmp_path / "staging").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "staging"))
    (tmp_path / "x").write_text("x")
    for name in ("a", "b"):
        uploader.upload_file_async(name, tmp_path / "x", overwrite=True)
        uploader.wait_and_close()
        assert list((tmp_path / "staging").iterdir()) == []
    assert text(remote, "b") == "x"


def test_waiting_for_files_ends_when_all_can_be_seen(uploader, remote, tmp_path):
    (tmp_path / "x").write_text("x")
    check = uploader.check_remote_files_exist_async(["a", "b"], 60, 0.01)
    for name in ("a", "b"):
        assert not check.done()
        uploader.upload_file_async(name, tmp_path / "x", overwrite=True).result(timeout=60)
    assert check.result(timeout=60) is RemoteFilesExistingCheckStatus.EXIST


def test_waiting_for_files_gives_up_in_time(uploader):
    check = uploader.check_remote_files_exist_async(["a"], 0.05, 0.01)
    assert check.result(timeout=60) is RemoteFilesExistingCheckStatus.TIMEOUT


def test_waiting_for_files_ends_when_an_upload_fails(uploader, tmp_path):
    check = uploader.check_remote_files_exist_async(["a"], 60, 0.01)
    future = uploader.upload_file_async("x", tmp_path / "x", overwrite=True, copy=False)
    assert isinstance(future.exception(timeout=60), FileNotFoundError)
    assert check.result(timeout=60) is RemoteFilesExistingCheckStatus.ERROR
    with pytest.raises(FileNotFoundError):
        uploader.check_workers()


def test_waiting_for_files_ends_when_the_uploader_is_closed(remote):
    uploader = RemoteUploader(remote)
    check = uploader.check_remote_files_exist_async(["a"], 3600, 3600)
    uploader.wait_and_close()
    assert check.result(timeout=60) is RemoteFilesExistingCheckStatus.ERROR


def test_credentials_are_checked_on_rank_zero_only(uploader, remote, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    uploader.init()
    assert FsspecObjectStore(remote).list_objects() == []
    monkeypatch.setenv("RANK", "0")
    uploader.init()
    assert FsspecObjectStore(remote).list_objects() == [".credentials_validated_successfully"]


@pytest.mark.parametrize("arguments", [{"num_concurrent_uploads": 0}, {"num_attempts": 0}])
def test_a_count_of_nothing_is_refused(remote, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        RemoteUploader(remote, **arguments)


def test_a_local_folder_and_an_unknown_scheme_are_refused():
    with pytest.raises(ValueError, match="is a local path"):
        RemoteUploader("some/folder")
    for uri in ("wandb://entity/project", "unknown://x"):
        with pytest.raises(NotImplementedError):
            RemoteUploader(uri)


def test_the_scheme_may_be_in_capitals(tmp_path):
    assert RemoteUploader("MEMORY://bucket").remote_backend.get_uri("x") == "memory://bucket/x"


@pytest.mark.parametrize("value", ["soon", "-1", "inf", "nan"])
def test_a_stagger_that_is_no_time_is_refused(remote, monkeypatch, value):
    monkeypatch.setenv("COMPOSER_LOCAL_RANK_STAGGER_SECONDS", value)
    with pytest.raises(ValueError, match="COMPOSER_LOCAL_RANK_STAGGER_SECONDS"):
        RemoteUploader(remote)


def test_processes_can_upload_too(tmp_path):
    (tmp_path / "x").write_text("x")
    uploader = RemoteUploader((tmp_path / "remote").as_uri(), num_concurrent_uploads=1, use_procs=True)
    name = f"{tmp_path}/remote/x".lstrip("/")
    uploader.upload_file_async(name, tmp_path / "x", overwrite=False)
    uploader.wait()
    uploader.upload_file_async(name, tmp_path / "x", overwrite=False)
    with pytest.raises(FileExistsError):
        uploader.wait_and_close()
    assert (tmp_path / "remote" / "x").read_text() == "x"


def test_the_pointer_is_written_after_the_files_of_all_ranks(uploader, remote, tmp_path):
    (tmp_path / "x").write_text("x")
    pointed = uploader.point_async("run/latest.symlink", "run/ep1", ["run/ep1/a", "run/ep1/b"], timeout_s=60)
    uploader.upload_file_async("run/ep1/a", tmp_path / "x", overwrite=True).result(timeout=60)
    assert not pointed.done()
    uploader.upload_file_async("run/ep1/b", tmp_path / "x", overwrite=True).result(timeout=60)
    pointed.result(timeout=60)
    assert text(remote, "run/latest.symlink") == "run/ep1"


def test_a_pointer_whose_files_do_not_come_is_not_written(uploader, remote):
    with pytest.raises(RuntimeError, match="not all of"):
        uploader.point_async("latest.symlink", "ep1", ["ep1"], timeout_s=0).result(timeout=60)
    with pytest.raises(RuntimeError):
        uploader.wait()
    assert FsspecObjectStore(remote).list_objects() == []


@pytest.mark.parametrize(("granularity", "target"), [("file", "run/x.pt"), ("dir", "run")])
def test_a_file_is_uploaded_and_a_pointer_leads_to_it(remote, tmp_path, granularity, target):
    (tmp_path / "x.pt").write_text("weights")
    upload_file(f"{remote}/run", str(tmp_path / "x.pt"), granularity, async_upload=False)
    assert text(remote, "run/x.pt") == "weights"
    assert text(remote, "run/latest.symlink") == target


def test_uploads_in_the_background_share_one_callback_that_waits_at_the_end(remote, tmp_path):
    state = SimpleNamespace(callbacks=[])
    for number in range(3):
        (tmp_path / f"{number}.pt").write_text("weights")
        upload_file(f"{remote}/run", str(tmp_path / f"{number}.pt"), state=state)
    (callback,) = state.callbacks
    assert isinstance(callback, CheckpointUploadCallback)
    callback.batch_end(state, None)
    callback.fit_end(state, None)
    assert FsspecObjectStore(remote).list_objects() == ["run/0.pt", "run/1.pt", "run/2.pt"]
    upload_file(f"{remote}/run", str(tmp_path / "0.pt"), state=state)
    with pytest.raises(FileExistsError):
        callback.fit_end(state, None)
    callback.post_close()
    assert threading.active_count() < 50


def test_ranks_without_a_file_upload_nothing(remote):
    upload_file(remote, None, async_upload=False)
    assert FsspecObjectStore(remote).list_objects() == []


def test_what_makes_no_sense_is_refused(remote):
    with pytest.raises(ValueError, match="Unrecognized symlink granularity: 'folder'"):
        upload_file(remote, "x", "folder")
    with pytest.raises(ValueError, match="must end in"):
        upload_file(remote, "x", "file", symlink_name="latest")
    with pytest.raises(ValueError, match="state=None"):
        upload_file(remote, "x")


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_checkpoint_is_downloaded_through_its_pointer(remote, tmp_path, as_folder):
    (tmp_path / "x.pt").write_text("weights")
    upload_file(f"{remote}/run", str(tmp_path / "x.pt"), "file", symlink_name="latest.pt.symlink", async_upload=False)
    destination = f"{tmp_path}/in/" if as_folder else f"{tmp_path}/in/copy.pt"
    fetched = download_monolithic_checkpoint(f"{remote}/run/latest.pt.symlink", destination)
    assert fetched == (f"{tmp_path}/in/latest.pt" if as_folder else destination)
    with open(fetched) as file:
        assert file.read() == "weights"


@pytest.mark.parametrize(
    ("local_rank", "node_rank", "one_only", "downloads"),
    [(0, 0, True, True), (1, 0, True, False), (0, 1, True, False), (0, 1, False, True), (1, 1, False, False)],
)
def test_one_rank_or_one_of_each_node_downloads(
    remote, tmp_path, monkeypatch, local_rank, node_rank, one_only, downloads
):
    (tmp_path / "x.pt").write_text("weights")
    upload_file(remote, str(tmp_path / "x.pt"), async_upload=False)
    rank = 2 * node_rank + local_rank
    for name, value in {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank, "NODE_RANK": node_rank}.items():
        monkeypatch.setenv(name, str(value))
    fetched = download_monolithic_checkpoint(f"{remote}/x.pt", str(tmp_path / "copy.pt"), one_only)
    assert fetched == (str(tmp_path / "copy.pt") if downloads else None)
    assert (tmp_path / "copy.pt").exists() == downloads

"""Checkpoints over SFTP: a real server on loopback, which offers files and no commands."""

import os
import threading

import pytest

from composer_checkpoint.errors import StorageError
from composer_checkpoint.file_io import hash_file
from composer_checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.remote.publish import fetch_checkpoint, publish_checkpoint
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.stores import ObjectStoreTransientError, SFTPObjectStore
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri, validate_credentials

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def server(sftp_server):
    return sftp_server


@pytest.fixture
def store(server):
    with SFTPObjectStore("127.0.0.1", server.port, "me", cwd="saves") as made:
        yield made


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(os.urandom(300_000))
    return path


def test_a_file_goes_there_and_comes_back_under_its_name(store, server, file, tmp_path):
    store.upload_object("run/deep/x", file)
    assert [path.name for path in server.folder.rglob("*")] == ["saves", "run", "deep", "x"]
    assert store.get_uri("run/x") == f"sftp://me@127.0.0.1:{server.port}/saves/run/x"
    assert store.get_object_size("run/deep/x") == 300_000
    assert store.list_objects() == store.list_objects("run/") == ["run/deep/x"]
    store.download_object("run/deep/x", tmp_path / "y")
    assert (tmp_path / "y").read_bytes() == file.read_bytes()


def test_an_object_that_was_deleted_is_gone_and_may_be_deleted_again(store, server, file):
    store.upload_object("run/x", file)
    store.upload_object("run/y", file)
    store.delete_object("run/x")
    store.delete_object("run/x")
    assert store.list_objects("run/") == ["run/y"]
    assert [path.name for path in (server.folder / "saves" / "run").iterdir()] == ["y"]


def test_progress_never_goes_back_and_ends_at_the_size(store, file, tmp_path):
    for move in (
        lambda tell: store.upload_object("x", file, tell),
        lambda tell: store.download_object("x", tmp_path / "y", callback=tell),
    ):
        told = []
        move(lambda *progress, told=told: told.append(progress))
        assert told == sorted(told)
        assert len(told) > 2
        assert told[-1] == (300_000, 300_000)


def test_names_that_a_shell_would_read_are_names(store, server, file):
    name = "run; touch owned/$(touch owned)/x y"
    store.upload_object(name, file)
    assert store.list_objects() == [name]
    assert "owned" not in [path.name for path in server.folder.iterdir()]


def test_an_object_is_replaced_in_one_step_and_only_if_asked(store, server, file, tmp_path):
    store.upload_object("x", file)
    with pytest.raises(FileExistsError, match="already exists"):
        store.upload_object("x", file, overwrite=False)
    (tmp_path / "other").write_text("other")
    store.upload_object("x", tmp_path / "other")
    assert [path.name for path in (server.folder / "saves").iterdir()] == ["x"]
    assert (server.folder / "saves" / "x").read_text() == "other"


def test_what_does_not_exist_is_not_found(store, tmp_path):
    with pytest.raises(FileNotFoundError):
        store.get_object_size("gone")
    with pytest.raises(FileNotFoundError):
        store.download_object("gone", tmp_path / "y")
    assert store.list_objects("gone/") == []


def test_a_broken_connection_is_an_error_that_may_pass_and_the_next_attempt_connects_again(store, server, file):
    store.upload_object("x", file)
    server.hang_up()
    for _ in range(3):
        try:
            assert store.get_object_size("x") == 300_000
            break
        except ObjectStoreTransientError:
            continue
    else:
        pytest.fail("the store did not connect again")


def test_a_machine_that_is_not_known_is_not_trusted(server, tmp_path, monkeypatch):
    (tmp_path / "nobody").touch()
    monkeypatch.setenv("COMPOSER_SFTP_KNOWN_HOSTS_FILE", str(tmp_path / "nobody"))
    with pytest.raises(StorageError, match="is not known: its key ssh-ed25519 SHA256:") as caught:
        SFTPObjectStore("127.0.0.1", server.port, "me")
    assert not isinstance(caught.value, ObjectStoreTransientError)
    with SFTPObjectStore("127.0.0.1", server.port, "me", missing_host_key_policy="AutoAddPolicy") as store:
        assert store.list_objects() == []


def test_a_wrong_password_is_refused_and_not_tried_again(server, monkeypatch):
    monkeypatch.delenv("COMPOSER_SFTP_KEY_FILE")
    quiet = {"look_for_keys": False, "allow_agent": False}
    with pytest.raises(StorageError, match="Authentication") as caught:
        SFTPObjectStore("127.0.0.1", server.port, "me", "wrong", connect_kwargs=quiet)
    assert not isinstance(caught.value, ObjectStoreTransientError)
    with SFTPObjectStore(f"sftp://me:se%3Acret%2F@127.0.0.1:{server.port}/saves", connect_kwargs=quiet) as store:
        assert "cret" not in store.get_uri("x")


def test_a_machine_that_is_not_there_is_an_error_that_may_pass():
    with pytest.raises(ObjectStoreTransientError):
        SFTPObjectStore("127.0.0.1", 9, "me")


def test_an_address_leads_to_the_machine(server, file, tmp_path):
    address = f"sftp://me@127.0.0.1:{server.port}"
    with maybe_create_object_store_from_uri(f"{address}/saves/x") as store:
        validate_credentials(store)
        store.upload_object("saves/x", file)
    get_file(f"{address}/saves/x", tmp_path / "y", progress_bar=False)
    get_file(f"{address}//saves/x", tmp_path / "z", progress_bar=False)  # from the root, which is the home here
    assert (tmp_path / "y").read_bytes() == (tmp_path / "z").read_bytes() == file.read_bytes()


def test_a_checkpoint_is_published_and_fetched(store, tmp_path):
    folder = tmp_path / "ep1"
    folder.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (folder / name).write_bytes(os.urandom(1000))
    files = {path.name: FileEntry(path.stat().st_size, hash_file(path)) for path in folder.iterdir()}
    (folder / MANIFEST_NAME).write_text(Manifest(files=files).to_json())
    publish_checkpoint(folder, store, "run/ep1", pointer="run/latest")
    fetch_checkpoint(store, "run/ep1", tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()
    }


def test_files_are_uploaded_in_the_background(server, file):
    uploader = RemoteUploader(f"sftp://me@127.0.0.1:{server.port}/saves", num_concurrent_uploads=3)
    uploader.init()
    for number in range(6):
        uploader.upload_file_async(f"saves/{number}", file, overwrite=False)
    uploader.wait_and_close()
    assert sorted(path.name for path in (server.folder / "saves").iterdir()) == list("012345")


def test_a_folder_that_may_not_be_written_to_is_said(store, server, file):
    (server.folder / "saves").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="could not upload"):
        store.upload_object("run/x", file)


def test_the_store_is_open_once_for_all_threads(server, file):
    with SFTPObjectStore("127.0.0.1", server.port, "me") as store:
        failures = []

        def work(number):
            try:
                store.upload_object(f"{number}", file)
                assert store.get_object_size(f"{number}") == 300_000
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

"""Checkpoints in S3: a real server on loopback, and one in front of it that fails as S3 does on bad days."""

import itertools
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from composer_checkpoint import CheckpointSaver, checkpoint_to_resume, load_checkpoint
from composer_checkpoint.errors import StorageError
from composer_checkpoint.file_io import hash_file
from composer_checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from composer_checkpoint.remote.fetch import get_file
from composer_checkpoint.remote.publish import fetch_checkpoint, publish_checkpoint
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.stores import FsspecObjectStore, GCSObjectStore, ObjectStoreTransientError, S3ObjectStore
from composer_checkpoint.stores.opening import maybe_create_object_store_from_uri, validate_credentials
from composer_events import Engine, Event, State

# The clients still use what newer Python versions deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

KEYS = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
# What the client library tries by itself is kept short: what this package does after it is what is looked at.
IMPATIENT = {"retries": {"max_attempts": 1, "mode": "standard"}, "connect_timeout": 5, "read_timeout": 5}


@pytest.fixture
def server(s3_server):
    return s3_server


@pytest.fixture(autouse=True)
def bucket(s3_bucket):
    return s3_bucket


@pytest.fixture
def store(bucket):
    with S3ObjectStore(bucket, "prefix") as made:
        yield made


@pytest.fixture
def hostile(gateway, bucket, monkeypatch):
    """A store behind the gateway, and no pauses between attempts."""
    monkeypatch.setattr(
        sys.modules["composer_checkpoint.stores.base"], "time", SimpleNamespace(sleep=lambda seconds: None)
    )
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    with S3ObjectStore(bucket, endpoint_url=gateway.url, client_config=IMPATIENT, **KEYS) as made:
        yield made


def on(method, ending, fault, times=10**9):
    """A fault of the first requests of a method for names with an ending."""
    seen = []

    def decide(what, path):
        if what == method and path.endswith(ending) and len(seen) < times:
            seen.append(path)
            return fault
        return None

    return decide


def checkpoint(folder):
    folder.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        (folder / name).write_bytes(os.urandom(100_000))
    files = {path.name: FileEntry(path.stat().st_size, hash_file(path)) for path in folder.iterdir()}
    (folder / MANIFEST_NAME).write_text(Manifest(files=files).to_json())
    return folder


def same(one, other):
    return {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }


def test_a_file_goes_there_and_comes_back(store, bucket, tmp_path):
    (tmp_path / "x").write_bytes(os.urandom(200_000))
    store.upload_object("run/x", tmp_path / "x")
    assert store.get_uri("run/x") == f"s3://{bucket}/prefix/run/x"
    assert store.get_object_size("run/x") == 200_000
    assert store.list_objects("run/") == store.list_objects() == ["run/x"]
    store.download_object("run/x", tmp_path / "y")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    get_file(f"s3://{bucket}/prefix/run/x", tmp_path / "z", progress_bar=False)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "z").read_bytes()


def test_a_large_file_goes_in_parts_and_tells_its_progress(bucket, tmp_path, gateway):
    size = 17 << 20
    (tmp_path / "x").write_bytes(os.urandom(size))
    parts = {"multipart_chunksize": 5 << 20, "max_concurrency": 3}
    told = []
    with S3ObjectStore(bucket, endpoint_url=gateway.url, transfer_config=parts, **KEYS) as store:
        store.upload_object("x", tmp_path / "x", lambda *progress: told.append(progress))
        assert sum(method == "PUT" for method, _ in gateway.seen) == 4
        assert told == sorted(told)
        assert len(told) >= 4
        assert told[-1] == (size, size)
        store.download_object("x", tmp_path / "y")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_what_does_not_exist_is_not_found(store, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"s3://.*/gone"):
        store.get_object_size("gone")
    with pytest.raises(FileNotFoundError):
        store.download_object("gone", tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        S3ObjectStore("no-such-bucket-here").get_object_size("x")


def test_a_bucket_that_does_not_exist_is_an_error_of_the_first_upload(tmp_path):
    with pytest.raises(StorageError, match="Check that the bucket or folder exists"):
        validate_credentials(S3ObjectStore("no-such-bucket-here"))


def test_of_two_that_create_an_object_only_one_succeeds(store, tmp_path, monkeypatch):
    (tmp_path / "x").write_text("x")
    size_of, is_look = store.get_object_size, itertools.cycle([True, False])

    def unseen_before(name):
        if next(is_look):  # both looked before either wrote
            raise FileNotFoundError(name)
        return size_of(name)

    monkeypatch.setattr(store, "get_object_size", unseen_before)
    store.upload_object("x", tmp_path / "x", overwrite=False)
    with pytest.raises(FileExistsError, match="already exists"):
        store.upload_object("x", tmp_path / "x", overwrite=False)


def test_an_object_that_was_deleted_is_gone_and_may_be_deleted_again(store, bucket, tmp_path):
    (tmp_path / "x").write_bytes(b"123")
    for name in ("run/x", "run/xy"):
        store.upload_object(name, tmp_path / "x")
    store.delete_object("run/x")
    store.delete_object("run/x")
    assert store.list_objects("run/") == ["run/xy"]


def test_extra_arguments_reach_the_object(store, tmp_path):
    (tmp_path / "x").write_text("x")
    store.upload_object("x", tmp_path / "x", ExtraArgs={"Metadata": {"step": "7"}, "ContentType": "text/x"})
    assert store.filesystem.info(f"{store.bucket}/prefix/x")["ContentType"] == "text/x"


def test_the_listing_and_sizes_are_not_remembered(store, bucket, tmp_path):
    other = FsspecObjectStore(f"s3://{bucket}/prefix", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    assert other.list_objects() == []
    for text in ("x", "longer"):
        (tmp_path / "x").write_text(text)
        store.upload_object("x", tmp_path / "x")
        assert other.list_objects() == ["x"]
        assert other.get_object_size("x") == len(text)


def test_an_address_leads_to_its_bucket(bucket):
    made = maybe_create_object_store_from_uri(f"s3://{bucket}/some/path")
    assert isinstance(made, S3ObjectStore)
    assert made.get_uri("some/path") == f"s3://{bucket}/some/path"


def test_google_s_bucket_with_an_hmac_key_is_reached_through_its_s3_face(monkeypatch):
    monkeypatch.setenv("GCS_KEY", "key")
    monkeypatch.setenv("GCS_SECRET", "secret")
    store = GCSObjectStore("bucket", "prefix")
    assert store.get_uri("x") == "gs://bucket/prefix/x"
    assert store.filesystem.endpoint_url == "https://storage.googleapis.com"
    assert not store.use_gcs_sdk


def test_a_checkpoint_is_published_and_fetched(store, tmp_path):
    folder = checkpoint(tmp_path / "ep1")
    publish_checkpoint(folder, store, "run/ep1", pointer="run/latest")
    fetch_checkpoint(store, "run/ep1", tmp_path / "copy")
    assert same(folder, tmp_path / "copy")
    get_file("run/latest", tmp_path / "weights", object_store=_Below(store, MANIFEST_NAME), progress_bar=False)
    assert (tmp_path / "weights").read_bytes() == (folder / MANIFEST_NAME).read_bytes()


class _Below:
    """The objects of a folder that a pointer names: here always the same one of them."""

    def __init__(self, store, name):
        self._store, self._name = store, name

    def download_object(self, object_name, filename, overwrite=False, callback=None):
        pointer = object_name.endswith(".symlink")
        name = object_name if pointer or object_name == "run/latest" else f"{object_name}/{self._name}"
        self._store.download_object(name, filename, overwrite, callback)


def test_files_are_uploaded_in_the_background(bucket, tmp_path):
    uploader = RemoteUploader(f"s3://{bucket}/run", num_concurrent_uploads=3)
    uploader.init()
    for number in range(6):
        (tmp_path / "x").write_text(str(number))
        uploader.upload_file_async(f"run/{number}", tmp_path / "x", overwrite=False)
    check = uploader.check_remote_files_exist_async([f"run/{number}" for number in range(6)], 60, 0.1)
    assert check.result(timeout=60).name == "EXIST"
    uploader.wait_and_close()


@pytest.mark.parametrize("fault", [429, 500, 503, "reset", "late"])
def test_a_bad_answer_that_passes_is_survived(gateway, hostile, tmp_path, fault):
    gateway.fault = on("PUT", "__1_0.distcp", fault, times=2)
    folder = checkpoint(tmp_path / "ep1")
    publish_checkpoint(folder, hostile, "run/ep1", pointer="run/latest")
    fetch_checkpoint(hostile, "run/ep1", tmp_path / "copy")
    assert same(folder, tmp_path / "copy")


@pytest.mark.parametrize("fault", [429, 500, "reset"])
def test_a_bad_answer_that_does_not_pass_ends_with_its_cause_and_no_pointer(gateway, hostile, tmp_path, fault):
    gateway.fault = on("PUT", MANIFEST_NAME, fault)
    with pytest.raises(ObjectStoreTransientError) as caught:
        publish_checkpoint(checkpoint(tmp_path / "ep1"), hostile, "run/ep1", pointer="run/latest")
    assert caught.value.__cause__ is not None
    gateway.fault = lambda method, path: None
    assert "run/latest.symlink" not in hostile.list_objects()
    attempts = sum(seen == ("PUT", MANIFEST_NAME) for seen in gateway.seen)
    assert 3 <= attempts <= 20  # three of ours, each with a few of the client library's


def test_a_refusal_is_said_and_not_tried_again(gateway, hostile, tmp_path):
    gateway.fault = on("PUT", "__0_0.distcp", 403)
    with pytest.raises(StorageError, match="could not upload") as caught:
        publish_checkpoint(checkpoint(tmp_path / "ep1"), hostile, "run/ep1", pointer="run/latest")
    assert not isinstance(caught.value, ObjectStoreTransientError)
    assert gateway.seen.count(("PUT", "__0_0.distcp")) == 1


def test_what_must_not_be_seen_is_not_found(gateway, hostile):
    gateway.fault = on("HEAD", "x", 403)
    with pytest.raises(FileNotFoundError, match="these credentials may not see it"):
        hostile.get_object_size("x")


@pytest.mark.parametrize("fault", ["cut", "reset", 500])
def test_a_download_that_breaks_off_is_made_again_and_never_shows_half_a_file(gateway, hostile, tmp_path, fault):
    (tmp_path / "x").write_bytes(os.urandom(1 << 20))
    hostile.upload_object("x", tmp_path / "x")
    gateway.fault = on("GET", "x", fault, times=2)
    get_file("x", tmp_path / "y", object_store=hostile, progress_bar=False)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_a_server_that_is_not_there_is_an_error_that_may_pass(bucket):
    store = S3ObjectStore(bucket, endpoint_url="http://127.0.0.1:9", client_config=IMPATIENT, **KEYS)
    store.filesystem.retries = 1
    with pytest.raises(ObjectStoreTransientError):
        store.get_object_size("x")


@pytest.mark.parametrize("keeps", [-1, 1])
def test_a_run_resumes_by_its_pointer_where_nobody_may_list(gateway, bucket, monkeypatch, keeps):
    """FileNotFoundError, "or these credentials may not see it", before the first step and at a resumption."""
    gateway.fault = lambda method, path: 403 if method == "GET" and path.strip("/") == bucket else None
    monkeypatch.setenv("S3_ENDPOINT_URL", gateway.url)

    def run():
        saver = CheckpointSaver(
            f"s3://{bucket}/run", "ba{batch}.pt", save_interval="1ba", remote_num_checkpoints_to_keep=keeps
        )
        state = State(torch.nn.Linear(2, 1), 1, "plum", "cpu", max_duration="9ba", dataloader=[0, 1], callbacks=[saver])
        engine = Engine(state)
        engine.run_event(Event.INIT)
        with checkpoint_to_resume(saver, state, engine.logger) as path:
            if path is not None:
                load_checkpoint(path, state, None, progress_bar=False)
        resumed_from = int(state.timestamp.batch)
        engine.run_event(Event.FIT_START)
        for _ in range(2):
            state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch(samples=1)
            engine.run_event(Event.BATCH_CHECKPOINT)
        engine.run_event(Event.FIT_END)
        engine.close()
        return resumed_from

    assert [run(), run()] == [0, 2]
    gateway.fault = lambda method, path: None
    with S3ObjectStore(bucket) as store:
        there = [name.rpartition("/")[2] for name in store.list_objects("run/")]
    kept = [f"ba{batch}.pt" for batch in ((1, 2, 3, 4) if keeps < 0 else (4,))]
    assert there == [*kept, "latest-rank0.pt.symlink"]

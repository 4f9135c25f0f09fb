"""Copies in a store that does what stores do on bad days."""

import errno
import sys
import uuid
from collections import Counter
from types import SimpleNamespace

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from composer_checkpoint.errors import CorruptCheckpointError, NoCheckpointError, StorageError
from composer_checkpoint.file_io import hash_file
from composer_checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from composer_checkpoint.remote.publish import fetch_checkpoint, publish_checkpoint
from composer_checkpoint.remote.upload import RemoteUploader
from composer_checkpoint.stores import FsspecObjectStore, ObjectStore, ObjectStoreTransientError

NAMES = ("__0_0.distcp", "__1_0.distcp", ".metadata", MANIFEST_NAME)


class Answer(Exception):
    """What a server answers, as client libraries have it."""

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


class HostileFileSystem(MemoryFileSystem):
    """A store in memory that fails as it is told to.

    Each of `faults` is asked before each operation with its name and path; it may raise, or return `'drop'` to lose the
    second half of what is written, `'lose'` to lose all of it, `'late'` to fail after the work was done, `'stale'` to
    show what was there before the last write.
    """

    protocol = "hostile"
    store = {}  # noqa: RUF012  # fsspec's memory is one for all
    pseudo_dirs = [""]  # noqa: RUF012
    faults = []  # noqa: RUF012
    log = []  # noqa: RUF012
    before = {}  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("hostile://", "memory://"))

    def _fault(self, operation, path):
        self.log.append((operation, path.rpartition("/")[2]))
        answers = [fault(operation, path) for fault in list(self.faults)]
        return next((answer for answer in answers if answer), None)

    def put_file(self, lpath, rpath, **kwargs):
        answer = self._fault("put", rpath)
        self.before[rpath] = self.cat_file(rpath) if self.exists(rpath) else None
        with open(lpath, "rb") as file:
            data = file.read()
        if answer != "lose":
            self.pipe_file(rpath, data[: len(data) // 2] if answer == "drop" else data)
        if answer == "late":
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    def info(self, path, **kwargs):
        if self._fault("info", path) == "stale":
            raise FileNotFoundError(path)
        return super().info(path, **kwargs)

    def get_file(self, rpath, lpath, **kwargs):
        answer = self._fault("get", rpath)
        data = self.cat_file(rpath)
        if answer == "stale" and self.before.get(rpath) is not None:
            data = self.before[rpath].ljust(len(data))[: len(data)]
        with open(lpath, "wb") as file:
            file.write(data[: len(data) // 2] if answer == "drop" else data)


register_implementation("hostile", HostileFileSystem)


def on(operation, ending, do, times=10**9):
    """A fault of the first operations of a kind on names with an ending."""
    count = Counter()

    def fault(what, path):
        if what != operation or not path.endswith(ending) or count["seen"] >= times:
            return None
        count["seen"] += 1
        if isinstance(do, Exception):
            raise do
        return do

    return fault


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(
        sys.modules["composer_checkpoint.stores.base"], "time", SimpleNamespace(sleep=lambda seconds: None)
    )


@pytest.fixture
def store():
    HostileFileSystem.faults, HostileFileSystem.log, HostileFileSystem.before = [], [], {}
    return FsspecObjectStore(f"hostile://{uuid.uuid4().hex}")


def checkpoint(folder, text="whole"):
    """A sharded checkpoint with a manifest."""
    folder.mkdir()
    for name in NAMES[:-1]:
        (folder / name).write_text(f"{text} {name}")
    files = {name: FileEntry((folder / name).stat().st_size, hash_file(folder / name)) for name in NAMES[:-1]}
    (folder / MANIFEST_NAME).write_text(Manifest(files=files).to_json())
    return folder


def pointer(store):
    """What the store's pointer says now."""
    try:
        return store.filesystem.cat_file(f"{store.uri.removeprefix('hostile://')}/run/latest.symlink").decode()
    except FileNotFoundError:
        return None


def publish(store, path, name="run/ep1", **options):
    publish_checkpoint(path, store, name, pointer="run/latest", **options)


def fetched(store, tmp_path, name="run/ep1"):
    fetch_checkpoint(store, name, tmp_path / "fetched", overwrite=True)
    return {path.name: path.read_text() for path in (tmp_path / "fetched").iterdir()}


def test_the_data_comes_first_then_the_index_the_manifest_and_the_pointer(store, tmp_path):
    publish(store, checkpoint(tmp_path / "ep1"), num_concurrent_uploads=1)
    assert [name for operation, name in store.filesystem.log if operation == "put"] == [*NAMES, "latest.symlink"]
    read_back = store.filesystem.log.index(("get", MANIFEST_NAME))
    assert read_back < store.filesystem.log.index(("put", "latest.symlink"))
    assert pointer(store) == "run/ep1"


def test_what_was_published_is_fetched_whole(store, tmp_path):
    folder = checkpoint(tmp_path / "ep1")
    publish(store, folder)
    assert fetched(store, tmp_path) == {name: (folder / name).read_text() for name in NAMES}


def test_a_single_file_is_published_with_the_manifest_beside_it(store, tmp_path):
    (tmp_path / "ep1.pt").write_text("weights")
    (tmp_path / "ep1.pt.manifest.json").write_text("{}")
    publish(store, tmp_path / "ep1.pt", "run/ep1.pt")
    assert store.list_objects() == ["run/ep1.pt", "run/ep1.pt.manifest.json", "run/latest.symlink"]
    fetch_checkpoint(store, "run/ep1.pt", tmp_path / "copy.pt")
    assert (tmp_path / "copy.pt").read_text() == "weights"


@pytest.mark.parametrize(
    "fault", [Answer(429), Answer(500), Answer(503), ConnectionResetError("reset"), TimeoutError()]
)
@pytest.mark.parametrize("operation", ["put", "info", "get"])
def test_what_passes_is_tried_again(store, tmp_path, operation, fault):
    store.filesystem.faults.append(on(operation, MANIFEST_NAME, fault, times=2))
    publish(store, checkpoint(tmp_path / "ep1"), overwrite=True)
    assert pointer(store) == "run/ep1"
    assert len(fetched(store, tmp_path)) == len(NAMES)


@pytest.mark.parametrize("fault", [Answer(429), Answer(500), ConnectionResetError("reset by peer")])
@pytest.mark.parametrize("ending", ["__1_0.distcp", ".metadata", MANIFEST_NAME])
def test_what_does_not_pass_ends_with_its_cause_after_a_few_attempts_and_no_pointer(store, tmp_path, fault, ending):
    publish(store, checkpoint(tmp_path / "ep0"), "run/ep0")
    store.filesystem.faults.append(on("put", ending, fault))
    store.filesystem.log.clear()
    with pytest.raises(ObjectStoreTransientError) as caught:
        publish(store, checkpoint(tmp_path / "ep1"))
    assert caught.value.__cause__ is fault
    assert store.filesystem.log.count(("put", ending)) == 3
    assert pointer(store) == "run/ep0"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_a_store_refuses_is_not_tried_again(store, tmp_path, status):
    store.filesystem.faults.append(on("put", "__0_0.distcp", Answer(status)))
    with pytest.raises(StorageError, match=rf"could not upload .*__0_0.distcp: Answer: status {status}"):
        publish(store, checkpoint(tmp_path / "ep1"))
    assert store.filesystem.log.count(("put", "__0_0.distcp")) == 1
    assert pointer(store) is None


@pytest.mark.parametrize("ending", NAMES)
@pytest.mark.parametrize("loss", ["drop", "lose"])
def test_bytes_that_a_store_drops_are_noticed_before_the_pointer_moves(store, tmp_path, ending, loss):
    store.filesystem.faults.append(on("put", ending, loss))
    with pytest.raises(StorageError, match=r"holds|cannot be seen"):
        publish(store, checkpoint(tmp_path / "ep1"))
    assert pointer(store) is None


def test_bytes_that_a_store_drops_once_are_sent_again(store, tmp_path):
    store.filesystem.faults.append(on("put", "__1_0.distcp", "drop", times=1))
    publish(store, checkpoint(tmp_path / "ep1"))
    assert len(fetched(store, tmp_path)) == len(NAMES)


def test_an_upload_that_succeeded_although_it_ended_in_an_error_is_ours(store, tmp_path):
    for ending in NAMES:
        store.filesystem.faults.append(on("put", ending, "late", times=1))
    publish(store, checkpoint(tmp_path / "ep1"))
    assert pointer(store) == "run/ep1"


def test_a_store_of_the_user_s_that_checks_nothing_is_checked(tmp_path):
    class Careless(ObjectStore):
        def __init__(self):
            self.objects = {}

        def get_uri(self, object_name):
            return f"careless://{object_name}"

        def upload_object(self, object_name, filename, callback=None):
            with open(filename, "rb") as file:
                data = file.read()
            self.objects[object_name] = data[:-1] if object_name.endswith("__0_0.distcp") else data

        def get_object_size(self, object_name):
            if object_name not in self.objects:
                raise FileNotFoundError(object_name)
            return len(self.objects[object_name])

    store = Careless()
    with pytest.raises(StorageError, match=r"holds 17 of the 18 bytes"):
        publish(store, checkpoint(tmp_path / "ep1"))
    assert "run/latest.symlink" not in store.objects


def test_a_store_that_shows_objects_late_is_given_time(store, tmp_path):
    store.filesystem.faults.append(on("info", "__1_0.distcp", "stale", times=2))
    publish(store, checkpoint(tmp_path / "ep1"))
    assert pointer(store) == "run/ep1"


def test_a_manifest_that_reads_back_as_the_one_before_moves_no_pointer(store, tmp_path):
    publish(store, checkpoint(tmp_path / "one", "first"))
    store.filesystem.faults.append(on("get", MANIFEST_NAME, "stale"))
    with pytest.raises(StorageError, match="does not read back as it was sent"):
        publish_checkpoint(checkpoint(tmp_path / "two", "other"), store, "run/ep1", pointer="run/moved", overwrite=True)
    assert "run/moved.symlink" not in store.list_objects()


def test_a_checkpoint_that_is_there_is_not_replaced_unless_asked(store, tmp_path):
    publish(store, checkpoint(tmp_path / "one", "first"))
    with pytest.raises(FileExistsError, match="save_overwrite=True"):
        publish(store, checkpoint(tmp_path / "two", "other"))
    assert fetched(store, tmp_path)[".metadata"] == "first .metadata"
    publish(store, tmp_path / "two", overwrite=True)
    assert fetched(store, tmp_path)[".metadata"] == "other .metadata"


def test_what_a_dead_writer_left_without_a_manifest_is_replaced(store, tmp_path):
    store.filesystem.faults.append(on("put", MANIFEST_NAME, Answer(403)))
    with pytest.raises(StorageError):
        publish(store, checkpoint(tmp_path / "one", "first"))
    store.filesystem.faults.clear()
    publish(store, checkpoint(tmp_path / "two", "other"))
    assert fetched(store, tmp_path)["__0_0.distcp"] == "other __0_0.distcp"


def test_there_is_nothing_to_publish(store, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "gone"):
        with pytest.raises(NoCheckpointError):
            publish(store, tmp_path / name)


def test_without_a_manifest_there_is_no_checkpoint_to_fetch(store, tmp_path):
    publish(store, checkpoint(tmp_path / "ep1"))
    store.filesystem.rm_file(f"{store.uri.removeprefix('hostile://')}/run/ep1/{MANIFEST_NAME}")
    with pytest.raises(NoCheckpointError, match="neither a file of this name nor a whole folder"):
        fetched(store, tmp_path)
    assert not (tmp_path / "fetched").exists()


def test_a_changed_object_is_not_fetched(store, tmp_path):
    publish(store, checkpoint(tmp_path / "ep1"))
    path = f"{store.uri.removeprefix('hostile://')}/run/ep1/__0_0.distcp"
    store.filesystem.pipe_file(path, store.filesystem.cat_file(path).replace(b"whole", b"other"))
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp is not what the manifest says"):
        fetched(store, tmp_path)
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "a/../../escaped", "..\\escaped", "", MANIFEST_NAME])
def test_a_manifest_that_names_files_elsewhere_writes_nothing(store, tmp_path, name):
    folder = checkpoint(tmp_path / "ep1")
    (folder / MANIFEST_NAME).write_text(Manifest(files={name: FileEntry(1, "0" * 32)}).to_json())
    publish(store, folder)
    (tmp_path / "inside").mkdir()
    with pytest.raises(CorruptCheckpointError, match="leads out of"):
        fetch_checkpoint(store, "run/ep1", tmp_path / "inside" / "fetched")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ep1", "inside"]
    assert list((tmp_path / "inside").iterdir()) == []


def test_half_a_download_is_noticed_and_tried_again(store, tmp_path):
    publish(store, checkpoint(tmp_path / "ep1"))
    store.filesystem.faults.append(on("get", "__0_0.distcp", "drop", times=2))
    assert len(fetched(store, tmp_path)) == len(NAMES)
    store.filesystem.faults.append(on("get", "__0_0.distcp", "drop"))
    with pytest.raises(ObjectStoreTransientError, match=r"bytes of .* came"):
        fetched(store, tmp_path)


def test_checkpoints_of_one_pointer_are_published_in_order_in_the_background(store, tmp_path):
    uploader = RemoteUploader(store.uri, num_concurrent_uploads=4)
    for number in range(8):
        uploader.publish_async(checkpoint(tmp_path / f"ep{number}"), f"run/ep{number}", pointer="run/latest")
    uploader.wait_and_close()
    assert pointer(store) == "run/ep7"


def test_a_failed_upload_in_the_background_is_raised_with_its_cause(store, tmp_path):
    store.filesystem.faults.append(on("put", "ep1.pt", Answer(500)))
    (tmp_path / "ep1.pt").write_text("weights")
    uploader = RemoteUploader(store.uri)
    future = uploader.upload_file_async("run/ep1.pt", tmp_path / "ep1.pt", overwrite=True)
    assert isinstance(future.exception(timeout=60), ObjectStoreTransientError)
    with pytest.raises(ObjectStoreTransientError, match="status 500"):
        uploader.check_workers()
    uploader.check_workers()  # said once
    uploader.wait_and_close()

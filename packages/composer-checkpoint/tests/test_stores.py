import os
import shutil
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_checkpoint import CheckpointSaver, stores
from composer_checkpoint.errors import StorageError
from composer_checkpoint.stores import (
    FsspecObjectStore,
    GCSObjectStore,
    LibcloudObjectStore,
    MLFlowObjectStore,
    ObjectStore,
    ObjectStoreTransientError,
    S3ObjectStore,
    SFTPObjectStore,
    UCObjectStore,
)
from composer_checkpoint.stores.base import parse_uri
from composer_checkpoint.stores.opening import (
    build_remote_backend,
    list_remote_objects,
    maybe_create_object_store_from_uri,
    validate_credentials,
)


@pytest.fixture(params=["memory", "file", "local"])
def store(request, tmp_path):
    """Each of the stores that need no server, empty."""
    match request.param:
        case "memory":
            made = FsspecObjectStore(f"memory://{uuid.uuid4().hex}/prefix")
        case "file":
            made = FsspecObjectStore((tmp_path / "remote").as_uri())
        case "local":
            made = LibcloudObjectStore("local", "box", provider_kwargs={"key": str(tmp_path / "remote")})
    with made:
        yield made


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(os.urandom(300_000))
    return path


def test_what_was_uploaded_is_downloaded(store, file, tmp_path):
    store.upload_object("run/ep1.pt", file)
    assert store.get_object_size("run/ep1.pt") == 300_000
    store.download_object("run/ep1.pt", tmp_path / "deep" / "copy")
    assert (tmp_path / "deep" / "copy").read_bytes() == file.read_bytes()


def test_progress_never_goes_back_and_ends_at_the_size(store, file, tmp_path):
    for move in (
        lambda tell: store.upload_object("x", str(file), tell),
        lambda tell: store.download_object("x", str(tmp_path / "copy"), callback=tell),
    ):
        told = []
        move(lambda done, total, told=told: told.append((done, total)))
        assert {total for _, total in told} == {300_000}
        assert sorted(told) == told
        assert told[-1] == (300_000, 300_000)


def test_an_empty_file_is_a_file(store, tmp_path):
    (tmp_path / "empty").touch()
    told = []
    store.upload_object("empty", tmp_path / "empty", lambda *progress: told.append(progress))
    store.download_object("empty", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b""
    assert told[-1] == (0, 0)


def test_what_does_not_exist_is_a_file_that_was_not_found(store, tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        store.get_object_size("gone")
    with pytest.raises(FileNotFoundError, match="gone"):
        store.download_object("gone", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_object(store, file):
    store.upload_object("run/ep1.pt", file)
    with pytest.raises(FileNotFoundError):
        store.get_object_size("run")


def test_a_file_that_exists_is_replaced_only_if_asked(store, file, tmp_path):
    store.upload_object("x", file)
    (tmp_path / "copy").write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=False"):
        store.download_object("x", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "mine"
    store.download_object("x", tmp_path / "copy", overwrite=True)
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()


def test_an_object_that_exists_is_replaced_unless_asked_not_to(store, file, tmp_path):
    (tmp_path / "other").write_text("other")
    store.upload_object("x", file)
    with pytest.raises(FileExistsError, match="already exists, but overwrite was set to False"):
        store.upload_object("x", tmp_path / "other", overwrite=False)
    assert store.get_object_size("x") == 300_000
    store.upload_object("x", tmp_path / "other")
    assert store.get_object_size("x") == 5


def test_listing_is_by_the_beginning_of_names_and_in_order(store, file):
    for name in ("run1/b", "run1/a", "run1/deep/c", "run2/a", "runner"):
        store.upload_object(name, file)
    assert store.list_objects() == ["run1/a", "run1/b", "run1/deep/c", "run2/a", "runner"]
    assert store.list_objects("run1/") == ["run1/a", "run1/b", "run1/deep/c"]
    assert store.list_objects("run1/d") == ["run1/deep/c"]
    assert store.list_objects("run") == ["run1/a", "run1/b", "run1/deep/c", "run2/a", "runner"]
    assert store.list_objects("nothing/here") == []


@pytest.mark.parametrize("name", ["../x", "a/../../x", "", "/"])
def test_a_name_that_leads_out_of_the_store_is_refused(store, file, name):
    with pytest.raises(ValueError, match="is not a name below"):
        store.upload_object(name, file)


def test_what_was_deleted_is_gone_and_the_rest_stays(store, file):
    for name in ("run/ep1.pt", "run/ep10.pt", "run/ep1/part"):
        store.upload_object(name, file)
    store.delete_object("run/ep1.pt")
    assert store.list_objects("run/") == ["run/ep1/part", "run/ep10.pt"]
    with pytest.raises(FileNotFoundError):
        store.get_object_size("run/ep1.pt")
    store.delete_object("run/ep1.pt")  # an attempt before may have done it


def test_nothing_outside_the_store_is_deleted(store):
    for name in ("../x", "run/../../x", "", "/"):
        with pytest.raises(ValueError, match="is not a name below"):
            store.delete_object(name)


def test_an_upload_that_fails_leaves_nothing_that_looks_whole(tmp_path, file, monkeypatch):
    store = FsspecObjectStore((tmp_path / "remote").as_uri())

    def half(source, target, **_):
        Path(target).write_bytes(Path(source).read_bytes()[:1000])
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(store.filesystem, "put_file", half)
    with pytest.raises(ObjectStoreTransientError, match="reset by peer"):
        store.upload_object("x", file)
    assert store.list_objects() == []


def test_addresses_of_objects():
    assert FsspecObjectStore("memory://b/p").get_uri("n") == "memory://b/p/n"
    assert LibcloudObjectStore("local", ".").get_uri("x") == "local://./x"
    assert FsspecObjectStore("file:///").get_uri("tmp/x") == "file:///tmp/x"


def test_progress_of_a_local_libcloud_container_is_told_after_each_chunk(tmp_path, file):
    store = LibcloudObjectStore("local", ".", chunk_size=100_000, provider_kwargs={"key": str(tmp_path)})
    told = []
    store.upload_object("x", file, lambda *progress: told.append(progress))
    assert told == [(0, 300_000), (100_000, 300_000), (200_000, 300_000), (300_000, 300_000)]


def test_a_provider_that_is_not_reached_any_more_names_one_that_is():
    with pytest.raises(ValueError, match=r"rackspace.*Use 'local'"):
        LibcloudObjectStore("rackspace", "box")


def test_a_store_says_what_it_cannot_do():
    class OnlyDownloads(ObjectStore):
        pass

    with OnlyDownloads() as store, pytest.raises(NotImplementedError, match="OnlyDownloads cannot upload"):
        store.upload_object("x", "y")


def test_each_public_store_can_be_named_without_its_client_library():
    assert {getattr(stores, name).__name__ for name in stores.__all__} == set(stores.__all__)
    assert not {"torch", "s3fs", "paramiko", "gcsfs", "adlfs", "ocifs"} & set(vars(stores))


@pytest.mark.parametrize(
    ("scheme", "package", "extra"),
    [
        ("s3", "s3fs", "s3"),
        ("gs", "gcsfs", "gcs"),
        ("az", "adlfs", "azure"),
        ("oci", "ocifs", "oci"),
        ("sftp", "paramiko", "sftp"),
        ("hf", "huggingface_hub", "hf"),
    ],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, scheme, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"needs the package '{package}'.*composer-checkpoint\[{extra}\]"):
        FsspecObjectStore(f"{scheme}://bucket")


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3://bucket/path", ("s3", "bucket", "path")),
        ("S3://bucket/path", ("s3", "bucket", "path")),
        ("oci://bucket@namespace/path", ("oci", "bucket", "path")),
        ("backend://bucket/a/longer/path", ("backend", "bucket", "a/longer/path")),
        ("a/long/path", ("", "", "a/long/path")),
        ("/a/long/path", ("", "", "/a/long/path")),
        (Path("a/path"), ("", "", "a/path")),
        ("backend://bucket/", ("backend", "bucket", "")),
        ("backend://bucket", ("backend", "bucket", "")),
        ("backend://", ("backend", "", "")),
        ("AZURE_BLOBS://box/x", ("azure", "box", "x")),
        ("dbfs:/Volumes/c/s/v/x", ("dbfs", "", "Volumes/c/s/v/x")),
        ("file:///tmp/x", ("file", "", "tmp/x")),
        ("sftp://me@host:22/home", ("sftp", "me", "home")),
        ("sftp://host//root", ("sftp", "host", "/root")),
        ("with:colon", ("", "", "with:colon")),
        ("", ("", "", "")),
    ],
)
def test_the_parts_of_an_address(uri, parts):
    assert tuple(parse_uri(uri)) == parts


def test_an_address_leads_to_its_store():
    assert maybe_create_object_store_from_uri("a/local/path") is None
    assert maybe_create_object_store_from_uri("memory://bucket/x").uri == "memory://bucket"
    assert maybe_create_object_store_from_uri("file:///tmp/x").get_uri("tmp/x") == "file:///tmp/x"


@pytest.mark.parametrize("uri", ["wandb://entity/project", "unknown://bucket/x", "https://host/x"])
def test_an_address_that_nothing_saves_to_is_refused(uri):
    with pytest.raises(NotImplementedError, match="Use s3, gs, oci"):
        maybe_create_object_store_from_uri(uri)


@pytest.mark.parametrize(
    "path", ["Volumes/c/s", "volumes/c/s/v/x", "tables/c/s/v/x", "Volumes/c//v/x", "Volumes/c/s/v/../x"]
)
def test_a_path_that_is_in_no_volume_is_refused_before_the_workspace_is_asked(path):
    with pytest.raises(ValueError, match="is not a path in a volume"):
        maybe_create_object_store_from_uri(f"dbfs:/{path}")


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="'magic' is not known"):
        build_remote_backend("magic", {})
    assert build_remote_backend("libcloud", {"provider": "local", "container": "."}).uri == "local://."


@pytest.mark.parametrize(
    "arguments",
    [
        {"host": "ftp://host"},
        {"host": "sftp://host?x=1"},
        {"host": "sftp://"},
        {"host": "sftp://me@host", "username": "you"},
        {"host": "sftp://me:secret@host", "password": "other"},
        {"host": "sftp://host:23", "port": 24},
        {"host": "sftp://host/x", "cwd": "y"},
        {"host": "host", "missing_host_key_policy": "TrustEverybody"},
    ],
)
def test_what_makes_no_sense_for_sftp_is_refused_before_anything_is_reached(arguments):
    with pytest.raises(ValueError, match=r"is not an SFTP address|is given twice|is unknown") as caught:
        SFTPObjectStore(**arguments)
    assert "secret" not in str(caught.value)


def test_an_unknown_argument_for_s3_is_refused_before_anything_is_reached():
    pytest.importorskip("s3fs")
    store = S3ObjectStore("bucket", aws_access_key_id="k", aws_secret_access_key="s")
    with pytest.raises(ValueError, match=r"Colour.*does not take this"):
        store.upload_object("x", __file__, ExtraArgs={"Colour": "red"})
    with pytest.raises(ValueError, match="does not take this"):
        store.upload_object("x", __file__, Config=3)
    with pytest.raises(ValueError, match="unknown keys"):
        S3ObjectStore("bucket", transfer_config={"threads": 3})


def test_credentials_are_checked_by_writing_a_file_that_is_not_empty():
    store = FsspecObjectStore(f"memory://{uuid.uuid4().hex}")
    validate_credentials(store)
    assert store.list_objects() == [".credentials_validated_successfully"]
    assert store.get_object_size(".credentials_validated_successfully") > 0


def test_the_objects_of_an_address_are_listed(file):
    bucket = uuid.uuid4().hex
    FsspecObjectStore(f"memory://{bucket}").upload_object("run/x", file)
    assert list_remote_objects(f"memory://{bucket}/run") == ["run/x"]
    with pytest.raises(ValueError, match="There are no objects"):
        list_remote_objects(f"memory://{bucket}/other")
    with pytest.raises(ValueError, match="is a local path"):
        list_remote_objects("some/folder")


class Workspace:
    """What `databricks.sdk.WorkspaceClient.files` does, over a local folder."""

    def __init__(self, folder):
        self.files, self._folder = self, folder

    def create_directory(self, path):
        (self._folder / path.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def upload(self, path, content, *, overwrite):
        with open(self._folder / path.lstrip("/"), "wb" if overwrite else "xb") as target:
            shutil.copyfileobj(content, target)

    def download(self, path):
        return SimpleNamespace(contents=open(self._folder / path.lstrip("/"), "rb"))

    def delete(self, path):
        (self._folder / path.lstrip("/")).unlink()

    def get_metadata(self, path):
        return SimpleNamespace(content_length=(self._folder / path.lstrip("/")).stat().st_size)

    def list_directory_contents(self, path):
        for entry in (self._folder / path.lstrip("/")).iterdir():
            yield SimpleNamespace(path=f"/{entry.relative_to(self._folder)}", is_directory=entry.is_dir())


class Tracking:
    """What `mlflow.MlflowClient` does with the artifacts of run `r` of experiment `e`, over a local folder."""

    def __init__(self, folder):
        self._folder = folder

    def get_run(self, run_id):
        assert run_id == "r"
        return SimpleNamespace(info=SimpleNamespace(experiment_id="e", run_id="r"))

    def log_artifact(self, run_id, local_path, artifact_path=None):
        target = self._folder / (artifact_path or "")
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(local_path, target / Path(local_path).name)

    def list_artifacts(self, run_id, path=None):
        folder = self._folder / (path or "")
        entries = folder.iterdir() if folder.is_dir() else []
        return [
            SimpleNamespace(
                path=str(entry.relative_to(self._folder)), is_dir=entry.is_dir(), file_size=entry.stat().st_size
            )
            for entry in entries
        ]

    def download_artifacts(self, run_id, path, dst_path):
        return shutil.copyfile(self._folder / path, Path(dst_path) / Path(path).name)


@pytest.fixture(params=["volume", "artifacts"])
def databricks(request, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE", "0")  # set by uploads, and put back
    folder = tmp_path / "workspace"
    folder.mkdir()
    if request.param == "volume":
        return UCObjectStore("Volumes/c/s/v/checkpoints", client=Workspace(folder))
    return MLFlowObjectStore("dbfs:/databricks/mlflow-tracking/e/r/artifacts/x", client=Tracking(folder))


def test_the_stores_of_databricks_keep_the_same_promises(databricks, file, tmp_path):
    databricks.upload_object("run/x", file)
    databricks.upload_object("run/deep/y", file)
    assert databricks.get_object_size("run/x") == 300_000
    whole_name = databricks.get_uri("run/x").removeprefix("dbfs:")
    assert databricks.get_object_size(whole_name) == 300_000
    assert databricks.list_objects("run/") == ["run/deep/y", "run/x"]
    databricks.download_object("run/x", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
    with pytest.raises(FileExistsError):
        databricks.download_object("run/x", tmp_path / "copy")
    with pytest.raises(FileExistsError):
        databricks.upload_object("run/x", file, overwrite=False)
    with pytest.raises(FileNotFoundError):
        databricks.get_object_size("run/gone")
    with pytest.raises(FileNotFoundError):
        databricks.download_object("run/gone", tmp_path / "gone")
    with pytest.raises(ValueError, match="leads out of"):
        databricks.get_uri("../x")


def test_a_volume_deletes_files_and_mlflow_says_that_it_cannot(databricks, file):
    databricks.upload_object("run/x", file)
    databricks.upload_object("run/y", file)
    if isinstance(databricks, MLFlowObjectStore):
        with pytest.raises(NotImplementedError, match="MLFlowObjectStore cannot delete"):
            databricks.delete_object("run/x")
        return
    databricks.delete_object("run/x")
    databricks.delete_object("run/x")
    assert databricks.list_objects("run/") == ["run/y"]


@pytest.mark.parametrize("uri", ["s3://", "gs:///run", "azure://", "sftp:///home"])
def test_an_address_without_a_bucket_or_host_is_refused(uri):
    with pytest.raises(ValueError, match="names no bucket or host"):
        maybe_create_object_store_from_uri(uri)


@pytest.mark.parametrize(
    "path",
    [
        "databricks/mlflow-tracking/e/r",
        "databricks/mlflow-tracking/e/r/other/x",
        "databricks/mlflow-tracking/{mlflow_experiment_id}/r/artifacts/x",
        "elsewhere/e/r/artifacts",
    ],
)
def test_a_path_that_is_of_no_run_is_refused(path):
    with pytest.raises(ValueError, match=r"is not a path of MLflow artifacts|without its experiment"):
        MLFlowObjectStore(path, client=Tracking(Path()))


def test_mlflow_elsewhere_than_on_databricks_is_refused(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    with pytest.raises(ValueError, match="on Databricks only"):
        MLFlowObjectStore("databricks/mlflow-tracking/e/r/artifacts", client=Tracking(Path()))


def test_artifacts_of_another_run_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = MLFlowObjectStore("databricks/mlflow-tracking/e/r/artifacts", client=Tracking(tmp_path))
    with pytest.raises(ValueError, match="Use a store of that run"):
        store.get_object_size("databricks/mlflow-tracking/e/other/artifacts/x")
    with pytest.raises(ValueError, match="is not part of experiment"):
        MLFlowObjectStore("databricks/mlflow-tracking/f/r/artifacts", client=Tracking(tmp_path))


def test_a_saver_begins_a_run_of_mlflow_that_no_logger_has_begun(loop, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE", "0")
    tracking, begun = Tracking(tmp_path), []
    tracking.create_experiment = lambda name: "e"
    tracking.create_run = lambda experiment: begun.append(experiment) or tracking.get_run("r")
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda uri: tracking))
    folder = "databricks/mlflow-tracking/{mlflow_experiment_id}/{mlflow_run_id}/artifacts/ck"
    saver = CheckpointSaver(f"dbfs:/{folder}", "ba{batch}.pt", f"{folder}/ba{{batch}}.pt", None, None)
    assert begun == []
    loop([saver], "1ep").fit()
    assert begun == ["e"]
    assert saver.remote_file_name.filename == "databricks/mlflow-tracking/e/r/artifacts/ck/ba{batch}.pt"
    assert (tmp_path / "ck" / "ba2.pt").is_file()


@pytest.mark.parametrize("experiment", ["{mlflow_experiment_id}", "e", "f"])
def test_a_run_of_mlflow_that_is_active_is_the_one_that_is_saved_to(experiment, tmp_path, monkeypatch):
    """A new run was begun, beside the one that the script had begun itself."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    active = SimpleNamespace(info=SimpleNamespace(experiment_id="e", run_id="r"))
    new = SimpleNamespace(info=SimpleNamespace(experiment_id=experiment, run_id="new"))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=lambda: active))
    client = Tracking(tmp_path)
    client.create_run = lambda experiment: new
    store = MLFlowObjectStore(f"databricks/mlflow-tracking/{experiment}/{{mlflow_run_id}}/artifacts/ck", client=client)
    assert (store.experiment_id, store.run_id) == (("f", "new") if experiment == "f" else ("e", "r"))


def test_paths_of_databricks_are_taken_apart_and_put_together(tmp_path, monkeypatch):
    """AttributeError: scripts of Composer's call `parse_dbfs_path` and `get_dbfs_path`."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    path = "databricks/mlflow-tracking/e/r/artifacts/ck/ep1.pt"
    assert MLFlowObjectStore.parse_dbfs_path(f"dbfs:/{path}") == ("e", "r", "ck/ep1.pt")
    assert MLFlowObjectStore.parse_dbfs_path(path.removesuffix("/ck/ep1.pt")) == ("e", "r", "")
    with pytest.raises(ValueError, match="is not a path of MLflow artifacts"):
        MLFlowObjectStore.parse_dbfs_path("dbfs:/Volumes/a/b/c")
    store = MLFlowObjectStore(path, client=Tracking(tmp_path))
    assert store.get_dbfs_path("ck/ep1.pt") == store.get_dbfs_path(path) == path
    assert store.get_uri("ck/ep1.pt") == f"dbfs:/{path}"


@pytest.mark.parametrize(("prefix", "key"), [("", "ep1.pt"), ("run", "run/ep1.pt"), ("/a/b/", "a/b/ep1.pt")])
def test_a_key_is_the_name_in_the_bucket(prefix, key, monkeypatch):
    """AttributeError: scripts of Composer's call `GCSObjectStore.get_key`."""
    pytest.importorskip("s3fs")
    monkeypatch.setenv("GCS_KEY", "key")
    monkeypatch.setenv("GCS_SECRET", "secret")
    assert GCSObjectStore("bucket", prefix).get_key("ep1.pt") == key


def test_errors_of_a_store_are_errors_of_storage():
    assert issubclass(ObjectStoreTransientError, StorageError)
    assert issubclass(ObjectStoreTransientError, RuntimeError)

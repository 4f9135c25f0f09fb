"""Stores on Databricks: MLflow artifacts and Unity Catalog volumes."""

import os
import posixpath
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from composer_checkpoint.commit import refuse_existing, write_atomically
from composer_checkpoint.errors import StorageError
from composer_checkpoint.stores.base import Fault, ObjectStore, ObjectStoreTransientError, Progress, classify

__all__ = ["EXPERIMENT_PLACEHOLDER", "MLFLOW_PREFIX", "RUN_PLACEHOLDER", "MLFlowObjectStore", "UCObjectStore"]

MLFLOW_PREFIX: Final = "databricks/mlflow-tracking/"
EXPERIMENT_PLACEHOLDER: Final = "{mlflow_experiment_id}"
RUN_PLACEHOLDER: Final = "{mlflow_run_id}"


class MLFlowObjectStore(ObjectStore):
    """Artifacts of one MLflow run on Databricks, through MLflow's own client.

    Names are relative to the artifacts, or full paths of the same run. Artifacts cannot be deleted: MLflow's client
    does not support it.

    Args:
        path: `databricks/mlflow-tracking/<experiment>/<run>/artifacts/...`. The placeholders `{mlflow_experiment_id}`
            and `{mlflow_run_id}` stand for the active run of this process, or for new ones if none is active.
        multipart_upload_chunk_size: Size of the parts of large files in bytes. MLflow reads it from the environment
            variable `MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE`, which is set for each upload.
        client: An `mlflow.MlflowClient`; when `None`, a client of the environment's workspace.

    Raises:
        ValueError: If the path has another form, names a run without its experiment, or `MLFLOW_TRACKING_URI` is
            not Databricks; all are checked before any request.
        ImportError: If the package `mlflow` is not installed.
    """

    def __init__(self, path: str, multipart_upload_chunk_size: int = 104_857_600, client: Any = None) -> None:
        self.experiment_id, self.run_id = _parse(path)
        tracking_uri = os.environ.get("MLFLOW_TRACKING_URI", "databricks")
        if tracking_uri != "databricks":
            raise ValueError(
                f"MLFLOW_TRACKING_URI={tracking_uri!r}: artifacts are stored through MLflow on Databricks only. Set it "
                f"to 'databricks', or save to the address at which that server keeps its artifacts."
            )
        self.multipart_upload_chunk_size = multipart_upload_chunk_size
        self.client = _make_client() if client is None else client
        if self.run_id == RUN_PLACEHOLDER:
            self._create_run()
        elif self.experiment_id != self.client.get_run(self.run_id).info.experiment_id:
            raise ValueError(
                f"path={path!r}: run {self.run_id} is not part of experiment {self.experiment_id}. Look both up in the "
                f"workspace."
            )

    @staticmethod
    def parse_dbfs_path(path: str) -> tuple[str, str, str]:
        """Return the experiment, the run, and the path below its artifacts.

        Raises:
            ValueError: If it is not a path of MLflow artifacts.

        Example:
            >>> MLFlowObjectStore.parse_dbfs_path("dbfs:/databricks/mlflow-tracking/7/5eed/artifacts/ck/ep1.pt")
            ('7', '5eed', 'ck/ep1.pt')
        """
        return (*_parse(path), "/".join(path.removeprefix("dbfs:").lstrip("/").split("/")[5:]))

    def get_artifact_path(self, object_name: str) -> str:
        """Return a name relative to the run's artifacts.

        Raises:
            ValueError: If it is a full path of another run.
        """
        name = object_name.removeprefix("dbfs:").lstrip("/")
        if ".." in name.split("/"):
            raise ValueError(f"object_name={object_name!r} leads out of the artifacts. Use a path without '..'.")
        if not name.startswith(MLFLOW_PREFIX):
            return name
        experiment, run = _parse(name)
        # Placeholders mean this run: they may have been replaced only after the name was made.
        if (experiment, run) not in {
            (self.experiment_id, self.run_id),
            (EXPERIMENT_PLACEHOLDER, RUN_PLACEHOLDER),
            (self.experiment_id, RUN_PLACEHOLDER),
        }:
            raise ValueError(
                f"object_name={object_name!r} is of run {run} of experiment {experiment}, and this store is of run "
                f"{self.run_id} of experiment {self.experiment_id}. Use a store of that run."
            )
        return "/".join(name.split("/")[5:])

    def get_dbfs_path(self, object_name: str) -> str:
        """Return the full path of an object, `databricks/mlflow-tracking/<experiment>/<run>/artifacts/<name>`."""
        artifacts = f"{MLFLOW_PREFIX}{self.experiment_id}/{self.run_id}/artifacts"
        return f"{artifacts}/{self.get_artifact_path(object_name)}"

    def get_uri(self, object_name: str) -> str:
        """Return the address of an object, whether or not it exists."""
        return f"dbfs:/{self.get_dbfs_path(object_name)}"

    def upload_object(  # pyright: ignore[reportIncompatibleMethodOverride]  # no other arguments
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Progress | None = None,
        *,
        overwrite: bool = True,
    ) -> None:
        """Copy a local file to the artifacts, as in `ObjectStore.upload_object`, with `overwrite`."""
        name, size = self.get_artifact_path(object_name), os.path.getsize(filename)
        if not overwrite and self._size(name) is not None:
            raise FileExistsError(f"Object {self.get_uri(name)} already exists, but overwrite was set to False.")
        with tempfile.TemporaryDirectory() as folder:
            named = Path(folder, posixpath.basename(name))  # MLflow names the artifact after the file
            named.symlink_to(os.path.abspath(filename))  # a copy would need as much disk space again
            try:
                os.environ["MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE"] = str(self.multipart_upload_chunk_size)
                self.client.log_artifact(self.run_id, str(named), posixpath.dirname(name) or None)
            except Exception as error:
                raise self._explained(error, name) from error
        # Raised as transient, so that the callers' retries upload it again.
        if self._size(name) != size:
            raise ObjectStoreTransientError(f"{self.get_uri(name)} is not whole after an upload. Upload it again.")
        if callback is not None:
            callback(size, size)

    def get_object_size(self, object_name: str) -> int:
        """Return the current size of an object in bytes."""
        size = self._size(self.get_artifact_path(object_name))
        if size is None:
            raise FileNotFoundError(f"{self.get_uri(object_name)} does not exist. Look at the name and the run.")
        return size

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Progress | None = None,
    ) -> None:
        """Copy an object to a local file atomically, as in `ObjectStore.download_object`."""
        refuse_existing(Path(filename), overwrite)
        name = self.get_artifact_path(object_name)
        size = self.get_object_size(name)
        with write_atomically(filename, overwrite=overwrite, need_bytes=size) as unfinished:
            # A folder on the same file system, which `os.replace` needs.
            with tempfile.TemporaryDirectory(dir=unfinished.parent) as folder:
                try:
                    fetched = self.client.download_artifacts(self.run_id, name, folder)
                except Exception as error:
                    raise self._explained(error, name) from error
                os.replace(fetched, unfinished)
            if unfinished.stat().st_size != size:
                raise ObjectStoreTransientError(f"{self.get_uri(name)} did not come whole. Download it again.")
        if callback is not None:
            callback(size, size)

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all artifacts with a prefix."""
        prefix = self.get_artifact_path(prefix or "")
        names: list[str] = []
        pending = [posixpath.dirname(prefix)]  # other folders hold no names with the prefix
        while pending:
            for entry in self.client.list_artifacts(self.run_id, pending.pop() or None):
                (pending if entry.is_dir else names).append(entry.path)
        return sorted(name for name in names if name.startswith(prefix))

    def _size(self, name: str) -> int | None:
        # MLflow reports sizes only in the listing of a folder.
        try:
            entries = self.client.list_artifacts(self.run_id, posixpath.dirname(name) or None)
        except Exception as error:
            if classify(error) is Fault.MISSING:
                return None
            raise self._explained(error, name) from error
        return next((entry.file_size for entry in entries if entry.path == name and not entry.is_dir), None)

    def _create_run(self) -> None:
        # Not imported: without mlflow in `sys.modules`, no run is active.
        find_active: Any = getattr(sys.modules.get("mlflow"), "active_run", lambda: None)
        active = find_active()
        if active is not None and self.experiment_id in (EXPERIMENT_PLACEHOLDER, active.info.experiment_id):
            self.experiment_id, self.run_id = active.info.experiment_id, active.info.run_id
            return
        if self.experiment_id == EXPERIMENT_PLACEHOLDER:
            self.experiment_id = self.client.create_experiment(f"/Shared/composer-checkpoints-{os.urandom(4).hex()}")
        self.run_id = self.client.create_run(self.experiment_id).info.run_id

    def _explained(self, error: Exception, name: str) -> Exception:
        match classify(error):
            case Fault.MISSING | Fault.FORBIDDEN:
                return FileNotFoundError(f"{self.get_uri(name)} does not exist, or must not be seen: {error}")
            case Fault.TRANSIENT:
                return ObjectStoreTransientError(f"{self.get_uri(name)} could not be reached: {error}")
        return error


def _parse(path: str) -> tuple[str, str]:
    name = path.removeprefix("dbfs:").lstrip("/")
    parts = name.removeprefix(MLFLOW_PREFIX).split("/")
    if not name.startswith(MLFLOW_PREFIX) or len(parts) < 3 or parts[2] != "artifacts" or not all(parts[:2]):
        raise ValueError(
            f"path={path!r} is no path of MLflow artifacts on Databricks. Give one such as "
            f"'dbfs:/{MLFLOW_PREFIX}<experiment>/<run>/artifacts/checkpoints'."
        )
    if parts[0] == EXPERIMENT_PLACEHOLDER and parts[1] != RUN_PLACEHOLDER:
        raise ValueError(f"path={path!r} names run {parts[1]} without its experiment. Name both, or neither.")
    return parts[0], parts[1]


def _make_client() -> Any:
    try:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  # not among the extras
    except ImportError as error:
        raise ImportError(
            "Storing checkpoints as MLflow artifacts needs the package 'mlflow', which is not installed. Install it "
            "with: pip install mlflow"
        ) from error
    return MlflowClient("databricks")


_CHUNK_BYTES = 8 << 20


class UCObjectStore(ObjectStore):
    """Volume of Unity Catalog, through Databricks' own client.

    Args:
        path: `Volumes/<catalog>/<schema>/<volume>`, optionally with a path below.
        client: A `databricks.sdk.WorkspaceClient`; when `None`, a client with the environment's credentials.

    Raises:
        ValueError: If the path has another form, which is checked before any request.
        ImportError: If the package `databricks-sdk` is not installed.
    """

    def __init__(self, path: str, client: Any = None) -> None:
        self.prefix = self.validate_path(path)
        if client is None:
            try:
                from databricks.sdk import WorkspaceClient  # pyright: ignore[reportMissingImports]  # not among the extras
            except ImportError as error:
                raise ImportError(
                    f"'dbfs:/{path.lstrip('/')}' needs the package 'databricks-sdk', which is not installed. Install "
                    f"it with: pip install databricks-sdk"
                ) from error
            client = WorkspaceClient()
        self.client = client

    @staticmethod
    def validate_path(path: str) -> str:
        """Return the volume of a path: its first four names.

        Raises:
            ValueError: If it has fewer names, or does not start with `Volumes`.
        """
        parts = path.strip("/").split("/")
        if parts[0] != "Volumes" or len(parts) < 4 or not all(parts[:4]) or ".." in parts:
            raise ValueError(
                f"path={path!r} is no path in a volume of Unity Catalog. Give one such as "
                f"'Volumes/<catalog>/<schema>/<volume>/checkpoints'."
            )
        return "/".join(parts[:4])

    def get_uri(self, object_name: str) -> str:
        """Return the address of an object, whether or not it exists."""
        return f"dbfs:{self._path(object_name)}"

    def upload_object(  # pyright: ignore[reportIncompatibleMethodOverride]  # no other arguments
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Progress | None = None,
        *,
        overwrite: bool = True,
    ) -> None:
        """Copy a local file to the volume, as in `ObjectStore.upload_object`, with `overwrite`."""
        path, size = self._path(object_name), os.path.getsize(filename)
        try:
            self.client.files.create_directory(os.path.dirname(path))
            with open(filename, "rb") as content:
                self.client.files.upload(path, content, overwrite=overwrite)
            stored = self.get_object_size(object_name)
        except Exception as error:
            raise self._explained(error, object_name) from error
        if stored != size:
            raise ObjectStoreTransientError(
                f"{self.get_uri(object_name)} holds {stored} of {size} bytes after an upload. Upload it again."
            )
        if callback is not None:
            callback(size, size)

    def get_object_size(self, object_name: str) -> int:
        """Return the current size of an object in bytes."""
        try:
            return int(self.client.files.get_metadata(self._path(object_name)).content_length)
        except Exception as error:
            raise self._explained(error, object_name) from error

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Progress | None = None,
    ) -> None:
        """Copy an object to a local file atomically, as in `ObjectStore.download_object`."""
        refuse_existing(Path(filename), overwrite)
        size, done = self.get_object_size(object_name), 0
        with write_atomically(filename, overwrite=overwrite, need_bytes=size) as unfinished:
            try:
                with (
                    self.client.files.download(self._path(object_name)).contents as content,
                    unfinished.open("wb") as file,
                ):
                    while chunk := content.read(_CHUNK_BYTES):
                        done += file.write(chunk)
                        if callback is not None:
                            callback(done, size)
            except Exception as error:
                raise self._explained(error, object_name) from error
            if done != size:
                raise ObjectStoreTransientError(
                    f"{done} of the {size} bytes of {self.get_uri(object_name)} came. Download it again."
                )

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all objects with a prefix, relative to the volume."""
        prefix = (prefix or "").lstrip("/").removeprefix(f"{self.prefix}/")
        names: list[str] = []
        pending = [f"/{self.prefix}/{os.path.dirname(prefix)}".rstrip("/")]
        while pending:
            try:
                # A list, so that the requests of the generator happen inside the `try`.
                entries = list(self.client.files.list_directory_contents(pending.pop()))
            except Exception as error:
                if classify(error) is Fault.MISSING:
                    continue
                raise self._explained(error, prefix) from error
            pending += [entry.path for entry in entries if entry.is_directory]
            names += [entry.path.removeprefix(f"/{self.prefix}/") for entry in entries if not entry.is_directory]
        return sorted(name for name in names if name.startswith(prefix))

    def delete_object(self, object_name: str) -> None:
        """Delete an object, or do nothing if it does not exist."""
        try:
            self.client.files.delete(self._path(object_name))
        except Exception as error:
            if classify(error) is not Fault.MISSING:  # an attempt that failed may have deleted it
                raise self._explained(error, object_name, asks=False) from error

    def _path(self, object_name: str) -> str:
        name = object_name.lstrip("/").removeprefix(f"{self.prefix}/")  # full paths are accepted, too
        if ".." in name.split("/"):
            raise ValueError(f"object_name={object_name!r} leads out of /{self.prefix}. Use a path without '..'.")
        return f"/{self.prefix}/{name}"

    def _explained(self, error: Exception, object_name: str, *, asks: bool = True) -> Exception:
        match classify(error):
            case Fault.MISSING | Fault.FORBIDDEN if asks:
                return FileNotFoundError(f"{self.get_uri(object_name)} does not exist, or must not be seen: {error}")
            case Fault.EXISTS:
                return FileExistsError(f"Object {self.get_uri(object_name)} already exists: {error}")
            case Fault.TRANSIENT:
                return ObjectStoreTransientError(f"{self.get_uri(object_name)} could not be reached: {error}")
            case Fault.FORBIDDEN:
                return StorageError(f"{self.get_uri(object_name)} must not be deleted: {error}. Look at the grants.")
        return error

"""Object stores on Databricks: MLflow artifacts and Unity Catalog volumes."""

import os
import posixpath
import tempfile
from pathlib import Path
from typing import Any, Final

from fsspec.callbacks import Callback

from composer_checkpoint.stores.base import Fault, ObjectStore, classify
from composer_checkpoint.stores.fsspec import VerifiedObjectStore
from composer_events.arguments import loaded

MLFLOW_PREFIX: Final = "databricks/mlflow-tracking/"
EXPERIMENT_PLACEHOLDER: Final = "{mlflow_experiment_id}"
RUN_PLACEHOLDER: Final = "{mlflow_run_id}"


class MLFlowObjectStore(VerifiedObjectStore):
    """Artifacts of one MLflow run on Databricks, accessed through MLflow's own client.

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
        if client is None:
            from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  # not among the extras

            client = MlflowClient("databricks")
        self.client = client
        if self.run_id == RUN_PLACEHOLDER:
            self._create_run()
        elif self.experiment_id != self.client.get_run(self.run_id).info.experiment_id:
            raise ValueError(
                f"path={path!r}: run {self.run_id} is not part of experiment {self.experiment_id}. Look them up in the "
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
        # Placeholders stand for this run, since names may have been formed before the run was known.
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

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all artifacts with a prefix."""
        prefix = self.get_artifact_path(prefix or "")
        names: list[str] = []
        pending = [posixpath.dirname(prefix)]  # other folders hold no names with the prefix
        while pending:
            for entry in self.client.list_artifacts(self.run_id, pending.pop() or None):
                (pending if entry.is_dir else names).append(entry.path)
        return sorted(name for name in names if name.startswith(prefix))

    delete_object = ObjectStore.delete_object  # MLflow's client cannot delete

    def _path(self, object_name: str) -> str:
        return self.get_artifact_path(object_name)

    def _put(self, filename: str, path: str, progress: Callback, *, overwrite: bool, **kwargs: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            named = Path(folder, posixpath.basename(path))  # MLflow names the artifact after the file
            named.symlink_to(os.path.abspath(filename))  # a copy would double the disk space
            os.environ["MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE"] = str(self.multipart_upload_chunk_size)
            self.client.log_artifact(self.run_id, str(named), posixpath.dirname(path) or None)

    def _get(self, path: str, target: Path, progress: Callback) -> None:
        # On the file system of the target, since `os.replace` does not move files between file systems.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            os.replace(self.client.download_artifacts(self.run_id, path, folder), target)

    def _size(self, path: str) -> int:
        # MLflow reports sizes only in the listing of a folder.
        for entry in self.client.list_artifacts(self.run_id, posixpath.dirname(path) or None):
            if entry.path == path and not entry.is_dir:
                return entry.file_size
        raise FileNotFoundError(path)

    def _create_run(self) -> None:
        # Not imported, since no run can be active if mlflow was never imported.
        find_active: Any = getattr(loaded("mlflow"), "active_run", lambda: None)
        active = find_active()
        if active is not None and self.experiment_id in (EXPERIMENT_PLACEHOLDER, active.info.experiment_id):
            self.experiment_id, self.run_id = active.info.experiment_id, active.info.run_id
            return
        if self.experiment_id == EXPERIMENT_PLACEHOLDER:
            self.experiment_id = self.client.create_experiment(f"/Shared/composer-checkpoints-{os.urandom(4).hex()}")
        self.run_id = self.client.create_run(self.experiment_id).info.run_id


def _parse(path: str) -> tuple[str, str]:
    name = path.removeprefix("dbfs:").lstrip("/")
    parts = name.removeprefix(MLFLOW_PREFIX).split("/")
    if not name.startswith(MLFLOW_PREFIX) or len(parts) < 3 or parts[2] != "artifacts" or not all(parts[:2]):
        raise ValueError(
            f"path={path!r} is not a path of MLflow artifacts on Databricks. Give one such as "
            f"'dbfs:/{MLFLOW_PREFIX}<experiment>/<run>/artifacts/checkpoints'."
        )
    if parts[0] == EXPERIMENT_PLACEHOLDER and parts[1] != RUN_PLACEHOLDER:
        raise ValueError(f"path={path!r} names run {parts[1]} without its experiment. Name both, or neither.")
    return parts[0], parts[1]


_CHUNK_BYTES = 8 << 20


class UCObjectStore(VerifiedObjectStore):
    """Volume of Unity Catalog, accessed through Databricks' own client.

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
                from databricks.sdk import WorkspaceClient  # pyright: ignore[reportMissingImports]  # no extra of ours
            except ImportError as error:
                raise ImportError(f"{path!r} needs a package: pip install databricks-sdk") from error
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
                f"path={path!r} is not a path in a volume of Unity Catalog. Give one such as "
                f"'Volumes/<catalog>/<schema>/<volume>/checkpoints'."
            )
        return "/".join(parts[:4])

    def get_uri(self, object_name: str) -> str:
        """Return the address of an object, whether or not it exists."""
        return f"dbfs:{self._path(object_name)}"

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all objects with a prefix, relative to the volume."""
        prefix = (prefix or "").lstrip("/").removeprefix(f"{self.prefix}/")
        names: list[str] = []
        pending = [f"/{self.prefix}/{os.path.dirname(prefix)}".rstrip("/")]
        while pending:
            folder = pending.pop()
            try:
                # A list, since the generator sends its requests while it is consumed, which must happen in this `try`.
                entries = list(self.client.files.list_directory_contents(folder))
            except Exception as error:
                if classify(error) is Fault.MISSING:  # without the folder, there are no objects with the prefix
                    continue
                raise self._explain(error, folder, "list") from error
            pending += [entry.path for entry in entries if entry.is_directory]
            names += [entry.path.removeprefix(f"/{self.prefix}/") for entry in entries if not entry.is_directory]
        return sorted(name for name in names if name.startswith(prefix))

    def _path(self, object_name: str) -> str:
        name = object_name.lstrip("/").removeprefix(f"{self.prefix}/")  # full paths are accepted, too
        if ".." in name.split("/"):
            raise ValueError(f"object_name={object_name!r} leads out of /{self.prefix}. Use a path without '..'.")
        return f"/{self.prefix}/{name}"

    def _put(self, filename: str, path: str, progress: Callback, *, overwrite: bool, **kwargs: Any) -> None:
        self.client.files.create_directory(os.path.dirname(path))  # volumes have real folders; parents are created too
        with open(filename, "rb") as content:
            self.client.files.upload(path, content, overwrite=overwrite)

    def _get(self, path: str, target: Path, progress: Callback) -> None:
        with self.client.files.download(path).contents as content, target.open("wb") as file:
            while chunk := content.read(_CHUNK_BYTES):
                progress.relative_update(file.write(chunk))

    def _size(self, path: str) -> int:
        return int(self.client.files.get_metadata(path).content_length)

    def _remove(self, path: str) -> None:
        self.client.files.delete(path)

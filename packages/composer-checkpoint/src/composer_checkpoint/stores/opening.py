"""The store in which an address lies."""

import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from fsspec.core import get_filesystem_class

from composer_checkpoint.retry import retry
from composer_checkpoint.stores.addresses import parse_uri
from composer_checkpoint.stores.azure import AzureObjectStore
from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError
from composer_checkpoint.stores.fsspec_store import FsspecObjectStore
from composer_checkpoint.stores.gcs import GCSObjectStore
from composer_checkpoint.stores.libcloud import LibcloudObjectStore
from composer_checkpoint.stores.mlflow import MLFLOW_PREFIX, MLFlowObjectStore
from composer_checkpoint.stores.oci import OCIObjectStore
from composer_checkpoint.stores.s3 import S3ObjectStore
from composer_checkpoint.stores.sftp import SFTPObjectStore
from composer_checkpoint.stores.unity_catalog import UCObjectStore

__all__ = [
    "CREDENTIALS_PROBE",
    "arguments_of",
    "build_remote_backend",
    "check_scheme",
    "list_if_allowed",
    "list_remote_objects",
    "maybe_create_object_store_from_uri",
    "open_store",
    "validate_credentials",
]

log = logging.getLogger(__name__)

CREDENTIALS_PROBE: Final = ".credentials_validated_successfully"
_NO_STORES: Final = {"wandb", "http", "https"}  # fsspec reads some of them
# By functions, which look the classes up when they are called: tests of users put others in their place.
_BACKENDS: Final[dict[str, Callable[..., ObjectStore]]] = {
    "s3": lambda **settings: S3ObjectStore(**settings),
    "oci": lambda **settings: OCIObjectStore(**settings),
    "gs": lambda **settings: GCSObjectStore(**settings),
    "sftp": lambda **settings: SFTPObjectStore(**settings),
    "azure": lambda **settings: AzureObjectStore(**settings),
    "libcloud": lambda **settings: LibcloudObjectStore(**settings),
}


def maybe_create_object_store_from_uri(uri: str) -> ObjectStore | None:
    """Return the store in which an address lies, or `None` for a local path.

    The path of the address is not part of the store: `parse_uri(uri).path` is the object's name in it.

    Args:
        uri: An address. `s3`, `gs`, `oci`, `azure`, `sftp` and `dbfs` have stores of their own; other schemes are
            those that fsspec knows (`az`, `abfs`, `hf`, `memory`, `file`, ...).

    Raises:
        NotImplementedError: If nothing here reaches this kind of address.
        ImportError: If the package for it is not installed, with the line that installs it.
        ValueError: If the address is malformed, or there are no credentials.
    """
    parsed = parse_uri(uri)
    netloc = urlsplit(uri).netloc
    if parsed.backend in {*_BACKENDS, "ssh"} and not netloc:
        raise ValueError(f"{uri!r} names no bucket or host. Write one such as '{parsed.backend}://bucket/folder'.")
    match parsed.backend:
        case "":
            return None
        case "s3":
            return S3ObjectStore(bucket=parsed.bucket)
        case "gs":
            return GCSObjectStore(bucket=parsed.bucket)
        case "oci":
            return OCIObjectStore(bucket=netloc if "@" in netloc else parsed.bucket)
        case "azure":
            return AzureObjectStore(container=parsed.bucket)
        case "sftp" | "ssh":
            return SFTPObjectStore(host=arguments_of(uri)["host"])
        case "dbfs":
            return _databricks_store(parsed.path)
    check_scheme(uri)
    return FsspecObjectStore(f"{parsed.backend}://{netloc}{'' if netloc else '/'}")


def check_scheme(uri: str) -> None:
    """Raise if no store has this kind of address.

    Raises:
        NotImplementedError: If nothing here reaches it.
    """
    backend = parse_uri(uri).backend
    if backend in {*_BACKENDS, "ssh", "dbfs"} - {"libcloud"}:
        return
    try:
        known = backend not in _NO_STORES and get_filesystem_class(backend) is not None
    except ValueError:
        known = False
    if not known:
        raise NotImplementedError(
            f"{uri!r}: nothing here saves to {backend}:// addresses. Use s3, gs, oci, azure, sftp, hf, dbfs, or "
            f"another scheme that fsspec knows."
        )


def open_store(uri: str, backend_kwargs: Mapping[str, Any] | None = None) -> ObjectStore:
    """Return the store in which an address lies, with more arguments for its class.

    Args:
        uri: As in `maybe_create_object_store_from_uri`, or `libcloud://container`.
        backend_kwargs: The arguments. Those that the address gives, such as the bucket, may be among them.

    Raises:
        NotImplementedError: If nothing here reaches this kind of address.
        ImportError: If the package for it is not installed, with the line that installs it.
        ValueError: If it is a local path or malformed, or there are no credentials.
    """
    parsed = parse_uri(uri)
    if parsed.backend in (*_BACKENDS, "dbfs") and (backend_kwargs or parsed.backend == "libcloud"):
        return build_remote_backend(parsed.backend, {**arguments_of(uri), **(backend_kwargs or {})})
    store = maybe_create_object_store_from_uri(uri)
    if isinstance(store, FsspecObjectStore) and backend_kwargs:
        return FsspecObjectStore(store.uri, **backend_kwargs)
    if store is None:
        raise ValueError(f"{uri!r} is a local path. Give an address such as 's3://bucket/folder'.")
    return store


def arguments_of(uri: str) -> dict[str, str]:
    """Return the arguments that an address gives to `build_remote_backend`."""
    match parse_uri(uri):
        case ("s3" | "oci" | "gs", bucket, _):
            return {"bucket": bucket}
        case ("azure" | "libcloud", container, _):
            return {"container": container}
        case ("sftp" | "ssh", _, path):  # names count from the root where the path does
            return {"host": f"sftp://{urlsplit(uri).netloc}{'//' if path.startswith('/') else ''}"}
        case ("dbfs", _, path):
            return {"path": path}
        case _:
            return {}


def build_remote_backend(remote_backend_name: str, backend_kwargs: dict[str, Any]) -> ObjectStore:
    """Return the store of a name.

    Args:
        remote_backend_name: `s3`, `oci`, `gs`, `sftp`, `azure`, `libcloud` or `dbfs`.
        backend_kwargs: The arguments of its class.

    Raises:
        ValueError: If the name is another one.
    """
    if remote_backend_name == "dbfs":
        path = str(backend_kwargs.get("path", "")).removeprefix("dbfs:").lstrip("/")
        return (
            MLFlowObjectStore(**backend_kwargs) if path.startswith(MLFLOW_PREFIX) else UCObjectStore(**backend_kwargs)
        )
    if remote_backend_name not in _BACKENDS:
        raise ValueError(
            f"remote_backend_name={remote_backend_name!r} is not known. Use one of {', '.join(_BACKENDS)} or dbfs, or "
            f"an address that fsspec knows."
        )
    return _BACKENDS[remote_backend_name](**backend_kwargs)


def validate_credentials(store: ObjectStore, remote_file_name: str = CREDENTIALS_PROBE) -> None:
    """Upload a small file, so that wrong credentials are found before training and not at the first checkpoint.

    Args:
        store: The store.
        remote_file_name: What the file is called there.

    Raises:
        StorageError: If the store refuses, or does not answer after three attempts.
    """
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe"
        probe.write_text("credentials_validated_successfully")
        retry(ObjectStoreTransientError)(store.upload_object)(remote_file_name, str(probe))


def list_remote_objects(remote_path: str) -> list[str]:
    """Return the names of the objects below an address.

    Raises:
        ValueError: If it is a local path, or there is nothing.
    """
    store = maybe_create_object_store_from_uri(remote_path)
    if store is None:
        raise ValueError(f"remote_path={remote_path!r} is a local path. Give an address such as 's3://bucket/folder'.")
    with store:
        objects = store.list_objects(parse_uri(remote_path).path)
    if not objects:
        raise ValueError(f"There are no objects at remote_path={remote_path!r}. Look at the name and the folder.")
    return objects


def list_if_allowed(store: ObjectStore, prefix: str) -> list[str]:
    """Return the names of the objects that begin with a text; none where the store or these credentials cannot list.

    Raises:
        FileNotFoundError: If the store does not show what `validate_credentials` has put there either, so that what is
            not seen may be there all the same.
    """
    try:
        return store.list_objects(prefix)
    except NotImplementedError:
        return []
    except FileNotFoundError as error:
        try:
            store.get_object_size(CREDENTIALS_PROBE)
        except FileNotFoundError:
            raise error from error.__cause__
        log.warning("Only what a pointer or a checkpoint names is found: %s", error)
        return []


def _databricks_store(path: str) -> ObjectStore:
    if path.startswith(MLFLOW_PREFIX):
        return MLFlowObjectStore(path=path)
    UCObjectStore.validate_path(path)
    return UCObjectStore(path=path)

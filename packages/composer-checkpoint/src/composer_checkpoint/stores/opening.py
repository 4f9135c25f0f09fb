"""Open the store of an address, and check that it responds."""

import logging
import posixpath
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from fsspec.core import get_filesystem_class

from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError, parse_uri, retry
from composer_checkpoint.stores.cloud import (
    AzureObjectStore,
    GCSObjectStore,
    LibcloudObjectStore,
    OCIObjectStore,
    S3ObjectStore,
)
from composer_checkpoint.stores.databricks import MLFLOW_PREFIX, MLFlowObjectStore, UCObjectStore
from composer_checkpoint.stores.fsspec import FsspecObjectStore
from composer_checkpoint.stores.sftp import SFTPObjectStore

log = logging.getLogger(__name__)

A = TypeVar("A")

CREDENTIALS_PROBE: Final = ".credentials_validated_successfully"
# Kind, owner and name of a repository, and its revision. Names of objects begin after the owner, or the kind.
_REPOSITORY: Final = re.compile(
    r"(?:(?:models|datasets|spaces|buckets|kernels)/)?[^/]+/[^/@]+(?:@(?:refs/(?:pr|convert)/)?[^/]+)?"
)
_FIRST_ANSWER_S: Final = 12.0
_answered: Final = set[tuple[str, str]]()  # backends and buckets, in this process
_NO_STORES: Final = {"wandb", "http", "https"}  # fsspec supports some of them, but read-only
# Lambdas look the classes up when called, so that users' tests can patch the classes in this module.
_BACKENDS: Final[dict[str, Callable[..., ObjectStore]]] = {
    "s3": lambda **settings: S3ObjectStore(**settings),
    "oci": lambda **settings: OCIObjectStore(**settings),
    "gs": lambda **settings: GCSObjectStore(**settings),
    "sftp": lambda **settings: SFTPObjectStore(**settings),
    "azure": lambda **settings: AzureObjectStore(**settings),
    "libcloud": lambda **settings: LibcloudObjectStore(**settings),
}


def maybe_create_object_store_from_uri(uri: str) -> ObjectStore | None:
    """Return the store of an address, or `None` for a local path.

    The path of the address is not part of the store: `parse_uri(uri).path` is the object's name in it.

    Args:
        uri: An address. `s3`, `gs`, `oci`, `azure`, `sftp` and `dbfs` have store classes of their own; other schemes
            are opened with fsspec (`az`, `abfs`, `hf`, `memory`, `file`, ...).

    Raises:
        NotImplementedError: If no store supports this kind of address.
        ImportError: If the required package is not installed, with the command that installs it.
        ValueError: If the address is malformed, or credentials are missing.
    """
    return _open(uri, None)


def _open(uri: str, backend_kwargs: Mapping[str, Any] | None) -> ObjectStore | None:
    parsed, settings = parse_uri(uri), backend_kwargs or {}
    backend, netloc = ("sftp" if parsed.backend == "ssh" else parsed.backend), urlsplit(uri).netloc
    if not backend:
        return None
    if backend in _BACKENDS and not netloc and not settings:
        raise ValueError(f"{uri!r} names no bucket or host. Write one such as '{parsed.backend}://bucket/folder'.")
    if backend == "dbfs" and not parsed.path.startswith(MLFLOW_PREFIX):
        UCObjectStore.validate_path(parsed.path)  # a malformed path is rejected before a slow import
    # An address of libcloud is incomplete without arguments.
    if backend in {*_BACKENDS, "dbfs"} and (backend != "libcloud" or backend_kwargs is not None):
        namespace = {"bucket": netloc} if backend == "oci" and "@" in netloc else {}
        return build_remote_backend(backend, {**arguments_of(uri), **namespace, **settings})
    check_scheme(uri)
    address = f"{backend}://{netloc}{'' if netloc else '/'}"
    # With a time limit, since some client libraries fetch credentials when the store is created.
    return _first_answer(address, lambda: FsspecObjectStore(address, **settings))


def check_scheme(uri: str) -> None:
    """Raise if no store supports this kind of address."""
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
    """Return the store of an address, or of `libcloud://container`, with additional arguments of its class.

    These override those of the address, such as the bucket. The errors are those of
    `maybe_create_object_store_from_uri`, and a `ValueError` for a local path.
    """
    store = _open(uri, backend_kwargs or {})
    if store is None:
        raise ValueError(f"{uri!r} is a local path. Give an address such as 's3://bucket/folder'.")
    return store


def arguments_of(uri: str) -> dict[str, str]:
    """Return the arguments of `build_remote_backend` that an address contains."""
    match parse_uri(uri):
        case ("s3" | "oci" | "gs", bucket, _):
            return {"bucket": bucket}
        case ("azure" | "libcloud", container, _):
            return {"container": container}
        case ("sftp" | "ssh", _, path):  # names are absolute if the path is
            return {"host": f"sftp://{urlsplit(uri).netloc}{'//' if path.startswith('/') else ''}"}
        case ("dbfs", _, path):
            return {"path": path}
        case _:
            return {}


def build_remote_backend(remote_backend_name: str, backend_kwargs: dict[str, Any]) -> ObjectStore:
    """Return a store by the name of its backend.

    Args:
        remote_backend_name: `s3`, `oci`, `gs`, `sftp`, `azure`, `libcloud` or `dbfs`.
        backend_kwargs: Arguments of the store's class.

    Raises:
        ValueError: If the name is unknown.
    """
    if remote_backend_name == "dbfs":
        path = str(backend_kwargs.get("path", "")).removeprefix("dbfs:").lstrip("/")
        kind, package = (UCObjectStore, "databricks.sdk")
        if path.startswith(MLFLOW_PREFIX):
            kind, package = MLFlowObjectStore, "mlflow"
        # Imported outside the time limit of the first response, which the import may exceed.
        with suppress(ImportError):  # the store raises it, too
            import_module(package)
        return _first_answer(f"dbfs:/{path}", lambda: kind(**backend_kwargs))
    if remote_backend_name not in _BACKENDS:
        raise ValueError(
            f"remote_backend_name={remote_backend_name!r} is not known. Use one of {', '.join(_BACKENDS)} or dbfs, or "
            f"an address that fsspec knows."
        )
    return _BACKENDS[remote_backend_name](**backend_kwargs)


def validate_credentials(store: ObjectStore, remote_file_name: str = CREDENTIALS_PROBE) -> None:
    """Upload a small file, to find wrong credentials before training instead of at the first checkpoint.

    Args:
        store: Store to validate.
        remote_file_name: Name of the object.

    Raises:
        StorageError: If the store refuses, or does not respond in three attempts or 12 seconds; with what to check.
    """
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe"
        probe.write_text("credentials_validated_successfully")
        place = type(store).__name__
        with suppress(NotImplementedError):
            place = store.get_uri(remote_file_name)
        _first_answer(place, lambda: store.upload_object(remote_file_name, str(probe)))


def probe_name(address: str) -> str:
    """Return the name of the object that `validate_credentials` uploads to the store of an address.

    Example:
        >>> probe_name("s3://bucket/run"), probe_name("hf://someone/model/run")
        ('.credentials_validated_successfully', 'model/.credentials_validated_successfully')
    """
    parsed = parse_uri(address)
    # A bucket of Hugging Face's is an owner of repositories, outside of which nothing can be written.
    found = _REPOSITORY.match(f"{parsed.bucket}/{parsed.path}") if parsed.backend == "hf" else None
    folder = "" if found is None else found[0].partition("/")[2]
    return posixpath.join(folder, CREDENTIALS_PROBE)


def reach(store: ObjectStore, address: str) -> None:
    """Raise a `StorageError` with what to check if the store of an address does not respond in time.

    Without this check, the retries of some client libraries take minutes, and their callers retry again. A store that
    has responded is not checked again.
    """
    backend, bucket, name = parse_uri(address)
    if (backend, bucket) in _answered:
        return

    def ask() -> None:
        try:
            store.get_object_size(name)
        except ObjectStoreTransientError:
            raise
        except Exception as error:  # an error is a response too; the caller's own request raises it
            log.debug("%s answers: %s", address, error)

    _first_answer(address, ask)
    _answered.add((backend, bucket))


def _first_answer(place: str, ask: Callable[[], A]) -> A:
    from composer_checkpoint._ranks import in_thread  # imports torch, which is slow

    failures: list[str] = []

    def attempt() -> A:
        try:
            return ask()
        except ObjectStoreTransientError as error:
            failures.append(f" ({error})")
            raise

    def describe() -> str:
        return (
            f"{place} did not respond within {_FIRST_ANSWER_S:g} s{''.join(failures[-1:])}. Check the "
            f"credentials, which may have to be fetched over the network, too; whether this machine has a network, or "
            f"needs a proxy; and the endpoint, if one is set."
        )

    try:
        return in_thread(retry(ObjectStoreTransientError)(attempt), _FIRST_ANSWER_S, describe)
    except ObjectStoreTransientError as error:
        raise ObjectStoreTransientError(describe()) from error


def list_remote_objects(remote_path: str) -> list[str]:
    """Return the names of the objects below an address.

    Raises:
        ValueError: If it is a local path, or no objects are found.
        StorageError: If the store does not respond, with what to check.
    """
    store = maybe_create_object_store_from_uri(remote_path)
    if store is None:
        raise ValueError(f"remote_path={remote_path!r} is a local path. Give an address such as 's3://bucket/folder'.")
    with store:
        reach(store, remote_path)
        objects = store.list_objects(parse_uri(remote_path).path)
    if not objects:
        raise ValueError(f"There are no objects at remote_path={remote_path!r}. Check the name and the folder.")
    return objects


def list_if_allowed(store: ObjectStore, prefix: str) -> list[str]:
    """Return the names of the objects with a prefix, or none if the store or the credentials cannot list.

    Raise a `FileNotFoundError` if the object of `validate_credentials` is not visible either, so that others may be
    hidden.
    """
    try:
        return store.list_objects(prefix)
    except NotImplementedError:
        return []
    except FileNotFoundError as error:
        # If the probe is visible, only listing is denied, and names that are known can be looked up.
        try:
            store.get_object_size(CREDENTIALS_PROBE)
        except FileNotFoundError:
            raise error from error.__cause__
        log.warning("Only objects named by a pointer or a checkpoint are found: %s", error)
        return []

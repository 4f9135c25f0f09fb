"""Interface of object stores, their addresses, and the classification of their errors."""

import errno
import functools
import inspect
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple, NoReturn, Self, TypeVar, overload

from composer_checkpoint.errors import StorageError

Progress = Callable[[int, int], None]
"""Callback with the bytes transferred so far, which never decrease, and the total."""


class ObjectStoreTransientError(StorageError, RuntimeError):
    """Failure of a store that a retry may resolve; the cause is the store's own error."""


class ObjectStore:
    """Interface of remote stores, which hold files by name.

    A name is a path with forward slashes. Methods that a store does not override raise `NotImplementedError`. Use it as
    a context manager, or call `close`.
    """

    def get_uri(self, object_name: str) -> str:
        """Return the address of an object, whether or not it exists."""
        self._cannot("return the address of an object")

    def upload_object(
        self, object_name: str, filename: str | os.PathLike[str], callback: Progress | None = None, **kwargs: Any
    ) -> None:
        """Copy a local file to the store.

        Args:
            object_name: Name of the object. An existing object is replaced.
            filename: Local file.
            callback: Called with the bytes sent and the file's size.
            **kwargs: Other arguments of the store; `FsspecObjectStore` takes `overwrite`.

        Raises:
            ObjectStoreTransientError: If a retry may succeed.
            StorageError: If the store refuses.
        """
        self._cannot("upload")

    def get_object_size(self, object_name: str) -> int:
        """Return the current size of an object in bytes.

        Raises:
            FileNotFoundError: If it does not exist, or the credentials may not see it.
            ObjectStoreTransientError: If a retry may succeed.
        """
        self._cannot("return the size of an object")

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Progress | None = None,
    ) -> None:
        """Copy an object to a local file atomically.

        Args:
            object_name: Name of the object.
            filename: Local file to write. Its parent folders are created.
            overwrite: Whether to replace an existing file.
            callback: Called with the bytes received and the object's size.

        Raises:
            FileNotFoundError: If the object does not exist, or the credentials may not see it.
            FileExistsError: If the file exists and `overwrite` is false.
            ObjectStoreTransientError: If a retry may succeed.
        """
        self._cannot("download")

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all objects with a prefix.

        The list may be outdated. Use `get_object_size` to check that an object exists.
        """
        self._cannot("list objects")

    def delete_object(self, object_name: str) -> None:
        """Delete an object, or do nothing if it does not exist: an attempt that failed may have deleted it.

        Args:
            object_name: Name of the object. Folders are not objects.

        Raises:
            ObjectStoreTransientError: If a retry may succeed.
            StorageError: If the store refuses.
        """
        self._cannot("delete")

    def close(self) -> None:
        """Release connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cannot(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} cannot {what}. Use a store that can, such as S3ObjectStore.")


log = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Errors = type[BaseException] | tuple[type[BaseException], ...]
_jitter = random.Random()  # separate, so that retries do not change the random numbers of training


@overload
def retry(
    exc_class: _Errors = Exception, num_attempts: int = 3, initial_backoff: float = 1.0, max_jitter: float = 0.5
) -> Callable[[_Function], _Function]: ...


@overload
def retry(exc_class: _Function, /) -> _Function: ...


def retry(
    exc_class: Any = Exception, num_attempts: int = 3, initial_backoff: float = 1.0, max_jitter: float = 0.5
) -> Any:
    """Decorate a function to call it again when it raises.

    Before attempt `i + 2` it sleeps `initial_backoff * 2**i` seconds, plus up to `max_jitter` so that processes that
    failed together do not retry together. A parameter `retry_index` of the function receives the number of earlier
    attempts. The decorator works with and without parentheses.

    Args:
        exc_class: Exception class, or classes, to retry after. Others propagate at once.
        num_attempts: Maximum number of calls. The exception of the last one is raised.
        initial_backoff: Sleep before the second attempt, in seconds.
        max_jitter: Maximum random addition to each sleep, in seconds.

    Raises:
        ValueError: If `num_attempts` is less than 1, or a number of seconds is negative.

    Example:
        >>> attempts = []
        >>> @retry(ConnectionError, num_attempts=3, initial_backoff=0, max_jitter=0)
        ... def fetch(retry_index=0):
        ...     attempts.append(retry_index)
        ...     if retry_index < 2:
        ...         raise ConnectionError("reset")
        >>> fetch()
        >>> attempts
        [0, 1, 2]
    """
    if not isinstance(exc_class, (type, tuple)):  # used without parentheses: it is the function
        return retry()(exc_class)
    errors: _Errors = exc_class
    if num_attempts < 1:
        raise ValueError(f"num_attempts={num_attempts!r} is not a number of calls: it must be 1 or more.")
    for name, seconds in (("initial_backoff", initial_backoff), ("max_jitter", max_jitter)):
        if not seconds >= 0:  # also rejects NaN
            raise ValueError(f"{name}={seconds!r} is not a number of seconds: it must be 0 or more.")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        counts = "retry_index" in inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            index = 0
            while True:
                if counts:
                    kwargs["retry_index"] = index
                try:
                    return function(*args, **kwargs)
                except errors as error:
                    if index + 1 >= num_attempts:
                        raise
                    pause_s = initial_backoff * 2**index + _jitter.random() * max_jitter
                    log.info("%s; attempt %d of %d in %.1f s", error, index + 2, num_attempts, pause_s)
                    time.sleep(pause_s)
                index += 1

        return call

    return decorate


def has_object(store: ObjectStore, name: str, num_attempts: int = 3) -> bool:
    """Return whether a store has an object of this name, retrying after transient errors."""
    try:
        retry(ObjectStoreTransientError, num_attempts)(store.get_object_size)(name)
    except FileNotFoundError:
        return False
    return True


def read_object(store: ObjectStore, name: str) -> bytes:
    """Return the content of a small object."""
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "copy")
        store.download_object(name, copy)
        with open(copy, "rb") as file:
            return file.read()


# 409 is a conflict of concurrent requests, and 425 a request that came too early.
_TRANSIENT_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_TRANSIENT_ERRNO = {
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.EIO,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ETIMEDOUT,
}
# Error codes of the stores' APIs, with the HTTP statuses that they stand for.
_CODES = {
    "NoSuchKey": 404,
    "NoSuchBucket": 404,
    "BlobNotFound": 404,
    "ObjectNotFound": 404,
    "AccessDenied": 403,
    "PreconditionFailed": 412,
    "BlobAlreadyExists": 412,
    "SlowDown": 503,
    "InternalError": 500,
    "RequestTimeout": 408,
}


class Fault(StrEnum):
    """Kinds of failure that callers treat differently."""

    MISSING = "missing"
    FORBIDDEN = "forbidden"
    EXISTS = "exists"
    TRANSIENT = "transient"
    OTHER = "other"


# By top-level module and class name, so that client libraries need not be imported.
_NAMES = {
    Fault.TRANSIENT: (
        "aiohttp.ClientConnectionError aiohttp.ClientPayloadError azure.ServiceRequestError "
        "azure.ServiceResponseError botocore.HTTPClientError botocore.IncompleteReadError "
        "databricks.InternalError databricks.TemporarilyUnavailable databricks.TooManyRequests google.RetryError "
        "google.TransportError http.IncompleteRead httpx.TransportError paramiko.NoValidConnectionsError "
        "paramiko.SSHException requests.ConnectionError requests.Timeout urllib3.HTTPError"
    ),
    Fault.FORBIDDEN: (
        "botocore.NoCredentialsError databricks.PermissionDenied databricks.Unauthenticated "
        "google.DefaultCredentialsError paramiko.AuthenticationException paramiko.BadHostKeyException"
    ),
    Fault.EXISTS: ("databricks.AlreadyExists"),
    Fault.MISSING: ("databricks.NotFound"),
}
_CLASSES = {name: fault for fault, names in _NAMES.items() for name in names.split()}


def classify(error: BaseException) -> Fault:
    """Return the kind of failure, from the deepest cause that can be classified.

    Client libraries wrap the response of a server in exceptions of their own, which may be less specific. The original
    is among the causes.
    """
    fault, seen = Fault.OTHER, set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:  # chains of exceptions can be cyclic
        seen.add(id(link))
        fault = _classify_one(link) or fault
        # As in a traceback: the explicit cause, or else the context.
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return fault


def _classify_one(error: BaseException) -> Fault | None:
    status = _status(error)
    if status is not None:
        # 412: a conditional write has found an object.
        known = {401: Fault.FORBIDDEN, 403: Fault.FORBIDDEN, 404: Fault.MISSING, 412: Fault.EXISTS}
        return Fault.TRANSIENT if status in _TRANSIENT_STATUS else known.get(status)
    for base in type(error).__mro__:  # the most specific class first
        known = _CLASSES.get(f"{base.__module__.partition('.')[0]}.{base.__name__}")
        if known is not None:
            return known
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return Fault.MISSING
        case FileExistsError():
            return Fault.EXISTS
        case PermissionError():
            return Fault.FORBIDDEN
        case ConnectionError() | TimeoutError() | EOFError():
            return Fault.TRANSIENT
        case OSError(errno=code) if code in _TRANSIENT_ERRNO:
            return Fault.TRANSIENT
    return None


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of a response, which each client library keeps in a different attribute."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else _CODES.get(str(response.get("Error", {}).get("Code")))
    ask = getattr(error, "get_http_status_code", None)  # mlflow
    if ask is not None:
        return ask()
    for holder in (error, response):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 400 <= value < 600:
                return value
            if isinstance(value, str) and value in _CODES:
                return _CODES[value]
    return None


_HOME_RELATIVE: Final = {"sftp", "ssh"}  # one slash after the host: relative to home; two: absolute


class ParsedURI(NamedTuple):
    """Parts of an address. A local path has neither backend nor bucket."""

    backend: str
    bucket: str
    path: str


def parse_uri(uri: str | os.PathLike[str]) -> ParsedURI:
    """Split an address into backend, bucket and path.

    Args:
        uri: `backend://bucket/path`, `backend://bucket@namespace/path`, `dbfs:/path` or a local path.

    Returns:
        The backend in lower case, the bucket without its namespace, and the path without a leading slash; for a local
        path, `('', '', path)` unchanged.

    Example:
        >>> tuple(parse_uri("s3://bucket/a/longer/path"))
        ('s3', 'bucket', 'a/longer/path')
        >>> tuple(parse_uri("/a/local/path"))
        ('', '', '/a/local/path')
    """
    text = os.fspath(uri)
    scheme, colon, rest = text.partition(":")
    # Databricks writes `dbfs:/path`, with one slash.
    if not colon or not (rest.startswith("//") or scheme == "dbfs"):
        return ParsedURI("", "", text)
    # The name of libcloud's provider, which Composer's addresses may have.
    backend = "azure" if scheme == "AZURE_BLOBS" else scheme.lower()
    netloc, _, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest.removeprefix("/"))
    path = path if backend in _HOME_RELATIVE else path.lstrip("/")
    return ParsedURI(backend, netloc.partition("@")[0], path)


def is_uri(text: str | os.PathLike[str]) -> bool:
    """Return whether a text is an address of a store or a website instead of a local path."""
    return bool(parse_uri(text).backend)

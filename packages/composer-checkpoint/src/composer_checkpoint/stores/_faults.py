"""What a store's error means, whichever library raised it."""

import errno
from collections.abc import Iterator
from enum import StrEnum

__all__ = ["Fault", "classify"]

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
    """The kinds of failure that are treated differently."""

    MISSING = "missing"
    FORBIDDEN = "forbidden"
    EXISTS = "exists"
    TRANSIENT = "transient"
    OTHER = "other"


# Told by module and name, so that no client library is imported for it.
_CLASSES = {
    ("aiohttp", "ClientConnectionError"): Fault.TRANSIENT,
    ("aiohttp", "ClientPayloadError"): Fault.TRANSIENT,
    ("azure", "ServiceRequestError"): Fault.TRANSIENT,
    ("azure", "ServiceResponseError"): Fault.TRANSIENT,
    ("botocore", "HTTPClientError"): Fault.TRANSIENT,
    ("botocore", "IncompleteReadError"): Fault.TRANSIENT,
    ("botocore", "NoCredentialsError"): Fault.FORBIDDEN,
    ("databricks", "AlreadyExists"): Fault.EXISTS,
    ("databricks", "InternalError"): Fault.TRANSIENT,
    ("databricks", "NotFound"): Fault.MISSING,
    ("databricks", "PermissionDenied"): Fault.FORBIDDEN,
    ("databricks", "TemporarilyUnavailable"): Fault.TRANSIENT,
    ("databricks", "TooManyRequests"): Fault.TRANSIENT,
    ("databricks", "Unauthenticated"): Fault.FORBIDDEN,
    ("google", "DefaultCredentialsError"): Fault.FORBIDDEN,
    ("google", "RetryError"): Fault.TRANSIENT,
    ("google", "TransportError"): Fault.TRANSIENT,
    ("http", "IncompleteRead"): Fault.TRANSIENT,
    ("httpx", "TransportError"): Fault.TRANSIENT,
    ("paramiko", "AuthenticationException"): Fault.FORBIDDEN,
    ("paramiko", "BadHostKeyException"): Fault.FORBIDDEN,
    ("paramiko", "NoValidConnectionsError"): Fault.TRANSIENT,
    ("paramiko", "SSHException"): Fault.TRANSIENT,
    ("requests", "ConnectionError"): Fault.TRANSIENT,
    ("requests", "Timeout"): Fault.TRANSIENT,
    ("urllib3", "HTTPError"): Fault.TRANSIENT,
}


def classify(error: BaseException) -> Fault:
    """Return what an error means: what the deepest cause that says anything says.

    Libraries turn the answers of a server into exceptions of their own, and sometimes into less telling ones; the
    original is among the causes.
    """
    verdicts = [verdict for verdict in map(_classify_one, _chain(error)) if verdict is not None]
    return verdicts[-1] if verdicts else Fault.OTHER


def _classify_one(error: BaseException) -> Fault | None:
    status = _status(error)
    if status is not None:
        return _by_status(status)
    for base in type(error).__mro__:  # from the particular to the general
        known = _CLASSES.get((base.__module__.partition(".")[0], base.__name__))
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


def _by_status(status: int) -> Fault | None:
    if status in _TRANSIENT_STATUS:
        return Fault.TRANSIENT
    return {401: Fault.FORBIDDEN, 403: Fault.FORBIDDEN, 404: Fault.MISSING, 412: Fault.EXISTS}.get(status)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an answer, wherever the library keeps it."""
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


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)

"""The parts of an address."""

import os
from typing import Final, NamedTuple

__all__ = ["ParsedURI", "is_uri", "parse_uri"]

_HOME_RELATIVE: Final = {"sftp", "ssh"}  # one slash after the host begins a path from home, two one from the root


class ParsedURI(NamedTuple):
    """The parts of an address. A local path has neither backend nor bucket."""

    backend: str
    bucket: str
    path: str


def parse_uri(uri: str | os.PathLike[str]) -> ParsedURI:
    """Split an address.

    Args:
        uri: `backend://bucket/path`, `backend://bucket@namespace/path`, `dbfs:/path` or a local path.

    Returns:
        The backend in small letters, the bucket without its namespace, and the path without a leading slash; of a
        local path, `('', '', path)` unchanged.

    Example:
        >>> tuple(parse_uri("s3://bucket/a/longer/path"))
        ('s3', 'bucket', 'a/longer/path')
        >>> tuple(parse_uri("/a/local/path"))
        ('', '', '/a/local/path')
    """
    text = os.fspath(uri)
    scheme, colon, rest = text.partition(":")
    if not colon or not (rest.startswith("//") or scheme == "dbfs"):
        return ParsedURI("", "", text)
    backend = "azure" if scheme == "AZURE_BLOBS" else scheme.lower()
    netloc, _, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest.removeprefix("/"))
    path = path if backend in _HOME_RELATIVE else path.lstrip("/")
    return ParsedURI(backend, netloc.partition("@")[0], path)


def is_uri(text: str | os.PathLike[str]) -> bool:
    """Return whether a text is an address of a store or of the web, and not a local path."""
    return bool(parse_uri(text).backend)

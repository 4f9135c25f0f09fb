"""Object store on a machine that is reached over SFTP."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit

from composer_checkpoint.stores.fsspec import FsspecObjectStore, require_package

_TIMEOUTS_S: Final = {"timeout": 15.0, "banner_timeout": 15.0, "auth_timeout": 15.0}
_SILENCE_S: Final = 60.0
_POLICIES: Final = ("RejectPolicy", "AutoAddPolicy", "WarningPolicy")


class SFTPObjectStore(FsspecObjectStore):
    """Folder on a machine that is reached over SFTP.

    No command is run on the machine. Files are sent under a temporary name, and renamed when they are complete. One
    connection is open at a time, and is reopened if it breaks.

    Args:
        host: The machine, or `sftp://user:password@host:port/cwd`. After the host, one slash begins a path from the
            home folder, two slashes one from the root.
        port: The port of the SSH server.
        username: The user to log in as.
        password: The password of the user, or of the key.
        known_hosts_filename: The file of trusted machines and their keys; `~/.ssh/known_hosts` by default.
        known_hosts_filename_environ: The environment variable that names this file.
        key_filename: A private key.
        key_filename_environ: The environment variable that names this file.
        missing_host_key_policy: What to do with an unknown machine: `RejectPolicy`, `AutoAddPolicy` (trust it; another
            machine may impersonate it) or `WarningPolicy`.
        cwd: The folder to which names are relative; the home folder if it is empty.
        connect_kwargs: Further arguments of paramiko's `SSHClient.connect`.

    Raises:
        ValueError: If a value is given both in the URI and as an argument, or the URI or the policy is unknown.
        ImportError: If the required package is not installed, with the command that installs it.
        ObjectStoreTransientError: If the machine cannot be reached now.
        StorageError: If it is unknown, or rejects the user.
    """

    def __init__(
        self,
        host: str,
        port: int = 22,
        username: str | None = None,
        password: str | None = None,
        known_hosts_filename: str | None = None,
        known_hosts_filename_environ: str = "COMPOSER_SFTP_KNOWN_HOSTS_FILE",
        key_filename: str | None = None,
        key_filename_environ: str = "COMPOSER_SFTP_KEY_FILE",
        missing_host_key_policy: Literal["RejectPolicy", "AutoAddPolicy", "WarningPolicy"] = "RejectPolicy",
        cwd: str = "",
        connect_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if missing_host_key_policy not in _POLICIES:
            raise ValueError(
                f"missing_host_key_policy={missing_host_key_policy!r} is unknown. Use one of {', '.join(_POLICIES)}."
            )
        given = {"host": host, "port": port, "username": username, "password": password, "cwd": cwd}
        place = _read_uri(given) if "://" in host else given
        # Paramiko's connection must not be used by several threads at a time. Reentrant, since actions are nested.
        self._lock = threading.RLock()
        options = {
            **{name: place[name] for name in ("port", "username", "password")},
            "key_filename": key_filename or os.environ.get(key_filename_environ),
            **_TIMEOUTS_S,
            **(connect_kwargs or {}),
        }
        known_hosts = known_hosts_filename or os.environ.get(known_hosts_filename_environ)
        user = f"{place['username']}@" if place["username"] else ""
        uri = f"sftp://{user}{place['host']}:{place['port']}/{place['cwd']}"
        super().__init__(
            uri,
            host=place["host"],
            cwd=place["cwd"],
            connect=options,
            known_hosts=known_hosts,
            policy=missing_host_key_policy,
        )
        if place["cwd"] == "/":
            self.uri = uri  # keeps the double slash, which makes names relative to the root

    def close(self) -> None:
        """Close the connection."""
        self.filesystem.client.close()

    def _open(self, uri: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
        require_package(uri)
        # Imported late, since it imports paramiko, which is optional.
        from composer_checkpoint.stores._sftp_files import StrictSFTPFileSystem

        cwd = storage_options.pop("cwd")
        with self._explained("", "reach"):
            return StrictSFTPFileSystem(silence_s=_SILENCE_S, **storage_options), cwd or "."

    def _path(self, object_name: str) -> str:
        path = super()._path(object_name)
        return object_name if object_name.startswith("/") else path.removeprefix("./")

    @contextmanager
    def _explained(self, object_name: str, action: str) -> Iterator[None]:
        with self._lock, super()._explained(object_name, action):
            if action != "reach":  # during "reach" the file system does not exist yet
                self.filesystem.reconnect()
            yield


def _read_uri(given: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a URI, each of which may be given only once."""
    uri = urlsplit(given["host"])
    if uri.scheme.lower() != "sftp" or not uri.hostname or uri.query or uri.fragment:
        shown = given["host"].replace(f":{uri.password}@", ":***@")
        raise ValueError(
            f"host={shown!r} is not an SFTP address. Give the name of a machine, or 'sftp://user@host:port/folder'."
        )
    found = {
        "port": uri.port,
        "username": uri.username and unquote(uri.username),
        "password": uri.password and unquote(uri.password),
        "cwd": unquote(uri.path).removeprefix("/"),
    }
    defaults = {"port": 22, "username": None, "password": None, "cwd": ""}
    for name, value in found.items():
        if value and given[name] != defaults[name]:
            raise ValueError(f"{name} is given twice: in the host's URI and as an argument. Leave one of them out.")
    return {"host": uri.hostname, **{name: value or given[name] for name, value in found.items()}}

"""fsspec's SFTP file system, restricted to machines whose keys are known."""

import os
from collections.abc import Callable
from typing import Any

import paramiko
from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.implementations.sftp import SFTPFileSystem


class StrictSFTPFileSystem(SFTPFileSystem):
    """fsspec's SFTP file system with host key checks, relative paths and progress reports."""

    cachable = False  # each store has a connection of its own

    def __init__(
        self, host: str, *, connect: dict[str, Any], known_hosts: str | None, policy: str, silence_s: float
    ) -> None:
        self._connect_options, self._known_hosts = connect, known_hosts
        self._policy, self._silence_s = policy, silence_s
        super().__init__(host)

    def _connect(self) -> None:
        self.client = paramiko.SSHClient()
        if self._known_hosts is None:
            self.client.load_system_host_keys()
        else:
            self.client.load_host_keys(self._known_hosts)
        reject = self._policy == "RejectPolicy"
        self.client.set_missing_host_key_policy(_Refuse() if reject else getattr(paramiko, self._policy)())
        try:
            self.client.connect(self.host, **self._connect_options)
            self.ftp = self.client.open_sftp()
            # Without a timeout, a machine that stops responding would block the run forever.
            channel = self.ftp.get_channel()
            if channel is not None:
                channel.settimeout(self._silence_s)
        except BaseException:
            self.client.close()
            raise

    def reconnect(self) -> None:
        transport = self.client.get_transport()
        channel = self.ftp.get_channel()
        if transport is None or not transport.is_active() or channel is None or channel.closed:
            self.client.close()
            self._connect()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return os.fspath(path)  # paths are never addresses here, even if a name contains `://`

    def put_file(
        self, lpath: Any, rpath: Any, callback: Callback | None = None, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Upload one file. Paramiko verifies its size."""
        if mode == "create" and self.exists(rpath):
            raise FileExistsError(rpath)
        self.ftp.put(lpath, rpath, callback=_telling(callback or DEFAULT_CALLBACK))

    def get_file(self, rpath: Any, lpath: Any, callback: Callback | None = None, **kwargs: Any) -> None:
        """Download one file. Paramiko verifies its size."""
        self.ftp.get(rpath, lpath, callback=_telling(callback or DEFAULT_CALLBACK))


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Reject unknown machines with a permanent error, since paramiko's `SSHException` counts as transient."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise PermissionError(
            f"the machine {hostname} is not known: its key {key.get_name()} {key.fingerprint} is in no file of known "
            f"hosts. If that is its key, add it (ssh-keyscan prints the line)"
        )


def _telling(callback: Callback) -> Callable[[int, int], None]:
    return lambda done, total: callback.absolute_update(done)

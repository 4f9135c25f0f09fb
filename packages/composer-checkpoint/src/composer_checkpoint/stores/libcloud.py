"""The name under which Composer reached several stores through apache-libcloud."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.implementations.local import LocalFileSystem

from composer_checkpoint.stores.fsspec_store import FsspecObjectStore

__all__ = ["LibcloudObjectStore"]

_GOOGLE_S3_FACE = {"endpoint_url": "https://storage.googleapis.com", "client_kwargs": {"region_name": "auto"}}


class LibcloudObjectStore(FsspecObjectStore):
    """A container of one of libcloud's providers, reached without libcloud.

    Args:
        provider: `'local'`, `'s3'`, `'google_storage'` or `'azure_blobs'`, in any case.
        container: The container or bucket; for `'local'`, a folder below that of `provider_kwargs`.
        chunk_size: After how many bytes the progress is told, for `'local'`.
        key_environ: The variable that has the key or the account's name.
        secret_environ: The variable that has its secret.
        provider_kwargs: For `'local'`, `{'key': folder}`; for the others, what the `fsspec` file system takes.

    Raises:
        ValueError: If the provider is another one, with what to use instead.
    """

    def __init__(
        self,
        provider: str,
        container: str,
        chunk_size: int = 1_048_576,
        key_environ: str | None = None,
        secret_environ: str | None = None,
        provider_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.chunk_size = chunk_size
        options = dict(provider_kwargs or {})
        key = os.environ.get(key_environ) if key_environ else options.pop("key", None)
        secret = os.environ.get(secret_environ) if secret_environ else options.pop("secret", None)
        match provider.lower():
            case "local":
                super().__init__((Path(key or ".").resolve() / container).as_uri())
            case "s3":
                super().__init__(f"s3://{container}", key=key, secret=secret, **options)
            case "google_storage":  # its credentials are an HMAC key, as the S3 face takes it
                super().__init__(f"s3://{container}", **{**_GOOGLE_S3_FACE, "key": key, "secret": secret, **options})
            case "azure_blobs":
                super().__init__(f"az://{container}", account_name=key, account_key=secret, **options)
            case _:
                raise ValueError(
                    f"provider={provider!r} is not reached any more. Use 'local', 's3', 'google_storage' or "
                    f"'azure_blobs', or FsspecObjectStore with an address that fsspec knows."
                )
        self.uri = f"{provider.lower()}://{container}"

    def _open(self, uri: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
        if not uri.startswith("file:"):
            return super()._open(uri, storage_options)
        return _TellingLocalFileSystem(self.chunk_size), uri.removeprefix("file://")


class _TellingLocalFileSystem(LocalFileSystem):
    """Local files that tell their progress."""

    cachable = False

    def __init__(self, chunk_size: int) -> None:
        super().__init__()
        self.chunk_size = chunk_size

    def put_file(self, path1: str, path2: str, callback: Callback | None = None, **kwargs: Any) -> None:
        self._copy(path1, path2, callback or DEFAULT_CALLBACK)

    def get_file(self, path1: str, path2: str, callback: Callback | None = None, **kwargs: Any) -> None:
        self._copy(path1, path2, callback or DEFAULT_CALLBACK)

    def _copy(self, source: str, target: str, callback: Callback) -> None:
        with open(source, "rb") as reader, open(target, "wb") as writer:
            callback.absolute_update(0)
            while chunk := reader.read(self.chunk_size):
                writer.write(chunk)
                callback.relative_update(len(chunk))

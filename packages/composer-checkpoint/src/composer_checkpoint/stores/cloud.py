"""Stores of cloud providers: Amazon S3, Azure, Google Cloud, OCI and libcloud's providers."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.implementations.local import LocalFileSystem

from composer_checkpoint.stores.base import Progress
from composer_checkpoint.stores.fsspec import FsspecObjectStore, require_package

# Settings of an object that S3 supports.
_EXTRA_ARG_NAMES: Final = (
    "ACL CacheControl ChecksumAlgorithm ContentDisposition ContentEncoding ContentLanguage ContentType "
    "ExpectedBucketOwner Expires GrantFullControl GrantRead GrantReadACP GrantWriteACP Metadata "
    "ObjectLockLegalHoldStatus ObjectLockMode ObjectLockRetainUntilDate RequestPayer SSECustomerAlgorithm "
    "SSECustomerKey SSECustomerKeyMD5 SSEKMSEncryptionContext SSEKMSKeyId ServerSideEncryption StorageClass "
    "Tagging WebsiteRedirectLocation"
)
_EXTRA_ARGS: Final = frozenset(_EXTRA_ARG_NAMES.split())


class S3ObjectStore(FsspecObjectStore):
    """Bucket of Amazon S3 or an S3-compatible server (MinIO, Ceph, R2, ...).

    Arguments default to the configuration of the AWS tools. The environment variable `S3_ENDPOINT_URL` sets another
    server, and `S3_CANNED_ACL` the ACL of each object. Large files are uploaded in parallel parts.

    Args:
        bucket: Name of the bucket.
        prefix: Prefix of all object names.
        region_name: Region of the bucket.
        endpoint_url: URL of the server.
        aws_access_key_id: Access key ID.
        aws_secret_access_key: Secret access key.
        aws_session_token: Session token of temporary credentials.
        client_config: Settings of botocore's client, such as `{'max_pool_connections': 20}`.
        transfer_config: Mapping with `max_concurrency` and `multipart_chunksize` (in bytes).

    Raises:
        ValueError: If `transfer_config` has other keys.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        region_name: str | None = None,
        endpoint_url: str | None = None,
        aws_access_key_id: str | None = None,
        aws_secret_access_key: str | None = None,
        aws_session_token: str | None = None,
        client_config: Mapping[str, Any] | None = None,
        transfer_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.bucket, self.prefix = bucket, prefix.strip("/")
        transfer = dict(transfer_config or {})
        self._chunk_bytes: int | None = transfer.pop("multipart_chunksize", None)
        concurrency = {"max_concurrency": transfer.pop("max_concurrency")} if "max_concurrency" in transfer else {}
        if transfer:
            raise ValueError(
                f"transfer_config has the unknown keys {sorted(transfer)}. Known are 'max_concurrency' and "
                f"'multipart_chunksize'."
            )
        super().__init__(
            f"s3://{bucket}/{self.prefix}",
            endpoint_url=endpoint_url or os.environ.get("S3_ENDPOINT_URL"),
            key=aws_access_key_id,
            secret=aws_secret_access_key,
            token=aws_session_token,
            client_kwargs={"region_name": region_name} if region_name else {},
            # In this mode clients send fewer requests when S3 throttles them.
            config_kwargs={"retries": {"mode": "adaptive"}, **(client_config or {})},
            use_listings_cache=False,  # other ranks write to the bucket, so a cached listing would be outdated
            **concurrency,
        )

    def upload_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Progress | None = None,
        *,
        overwrite: bool = True,
        **kwargs: Any,
    ) -> None:
        """Copy a local file to the bucket, as in `FsspecObjectStore.upload_object`.

        Of further arguments it takes only `ExtraArgs`, a mapping with S3's settings of an object, such as
        `{'ACL': 'private'}`.

        Raises:
            ValueError: If there is another argument, or an unknown key in `ExtraArgs`.
        """
        extra = dict(kwargs.pop("ExtraArgs", {}))
        unknown = sorted({*kwargs} | {*extra} - _EXTRA_ARGS)
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: S3ObjectStore.upload_object does not take this. It takes ExtraArgs with some "
                f"of the keys {', '.join(sorted(_EXTRA_ARGS))}."
            )
        canned_acl = os.environ.get("S3_CANNED_ACL")
        if canned_acl:
            extra.setdefault("ACL", canned_acl)  # an explicit ACL has priority
        chunks = {} if self._chunk_bytes is None else {"chunksize": self._chunk_bytes}
        super().upload_object(object_name, filename, callback, overwrite=overwrite, **chunks, **extra)


class AzureObjectStore(FsspecObjectStore):
    """Container of Azure Blob Storage.

    The environment variables `AZURE_ACCOUNT_NAME` and `AZURE_ACCOUNT_ACCESS_KEY` set the account; by default, the
    variables of the Azure tools do (`AZURE_STORAGE_CONNECTION_STRING`, `AZURE_STORAGE_SAS_TOKEN`, ...).

    Args:
        container: Name of the container.
        prefix: Prefix of all object names.

    Raises:
        ImportError: If the required package is not installed, with the command that installs it.
    """

    def __init__(self, container: str, prefix: str = "") -> None:
        self.container, self.prefix = container, prefix.strip("/")
        given = {
            "account_name": os.environ.get("AZURE_ACCOUNT_NAME"),
            "account_key": os.environ.get("AZURE_ACCOUNT_ACCESS_KEY"),
        }
        # Unset ones are left out, so that the configuration of the Azure tools applies.
        options = {name: value for name, value in given.items() if value}
        super().__init__(f"az://{container}/{self.prefix}", use_listings_cache=False, **options)


# Google's S3-compatible API, which s3fs can use.
_GOOGLE_S3: Final = {"endpoint_url": "https://storage.googleapis.com", "client_kwargs": {"region_name": "auto"}}


class GCSObjectStore(FsspecObjectStore):
    """Bucket of Google Cloud Storage.

    With the environment variables `GCS_KEY` and `GCS_SECRET` (an HMAC key), the bucket is accessed through the
    S3-compatible API, which requires the extra `s3`; otherwise with Google's default credentials and the extra `gcs`.

    Args:
        bucket: Name of the bucket.
        prefix: Prefix of all object names.

    Raises:
        ValueError: If credentials are missing.
        ImportError: If the required package is not installed, with the command that installs it.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.bucket, self.prefix = bucket, prefix.strip("/")
        key, secret = os.environ.get("GCS_KEY"), os.environ.get("GCS_SECRET")
        self.use_gcs_sdk = not (key and secret)
        if self.use_gcs_sdk:
            super().__init__(f"gs://{bucket}/{self.prefix}", use_listings_cache=False, **_default_credentials())
            return
        options = {**_GOOGLE_S3, "key": key, "secret": secret, "use_listings_cache": False}
        super().__init__(f"s3://{bucket}/{self.prefix}", **options)
        # Pointers and messages must have the address of the user, not that of the S3-compatible API.
        self.uri = f"gs://{bucket}/{self.prefix}".rstrip("/")


def _default_credentials() -> dict[str, Any]:
    require_package("gs://")
    if os.environ.get("STORAGE_EMULATOR_HOST"):  # an emulator has no accounts
        return {"token": "anon"}
    # Checked here, since gcsfs falls back to anonymous access when it finds no credentials.
    if importlib.util.find_spec("google.auth") is not None:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError

        try:
            google.auth.default()
        except DefaultCredentialsError as error:
            raise ValueError(
                f"There are no credentials for Google Cloud Storage: {error} Set GOOGLE_APPLICATION_CREDENTIALS, or "
                f"GCS_KEY and GCS_SECRET for an HMAC key."
            ) from error
    return {"token": "google_default"}


class LibcloudObjectStore(FsspecObjectStore):
    """Container of one of libcloud's providers, accessed through fsspec.

    Args:
        provider: `'local'`, `'s3'`, `'google_storage'` or `'azure_blobs'`, case-insensitive.
        container: Name of the container or bucket; for `'local'`, a folder below that of `provider_kwargs`.
        chunk_size: Bytes between two progress reports, for `'local'`.
        key_environ: Environment variable with the key or the account's name.
        secret_environ: Environment variable with the secret.
        provider_kwargs: For `'local'`, `{'key': folder}`; otherwise arguments of the `fsspec` file system.

    Raises:
        ValueError: If the provider is another one, with alternatives.
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
        self.chunk_size = chunk_size  # before the base class, which calls `_open`
        options = dict(provider_kwargs or {})
        key = os.environ.get(key_environ) if key_environ else options.pop("key", None)
        secret = os.environ.get(secret_environ) if secret_environ else options.pop("secret", None)
        match provider.lower():
            case "local":
                super().__init__((Path(key or ".").resolve() / container).as_uri())
            case "s3":
                super().__init__(f"s3://{container}", key=key, secret=secret, **options)
            case "google_storage":  # the credentials are an HMAC key, for the S3-compatible API
                super().__init__(f"s3://{container}", **{**_GOOGLE_S3, "key": key, "secret": secret, **options})
            case "azure_blobs":
                super().__init__(f"az://{container}", account_name=key, account_key=secret, **options)
            case _:
                raise ValueError(
                    f"provider={provider!r} is not supported. Use 'local', 's3', 'google_storage' or "
                    f"'azure_blobs', or FsspecObjectStore with an address that fsspec knows."
                )
        self.uri = f"{provider.lower()}://{container}"

    def _open(self, uri: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
        if not uri.startswith("file:"):
            return super()._open(uri, storage_options)
        return _TellingLocalFileSystem(self.chunk_size), uri.removeprefix("file://")


class _TellingLocalFileSystem(LocalFileSystem):
    """Local file system that reports progress after each chunk."""

    cachable = False  # one instance per store

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


class OCIObjectStore(FsspecObjectStore):
    """Bucket of Oracle Cloud Infrastructure (OCI).

    Args:
        bucket: Name of the bucket, or `bucket@namespace`. The namespace defaults to that of the credentials.
        prefix: Prefix of all object names.

    Raises:
        ValueError: If the credentials file (`~/.oci/config` or the variable `OCI_CONFIG_FILE`) cannot be used.
        ImportError: If the required package is not installed, with the command that installs it.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.bucket, self.prefix = bucket, prefix.strip("/")
        config = os.environ.get("OCI_CONFIG_FILE", os.path.expanduser("~/.oci/config"))
        if not os.path.isfile(config):
            raise ValueError(
                f"There are no credentials for OCI: {config!r} is not a file. Write one, or set OCI_CONFIG_FILE to "
                f"where it is."
            )
        super().__init__(f"oci://{bucket}/{self.prefix}", config=config)

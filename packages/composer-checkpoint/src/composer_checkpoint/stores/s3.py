"""Amazon S3, and servers that speak its protocol."""

import os
from collections.abc import Mapping
from typing import Any, Final

from composer_checkpoint.stores.base import Progress
from composer_checkpoint.stores.fsspec_store import FsspecObjectStore

__all__ = ["S3ObjectStore"]

_EXTRA_ARGS: Final = {
    "ACL",
    "CacheControl",
    "ChecksumAlgorithm",
    "ContentDisposition",
    "ContentEncoding",
    "ContentLanguage",
    "ContentType",
    "ExpectedBucketOwner",
    "Expires",
    "GrantFullControl",
    "GrantRead",
    "GrantReadACP",
    "GrantWriteACP",
    "Metadata",
    "ObjectLockLegalHoldStatus",
    "ObjectLockMode",
    "ObjectLockRetainUntilDate",
    "RequestPayer",
    "SSECustomerAlgorithm",
    "SSECustomerKey",
    "SSECustomerKeyMD5",
    "SSEKMSEncryptionContext",
    "SSEKMSKeyId",
    "ServerSideEncryption",
    "StorageClass",
    "Tagging",
    "WebsiteRedirectLocation",
}


class S3ObjectStore(FsspecObjectStore):
    """A bucket of S3, or of a server that speaks its protocol (MinIO, Ceph, R2, ...).

    What is not given comes from where the AWS tools look for it. The variable `S3_ENDPOINT_URL` names another server,
    and `S3_CANNED_ACL` an access rule for each object. Large files are sent in parts, several at a time.

    Args:
        bucket: The bucket.
        prefix: Put before each name.
        region_name: Where the bucket is.
        endpoint_url: The server.
        aws_access_key_id: Who asks.
        aws_secret_access_key: The proof of it.
        aws_session_token: For credentials that expire.
        client_config: Settings of botocore's client, such as `{'max_pool_connections': 20}`.
        transfer_config: `max_concurrency` and `multipart_chunksize` (in bytes), as a mapping.

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
            config_kwargs={"retries": {"mode": "adaptive"}, **(client_config or {})},
            use_listings_cache=False,
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
        """Copy a local file to the bucket; as `FsspecObjectStore.upload_object`.

        Args:
            object_name: The name it gets.
            filename: The file.
            callback: Called with the bytes sent and the file's size.
            overwrite: Whether an object that has the name is replaced.
            **kwargs: Only `ExtraArgs`, a mapping with what S3 takes for an object, such as `{'ACL': 'private'}`.

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
            extra.setdefault("ACL", canned_acl)
        chunks = {} if self._chunk_bytes is None else {"chunksize": self._chunk_bytes}
        super().upload_object(object_name, filename, callback, overwrite=overwrite, **chunks, **extra)

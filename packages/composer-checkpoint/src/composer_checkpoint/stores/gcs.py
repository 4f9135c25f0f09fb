"""Google Cloud Storage."""

import importlib.util
import os
from typing import Any

from composer_checkpoint.stores.fsspec_store import FsspecObjectStore, require_package

__all__ = ["GCSObjectStore"]

_S3_FACE = "https://storage.googleapis.com"


class GCSObjectStore(FsspecObjectStore):
    """A bucket of Google Cloud Storage.

    With the variables `GCS_KEY` and `GCS_SECRET` (an HMAC key) it is reached through its S3 face, which needs the
    extra `s3`; otherwise with Google's default credentials, which needs the extra `gcs`.

    Args:
        bucket: The bucket.
        prefix: Put before each name.

    Raises:
        ValueError: If there are no credentials.
        ImportError: If the package for it is not installed, with the line that installs it.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.bucket, self.prefix = bucket, prefix.strip("/")
        key, secret = os.environ.get("GCS_KEY"), os.environ.get("GCS_SECRET")
        self.use_gcs_sdk = not (key and secret)
        if self.use_gcs_sdk:
            super().__init__(f"gs://{bucket}/{self.prefix}", use_listings_cache=False, **_default_credentials())
            return
        super().__init__(
            f"s3://{bucket}/{self.prefix}",
            endpoint_url=_S3_FACE,
            key=key,
            secret=secret,
            client_kwargs={"region_name": "auto"},
            use_listings_cache=False,
        )
        self.uri = f"gs://{bucket}/{self.prefix}".rstrip("/")


def _default_credentials() -> dict[str, Any]:
    require_package("gs://")
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return {"token": "anon"}
    # gcsfs would look further, and at the end go on without any.
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

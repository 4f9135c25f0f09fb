"""Oracle Cloud Infrastructure's object storage."""

import os

from composer_checkpoint.stores.fsspec_store import FsspecObjectStore

__all__ = ["OCIObjectStore"]


class OCIObjectStore(FsspecObjectStore):
    """A bucket of OCI.

    Args:
        bucket: The bucket, or `bucket@namespace`; without a namespace, that of the credentials.
        prefix: Put before each name.

    Raises:
        ValueError: If the file of credentials, which the variable `OCI_CONFIG_FILE` may name, cannot be used.
        ImportError: If the package for it is not installed, with the line that installs it.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.bucket, self.prefix = bucket, prefix.strip("/")
        config = os.environ.get("OCI_CONFIG_FILE", os.path.expanduser("~/.oci/config"))
        if not os.path.isfile(config):
            raise ValueError(
                f"There are no credentials for OCI: {config!r} is no file. Write one, or set OCI_CONFIG_FILE to where "
                f"it is."
            )
        super().__init__(f"oci://{bucket}/{self.prefix}", config=config)

"""Azure Blob Storage."""

import os

from composer_checkpoint.stores.fsspec_store import FsspecObjectStore

__all__ = ["AzureObjectStore"]


class AzureObjectStore(FsspecObjectStore):
    """A container of Azure Blob Storage.

    The account is that of `AZURE_ACCOUNT_NAME` and `AZURE_ACCOUNT_ACCESS_KEY`; what is not set there comes from where
    the Azure tools look for it (`AZURE_STORAGE_CONNECTION_STRING`, `AZURE_STORAGE_SAS_TOKEN`, ...).

    Args:
        container: The container.
        prefix: Put before each name.

    Raises:
        ImportError: If the package for it is not installed, with the line that installs it.
    """

    def __init__(self, container: str, prefix: str = "") -> None:
        self.container, self.prefix = container, prefix.strip("/")
        given = {
            "account_name": os.environ.get("AZURE_ACCOUNT_NAME"),
            "account_key": os.environ.get("AZURE_ACCOUNT_ACCESS_KEY"),
        }
        options = {name: value for name, value in given.items() if value}
        super().__init__(f"az://{container}/{self.prefix}", use_listings_cache=False, **options)

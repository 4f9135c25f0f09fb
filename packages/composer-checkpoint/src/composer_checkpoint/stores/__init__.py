"""Object stores for checkpoints, with one interface, `ObjectStore`.

`FsspecObjectStore` takes any address that fsspec supports. The others have the names and arguments of Composer's object
stores.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_checkpoint.stores.base import ObjectStore, ObjectStoreTransientError
    from composer_checkpoint.stores.cloud import (
        AzureObjectStore,
        GCSObjectStore,
        LibcloudObjectStore,
        OCIObjectStore,
        S3ObjectStore,
    )
    from composer_checkpoint.stores.databricks import MLFlowObjectStore, UCObjectStore
    from composer_checkpoint.stores.fsspec import FsspecObjectStore
    from composer_checkpoint.stores.sftp import SFTPObjectStore

# Home module of each public name, imported on first use, since the stores import fsspec.
_NAMES = {
    "base": "ObjectStore ObjectStoreTransientError",
    "cloud": "AzureObjectStore GCSObjectStore LibcloudObjectStore OCIObjectStore S3ObjectStore",
    "databricks": "MLFlowObjectStore UCObjectStore",
    "fsspec": "FsspecObjectStore",
    "sftp": "SFTPObjectStore",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = [
    "ObjectStore",
    "ObjectStoreTransientError",
    "FsspecObjectStore",
    "S3ObjectStore",
    "GCSObjectStore",
    "AzureObjectStore",
    "OCIObjectStore",
    "SFTPObjectStore",
    "LibcloudObjectStore",
    "UCObjectStore",
    "MLFlowObjectStore",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Stored in the module, so that later accesses do not call this function.
    value = globals()[name] = getattr(import_module(f"composer_checkpoint.stores.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

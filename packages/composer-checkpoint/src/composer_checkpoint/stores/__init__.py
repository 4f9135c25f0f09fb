"""Stores of checkpoints: one interface, `ObjectStore`, to the file systems of fsspec.

`FsspecObjectStore` takes any address. The others have the names and arguments of Composer's object stores.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_checkpoint.stores.base import ObjectStore as ObjectStore
    from composer_checkpoint.stores.base import ObjectStoreTransientError as ObjectStoreTransientError
    from composer_checkpoint.stores.cloud import AzureObjectStore as AzureObjectStore
    from composer_checkpoint.stores.cloud import GCSObjectStore as GCSObjectStore
    from composer_checkpoint.stores.cloud import LibcloudObjectStore as LibcloudObjectStore
    from composer_checkpoint.stores.cloud import OCIObjectStore as OCIObjectStore
    from composer_checkpoint.stores.cloud import S3ObjectStore as S3ObjectStore
    from composer_checkpoint.stores.databricks import MLFlowObjectStore as MLFlowObjectStore
    from composer_checkpoint.stores.databricks import UCObjectStore as UCObjectStore
    from composer_checkpoint.stores.fsspec import FsspecObjectStore as FsspecObjectStore
    from composer_checkpoint.stores.sftp import SFTPObjectStore as SFTPObjectStore

_HOME = {
    "ObjectStore": "base",
    "ObjectStoreTransientError": "base",
    "FsspecObjectStore": "fsspec",
    "S3ObjectStore": "cloud",
    "GCSObjectStore": "cloud",
    "AzureObjectStore": "cloud",
    "OCIObjectStore": "cloud",
    "SFTPObjectStore": "sftp",
    "LibcloudObjectStore": "cloud",
    "UCObjectStore": "databricks",
    "MLFlowObjectStore": "databricks",
}
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
    # Stored, so that the next access does not come here.
    value = globals()[name] = getattr(import_module(f"composer_checkpoint.stores.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

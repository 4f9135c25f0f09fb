"""Places that hold checkpoints: one interface, `ObjectStore`, over what fsspec can reach.

`FsspecObjectStore` takes any address. The others have the names and arguments that Composer's users know.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_checkpoint.stores.azure import AzureObjectStore as AzureObjectStore
    from composer_checkpoint.stores.base import ObjectStore as ObjectStore
    from composer_checkpoint.stores.base import ObjectStoreTransientError as ObjectStoreTransientError
    from composer_checkpoint.stores.fsspec_store import FsspecObjectStore as FsspecObjectStore
    from composer_checkpoint.stores.gcs import GCSObjectStore as GCSObjectStore
    from composer_checkpoint.stores.libcloud import LibcloudObjectStore as LibcloudObjectStore
    from composer_checkpoint.stores.mlflow import MLFlowObjectStore as MLFlowObjectStore
    from composer_checkpoint.stores.oci import OCIObjectStore as OCIObjectStore
    from composer_checkpoint.stores.s3 import S3ObjectStore as S3ObjectStore
    from composer_checkpoint.stores.sftp import SFTPObjectStore as SFTPObjectStore
    from composer_checkpoint.stores.unity_catalog import UCObjectStore as UCObjectStore

_HOME = {
    "ObjectStore": "base",
    "ObjectStoreTransientError": "base",
    "FsspecObjectStore": "fsspec_store",
    "S3ObjectStore": "s3",
    "GCSObjectStore": "gcs",
    "AzureObjectStore": "azure",
    "OCIObjectStore": "oci",
    "SFTPObjectStore": "sftp",
    "LibcloudObjectStore": "libcloud",
    "UCObjectStore": "unity_catalog",
    "MLFlowObjectStore": "mlflow",
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
    value = globals()[name] = getattr(import_module(f"composer_checkpoint.stores.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Places that hold checkpoints, behind one interface."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer.utils.object_store.mlflow_object_store import (
        MLFLOW_EXPERIMENT_ID_FORMAT_KEY as MLFLOW_EXPERIMENT_ID_FORMAT_KEY,
    )
    from composer.utils.object_store.mlflow_object_store import MLFLOW_RUN_ID_FORMAT_KEY as MLFLOW_RUN_ID_FORMAT_KEY
    from composer_checkpoint.stores import AzureObjectStore as AzureObjectStore
    from composer_checkpoint.stores import FsspecObjectStore as FsspecObjectStore
    from composer_checkpoint.stores import GCSObjectStore as GCSObjectStore
    from composer_checkpoint.stores import LibcloudObjectStore as LibcloudObjectStore
    from composer_checkpoint.stores import MLFlowObjectStore as MLFlowObjectStore
    from composer_checkpoint.stores import ObjectStore as ObjectStore
    from composer_checkpoint.stores import ObjectStoreTransientError as ObjectStoreTransientError
    from composer_checkpoint.stores import OCIObjectStore as OCIObjectStore
    from composer_checkpoint.stores import S3ObjectStore as S3ObjectStore
    from composer_checkpoint.stores import SFTPObjectStore as SFTPObjectStore
    from composer_checkpoint.stores import UCObjectStore as UCObjectStore
    from composer_checkpoint.stores.opening import build_remote_backend as build_remote_backend

_STORES = [
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
__all__ = [
    "AzureObjectStore",
    "FsspecObjectStore",
    "GCSObjectStore",
    "LibcloudObjectStore",
    "MLFLOW_EXPERIMENT_ID_FORMAT_KEY",
    "MLFLOW_RUN_ID_FORMAT_KEY",
    "MLFlowObjectStore",
    "OCIObjectStore",
    "ObjectStore",
    "ObjectStoreTransientError",
    "S3ObjectStore",
    "SFTPObjectStore",
    "UCObjectStore",
    "build_remote_backend",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer_checkpoint.stores": _STORES,
        "composer_checkpoint.stores.opening": ["build_remote_backend"],
        "composer.utils.object_store.mlflow_object_store": [
            "MLFLOW_EXPERIMENT_ID_FORMAT_KEY",
            "MLFLOW_RUN_ID_FORMAT_KEY",
        ],
    },
    submodules=[
        "gcs_object_store",
        "libcloud_object_store",
        "mlflow_object_store",
        "object_store",
        "oci_object_store",
        "s3_object_store",
        "sftp_object_store",
        "uc_object_store",
        "utils",
    ],
)
